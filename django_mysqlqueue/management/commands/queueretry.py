"""``manage.py queueretry``: retry messages now that are in backoff."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import OperationCommand, add_group
from django_mysqlqueue.operations.results import Result


class Command(OperationCommand):
    """Retry messages now."""

    help = (
        "Retry waiting messages immediately: messages that wait for another attempt after a failure, a nack or a "
        "snooze. The command retries all of them in a consumer group, or only those with the given ids or offsets."
    )
    reports_progress = True

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_group(parser)
        parser.add_argument("--id", action="append", help="only the message with this id (may be repeated)")
        parser.add_argument(
            "--offset", type=int, action="append", help="only the message at this offset (may be repeated)"
        )
        parser.add_argument("--reset-attempts", action="store_true", help="count the attempts from 1 again")

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        return operations.retry(
            options["group"],
            options["topic"],
            ids=options["id"],
            offsets=options["offset"],
            reset_attempts=options["reset_attempts"],
            **how,
        )
