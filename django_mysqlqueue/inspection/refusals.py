"""Subscribers that have refused to start, until one of their groups has started since."""

from __future__ import annotations

import json
from dataclasses import dataclass

from django_mysqlqueue.models import SubscriberHeartbeat
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session

HEARTBEATS = SubscriberHeartbeat._meta.db_table
NEWEST = 100
"""Maximum number of refusals that are read."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The last refusal of a subscriber to start. Times are in epoch milliseconds of the database's clock."""

    name: str
    """The key of its row, by which it can be forgotten."""
    host: str
    version: str
    """The release of the queue."""
    reason: str
    at: int
    refs: frozenset[GroupRef]
    """The groups that it would have worked for; none if it could not read its handlers."""


def read_refusals(session: Session) -> list[Refusal]:
    """Return the refusals after which no subscriber of the same groups has started, the newest first.

    If the groups are not known, any subscriber of the database counts.
    """
    rows = session.rows(
        f"SELECT subscriber_name, heartbeat_at, info FROM {HEARTBEATS}{session.dialect.force_index('PRIMARY')} "
        "WHERE consumer_group = %s AND topic = %s ORDER BY heartbeat_at DESC LIMIT %s",
        ("", "", NEWEST),
    )
    if not rows:
        return []
    started = _started(session)
    return [
        one
        for one in map(_refusal, rows)
        if one.at >= max((started.get(ref, 0) for ref in one.refs or started), default=0)
    ]


def _refusal(row: tuple[str, int, str]) -> Refusal:
    name, at, text = row
    info = json.loads(text)
    refs = frozenset(GroupRef(*ref) for ref in info.get("groups", ()))
    host, version, reason = (str(info.get(key, "")) for key in ("host", "version", "refused"))
    return Refusal(name, host, version, reason, int(at), refs)


def _started(session: Session) -> dict[GroupRef, int]:
    """Return when a subscriber of each group last started. Rows are kept for a day, as refusals are."""
    rows = session.rows(
        "SELECT consumer_group, topic, MAX(CAST(JSON_EXTRACT(info, '$.started_at') AS SIGNED)) "
        f"FROM {HEARTBEATS}{session.dialect.force_index('PRIMARY')} WHERE consumer_group > %s "
        "GROUP BY consumer_group, topic",
        ("",),
    )
    return {GroupRef(group, topic): int(at or 0) for group, topic, at in rows}
