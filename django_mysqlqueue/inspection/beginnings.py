"""When problems of groups began: which rows tell, of groups that have such a problem, up to a bound."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from django_mysqlqueue.db.tables import EVENTS, HEARTBEATS, OFFSETS
from django_mysqlqueue.inspection.operations_log import pauses_of
from django_mysqlqueue.inspection.overview import GroupOverview
from django_mysqlqueue.models import DeliveryEvent
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service import rollups
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.rollups import HOUR, MINUTE, MINUTES_KEPT, Bucket
from django_mysqlqueue.sql.session import Session

MINUTE_MS, HOUR_MS = MINUTE * 1000, HOUR * 1000


@dataclass(slots=True)
class Ended:
    """Attempts of a group that ended within some time, as subscribers count them, up to 10 seconds late."""

    buckets: list[Bucket] = field(default_factory=list)
    """Their minutes, in order of time."""

    def since(self, at: int) -> Ended:
        """Return the attempts of the minute of a time, and of later ones."""
        return Ended([one for one in self.buckets if one.at > at - MINUTE_MS])

    @property
    def acked(self) -> int:
        """How many succeeded."""
        return sum(one.acked for one in self.buckets)

    @property
    def failed(self) -> int:
        """Number of attempts that failed."""
        return sum(one.failures for one in self.buckets)

    @property
    def dead_lettered(self) -> int:
        """Number of dead-lettered messages."""
        return _dead(self.buckets)

    @property
    def attempts(self) -> int:
        """Number of attempts that ended."""
        return self.acked + self.failed


@dataclass(frozen=True, slots=True)
class Run:
    """Failures that continue since a minute: no success has ended them."""

    since: int
    is_first: bool
    """True if no attempt is known before them: they may have begun earlier."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When attempts fail too often."""

    share: float
    """The largest share of failures that is tolerated; 1: as long as any attempt succeeds, each share is."""
    newest: int
    """Number of newest attempts whose share counts."""

    def is_over(self, failures: float, attempts: float) -> bool:
        """Return whether too many of some attempts have failed."""
        return failures >= attempts if self.share >= 1 else failures > self.share * attempts


def continuing(buckets: Iterable[Bucket], rule: Rule) -> Run | None:
    """Return the failures that continue at the end of some minutes; None if the newest attempts succeed."""
    newest: deque[Bucket] = deque()
    began = first = None
    is_over = False
    for bucket in buckets:
        if not bucket.attempts:
            continue
        first = bucket.at if first is None else first
        newest.append(bucket)
        while sum(one.attempts for one in list(newest)[1:]) >= rule.newest:
            newest.popleft()
        is_over = rule.is_over(*_newest(newest, rule.newest))
        if began is None and rule.is_over(bucket.failures, bucket.attempts):
            began = bucket.at
        elif began is None and is_over:
            began = next(one.at for one in newest if one.failures)
        elif not is_over and not rule.is_over(bucket.failures, bucket.attempts):
            began = None
    return Run(began, began == first) if is_over and began is not None else None


def _newest(buckets: Sequence[Bucket], number: int) -> tuple[float, float]:
    """Return how many of a number of newest attempts have failed, and that number. The oldest minute counts in part."""
    failures, attempts = 0.0, 0.0
    for bucket in reversed(buckets):
        left = number - attempts
        part = 1.0 if bucket.attempts <= left or not attempts else left / bucket.attempts
        failures += part * bucket.failures
        attempts += part * bucket.attempts
    return failures, attempts


def began_by_hour(hours: Sequence[Bucket], rule: Rule, minute: int) -> int:
    """Return when failures began that were there in the first minute that is known: that minute, or an hour before."""
    began = minute
    for bucket in reversed(hours):
        if not bucket.attempts:
            continue
        if rule.is_over(bucket.failures, bucket.attempts):
            began = bucket.at
            continue
        if bucket.failures and began // HOUR_MS * HOUR_MS - bucket.at <= HOUR_MS:
            began = bucket.at  # They began in this hour, after successes.
        break
    return began


def burst(buckets: Iterable[Bucket], most: int, window_ms: int) -> int | None:
    """Return the first minute of the dead letters of which there have been too many within a window ever since."""
    window: deque[Bucket] = deque()
    began = None
    for bucket in buckets:
        while window and window[0].at < bucket.at - window_ms:
            window.popleft()
        if not _dead(window):
            began = None
        window.append(bucket)
        if _dead(window) <= most:
            began = None
        elif began is None:
            began = next(one.at for one in window if one.dead_lettered)
    return began


def _dead(buckets: Iterable[Bucket]) -> int:
    return sum(one.dead_lettered for one in buckets)


FAILING = 20
"""Maximum number of failing groups whose history is read: 360 lookups each, and 168 more if it begins before."""
HOURS = 168
"""Maximum number of hours of such a history, if none of the minutes has an ack."""
MESSAGES = 100
"""Maximum number of failed messages whose first failure is searched for."""
RECORDED = 50
"""Number of recorded deliveries of such a message that are searched, oldest first."""


