"""Consumer groups as a table: a state for each, its rates, and how long its backlog lasts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.inspection.history import (
    Look,
    Rates,
    change_per_second,
    current_rates,
    rates_begin,
    seconds_to_drain,
)
from django_mysqlqueue.inspection.overview import GroupOverview, QueueOverview
from django_mysqlqueue.inspection.problem import STATES, Problem
from django_mysqlqueue.service import rollups
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.rollups import MINUTE, Bucket
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.humanize import clock_text, duration, messages_per_second

SETTLED_MINUTES = 30
"""Failed attempts and passed messages of these last minutes are counted."""
YOUNG_MS = 60_000
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
class GroupState:
    """The state of a group in a few words."""

    text: str
    kind: str
    """The kind of problem, or ``"growing"``, ``"working"`` or ``"idle"``."""
    rank: int
    """0: messages are stalled or handlers fail; 1: attention is needed; 2: all is well, or a note."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group in the table."""

    group: GroupOverview
    state: GroupState
    rates: Rates
    age_ms: int | None
    """Age of the oldest unsettled message."""
    drain: float | None
    """Seconds after which the backlog is settled at its current speed; infinity for never; None: not known, all of it
    is in flight, or the group is paused or has no live subscribers."""
    now: int
    """When the overview was read, in epoch milliseconds."""
    failed: int
    """Number of attempts that failed lately."""
    passed: Counter[str]
    """Numbers of messages that were lately settled without a call, by reason."""

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
        return _("more than %(time)s") % {"time": text} if self.is_bound else text

    @property
    def is_bound(self) -> bool:
        """True if the backlog is longer than what was counted."""
        return not self.group.lag.exact and not self.group.lag.age

    @property
    def drained_at(self) -> str:
        """The time of day at which the backlog is settled; empty if it is less than a minute away."""
        if self.drain is None or not SHORTEST_DRAIN <= self.drain < LONGEST_DRAIN:
            return ""
        return clock_text(self.now + round(self.drain * 1000), self.now)

    @property
    def drained_text(self) -> str:
        """The same with a word that says how exact it is."""
        at = self.drained_at
        if not at:
            return ""
        return (_("after %(time)s") if self.is_bound else _("about %(time)s")) % {"time": at}

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


def read_rows(overview: QueueOverview, problems: Iterable[Problem]) -> list[GroupRow]:
    """Return the rows of the groups of an overview, in the same order."""
    session, now = Session(overview.using), overview.now
    recent: dict[GroupRef, list[Bucket]] = {}
    refs = [group.ref for group in overview.groups]
    for bucket in rollups.of_groups(session, MINUTE, rates_begin(now), refs, now=now):
        recent.setdefault(bucket.ref, []).append(bucket)
    lately = rollups.sums(session, MINUTE, now - SETTLED_MINUTES * 60_000, by=rollups.OF_GROUPS)
    found: dict[GroupRef, list[Problem]] = {}
    for problem in problems:
        if problem.ref is not None:
            found.setdefault(problem.ref, []).append(problem)
    counts = {one.ref: one for one in lately}
    return [
        _row(group, found.get(group.ref, []), recent.get(group.ref, []), counts.get(group.ref), now)
        for group in overview.groups
    ]


def read_row(group: GroupOverview, problems: Sequence[Problem], buckets: Sequence[Bucket], now: int) -> GroupRow:
    """Return the row of one group.

    ``buckets``: its rows of the last ``SETTLED_MINUTES`` minutes, in order of time.
    """
    recent = [one for one in buckets if one.at >= rates_begin(now)]
    return _row(group, problems, recent, rollups.summed(buckets), now)


def _row(
    group: GroupOverview,
    problems: Sequence[Problem],
    recent: Sequence[Bucket],
    lately: Bucket | None,
    now: int,
) -> GroupRow:
    age_ms = None if group.oldest_at is None else max(0, now - group.oldest_at)
    drain = _seconds_to_drain(group, recent, now)
    if drain == float("inf") and (age_ms or 0) < YOUNG_MS:
        drain = None
    return GroupRow(
        group=group,
        state=_state(group, problems, drain),
        rates=current_rates(rollups.summed(recent), now, registered_at=group.registered_at),
        age_ms=age_ms,
        drain=drain,
        now=now,
        # The last attempt at a dead letter is a failure, too. A poison message has only the dead letter.
        failed=0 if lately is None else max(lately.failed, lately.dead_lettered),
        passed=Counter() if lately is None else lately.passed,
    )


def _seconds_to_drain(group: GroupOverview, recent: Sequence[Bucket], now: int) -> float | None:
    lag = group.lag
    if group.paused or group.after_seek or not group.live:
        return None if lag else 0.0
    # How long handlers take is not known from counts: these messages need no thread that becomes free.
    if lag and lag.exact and lag.value <= group.in_flight.value:
        return None
    newest = None if lag.age else Look(now, lag)
    return seconds_to_drain(lag, change_per_second(newest, recent, since=group.placed_at))


def _state(group: GroupOverview, problems: Sequence[Problem], drain: float | None) -> GroupState:
    kinds = list(STATES)
    shown = [one for one in problems if one.kind in STATES]
    if shown:
        worst = min(shown, key=lambda one: (one.severity, kinds.index(one.kind)))
        return GroupState(str(STATES[worst.kind]), worst.kind, worst.severity)
    if drain == float("inf"):
        return GroupState(_("growing"), "growing", 1)
    if group.lag:
        return GroupState(_("working"), "working", 2)
    return GroupState(_("idle") if group.live else _("no subscribers"), "idle", 2)
