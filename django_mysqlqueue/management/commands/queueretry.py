"""``manage.py queueretry``: retry messages that are in backoff, now or at another time."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import OperationCommand, add_group, moment
from django_mysqlqueue.operations.results import Result


class Command(OperationCommand):
    """Retry messages now, or at another time."""

    help = (
        "Retry waiting messages immediately, or with --at at another time: messages that wait for another attempt "
        "after a failure, a nack or a snooze, or because their subscribers were lost repeatedly. The command changes "
        "all of them in a consumer group, or only those with the given ids, offsets or error."
    )
    reports_progress = True

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_group(parser)
        parser.add_argument("--id", action="append", help="only the message with this id (may be repeated)")
        parser.add_argument(
            "--offset", type=int, action="append", help="only the message at this offset (may be repeated)"
        )
        parser.add_argument("--error", metavar="TEXT", help="only messages whose last error contains TEXT")
        parser.add_argument(
            "--at",
            metavar="WHEN",
            help="retry them at WHEN instead of now (ISO 8601; in TIME_ZONE if it has no UTC offset)",
        )
        parser.add_argument("--reset-attempts", action="store_true", help="count the attempts from 1 again")

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        return operations.retry(
            options["group"],
            options["topic"],
            ids=options["id"],
            offsets=options["offset"],
            error=options["error"],
            at=moment(options["at"]),
            reset_attempts=options["reset_attempts"],
            **how,
        )