@dataclass(frozen=True, slots=True)
class Began:
    """What is known of the beginnings of a group's problems. None: not known."""

    served_until: int | None = None
    """When its last subscriber stopped, or had its last heartbeat."""
    had_subscribers: bool = False
    paused_at: int | None = None


NOTHING = Began()


def of_groups(session: Session, groups: Sequence[GroupOverview]) -> dict[GroupRef, Began]:
    """Return since when groups are paused or have no live subscribers."""
    paused = {group.ref: group.registered_at for group in groups if group.paused}
    unserved = [group.ref for group in groups if group.has_work and not group.live]
    pauses = pauses_of(session, paused)
    served = _served(session, unserved)
    known = served.keys() | _with_positions(session, [ref for ref in unserved if ref not in served])
    return {
        ref: Began(served.get(ref), ref in known, pauses[ref].started_at if ref in pauses else None)
        for ref in dict.fromkeys((*paused, *unserved))
    }


def _served(session: Session, refs: Sequence[GroupRef]) -> dict[GroupRef, int]:
    """Return when the last subscriber of groups stopped or had its last heartbeat. Rows are kept for a day."""
    select = (
        "SELECT MIN(consumer_group), MIN(topic), "
        "MAX(CASE WHEN deregistered_at > 0 THEN deregistered_at ELSE heartbeat_at END) "
        f"FROM {HEARTBEATS}{session.dialect.force_index('PRIMARY')} WHERE consumer_group = %s AND topic = %s"
    )
    return {GroupRef(group, topic): at for group, topic, at in session.each(select, refs) if at is not None}


def _with_positions(session: Session, refs: Sequence[GroupRef]) -> set[GroupRef]:
    """Return groups that have a position in a partition: subscribers have worked for them."""
    select = (
        f"SELECT consumer_group, topic FROM {OFFSETS}{session.dialect.force_index('PRIMARY')} "
        "WHERE consumer_group = %s AND topic = %s LIMIT 1"
    )
    return {GroupRef(*row) for row in session.each(select, refs)}


@dataclass(frozen=True, slots=True)
class Past:
    """The attempts of a group, as far back as they are searched."""

    minutes: list[Bucket]
    since: int | None
    """When its failures began that continue, to the minute or hour; None if there are none."""
    dead_since: int | None
    """When its dead letters began of which there are too many within a window; None: there are none, or not known."""


def of_failures(
    session: Session, refs: Sequence[GroupRef], now: int, rule: Rule, *, most: int | None = None, window: float = 0.0
) -> dict[GroupRef, Past]:
    """Return since when the first ``FAILING`` of some groups fail; ``most``: dead letters that are tolerated."""
    first, window_ms = now - MINUTES_KEPT * 1000, int(window * 1000)
    found = rollups.of_groups(session, MINUTE, first, refs[:FAILING], now=now)
    runs = {ref: continuing(minutes, rule) for ref, minutes in found.items()}
    older = [ref for ref, failures in runs.items() if failures is not None and failures.is_first]
    hours = min(HOURS, int(get_settings().history_retention / HOUR))
    by_hour = {
        ref: began_by_hour(buckets, rule, found[ref][0].at)
        for ref, buckets in rollups.of_groups(session, HOUR, first - hours * HOUR_MS, older, now=first).items()
    }
    past = {}
    for ref, minutes in found.items():
        failures = runs[ref]
        since = None if failures is None else by_hour.get(ref, failures.since)
        dead = None if most is None else burst(minutes, most, window_ms)
        # Before the minutes that are kept, there may have been others.
        past[ref] = Past(minutes, since, None if dead is None or dead < first + window_ms else dead)
    return past


class Failed(NamedTuple):
    """A message that has failed in a group."""

    ref: GroupRef
    offset: int


def of_messages(session: Session, messages: Mapping[Failed, int]) -> dict[Failed, int]:
    """Return when the first ``MESSAGES`` messages first failed after their times, as far as it is recorded."""
    select = (
        "SELECT MIN(w.consumer_group), MIN(w.topic), MIN(w.message_offset), MIN(w.settled_at) "
        "FROM (SELECT message_offset, consumer_group, topic, outcome, settled_at "
        f"FROM {EVENTS}{session.dialect.force_index('queue_delivery_events_message')} "
        "WHERE message_offset = %s ORDER BY id LIMIT %s) w WHERE w.consumer_group = %s AND w.topic = %s "
        "AND w.outcome = %s AND w.settled_at >= %s"
    )
    outcome = DeliveryEvent.Outcome.FAILED.value
    parameters = [(one.offset, RECORDED, *one.ref, outcome, at) for one, at in messages.items()][:MESSAGES]
    return {
        Failed(GroupRef(group, topic), offset): at
        for group, topic, offset, at in session.each(select, parameters)
        if at is not None
    }
