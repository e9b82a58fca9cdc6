"""``manage.py queuepause``: pause a consumer group, or a task of a queue of jobs."""

from __future__ import annotations

import dataclasses
from typing import Any

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import GROUP, Argument, OperationCommand, task_meant
from django_mysqlqueue.operations.results import Result


class Command(OperationCommand):
    """Pause a consumer group."""

    help = (
        "Pause a consumer group. Its subscribers finish the messages that they have claimed, keep their leases, and "
        "claim no more messages until you resume the group."
    )
    operation = staticmethod(operations.pause)
    arguments = (
        *GROUP,
        Argument("--task", metavar="PATH", help="pause only the task with this dotted path, in a queue of jobs"),
    )

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        result = super().operate(options, **how)
        # A task may be paused before the deployment that brings it.
        warnings = (*result.warnings, *task_meant(options["task"])) if result.planned or result.changed else ()
        return dataclasses.replace(result, warnings=warnings)
