"""Lists of a group's partitions, in-flight messages and leases. Each page is read along an index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.inspection.heads import HeadMessage, heads
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, PartitionLease, QueueMessage
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.partitions import in_log
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import UNION_TERMS, Session, flat

LOG = QueueMessage._meta.db_table
STATE = DeliveryState._meta.db_table
OFFSETS = ConsumerOffset._meta.db_table
LEASES = PartitionLease._meta.db_table


@dataclass(frozen=True, slots=True)
class Partition:
    """A group's state in a partition."""

    key: str
    watermark: int
    cursor: int
    updated_at: int
    owner: str | None
    """The owner of the lease; empty if the partition has no owner; None without a lease, if there is no work."""
    lag: Count
    head: HeadMessage | None
    """The first unsettled message."""


def partitions(
    session: Session,
    ref: GroupRef,
    *,
    after: str | None = None,
    prefix: str = "",
    start: int | None = None,
    limit: int = 50,
    bounds: Bounds = PAGES,
) -> list[Partition]:
    """List a group's partitions in order of key.

    Args:
        session: session on the queue's database.
        ref: the group and its topic.
        after: only keys above this one.
        prefix: only keys with this prefix.
        start: the group's start offset: then partitions of the log that the group has not read yet are included.
        limit: maximum number of partitions.
        bounds: limits of what is read.
    """
    last = after if after is not None and after >= prefix else None
    condition, parameters = ("partition_key >= %s", prefix) if last is None else ("partition_key > %s", last)
    rows = session.rows(
        f"SELECT partition_key FROM {OFFSETS}{session.dialect.force_index('PRIMARY')} "
        f"WHERE consumer_group = %s AND topic = %s AND {condition} ORDER BY partition_key LIMIT %s",
        (*ref, parameters, limit),
    )
    keys = {key for (key,) in rows}
    if start is not None:
        keys.update(in_log(session, ref.topic, after=last, since=prefix, limit=limit))
    shown = [key for key in sorted(keys, key=str.encode)[:limit] if key.startswith(prefix)]
    return at(session, ref, shown, start=start, bounds=bounds)


def at(
    session: Session, ref: GroupRef, keys: Sequence[str], *, start: int | None = None, bounds: Bounds = PAGES
) -> list[Partition]:
    """Read a group's state in some partitions, in the given order.

    Args:
        session: session on the queue's database.
        ref: the group and its topic.
        keys: the partition keys.
        start: the group's start offset, which is its position in partitions that it has not read yet; if None,
            these are left out.
        bounds: limits of what is read.
    """
    most = bounds.partition_count
    places: dict[str, tuple[int, int, int]] = {} if start is None else dict.fromkeys(keys, (start, start, 0))
    owners: dict[str, str] = {}
    for chunk in session.chunks(sorted(set(keys))):
        for table, columns in ((OFFSETS, "offset_acked, s.offset_claimed, s.updated_at"), (LEASES, "leased_by")):
            rows = session.rows(
                f"SELECT s.partition_key, s.{columns} FROM {session.dialect.rows(('k',), len(chunk))} "
                f"{session.dialect.join_to(table, 's')} "
                "ON s.consumer_group = %s AND s.topic = %s AND s.partition_key = v.k",
                (*chunk, *ref),
            )
            if table == OFFSETS:
                places.update({key: (int(acked), int(claimed), int(updated)) for key, acked, claimed, updated in rows})
            else:
                owners.update(dict(rows))
    known = [key for key in dict.fromkeys(keys) if key in places]
    unclaimed = _counts(
        session,
        "SELECT %s AS k, COUNT(*), SUM(CASE WHEN w.target_group IN ('', %s) THEN 1 ELSE 0 END) FROM ("
        f"SELECT target_group FROM {LOG}{session.dialect.force_index('queue_messages_partition')} "
        "WHERE topic = %s AND partition_key = %s AND `offset` > %s ORDER BY `offset` LIMIT %s) w",
        [(key, ref.group, ref.topic, key, places[key][1], most + 1) for key in known],
        most,
    )
    claimed = _counts(
        session,
        f"SELECT %s AS k, COUNT(*), SUM(CASE WHEN w.acked = 0 THEN 1 ELSE 0 END) FROM (SELECT acked FROM {STATE}"
        f"{session.dialect.force_index('PRIMARY')} "
        "WHERE consumer_group = %s AND topic = %s AND partition_key = %s ORDER BY message_offset LIMIT %s) w",
        [(key, *ref, key, most + 1) for key in known],
        most,
    )
    first = _firsts(session, ref, {key: places[key][0] for key in known})
    return [
        Partition(key, *places[key], owners.get(key), (unclaimed[key] + claimed[key]).capped(most), first.get(key))
        for key in known
    ]


def _counts(session: Session, select: str, parameters: Sequence[tuple[object, ...]], most: int) -> dict[str, Count]:
    """Count per key. ``select`` returns the key, the number of rows read, and the number of those that count."""
    found: dict[str, Count] = {}
    for start in range(0, len(parameters), UNION_TERMS):
        piece = parameters[start : start + UNION_TERMS]
        for key, looked, number in session.rows(" UNION ALL ".join([select] * len(piece)), flat(piece)):
            found[key] = Count(int(number or 0), looked <= most)
    return found


