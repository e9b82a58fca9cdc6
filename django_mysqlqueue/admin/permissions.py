"""What a user of the admin may see and do in the dashboard."""

from __future__ import annotations

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.utils.translation import gettext as _

from django_mysqlqueue.conf import get_settings

OPERATE = "django_mysqlqueue.operate_dashboard"
SEE_PAYLOADS = "django_mysqlqueue.see_payloads"


def may_operate(request: HttpRequest) -> bool:
    """Whether the user may change anything."""
    return request.user.has_perm(OPERATE)


def may_see_payloads(request: HttpRequest) -> bool:
    """Whether the user may read payloads and metadata."""
    return request.user.has_perm(SEE_PAYLOADS)


def may_search_errors(request: HttpRequest) -> bool:
    """Whether the user may search error texts.

    The search runs on the stored texts. With ``REDACT`` set, what it hides could
    be guessed, one search after another.
    """
    return get_settings().redact is None or may_see_payloads(request)


def search_refused() -> str:
    """The message for users who may not search error texts."""
    return _(
        "You cannot filter by error text: it is searched as it is stored, and REDACT hides parts of it. That needs the "
        "permission to see payloads. Nothing was changed."
    )


def demand(allowed: bool) -> None:  # noqa: FBT001
    """Respond with 403 unless the user is allowed.

    Raises:
        PermissionDenied: not allowed.
    """
    if not allowed:
        raise PermissionDenied
