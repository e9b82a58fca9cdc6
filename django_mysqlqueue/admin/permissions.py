"""Permissions of the dashboard's users."""

from __future__ import annotations

from django.core.exceptions import PermissionDenied
from django.db import Error
from django.http import HttpRequest
from django.utils.translation import gettext as _

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.permissions import OPERATE, SEE_PAYLOADS, VIEW, has_permission, visible_topics
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import bounded


def topics_to_view(request: HttpRequest) -> frozenset[str] | None:
    """Return the topics that the user may view; None: all. They are read once for a request."""
    if not hasattr(request, "mysqlqueue_topics"):
        using = queue_alias()
        try:
            with bounded(using):
                found = visible_topics(request.user, using)
        except Error as error:
            # The index of the admin must not fail because of the queue's database.
            if failures.kind_of(using, error) is None:
                raise
            found = frozenset()
        request.mysqlqueue_topics = found  # type: ignore[attr-defined]
    topics: frozenset[str] | None = request.mysqlqueue_topics  # type: ignore[attr-defined]
    return topics


def may_view(request: HttpRequest, topic: str | None) -> bool:
    """Return True if the user may view a topic; None: all topics, and the queue as a whole."""
    return has_permission(request.user, VIEW, topic)


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