def _firsts(session: Session, ref: GroupRef, watermarks: dict[str, int]) -> dict[str, HeadMessage]:
    """Return the first unsettled message of each partition that has one."""
    select = (
        f"SELECT m.`offset`, m.partition_key FROM {LOG} m{session.dialect.force_index('queue_messages_partition')} "
        "WHERE m.topic = %s AND m.partition_key = %s AND m.`offset` > %s AND m.target_group IN ('', %s) "
        f"AND NOT EXISTS (SELECT 1 FROM {STATE} d{session.dialect.force_index('PRIMARY')} WHERE d.consumer_group = %s "
        "AND d.topic = m.topic AND d.partition_key = m.partition_key AND d.message_offset = m.`offset` "
        "AND d.acked = %s) ORDER BY m.`offset` LIMIT 1"
    )
    places = list(watermarks.items())
    first: list[tuple[int, str]] = []
    for start in range(0, len(places), UNION_TERMS):
        piece = places[start : start + UNION_TERMS]
        sql = session.dialect.union(select, len(piece))
        rows = session.rows(sql, flat((ref.topic, key, acked, ref.group, ref.group, True) for key, acked in piece))
        first += [(int(offset), key) for offset, key in rows]
    return {head.key: head for head in heads(session, ref, first)}


@dataclass(frozen=True, slots=True)
class InFlight:
    """A message in flight."""

    ref: GroupRef
    key: str
    offset: int
    attempt: int
    """The number of this attempt, from 1."""
    subscriber: str
    since: int
    """When it was claimed, in epoch milliseconds."""
    visible_until: int
    """When another subscriber may claim it, in epoch milliseconds (shared mode); 0 in ordered mode."""


def in_flight(
    session: Session, ref: GroupRef, *, subscriber: str | None = None, limit: int = 50, bounds: Bounds = PAGES
) -> list[InFlight]:
    """List a group's messages in flight, the longest held first, among the first ``bounds.in_flight`` unsettled ones.

    Args:
        session: session on the queue's database.
        ref: the group and its topic.
        subscriber: only messages that this subscriber holds.
        limit: maximum number of messages.
        bounds: limits of what is read.
    """
    of_one, parameters = ("", ()) if subscriber is None else (" AND w.delivered_by = %s", (subscriber,))
    rows = session.rows(
        "SELECT w.partition_key, w.message_offset, w.retry_count, w.delivered_by, w.delivered_at, w.invisible_until "
        "FROM (SELECT partition_key, message_offset, retry_count, delivered_by, delivered_at, invisible_until, "
        "delivery_token "
        f"FROM {STATE}{session.dialect.force_index('queue_delivery_state_due')} "
        "WHERE consumer_group = %s AND topic = %s AND acked = %s LIMIT %s) w "
        f"WHERE w.delivery_token <> 0{of_one} ORDER BY w.delivered_at, w.message_offset LIMIT %s",
        (*ref, False, bounds.in_flight, *parameters, limit),
    )
    return [
        InFlight(ref, key, int(offset), int(retries) + 1, by, int(since), int(until))
        for key, offset, retries, by, since, until in rows
    ]


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """A lease."""

    ref: GroupRef
    key: str
    owner: str
    """The owner, or empty if the partition has none."""
    leased_at: int
    """When it was leased, in epoch milliseconds."""


def leases(
    session: Session,
    *,
    ref: GroupRef | None = None,
    owner: str | None = None,
    after: tuple[str, str, str] | None = None,
    limit: int = 50,
) -> list[LeaseRow]:
    """List leases in order of group, topic and key.

    Args:
        session: session on the queue's database.
        ref: only leases of this group.
        owner: only leases of this subscriber; ``""`` for partitions without an owner.
        after: (group, topic, key) of the last lease on the previous page.
        limit: maximum number of leases.
    """
    parts: list[str] = []
    parameters: list[object] = []
    if owner is not None:
        parts.append("leased_by = %s")
        parameters.append(owner)
    if ref is not None:
        parts.append("consumer_group = %s AND topic = %s AND partition_key " + (">= ''" if after is None else "> %s"))
        parameters += [*ref] if after is None else [*ref, after[2]]
        order = "partition_key"
    else:
        order = "consumer_group, topic, partition_key"
        parts.append("consumer_group >= %s")
        parameters.append("" if after is None else after[0])
    if ref is None and after is not None:
        parts.append("(consumer_group > %s OR topic > %s OR (topic = %s AND partition_key > %s))")
        parameters += [after[0], after[1], after[1], after[2]]
    hint = session.dialect.force_index("queue_leases_owner" if owner is not None else "PRIMARY")
    rows = session.rows(
        f"SELECT consumer_group, topic, partition_key, leased_by, leased_at FROM {LEASES}{hint} "
        f"WHERE {' AND '.join(parts)} ORDER BY {order} LIMIT %s",
        (*parameters, limit),
    )
    return [LeaseRow(GroupRef(group, topic), key, by, int(at)) for group, topic, key, by, at in rows]


def shares(session: Session) -> dict[tuple[str, GroupRef], int]:
    """Count the partitions of each subscriber and group (``""`` for partitions without an owner)."""
    return {
        (owner, GroupRef(group, topic)): int(number)
        for owner, group, topic, number in session.rows(
            f"SELECT leased_by, consumer_group, topic, COUNT(*) FROM {LEASES}"
            f"{session.dialect.force_index('queue_leases_owner')} GROUP BY leased_by, consumer_group, topic"
        )
    }
