"""``manage.py queuedropgroup``: delete a consumer group."""

from __future__ import annotations

from typing import Any

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import GROUP, OperationCommand


class Command(OperationCommand):
    """Drop a consumer group."""

    help = (
        "Delete a consumer group of a topic and all the group's state. GC no longer keeps messages for the group. "
        "If the command is interrupted, the group stays paused: run it again."
    )
    reports_progress = True
    counts_planned = False
    question = "Type the group's name to confirm: "
    operation = staticmethod(operations.drop_group)
    arguments = GROUP

    def agrees(self, answer: str, options: dict[str, Any]) -> bool:
        return answer == str(options["group"])
