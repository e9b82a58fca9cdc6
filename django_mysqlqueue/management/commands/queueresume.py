"""``manage.py queueresume``: resume a paused consumer group."""

from __future__ import annotations

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import GROUP, OperationCommand


class Command(OperationCommand):
    """Resume a paused consumer group."""

    help = "Resume a paused consumer group."
    operation = staticmethod(operations.resume)
    arguments = GROUP
