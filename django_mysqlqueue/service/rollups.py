"""Rollups: counts per minute and hour, for charts that must not read the log.

A subscriber counts in memory, and adds its counts to the rows every few seconds. If a process is killed, its last few
seconds of counts are lost. The rollups are only for display: no operation depends on them. ``service.samples`` adds
what one subscriber per minute samples.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django_mysqlqueue.db.sizes import LATENCY_BOUNDS_MS, LATENCY_COLUMNS
from django_mysqlqueue.db.tables import ROLLUPS
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, flat, run

MINUTE, HOUR = 60, 3600
"""Length in seconds of the period of a row."""
MINUTES_KEPT = 6 * HOUR
"""Seconds for which rows of minutes are kept. Those of hours are kept for ``HISTORY_RETENTION``."""
KEY = ("grain", "bucket_at", "consumer_group", "topic")
PASSED = ("filtered", "expired", "superseded")
"""The counts of messages that were settled without a call of the handler."""
COUNTS = ("acked", "failed", "dead_lettered", *PASSED, *LATENCY_COLUMNS)
SUMMED = ("entered", "entered_minutes", "acked", "failed", "dead_lettered", *PASSED)
FAILURES = "CASE WHEN failed > dead_lettered THEN failed ELSE dead_lettered END"
"""``Bucket.failures`` in SQL."""
COLUMNS = ("backlog", "backlog_exact", "oldest_ms", "sampled_at", *SUMMED, *LATENCY_COLUMNS)
"""What is read of a row. One subscriber per minute writes the first six."""
BY_KEY = " AND ".join(f"s.{name} = v.{name}" for name in KEY)
CHUNK = 1000

NO_LATENCY = (0,) * len(LATENCY_COLUMNS)
"""``Bucket.latency`` without acks."""


@dataclass(slots=True)
class Tally:
    """The counts of one process for a group since it last wrote them."""

    failed: int = 0
    dead_lettered: int = 0
    passed: Counter[str] = field(default_factory=Counter)
    """By name in ``PASSED``."""
    latency: list[int] = field(default_factory=lambda: list(NO_LATENCY))
    """Numbers of acks by latency, in the order of ``LATENCY_COLUMNS``."""

    def acked(self, latency_ms: int) -> None:
        """Count an ack, with the time in milliseconds since the message entered the log."""
        self.latency[bisect_left(LATENCY_BOUNDS_MS, latency_ms)] += 1

    @property
    def fails(self) -> bool | None:
        """Whether an attempt has failed; None: no attempt has ended."""
        if self.failed or self.dead_lettered:
            return True
        return False if any(self.latency) else None

    def counts(self) -> tuple[int, ...]:
        """Return the counts in the order of ``COUNTS``."""
        passed = (self.passed[name] for name in PASSED)
        return (sum(self.latency), self.failed, self.dead_lettered, *passed, *self.latency)


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
        insert_missing(session, [row[: len(KEY)] for row in rows])
        assign = ", ".join(f"{name} = {name} + %s" for name in COUNTS)
        where = " AND ".join(f"{name} = %s" for name in KEY)
        for row in sorted(rows):
            session.execute(f"UPDATE {ROLLUPS} SET {assign} WHERE {where}", (*row[len(KEY) :], *row[: len(KEY)]))

    run(using, write)


def insert_missing(session: Session, keys: Sequence[tuple[Any, ...]]) -> None:
    """Insert the rows of some keys that there are not."""
    session.insert(ROLLUPS, KEY, keys, session.dialect.on_conflict_keep(ROLLUPS, KEY))


def _kept_ms() -> dict[int, int]:
    return {MINUTE: MINUTES_KEPT * 1000, HOUR: int(get_settings().history_retention * 1000)}


def outdated(session: Session) -> tuple[str, tuple[object, ...]]:
    """Return the FROM and WHERE of the rows that are too old."""
    now = session.now()
    return (
        f"{ROLLUPS} WHERE {' OR '.join(['grain = %s AND bucket_at < %s'] * 2)}",
        tuple(flat((grain, now - kept) for grain, kept in _kept_ms().items())),
    )


def collect(using: str) -> int:
    """Delete rows that are too old, by primary key; return how many."""

    def delete(session: Session) -> int:
        now = session.now()
        deleted = 0
        for grain, kept in _kept_ms().items():
            rows = session.rows(
                f"SELECT {', '.join(KEY)} FROM {ROLLUPS}{session.dialect.force_index('PRIMARY')} "
                f"WHERE grain = %s AND bucket_at < %s ORDER BY {', '.join(KEY)} LIMIT %s",
                (grain, now - kept, CHUNK),
            )
            deleted += session.delete(ROLLUPS, KEY, rows, BY_KEY)
        return deleted

    return run(using, delete)


class Bucket(NamedTuple):
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
    """Numbers of acks by latency, in the order of ``LATENCY_COLUMNS``."""
    backlog: Count | None
    """The number of unsettled messages in the sample of the minute, or the highest one of the hour; None without one.
    """
    entered: int
    """How many messages of the topic have entered the log, without those that only another group receives."""
    entered_minutes: int
    """In how many minutes these were counted; 0 if nobody has counted them."""
    oldest_ms: int = 0
    """The age of the oldest message in the sample in milliseconds; of an hour, the highest one."""
    sampled_at: int = 0
    """When the sample of the minute was taken, in epoch milliseconds; 0 without one, and in hours."""

    @property
    def failures(self) -> int:
        """The number of failed attempts, at least.

        The last attempt at a dead letter is one of ``failed``, unless its subscriber was lost at it (a poison message),
        or the message expired. Those are counted as far as there are more dead letters than ``failed``.
        """
        return max(self.failed, self.dead_lettered)

    @property
    def attempts(self) -> int:
        """The number of attempts that ended."""
        return self.acked + self.failures

    @property
    def settled(self) -> int:
        """The number of messages that were settled: acked, dead-lettered or passed."""
        return self.acked + self.dead_lettered + self.filtered + self.expired + self.superseded

    @property
    def passed(self) -> Counter[str]:
        """The numbers of messages that were settled without a call, by reason (``PASSED``)."""
        return Counter({name: getattr(self, name) for name in PASSED})


def since(session: Session, grain: int, moment: int) -> list[Bucket]:
    """Return the rows of all groups since a time, in order of time.

    ``grain``: ``MINUTE`` or ``HOUR``.
    """
    rows = session.rows(
        f"SELECT consumer_group, topic, bucket_at, {', '.join(COLUMNS)} FROM {ROLLUPS} "
        "WHERE grain = %s AND bucket_at >= %s",
        (grain, moment),
    )
    return sorted(map(_bucket, rows), key=lambda bucket: (bucket.at, bucket.ref))


def sums(
    session: Session, grain: int, moment: int, *, length: int | None = None, by_group: bool = False
) -> list[Bucket]:
    """Return the sums of the rows of each topic since a time, with the highest backlog of the samples.

    ``grain``: ``MINUTE`` or ``HOUR``. ``length``: seconds that each sum is of, from ``moment`` on (default: one row).
    ``by_group``: whether groups are told apart, without their latencies, and with the sums of ``failures`` as
    ``failed``.
    """
    group, names = ("consumer_group", SUMMED) if by_group else ("''", (*SUMMED, *LATENCY_COLUMNS))
    added = [FAILURES if by_group and name == "failed" else name for name in names]
    at, parameters = "bucket_at", tuple[int, ...]()
    if length is not None:
        at, parameters = "bucket_at - (bucket_at - %s) %% %s", (moment, length * 1000)
    # As floating-point numbers, which are exact up to 2**53: decimals take the servers twice as long.
    rows = session.rows(
        f"SELECT {group}, topic, {at}, MAX(backlog), 1, 0, 0, {', '.join(f'SUM({name} + 0e0)' for name in added)} "
        f"FROM {ROLLUPS} WHERE grain = %s AND bucket_at >= %s GROUP BY 1, 2, 3",
        (*parameters, grain, moment),
    )
    return [_bucket((*row[:7], *map(int, row[7:]))) for row in rows]


def of_group(session: Session, grain: int, moment: int, ref: GroupRef, *, now: int) -> list[Bucket]:
    """Return the rows of one group since a time, in order of time, by their primary keys.

    ``grain``: ``MINUTE`` or ``HOUR``.
    """
    return of_groups(session, grain, moment, [ref], now=now)[ref]


def of_groups(
    session: Session, grain: int, moment: int, refs: Collection[GroupRef], *, now: int
) -> dict[GroupRef, list[Bucket]]:
    """Return the rows of some groups since a time, in order of time, by their primary keys.

    ``grain``: ``MINUTE`` or ``HOUR``.
    """
    length = grain * 1000
    times = range(-(-moment // length) * length, now + 1, length)
    rows = session.joined(
        f"SELECT s.consumer_group, s.topic, s.bucket_at, {', '.join(f's.{name}' for name in COLUMNS)}",
        "bgt",
        [(at, *ref) for ref in refs for at in times],
        f"{session.dialect.join_to(ROLLUPS, 's')} "
        "ON s.grain = %s AND s.bucket_at = v.b AND s.consumer_group = v.g AND s.topic = v.t",
        after=(grain,),
        plain=True,
    )
    by_ref: dict[GroupRef, list[Bucket]] = {ref: [] for ref in refs}
    for bucket in sorted(map(_bucket, rows), key=lambda bucket: bucket.at):
        by_ref[bucket.ref].append(bucket)
    return by_ref


def summed(buckets: Sequence[Bucket]) -> Bucket | None:
    """Return the sum of rows of one group, without samples; None if there are none."""
    if not buckets:
        return None
    latency = tuple(sum(column) for column in zip(*(one.latency for one in buckets), strict=True))
    totals = {name: sum(getattr(one, name) for one in buckets) for name in SUMMED}
    return buckets[0]._replace(latency=latency, backlog=None, oldest_ms=0, sampled_at=0, **totals)


def _bucket(row: Sequence[Any]) -> Bucket:
    """Return the bucket of a row, or of a sum: group, topic, time and ``COLUMNS``, with or without latencies."""
    group, topic, at, backlog, is_exact, oldest_ms, sampled_at, *counts = row
    return Bucket(
        ref=GroupRef(group, topic),
        at=at,
        latency=tuple(counts[len(SUMMED) :]) or NO_LATENCY,
        backlog=None if backlog is None else Count(backlog, bool(is_exact)),
        oldest_ms=oldest_ms,
        sampled_at=sampled_at,
        **dict(zip(SUMMED, counts, strict=False)),
    )


class Percentile(NamedTuple):
    """A bound of the latency that a share of the acks did not exceed."""

    ms: int
    """The bound in milliseconds."""
    above: bool = False
    """True if the latency is above the bound, False if it is at most that."""


def percentile(latency: Sequence[int], share: float) -> Percentile | None:
    """Return a bound of the latency that a share of the acks did not exceed, or None if there were no acks.

    It is a bound of the bucket that the latency is in: where in it the acks are is not known.

    ``latency``: sums of ``Bucket.latency``.
    """
    total = sum(latency)
    if not total:
        return None
    passed = 0
    for bound, count in zip(LATENCY_BOUNDS_MS, latency, strict=False):
        passed += count
        if count and passed >= share * total:
            return Percentile(bound)
    return Percentile(LATENCY_BOUNDS_MS[-1], above=True)
