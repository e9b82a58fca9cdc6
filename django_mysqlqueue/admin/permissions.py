"""Permissions of the dashboard's users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from django.utils.translation import gettext as _

from django_mysqlqueue.exceptions import QueueError, SubscriberError
from django_mysqlqueue.names.rules import JOB_PREFIX
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.topics import first_topic
from django_mysqlqueue.permissions import (
    OPERATE,
    SEE_PAYLOADS,
    VIEW,
    VIEW_OPERATIONS,
    has_permission,
    may_have_topics,
    visible_topics,
)
from django_mysqlqueue.service import log
from django_mysqlqueue.service.databases import queue_alias, queue_aliases
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.sql.several import ANSWER_SECONDS, Unread, read_each

if TYPE_CHECKING:
    from django_mysqlqueue.inspection import GroupOverview
    from django_mysqlqueue.inspection.partitions import ListedGroup, Partition


@dataclass(frozen=True, slots=True)
class Visible:
    """What a user may view in the databases of the queue."""

    topics: Mapping[str, frozenset[str] | None]
    """By alias, the topics; None: all. Databases in which the user may view nothing are left out."""
    unread: Mapping[str, Unread] = field(default_factory=dict)
    """By alias, why the topics could not be read: the user may view those of them that ``TOPICS`` names."""


def visible(request: HttpRequest) -> Visible:
    """Return what the user may view. It is read once for a request."""
    if not hasattr(request, "mysqlqueue_visible"):
        request.mysqlqueue_visible = _visible(request)  # type: ignore[attr-defined]
    found: Visible = request.mysqlqueue_visible  # type: ignore[attr-defined]
    return found


def _visible(request: HttpRequest) -> Visible:
    aliases = queue_aliases()
    if may(request, None, VIEW):
        return Visible(dict.fromkeys(aliases))
    if not may_have_topics(request.user):
        return Visible({})
    topics: dict[str, frozenset[str]] = {}
    unread: dict[str, Unread] = {}
    # Each page of the admin asks for this: it must not wait for long.
    for alias, known in read_each(aliases, lambda alias: log.known(Session(alias)), within=ANSWER_SECONDS).items():
        if isinstance(known, Unread):
            # The index of the admin must not fail because of one of the databases.
            unread[alias] = known
            names = get_settings().topics.names() if len(aliases) > 1 else ()
            topics[alias] = visible_topics(request.user, [name for name in names if queue_alias(topic=name) == alias])
        else:
            topics[alias] = visible_topics(request.user, known)
    shown = {alias: found for alias, found in topics.items() if found}
    return Visible(shown, {alias: one for alias, one in unread.items() if alias in shown})


def databases_to_view(request: HttpRequest) -> list[str]:
    """Return the aliases of the databases in which the user may view something, the general one first."""
    return list(visible(request).topics)


def topics_to_view(request: HttpRequest, using: str) -> frozenset[str] | None:
    """Return the topics of a database that the user may view; None: all."""
    return visible(request).topics.get(using, frozenset())


def may_view_in(request: HttpRequest, topic: str, using: str) -> bool:
    """Return True if the user may view a topic in a database."""
    topics = topics_to_view(request, using)
    return topics is None or first_topic(topic) in topics


def operations_to_view(request: HttpRequest, using: str) -> frozenset[str] | None:
    """Return the topics of a database whose operations the user may view; None: all operations.

    All of them need a permission of their own. Who may view single topics may view the operations on them.
    """
    return None if request.user.has_perm(VIEW_OPERATIONS) else topics_to_view(request, using) or frozenset()


def text_of(request: HttpRequest, error: QueueError | ImportError) -> str:
    """Return the text of an error without names of topics that the user may not view, nor of their groups."""
    found = visible(request).topics.values()

    def may_view_in_any(topic: str | None) -> bool:
        return any(names is None or (topic is not None and first_topic(topic) in names) for names in found)

    if isinstance(error, QueueError) and not isinstance(error, SubscriberError):
        return error.text_for(may_view_in_any)
    # It is about the handlers of the project, whichever topic they read.
    return str(error) if may_view_in_any(None) else type(error).__name__


def may_view_operations(request: HttpRequest) -> bool:
    """Return True if the user may view some operations of the audit log."""
    return any(operations_to_view(request, using) != frozenset() for using in databases_to_view(request))


def may(request: HttpRequest, topic: str | None, *permissions: str) -> bool:
    """Return True if the user has permissions on a topic; None: on all topics, and the queue as a whole."""
    return all(has_permission(request.user, permission, topic) for permission in permissions)


def may_release(request: HttpRequest, group: GroupOverview | ListedGroup, rows: Iterable[Partition]) -> bool:
    """Return True if the user may release leases of a group, and one of the rows has a lease."""
    return any(row.owner is not None for row in rows) and may(request, group.ref.topic, OPERATE)


def may_see_errors(request: HttpRequest, topic: str) -> bool:
    """Return True if the user may view texts of errors of a topic.

    Those of jobs are as confidential as arguments and return values. The name decides, because this process may have
    no ``TASKS``.
    """
    return not topic.startswith(JOB_PREFIX) or may(request, topic, SEE_PAYLOADS)


def may_search_errors(request: HttpRequest, topic: str | None) -> bool:
    """Return True if the user may search error texts of a topic.

    The search reads the stored texts. With ``REDACT`` set, repeated searches could reveal what it hides.
    """
    if get_settings().redact is None and (topic is None or may_see_errors(request, topic)):
        return True
    return may(request, topic, SEE_PAYLOADS)


def search_refused() -> str:
    """Return the message for users who may not search error texts."""
    return _(
        "Nothing was changed. To filter by error text, you need the permission to view payloads, because the search "
        "reads the stored text, some or all of which is hidden from you."
    )


def demand(allowed: bool) -> None:  # noqa: FBT001
    """Respond with 403 unless the user is allowed."""
    if not allowed:
        raise PermissionDenied
