"""Messages on their way: in the outbox, in the quarantine, to other databases, and topics with their numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.db.tables import LOG, OUTBOX, QUARANTINE
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.names.rules import relay_target, relayed_from
from django_mysqlqueue.options.topics import is_dlq
from django_mysqlqueue.service import log_places, relaying
from django_mysqlqueue.service.counts import Count, total
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.sequencing import DUE_ORDER
from django_mysqlqueue.sql.session import Session, built


@dataclass(frozen=True, slots=True)
class DueMessages:
    """Due messages that are not in the log yet. They are not part of any group's backlog."""

    count: Count
    """Number of messages."""
    since: int
    """When the first of them was published or came due, in epoch milliseconds."""


@dataclass(frozen=True, slots=True)
class OutboxOverview:
    """The messages in the outbox."""

    topics: Mapping[str, DueMessages]
    """Due messages for all groups of a topic, by topic. If there are too many to count, only the topics of those that
    wait longest."""
    groups: Mapping[GroupRef, DueMessages]
    """Due messages for a single group, such as redriven ones, by group."""
    scheduled: Count
    """Number of messages that are scheduled for later."""
    next_at: int | None
    """When the first of those comes due, in epoch milliseconds."""

    @property
    def waiting(self) -> Count:
        """Number of due messages, of all topics."""
        return total(one.count for one in self._due())

    @property
    def waiting_since(self) -> int | None:
        """When the first due message was published or came due, in epoch milliseconds."""
        return min((one.since for one in self._due()), default=None)

    def of(self, ref: GroupRef) -> DueMessages | None:
        """Return the due messages that a group will receive, or None if there are none."""
        found = [one for one in (self.topics.get(ref.topic), self.groups.get(ref)) if one is not None]
        if not found:
            return None
        return DueMessages(total(one.count for one in found), min(one.since for one in found))

    def _due(self) -> list[DueMessages]:
        return [*self.topics.values(), *self.groups.values()]


def read_outbox(session: Session, now: int, *, bounds: Bounds = PAGES) -> OutboxOverview:
    """Read the messages in the outbox, in two ranges of its index."""
    most = bounds.count
    hint = session.dialect.force_index("queue_outbox_due")
    rows = session.rows(
        "SELECT w.topic, w.target_group, COUNT(*), "
        "MIN(CASE WHEN w.deliver_at <= 0 THEN w.created_at ELSE w.deliver_at END) FROM "
        f"(SELECT topic, target_group, deliver_at, created_at FROM {OUTBOX}{hint} WHERE deliver_at <= %s "
        f"ORDER BY {DUE_ORDER} LIMIT %s) w GROUP BY w.topic, w.target_group",
        (now, most + 1),
    )
    exact = sum(number for _, _, number, _ in rows) <= most
    due = {
        (topic, group): DueMessages(Count(number, exact).capped(most), since)
        for topic, group, number, since in sorted(rows)
    }
    later, next_at = session.one(
        "SELECT COUNT(*), MIN(w.deliver_at) FROM "
        f"(SELECT deliver_at FROM {OUTBOX}{hint} WHERE deliver_at > %s ORDER BY {DUE_ORDER} LIMIT %s) w",
        (now, most + 1),
    )
    return OutboxOverview(
        {topic: found for (topic, group), found in due.items() if not group},
        {GroupRef(group, topic): found for (topic, group), found in due.items() if group},
        Count.up_to(most, later),
        next_at,
    )


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """A message that its topic's database refuses. No later one is relayed there."""

    topic: str
    """Its topic."""
    id: str
    """Its id."""
    offset: int
    """Its offset in the log of the database via which it was published."""
    error: str
    """The error of the database that refuses it."""


@dataclass(frozen=True, slots=True)
class RelayBacklog:
    """What a database has not received yet of this one's log."""

    target: str
    """Alias of the database."""
    messages: Count
    """Number of messages that wait. A count that stopped at a limit is not exact."""
    oldest_at: int | None
    """When the oldest of them entered the log, in epoch milliseconds; None if none waits."""
    refused: RefusedMessage | None = None
    """The oldest of them, if the database has refused it."""


