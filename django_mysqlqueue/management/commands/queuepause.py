"""``manage.py queuepause``: pause a consumer group."""

from __future__ import annotations

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import GROUP, OperationCommand


class Command(OperationCommand):
    """Pause a consumer group."""

    help = (
        "Pause a consumer group. Its subscribers finish the messages that they have claimed, keep their leases, and "
        "claim no more messages until you resume the group."
    )
    operation = staticmethod(operations.pause)
    arguments = GROUP
