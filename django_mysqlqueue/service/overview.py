"""The queue's state at a glance: what the dashboard, the metrics and the health check look at.

Nothing here reads more than a bounded number of rows, whatever the log, the
backlog and the history hold: counts stop at ``CAP`` and say so. What grows is
one look along an index for each partition of a topic, 4 µs each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
from django_mysqlqueue.service.groups import GroupRef, waiting_since
from django_mysqlqueue.service.heads import Head, heads
from django_mysqlqueue.service.subsets import Subset
from django_mysqlqueue.service.topics import Ends, all_topics
from django_mysqlqueue.service.transactions import Session, flat

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
PARTITIONS = 20_000
"""So many partitions of a topic are looked at; of one with more, those that the newest messages are in, too."""
LOOKED_INTO = 100
"""Partitions that one statement looks into."""
LOOKED_AT = 100
"""Messages of each of them."""
WINDOW = 600.0
"""Seconds that count as recent where nobody says otherwise."""
SECONDS = 0.1
"""Looking into partitions with a backlog takes no longer for all groups together: then counts say that they stopped."""


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
    sought_at: int
    """When its last seek began or ended; 0: never."""
    lag: Count
    """In the log, and not settled."""
    in_flight: Count
    """Handed out to a subscriber."""
    retrying: Count
    """Failed, and waiting for another attempt."""
    dead_letters: Count
    recent_dead_letters: Count
    """Of those, what failed within the window of the overview."""
    heads: tuple[Head, ...]
    """The partitions whose first unsettled message is the oldest, oldest first; at most ``HEADS``."""
    subscribers: tuple[SubscriberRow, ...]
    """Live and silent ones; those that have left are not among them."""

    @property
    def live(self) -> tuple[SubscriberRow, ...]:
        return tuple(row for row in self.subscribers if row.live)

    @property
    def oldest_at(self) -> int | None:
        """Since when the oldest unsettled message waits for the group (``groups.waiting_since``)."""
        return min((self.waiting_since(head) for head in self.heads), default=None)

    def waiting_since(self, head: Head) -> int:
        """Since when the first message of a partition waits for the group, epoch milliseconds."""
        return waiting_since(head.published_at, self.registered_at, self.sought_at)


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
    window: float = field(default=WINDOW)
    """Seconds that count as recent."""
    topics: tuple[str, ...] | None = field(default=None)
    """Those that have a message in the log; None: they were not looked at."""

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


def read(
    using: str,
    *,
    lease_ms: int,
    limit: int = 200,
    partitions: int | None = None,
    seconds: float | None = None,
    window: float = WINDOW,
) -> QueueOverview:
    """The state of the queue.

    Args:
        limit: of its first groups in order of topic and group.
        partitions: so many of a topic are looked at; None: ``PARTITIONS``.
        seconds: looking into those with a backlog takes no longer for all groups together; None: ``SECONDS``.
        window: seconds that count as recent.
    """
    session = Session(using)
    now = session.now()
    last_offset, sequenced_at = session.row(f"SELECT last_offset, sequenced_at FROM {SEQUENCER} WHERE id = 1") or (0, 0)
    rows = session.rows(
        f"SELECT consumer_group, topic, mode, paused, after_seek, start_offset, registered_at, sought_at FROM {GROUPS} "
        "ORDER BY topic, consumer_group LIMIT %s",
        (limit + 1,),
    )
    topics = all_topics(session)
    letters = dead_letters(session, now - int(window * 1000), [topic for topic in topics if names.is_dlq(topic)])
    subscribers = read_subscribers(session, lease_ms=lease_ms)
    ends = Ends(session, PARTITIONS if partitions is None else partitions)
    found = []
    patience = Patience(SECONDS if seconds is None else seconds, min(limit, len(rows)))
    for row in rows[:limit]:
        ref = GroupRef(*row[:2])
        found.append(_group(session, ref, row[2:], letters, subscribers.get(ref, []), ends, patience))
    return QueueOverview(
        now,
        int(last_offset),
        int(sequenced_at),
        outbox(session, now),
        tuple(found),
        total(one.all for one in letters.values()),
        more_groups=len(rows) > limit,
        window=window,
        topics=tuple(topics),
    )


def one_group(using: str, ref: GroupRef, *, lease_ms: int, window: float = WINDOW) -> GroupOverview | None:
    """The state of a single group; None: it is not registered."""
    session = Session(using)
    row = session.row(
        "SELECT mode, paused, after_seek, start_offset, registered_at, sought_at "
        f"FROM {GROUPS} WHERE consumer_group = %s AND topic = %s",
        ref,
    )
    if row is None:
        return None
    subscribers = read_subscribers(session, lease_ms=lease_ms, ref=ref).get(ref, [])
    letters = dead_letters(session, session.now() - int(window * 1000), [names.dlq_topic(ref.topic)])
    return _group(session, ref, row, letters, subscribers, Ends(session, PARTITIONS), Patience(SECONDS, 1))


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
        f"SELECT created_at FROM {OUTBOX}{hint} WHERE deliver_at <= 0 ORDER BY deliver_at, outbox_id LIMIT 1"
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


class DeadLetters(NamedTuple):
    """How many dead letters a group has."""

    all: Count
    recent: Count


NO_DEAD_LETTERS = DeadLetters(Count(0), Count(0))


def dead_letters(session: Session, since: int, topics: Sequence[str]) -> dict[tuple[str, GroupRef], DeadLetters]:
    """Dead letters by DLQ topic and the group that failed them; each topic's count stops at ``CAP``.

    Args:
        since: those that failed from then on are recent (epoch milliseconds).
    """
    hint = session.dialect.force_index("queue_messages_partition")
    found: dict[tuple[str, GroupRef], DeadLetters] = {}
    for topic in topics:
        rows = session.rows(
            "SELECT w.failed_group, w.original_topic, COUNT(*), SUM(CASE WHEN w.failed_at >= %s THEN 1 ELSE 0 END) "
            f"FROM (SELECT failed_group, original_topic, failed_at FROM {LOG}{hint} WHERE topic = %s "
            "ORDER BY partition_key, `offset` LIMIT %s) w GROUP BY w.failed_group, w.original_topic",
            (since, topic, CAP + 1),
        )
        exact = sum(count for _, _, count, _ in rows) <= CAP
        for group, original, *counts in rows:
            if group:
                number, recent = (Count(min(int(count), CAP), exact) for count in counts)
                found[topic, GroupRef(group, original)] = DeadLetters(number, recent)
    return found


# -- a group ------------------------------------------------------------------


class Patience:
    """Seconds for some groups together: what one does not use is the next ones'."""

    def __init__(self, seconds: float, groups: int) -> None:
        self._left = seconds
        self._groups = groups
        self._began = 0.0
        self._share = 0.0

    def begin(self) -> None:
        """The next group's share begins."""
        self._share = self._left / max(1, self._groups)
        self._groups -= 1
        self._began = time.monotonic()

    def is_over(self) -> bool:
        return time.monotonic() - self._began > self._share

    def end(self) -> None:
        """The group is done with."""
        self._left = max(0.0, self._left - (time.monotonic() - self._began))


