"""A group's state in its partitions, its in-flight messages and its leases. Each list is read along an index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.inspection.heads import HeadMessage, heads
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, PartitionLease, QueueMessage
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.partitions import ends, in_log
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.unclaimed import positions
from django_mysqlqueue.sql.session import UNION_TERMS, Session, flat

LOG = QueueMessage._meta.db_table
STATE = DeliveryState._meta.db_table
OFFSETS = ConsumerOffset._meta.db_table
LEASES = PartitionLease._meta.db_table


class ReadingGroup(Protocol):
    """What the state of a group's partitions depends on. An overview of the group has it."""

    @property
    def ref(self) -> GroupRef:
        """The group and its topic."""

    @property
    def start_offset(self) -> int:
        """Its position in partitions that it has not read yet."""

    def waiting_since(self, at: int, /) -> int:
        """Return when a message that entered the log at a time started to wait for the group."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A group's state in a partition. Times are in epoch milliseconds."""

    ref: GroupRef
    """The group and its topic."""
    key: str
    """The partition key."""
    watermark: int
    """Every message up to this offset is settled."""
    position: int
    """Every message up to this offset has been claimed or passed."""
    end: int | None
    """The offset of the partition's newest message; None if the log has no message of it."""
    lag: Count
    """Messages in the log that the group has not settled, counted up to ``Bounds.partition_count``."""
    head: HeadMessage | None
    """The first unsettled message."""
    oldest_at: int | None
    """When the first unsettled message started to wait; None if there is none."""
    owner: str | None
    """The owner of the lease; empty if the partition has no owner; None without a lease: there is no work, or the group
    is in shared mode."""
    leased_at: int | None
    """When the owner took the lease; None without an owner."""


def keys(session: Session, ref: GroupRef, *, after: str | None = None, prefix: str = "", limit: int = 50) -> list[str]:
    """Return partitions of a group in order of key: those that it has read, and those with messages in the log.

    ``after``: only keys above this one. ``prefix``: only keys with this prefix.
    """
    last = after if after is not None and after.encode() >= prefix.encode() else None
    condition, parameter = ("partition_key >= %s", prefix) if last is None else ("partition_key > %s", last)
    rows = session.rows(
        f"SELECT partition_key FROM {OFFSETS}{session.dialect.force_index('PRIMARY')} "
        f"WHERE consumer_group = %s AND topic = %s AND {condition} ORDER BY partition_key LIMIT %s",
        (*ref, parameter, limit),
    )
    found = {key for (key,) in rows}
    found.update(in_log(session, ref.topic, after=last, since=prefix, limit=limit))
    return [key for key in sorted(found, key=str.encode)[:limit] if key.startswith(prefix)]


def owned(
    session: Session, ref: GroupRef, owner: str, *, after: str | None = None, prefix: str = "", limit: int = 50
) -> list[str]:
    """Return partitions whose lease a subscriber owns, in order of key.

    ``owner``: name of the subscriber; ``""`` for partitions that have a lease without an owner. ``after``: only keys
    above this one. ``prefix``: only keys with this prefix.
    """
    last = after if after is not None and after.encode() >= prefix.encode() else None
    condition, parameter = ("partition_key >= %s", prefix) if last is None else ("partition_key > %s", last)
    rows = session.rows(
        f"SELECT partition_key FROM {LEASES}{session.dialect.force_index('queue_leases_owner')} "
        f"WHERE leased_by = %s AND consumer_group = %s AND topic = %s AND {condition} ORDER BY partition_key LIMIT %s",
        (owner, *ref, parameter, limit),
    )
    return [key for (key,) in rows if key.startswith(prefix)]


