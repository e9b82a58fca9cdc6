"""A message's history: its content, its state for each group, its recorded deliveries, and the messages made of it.

All reads are by primary key or along an index, for one message at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.db.tables import EVENTS, GROUPS, LOG, OFFSETS, STATE
from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.inspection import log_entries
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.inspection.log_entries import LogMessage
from django_mysqlqueue.inspection.overview import read_filter
from django_mysqlqueue.models import DeliveryEvent
from django_mysqlqueue.names.keys import public_coalesce_key
from django_mysqlqueue.names.rules import REPLACES
from django_mysqlqueue.options.delivery_limits import NO_LIMITS, DeliveryLimits
from django_mysqlqueue.options.topics import dlq_topic, first_topic
from django_mysqlqueue.service import groups, log, messages, payloads
from django_mysqlqueue.service.coalescing import NOTHING, THE_LOG, is_superseding, read
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.groups import OptionColumns
from django_mysqlqueue.service.losses import HELD_BY
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, built
from django_mysqlqueue.subscriptions.options import limits_of, paused_tasks_of, stored

WHOLE = 2**31 - 1
"""Number of bytes that no payload exceeds."""

Standing = Literal["elsewhere", "skipped", "settled", "in_flight", "waits", "unclaimed", "passed"]


@dataclass(frozen=True, slots=True)
class MessageContent:
    """A message in the log with its payload."""

    entry: LogMessage
    """The message without its payload."""
    payload: bytes
    metadata: dict[str, Any]
    failed_at: int
    """When the last attempt failed, in epoch milliseconds; 0 if it is not a dead letter."""
    failure_count: int
    """Number of failed attempts of a dead letter."""
    last_error: str
    """The last traceback, or the reason; empty if it is not a dead letter."""
    publisher_key: str | None = None
    """The publisher's key, if it was hashed to the partition."""
    expires_at: int | None = None
    """When it expires, in epoch milliseconds; None if it does not."""
    stored_coalesce_key: str = ""
    """Its coalesce key as it is stored, with the publisher's key where the partition may have several of those."""

    @property
    def coalesce_key(self) -> str:
        """Its coalesce key; empty if it has none."""
        return public_coalesce_key(self.entry.key, self.stored_coalesce_key)

    @property
    def replaces(self) -> str:
        """The id of the message that an operator replaced with this one, or empty."""
        value = self.metadata.get(REPLACES)
        return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class RecordedDelivery:
    """A recorded delivery, or an operation on a dead letter. Times are in epoch milliseconds."""

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
    """When the delivery ended."""
    handled_ms: int
    """Duration of the handler's call, in milliseconds."""
    by: str
    """The subscriber or operator."""
    error: str
    """The traceback or the reason, or empty."""
    related_id: str
    """The id of the resulting dead letter or redriven message, or empty."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """A message's state for one consumer group of its topic."""

    ref: GroupRef
    """The group and its topic."""
    standing: Standing
    """``settled``, ``in_flight`` or ``unclaimed``; ``waits``: it waits for another attempt, or for a snooze to end;
    ``elsewhere``: only another group receives it; ``skipped``: its offset is not above the group's start offset;
    ``passed``: the group's position is past it, but it was not delivered, for example because of the filter."""
    mode: str
    """``"ordered"`` or ``"shared"``."""
    paused: bool
    unfinished: groups.Unfinished
    """The unfinished operation on the group, or empty."""
    start_offset: int
    """The group's start offset."""
    failed: int = 0
    """Number of failed attempts."""
    held_by: str = ""
    """The subscriber that has claimed it, if it is in flight."""
    since: int = 0
    """When it was last claimed, in epoch milliseconds; 0 if it has no row of delivery state (it was not claimed, or its
    row was deleted after it was settled)."""
    until: int = 0
    """When another subscriber may claim it (``in_flight`` in shared mode) or when it comes due (``waits``), in epoch
    milliseconds."""
    last_error: str = ""
    """The last traceback, or empty."""
    before: Count | None = None
    """Number of unsettled messages before it in its partition, if it is unclaimed."""
    filter: FilterPolicy | str | None = None
    """The filter that applies to the group now; None if it has none; a text if this release cannot parse it: the
    reason."""
    limits: DeliveryLimits = NO_LIMITS
    """The limits that apply to the group."""
    paused_tasks: Collection[str] = ()
    """The tasks of a queue of jobs that are paused."""
    matches: bool | None = None
    """Whether the filter matches it, even if another one applied when it was claimed; None if no filter decides:
    there is none, it cannot be parsed, the message is for one group only, or earlier ones were superseded by it."""


@dataclass(frozen=True, slots=True)
class MessageHistory:
    """A message, its state for each group, and its recorded deliveries."""

    content: MessageContent | None
    """None if it is no longer in the log, but deliveries of it are recorded (``get_message`` finds only messages in the
    log)."""
    groups: tuple[GroupState, ...]
    """Its state for each consumer group on its topic; empty if it is no longer in the log."""
    deliveries: tuple[RecordedDelivery, ...]
    """Oldest first. Which are recorded depends on the setting ``RECORD_DELIVERIES``."""
    more_deliveries: bool
    """True if there are older records that were not read."""