def _group(
    session: Session,
    ref: GroupRef,
    row: Sequence[Any],
    letters: dict[tuple[str, GroupRef], DeadLetters],
    subscribers: Sequence[SubscriberRow],
    ends: Ends,
    patience: Patience,
) -> GroupOverview:
    mode, paused, after_seek, start_offset, registered_at, sought_at = row
    dead = letters.get((names.dlq_topic(ref.topic), ref), NO_DEAD_LETTERS)
    in_flight, retrying = _in_hands(session, ref)
    claimed, first, claimed_all = _claimed(session, ref)
    unclaimed, firsts = _unclaimed(session, ref, int(start_offset), ends, patience)
    for key, offset in firsts.items():
        first.setdefault(key, offset)
    lag = Count(claimed, claimed_all) + unclaimed
    candidates = sorted((offset, key) for key, offset in first.items())[:HEADS]
    return GroupOverview(
        ref=ref,
        mode=mode,
        paused=bool(paused),
        after_seek=after_seek,
        start_offset=int(start_offset),
        registered_at=int(registered_at),
        sought_at=int(sought_at),
        # It is one number to who reads it: of two that stopped, the cap is enough.
        lag=Count(min(lag.value, CAP), lag.exact and lag.value <= CAP),
        in_flight=in_flight,
        retrying=retrying,
        dead_letters=dead.all,
        recent_dead_letters=dead.recent,
        heads=tuple(heads(session, ref, candidates)),
        subscribers=tuple(subscribers),
    )


