"""The operations of the dashboard: each has a form, a preview and a call of ``django_mysqlqueue.operations``."""

from __future__ import annotations

from django.http import Http404, HttpRequest, HttpResponse

from django_mysqlqueue.admin.context import DashboardContext
from django_mysqlqueue.admin.operations import (  # noqa: F401  # They declare the operations.
    base,
    dead_letters,
    errors,
    groups,
    publishing,
    quarantine,
    rows,
    schedules,
)
from django_mysqlqueue.admin.operations.base import OPERATIONS

__all__ = ["OPERATIONS", "respond"]


def respond(dashboard: DashboardContext, request: HttpRequest, name: str) -> HttpResponse:
    """Return the response of an operation.

    Raises:
        Http404: there is no such operation.
    """
    if name not in OPERATIONS:
        raise Http404(name)
    return base.respond(dashboard, request, OPERATIONS[name])
