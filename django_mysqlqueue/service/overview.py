"""The queue's state at a glance: what the dashboard, the metrics and the health check look at.

Nothing here reads more than a bounded number of rows, whatever the log, the
backlog and the history hold: counts stop at ``CAP`` and say so. What grows is
one look along an index for each partition that a group has ever worked on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from django_mysqlqueue import names
from django_mysqlqueue.models import (
    ConsumerGroup,
    ConsumerOffset,
    DeliveryState,
    OutboxMessage,
    QueueMessage,
    Sequencer,
    SubscriberHeartbeat,
)
from django_mysqlqueue.service import heartbeats
from django_mysqlqueue.service.groups import GroupRef
from django_mysqlqueue.service.subsets import Subset
from django_mysqlqueue.service.transactions import Session

LOG = QueueMessage._meta.db_table
OUTBOX = OutboxMessage._meta.db_table
STATE = DeliveryState._meta.db_table
OFFSETS = ConsumerOffset._meta.db_table
HEARTBEATS = SubscriberHeartbeat._meta.db_table
SEQUENCER = Sequencer._meta.db_table
GROUPS = ConsumerGroup._meta.db_table

CAP = 10_000
"""A count goes no further."""
HEADS = 50
"""So many partitions, those that wait longest, are looked at by name."""
NEWEST = 2000
"""So many of the newest messages are looked through for partitions that a group has never seen."""


@dataclass(frozen=True, slots=True)
class Count:
    """A number that may stand for more: a count that stopped."""

    value: int
    exact: bool = True

    def __str__(self) -> str:
        return f"{self.value:,}" if self.exact else f"{self.value:,}+"

    def __add__(self, other: Count) -> Count:
        return Count(self.value + other.value, self.exact and other.exact)

    def __bool__(self) -> bool:
        return self.value > 0


def counted(number: int) -> Count:
    """A count whose query stopped at ``CAP + 1``."""
    return Count(min(number, CAP), number <= CAP)


@dataclass(frozen=True, slots=True)
class Head:
    """A partition with work, and the first message in it that its group has not settled."""

    key: str
    offset: int
    published_at: int
    """Epoch milliseconds."""
    started: bool
    """The group has a state row of it: it was claimed at least once."""
    attempts: int
    """Failed or lost ones."""
    delivered_by: str
    """Who handles it now, or ''."""
    invisible_until: int
    last_error: str


@dataclass(frozen=True, slots=True)
class SubscriberRow:
    """One subscriber's sign of life for one group."""

    ref: GroupRef
    name: str
    heartbeat_at: int
    deregistered_at: int
    info: dict[str, Any]
    live: bool

    @property
    def subset(self) -> Subset:
        return Subset.read(self.info.get("subset"))


@dataclass(frozen=True, slots=True)
class GroupOverview:
    """A consumer group of a topic. Counts are of messages, times in epoch milliseconds."""

    ref: GroupRef
    mode: str
    paused: bool
    after_seek: str
    start_offset: int
    registered_at: int
    lag: Count
    """In the log, and not settled."""
    in_flight: Count
    """Handed out to a subscriber."""
    retrying: Count
    """Failed, and waiting for another attempt."""
    dead_letters: Count
    heads: tuple[Head, ...]
    """The partitions whose first unsettled message is the oldest, oldest first; at most ``HEADS``."""
    subscribers: tuple[SubscriberRow, ...]
    """Live and silent ones; those that have left are not among them."""

    @property
    def live(self) -> tuple[SubscriberRow, ...]:
        return tuple(row for row in self.subscribers if row.live)

    @property
    def oldest_at(self) -> int | None:
        """When the oldest unsettled message took its place in the log."""
        return min((head.published_at for head in self.heads), default=None)


@dataclass(frozen=True, slots=True)
class OutboxOverview:
    """What publishers have committed and the sequencer has not moved."""

    waiting: Count
    """Due."""
    waiting_since: int | None
    """When the first of those was published or came due, epoch milliseconds."""
    scheduled: Count
    """For later."""
    next_at: int | None
    """When the first of those comes due."""


@dataclass(frozen=True, slots=True)
class QueueOverview:
    """The whole queue on one database."""

    now: int
    """The database's clock, epoch milliseconds."""
    last_offset: int
    sequenced_at: int
    outbox: OutboxOverview
    groups: tuple[GroupOverview, ...]
    dead_letters: Count
    """In all DLQ topics, whether or not the group that failed them is still there."""
    more_groups: bool = field(default=False)
    """There are more groups than were asked for."""

    @property
    def lag(self) -> Count:
        return total(group.lag for group in self.groups)

    @property
    def in_flight(self) -> Count:
        return total(group.in_flight for group in self.groups)

    @property
    def retrying(self) -> Count:
        return total(group.retrying for group in self.groups)

    @property
    def oldest_at(self) -> int | None:
        return min((group.oldest_at for group in self.groups if group.oldest_at is not None), default=None)

    @property
    def live(self) -> frozenset[str]:
        """Names of the live subscribers."""
        return frozenset(row.name for group in self.groups for row in group.live)


