"""``manage.py queuegroupmode``: change the mode of a consumer group."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import OperationCommand, add_group
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.operations.results import Result


class Command(OperationCommand):
    """Change the mode of a consumer group."""

    help = "Change the delivery mode of a consumer group. Stop its subscribers first."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_group(parser)
        parser.add_argument(
            "mode", choices=ConsumerGroup.Mode.values, help="new mode, the one that the group's handler declares"
        )

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        return operations.set_group_mode(options["group"], options["topic"], options["mode"], **how)
