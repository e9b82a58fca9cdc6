"""``manage.py queuerelease``: release leases, or forget a lost subscriber."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import OperationCommand
from django_mysqlqueue.operations.results import Result, result_of
from django_mysqlqueue.service import heartbeats
from django_mysqlqueue.sql.session import Session


class Command(OperationCommand):
    """Release leases, or forget a lost subscriber."""

    every_database = True
    help = "Release the leases of partitions (GROUP TOPIC KEY…), or forget a lost subscriber (--subscriber NAME)."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("group", nargs="?", help="consumer group")
        parser.add_argument("topic", nargs="?", help="topic that the group reads")
        parser.add_argument("key", nargs="*", help="key of a partition whose lease is released; at least one")
        parser.add_argument("--subscriber", metavar="NAME", help="lost subscriber to forget, with all its leases")

    def handle(self, *args: Any, **options: Any) -> None:
        name = options["subscriber"]
        if (name is None) == (options["group"] is None):
            raise CommandError("Pass either partitions (GROUP TOPIC KEY…) or a subscriber (--subscriber NAME).")
        if name is None and not options["key"]:
            raise CommandError("Pass the partitions to release: GROUP TOPIC KEY…")
        super().handle(*args, **options)

    def run_on_each(self, aliases: Sequence[str], options: dict[str, Any]) -> None:
        """Forget the subscriber in each database that knows it."""
        self._known_in: set[str] = set()
        super().run_on_each(aliases, options)
        if not self._known_in:
            raise CommandError(f"There is no subscriber {options['subscriber']!r} in any of the databases.")

    def run_on(self, using: str, options: dict[str, Any]) -> None:
        name = options["subscriber"]
        if name is not None and len(self.databases(options)) > 1:
            if name not in heartbeats.names(Session(using)):
                text = f"There is no subscriber {name!r} here."
                nothing = result_of(Result, heartbeats.FORGET, 0, text, dry_run=options["dry_run"])
                if options["format"] == "json":
                    self.write_result(using, nothing)
                else:
                    self.write_text(nothing)
                return
            self._known_in.add(using)
        super().run_on(using, options)

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        if options["subscriber"] is not None:
            return operations.forget(options["subscriber"], **how)
        return operations.release(options["group"], options["topic"], options["key"], **how)
