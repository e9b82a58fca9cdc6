"""GC: deletes messages whose retention has expired, and that all groups and registered readers have done with."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from django_mysqlqueue.db.tables import COLLECTED, GROUPS, LOG, OFFSETS, READERS, STATE
from django_mysqlqueue.models import (
    ConsumerGroup,
)
from django_mysqlqueue.names.rules import relay_target, relayed_from
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service import log, partitions, readers, relaying, unclaimed, watermarks
from django_mysqlqueue.service.readers import RegisteredReader
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.watermarks import BY_KEY
from django_mysqlqueue.sql.session import Session, flat, last_row, run

NO_FLOOR = 2**62


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of one step of GC."""

    rows: int = 2000
    """Maximum number of rows that its transaction deletes, of all partitions together."""
    partitions: int = 100
    """Maximum number of partitions that it reads; well below the number of terms that SQLite allows in a UNION."""


STEP = StepLimits()
"""The limits for a poller, whose claims wait for the step."""


class Checkpoint(NamedTuple):
    """The place from which an incremental collection continues. Partitions up to it have been looked at."""

    topic: str | None = None
    """The topic; None at the start."""
    key: str = ""
    rest: tuple[tuple[str, int], ...] = ()
    """Partitions with more messages to collect, and the offset above which they are."""
    group: GroupRef | None = None
    """In the last phase, the group whose offsets rows are looked at."""


class Orphans(NamedTuple):
    """Messages that GC deleted (or would delete) from a topic that has no consumer group and is not ``GROUPLESS``."""

    topic: str
    messages: int
    oldest_at: int
    """When the first of them entered the log, in epoch milliseconds."""
    newest_at: int


class Collected(NamedTuple):
    """The result of a step of GC, or of a dry run."""

    messages: int
    offsets_rows: int
    place: Checkpoint | None
    """The place from which to continue; None if the round is complete."""
    orphans: tuple[Orphans, ...] = ()
    """The messages among them whose topic had no group, by topic."""


def steps(using: str, *, dry_run: bool = False, limits: StepLimits = STEP) -> Iterator[Collected]:
    """Run a full round, and yield the result of each step."""
    place: Checkpoint | None = Checkpoint()
    while place is not None:
        step = collect_step(using, place, dry_run=dry_run, limits=limits)
        place = step.place
        yield step


def by_topic(found: Iterable[Orphans]) -> tuple[Orphans, ...]:
    """Add up the orphans of several steps, by topic."""
    total: dict[str, Orphans] = {}
    for one in found:
        before = total.get(one.topic, one._replace(messages=0))
        total[one.topic] = Orphans(
            one.topic,
            before.messages + one.messages,
            min(before.oldest_at, one.oldest_at),
            max(before.newest_at, one.newest_at),
        )
    return tuple(total.values())


def collect_step(using: str, place: Checkpoint, *, dry_run: bool = False, limits: StepLimits = STEP) -> Collected:
    """Delete one chunk, even of partitions in use, in one short transaction; with ``dry_run``, only count."""
    session = Session(using)
    if place.group is not None:
        return _forget_step(session, place, place.group, limits.rows)
    if place.rest:
        assert place.topic is not None  # noqa: S101  # These partitions are of the topic.
        topic, above, last = place.topic, dict(place.rest), place.key
    else:
        found = _next_partitions(session, place, limits.partitions)
        if found is None:
            group = None if dry_run else _next_group(session, None)
            return Collected(0, 0, None if group is None else Checkpoint(group=group))
        topic, keys = found
        above, last = dict.fromkeys(keys, 0), keys[-1]
    return run(using, lambda session: _collect_chunk(session, topic, above, last, limits.rows, dry_run=dry_run))


def _next_partitions(session: Session, place: Checkpoint, most: int) -> tuple[str, list[str]] | None:
    if place.topic is not None:
        keys = partitions.in_log(session, place.topic, after=place.key, limit=most)
        if keys:
            return place.topic, keys
    after = ">=" if place.topic is None else ">"
    row = session.row(f"SELECT MIN(topic) FROM {LOG} WHERE topic {after} %s", (place.topic or "",))
    if row is None or row[0] is None:
        return None
    topic = str(row[0])
    keys = partitions.in_log(session, topic, after=None, limit=most)
    return (topic, keys) if keys else None