def read_relays(session: Session, topics: Iterable[str], *, bounds: Bounds = PAGES) -> tuple[RelayBacklog, ...]:
    """Return the backlog of each relay from this database, by target, without a query if there is none."""
    targets = {target for topic in topics if (target := relay_target(topic))}
    return tuple(_backlog(session, target, bounds) for target in sorted(targets))


def _backlog(session: Session, target: str, bounds: Bounds) -> RelayBacklog:
    reached = relaying.watermark(session, target)
    places = log_places.walk(session, reached.read_offset, bounds.walked, newer=True)
    waiting = [place for place in places if relay_target(place.topic) == target]
    count = Count(len(waiting), exact=len(places) < bounds.walked)
    if not waiting:
        return RelayBacklog(target, count, None)
    first = waiting[0]
    row = session.row(f"SELECT published_at, id FROM {LOG} WHERE `offset` = %s", (first.offset,))
    refusal = relaying.refusal(session, target)
    refused = None
    if row is not None and refusal.offset == first.offset:
        refused = RefusedMessage(relayed_from(first.topic), str(row[1]), first.offset, refusal.error)
    return RelayBacklog(target, count, None if row is None else int(row[0]), refused)


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """A message that the log has refused. Times are in epoch milliseconds of the database's clock."""

    quarantine_id: int
    """Its primary key in the quarantine, in the order in which they came."""
    topic: str
    partition_key: str
    message_id: str
    size: int
    """The length of its payload in bytes."""
    created_at: int
    """When the publisher wrote it."""
    quarantined_at: int
    reason: str
    """The error of the database."""


@checked()
def list_quarantined(
    *, topic: str | None = None, after: int = 0, limit: int = 50, using: str | None = None
) -> tuple[QuarantinedRow, ...]:
    """List the messages that the log has refused, the oldest first, without their payloads.

    Args:
        topic: only messages of this topic.
        after: only messages after this ``quarantine_id``.
        limit: maximum number of messages.
        using: alias of the database (default: that of the topic, else of the queue).
    """
    session = Session(queue_alias(using, topic=topic))
    index, condition = "PRIMARY", "quarantine_id > %s"
    values: tuple[object, ...] = (after, limit)
    if topic is not None:
        index, condition, values = "queue_quarantine_topic", f"topic = %s AND {condition}", (topic, *values)
    rows = session.named(
        "SELECT quarantine_id, topic, partition_key, id AS message_id, size, created_at, quarantined_at, reason "
        f"FROM {QUARANTINE}{session.force_index(index)} WHERE {condition} ORDER BY quarantine_id LIMIT %s",
        values,
    )
    return tuple(built(QuarantinedRow, row) for row in rows)


@dataclass(frozen=True, slots=True)
class TopicOverview:
    """A topic. Counts are of messages and exact."""

    topic: str
    is_dlq: bool
    in_log: int = 0
    partitions: int = 0
    waiting: int = 0
    """Due messages in the outbox, which the sequencer has not moved yet."""
    waiting_since: int | None = None
    """When the oldest of those was published or came due."""
    scheduled: int = 0
    """Messages in the outbox that are scheduled for later."""


def read_topics(session: Session, now: int) -> list[TopicOverview]:
    """Read all topics with messages, by name. This walks the whole index of the log and the whole outbox."""
    found: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for topic, in_log, partitions in session.rows(
        f"SELECT topic, COUNT(*), COUNT(DISTINCT partition_key) FROM {LOG}"
        f"{session.dialect.force_index('queue_messages_partition')} GROUP BY topic"
    ):
        found[topic] |= {"in_log": in_log, "partitions": partitions}
    for topic, due, since, number in session.rows(
        "SELECT topic, SUM(CASE WHEN deliver_at <= %s THEN 1 ELSE 0 END), "
        "MIN(CASE WHEN deliver_at <= 0 THEN created_at WHEN deliver_at <= %s THEN deliver_at END), COUNT(*) "
        f"FROM {OUTBOX} GROUP BY topic",
        (now, now),
    ):
        found[topic] |= {"waiting": int(due), "waiting_since": since, "scheduled": number - int(due)}
    return [TopicOverview(topic, is_dlq=is_dlq(topic), **values) for topic, values in sorted(found.items())]
