"""Permissions of the dashboard's users."""

from __future__ import annotations

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.utils.translation import gettext as _

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.permissions import OPERATE, SEE_PAYLOADS, has_permission


def may_operate(request: HttpRequest, topic: str | None) -> bool:
    """Return True if the user may run operations on a topic; None: on all topics, and on the queue as a whole."""
    return has_permission(request.user, OPERATE, topic)


def may_see_payloads(request: HttpRequest, topic: str | None) -> bool:
    """Return True if the user may view payloads and metadata of a topic; None: of all topics."""
    return has_permission(request.user, SEE_PAYLOADS, topic)


def may_search_errors(request: HttpRequest, topic: str | None) -> bool:
    """Return True if the user may search error texts of a topic.

    The search reads the stored texts. With ``REDACT`` set, repeated searches could reveal what it hides.
    """
    return get_settings().redact is None or may_see_payloads(request, topic)


def search_refused() -> str:
    """Return the message for users who may not search error texts."""
    return _(
        "Nothing was changed. To filter by error text, you need the permission to view payloads, because the search "
        "reads the stored text and REDACT hides parts of it."
    )


def demand(allowed: bool) -> None:  # noqa: FBT001
    """Respond with 403 unless the user is allowed.

    Raises:
        PermissionDenied: ``allowed`` is False.
    """
    if not allowed:
        raise PermissionDenied
