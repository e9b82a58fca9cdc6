"""A message's whole life: what it says, where it stands for each group, what is recorded of it, where it went on.

All by primary key or along an index, for one message at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from django_mysqlqueue import naming
from django_mysqlqueue.inspection import log_entries
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.inspection.log_entries import LogMessage
from django_mysqlqueue.models import ConsumerGroup, ConsumerOffset, DeliveryEvent, DeliveryState, QueueMessage
from django_mysqlqueue.service import groups, log, messages, payloads
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.dead_letters import REPLACES
from django_mysqlqueue.service.publishing import queue_alias
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session

LOG = QueueMessage._meta.db_table
STATE = DeliveryState._meta.db_table
OFFSETS = ConsumerOffset._meta.db_table
GROUPS = ConsumerGroup._meta.db_table
EVENTS = DeliveryEvent._meta.db_table

WHOLE = 2**31 - 1
"""Bytes: more than a payload has."""

Standing = Literal["elsewhere", "skipped", "settled", "in_flight", "waits", "unclaimed", "passed"]


@dataclass(frozen=True, slots=True)
class MessageContent:
    """A message of the log with its payload."""

    entry: LogMessage
    """Its place in the log."""
    payload: bytes
    metadata: dict[str, Any]
    failed_at: int
    """Of a dead letter, when it failed for the last time, in epoch milliseconds; otherwise 0."""
    failure_count: int
    """Of a dead letter, how many attempts failed."""
    last_error: str
    """Of a dead letter, the last traceback or the reason; otherwise empty."""

    @property
    def replaces(self) -> str:
        """The id of the message that an operator replaced with it, or empty."""
        value = self.metadata.get(REPLACES)
        return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class RecordedDelivery:
    """A recorded delivery, or an operation on a dead letter. Times in epoch milliseconds."""

    event_id: int
    ref: GroupRef
    """The group and its topic."""
    key: str
    """The partition key."""
    offset: int
    attempt: int
    """The number of the attempt, from 1."""
    outcome: str
    """A value of ``DeliveryEvent.Outcome``."""
    delivered_at: int
    """When a subscriber claimed it; 0 for an operation."""
    settled_at: int
    """When it ended."""
    handled_ms: int
    """How long the handler took, in milliseconds."""
    by: str
    """The subscriber or operator."""
    error: str
    """The traceback or the reason, or empty."""
    related_id: str
    """The id of the message that it became: a dead letter, or a redriven message."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """A message's state for one consumer group of its topic."""

    ref: GroupRef
    """The group and its topic."""
    standing: Standing
    """``settled``, ``in_flight``, ``unclaimed``; ``waits``: for another attempt, or for a snooze to end; ``elsewhere``:
    it is for another group; ``skipped``: it is before the group's start offset; ``passed``: the group is past it
    without a delivery."""
    mode: str
    """``"ordered"`` or ``"shared"``."""
    paused: bool
    unfinished: Literal["", "seek", "drop"]
    """The operation on the group that has not finished."""
    start_offset: int
    """The group's start offset."""
    failed: int = 0
    """Failed attempts."""
    held_by: str = ""
    """In flight: the subscriber that has claimed it."""
    since: int = 0
    """In flight: since when, in epoch milliseconds."""
    until: int = 0
    """In flight in shared mode: when another subscriber may claim it; waiting: when it is due. Epoch milliseconds."""
    last_error: str = ""
    """The last traceback, or empty."""
    before: Count | None = None
    """Unclaimed: how many unsettled messages of its partition are before it."""


@dataclass(frozen=True, slots=True)
class MessageHistory:
    """A message of the log, its state for each group, and its recorded deliveries."""

    content: MessageContent | None
    """None: it is no longer in the log, but deliveries of it are recorded."""
    groups: tuple[GroupState, ...]
    """For each consumer group of its topic; empty if it is no longer in the log."""
    deliveries: tuple[RecordedDelivery, ...]
    """Oldest first. Which are recorded depends on the setting ``RECORD_DELIVERIES``."""
    more_deliveries: bool
    """There are older ones that were not read."""