@checked()
def get_message(
    topic: str,
    message_id: str,
    *,
    key: str | None = None,
    using: str | None = None,
    bounds: Bounds = PAGES,
) -> MessageHistory | None:
    """Read a message in the log by its id, with its state for each consumer group; None if it is not in the log.

    A message is not in the log before the sequencer has moved it there, nor after it was garbage-collected. In a topic
    with more than ``bounds.searched_partitions`` partitions, pass the partition key to be sure to find the message.

    Args:
        topic: the topic that it was published to.
        message_id: its id, as returned by ``publish``.
        key: its partition key. Ids are unique in a partition; without a key, the newest message with the id is read.
        using: alias of the database (default: that of the topic, else of the queue).
        bounds: limits of what is read.
    """
    session = Session(queue_alias(using, topic=topic))
    found = log_entries.by_id(session, message_id, topic=topic, key=key, bounds=bounds).entries
    return read_history(session, found[0].offset, bounds=bounds) if found else None


def read_history(session: Session, offset: int, *, most: int = WHOLE, bounds: Bounds = PAGES) -> MessageHistory | None:
    """Read the message at an offset with its history; None if it is not in the log and has no records."""
    found = content(session, offset, most=most)
    deliveries, more = recorded(session, offset, bounds=bounds)
    if found is None and not deliveries:
        return None
    groups = () if found is None else tuple(states(session, found, bounds=bounds))
    return MessageHistory(found, groups, tuple(deliveries), more)


def content(session: Session, offset: int, *, most: int) -> MessageContent | None:
    """Read the message at an offset with the first ``most`` bytes of its payload; None if it is not in the log."""
    for row in session.named(
        f"SELECT {log_entries.COLUMNS}, SUBSTR(m.payload, 1, %s) AS payload, m.metadata, m.failed_at, m.failure_count, "
        "m.last_error, m.publisher_key, m.expires_at, COALESCE(m.coalesce_key, '') AS stored_coalesce_key "
        f"FROM {LOG} m WHERE m.`offset` = %s",
        (most, offset),
    ):
        payload, metadata = payloads.content(row.payload), messages.decode_metadata(row.metadata)
        return built(MessageContent, row, entry=built(LogMessage, row), payload=payload, metadata=metadata)
    return None


def recorded(session: Session, offset: int, *, bounds: Bounds = PAGES) -> tuple[list[RecordedDelivery], bool]:
    """Read the recorded deliveries of a message, oldest first, and whether there are older ones."""
    most = bounds.recorded
    rows = session.named(
        "SELECT e.id AS event_id, e.consumer_group, e.topic, e.partition_key AS `key`, e.message_offset AS `offset`, "
        "e.attempt, e.outcome, e.delivered_at, e.settled_at, e.handled_ms, e.settled_by AS `by`, e.error, e.related_id "
        f"FROM {EVENTS} e{session.dialect.force_index('queue_delivery_events_message')} WHERE e.message_offset = %s "
        "ORDER BY e.id DESC LIMIT %s",
        (offset, most + 1),
    )
    found = [built(RecordedDelivery, row, ref=GroupRef(row.consumer_group, row.topic)) for row in rows[:most]]
    return found[::-1], len(rows) > most


# -- its state for each group -------------------------------------------------


def states(session: Session, found: MessageContent, *, bounds: Bounds = PAGES) -> list[GroupState]:
    """Read a message's state for each group on its topic, by name."""
    entry = found.entry
    of_group = ("consumer_group", "mode", "paused", "after_seek", "start_offset", *OptionColumns._fields)
    rows = session.named(
        f"SELECT {', '.join(f'g.{name}' for name in of_group)}, o.offset_acked, o.offset_claimed, s.acked, "
        f"s.retry_count AS failed, {HELD_BY} AS held_by, s.delivered_at AS since, s.invisible_until AS until, "
        "s.last_error "
        f"FROM (SELECT {', '.join(of_group)} FROM {GROUPS} WHERE topic = %s LIMIT %s) g "
        f"{session.dialect.join_to(OFFSETS, 'o', left=True)} "
        "ON o.consumer_group = g.consumer_group AND o.topic = %s AND o.partition_key = %s "
        f"{session.dialect.join_to(STATE, 's', left=True)} ON s.consumer_group = g.consumer_group AND s.topic = %s "
        "AND s.partition_key = %s AND s.message_offset = %s",
        (entry.topic, bounds.message_groups, entry.topic, entry.key, entry.topic, entry.key, entry.offset),
    )
    states = []
    for row in sorted(rows, key=lambda row: str(row.consumer_group)):
        columns = OptionColumns(*(getattr(row, name) for name in OptionColumns._fields))
        policy = read_filter(columns)
        matches = None
        if isinstance(policy, FilterPolicy) and not entry.target_group:
            matches = policy.matches(found.metadata)
        ref, unfinished = GroupRef(row.consumer_group, entry.topic), groups.unfinished(row.after_seek)
        if matches is False and is_superseding(session, ref, entry.key, entry.offset, found.stored_coalesce_key):
            matches = None
        standing, more = _standing(session, bounds, ref, entry, row)
        more |= {"filter": policy, "limits": limits_of(columns), "matches": matches}
        more["paused_tasks"] = paused_tasks_of(stored(columns.overrides))
        states.append(GroupState(ref, standing, row.mode, bool(row.paused), unfinished, row.start_offset, **more))
    return states


