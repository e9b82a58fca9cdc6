"""``manage.py queuecancel``: delete scheduled messages before they come due."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.management.commands.queuescheduled import ScheduledCommand
from django_mysqlqueue.operations.results import ScheduledResult


class Command(ScheduledCommand):
    """Cancel scheduled messages."""

    help = "Cancel scheduled messages: delete them before they come due, so that no consumer group receives them."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("topic", help="topic that the messages were published to")
        parser.add_argument("id", nargs="+", help="id that publish() returned")

    def change(self, options: dict[str, Any], **how: Any) -> ScheduledResult:
        return operations.cancel(options["topic"], options["id"], key=options["key"], **how)
