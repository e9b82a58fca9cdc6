"""What the queue's state is: for looking, not for the hot path."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django_mysqlqueue import names
from django_mysqlqueue.models import (
    ConsumerGroup,
    ConsumerOffset,
    DeliveryState,
    OutboxMessage,
    PartitionLease,
    QueueMessage,
    Sequencer,
)
from django_mysqlqueue.service import groups, heartbeats, leasing, partitions
from django_mysqlqueue.service.groups import GroupRef
from django_mysqlqueue.service.subsets import EVERYTHING, Subset
from django_mysqlqueue.service.transactions import Session

LOG = QueueMessage._meta.db_table
OUTBOX = OutboxMessage._meta.db_table
STATE = DeliveryState._meta.db_table
OFFSETS = ConsumerOffset._meta.db_table
LEASES = PartitionLease._meta.db_table
SEQUENCER = Sequencer._meta.db_table


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """A topic. Counts are of messages."""

    topic: str
    in_log: int
    partitions: int
    waiting: int
    """In the outbox and due: the sequencer has not moved them yet."""
    waiting_since: int | None
    """When the oldest of those was published or came due, epoch milliseconds."""
    scheduled: int
    """In the outbox for later."""
    is_dlq: bool


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """A consumer group of a topic. Counts are of messages, ages in seconds."""

    group: str
    topic: str
    mode: str
    paused: bool
    lag: int
    """Messages in the log that the group has not settled: a count, not a difference of offsets."""
    oldest_unacked_age: float | None
    """Of those, and of those of the topic that are due in the outbox: since when the oldest waits for the group, but
    not from before its last seek or registration."""
    in_flight: int
    """Handed out to a subscriber."""
    retrying: int
    """Failed, and waiting for another attempt."""
    dead_letters: int
    """In the DLQ topic because this group failed them."""
    subscribers: tuple[str, ...]
    """Live ones."""
    subsets: dict[str, str]
    """Of those that work on some partitions only: which."""
    unserved: int
    """Partitions with something to do that no live subscriber's subset takes in, where all work on subsets."""
    partitions_owned: dict[str, int]
    """Leases by owner; '' is nobody."""
    abandoned: bool
    """It has something to do, in the log or in the outbox, and nobody alive to do it: GC waits for it."""
    failing: bool
    """A handler of a DLQ topic that fails: its messages back off for ever."""


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The whole queue on one database."""

    now: int
    """The database's clock, epoch milliseconds."""
    last_offset: int
    sequenced_at: int
    topics: tuple[TopicStatus, ...]
    groups: tuple[GroupStatus, ...]


def status(using: str, *, lease_ms: int) -> QueueStatus:
    """Reads the state of every topic and group; counts are exact, so it walks what is unsettled."""
    session = Session(using)
    now = session.now()
    sequencer = session.row(f"SELECT last_offset, sequenced_at FROM {SEQUENCER} WHERE id = 1") or (0, 0)
    registered = (
        ConsumerGroup.objects.using(using)
        .order_by("topic", "consumer_group")
        .values_list("consumer_group", "topic", "registered_at", "sought_at")
    )
    refs = {GroupRef(group, topic): (registered_at, sought_at) for group, topic, registered_at, sought_at in registered}
    topics = _topics(session, now)
    due = {one.topic: one for one in topics}
    return QueueStatus(
        now,
        int(sequencer[0]),
        int(sequencer[1]),
        tuple(topics),
        tuple(_group(session, ref, since, due.get(ref.topic), now, lease_ms) for ref, since in refs.items()),
    )


def _topics(session: Session, now: int) -> list[TopicStatus]:
    log = {
        topic: (count, partitions)
        for topic, count, partitions in session.rows(
            f"SELECT topic, COUNT(*), COUNT(DISTINCT partition_key) FROM {LOG}"
            f"{session.dialect.force_index('queue_messages_partition')} GROUP BY topic"
        )
    }
    outbox = {
        topic: (int(due), since, int(total))
        for topic, due, since, total in session.rows(
            "SELECT topic, SUM(CASE WHEN deliver_at <= %s THEN 1 ELSE 0 END), MIN(CASE WHEN deliver_at <= 0 "
            "THEN created_at WHEN deliver_at <= %s THEN deliver_at END), COUNT(*) "
            f"FROM {OUTBOX} GROUP BY topic",
            (now, now),
        )
    }
    found = []
    for topic in sorted({*log, *outbox}):
        count, partitions = log.get(topic, (0, 0))
        due, since, total = outbox.get(topic, (0, None, 0))
        found.append(TopicStatus(topic, count, partitions, due, since, total - due, names.is_dlq(topic)))
    return found


