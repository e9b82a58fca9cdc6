"""``manage.py queuedeadletter``: dead-letter messages that a group is retrying."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import OperationCommand, add_group
from django_mysqlqueue.operations.results import Result


class Command(OperationCommand):
    """Dead-letter messages."""

    help = (
        "Move messages of a consumer group to the DLQ instead of retrying them. Their remaining attempts are skipped. "
        "The messages must be waiting for another attempt, or their subscriber must be lost. Subscribers can keep "
        "running. If a live subscriber holds one of the messages, the command changes nothing."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_group(parser)
        parser.add_argument("offset", nargs="*", type=int, help="offset of a message in the log")
        parser.add_argument("--id", action="append", help="id of a message, instead of its offset (may be repeated)")

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        if not (options["offset"] or options["id"]):
            raise CommandError("Pass the offsets of the messages, or their ids with --id.")
        return operations.dead_letter(
            options["group"], options["topic"], ids=options["id"], offsets=options["offset"] or None, **how
        )
