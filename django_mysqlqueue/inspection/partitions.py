"""Consumer groups in their partitions: first messages, offsets, backlogs, leases, and what is in flight."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.db.tables import LEASES, LOG, OFFSETS, STATE
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.service import job_results, messages
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.groups import waiting_since
from django_mysqlqueue.service.log import newest
from django_mysqlqueue.service.losses import HELD_BY
from django_mysqlqueue.service.partitions import ends, last_offsets
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.unclaimed import many_positions, positions
from django_mysqlqueue.sql.session import Session, built


@dataclass(frozen=True, slots=True)
class HeadMessage:
    """The first message of a partition that a group has not settled."""

    key: str
    """The partition key."""
    offset: int
    published_at: int
    """When it entered the log, in epoch milliseconds."""
    started: bool
    """True if it has been claimed at least once, even if no handler was called."""
    attempts: int
    """Number of attempts that have been counted."""
    delivered_by: str
    """The subscriber that holds it now; empty if none does."""
    invisible_until: int
    """When it comes due, in epoch milliseconds; 0 if it is already due."""
    last_error: str
    """The last traceback, or empty."""

    @property
    def last_line(self) -> str:
        """The last line of the error, or empty."""
        return messages.last_line(self.last_error)

    @property
    def next_at(self) -> int:
        """When the next attempt is due, in epoch milliseconds; 0 if it is now, or in flight."""
        return 0 if self.delivered_by else self.invisible_until


def heads(session: Session, ref: GroupRef, offsets: Collection[int]) -> list[HeadMessage]:
    """Read the first messages of partitions, oldest first, without those that were settled in the meantime."""
    rows = session.joined(
        "SELECT m.partition_key AS `key`, m.`offset`, m.published_at, COALESCE(s.acked, 0) AS acked, "
        "CASE WHEN s.message_offset IS NULL THEN 0 ELSE 1 END AS started, COALESCE(s.retry_count, 0) AS attempts, "
        f"COALESCE({HELD_BY}, '') AS delivered_by, COALESCE(s.invisible_until, 0) AS invisible_until, "
        "COALESCE(s.last_error, '') AS last_error",
        "o",
        offsets,
        f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o {session.dialect.join_to(STATE, 's', left=True)} "
        "ON s.consumer_group = %s AND s.topic = m.topic AND s.partition_key = m.partition_key "
        "AND s.message_offset = m.`offset`",
        after=[ref.group],
    )
    found = [
        built(HeadMessage, row, started=bool(row.started), attempts=int(row.attempts)) for row in rows if not row.acked
    ]
    return sorted(found, key=lambda head: head.offset)


class _ReadingGroup(Protocol):
    """What the state of a group's partitions depends on. An overview of the group has it."""

    @property
    def ref(self) -> GroupRef: ...
    @property
    def start_offset(self) -> int: ...
    def waiting_since(self, at: int, /) -> int: ...


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


def keys(
    session: Session,
    ref: GroupRef,
    *,
    owner: str | None = None,
    after: str | None = None,
    prefix: str = "",
    limit: int = 50,
) -> list[str]:
    """Return the partitions that a group has read and those of the log, or those that ``owner`` has leased."""
    last = after if after is not None and after.encode() >= prefix.encode() else None
    condition, parameter = ("partition_key >= %s", prefix) if last is None else ("partition_key > %s", last)
    table, index, of_owner = OFFSETS, "PRIMARY", ""
    parameters: tuple[str, ...] = (*ref, parameter)
    if owner is not None:
        table, index, of_owner, parameters = LEASES, "queue_leases_owner", "leased_by = %s AND ", (owner, *parameters)
    rows = session.rows(
        f"SELECT partition_key FROM {table}{session.dialect.force_index(index)} "
        f"WHERE {of_owner}consumer_group = %s AND topic = %s AND {condition} ORDER BY partition_key LIMIT %s",
        (*parameters, limit),
    )
    found = {key for (key,) in rows}
    in_log: dict[str, int] = {}
    whole = owner is not None
    while not whole and len(in_log) < limit:
        read, whole = last_offsets(session, ref.topic, after=last, since=prefix, limit=limit - len(in_log))
        in_log |= read
        last = max(read, default=last)
    return [key for key in sorted(found.union(in_log))[:limit] if key.startswith(prefix)]


def at(session: Session, group: _ReadingGroup, keys: Sequence[str], *, bounds: Bounds = PAGES) -> list[Partition]:
    """Read a group's state in some partitions, in the given order."""
    ref = group.ref
    places = dict.fromkeys(keys, (group.start_offset, group.start_offset)) | positions(session, ref, keys)
    rows = session.joined(
        "SELECT s.partition_key, s.leased_by, s.leased_at",
        "k",
        keys,
        f"{session.dialect.join_to(LEASES, 's')} ON s.consumer_group = %s AND s.topic = %s AND s.partition_key = v.k",
        after=ref,
    )
    owners = {key: (owner, since) for key, owner, since in rows}
    last = ends(session, ref.topic, keys)
    counts = _unsettled(session, ref, {key: place[1] for key, place in places.items()}, bounds.partition_count)
    firsts = [one.first for one in counts.values() if one.first is not None]
    first = {head.key: head for head in heads(session, ref, firsts)}
    found = []
    for key in dict.fromkeys(keys):
        head = first.get(key)
        watermark, position = places[key]
        owner, since = owners.get(key, (None, 0))
        found.append(
            Partition(
                ref,
                key,
                watermark=watermark,
                position=position,
                end=last.get(key),
                lag=counts[key].lag,
                head=head,
                oldest_at=None if head is None else group.waiting_since(head.published_at),
                owner=owner,
                leased_at=since if owner else None,
            )
        )
    return found


