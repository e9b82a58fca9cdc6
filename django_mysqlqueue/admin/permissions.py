"""Permissions of the dashboard's users."""

from __future__ import annotations

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.utils.translation import gettext as _

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.permissions import SEE_PAYLOADS

OPERATE = "django_mysqlqueue.operate_dashboard"


def may_operate(request: HttpRequest) -> bool:
    """Return True if the user may run operations."""
    return request.user.has_perm(OPERATE)


def may_see_payloads(request: HttpRequest) -> bool:
    """Return True if the user may view payloads and metadata."""
    return request.user.has_perm(SEE_PAYLOADS)


def may_search_errors(request: HttpRequest) -> bool:
    """Return True if the user may search error texts.

    The search reads the stored texts. With ``REDACT`` set, repeated searches could reveal what it hides.
    """
    return get_settings().redact is None or may_see_payloads(request)


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
