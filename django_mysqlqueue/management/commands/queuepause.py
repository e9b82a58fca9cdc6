"""``manage.py queuepause``: pause a consumer group."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import OperationCommand, add_group
from django_mysqlqueue.operations.results import Result


class Command(OperationCommand):
    """Pause a consumer group."""

    help = (
        "Pause a consumer group. Its subscribers finish the messages that they have claimed, keep their leases, and "
        "claim no more messages until you resume the group."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_group(parser)

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        return operations.pause(options["group"], options["topic"], **how)