def _group(
    session: Session, ref: GroupRef, ready: tuple[int, int], topic: TopicStatus | None, now: int, lease_ms: int
) -> GroupStatus:
    registered = groups.find(session.using, ref)
    lag, oldest = unsettled(session, ref)
    waiting = topic.waiting if topic is not None else 0
    if oldest is not None:
        oldest = groups.waiting_since(oldest, *ready)
    since = min(
        (at for at in (oldest, topic.waiting_since if topic is not None else None) if at is not None), default=None
    )
    counts = session.row(
        "SELECT SUM(CASE WHEN delivered_by <> '' THEN 1 ELSE 0 END), "
        "SUM(CASE WHEN delivered_by = '' AND retry_count > 0 THEN 1 ELSE 0 END), "
        "SUM(CASE WHEN retry_count > 0 THEN 1 ELSE 0 END) "
        f"FROM {STATE}{session.dialect.force_index('queue_delivery_state_due')} "
        "WHERE consumer_group = %s AND topic = %s AND acked = %s",
        (*ref, False),
    )
    in_flight, retrying, failed = (int(value or 0) for value in counts or (0, 0, 0))
    dead = session.row(
        f"SELECT COUNT(*) FROM {LOG}{session.dialect.force_index('queue_messages_partition')} "
        "WHERE topic = %s AND failed_group = %s AND original_topic = %s",
        (names.dlq_topic(ref.topic), ref.group, ref.topic),
    )
    live = heartbeats.live(session, [ref], lease_ms)[ref]
    owners = {
        owner: int(count)
        for owner, count in session.rows(
            f"SELECT leased_by, COUNT(*) FROM {LEASES}{session.dialect.force_index('PRIMARY')} "
            "WHERE consumer_group = %s AND topic = %s GROUP BY leased_by",
            ref,
        )
    }
    return GroupStatus(
        group=ref.group,
        topic=ref.topic,
        mode=registered.mode if registered else "",
        paused=bool(registered and registered.paused),
        lag=lag,
        oldest_unacked_age=None if since is None else max(0.0, (now - since) / 1000),
        in_flight=in_flight,
        retrying=retrying,
        dead_letters=int(dead[0]) if dead else 0,
        subscribers=tuple(live),
        subsets={name: str(subset) for name, subset in live.items() if subset != EVERYTHING},
        unserved=_unserved(session, ref, set(live.values())),
        partitions_owned=owners,
        abandoned=lag + waiting > 0 and not live,
        failing=names.is_dlq(ref.topic) and failed > 0,
    )


def silent_topics(session: Session, topics: Iterable[str]) -> tuple[list[str], list[str]]:
    """Those of ``topics`` that hold no message, and the topics that hold some: a name may be mistyped."""
    hint = session.dialect.force_index("queue_messages_partition")
    rows = session.rows(f"SELECT DISTINCT topic FROM {LOG}{hint} UNION SELECT DISTINCT topic FROM {OUTBOX}")
    used = {topic for (topic,) in rows}
    return sorted(set(topics) - used), sorted(topic for topic in used if not names.is_dlq(topic))


def _unserved(session: Session, ref: GroupRef, subsets: set[Subset]) -> int:
    if not subsets or EVERYTHING in subsets:
        return 0
    count = 0
    after: str | None = None
    while True:
        keys, after = leasing.find_work(session, ref, after=after, limit=1000)
        count += sum(not any(key in subset for subset in subsets) for key in keys)
        if after is None:
            return count


def has_one_partition(session: Session, topic: str) -> bool:
    """Whether all of a topic's messages in the log are in a single partition."""
    return len(partitions.in_log(session, topic, after=None, limit=2)) == 1


def unsettled(session: Session, ref: GroupRef) -> tuple[int, int | None]:
    """How many messages in the log the group has not settled, and when the oldest took its place there."""
    start = f"(SELECT start_offset FROM {groups.GROUPS} WHERE consumer_group = %s AND topic = %s)"
    row = session.row(
        f"SELECT COUNT(*), MIN(m.published_at) FROM {LOG} m{session.dialect.force_index('queue_messages_partition')} "
        f"{session.dialect.join_to(OFFSETS, 'o', left=True)} "
        "ON o.consumer_group = %s AND o.topic = m.topic AND o.partition_key = m.partition_key "
        f"WHERE m.topic = %s AND m.`offset` > COALESCE(o.offset_acked, {start}) AND m.target_group IN ('', %s) "
        f"AND NOT EXISTS (SELECT 1 FROM {STATE} d{session.dialect.force_index('PRIMARY')} "
        "WHERE d.consumer_group = %s AND d.topic = m.topic AND d.partition_key = m.partition_key "
        "AND d.message_offset = m.`offset` AND d.acked = %s)",
        (ref.group, ref.topic, *ref, ref.group, ref.group, True),
    )
    assert row is not None  # noqa: S101  # an aggregate has one row
    return int(row[0]), None if row[1] is None else int(row[1])
