"""``manage.py queuerelease``: release leases, or forget a lost subscriber."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import OperationCommand
from django_mysqlqueue.operations.results import Result


class Command(OperationCommand):
    """Release leases, or forget a lost subscriber."""

    help = "Release the leases of partitions (GROUP TOPIC KEY…), or forget a lost subscriber (--subscriber NAME)."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("group", nargs="?", help="consumer group")
        parser.add_argument("topic", nargs="?", help="topic that the group reads")
        parser.add_argument("key", nargs="*", help="key of a partition whose lease is released; at least one")
        parser.add_argument("--subscriber", metavar="NAME", help="lost subscriber to forget, with all its leases")

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        name = options["subscriber"]
        if (name is None) == (options["group"] is None):
            raise CommandError("Pass either partitions (GROUP TOPIC KEY…) or a subscriber (--subscriber NAME).")
        if name is not None:
            return operations.forget(name, **how)
        if not options["key"]:
            raise CommandError("Pass the partitions to release: GROUP TOPIC KEY…")
        return operations.release(options["group"], options["topic"], options["key"], **how)
