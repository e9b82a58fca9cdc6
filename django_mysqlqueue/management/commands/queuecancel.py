"""``manage.py queuecancel``: deletes scheduled messages before they come due."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue.management.operations import OperationCommand, Plan, counted, who
from django_mysqlqueue.service import rescheduling


class Command(OperationCommand):
    help = "Cancels scheduled messages by the ids that manage.py queuescheduled lists."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("id", nargs="+", type=int, help="outbox ids")
        parser.add_argument("--reason", default="", help="for the record")

    def plan(self, using: str, options: dict[str, Any]) -> Plan:
        ids = options["id"]

        def cancel(progress: object) -> int:
            return rescheduling.cancel(using, ids, by=who(), reason=options["reason"])

        return Plan("cancel", [f"{counted(len(ids), 'scheduled message')} will be deleted."], len(ids), cancel)

    def done(self, plan: Plan, changed: int) -> str:
        gone = plan.total - changed
        return f"{changed} cancelled" + (f"; {gone} were not scheduled any more." if gone else ".")