class _Unsettled(NamedTuple):
    """Messages of a partition that a group has not settled, and the offset of the first that was counted."""

    lag: Count
    first: int | None


def _unsettled(session: Session, ref: GroupRef, places: Mapping[str, int], most: int) -> dict[str, _Unsettled]:
    """Count unsettled messages by partition, without those below the position that have no row: they were passed."""
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
        key: _Unsettled(
            (unclaimed[key].lag + claimed[key].lag).capped(most),
            min((one.first for one in (claimed[key], unclaimed[key]) if one.first is not None), default=None),
        )
        for key in places
    }


def _counts(
    session: Session, select: str, parameters: Sequence[tuple[object, ...]], most: int
) -> dict[str, _Unsettled]:
    """Count per key. ``select`` returns the key, the number of rows read, the number of those that count, the first."""
    return {
        key: _Unsettled(Count(int(number or 0), looked <= most), first)
        for key, looked, number, first in session.each(select, parameters)
    }


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
    """When it was claimed."""
    visible_until: int
    """When another subscriber may claim it (shared mode); 0 in ordered mode."""
    task: str = ""
    """The dotted path of the task, if it is of a job."""


def in_flight(
    session: Session, ref: GroupRef, *, subscriber: str | None = None, limit: int = 50, bounds: Bounds = PAGES
) -> list[InFlight]:
    """List messages in flight, the longest held first, among a group's first ``bounds.in_flight`` unsettled ones."""
    of_one, parameters = ("", ()) if subscriber is None else (" AND w.delivered_by = %s", (subscriber,))
    found = session.named(
        "SELECT w.partition_key AS `key`, w.message_offset AS `offset`, w.retry_count + 1 AS attempt, "
        "w.delivered_by AS subscriber, w.delivered_at AS since, w.invisible_until AS visible_until "
        "FROM (SELECT partition_key, message_offset, retry_count, delivered_by, delivered_at, invisible_until, "
        "delivery_token "
        f"FROM {STATE}{session.dialect.force_index('queue_delivery_state_due')} "
        "WHERE consumer_group = %s AND topic = %s AND acked = %s LIMIT %s) w "
        f"WHERE w.delivery_token <> 0{of_one} ORDER BY w.delivered_at, w.message_offset LIMIT %s",
        (*ref, False, bounds.in_flight, *parameters, limit),
    )
    return [built(InFlight, row, ref=ref, task=job_results.task_of(ref, row.key)) for row in found]


def shares(session: Session) -> dict[tuple[str, GroupRef], int]:
    """Count the partitions of each subscriber and group (``""`` for partitions without an owner)."""
    return {
        (owner, GroupRef(group, topic)): number
        for owner, group, topic, number in session.rows(
            f"SELECT leased_by, consumer_group, topic, COUNT(*) FROM {LEASES}"
            f"{session.dialect.force_index('queue_leases_owner')} GROUP BY leased_by, consumer_group, topic"
        )
    }


PartitionPosition = tuple[str, str, str | None]
"""Group, topic and partition key after which a list continues; without a key, from the group's first partition."""


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """A group whose partitions are listed. Times are in epoch milliseconds."""

    ref: GroupRef
    mode: str
    start_offset: int
    registered_at: int
    sought_at: int

    def waiting_since(self, at: int, /) -> int:
        """Return when a message that entered the log at a time started to wait for the group."""
        return waiting_since(at, self.registered_at, self.sought_at)


@dataclass(frozen=True, slots=True)
class PartitionListing:
    """A page of partitions."""

    partitions: tuple[Partition, ...]
    """In order of group, topic and key."""
    after: PartitionPosition | None
    """The argument ``after`` for the next page; None if this is the last."""


@dataclass(frozen=True, slots=True)
class PartitionBacklogs:
    """The backlogs of a group's partitions, as far as they were read."""

    lags: Mapping[str, Count | None]
    """Messages that the group has not settled by partition, in order of key. Counts stop at ``Bounds.partition_count``,
    or earlier if the time is over; None: the time was over before the partition was counted."""
    furthest: tuple[str, ...]
    """The partitions with a backlog that were counted, the largest first."""
    whole: bool
    """True if these are all partitions that match. Otherwise, they are the first ones by key, and those of the newest
    messages."""

    @property
    def uncounted(self) -> int:
        """The number of partitions that were not counted because the time was over."""
        return sum(lag is None for lag in self.lags.values())


