"""Dead letters of a topic: lists, errors, and single dead letters.

At most ``Bounds.dead_letters`` dead letters of a topic are read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.db.tables import LOG
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.options.topics import dlq_topic, is_dlq
from django_mysqlqueue.service import messages, partitions, payloads
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.dead_letters import DeadLetterFilter
from django_mysqlqueue.service.job_results import task_of
from django_mysqlqueue.service.log import all_topics, at_offsets
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, built

LINE = 300
"""Number of characters at the end of an error that a list reads."""
READ_BYTES = 250_000
"""Maximum number of bytes of a dead letter's payload that are read."""


@dataclass(frozen=True, slots=True)
class DeadLetterMatches:
    """The dead letters of a topic that match a filter."""

    topic: str
    offsets: tuple[int, ...]
    """Newest first."""
    refs: dict[GroupRef, int]
    """Number of matches by group and original topic."""
    whole_topic: bool
    """True if all dead letters of the topic were read, or all that were named."""
    all_errors: bool = True
    """True if the errors of all of those were searched."""

    @property
    def whole(self) -> bool:
        """True if there are no further matches."""
        return self.whole_topic and self.all_errors

    @property
    def count(self) -> Count:
        """Number of matches; not exact if there may be more."""
        return Count(len(self.offsets), self.whole)


@dataclass(frozen=True, slots=True)
class DeadLetterSummary:
    """A dead letter in a list. Times are in epoch milliseconds."""

    offset: int
    """Its offset in the DLQ topic."""
    key: str
    """The partition key."""
    ref: GroupRef
    """The group that dead-lettered the message, and the topic that it was published to."""
    original_id: str
    """The id of the message."""
    original_offset: int
    """The offset of the message."""
    failed_at: int
    """When the last attempt failed."""
    attempts: int
    """Number of failed attempts."""
    size: int
    """Size of its payload in bytes."""
    error: str
    """The last 300 characters of the last traceback or of the reason."""
    task: str = ""
    """The dotted path of the task, if it is of a job."""


LISTED = (
    "m.`offset`, m.partition_key AS `key`, m.failed_group, m.original_topic, m.original_id, m.original_offset, "
    "m.failed_at, m.failure_count AS attempts, m.size"
)
"""Columns of a ``DeadLetterSummary``, without the error, of the log as ``m``."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter in its DLQ topic, with its error and the first ``READ_BYTES`` bytes of its payload."""

    topic: str
    message_id: str
    listed: DeadLetterSummary
    error: str
    payload: bytes
    metadata: dict[str, Any]
    published_at: int

    @property
    def whole(self) -> bool:
        """True if ``payload`` is complete."""
        return self.listed.size <= READ_BYTES


@dataclass(frozen=True, slots=True)
class DeadLetterListing:
    """A page of dead letters, with the number of all that match."""

    dead_letters: tuple[DeadLetterSummary, ...]
    """Newest first."""
    count: Count
    """Number of all that match; not exact if not all dead letters were read."""


@checked()
def list_dead_letters(
    topic: str,
    *,
    group: str | None = None,
    error: str | None = None,
    since: int | None = None,
    until: int | None = None,
    key: str | None = None,
    before: int | None = None,
    limit: int = 50,
    using: str | None = None,
    bounds: Bounds = PAGES,
) -> DeadLetterListing:
    """List the dead letters of a topic, newest first, without their payloads.

    At most ``bounds.dead_letters`` dead letters of the topic, or of the key, are read, in the order of their partition
    keys.

    Args:
        topic: the topic that the messages were published to, or its DLQ topic.
        group: only dead letters of this consumer group.
        error: only dead letters whose error contains this text, among the newest ``bounds.errors``.
        since: only dead letters that failed at or after this time, in epoch milliseconds.
        until: only dead letters that failed at or before this time, in epoch milliseconds.
        key: only dead letters of messages that were published with this key: of jobs, the dotted path of their task.
            Those that were hashed while ``PARTITIONS`` had another value are not found.
        before: only offsets (in the DLQ topic) below this one.
        limit: maximum number of dead letters.
        using: alias of the database (default: that of the topic, else of the queue).
        bounds: limits of what is read.
    """
    session = Session(queue_alias(using, topic=topic))
    wanted = DeadLetterFilter(dlq_topic(topic), group=group, error=error, since=since, until=until, key=key)
    found = look(session, wanted, bounds=bounds)
    offsets = [offset for offset in found.offsets if before is None or offset < before]
    return DeadLetterListing(tuple(at(session, offsets[:limit])), found.count)


def dlq_topics(
    session: Session, topics: Iterable[str] | None = None, *, bounds: Bounds = PAGES
) -> list[tuple[str, Count]]:
    """Return the DLQ topics, or those of some topics, that have messages, by name, with their numbers."""
    names = all_topics(session) if topics is None else sorted({dlq_topic(topic) for topic in topics})
    found = [(name, count_topic(session, name, bounds.dead_letters)) for name in names if is_dlq(name)]
    return [(name, number) for name, number in found if number]


def count_topic(session: Session, topic: str, most: int) -> Count:
    """Return the number of a topic's messages in the log."""
    return _count(session, "topic = %s", (topic,), most)


def _count(session: Session, where: str, parameters: Sequence[str], most: int) -> Count:
    hint = session.dialect.force_index("queue_messages_partition")
    (number,) = session.one(
        f"SELECT COUNT(*) FROM (SELECT 1 FROM {LOG}{hint} WHERE {where} LIMIT %s) w", (*parameters, most + 1)
    )
    return Count.up_to(most, number)


