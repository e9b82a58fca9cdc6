"""``manage.py queuecancel``: deletes scheduled messages before they come due."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue.management.commands.queuescheduled import LEFT_ALONE, ScheduledCommand, left_alone
from django_mysqlqueue.management.operations import Plan, counted, who
from django_mysqlqueue.operations import rescheduling


class Command(ScheduledCommand):
    help = "Cancel scheduled messages: delete them before they come due, so that no consumer group receives them."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("topic", help="topic that the messages were published to")
        parser.add_argument("id", nargs="+", help="ids that publish() returned")
        parser.add_argument("--reason", default="", help="reason, for the audit log")

    def plan(self, using: str, options: dict[str, Any]) -> Plan:
        rows = self.chosen(using, options)

        def cancel(progress: object) -> int:
            return rescheduling.cancel(using, rows, by=who(), topic=options["topic"], reason=options["reason"])

        summary = [f"{counted(len(rows), 'scheduled message')} will be deleted."]
        return Plan("cancel", summary, len(rows), cancel, {"not_scheduled": self.missing}, nothing=LEFT_ALONE)

    def done(self, plan: Plan, changed: int) -> str:
        return f"{changed} cancelled.{left_alone(plan, changed)}"
