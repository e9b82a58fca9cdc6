"""The base class of the pipeline's commands: passes the project's connection and settings to code without Django."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue.management.base import QueueCommand
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service.databases import queue_aliases


class SparkCommand(QueueCommand):
    """A command of ``python -m django_mysqlqueue.pipeline`` on one database of the project's queue.

    An archive or a report is about one log, and the workers of a Spark session know one database. So the command does
    not go through all databases; if there are several, the output names the one that it works on.
    """

    name: str
    """Name of the command there."""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the arguments of the pipeline's command."""
        super().add_arguments(parser)
        _cli().command(self.name).add_arguments(parser)

    def of_project(self, using: str) -> dict[str, Any]:
        """Return further options that the command takes from the project's settings."""
        return {}

    def check_names(self, using: str, options: dict[str, Any]) -> None:
        """Refuse unknown names before Spark starts, which takes seconds."""

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        """Run the pipeline's command with the project's connection and settings."""
        from django_mysqlqueue.pipeline import project
        from django_mysqlqueue.pipeline.errors import PipelineError

        self.check_names(using, options)
        given = {**options, "path": options["path"] or get_settings().archive_path, **self.of_project(using)}
        try:
            _cli().command(self.name).work(given, project.place(using), self._naming(using, options))
        except PipelineError as error:
            raise CommandError(str(error)) from error

    def _naming(self, using: str, options: dict[str, Any]) -> Callable[[str], object]:
        """Return a function that writes the output. With several databases, the output names the one."""
        if len(queue_aliases()) == 1:
            return self.stdout.write
        if options.get("format") == "json":
            return lambda text: self.stdout.write(json.dumps({"database": using, **json.loads(text)}))
        self.stdout.write(f"Database {using!r}")
        return self.stdout.write


def _cli() -> Any:
    try:
        from django_mysqlqueue.pipeline import cli
    except ImportError as error:
        raise CommandError(
            f"The pipeline needs the extra 'spark': run pip install 'django-mysqlqueue[spark]' ({error})."
        ) from error
    return cli
