"""``manage.py queueredrive``: publish dead letters again, for the groups that dead-lettered them."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import OperationCommand, moment
from django_mysqlqueue.operations.results import Result


class DeadLettersCommand(OperationCommand):
    """Base class of commands that act on a selection of dead letters."""

    reports_progress = True

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("topic", help="topic of the messages, or its DLQ topic")
        parser.add_argument("--group", help="only dead letters of this consumer group")
        parser.add_argument(
            "--id", action="append", help="only dead letters of the message with this id (may be repeated)"
        )
        parser.add_argument(
            "--offset",
            type=int,
            action="append",
            help="only the dead letter at this offset of the DLQ (may be repeated)",
        )
        parser.add_argument("--error", metavar="TEXT", help="only dead letters whose error contains TEXT")
        parser.add_argument(
            "--since",
            metavar="WHEN",
            help="only messages dead-lettered at or after WHEN (ISO 8601; in TIME_ZONE if it has no UTC offset)",
        )
        parser.add_argument("--until", metavar="WHEN", help="only messages dead-lettered at or before WHEN")
        parser.add_argument("--limit", type=int, metavar="N", help="maximum number of dead letters to change")

    @staticmethod
    def selection(options: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that ``redrive`` and ``discard`` share.

        Raises:
            CommandError: ``--since`` or ``--until`` is not a valid date and time.
        """
        return {
            "ids": options["id"],
            "offsets": options["offset"],
            "group": options["group"],
            "error": options["error"],
            "since": moment(options["since"]),
            "until": moment(options["until"]),
            "limit": options["limit"],
        }


class Command(DeadLettersCommand):
    """Redrive dead letters."""

    help = "Publish dead letters again, each only for the consumer group that dead-lettered it."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--rate", type=float, metavar="N", help="maximum number of messages per second")

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        return operations.redrive(options["topic"], rate=options["rate"], **self.selection(options), **how)
