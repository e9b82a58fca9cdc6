"""The base class of the pipeline's commands: passes the project's connection and settings to code without Django."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError, CommandParser
from django.db import connections

from django_mysqlqueue.management.base import QueueCommand
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service.databases import queue_aliases

if TYPE_CHECKING:
    from pyspark_mysqlqueue.databases import Place

PASSED_ON = (
    "host",
    "port",
    "user",
    "passwd",
    "password",
    "db",
    "database",
    "unix_socket",
    "ssl",
    "ssl_mode",
    "read_default_file",
    "read_default_group",
)
"""The driver's arguments that locate the database. The others configure Django's own connection."""


class SparkCommand(QueueCommand):
    """A command of ``python -m pyspark_mysqlqueue`` on one database of the project's queue.

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
        from pyspark_mysqlqueue.errors import PipelineError

        self.check_names(using, options)
        given = {**options, "path": options["path"] or get_settings().archive_path, **self.of_project(using)}
        try:
            _cli().perform(self.name, given, project_place(using), self._naming(using, options))
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


def project_place(using: str) -> Place:
    """Return the queue's database of this project, and pass it to Spark's workers through the environment.

    Call it before the Spark session starts: the workers inherit the environment of that moment.

    Args:
        using: The alias of the queue's database.

    Raises:
        PipelineError: A Spark session is running whose workers have another database.
    """
    from pyspark_mysqlqueue.databases import URL_VARIABLE, Place
    from pyspark_mysqlqueue.errors import PipelineError

    connection = connections[using]
    parameters = connection.get_connection_params()
    if connection.vendor == "sqlite":
        # Workers may run in another folder.
        details = {"sqlite_file": str(Path(parameters["database"]).absolute())}
    else:
        details = {name: parameters[name] for name in PASSED_ON if name in parameters}
    text = json.dumps(details, sort_keys=True)
    if os.environ.get(URL_VARIABLE) != text:
        spark = sys.modules.get("pyspark")  # Reports need none.
        if spark is not None and spark.SparkContext._gateway is not None:
            raise PipelineError(
                f"the workers of the running Spark session do not know the database {using!r}: stop the session "
                f"first, or start it with {URL_VARIABLE} set"
            )
        os.environ[URL_VARIABLE] = text
    return Place()


def erase_in_archive(
    using: str, path: str, topics: Sequence[str], key: str, *, dry_run: bool
) -> tuple[int, int] | None:
    """Erase a key in the archive, in processes of this machine.

    Returns:
        The numbers of messages and of deleted files; None if there is no archive.
    """
    _cli()
    from pyspark_mysqlqueue.archive import run
    from pyspark_mysqlqueue.archive.root import Root
    from pyspark_mysqlqueue.errors import PipelineError

    try:
        job = run.Job(None, project_place(using), Root(path))
        erased = run.erase(job, topics, key, dry_run=dry_run)
    except PipelineError as error:
        raise CommandError(str(error)) from error
    return None if erased is None else (erased.rows, erased.files)


def _cli() -> Any:
    try:
        from pyspark_mysqlqueue import cli
    except ImportError as error:
        raise CommandError(
            f"The pipeline needs the extra 'spark': run pip install 'django-mysqlqueue[spark]' ({error})."
        ) from error
    return cli
