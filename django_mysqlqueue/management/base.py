"""What the queue's commands share."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, connections

from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.service.publishing import queue_alias


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

    Raises:
        CommandError: the queue's tables are not there.
    """
    if ConsumerGroup._meta.db_table not in connections[using].introspection.table_names():
        raise CommandError(
            f"The queue's tables are not in the database {using!r}: run manage.py migrate"
            + ("" if using == DEFAULT_DB_ALIAS else f" --database {using}")
            + "."
        )


class QueueCommand(BaseCommand):
    """A command on the queue's database; ``run_on`` gets its alias."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", metavar="ALIAS", help="the queue's database alias (default: the setting's)")

    def handle(self, *args: Any, **options: Any) -> None:
        using = database_of(options["database"])
        require_tables(using)
        # A project with autocommit off would never commit what the queue's operations write.
        if not connections[using].get_autocommit() and not connections[using].in_atomic_block:
            connections[using].set_autocommit(True)
        self.run_on(using, options)

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        raise NotImplementedError
