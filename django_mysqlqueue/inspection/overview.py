"""The queue's state at a glance: what the dashboard, the metrics and the health check look at.

Nothing here reads more rows than ``Bounds`` says, whatever the log, the backlog
and the history hold: counts stop and say so. What grows is one look along an
index for each partition of a topic, 4 µs each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from django_mysqlqueue import naming
from django_mysqlqueue.inspection import backlog
from django_mysqlqueue.inspection.backlog import Look
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.inspection.dead_letters import NO_DEAD_LETTERS, DeadLetterCount, count_by_group
from django_mysqlqueue.inspection.heads import Head, heads
from django_mysqlqueue.inspection.outbox import OutboxOverview, Waiting, read_outbox
from django_mysqlqueue.inspection.subscribers import SubscriberRow, read_subscribers
from django_mysqlqueue.models import (
    ConsumerGroup,
    ConsumerOffset,
    DeliveryState,
    OutboxMessage,
    QueueMessage,
    Sequencer,
    SubscriberHeartbeat,
)
from django_mysqlqueue.service.counts import Count, total
from django_mysqlqueue.service.groups import waiting_since
from django_mysqlqueue.service.log import all_topics
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session

LOG = QueueMessage._meta.db_table
OUTBOX = OutboxMessage._meta.db_table
STATE = DeliveryState._meta.db_table
OFFSETS = ConsumerOffset._meta.db_table
HEARTBEATS = SubscriberHeartbeat._meta.db_table
SEQUENCER = Sequencer._meta.db_table
GROUPS = ConsumerGroup._meta.db_table

WINDOW = 600.0
"""Seconds that count as recent where nobody says otherwise."""


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
    waiting: Waiting | None
    """Messages of the topic that are due in the outbox; None: there are none."""
    in_flight: Count
    """Handed out to a subscriber."""
    retrying: Count
    """Failed, and waiting for another attempt."""
    dead_letters: Count
    recent_dead_letters: Count
    """Of those, what failed within the window of the overview."""
    heads: tuple[Head, ...]
    """The partitions whose first unsettled message is the oldest, oldest first; at most ``Bounds.heads``."""
    subscribers: tuple[SubscriberRow, ...]
    """Live and silent ones; those that have left are not among them."""

    @property
    def live(self) -> tuple[SubscriberRow, ...]:
        return tuple(row for row in self.subscribers if row.live)

    @property
    def oldest_at(self) -> int | None:
        """Since when the oldest unprocessed message waits for the group, in the log or due in the outbox."""
        times = [self.waiting_since(head.published_at) for head in self.heads]
        if self.waiting is not None:
            times.append(self.waiting_since(self.waiting.since))
        return min(times, default=None)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to do, in the log or in the outbox."""
        return bool(self.lag) or self.waiting is not None

    def waiting_since(self, at: int) -> int:
        """Since when a message that was published at a time waits for the group, epoch milliseconds."""
        return waiting_since(at, self.registered_at, self.sought_at)


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


def read(using: str, *, lease_ms: int, bounds: Bounds = PAGES, window: float = WINDOW) -> QueueOverview:
    """The state of the queue.

    Args:
        window: seconds that count as recent.
    """
    session = Session(using)
    now = session.now()
    last_offset, sequenced_at = session.row(f"SELECT last_offset, sequenced_at FROM {SEQUENCER} WHERE id = 1") or (0, 0)
    rows = session.rows(
        f"SELECT consumer_group, topic, mode, paused, after_seek, start_offset, registered_at, sought_at FROM {GROUPS} "
        "ORDER BY topic, consumer_group LIMIT %s",
        (bounds.groups + 1,),
    )
    topics = all_topics(session)
    dlqs = [topic for topic in topics if naming.is_dlq(topic)]
    letters = count_by_group(session, now - int(window * 1000), dlqs, bounds=bounds)
    subscribers = read_subscribers(session, lease_ms=lease_ms)
    outbox = read_outbox(session, now, bounds=bounds)
    look = Look(session, bounds, min(bounds.groups, len(rows)))
    found = []
    for row in rows[: bounds.groups]:
        ref = GroupRef(*row[:2])
        found.append(_group(look, ref, row[2:], outbox, letters, subscribers.get(ref, [])))
    return QueueOverview(
        now,
        int(last_offset),
        int(sequenced_at),
        outbox,
        tuple(found),
        total(one.all for one in letters.values()),
        more_groups=len(rows) > bounds.groups,
        window=window,
        topics=tuple(topics),
    )


def one_group(
    using: str, ref: GroupRef, *, lease_ms: int, bounds: Bounds = PAGES, window: float = WINDOW
) -> GroupOverview | None:
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
    now = session.now()
    letters = count_by_group(session, now - int(window * 1000), [naming.dlq_topic(ref.topic)], bounds=bounds)
    outbox = read_outbox(session, now, bounds=bounds)
    return _group(Look(session, bounds, 1), ref, row, outbox, letters, subscribers)


# -- a group ------------------------------------------------------------------


def _group(
    look: Look,
    ref: GroupRef,
    row: Sequence[Any],
    outbox: OutboxOverview,
    letters: dict[tuple[str, GroupRef], DeadLetterCount],
    subscribers: Sequence[SubscriberRow],
) -> GroupOverview:
    mode, paused, after_seek, start_offset, registered_at, sought_at = row
    dead = letters.get((naming.dlq_topic(ref.topic), ref), NO_DEAD_LETTERS)
    session, most = look.session, look.bounds.count
    in_flight, retrying = backlog.held(session, ref, most)
    claimed, first = backlog.claimed(session, ref, most)
    unclaimed, firsts = backlog.unclaimed(look, ref, int(start_offset))
    for key, offset in firsts.items():
        first.setdefault(key, offset)
    candidates = sorted((offset, key) for key, offset in first.items())[: look.bounds.heads]
    return GroupOverview(
        ref=ref,
        mode=mode,
        paused=bool(paused),
        after_seek=after_seek,
        start_offset=int(start_offset),
        registered_at=int(registered_at),
        sought_at=int(sought_at),
        lag=(claimed + unclaimed).capped(most),
        waiting=outbox.topics.get(ref.topic),
        in_flight=in_flight,
        retrying=retrying,
        dead_letters=dead.all,
        recent_dead_letters=dead.recent,
        heads=tuple(heads(session, ref, candidates)),
        subscribers=tuple(subscribers),
    )
