"""``manage.py queueresume``: resume a paused consumer group, or a paused task."""

from __future__ import annotations

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import GROUP, Argument, OperationCommand


class Command(OperationCommand):
    """Resume a paused consumer group."""

    help = "Resume a paused consumer group."
    operation = staticmethod(operations.resume)
    arguments = (
        *GROUP,
        Argument("--task", metavar="PATH", help="resume only the task with this dotted path, in a queue of jobs"),
    )
