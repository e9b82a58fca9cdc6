"""Base classes and checks of the queue's commands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error, connections, router
from django.db.migrations.executor import MigrationExecutor

from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import LOCK_SECONDS, is_server, limited_settings

APP = ConsumerGroup._meta.app_label


def database_of(alias: str | None) -> str:
    """Return the alias of the queue's database.

    Args:
        alias: value of ``--database``; if None, ``MYSQLQUEUE["DATABASE"]`` or the router decides.

    Raises:
        CommandError: ``DATABASES`` has no such alias.
    """
    if alias is not None and alias not in connections:
        raise CommandError(f"DATABASES has no alias {alias!r}.")
    return queue_alias(alias)


def add_database(parser: CommandParser) -> None:
    """Add the option ``--database``."""
    parser.add_argument(
        "--database",
        metavar="ALIAS",
        help="alias of the queue's database (default: MYSQLQUEUE['DATABASE'], else the router's choice)",
    )


def require_tables(using: str) -> None:
    """Require that the queue's tables exist and have all migrations of this version.

    Newer migrations than this version's are accepted, so that subscribers can be upgraded one by one.

    Args:
        using: alias of the queue's database.

    Raises:
        CommandError: the tables do not exist, or migrations are missing; the text names the command to run.
        django.db.Error: the database refuses or does not answer.
    """
    migrate = failures.migrate_command(using)
    if ConsumerGroup._meta.db_table not in connections[using].introspection.table_names():
        hint = (
            ""
            if router.allow_migrate_model(using, ConsumerGroup)
            else " The database routers do not allow these tables there: see allow_migrate."
        )
        raise CommandError(f"Database {using!r} does not have the queue's tables. Run {migrate}.{hint}")
    missing = unapplied_migrations(using)
    if missing:
        raise CommandError(
            f"The queue's tables in database {using!r} are older than this code. "
            f"Missing migrations: {', '.join(missing)}. Run {migrate}."
        )


def unapplied_migrations(using: str) -> list[str]:
    """Return the names of the queue's migrations that are not applied to a database, in order."""
    executor = MigrationExecutor(connections[using])
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes(APP))
    return [migration.name for migration, _ in plan if migration.app_label == APP]


@contextlib.contextmanager
def database_errors(using: str) -> Iterator[None]:
    """Turn database errors into a one-line ``CommandError``; ``--traceback`` shows the original error."""
    try:
        yield
    except Error as error:
        raise CommandError(failures.explain(using, error)) from error
    except CommitOutcomeUnknown as error:
        raise CommandError(f"{error}. The last change may have been committed: run the command again.") from error


class LimitedCommand(BaseCommand):
    """A command with a time limit for each answer of the database server."""

    read_timeout: ClassVar[float] = LOCK_SECONDS
    """Seconds to wait for each answer, unless ``OPTIONS`` of the database has its own ``read_timeout``.

    It must be longer than any statement of the command takes.
    """

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the command with the time limit."""
        # This includes the system checks, some of which query databases.
        with self._limited(options.get("database")):
            return super().execute(*args, **options)

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Run the system checks; a database error becomes a ``CommandError``."""
        # Since Django 6.1, model checks query each database for its features.
        try:
            super().check(*args, **kwargs)
        except Error as error:
            alias = failures.alias_of(error)
            if alias is None:
                raise
            raise CommandError(failures.explain(alias, error)) from error

    @contextlib.contextmanager
    def _limited(self, alias: str | None) -> Iterator[None]:
        try:
            connection = connections[database_of(alias)]
        except (CommandError, ImproperlyConfigured):
            yield  # the checks or the command itself report it
            return
        # An open connection (``call_command`` in a program) keeps its limits.
        before, was_open = connection.settings_dict, connection.connection is not None
        connection.settings_dict = limited_settings(connection, read=self.read_timeout)
        try:
            yield
        finally:
            connection.settings_dict = before
            if is_server(connection) and not was_open and not connection.in_atomic_block:
                connection.close()


class QueueCommand(LimitedCommand):
    """A command on the queue's database."""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add ``--database``."""
        add_database(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Check the queue's tables and call ``run_on``."""
        using = database_of(options["database"])
        with database_errors(using), sessions.sound(using):
            require_tables(using)
            # In a project with autocommit off, the writes of operations would never be committed.
            if not connections[using].get_autocommit() and not connections[using].in_atomic_block:
                connections[using].set_autocommit(True)
            self.run_on(using, options)

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        """Run the command.

        Args:
            using: alias of the queue's database.
            options: the command's options.
        """
        raise NotImplementedError