@checked()
def list_partitions(
    *,
    group: str | None = None,
    topic: str | None = None,
    prefix: str = "",
    owner: str | None = None,
    after: PartitionPosition | None = None,
    limit: int = 50,
    using: str | None = None,
    bounds: Bounds = PAGES,
) -> PartitionListing:
    """List partitions with each group's watermark, position, backlog and owner, in order of group, topic and key.

    The list contains the partitions that a group has read, and those that have messages in the log.

    Args:
        group: only partitions of this consumer group, on each of its topics.
        topic: only partitions of the consumer groups on this topic.
        prefix: only partitions whose keys begin with this.
        owner: only partitions whose lease this subscriber owns; ``""`` for partitions with a lease without an owner.
        after: ``after`` of the previous page.
        limit: maximum number of partitions.
        using: alias of the database (default: that of the topic, else of the queue).
        bounds: limits of what is read: a page reads at most ``bounds.groups`` groups, so it can be shorter than
            ``limit`` although it is not the last.
    """
    session = Session(queue_alias(using, topic=topic))
    groups = listed_groups(session, group=group, topic=topic)
    return listing(session, groups, prefix=prefix, owner=owner, after=after, limit=limit, bounds=bounds)


def listed_groups(session: Session, *, group: str | None = None, topic: str | None = None) -> list[ListedGroup]:
    """Return registered groups, in order of group and topic."""
    given = {"consumer_group": group, "topic": topic}
    wanted = {name: value for name, value in given.items() if value is not None}
    columns = ("consumer_group", "topic", "mode", "start_offset", "registered_at", "sought_at")
    rows = ConsumerGroup.objects.using(session.using).filter(**wanted).values_list(*columns)
    return sorted((ListedGroup(GroupRef(*row[:2]), *row[2:]) for row in rows), key=lambda one: _bytes(*one.ref))


def listing(
    session: Session,
    groups: Sequence[ListedGroup],
    *,
    prefix: str = "",
    owner: str | None = None,
    after: PartitionPosition | None = None,
    limit: int = 50,
    bounds: Bounds = PAGES,
) -> PartitionListing:
    """Return a page of the partitions of some groups, as ``list_partitions`` does."""
    if after is not None:
        groups = [one for one in groups if _bytes(*one.ref) >= _bytes(*after[:2])]
    found: list[Partition] = []
    for number, group in enumerate(groups):
        if number == bounds.groups or len(found) == limit:
            return PartitionListing(tuple(found), (*group.ref, None))
        last = after[2] if after is not None and group.ref == after[:2] else None
        room = limit - len(found)
        named = keys(session, group.ref, owner=owner, after=last, prefix=prefix, limit=room + 1)
        if named:
            found += at(session, group, named[:room], bounds=bounds)
        if len(named) > room:
            return PartitionListing(tuple(found), (*group.ref, named[room - 1]))
    return PartitionListing(tuple(found), None)


def _bytes(group: str, topic: str) -> tuple[bytes, bytes]:
    """Return names in the order of the database."""
    return group.encode(), topic.encode()


def survey(
    session: Session, group: ListedGroup, *, prefix: str = "", owner: str | None = None, bounds: Bounds = PAGES
) -> PartitionBacklogs:
    """Compare the backlogs of a group's partitions that are not settled to their ends, the lowest watermark first."""
    most = bounds.surveyed_partitions
    read, whole = last_offsets(session, group.ref.topic, limit=most, since=prefix)
    ends = {key: end for key, end in read.items() if key.startswith(prefix)}
    # Those that begin with the prefix are next to each other.
    whole = whole or len(ends) < len(read)
    if not whole:
        ends |= {key: end for key, end in newest(session, group.ref.topic).items() if key.startswith(prefix)}
    if owner is not None:
        leased = keys(session, group.ref, owner=owner, prefix=prefix, limit=most + 1)
        ends = {key: ends[key] for key in leased if key in ends}
        whole = whole and len(leased) <= most
    start = (group.start_offset, group.start_offset)
    places = dict.fromkeys(ends, start) | many_positions(session, group.ref, ends, most)
    behind = sorted((places[key][0], key) for key, end in ends.items() if end > places[key][0])
    counts: dict[str, Count] = {}
    began = time.monotonic()

    def count(keys: Sequence[str], up_to: int) -> None:
        size = max(1, bounds.piece * bounds.depth // up_to)
        for start in range(0, len(keys), size):
            if counts and time.monotonic() - began > bounds.seconds:
                return
            piece = {key: places[key][1] for key in keys[start : start + size]}
            found = _unsettled(session, group.ref, piece, up_to)
            counts.update({key: one.lag for key, one in found.items()})

    # Those with many messages are counted again, up to a higher number.
    count([key for _, key in behind], bounds.depth)
    count([key for _, key in behind if key in counts and not counts[key].exact], bounds.partition_count)
    lags: dict[str, Count | None] = dict.fromkeys(sorted(ends), Count(0))
    for _, key in behind:
        lags[key] = counts.get(key)
    # The sort is stable: of those with equal counts, the lowest watermark comes first.
    furthest = sorted((key for _, key in behind if counts.get(key)), key=lambda key: -counts[key].value)
    return PartitionBacklogs(lags, tuple(furthest), whole)
