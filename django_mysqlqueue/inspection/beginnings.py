"""When problems of groups began.

Only groups that have such a problem are read, and of each a bounded number of rows. The overview has the numbers, and
when the oldest message started to wait, which may have been long before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.inspection.attempts import Rule, began_by_hour, burst, continuing
from django_mysqlqueue.inspection.bounds import PAGES
from django_mysqlqueue.inspection.operations_log import PAUSING, OperationFilter, look
from django_mysqlqueue.inspection.overview import GroupOverview
from django_mysqlqueue.models import ConsumerOffset, DeliveryEvent, SubscriberHeartbeat
from django_mysqlqueue.service import rollups
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.rollups import HOUR, MINUTE, MINUTES_KEPT, Bucket
from django_mysqlqueue.sql.session import UNION_TERMS, Session, flat

EVENTS = DeliveryEvent._meta.db_table
HEARTBEATS = SubscriberHeartbeat._meta.db_table
OFFSETS = ConsumerOffset._meta.db_table
PAUSES = 500
"""Maximum number of operations that have paused or resumed groups to read, newest first."""
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
    """What is known of the beginnings of a group's problems. Times are in epoch milliseconds; None: not known."""

    served_until: int | None = None
    """When its last subscriber stopped, or had its last heartbeat."""
    had_subscribers: bool = False
    """True if the group has had subscribers."""
    paused_at: int | None = None


NOTHING = Began()


def of_groups(session: Session, groups: Sequence[GroupOverview]) -> dict[GroupRef, Began]:
    """Return since when groups are paused or have no live subscribers."""
    paused = {group.ref: group.registered_at for group in groups if group.paused}
    unserved = [group.ref for group in groups if group.has_work and not group.live]
    pauses = _pauses(session, paused)
    served = _served(session, unserved)
    known = served.keys() | _with_positions(session, [ref for ref in unserved if ref not in served])
    return {ref: Began(served.get(ref), ref in known, pauses.get(ref)) for ref in dict.fromkeys((*paused, *unserved))}


def _pauses(session: Session, registered: Mapping[GroupRef, int]) -> dict[GroupRef, int]:
    """Return when groups were paused, as far as the newest operations of the audit log tell."""
    if not registered:
        return {}
    newest: dict[GroupRef, tuple[str, int]] = {}
    for one in look(session, OperationFilter(actions=PAUSING), limit=PAUSES, bounds=PAGES).entries:
        newest.setdefault(GroupRef(one.group, one.topic), (one.action, one.started_at))
    return {
        ref: at
        for ref, (action, at) in newest.items()
        # An earlier operation has paused another group of this name.
        if action == "pause" and ref in registered and at >= registered[ref]
    }


def _served(session: Session, refs: Sequence[GroupRef]) -> dict[GroupRef, int]:
    """Return when the last subscriber of groups stopped or had its last heartbeat. Rows are kept for a day."""
    select = (
        "SELECT MIN(consumer_group), MIN(topic), "
        "MAX(CASE WHEN deregistered_at > 0 THEN deregistered_at ELSE heartbeat_at END) "
        f"FROM {HEARTBEATS}{session.dialect.force_index('PRIMARY')} WHERE consumer_group = %s AND topic = %s"
    )
    return {GroupRef(group, topic): int(at) for group, topic, at in _each(session, select, refs) if at is not None}


def _with_positions(session: Session, refs: Sequence[GroupRef]) -> set[GroupRef]:
    """Return groups that have a position in a partition: subscribers have worked for them."""
    select = (
        f"SELECT consumer_group, topic FROM {OFFSETS}{session.dialect.force_index('PRIMARY')} "
        "WHERE consumer_group = %s AND topic = %s LIMIT 1"
    )
    return {GroupRef(group, topic) for group, topic in _each(session, select, refs)}


def _each(session: Session, select: str, parameters: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    for start in range(0, len(parameters), UNION_TERMS):
        part = parameters[start : start + UNION_TERMS]
        yield from session.rows(session.dialect.union(*[select] * len(part)), flat(part))


@dataclass(frozen=True, slots=True)
class Past:
    """The attempts of a group, as far back as they are searched."""

    minutes: list[Bucket]
    """In order of time."""
    since: int | None
    """When its failures began that continue, in epoch milliseconds, to the minute or hour; None if there are none."""
    dead_since: int | None
    """When its dead letters began of which there are too many within a window; None: there are none, or not known."""


def of_failures(
    session: Session, refs: Sequence[GroupRef], now: int, rule: Rule, *, most: int | None = None, window: float = 0.0
) -> dict[GroupRef, Past]:
    """Return since when attempts of groups fail.

    ``refs``: failing groups, the worst first. The first ``FAILING`` of them are read. ``most``: the largest number of
    dead letters within a window that is tolerated; None: any number.
    """
    first, window_ms = now - MINUTES_KEPT * 1000, int(window * 1000)
    found: dict[GroupRef, list[Bucket]] = {ref: [] for ref in refs[:FAILING]}
    for bucket in rollups.of_groups(session, MINUTE, first, found, now=now):
        found[bucket.ref].append(bucket)
    runs = {ref: continuing(minutes, rule) for ref, minutes in found.items()}
    older = [ref for ref, failures in runs.items() if failures is not None and failures.is_first]
    by_hour = _by_hour(session, older, first, rule, {ref: found[ref][0].at for ref in older})
    past = {}
    for ref, minutes in found.items():
        failures = runs[ref]
        since = None if failures is None else by_hour.get(ref, failures.since)
        dead = None if most is None else burst(minutes, most, window_ms)
        # Before the minutes that are kept, there may have been others.
        past[ref] = Past(minutes, since, None if dead is None or dead < first + window_ms else dead)
    return past


def _by_hour(
    session: Session, refs: Sequence[GroupRef], before: int, rule: Rule, minutes: Mapping[GroupRef, int]
) -> dict[GroupRef, int]:
    """Return the hour in which failures of groups began that were there in the first minute that is kept."""
    hours = min(HOURS, int(get_settings().history_retention / HOUR))
    found: dict[GroupRef, list[Bucket]] = {ref: [] for ref in refs}
    for bucket in rollups.of_groups(session, HOUR, before - hours * HOUR * 1000, refs, now=before):
        found[bucket.ref].append(bucket)
    return {ref: began_by_hour(buckets, rule, minutes[ref]) for ref, buckets in found.items()}


class Failed(NamedTuple):
    """A message that has failed in a group."""

    ref: GroupRef
    offset: int


def of_messages(session: Session, messages: Mapping[Failed, int]) -> dict[Failed, int]:
    """Return when messages failed first, as far as the history of deliveries has it.

    ``messages``: by message, when its group was last sought: failures before are not of these attempts. The first
    ``MESSAGES`` of them are read.
    """
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
        Failed(GroupRef(group, topic), int(offset)): int(at)
        for group, topic, offset, at in _each(session, select, parameters)
        if at is not None
    }
