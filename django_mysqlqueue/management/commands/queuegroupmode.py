"""``manage.py queuegroupmode``: change the mode of a consumer group."""

from __future__ import annotations

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import GROUP, Argument, OperationCommand
from django_mysqlqueue.models import ConsumerGroup


class Command(OperationCommand):
    """Change the mode of a consumer group."""

    help = "Change the delivery mode of a consumer group. Stop its subscribers first."
    operation = staticmethod(operations.set_group_mode)
    arguments = (
        *GROUP,
        Argument("mode", choices=ConsumerGroup.Mode.values, help="new mode, the one that the group's handler declares"),
    )
