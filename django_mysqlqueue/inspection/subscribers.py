"""Subscribers, according to their heartbeats."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django_mysqlqueue.db import log_queries
from django_mysqlqueue.db.tables import EVENTS, HEARTBEATS
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.service import delivery_events, heartbeats
from django_mysqlqueue.service.heartbeats import RoundTrip
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import Subset
from django_mysqlqueue.sql.session import Session, built
from django_mysqlqueue.subscriptions.effective import known_handlers
from django_mysqlqueue.subscriptions.unknown_tasks import Unknown, parsed


@dataclass(frozen=True, slots=True)
class SubscriberStatus:
    """A subscriber of a group, according to its last heartbeat."""

    ref: GroupRef
    """The group and its topic."""
    name: str
    heartbeat_at: int
    """When its last heartbeat was, in epoch milliseconds."""
    deregistered_at: int
    """When it stopped, in epoch milliseconds; 0 if it has not."""
    info: dict[str, Any]
    """Facts about its process: host, process id, version, subset, threads, when its first heartbeat was
    (``started_at``), whether it has a supervisor (``supervised``), how long its polls take (``p50_us``, ``p95_us``) and
    for how long they have been slow (``slow_ms``; -1: they are not), how many milliseconds before its last heartbeat a
    publisher last rang (``rung_ms``; -1: none has), why none can (``no_bell``), the error because of which it cannot
    work for the group (``error``) and since when (``error_at``), and the tasks that it cannot run (``unknown``: JSON by
    path, with the time in epoch milliseconds and the error)."""
    live: bool
    """True if its last heartbeat is younger than ``LEASE_DURATION``."""

    @property
    def subset(self) -> Subset:
        """The partitions that it claims."""
        return Subset.read(self.info.get("subset"))

    @property
    def is_sql(self) -> bool:
        """True for a consumer in plain SQL: it is named after its connection, and nobody restarts it."""
        return self.info.get("client") == "sql"

    @property
    def error(self) -> str:
        """The error, a bug, because of which it could not work for the group in the last minute; empty if none."""
        return str(self.info.get("error", ""))

    @property
    def unknown(self) -> dict[str, Unknown]:
        """The tasks that its process could not run, although it was given jobs of them, by path."""
        return parsed(self.info.get("unknown"))

    @property
    def threads(self) -> int | None:
        """The number of its handler threads; None for a consumer in plain SQL."""
        number: int | None = self.info.get("threads")
        return number

    @property
    def started_at(self) -> int:
        """When its first heartbeat was, in epoch milliseconds."""
        return int(self.info.get("started_at", 0))

    @property
    def round_trip(self) -> RoundTrip | None:
        """How long the database takes to answer its polls; None if it has not stored it, as consumers in plain SQL."""
        p50, p95 = self.info.get("p50_us"), self.info.get("p95_us")
        return RoundTrip(p50 / 1e6, p95 / 1e6) if isinstance(p50, int) and isinstance(p95, int) else None

    @property
    def slow_since(self) -> int | None:
        """Since when half of its polls take longer than its limit, in epoch milliseconds; None if they do not."""
        ago = self.info.get("slow_ms", -1)
        return None if ago < 0 else self.heartbeat_at - int(ago)

    @property
    def rung_at(self) -> int | None:
        """When a publisher last rang for its process, in epoch milliseconds; None if none has, or the bell is off."""
        ago = self.info.get("rung_ms", -1)
        return None if ago < 0 else self.heartbeat_at - int(ago)

    @property
    def no_bell(self) -> str:
        """Why publishers cannot ring for its process; empty if they can, or the bell is off."""
        return str(self.info.get("no_bell", ""))


def read_subscribers(
    session: Session, *, lease_ms: int, ref: GroupRef | None = None
) -> dict[GroupRef, list[SubscriberStatus]]:
    """Read all subscribers that have not stopped, or those of a group, by group and in order of name."""
    where, parameters = ("", ()) if ref is None else ("AND h.consumer_group = %s AND h.topic = %s ", tuple(ref))
    found: dict[GroupRef, list[SubscriberStatus]] = {}
    for row in session.named(
        "SELECT h.consumer_group, h.topic, h.subscriber_name AS name, h.heartbeat_at, h.deregistered_at, h.info, "
        f"CASE WHEN {heartbeats.fresh('h', session)} THEN 1 ELSE 0 END AS live FROM {HEARTBEATS} h "
        f"WHERE h.deregistered_at = 0 {where}ORDER BY h.consumer_group, h.topic, h.subscriber_name",
        (lease_ms, lease_ms, *parameters),
    ):
        ref = GroupRef(row.consumer_group, row.topic)
        status = built(SubscriberStatus, row, ref=ref, info=json.loads(row.info), live=bool(row.live))
        found.setdefault(ref, []).append(status)
    return found


def replaced(subscribers: Sequence[SubscriberStatus]) -> set[str]:
    """Return the lost subscribers that others, which may be lost in turn, have replaced by starting after their end."""
    started = deque(sorted(row.started_at for row in subscribers))
    found: set[str] = set()
    for row in sorted((row for row in subscribers if not row.live), key=lambda row: row.heartbeat_at):
        while started and started[0] <= row.heartbeat_at:
            started.popleft()
        if started:
            started.popleft()
            found.add(row.name)
    return found


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
    """Return the refusals after which no subscriber of their groups, or of any if unknown, has started."""
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


CALLS = 200
"""Number of the newest recorded deliveries of a group whose handler times are averaged."""
WINDOW_MS = 5 * 60_000
"""Older ones are not."""


def read_held(session: Session, ref: GroupRef, *, bounds: Bounds = PAGES) -> dict[str, int]:
    """Return how many of a group's messages each subscriber holds, of at most ``bounds.in_flight`` deliveries."""
    return dict(
        session.rows(
            "SELECT w.delivered_by, COUNT(*) FROM (SELECT delivered_by, delivery_token "
            f"{log_queries.claimed(session)} LIMIT %s) w WHERE w.delivery_token <> 0 GROUP BY w.delivered_by",
            (*ref, False, bounds.in_flight),
        )
    )


