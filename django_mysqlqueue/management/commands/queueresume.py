"""``manage.py queueresume``: resume a paused consumer group."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import OperationCommand, add_group
from django_mysqlqueue.operations.results import Result


class Command(OperationCommand):
    """Resume a paused consumer group."""

    help = "Resume a paused consumer group."

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add_group(parser)

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        return operations.resume(options["group"], options["topic"], **how)