def get_message(
    topic: str,
    message_id: str,
    *,
    key: str | None = None,
    using: str | None = None,
    bounds: Bounds = PAGES,
) -> MessageHistory | None:
    """Read a message of the log by its id, with its state for each consumer group; None if it is not in the log.

    It is not in the log before the sequencer has moved it there, or once it is garbage-collected. In a topic with more
    than ``bounds.searched_partitions`` partitions, name the partition to be sure that it is found.

    Args:
        topic: the topic that it was published to.
        message_id: its id, as ``publish`` has returned it.
        key: its partition key. Ids are unique in a partition; without a key, the newest message of the id is read.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        bounds: how much to read.

    Raises:
        InvalidMessage: there is no database ``using``.
        django.db.Error: the database refuses or does not answer.
    """
    session = Session(queue_alias(using))
    found = log_entries.by_id(session, message_id, topic=topic, key=key, bounds=bounds).entries
    return read_history(session, found[0].offset, bounds=bounds) if found else None


def read_history(session: Session, offset: int, *, most: int = WHOLE, bounds: Bounds = PAGES) -> MessageHistory | None:
    """The message at an offset and what became of it; None: it is not in the log, and nothing is recorded of it.

    Args:
        most: no more bytes of its payload than that.
    """
    found = content(session, offset, most=most)
    deliveries, more = recorded(session, offset, bounds=bounds)
    if found is None and not deliveries:
        return None
    groups = () if found is None else tuple(states(session, found.entry, bounds=bounds))
    return MessageHistory(found, groups, tuple(deliveries), more)


def content(session: Session, offset: int, *, most: int) -> MessageContent | None:
    """The message at an offset with the first ``most`` bytes of its payload; None: it is not in the log."""
    row = session.row(
        f"SELECT {log_entries.COLUMNS}, SUBSTR(m.payload, 1, %s), m.metadata, m.failed_at, m.failure_count, "
        f"m.last_error FROM {LOG} m WHERE m.`offset` = %s",
        (most, offset),
    )
    if row is None:
        return None
    payload, metadata, failed_at, failure_count, last_error = row[-5:]
    return MessageContent(
        LogMessage(*row[:-5]),
        payloads.content(payload),
        messages.decode_metadata(metadata),
        int(failed_at),
        int(failure_count),
        last_error,
    )


def recorded(session: Session, offset: int, *, bounds: Bounds = PAGES) -> tuple[list[RecordedDelivery], bool]:
    """What is recorded of a message, oldest first, and whether there is more before that."""
    most = bounds.recorded
    rows = session.rows(
        "SELECT e.id, e.consumer_group, e.topic, e.partition_key, e.message_offset, e.attempt, e.outcome, "
        f"e.delivered_at, e.settled_at, e.handled_ms, e.settled_by, e.error, e.related_id FROM {EVENTS} e"
        f"{session.dialect.force_index('queue_delivery_events_message')} WHERE e.message_offset = %s "
        "ORDER BY e.id DESC LIMIT %s",
        (offset, most + 1),
    )
    found = [RecordedDelivery(event_id, GroupRef(group, topic), *more) for event_id, group, topic, *more in rows[:most]]
    return found[::-1], len(rows) > most


# -- where it stands ----------------------------------------------------------


def states(session: Session, entry: LogMessage, *, bounds: Bounds = PAGES) -> list[GroupState]:
    """Where a message stands for each group of its topic, in order of their names."""
    rows = session.rows(
        "SELECT g.consumer_group, g.mode, g.paused, g.after_seek, g.start_offset, o.offset_acked, o.offset_claimed, "
        "s.acked, s.retry_count, s.delivered_by, s.delivered_at, s.invisible_until, s.last_error "
        f"FROM (SELECT consumer_group, mode, paused, after_seek, start_offset FROM {GROUPS} WHERE topic = %s LIMIT %s) "
        f"g {session.dialect.join_to(OFFSETS, 'o', left=True)} "
        "ON o.consumer_group = g.consumer_group AND o.topic = %s AND o.partition_key = %s "
        f"{session.dialect.join_to(STATE, 's', left=True)} ON s.consumer_group = g.consumer_group AND s.topic = %s "
        "AND s.partition_key = %s AND s.message_offset = %s",
        (entry.topic, bounds.message_groups, entry.topic, entry.key, entry.topic, entry.key, entry.offset),
    )
    return [_state(session, bounds, entry, *row) for row in sorted(rows, key=lambda row: str(row[0]))]


