"""The operations of the dashboard: each has a form, a preview and a call of ``django_mysqlqueue.operations``."""

from __future__ import annotations

from django_mysqlqueue.admin.operations import (  # noqa: F401  # They declare the operations.
    dead_letters,
    errors,
    groups,
    publishing,
    quarantine,
    rows,
    schedules,
)
from django_mysqlqueue.admin.operations.base import OPERATIONS, respond

__all__ = ["OPERATIONS", "respond"]