def at(session: Session, group: ReadingGroup, keys: Sequence[str], *, bounds: Bounds = PAGES) -> list[Partition]:
    """Read a group's state in some partitions, in the given order."""
    ref = group.ref
    places = dict.fromkeys(keys, (group.start_offset, group.start_offset)) | positions(session, ref, keys)
    owners: dict[str, tuple[str, int]] = {}
    for chunk in session.chunks(sorted(set(keys))):
        owners |= {
            key: (owner, int(since))
            for key, owner, since in session.rows(
                "SELECT s.partition_key, s.leased_by, s.leased_at "
                f"FROM {session.dialect.rows(('k',), len(chunk))} {session.dialect.join_to(LEASES, 's')} "
                "ON s.consumer_group = %s AND s.topic = %s AND s.partition_key = v.k",
                (*chunk, *ref),
            )
        }
    last = ends(session, ref.topic, keys)
    counts = unsettled(session, ref, {key: place[1] for key, place in places.items()}, bounds.partition_count)
    firsts = [(one.first, key) for key, one in counts.items() if one.first is not None]
    first = {head.key: head for head in heads(session, ref, firsts)}
    found = []
    for key in dict.fromkeys(keys):
        head = first.get(key)
        oldest_at = None if head is None else group.waiting_since(head.published_at)
        owner, since = owners.get(key, (None, 0))
        found.append(
            Partition(
                ref, key, *places[key], last.get(key), counts[key].lag, head, oldest_at, owner, since if owner else None
            )
        )
    return found


class Unsettled(NamedTuple):
    """Messages of a partition that a group has not settled."""

    lag: Count
    first: int | None
    """The offset of the first of those that were counted."""


def unsettled(session: Session, ref: GroupRef, places: Mapping[str, int], most: int) -> dict[str, Unsettled]:
    """Count the messages in each partition that a group has not settled.

    Messages between watermark and position without a row of delivery state were passed, so they are not counted.
    """
    unclaimed = _counts(
        session,
        "SELECT %s AS k, COUNT(*), SUM(CASE WHEN w.target_group IN ('', %s) THEN 1 ELSE 0 END), "
        f"MIN(CASE WHEN w.target_group IN ('', %s) THEN w.place END) FROM (SELECT target_group, `offset` AS place "
        f"FROM {LOG}{session.dialect.force_index('queue_messages_partition')} "
        "WHERE topic = %s AND partition_key = %s AND `offset` > %s ORDER BY `offset` LIMIT %s) w",
        [(key, ref.group, ref.group, ref.topic, key, position, most + 1) for key, position in places.items()],
        most,
    )
    claimed = _counts(
        session,
        "SELECT %s AS k, COUNT(*), SUM(CASE WHEN w.acked = 0 THEN 1 ELSE 0 END), "
        f"MIN(CASE WHEN w.acked = 0 THEN w.message_offset END) FROM (SELECT acked, message_offset FROM {STATE}"
        f"{session.dialect.force_index('PRIMARY')} "
        "WHERE consumer_group = %s AND topic = %s AND partition_key = %s ORDER BY message_offset LIMIT %s) w",
        [(key, *ref, key, most + 1) for key in places],
        most,
    )
    return {
        key: Unsettled(
            (unclaimed[key].lag + claimed[key].lag).capped(most),
            min((one.first for one in (claimed[key], unclaimed[key]) if one.first is not None), default=None),
        )
        for key in places
    }


def _counts(session: Session, select: str, parameters: Sequence[tuple[object, ...]], most: int) -> dict[str, Unsettled]:
    """Count per key. ``select`` returns the key, the number of rows read, the number of those that count, the first."""
    found: dict[str, Unsettled] = {}
    for start in range(0, len(parameters), UNION_TERMS):
        piece = parameters[start : start + UNION_TERMS]
        for key, looked, number, first in session.rows(" UNION ALL ".join([select] * len(piece)), flat(piece)):
            count = Count(int(number or 0), looked <= most)
            found[key] = Unsettled(count, None if first is None else int(first))
    return found


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

    ``subscriber``: only messages that this subscriber holds.
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


def shares(session: Session) -> dict[tuple[str, GroupRef], int]:
    """Count the partitions of each subscriber and group (``""`` for partitions without an owner)."""
    return {
        (owner, GroupRef(group, topic)): int(number)
        for owner, group, topic, number in session.rows(
            f"SELECT leased_by, consumer_group, topic, COUNT(*) FROM {LEASES}"
            f"{session.dialect.force_index('queue_leases_owner')} GROUP BY leased_by, consumer_group, topic"
        )
    }
