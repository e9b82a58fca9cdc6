"""What the queue's commands share."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from django_mysqlqueue.service.publishing import queue_alias


class QueueCommand(BaseCommand):
    """A command on the queue's database; ``run_on`` gets its alias."""

    requires_migrations_checks = True

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--database", metavar="ALIAS", help="the queue's database alias (default: the setting's)")

    def handle(self, *args: Any, **options: Any) -> None:
        using = queue_alias(options["database"])
        if using not in connections:
            raise CommandError(f"There is no database {using!r} in DATABASES.")
        # A project with autocommit off would never commit what the queue's operations write.
        if not connections[using].get_autocommit() and not connections[using].in_atomic_block:
            connections[using].set_autocommit(True)
        self.run_on(using, options)

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        raise NotImplementedError