def total(counts: Any) -> Count:
    """The sum of some counts; of none it is 0."""
    return sum(counts, Count(0))


def read(using: str, *, lease_ms: int, limit: int = 200) -> QueueOverview:
    """The state of the queue, of its first ``limit`` groups in order of topic and group."""
    session = Session(using)
    now = session.now()
    last_offset, sequenced_at = session.row(f"SELECT last_offset, sequenced_at FROM {SEQUENCER} WHERE id = 1") or (0, 0)
    rows = session.rows(
        f"SELECT consumer_group, topic, mode, paused, after_seek, start_offset, registered_at FROM {GROUPS} "
        "ORDER BY topic, consumer_group LIMIT %s",
        (limit + 1,),
    )
    letters = dead_letters(session)
    subscribers = read_subscribers(session, lease_ms=lease_ms)
    found = tuple(
        _group(session, GroupRef(*row[:2]), row[2:], letters, subscribers.get(GroupRef(*row[:2]), []), int(last_offset))
        for row in rows[:limit]
    )
    return QueueOverview(
        now,
        int(last_offset),
        int(sequenced_at),
        outbox(session, now),
        found,
        total(letters.values()),
        more_groups=len(rows) > limit,
    )


def one_group(using: str, ref: GroupRef, *, lease_ms: int) -> GroupOverview | None:
    """The state of a single group; None: it is not registered."""
    session = Session(using)
    row = session.row(
        "SELECT mode, paused, after_seek, start_offset, registered_at "
        f"FROM {GROUPS} WHERE consumer_group = %s AND topic = %s",
        ref,
    )
    if row is None:
        return None
    subscribers = read_subscribers(session, lease_ms=lease_ms, ref=ref).get(ref, [])
    letters = dead_letters(session, [names.dlq_topic(ref.topic)])
    last = session.row(f"SELECT last_offset FROM {SEQUENCER} WHERE id = 1") or (0,)
    return _group(session, ref, row, letters, subscribers, int(last[0]))


def outbox(session: Session, now: int) -> OutboxOverview:
    """What waits in the outbox at a moment, by two short ranges of its index."""
    hint = session.dialect.force_index("queue_outbox_due")

    def count(condition: str) -> Count:
        row = session.row(
            f"SELECT COUNT(*) FROM (SELECT 1 FROM {OUTBOX}{hint} WHERE deliver_at {condition} %s LIMIT %s) w",
            (now, CAP + 1),
        )
        assert row is not None  # noqa: S101  # an aggregate has one row
        return counted(int(row[0]))

    at_once = session.row(
        f"SELECT created_at FROM {OUTBOX}{hint} WHERE deliver_at = 0 ORDER BY deliver_at, outbox_id LIMIT 1"
    )
    came_due, scheduled = (
        session.row(
            f"SELECT deliver_at FROM {OUTBOX}{hint} WHERE deliver_at > %s AND deliver_at {comparison} %s "
            "ORDER BY deliver_at, outbox_id LIMIT 1",
            (0 if comparison == "<=" else now, now if comparison == "<=" else 2**62),
        )
        for comparison in ("<=", "<")
    )
    since = [int(row[0]) for row in (at_once, came_due) if row is not None]
    return OutboxOverview(
        count("<="), min(since, default=None), count(">"), None if scheduled is None else int(scheduled[0])
    )


def read_subscribers(
    session: Session, *, lease_ms: int, ref: GroupRef | None = None
) -> dict[GroupRef, list[SubscriberRow]]:
    """Every subscriber that has not left, by group and in order of name."""
    where, parameters = ("", ()) if ref is None else ("AND h.consumer_group = %s AND h.topic = %s ", tuple(ref))
    found: dict[GroupRef, list[SubscriberRow]] = {}
    for group, topic, name, at, left, info, live in session.rows(
        "SELECT h.consumer_group, h.topic, h.subscriber_name, h.heartbeat_at, h.deregistered_at, h.info, "
        f"CASE WHEN {heartbeats.fresh('h', session)} THEN 1 ELSE 0 END FROM {HEARTBEATS} h "
        f"WHERE h.deregistered_at = 0 {where}ORDER BY h.consumer_group, h.topic, h.subscriber_name",
        (lease_ms, lease_ms, *parameters),
    ):
        row = SubscriberRow(GroupRef(group, topic), name, int(at), int(left), json.loads(info), bool(live))
        found.setdefault(row.ref, []).append(row)
    return found


