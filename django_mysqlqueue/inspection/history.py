"""What rollups tell of a group: how fast messages come and go, and how that changed over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from django_mysqlqueue.inspection.overview import GroupOverview, QueueOverview
from django_mysqlqueue.service import rollups
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.rollups import HOUR, MINUTE, NO_LATENCY, Bucket, Percentile
from django_mysqlqueue.sql.session import Session

RATE_MINUTES = 5
"""The current rates are those of the last whole minutes, of this number, and of the minute that has begun."""
SHORTEST = 20.0
"""Seconds after which a period that has begun has a rate, since subscribers write their counts every ten seconds, and
that are between two looks at a backlog from which its change is told."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How many messages per second a group gets and settles."""

    entered: float | None
    """Messages of its topic that enter the log; None if nobody has counted them."""
    settled: float
    """Messages that are acked, dead-lettered, filtered, expired or superseded."""


def rates_begin(now: int) -> int:
    """Return when the time begins whose rates are the current ones, in epoch milliseconds."""
    return (now // 60_000 - RATE_MINUTES) * 60_000


def current_rates(counts: Bucket | None, now: int, *, registered_at: int) -> Rates:
    """Return the current rates of a group.

    ``counts``: the sum of its rows of minutes since ``rates_begin``; None if there are none.
    """
    if counts is None:
        return Rates(None, 0.0)
    seconds = max(1.0, (now - max(rates_begin(now), registered_at)) / 1000)
    entered = counts.entered / (counts.entered_minutes * 60) if counts.entered_minutes else None
    return Rates(entered, counts.settled / seconds)


@dataclass(frozen=True, slots=True)
class Look:
    """A count of a group's backlog."""

    at: int
    """When it was counted, in epoch milliseconds."""
    backlog: Count


def look_of(bucket: Bucket, since: int) -> Look | None:
    """Return the sample of a minute; None if it has none, or one of before a time in epoch milliseconds."""
    if bucket.backlog is None or bucket.sampled_at < since:
        return None
    return Look(bucket.sampled_at, bucket.backlog)


def change_per_second(newest: Look | None, buckets: Sequence[Bucket], *, since: int) -> float | None:
    """Return by how many messages per second a backlog changes; negative if it falls, None if it is not known.

    The newest two looks decide. If one of them stopped counting, they tell at most the direction, and what came in and
    was settled in the newest minute in which both were counted says how fast.

    ``newest``: the count of now; None if the newest sample is the newest look.
    """
    looks = [] if newest is None else [newest]
    looks += [look for bucket in reversed(buckets) if (look := look_of(bucket, since)) is not None]
    flow = next(((one.entered - one.settled) / MINUTE for one in reversed(buckets) if one.entered_minutes), None)
    new = next(iter(looks), None)
    old = None if new is None else next((one for one in looks if new.at - one.at >= SHORTEST * 1000), None)
    if new is None or old is None:
        return flow
    change = (new.backlog.value - old.backlog.value) / (new.at - old.at) * 1000
    if old.backlog.exact and (new.backlog.exact or change > 0):
        return change
    if new.backlog.exact and change < 0:
        return flow if flow is not None and flow < 0 else None
    return flow


def seconds_to_drain(backlog: Count, change: float | None) -> float | None:
    """Return the seconds after which a backlog is settled; infinity if it does not fall, None if it is not known."""
    if not backlog:
        return 0.0
    if change is None:
        return None
    if change >= 0:
        return float("inf")
    left = backlog.value / -change - backlog.age
    # A count that had to stop says that there are messages left.
    return left if left > 0 else None


@dataclass(frozen=True, slots=True)
class Span:
    """A period up to now, in points of equal length."""

    grain: int
    """Seconds of the rows that it is made of."""
    rows: int
    """Number of rows per point."""
    points: int

    @property
    def length(self) -> int:
        """Seconds of a point."""
        return self.grain * self.rows


SPANS = {
    "15m": Span(MINUTE, 1, 15),
    "1h": Span(MINUTE, 1, 60),
    "6h": Span(MINUTE, 5, 72),
    "24h": Span(HOUR, 1, 24),
    "7d": Span(HOUR, 1, 168),
}


@dataclass(frozen=True, slots=True)
class Point:
    """A part of a span. What nobody has counted or sampled is None: no subscriber ran."""

    at: int
    """When it begins, in epoch milliseconds."""
    backlog: Count | None
    """The highest sample."""
    oldest_ms: int | None
    """The highest age of the oldest unsettled message in these samples, in milliseconds."""
    entered: float | None
    """Messages of the topic that enter the log, per second."""
    settled: float | None
    """Messages that are settled, per second."""
    failed: int | None
    """Number of failed attempts."""
    dead_lettered: int | None
    """Number of dead-lettered messages."""
    p50: Percentile | None
    p95: Percentile | None
    """Latency from entering the log to the ack; None if there were no acks."""


def read_history(session: Session, ref: GroupRef, span: Span, now: int) -> list[Point]:
    """Return the history of a group, oldest point first. Each row is read by its primary key."""
    length = span.length * 1000
    first = now // length - span.points + 1
    parts: dict[int, list[Bucket]] = {}
    for bucket in rollups.of_groups(session, span.grain, first * length, [ref], now=now):
        parts.setdefault(bucket.at // length, []).append(bucket)
    return [
        _point(place * length, parts.get(place, []), min(span.length, now / 1000 - place * span.length))
        for place in range(first, first + span.points)
    ]


def _point(at: int, buckets: list[Bucket], seconds: float) -> Point:
    if not buckets:
        return Point(at, None, None, None, None, None, None, None, None)
    samples = [(one.backlog, one.oldest_ms) for one in buckets if one.backlog is not None]
    minutes = sum(one.entered_minutes for one in buckets)
    latency = [sum(column) for column in zip(NO_LATENCY, *(one.latency for one in buckets), strict=True)]
    return Point(
        at=at,
        backlog=max((backlog for backlog, _ in samples), key=lambda one: (one.value, not one.exact), default=None),
        oldest_ms=max((oldest for _, oldest in samples), default=None),
        entered=sum(one.entered for one in buckets) / (minutes * 60) if minutes else None,
        settled=sum(one.settled for one in buckets) / seconds if seconds >= SHORTEST else None,
        failed=sum(one.failed for one in buckets),
        dead_lettered=sum(one.dead_lettered for one in buckets),
        p50=rollups.percentile(latency, 0.5),
        p95=rollups.percentile(latency, 0.95),
    )


MINUTES = 2
"""Samples of earlier minutes than this number of minutes ago are too old."""


def with_samples(overview: QueueOverview) -> QueueOverview:
    """Return an overview with the newest sample of each group whose count stopped, and the sample's age.

    A sample that stopped, too, says nothing: a bound of a while ago is none of now. If all counts are exact, nothing is
    read.
    """
    stopped = [group.ref for group in overview.groups if not group.lag.exact]
    if not stopped:
        return overview
    since = (overview.now // 60_000 - MINUTES) * 60_000
    found: dict[GroupRef, Bucket] = {}
    for bucket in rollups.of_groups(Session(overview.using), MINUTE, since, stopped, now=overview.now):
        if bucket.backlog is not None:
            found[bucket.ref] = bucket
    groups = tuple(with_sample(group, found.get(group.ref), overview.now) for group in overview.groups)
    return replace(overview, groups=groups)


def with_sample(group: GroupOverview, bucket: Bucket | None, now: int) -> GroupOverview:
    """Return a group with its newest sample, if that one knows more."""
    look = None if bucket is None else look_of(bucket, group.placed_at)
    if look is None or not look.backlog.exact or look.backlog.value <= group.lag.value:
        return group
    age = max(1.0, (now - look.at) / 1000)
    return replace(group, lag=Count(look.backlog.value, exact=False, age=age, least=group.lag.value))