def look(session: Session, wanted: DeadLetterFilter, *, bounds: Bounds = PAGES) -> DeadLetterMatches:
    """Return the dead letters that match a filter, among the first ``bounds.dead_letters`` of the topic or the key."""
    found, whole = _matching(session, wanted._replace(error=None), bounds)
    found.sort(reverse=True)
    all_errors = True
    if wanted.error is not None:
        all_errors = len(found) <= bounds.errors
        condition, parameters = DeadLetterFilter(wanted.topic, error=wanted.error).condition()
        searched = [offset for offset, *_ in found[: bounds.errors]]
        saying = {row.offset for row in at_offsets(session, "m.`offset`", searched, condition, after=parameters)}
        found = [row for row in found if row[0] in saying]
    refs = Counter(GroupRef(group, topic) for _, group, topic in found)
    offsets = tuple(offset for offset, *_ in found)
    return DeadLetterMatches(wanted.topic, offsets, dict(refs.most_common()), whole, all_errors)


def _matching(session: Session, wanted: DeadLetterFilter, bounds: Bounds) -> tuple[list[tuple[Any, ...]], bool]:
    """Return (offset, group, original topic) of matching dead letters, and whether all were read."""
    condition, parameters = wanted.condition()
    columns = "m.`offset`, m.failed_group, m.original_topic"
    if wanted.offsets is not None:
        named = (wanted.topic, *parameters)
        return at_offsets(session, columns, wanted.offsets, f"m.topic = %s AND {condition}", after=named), True
    hint = session.dialect.force_index("queue_messages_partition")
    joins = f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = w.place"
    ranges: list[tuple[str, tuple[str, ...]]] = [("topic = %s", (wanted.topic,))]
    if wanted.key is not None:
        keys = partitions.among(session, wanted.topic, partitions.of_key(wanted.topic, wanted.key))
        ranges = [("topic = %s AND partition_key = %s", (wanted.topic, key)) for key in keys]
    found: list[tuple[Any, ...]] = []
    left = bounds.dead_letters
    for where, place in ranges:
        found += session.rows(
            f"SELECT {columns} FROM (SELECT `offset` AS place FROM {LOG}{hint} WHERE {where} "
            f"ORDER BY partition_key, `offset` LIMIT %s) w {joins} WHERE {condition}",
            (*place, left, *parameters),
        )
        read = _count(session, where, place, left)
        if not read.exact:
            return found, False
        left -= read.value
    return found, True


def is_cut(end: str) -> bool:
    """Return True if the last line of an error is longer than its last ``LINE`` characters, which are given."""
    return len(end) >= LINE and messages.last_line(end) == end.strip()


def at(session: Session, offsets: Sequence[int]) -> list[DeadLetterSummary]:
    """Return the dead letters at some offsets, newest first, without those that no longer exist."""
    columns = f"{LISTED}, {session.dialect.ending('m.last_error', LINE)} AS error"
    rows = at_offsets(session, columns, offsets, "m.failed_group <> ''")
    return sorted(map(_listed, rows), key=lambda one: -one.offset)


def one(session: Session, offset: int) -> DeadLetter | None:
    """Return the dead letter at an offset with its payload, or None."""
    for row in session.named(
        f"SELECT {LISTED}, m.last_error AS error, m.topic, m.id AS message_id, SUBSTR(m.payload, 1, %s) AS payload, "
        f"m.metadata, m.published_at FROM {LOG} m WHERE m.`offset` = %s AND m.failed_group <> ''",
        (READ_BYTES, offset),
    ):
        payload, metadata = payloads.content(row.payload), messages.decode_metadata(row.metadata)
        return built(DeadLetter, row, listed=_listed(row), payload=payload, metadata=metadata)
    return None


def _listed(row: Any) -> DeadLetterSummary:
    ref = GroupRef(row.failed_group, row.original_topic)
    return built(DeadLetterSummary, row, ref=ref, task=task_of(ref, row.key))


class DeadLetterCount(NamedTuple):
    """How many dead letters a group has, in all and since a time."""

    all: Count
    recent: Count


NO_DEAD_LETTERS = DeadLetterCount(Count(0), Count(0))


def count_by_group(
    session: Session, since: int, topics: Sequence[str], *, bounds: Bounds = PAGES
) -> dict[tuple[str, GroupRef], DeadLetterCount]:
    """Count dead letters by DLQ topic and group; the count of each topic stops at ``bounds.count``."""
    hint, most = session.dialect.force_index("queue_messages_partition"), bounds.count
    found: dict[tuple[str, GroupRef], DeadLetterCount] = {}
    for topic in topics:
        rows = session.rows(
            "SELECT w.failed_group, w.original_topic, COUNT(*), SUM(CASE WHEN w.failed_at >= %s THEN 1 ELSE 0 END) "
            f"FROM (SELECT failed_group, original_topic, failed_at FROM {LOG}{hint} WHERE topic = %s "
            "ORDER BY partition_key, `offset` LIMIT %s) w GROUP BY w.failed_group, w.original_topic",
            (since, topic, most + 1),
        )
        exact = sum(count for _, _, count, _ in rows) <= most
        for group, original, *counts in rows:
            if group:
                number, recent = (Count(int(count), exact).capped(most) for count in counts)
                found[topic, GroupRef(group, original)] = DeadLetterCount(number, recent)
    return found
