"""``manage.py queuepause``: pause a consumer group."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import OperationCommand, add_group
from django_mysqlqueue.operations.results import Result


class Command(OperationCommand):
    help = (
        "Pause a consumer group: its subscribers finish what they have claimed, keep their leases, and claim nothing "
        "more until it is resumed."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_group(parser)

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        return operations.pause(options["group"], options["topic"], **how)