def _standing(
    session: Session, bounds: Bounds, ref: GroupRef, entry: LogMessage, row: Any
) -> tuple[Standing, dict[str, Any]]:
    """Return a message's standing for a group, and the facts that belong to it, by field."""
    if entry.target_group not in ("", ref.group):
        return "elsewhere", {}
    if row.acked is not None:
        more = {name: getattr(row, name) for name in ("failed", "held_by", "since", "until", "last_error")}
        return "settled" if row.acked else "in_flight" if row.held_by else "waits", more
    if entry.offset <= row.start_offset:
        return "skipped", {}
    if row.offset_acked is not None and entry.offset <= row.offset_acked:
        return "settled", {}
    if row.offset_claimed is not None and entry.offset <= row.offset_claimed:
        return "passed", {}
    after = max(row.start_offset, row.offset_claimed or 0)
    return "unclaimed", {"before": _before(session, ref, entry, after, bounds.partition_count)}


def _before(session: Session, ref: GroupRef, entry: LogMessage, cursor: int, most: int) -> Count:
    """Count the unsettled messages before one in its partition, including those for other groups."""
    ranges = {entry.key: (cursor, entry.offset - 1)}
    unclaimed = log.count_between(session, ref.topic, ranges, most + 1)
    looked, claimed = session.one(
        f"SELECT COUNT(*), SUM(CASE WHEN w.acked = %s THEN 1 ELSE 0 END) FROM (SELECT acked FROM {STATE}"
        f"{session.dialect.force_index('PRIMARY')} WHERE consumer_group = %s AND topic = %s AND partition_key = %s "
        "AND message_offset < %s ORDER BY message_offset LIMIT %s) w",
        (False, *ref, entry.key, entry.offset, most + 1),
    )
    return Count(unclaimed + int(claimed or 0), looked <= most).capped(most)


# -- messages made of it ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Successor:
    """A message that an operator published from a dead letter at a time."""

    offset: int
    outcome: str
    at: int
    by: str


def successors(
    session: Session, ref: GroupRef, key: str, offset: int, found: MessageContent | None, *, bounds: Bounds = PAGES
) -> list[Successor]:
    """Return the messages that a group's dead letters of a message were redriven or edited to, oldest first."""
    rows = session.rows(
        "SELECT w.outcome, w.settled_at, w.settled_by, m.`offset`, m.original_offset, m.metadata FROM ("
        "SELECT e.id, e.outcome, e.settled_at, e.settled_by, e.related_id, e.partition_key "
        f"FROM {EVENTS} e{session.dialect.force_index('queue_delivery_events_group')} "
        f"WHERE e.consumer_group = %s AND e.topic = %s ORDER BY e.id DESC LIMIT %s) w "
        f"{session.dialect.join_to(LOG, 'm', 'queue_messages_id')} ON m.topic = %s AND m.partition_key = %s "
        "AND m.id = w.related_id WHERE w.related_id <> '' AND w.partition_key = %s",
        (ref.group, dlq_topic(ref.topic), bounds.redriven, ref.topic, key, key),
    )
    first_offset, first_id = offset, None
    if found is not None:
        first_offset = found.entry.original_offset or offset
        first_id = found.entry.original_id or found.entry.message_id

    def is_of_first(original: int, metadata: str) -> bool:
        replaces = None if first_id is None else messages.decode_metadata(metadata).get(REPLACES)
        return original == first_offset or (first_id is not None and replaces == first_id)

    later = [
        Successor(int(place), outcome, int(at), by)
        for outcome, at, by, place, original, metadata in rows
        if place > offset and is_of_first(original, metadata)
    ]
    return sorted(later, key=lambda successor: successor.offset)


def latest_with_key(session: Session, content: MessageContent) -> int:
    """Return the offset of the latest message with the coalesce key of a message; 0 if it has no key."""
    if not content.stored_coalesce_key:
        return 0
    row = (THE_LOG, content.entry.topic, content.entry.key, content.stored_coalesce_key)
    return read(session, [row]).get(row, NOTHING).offset


def made_of(session: Session, events: Iterable[RecordedDelivery]) -> dict[int, int]:
    """Return the offsets of the dead letters and redriven messages that are in the log, by the id of their event."""
    wanted = {}
    for event in events:
        if event.related_id:
            topic_of = dlq_topic if event.outcome == DeliveryEvent.Outcome.DEAD_LETTERED else first_topic
            wanted[event.event_id] = (topic_of(event.ref.topic), event.key, event.related_id)
    offsets = log_entries.at_ids(session, list(wanted.values()))
    return {event_id: offsets[place] for event_id, place in wanted.items() if place in offsets}
