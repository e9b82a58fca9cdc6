"""The offsets of consumer groups in their partitions: lists by key, and which partitions are furthest behind."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.inspection import partitions
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.inspection.partitions import Partition
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.groups import waiting_since
from django_mysqlqueue.service.log import newest
from django_mysqlqueue.service.partitions import last_offsets
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.unclaimed import many_positions
from django_mysqlqueue.sql.session import Session

Place = tuple[str, str, str | None]
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
    after: Place | None
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
    after: Place | None = None,
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
        using: alias of the database (default: the topic's ``DATABASE`` in ``TOPICS``, else ``MYSQLQUEUE["DATABASE"]``,
            else the router's choice).
        bounds: limits of what is read: a page reads at most ``bounds.groups`` groups, so it can be shorter than
            ``limit`` although it is not the last.

    Raises:
        InvalidMessage: ``using`` is not an alias in ``DATABASES``.
        django.db.Error: the database refuses or does not answer.
    """
    session = Session(queue_alias(using, topic=topic))
    groups = listed_groups(session, group=group, topic=topic)
    return listing(session, groups, prefix=prefix, owner=owner, after=after, limit=limit, bounds=bounds)


@checked()
def get_partition_backlogs(
    group: str,
    topic: str,
    *,
    prefix: str = "",
    owner: str | None = None,
    using: str | None = None,
    bounds: Bounds = PAGES,
) -> PartitionBacklogs | None:
    """Compare the backlogs of a group's partitions, for a limited time; None if the group is not registered.

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        prefix: only partitions whose keys begin with this.
        owner: only partitions whose lease this subscriber owns; ``""`` for partitions with a lease without an owner.
        using: alias of the database (default: the topic's ``DATABASE`` in ``TOPICS``, else ``MYSQLQUEUE["DATABASE"]``,
            else the router's choice).
        bounds: limits of what is read: ``bounds.surveyed_partitions`` partitions, for ``bounds.seconds``.

    Raises:
        InvalidMessage: ``using`` is not an alias in ``DATABASES``.
        django.db.Error: the database refuses or does not answer.
    """
    session = Session(queue_alias(using, topic=topic))
    found = listed_groups(session, group=group, topic=topic)
    return survey(session, found[0], prefix=prefix, owner=owner, bounds=bounds) if found else None


def listed_groups(session: Session, *, group: str | None = None, topic: str | None = None) -> list[ListedGroup]:
    """Return registered groups, in order of group and topic.

    ``group``: only this consumer group, on each of its topics. ``topic``: only the consumer groups on this topic.
    """
    wanted = {name: value for name, value in (("consumer_group", group), ("topic", topic)) if value is not None}
    rows = ConsumerGroup.objects.using(session.using).filter(**wanted)
    columns = ("consumer_group", "topic", "mode", "start_offset", "registered_at", "sought_at")
    found = [ListedGroup(GroupRef(one, its_topic), *rest) for one, its_topic, *rest in rows.values_list(*columns)]
    return sorted(found, key=lambda one: _bytes(*one.ref))


def listing(
    session: Session,
    groups: Sequence[ListedGroup],
    *,
    prefix: str = "",
    owner: str | None = None,
    after: Place | None = None,
    limit: int = 50,
    bounds: Bounds = PAGES,
) -> PartitionListing:
    """Return a page of the partitions of some groups.

    ``prefix``: only keys with this prefix. ``owner``: only partitions that this subscriber owns; ``""``: that have a
    lease without an owner.
    """
    if after is not None:
        groups = [one for one in groups if _bytes(*one.ref) >= _bytes(*after[:2])]
    found: list[Partition] = []
    for number, group in enumerate(groups):
        if number == bounds.groups or len(found) == limit:
            return PartitionListing(tuple(found), (*group.ref, None))
        last = after[2] if after is not None and group.ref == after[:2] else None
        room = limit - len(found)
        if owner is None:
            keys = partitions.keys(session, group.ref, after=last, prefix=prefix, limit=room + 1)
        else:
            keys = partitions.owned(session, group.ref, owner, after=last, prefix=prefix, limit=room + 1)
        if keys:
            found += partitions.at(session, group, keys[:room], bounds=bounds)
        if len(keys) > room:
            return PartitionListing(tuple(found), (*group.ref, keys[room - 1]))
    return PartitionListing(tuple(found), None)


def _bytes(group: str, topic: str) -> tuple[bytes, bytes]:
    """Return names in the order of the database."""
    return group.encode(), topic.encode()


def survey(
    session: Session, group: ListedGroup, *, prefix: str = "", owner: str | None = None, bounds: Bounds = PAGES
) -> PartitionBacklogs:
    """Compare the backlogs of a group's partitions, for a limited time.

    Only partitions whose watermark is below their newest message are counted, the lowest watermark first: at first up
    to ``bounds.depth`` messages of each, then up to ``bounds.partition_count``. Each statement counts as many messages.

    ``prefix``: only keys with this prefix. ``owner``: only partitions that this subscriber owns; ``""``: that have a
    lease without an owner. ``bounds``: limits of what is read. The first partitions are counted even if the time is
    over.
    """
    most = bounds.surveyed_partitions
    read, whole = last_offsets(session, group.ref.topic, limit=most, since=prefix)
    ends = {key: end for key, end in read.items() if key.startswith(prefix)}
    # Those that begin with the prefix are next to each other.
    whole = whole or len(ends) < len(read)
    if not whole:
        ends |= {key: end for key, end in newest(session, group.ref.topic).items() if key.startswith(prefix)}
    if owner is not None:
        leased = partitions.owned(session, group.ref, owner, prefix=prefix, limit=most + 1)
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
            found = partitions.unsettled(session, group.ref, piece, up_to)
            counts.update({key: one.lag for key, one in found.items()})

    count([key for _, key in behind], bounds.depth)
    count([key for _, key in behind if key in counts and not counts[key].exact], bounds.partition_count)
    lags: dict[str, Count | None] = dict.fromkeys(sorted(ends, key=str.encode), Count(0))
    for _, key in behind:
        lags[key] = counts.get(key)
    # The sort is stable: of those with equal counts, the lowest watermark comes first.
    furthest = sorted((key for _, key in behind if counts.get(key)), key=lambda key: -counts[key].value)
    return PartitionBacklogs(lags, tuple(furthest), whole)
