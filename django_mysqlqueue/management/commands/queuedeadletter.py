"""``manage.py queuedeadletter``: dead-letter messages that a group is retrying."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import GROUP, Argument, OperationCommand
from django_mysqlqueue.operations.results import Result


class Command(OperationCommand):
    """Dead-letter messages."""

    help = (
        "Move messages of a consumer group to the DLQ instead of retrying them. Their remaining attempts are skipped. "
        "The messages must be waiting for another attempt, or their subscriber must be lost. Subscribers can keep "
        "running. If a live subscriber holds one of the messages, the command changes nothing."
    )
    operation = staticmethod(operations.dead_letter)
    arguments = (
        *GROUP,
        Argument(
            "offset",
            to="offsets",
            parse=lambda offsets: offsets or None,
            nargs="*",
            type=int,
            help="offset of a message in the log",
        ),
        Argument("--id", to="ids", action="append", help="id of a message, instead of its offset (may be repeated)"),
    )

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        if not (options["offset"] or options["id"]):
            raise CommandError("Pass the offsets of the messages, or their ids with --id.")
        return super().operate(options, **how)