def dead_letters(session: Session, topics: Sequence[str] | None = None) -> dict[tuple[str, GroupRef], Count]:
    """Dead letters by DLQ topic and the group that failed them; each topic's count stops at ``CAP``."""
    hint = session.dialect.force_index("queue_messages_partition")
    if topics is None:
        topics = [topic for topic in all_topics(session) if names.is_dlq(topic)]
    found: dict[tuple[str, GroupRef], Count] = {}
    for topic in topics:
        rows = session.rows(
            f"SELECT w.failed_group, w.original_topic, COUNT(*) FROM (SELECT failed_group, original_topic "
            f"FROM {LOG}{hint} WHERE topic = %s ORDER BY partition_key, `offset` LIMIT %s) w "
            "GROUP BY w.failed_group, w.original_topic",
            (topic, CAP + 1),
        )
        exact = sum(count for *_, count in rows) <= CAP
        for group, original, count in rows:
            if group:
                found[topic, GroupRef(group, original)] = Count(min(int(count), CAP), exact)
    return found


def all_topics(session: Session) -> list[str]:
    """Every topic that has a message in the log, one look along the index for each."""
    hint = session.dialect.force_index("queue_messages_partition")
    found: list[str] = []
    while True:
        above, last = (">", found[-1]) if found else (">=", "")
        row = session.row(f"SELECT topic FROM {LOG}{hint} WHERE topic {above} %s ORDER BY topic LIMIT 1", (last,))
        if row is None:
            return found
        found.append(row[0])


# -- a group ------------------------------------------------------------------


def _group(
    session: Session,
    ref: GroupRef,
    row: Sequence[Any],
    letters: dict[tuple[str, GroupRef], Count],
    subscribers: Sequence[SubscriberRow],
    last_offset: int,
) -> GroupOverview:
    mode, paused, after_seek, start_offset, registered_at = row
    waiting, in_flight, retrying = _states(session, ref)
    first = _first_above_watermarks(session, ref)
    new, unseen = _in_unknown_partitions(session, ref, int(start_offset))
    if not any(one.live for one in subscribers):
        # With nobody to make them known, there may be more of them further back.
        unseen = Count(unseen.value, unseen.exact and last_offset - int(start_offset) <= NEWEST)
    first = sorted((*first, *new))[:HEADS]
    lag = Count(0)
    if first or waiting or unseen:
        lag = waiting + _above_cursor(session, ref) + unseen
        # It is one number to who reads it: of two that stopped, the cap is enough.
        lag = Count(min(lag.value, CAP), lag.exact and lag.value <= CAP)
    return GroupOverview(
        ref=ref,
        mode=mode,
        paused=bool(paused),
        after_seek=after_seek,
        start_offset=int(start_offset),
        registered_at=int(registered_at),
        lag=lag,
        in_flight=in_flight,
        retrying=retrying,
        dead_letters=letters.get((names.dlq_topic(ref.topic), ref), Count(0)),
        heads=tuple(heads(session, ref, first)),
        subscribers=tuple(subscribers),
    )


def _states(session: Session, ref: GroupRef) -> tuple[Count, Count, Count]:
    """Claimed and unsettled; of those in a subscriber's hands; of those waiting for another attempt."""
    row = session.row(
        "SELECT COUNT(*), SUM(CASE WHEN w.delivered_by <> '' THEN 1 ELSE 0 END), "
        "SUM(CASE WHEN w.delivered_by = '' AND w.retry_count > 0 THEN 1 ELSE 0 END) FROM ("
        f"SELECT delivered_by, retry_count FROM {STATE}{session.dialect.force_index('queue_delivery_state_due')} "
        "WHERE consumer_group = %s AND topic = %s AND acked = %s LIMIT %s) w",
        (*ref, False, CAP + 1),
    )
    assert row is not None  # noqa: S101  # an aggregate has one row
    all_, in_flight, retrying = (int(value or 0) for value in row)
    exact = all_ <= CAP
    return counted(all_), Count(min(in_flight, CAP), exact), Count(min(retrying, CAP), exact)


