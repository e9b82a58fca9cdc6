"""``manage.py queuearchive``: the log as Parquet files."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.management.base import QueueCommand


class Command(QueueCommand):
    help = "Moves the log, range by range, into Parquet files; checks, merges and lets go of them."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        try:
            from django_mysqlqueue.pipeline import cli
        except ImportError as error:
            raise CommandError(f"The pipeline needs pip install django-mysqlqueue[spark]: {error}") from error
        cli.archive_arguments(parser)

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        from django_mysqlqueue.pipeline import cli, project
        from django_mysqlqueue.pipeline.errors import PipelineError

        path = options["path"] or get_settings().archive_path
        try:
            cli.archive({**options, "path": path}, project.place(using), self.stdout.write)
        except PipelineError as error:
            raise CommandError(str(error)) from error