def _state(
    session: Session,
    bounds: Bounds,
    entry: LogMessage,
    group: str,
    mode: str,
    paused: object,
    after_seek: str,
    start: int,
    watermark: int | None,
    cursor: int | None,
    acked: object,
    *row: Any,
) -> GroupState:
    ref = GroupRef(group, entry.topic)
    more: dict[str, Any] = {}
    standing: Standing
    if entry.target_group not in ("", group):
        standing = "elsewhere"
    elif acked is not None:
        failed, held_by, since, until, last_error = row
        standing = "settled" if acked else "in_flight" if held_by else "waits"
        more = {"failed": failed, "held_by": held_by, "since": since, "until": until, "last_error": last_error}
    elif entry.offset <= start:
        standing = "skipped"
    elif watermark is not None and entry.offset <= watermark:
        standing = "settled"
    elif cursor is not None and entry.offset <= cursor:
        standing = "passed"
    else:
        standing = "unclaimed"
        more = {
            "before": _before(
                session, ref, entry, start if cursor is None else max(start, cursor), bounds.partition_count
            )
        }
    return GroupState(ref, standing, mode, bool(paused), groups.unfinished(after_seek), start, **more)


def _before(session: Session, ref: GroupRef, entry: LogMessage, cursor: int, most: int) -> Count:
    """Unsettled messages before one in its partition, those for other groups among them."""
    ranges = {entry.key: (cursor, entry.offset - 1)}
    unclaimed = log.count_between(session, ref.topic, ranges, most + 1)[entry.key]
    row = session.row(
        f"SELECT COUNT(*), SUM(CASE WHEN w.acked = %s THEN 1 ELSE 0 END) FROM (SELECT acked FROM {STATE}"
        f"{session.dialect.force_index('PRIMARY')} WHERE consumer_group = %s AND topic = %s AND partition_key = %s "
        "AND message_offset < %s ORDER BY message_offset LIMIT %s) w",
        (False, *ref, entry.key, entry.offset, most + 1),
    )
    assert row is not None  # noqa: S101  # an aggregate has one row
    number = int(unclaimed) + int(row[1] or 0)
    return Count(min(number, most), number <= most and row[0] <= most)


# -- where it went on ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Successor:
    """A message that an operator has made of a dead letter of another one."""

    offset: int
    outcome: str
    at: int
    """Epoch milliseconds."""
    by: str


def successors(
    session: Session, ref: GroupRef, key: str, offset: int, found: MessageContent | None, *, bounds: Bounds = PAGES
) -> list[Successor]:
    """What became of a message's dead letters of one group, where they were redriven or edited, oldest first.

    It is looked for among the ``bounds.redriven`` newest records of the group's dead letters.

    Args:
        ref: the group, of the message's own topic.
        found: the message, if it is still in the log.
    """
    rows = session.rows(
        "SELECT w.outcome, w.settled_at, w.settled_by, m.`offset`, m.original_offset, m.metadata FROM ("
        "SELECT e.id, e.outcome, e.settled_at, e.settled_by, e.related_id, e.partition_key "
        f"FROM {EVENTS} e{session.dialect.force_index('queue_delivery_events_group')} "
        f"WHERE e.consumer_group = %s AND e.topic = %s ORDER BY e.id DESC LIMIT %s) w "
        f"{session.dialect.join_to(LOG, 'm', 'queue_messages_id')} ON m.topic = %s AND m.partition_key = %s "
        "AND m.id = w.related_id WHERE w.related_id <> '' AND w.partition_key = %s",
        (ref.group, naming.dlq_topic(ref.topic), bounds.redriven, ref.topic, key, key),
    )
    first_offset, first_id = offset, None
    if found is not None:
        first_offset = found.entry.original_offset or offset
        first_id = found.entry.original_id or found.entry.message_id
    return sorted(
        (
            Successor(int(place), outcome, int(at), by)
            for outcome, at, by, place, original, metadata in rows
            if place > offset
            and (
                original == first_offset
                or (first_id is not None and messages.decode_metadata(metadata).get(REPLACES) == first_id)
            )
        ),
        key=lambda successor: successor.offset,
    )


def made_of(session: Session, events: Iterable[RecordedDelivery]) -> dict[int, int]:
    """Where the messages are that recorded deliveries name: event id → offset, of those that are in the log.

    A dead letter is in the DLQ topic; what an operator made of one is in the topic that it came from.
    """
    wanted = {
        event.event_id: (_topic_of_related(event), event.key, event.related_id) for event in events if event.related_id
    }
    offsets = log_entries.at_ids(session, list(wanted.values()))
    return {event_id: offsets[place] for event_id, place in wanted.items() if place in offsets}


def _topic_of_related(event: RecordedDelivery) -> str:
    if event.outcome == DeliveryEvent.Outcome.DEAD_LETTERED:
        return naming.dlq_topic(event.ref.topic)
    return naming.first_topic(event.ref.topic)