def _above_cursor(session: Session, ref: GroupRef) -> Count:
    """Messages that the group has not claimed yet, in the partitions that it knows."""
    hint = session.dialect.force_index("queue_messages_partition")
    row = session.row(
        "SELECT COUNT(*), SUM(CASE WHEN m.target_group IN ('', %s) THEN 1 ELSE 0 END) FROM ("
        f"SELECT l.`offset` AS place FROM {OFFSETS} o {session.dialect.join} {LOG} l{hint} ON l.topic = o.topic "
        "AND l.partition_key = o.partition_key AND l.`offset` > o.offset_claimed "
        f"WHERE o.consumer_group = %s AND o.topic = %s LIMIT %s) w {session.dialect.join} {LOG} m "
        "ON m.`offset` = w.place",
        (ref.group, *ref, CAP + 1),
    )
    assert row is not None  # noqa: S101  # an aggregate has one row
    return Count(min(int(row[1] or 0), CAP), int(row[0]) <= CAP)


def _first_above_watermarks(session: Session, ref: GroupRef) -> list[tuple[int, str]]:
    """(offset, partition key) of the first unsettled message of each partition, where that is oldest.

    It is the one above the watermark; what has been settled since that moved last is passed over.
    """
    hint = session.dialect.force_index("queue_messages_partition")
    rows = session.rows(
        "SELECT w.first, w.partition_key FROM (SELECT o.partition_key, ("
        f"SELECT m.`offset` FROM {LOG} m{hint} WHERE m.topic = %s AND m.partition_key = o.partition_key "
        "AND m.`offset` > o.offset_acked AND m.target_group IN ('', %s) "
        f"AND NOT EXISTS (SELECT 1 FROM {STATE} d WHERE d.consumer_group = %s AND d.topic = m.topic "
        "AND d.partition_key = m.partition_key AND d.message_offset = m.`offset` AND d.acked = %s) "
        f"ORDER BY m.`offset` LIMIT 1) AS first FROM {OFFSETS} o WHERE o.consumer_group = %s AND o.topic = %s) w "
        "WHERE w.first IS NOT NULL ORDER BY w.first LIMIT %s",
        (ref.topic, ref.group, ref.group, True, *ref, HEADS),
    )
    return [(int(offset), key) for offset, key in rows]


def _in_unknown_partitions(session: Session, ref: GroupRef, start: int) -> tuple[list[tuple[int, str]], Count]:
    """The first messages of partitions where the group has no place yet, and how many there are in them.

    They are looked for among the newest messages: a live subscriber makes
    partitions known at once. A group that has never worked has its oldest ones
    behind its start.
    """
    known = session.row(f"SELECT 1 FROM {OFFSETS} WHERE consumer_group = %s AND topic = %s LIMIT 1", ref)
    rows = session.rows(
        "SELECT MIN(w.place), w.partition_key, COUNT(*) FROM (SELECT topic, partition_key, `offset` AS place, "
        f"target_group FROM {LOG}{session.dialect.force_index('PRIMARY')} WHERE `offset` > %s "
        f"ORDER BY `offset`{' DESC' if known else ''} LIMIT %s) w LEFT JOIN {OFFSETS} o "
        "ON o.consumer_group = %s AND o.topic = %s AND o.partition_key = w.partition_key "
        "WHERE w.topic = %s AND w.target_group IN ('', %s) AND o.topic IS NULL GROUP BY w.partition_key",
        (start, NEWEST, *ref, ref.topic, ref.group),
    )
    unseen = sum(int(count) for *_, count in rows)
    return sorted((int(offset), key) for offset, key, _ in rows), Count(unseen, exact=unseen < NEWEST)


def heads(session: Session, ref: GroupRef, first: Sequence[tuple[int, str]]) -> list[Head]:
    """What is known of some first messages, oldest first; those settled at this moment are left out."""
    found: list[Head] = []
    for chunk in session.chunks(sorted(first)):
        found += [
            Head(key, int(offset), int(at), bool(started), int(attempts), by, int(until), error)
            for key, offset, at, acked, started, attempts, by, until, error in session.rows(
                "SELECT m.partition_key, m.`offset`, m.published_at, COALESCE(s.acked, 0), "
                "CASE WHEN s.message_offset IS NULL THEN 0 ELSE 1 END, COALESCE(s.retry_count, 0), "
                "COALESCE(s.delivered_by, ''), COALESCE(s.invisible_until, 0), COALESCE(s.last_error, '') "
                f"FROM {session.dialect.rows(('o',), len(chunk))} {session.dialect.join} {LOG} m "
                f"ON m.`offset` = v.o LEFT JOIN {STATE} s ON s.consumer_group = %s AND s.topic = m.topic "
                "AND s.partition_key = m.partition_key AND s.message_offset = m.`offset`",
                (*(offset for offset, _ in chunk), ref.group),
            )
            if not acked
        ]
    return sorted(found, key=lambda head: head.offset)
