"""What the queue's commands share."""

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
from django_mysqlqueue.service.publishing import queue_alias
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import LOCK_SECONDS, is_server, limited_settings

APP = ConsumerGroup._meta.app_label


def database_of(alias: str | None) -> str:
    """The queue's database, or the one that ``--database`` names.

    Raises:
        CommandError: there is none of that name.
    """
    if alias is not None and alias not in connections:
        raise CommandError(f"There is no database {alias!r} in DATABASES.")
    return queue_alias(alias)


def require_tables(using: str) -> None:
    """Says what to do instead of failing at the first statement.

    Older code runs on a newer schema, so that subscribers can be replaced one
    by one; newer code on an older schema does not.

    Raises:
        CommandError: the queue's tables are not there, or lack migrations.
        django.db.Error: the database refuses or does not answer.
    """
    migrate = failures.migrate_command(using)
    if ConsumerGroup._meta.db_table not in connections[using].introspection.table_names():
        hint = (
            ""
            if router.allow_migrate_model(using, ConsumerGroup)
            else " (The database routers keep them out of it: see allow_migrate.)"
        )
        raise CommandError(f"The queue's tables are not in the database {using!r}: run {migrate}.{hint}")
    missing = unapplied_migrations(using)
    if missing:
        raise CommandError(
            f"The queue's tables in the database {using!r} are older than this code; "
            f"migrations that are missing: {', '.join(missing)}. Run {migrate}."
        )


def unapplied_migrations(using: str) -> list[str]:
    """The names of the queue's migrations that have not been applied to a database, in order."""
    executor = MigrationExecutor(connections[using])
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes(APP))
    return [migration.name for migration, _ in plan if migration.app_label == APP]


@contextlib.contextmanager
def errors_in_words(using: str) -> Iterator[None]:
    """Turns errors of the database into one line and exit status 1; ``--traceback`` shows all of it."""
    try:
        yield
    except Error as error:
        raise CommandError(failures.explain(using, error)) from error
    except CommitOutcomeUnknown as error:
        raise CommandError(f"{error}. The last change may have been committed: run the command again.") from error


class LimitedCommand(BaseCommand):
    """A command that gives up on a database server that does not answer."""

    read_timeout: ClassVar[float] = LOCK_SECONDS
    """Seconds to wait for each answer, unless ``OPTIONS`` says otherwise; no statement of the command takes longer."""

    def execute(self, *args: Any, **options: Any) -> str | None:
        # Before the system checks, some of which ask databases.
        with self._limited(options.get("database")):
            return super().execute(*args, **options)

    def check(self, *args: Any, **kwargs: Any) -> None:
        # From Django 6.1 on, checks of models ask each database what it can do.
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
            yield  # the checks or the command itself say so
            return
        # One that is open (``call_command`` in a program) keeps the limits that it has.
        before, was_open = connection.settings_dict, connection.connection is not None
        connection.settings_dict = limited_settings(connection, read=self.read_timeout)
        try:
            yield
        finally:
            connection.settings_dict = before
            if is_server(connection) and not was_open and not connection.in_atomic_block:
                connection.close()


class QueueCommand(LimitedCommand):
    """A command on the queue's database; ``run_on`` gets its alias."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database",
            metavar="ALIAS",
            help="alias of the queue's database (default: MYSQLQUEUE['DATABASE'], else the router's choice)",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        using = database_of(options["database"])
        with errors_in_words(using), sessions.sound(using):
            require_tables(using)
            # A project with autocommit off would never commit what the queue's operations write.
            if not connections[using].get_autocommit() and not connections[using].in_atomic_block:
                connections[using].set_autocommit(True)
            self.run_on(using, options)

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        raise NotImplementedError
