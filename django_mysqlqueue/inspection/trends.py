"""Consumer groups over time: how fast messages come and go, how long a backlog lasts, and how that changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.inspection.overview import GroupOverview, QueueOverview
from django_mysqlqueue.inspection.problem import STATES, Problem
from django_mysqlqueue.service import rollups
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.rollups import HOUR, MINUTE, NO_LATENCY, Bucket, Percentile
from django_mysqlqueue.sql.session import Session, grouped
from django_mysqlqueue.text.humanize import clock_text, duration, messages_per_second

RATE_MINUTES = 5
"""The current rates are those of the last whole minutes, of this number, and of the minute that has begun."""
SHORTEST = 20.0
"""Seconds after which a period that has begun has a rate, since subscribers write their counts every ten seconds, and
that are between two looks at a backlog from which its change is told."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How many messages per second enter the log for a group, None if nobody has counted them, and are settled."""

    entered: float | None
    settled: float


def rates_begin(now: int) -> int:
    """Return when the time begins whose rates are the current ones, in epoch milliseconds."""
    return (now // 60_000 - RATE_MINUTES) * 60_000


def current_rates(counts: Bucket | None, now: int, *, registered_at: int) -> Rates:
    """Return the current rates of a group from the sum of its rows of minutes since ``rates_begin``."""
    if counts is None:
        return Rates(None, 0.0)
    seconds = max(1.0, (now - max(rates_begin(now), registered_at)) / 1000)
    entered = counts.entered / (counts.entered_minutes * 60) if counts.entered_minutes else None
    return Rates(entered, counts.settled / seconds)


@dataclass(frozen=True, slots=True)
class Look:
    """A count of a group's backlog at a time."""

    at: int
    backlog: Count


def look_of(bucket: Bucket, since: int) -> Look | None:
    """Return the sample of a minute; None if it has none, or one of before a time in epoch milliseconds."""
    if bucket.backlog is None or bucket.sampled_at < since:
        return None
    return Look(bucket.sampled_at, bucket.backlog)


def change_per_second(
    newest: Look | None, buckets: Sequence[Bucket], *, since: int, shortest: float = SHORTEST
) -> float | None:
    """Return by how many messages per second a backlog changes, by its newest two looks; None: it is not known."""
    looks = [] if newest is None else [newest]
    looks += [look for bucket in reversed(buckets) if (look := look_of(bucket, since)) is not None]
    flow = next(((one.entered - one.settled) / MINUTE for one in reversed(buckets) if one.entered_minutes), None)
    new = next(iter(looks), None)
    old = None if new is None else next((one for one in looks if new.at - one.at >= shortest * 1000), None)
    if new is None or old is None:
        return flow
    # If a look stopped counting, both tell at most the direction; what came in and was settled says how fast.
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


# -- groups as a table --------------------------------------------------------

SETTLED_MINUTES = 30
"""Failed attempts and passed messages of these last minutes are counted."""
SLOT_MINUTES = 5
"""The last hour is told in parts of this length."""
YOUNG_MS = 30_000
"""A backlog whose oldest message is younger may be one that subscribers keep up with."""
SHORTEST_DRAIN, LONGEST_DRAIN = 60.0, 30 * 86_400.0
"""A time to drain, in seconds, outside of these has no time of day."""
PASSED = {
    "filtered": gettext_lazy("%(number)s filtered"),
    "expired": gettext_lazy("%(number)s expired"),
    "superseded": gettext_lazy("%(number)s superseded"),
}
"""By reason (``rollups.PASSED``), the text for messages that were settled without a call."""


@dataclass(frozen=True, slots=True)
class RowState:
    """The state of a group in a few words."""

    text: str
    kind: str
    """The kind of problem, or ``"growing"``, ``"working"`` or ``"idle"``."""
    rank: int
    """As the severity of a problem."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group in the table."""

    group: GroupOverview
    state: RowState
    rates: Rates
    age_ms: int | None
    """Age of the oldest unsettled message."""
    drain: float | None
    """Seconds after which the backlog is settled at its current speed; infinity for never; None: not known, all of it
    is in flight, or the group is paused or has no live subscribers."""
    now: int
    failed: int
    """Number of attempts that failed lately."""
    passed: Counter[str]
    """Numbers of messages that were lately settled without a call, by reason."""
    history: Sequence[Bucket]
    """Sums of its rows of the last hour or less, in parts of ``SLOT_MINUTES`` minutes or less."""

    @property
    def backlogs(self) -> list[int | None]:
        """The highest sample of the backlog in each part of the last hour; None without one."""
        found = {one.at: one.backlog for one in self.history}
        return [None if (backlog := found.get(at)) is None else backlog.value for at in slots(self.now)]

    @property
    def failures(self) -> list[int]:
        """The number of attempts that failed in each part of the last hour."""
        found = {one.at: one.failures for one in self.history}
        return [found.get(at, 0) for at in slots(self.now)]

    @property
    def oldest(self) -> str:
        """The age of the oldest unsettled message."""
        return "" if self.age_ms is None else duration(self.age_ms / 1000)

    @property
    def held(self) -> str:
        """How many messages of the backlog are in flight or wait for another attempt."""
        group = self.group
        texts = ((group.in_flight, _("%(number)s in flight")), (group.retrying, _("%(number)s retrying")))
        return ", ".join(text % {"number": str(number)} for number, text in texts if number)

    @property
    def entered(self) -> str:
        """How many messages come in per second."""
        return "-" if self.rates.entered is None else messages_per_second(self.rates.entered)

    @property
    def settled(self) -> str:
        """How many messages are settled per second."""
        return messages_per_second(self.rates.settled)

    @property
    def time_to_drain(self) -> str:
        """How long the backlog lasts."""
        if not self.drain:
            return "-"
        if self.drain == float("inf"):
            return _("never")
        text = duration(max(1, self.drain))
        return _("more than %(time)s") % {"time": text} if self.group.lag_is_bound else text

    @property
    def drained_at(self) -> str:
        """The time of day at which the backlog is settled; empty if it is less than a minute away."""
        if self.drain is None or not SHORTEST_DRAIN <= self.drain < LONGEST_DRAIN:
            return ""
        return clock_text(self.now + round(self.drain * 1000), self.now)

    @property
    def drained_text(self) -> str:
        """The same with a word that says how exact it is."""
        text = _("after %(time)s") if self.group.lag_is_bound else _("about %(time)s")
        return text % {"time": self.drained_at} if self.drained_at else ""

    @property
    def limits(self) -> str:
        """The limits that apply to the group."""
        return self.group.limits.text

    @property
    def passed_texts(self) -> list[str]:
        """The numbers of messages that were settled without a call, such as "3 expired"."""
        return passed_texts(self.passed)


def passed_texts(passed: Mapping[str, int]) -> list[str]:
    """Return texts for the numbers of messages that were settled without a call, by reason."""
    return [str(text) % {"number": f"{passed[name]:,}"} for name, text in PASSED.items() if passed.get(name)]


def read_rates(session: Session, groups: Sequence[GroupOverview], now: int) -> dict[GroupRef, Rates]:
    """Return the current rates of groups."""
    recent = rollups.of_groups(session, MINUTE, rates_begin(now), [group.ref for group in groups], now=now)
    return {
        one.ref: current_rates(rollups.summed(recent[one.ref]), now, registered_at=one.registered_at) for one in groups
    }


def slots(now: int) -> range:
    """Return when the parts of the last hour begin that the table has, in epoch milliseconds."""
    end = (now // 60_000 + 1) * 60_000
    return range(end - HOUR * 1000, end, SLOT_MINUTES * 60_000)


def read_rows(overview: QueueOverview, problems: Iterable[Problem]) -> list[GroupRow]:
    """Return the rows of the groups of an overview, in the same order."""
    session, now = Session(overview.using), overview.now
    refs = [group.ref for group in overview.groups]
    recent = rollups.of_groups(session, MINUTE, rates_begin(now), refs, now=now)
    sums = rollups.sums(session, MINUTE, slots(now)[0], length=SLOT_MINUTES * 60, by_group=True)
    parts = grouped((one.ref, one) for one in sums)
    of_group = grouped((one.ref, one) for one in problems)
    return [
        _row(group, of_group.get(group.ref, []), recent[group.ref], parts.get(group.ref, []), now)
        for group in overview.groups
    ]


def read_row(group: GroupOverview, problems: Sequence[Problem], buckets: Sequence[Bucket], now: int) -> GroupRow:
    """Return the row of one group, from its rows of the last ``SETTLED_MINUTES`` minutes."""
    recent = [one for one in buckets if one.at >= rates_begin(now)]
    return _row(group, problems, recent, buckets, now)


def _row(
    group: GroupOverview,
    problems: Sequence[Problem],
    recent: Sequence[Bucket],
    history: Sequence[Bucket],
    now: int,
) -> GroupRow:
    lately = [one for one in history if one.at > now - SETTLED_MINUTES * 60_000]
    passed = rollups.summed(lately)
    drain = drain_of(group, recent, now)
    return GroupRow(
        group=group,
        state=_state(group, problems, drain),
        rates=current_rates(rollups.summed(recent), now, registered_at=group.registered_at),
        age_ms=_age_ms(group, now),
        drain=drain,
        now=now,
        failed=sum(one.failures for one in lately),
        passed=Counter() if passed is None else passed.passed,
        history=history,
    )


def _age_ms(group: GroupOverview, now: int) -> int | None:
    return None if group.oldest_at is None else max(0, now - group.oldest_at)


def drain_of(group: GroupOverview, recent: Sequence[Bucket], now: int, *, shortest: float = SHORTEST) -> float | None:
    """Return the seconds after which a group has settled its backlog, from its rows of minutes since ``rates_begin``.

    Infinity: the backlog grows, None: this is not known, all of it is in flight, or the group works on nothing.
    """
    lag = group.lag
    if group.paused or group.after_seek or not group.live:
        return None if lag else 0.0
    # How long handlers take is not known from counts: these messages need no thread that becomes free.
    if lag and lag.exact and lag.value <= group.in_flight.value:
        return None
    newest = None if lag.age else Look(now, lag)
    found = seconds_to_drain(lag, change_per_second(newest, recent, since=group.placed_at, shortest=shortest))
    return None if found == float("inf") and (_age_ms(group, now) or 0) < YOUNG_MS else found


def _state(group: GroupOverview, problems: Sequence[Problem], drain: float | None) -> RowState:
    kinds = list(STATES)
    shown = [one for one in problems if one.kind in STATES]
    if shown:
        worst = min(shown, key=lambda one: (one.severity, kinds.index(one.kind)))
        return RowState(str(STATES[worst.kind]), worst.kind, worst.severity)
    if drain == float("inf"):
        return RowState(_("growing"), "growing", 1)
    if group.lag:
        return RowState(_("working"), "working", 2)
    return RowState(_("idle") if group.live else _("no subscribers"), "idle", 2)


# -- history ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """A period up to now in points of equal length, each made of a number of rows of ``grain`` seconds."""

    grain: int
    rows: int
    points: int

    @property
    def length(self) -> int:
        """The length of a point, in seconds."""
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
    backlog: Count | None = None
    """The highest sample."""
    oldest_ms: int | None = None
    """The highest age of the oldest unsettled message in these samples."""
    entered: float | None = None
    """Messages of the topic that enter the log, per second."""
    settled: float | None = None
    """Messages that are settled, per second."""
    failed: int | None = None
    dead_lettered: int | None = None
    p50: Percentile | None = None
    p95: Percentile | None = None
    """Latency from entering the log to the ack; None if there were no acks."""


def read_history(session: Session, ref: GroupRef, span: Span, now: int) -> list[Point]:
    """Return the history of a group, oldest point first. Each row is read by its primary key."""
    length = span.length * 1000
    first = now // length - span.points + 1
    parts: dict[int, list[Bucket]] = {number: [] for number in range(first, first + span.points)}
    for bucket in rollups.of_group(session, span.grain, first * length, ref, now=now):
        parts[bucket.at // length].append(bucket)
    return [
        _point(number * length, buckets, min(span.length, now / 1000 - number * span.length))
        for number, buckets in parts.items()
    ]


def _point(at: int, buckets: list[Bucket], seconds: float) -> Point:
    if not buckets:
        return Point(at)
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
    """Return an overview with the newest exact sample of each group whose count stopped, and the sample's age."""
    stopped = [group.ref for group in overview.groups if not group.lag.exact]
    since = (overview.now // 60_000 - MINUTES) * 60_000
    found = rollups.of_groups(Session(overview.using), MINUTE, since, stopped, now=overview.now)
    newest = {ref: bucket for ref, buckets in found.items() for bucket in buckets if bucket.backlog is not None}
    groups = tuple(with_sample(group, newest.get(group.ref), overview.now) for group in overview.groups)
    return replace(overview, groups=groups)


def with_sample(group: GroupOverview, bucket: Bucket | None, now: int) -> GroupOverview:
    """Return a group with its newest sample, if that one knows more."""
    look = None if bucket is None else look_of(bucket, group.placed_at)
    if look is None or not look.backlog.exact or look.backlog.value <= group.lag.value:
        return group
    age = max(1.0, (now - look.at) / 1000)
    return replace(group, lag=Count(look.backlog.value, exact=False, age=age, least=group.lag.value))
