"""What the queue's commands share."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, OperationalError, connections, router
from django.db.migrations.executor import MigrationExecutor

from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.service.publishing import queue_alias

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
        CommandError: the queue's tables are not there, or lack migrations, or the server does not answer.
    """
    try:
        connections[using].ensure_connection()
    except OperationalError as error:
        raise CommandError(f"The database {using!r} does not answer: {error}") from error
    migrate = "manage.py migrate" + ("" if using == DEFAULT_DB_ALIAS else f" --database {using}")
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


class QueueCommand(BaseCommand):
    """A command on the queue's database; ``run_on`` gets its alias."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", metavar="ALIAS", help="the queue's database alias (default: the setting's)")

    def handle(self, *args: Any, **options: Any) -> None:
        using = database_of(options["database"])
        with sessions.sound(using):
            require_tables(using)
            # A project with autocommit off would never commit what the queue's operations write.
            if not connections[using].get_autocommit() and not connections[using].in_atomic_block:
                connections[using].set_autocommit(True)
            self.run_on(using, options)

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        raise NotImplementedError
