"""Rollups: counts per minute and hour, for charts that must not read the log.

A subscriber counts in memory, and adds its counts to the rows every few seconds. If a process is killed, its last few
seconds of counts are lost. The rollups are only for display: no operation depends on them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.limits import LATENCY_BOUNDS_MS
from django_mysqlqueue.models import Rollup
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, flat, run

ROLLUPS = Rollup._meta.db_table
MINUTE, HOUR = 60, 3600
"""Length in seconds of the period of a row."""
MINUTES_KEPT = 6 * HOUR
"""Seconds for which rows of minutes are kept. Those of hours are kept for ``HISTORY_RETENTION``."""
KEY = ("grain", "bucket_at", "consumer_group", "topic")
BUCKETS = tuple(f"latency_{place}" for place in range(len(LATENCY_BOUNDS_MS) + 1))
PASSED = ("filtered", "expired", "superseded")
"""The counts of messages that were settled without a call of the handler."""
COUNTS = ("acked", "failed", "dead_lettered", *PASSED, *BUCKETS)
BY_KEY = " AND ".join(f"s.{name} = v.{name}" for name in KEY)
CHUNK = 1000


@dataclass(slots=True)
class Tally:
    """The counts of one process for a group since it last wrote them."""

    failed: int = 0
    dead_lettered: int = 0
    passed: Counter[str] = field(default_factory=Counter)
    """By name in ``PASSED``."""
    buckets: list[int] = field(default_factory=lambda: [0] * len(BUCKETS))

    def acked(self, latency_ms: int) -> None:
        """Count an ack, with the time in milliseconds since the message entered the log."""
        self.buckets[bisect_left(LATENCY_BOUNDS_MS, latency_ms)] += 1

    def counts(self) -> tuple[int, ...]:
        """Return the counts in the order of ``COUNTS``."""
        passed = (self.passed[name] for name in PASSED)
        return (sum(self.buckets), self.failed, self.dead_lettered, *passed, *self.buckets)


def add(using: str, tallies: Mapping[GroupRef, Tally]) -> None:
    """Add counts to the rows of the current minute and hour, by the database's clock."""
    counted = sorted((ref, tally.counts()) for ref, tally in tallies.items())
    if not any(any(counts) for _, counts in counted):
        return

    def write(session: Session) -> None:
        now = session.now()
        rows = [
            (grain, now // (grain * 1000) * grain * 1000, *ref, *counts)
            for grain in (MINUTE, HOUR)
            for ref, counts in counted
            if any(counts)
        ]
        for chunk in session.chunks(rows):
            session.execute(
                f"INSERT INTO {ROLLUPS} ({', '.join(KEY)}) VALUES "
                + session.dialect.placeholders(len(chunk), "(%s, %s, %s, %s)")
                + session.dialect.on_conflict_keep(ROLLUPS, KEY),
                flat(row[: len(KEY)] for row in chunk),
            )
        assign = ", ".join(f"{name} = {name} + %s" for name in COUNTS)
        where = " AND ".join(f"{name} = %s" for name in KEY)
        for row in sorted(rows):
            session.execute(f"UPDATE {ROLLUPS} SET {assign} WHERE {where}", (*row[len(KEY) :], *row[: len(KEY)]))

    run(using, write)


def collect(using: str) -> int:
    """Delete rows that are too old, by primary key; return how many."""
    keep_ms = {MINUTE: MINUTES_KEPT * 1000, HOUR: int(get_settings().history_retention * 1000)}

    def delete(session: Session) -> int:
        now = session.now()
        deleted = 0
        for grain, kept in keep_ms.items():
            rows = session.rows(
                f"SELECT {', '.join(KEY)} FROM {ROLLUPS}{session.dialect.force_index('PRIMARY')} "
                f"WHERE grain = %s AND bucket_at < %s ORDER BY {', '.join(KEY)} LIMIT %s",
                (grain, now - kept, CHUNK),
            )
            for chunk in session.chunks(rows):
                deleted += session.execute(session.dialect.delete_joined(ROLLUPS, KEY, len(chunk), BY_KEY), flat(chunk))
        return deleted

    return run(using, delete)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The counts of a minute or an hour for one group."""

    ref: GroupRef
    at: int
    """When the minute or hour began, in epoch milliseconds."""
    acked: int
    failed: int
    dead_lettered: int
    filtered: int
    expired: int
    superseded: int
    latency: tuple[int, ...]
    """Numbers of acks by latency: bucket n counts latencies up to ``LATENCY_BOUNDS_MS[n]``."""

    @property
    def passed(self) -> Counter[str]:
        """The numbers of messages that were settled without a call, by reason (``PASSED``)."""
        return Counter({name: getattr(self, name) for name in PASSED})


def since(session: Session, grain: int, moment: int, ref: GroupRef | None = None) -> list[Bucket]:
    """Return the rows since a time, in order of time.

    Args:
        session: the session.
        grain: ``MINUTE`` or ``HOUR``.
        moment: the time in epoch milliseconds.
        ref: the group (default: all groups).
    """
    one, parameters = ("", ()) if ref is None else (" AND consumer_group = %s AND topic = %s", tuple(ref))
    rows = session.rows(
        f"SELECT consumer_group, topic, bucket_at, {', '.join(COUNTS)} FROM {ROLLUPS} "
        f"WHERE grain = %s AND bucket_at >= %s{one}",
        (grain, moment, *parameters),
    )
    found = [
        Bucket(GroupRef(group, topic), at, acked, failed, dead, filtered, expired, superseded, tuple(latency))
        for group, topic, at, acked, failed, dead, filtered, expired, superseded, *latency in rows
    ]
    return sorted(found, key=lambda bucket: (bucket.at, bucket.ref))


def percentile(latency: Sequence[int], share: float) -> float | None:
    """Return the latency in milliseconds that a share of the acks did not exceed, or None if there were no acks.

    Acks are assumed to be spread evenly within a bucket, so the result is as precise as the bucket is narrow. Above the
    last bound it is that bound.

    Args:
        latency: numbers of acks by bucket.
        share: the share, from 0 to 1.
    """
    total = sum(latency)
    if not total:
        return None
    wanted = share * total
    passed = 0
    for place, count in enumerate(latency):
        if passed + count >= wanted and count:
            low = LATENCY_BOUNDS_MS[place - 1] if place else 0
            high = LATENCY_BOUNDS_MS[min(place, len(LATENCY_BOUNDS_MS) - 1)]
            return low + (high - low) * (wanted - passed) / count
        passed += count
    return float(LATENCY_BOUNDS_MS[-1])
