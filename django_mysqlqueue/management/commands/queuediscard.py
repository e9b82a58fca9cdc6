"""``manage.py queuediscard``: delete dead letters."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError

from django_mysqlqueue import operations
from django_mysqlqueue.management.commands.queueredrive import DEAD_LETTERS
from django_mysqlqueue.management.operations import OperationCommand
from django_mysqlqueue.operations.results import Result


class Command(OperationCommand):
    """Delete dead letters."""

    help = (
        "Delete dead letters. This cannot be undone. The audit log records who did it, when and why: --reason is "
        "required, except with --dry-run."
    )
    reports_progress = True
    operation = staticmethod(operations.discard)
    arguments = DEAD_LETTERS

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        if not (options["dry_run"] or options["reason"].strip()):
            raise CommandError("--reason is required: the audit log records why the messages were deleted.")
        return super().operate(options, **how)