def _in_hands(session: Session, ref: GroupRef) -> tuple[Count, Count]:
    """How many deliveries subscribers hold, and how many wait for another attempt."""
    row = session.row(
        "SELECT COUNT(*), SUM(CASE WHEN w.delivered_by <> '' THEN 1 ELSE 0 END), "
        "SUM(CASE WHEN w.delivered_by = '' AND w.retry_count > 0 THEN 1 ELSE 0 END) FROM ("
        f"SELECT delivered_by, retry_count FROM {STATE}{session.dialect.force_index('queue_delivery_state_due')} "
        "WHERE consumer_group = %s AND topic = %s AND acked = %s LIMIT %s) w",
        (*ref, False, CAP + 1),
    )
    assert row is not None  # noqa: S101  # an aggregate has one row
    all_, in_flight, retrying = (int(value or 0) for value in row)
    return Count(min(in_flight, CAP), all_ <= CAP), Count(min(retrying, CAP), all_ <= CAP)


def _claimed(session: Session, ref: GroupRef) -> tuple[int, dict[str, int], bool]:
    """How many messages are claimed and not settled, the first of each partition, and whether that is all."""
    rows = session.rows(
        "SELECT w.partition_key, MIN(w.message_offset), COUNT(*) FROM (SELECT partition_key, message_offset "
        f"FROM {STATE}{session.dialect.force_index('queue_delivery_state_due')} "
        "WHERE consumer_group = %s AND topic = %s AND acked = %s LIMIT %s) w GROUP BY w.partition_key",
        (*ref, False, CAP + 1),
    )
    number = sum(int(count) for *_, count in rows)
    return min(number, CAP), {key: int(first) for key, first, _ in rows}, number <= CAP


def _unclaimed(
    session: Session, ref: GroupRef, start: int, ends: Ends, patience: Patience
) -> tuple[Count, dict[str, int]]:
    """How many messages the group has not claimed, and the first of each partition that has some.

    Partitions are looked into, those first whose cursors are furthest behind, until
    the cap is reached or its share of the time is over: then it says so. The
    first ones are looked into in any case: nobody with a backlog seems to have none.
    """
    last, whole = ends.of(ref.topic)
    cursors = {
        key: int(claimed)
        for key, claimed in session.rows(
            f"SELECT partition_key, offset_claimed FROM {OFFSETS} WHERE consumer_group = %s AND topic = %s "
            "ORDER BY partition_key LIMIT %s",
            (*ref, ends.most + 1),
        )
    }
    if not whole:
        cursors.update(_cursors(session, ref, [key for key in last if key not in cursors]))
    behind = sorted((cursors.get(key, start), key) for key, end in last.items() if end > cursors.get(key, start))
    select = (
        "SELECT %s AS k, COUNT(*), MIN(w.place) FROM (SELECT m.`offset` AS place "
        f"FROM {LOG} m{session.dialect.force_index('queue_messages_partition')} WHERE m.topic = %s "
        "AND m.partition_key = %s AND m.`offset` > %s AND m.target_group IN ('', %s) "
        "ORDER BY m.`offset` LIMIT %s) w"
    )
    number, firsts = 0, {}
    patience.begin()
    for place in range(0, len(behind), LOOKED_INTO):
        if number > CAP or (place and patience.is_over()):
            whole = False
            break
        piece = behind[place : place + LOOKED_INTO]
        rows = session.rows(
            " UNION ALL ".join([select] * len(piece)),
            flat((key, ref.topic, key, cursor, ref.group, LOOKED_AT) for cursor, key in piece),
        )
        places = {key: cursor for cursor, key in piece}
        for key, count, first in rows:
            if not count:
                continue
            firsts[key] = int(first)
            if count == LOOKED_AT and number <= CAP:
                # The deep ones one by one: together they are to cost no more than the cap.
                ((_, count, _),) = session.rows(
                    select, (key, ref.topic, key, places[key], ref.group, max(LOOKED_AT, CAP + 1 - number))
                )
            number += int(count)
    patience.end()
    return Count(min(number, CAP), whole and number <= CAP), firsts


def _cursors(session: Session, ref: GroupRef, keys: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for chunk in session.chunks(sorted(keys)):
        found.update(
            session.rows(
                f"SELECT s.partition_key, s.offset_claimed FROM {session.dialect.rows(('k',), len(chunk))} "
                f"{session.dialect.join_to(OFFSETS, 's')} "
                "ON s.consumer_group = %s AND s.topic = %s AND s.partition_key = v.k",
                (*chunk, *ref),
            )
        )
    return found
