"""What the pipeline's commands share: the project's connection and settings for what needs no Django."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.management.base import QueueCommand


class SparkCommand(QueueCommand):
    """A command of ``python -m django_mysqlqueue.pipeline`` on the project's queue."""

    name: str
    """As it is called there."""

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        _cli().command(self.name).add_arguments(parser)

    def of_project(self, using: str) -> dict[str, Any]:
        """What of the project's settings the work takes besides."""
        return {}

    def check_names(self, using: str, options: dict[str, Any]) -> None:
        """Refuses names that are not there, before Spark takes its seconds to start.

        Raises:
            CommandError: there is no such thing.
        """

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        from django_mysqlqueue.pipeline import project
        from django_mysqlqueue.pipeline.errors import PipelineError

        self.check_names(using, options)
        given = {**options, "path": options["path"] or get_settings().archive_path, **self.of_project(using)}
        try:
            _cli().command(self.name).work(given, project.place(using), self.stdout.write)
        except PipelineError as error:
            raise CommandError(str(error)) from error


def _cli() -> Any:
    try:
        from django_mysqlqueue.pipeline import cli
    except ImportError as error:
        raise CommandError(f"The pipeline needs pip install django-mysqlqueue[spark]: {error}") from error
    return cli