@dataclass(frozen=True, slots=True)
class Busy:
    """The handler threads of a group's live subscribers."""

    threads: int
    """Number of threads. They also serve the other groups of their processes."""
    busy: int
    """How many of them the group's messages in flight can occupy. Further ones wait in the subscribers' memory."""
    processes: int

    @property
    def is_full(self) -> bool:
        """True if no thread is free."""
        return self.busy >= self.threads


def read_busy(
    session: Session, ref: GroupRef, live: Iterable[SubscriberStatus], *, bounds: Bounds = PAGES
) -> Busy | None:
    """Return how busy the threads of a group's live subscribers are; None in plain SQL, and if its handler is async."""
    threads = {one.name: one.threads for one in live}
    handler = known_handlers().get(ref)
    if not threads or None in threads.values() or (handler is not None and handler.is_async):
        return None
    held = read_held(session, ref, bounds=bounds)
    busy = sum(min(held.get(name, 0), number or 0) for name, number in threads.items())
    return Busy(sum(number or 0 for number in threads.values()), busy, len(threads))


def mean_handler_ms(session: Session, ref: GroupRef, now: int) -> float | None:
    """Return the average of the last calls of a group's handler; None without calls, or if acks are not recorded."""
    if delivery_events.level(ref) != "all":
        return None
    (mean,) = session.one(
        "SELECT AVG(CASE WHEN w.handled_ms > 0 AND w.settled_at >= %s THEN w.handled_ms END) FROM "
        f"(SELECT handled_ms, settled_at FROM {EVENTS}{session.dialect.force_index('queue_delivery_events_group')} "
        "WHERE consumer_group = %s AND topic = %s ORDER BY id DESC LIMIT %s) w",
        (now - WINDOW_MS, *ref, CALLS),
    )
    return None if mean is None else float(mean)