class Waited(NamedTuple):
    """For whom GC waits in a topic."""

    starts: dict[str, int]
    """The start offsets of all registered groups."""
    read_offset: int
    """The offset up to which all registered readers have read for which GC waits (``readers.waited_for``)."""


def floors(session: Session, topic: str, keys: list[str]) -> tuple[dict[str, int] | None, int]:
    """Return the lowest watermark of all registered groups in each partition, and that of all registered readers.

    Without a group, the first is None. For a group without an offsets row in a partition, its start offset counts: a
    group that is being deployed must not lose messages. Messages that are relayed to another database have the relay's
    watermark.
    """
    starts, read_offset = _waited(session, topic)
    if (target := relay_target(topic)) is not None:
        return dict.fromkeys(keys, relaying.watermark(session, target).read_offset), read_offset
    if not starts:
        return None, read_offset
    acked: dict[str, dict[str, int]] = {key: {} for key in keys}
    join = f"{session.dialect.join_to(OFFSETS, 's')} ON {BY_KEY}"
    for group in starts:
        rows = session.joined("SELECT s.partition_key, s.offset_acked", "k", keys, join, after=(group, topic))
        for key, offset in rows:
            acked[key][group] = offset
    lowest = {key: min(acked[key].get(group, start) for group, start in starts.items()) for key in keys}
    return lowest, read_offset


def _waited(session: Session, topic: str) -> Waited:
    # ``whole``: a group or reader that is missing from the answer would lose messages.
    rows = session.whole(
        f"SELECT consumer_group, start_offset, 0 FROM {GROUPS} WHERE topic = %s UNION ALL "
        f"SELECT name, read_offset, 1 FROM {READERS} WHERE topic IN ('', %s){last_row(3)}",
        (topic, topic),
    )
    found = [RegisteredReader(name, (), offset, 0) for name, offset, is_reader in rows if is_reader]
    starts = {name: start for name, start, is_reader in rows if not is_reader}
    return Waited(starts, min((one.offset for one in readers.waited_for(found)), default=NO_FLOOR))


def held_back_by(session: Session, ref: GroupRef, *, most: int, rows: int, seconds: float) -> tuple[int, bool]:
    """Return how many messages of a topic GC keeps only for this group, at most ``most``, and whether time sufficed.

    If the group is dropped, GC may delete them when their retention has expired.

    ``seconds``: after this time, no further partitions are read, apart from the first ``rows``.
    """
    starts, read_offset = _waited(session, ref.topic)
    own = starts.pop(ref.group, None)
    if own is None or relay_target(ref.topic) is not None:
        return 0, True
    held, after, whole = 0, None, False
    began = time.monotonic()
    while held < most and not whole:
        if after is not None and time.monotonic() - began > seconds:
            return held, False
        ends, whole = partitions.last_offsets(session, ref.topic, limit=rows, after=after)
        after = max(ends, default=None)
        acked = unclaimed.watermarks(session, ref, ends, own)
        ranges = {key: (acked[key], min(end, read_offset)) for key, end in ends.items() if acked[key] < end}
        for group, start in starts.items():
            if not ranges:
                break
            acked = unclaimed.watermarks(session, GroupRef(group, ref.topic), ends, start)
            ranges = {key: (low, min(end, acked[key])) for key, (low, end) in ranges.items() if low < acked[key]}
        held += log.count_between(session, ref.topic, ranges, most - held)
    return held, True


def _collect_chunk(
    session: Session, topic: str, above: dict[str, int], last: str, rows: int, *, dry_run: bool
) -> Collected:
    """Delete messages of partitions above the given offsets.

    Whether the topic has a group is read in the same transaction.

    ``dry_run``: if True, only count.
    """
    limit = max(1, rows // len(above))
    lowest, read_offset = floors(session, topic, sorted(above))
    settings = get_settings()
    retention = settings.retention_of(relayed_from(topic), has_groups=lowest is not None)
    if retention is None:
        return Collected(0, 0, Checkpoint(topic, last))
    youngest = session.now() - int(retention * 1000)
    one = (
        "SELECT partition_key, `offset`, published_at "
        f"FROM {LOG}{session.dialect.force_index('queue_messages_partition')} "
        "WHERE topic = %s AND partition_key = %s AND `offset` > %s AND `offset` <= %s ORDER BY `offset` LIMIT %s"
    )
    doomed: dict[str, list[int]] = {}
    times: list[int] = []
    parameters = [
        (topic, key, offset, read_offset if lowest is None else min(read_offset, lowest[key]), limit)
        for key, offset in above.items()
    ]
    for key, offset, published_at in session.each(one, parameters):
        if published_at <= youngest:
            doomed.setdefault(key, []).append(offset)
            times.append(published_at)
    deleted = len(times)
    if doomed and not dry_run:
        offsets = sorted(offset for of_key in doomed.values() for offset in of_key)
        # Not len(offsets): another GC, a redrive or a discard may have deleted some of them, and counts those.
        deleted = session.delete(LOG, "o", offsets, "s.`offset` = v.o")
        _note(session, topic, offsets[-1], max(times))
    orphans: tuple[Orphans, ...] = ()
    if deleted and lowest is None and not settings.may_lack_groups(topic):
        orphans = (Orphans(topic, deleted, min(times), max(times)),)
    rest = tuple((key, max(offsets)) for key, offsets in doomed.items() if len(offsets) == limit)
    return Collected(deleted, 0, Checkpoint(topic, last, rest), orphans)


def _note(session: Session, topic: str, offset: int, published_at: int) -> None:
    """Store the highest collected offset of a topic, so that readers by offset notice missing messages."""
    now, greatest = session.dialect.now_ms, session.dialect.greatest
    assign = {
        "collected_offset": f"{greatest}({COLLECTED}.collected_offset, %s)",
        "published_at": f"{greatest}({COLLECTED}.published_at, %s)",
        "collected_at": now,
    }
    session.execute(
        f"INSERT INTO {COLLECTED} (topic, collected_offset, published_at, collected_at) VALUES (%s, %s, %s, {now})"
        + session.dialect.on_conflict(("topic",), assign),
        (topic, offset, published_at, offset, published_at),
    )


def _next_group(session: Session, after: GroupRef | None) -> GroupRef | None:
    refs = sorted(
        GroupRef(*row) for row in ConsumerGroup.objects.using(session.using).values_list("consumer_group", "topic")
    )
    return next((ref for ref in refs if after is None or ref > after), None)


def _forget_step(session: Session, place: Checkpoint, ref: GroupRef, most: int) -> Collected:
    """Delete offsets rows of partitions without messages in the log, among the next ``most`` rows of a group."""
    after = None if place.topic is None else place.key
    above = "" if after is None else "AND s.partition_key > %s "
    rows = session.rows(
        "SELECT s.partition_key, NOT EXISTS ("
        f"SELECT 1 FROM {LOG} m{session.dialect.force_index('queue_messages_partition')} "
        "WHERE m.topic = s.topic AND m.partition_key = s.partition_key) "
        f"FROM {OFFSETS} s{session.dialect.force_index('PRIMARY')} "
        f"WHERE s.consumer_group = %s AND s.topic = %s {above}ORDER BY s.partition_key LIMIT %s",
        (*ref, *(() if after is None else (after,)), most),
    )
    idle = [key for key, is_empty in rows if is_empty]
    forgotten = run(session.using, lambda session: forget_positions(session, ref, idle)) if idle else 0
    if len(rows) == most:
        return Collected(0, forgotten, Checkpoint(ref.topic, rows[-1][0], group=ref))
    group = _next_group(session, ref)
    return Collected(0, forgotten, None if group is None else Checkpoint(group=group))


def forget_positions(session: Session, ref: GroupRef, keys: Sequence[str]) -> int:
    """Delete the offsets rows of those of some partitions that are empty; return how many.

    The rows are locked first, and the log is read then: in the other order, settled messages were delivered again.
    """
    locked = watermarks.lock(session, ref, keys, skip_locked=True)
    if not locked:
        return 0
    is_busy = (
        f"WHERE EXISTS (SELECT 1 FROM {LOG} m{session.dialect.force_index('queue_messages_partition')} "
        "WHERE m.topic = %s AND m.partition_key = v.k) OR "
        f"EXISTS (SELECT 1 FROM {STATE} d{session.dialect.force_index('PRIMARY')} "
        "WHERE d.consumer_group = %s AND d.topic = %s AND d.partition_key = v.k)"
    )
    busy = set(flat(session.joined("SELECT v.k", "k", locked, is_busy, after=(ref.topic, *ref))))
    empty = sorted(set(locked) - busy)
    session.delete(OFFSETS, "k", empty, BY_KEY, after=ref)
    return len(empty)
