"""Dead letters for people: which a topic has, what they failed of, where one came from and went to.

No more than ``Bounds.dead_letters`` of a topic are read, however many it has.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from django_mysqlqueue import naming
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.service import messages, payloads
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.dead_letters import DeadLetterFilter
from django_mysqlqueue.service.log import all_topics
from django_mysqlqueue.service.publishing import queue_alias
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session

LOG = QueueMessage._meta.db_table

LINE = 300
"""So many characters of an error's end are read for a list."""
READ_BYTES = 250_000
"""A single dead letter is read with no more of its payload than that."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Dead letters that failed in one group and whose errors end in the same line."""

    ref: GroupRef
    """Who failed, and its topic."""
    line: str
    """Its last ``LINE`` characters."""
    count: int
    cut: bool = False
    """The line begins before them."""


@dataclass(frozen=True, slots=True)
class DeadLetterMatches:
    """Which dead letters of a topic match."""

    topic: str
    offsets: tuple[int, ...]
    """Newest first."""
    refs: dict[GroupRef, int]
    """How many of them each group failed, with the topic they were published to."""
    whole_topic: bool
    """All of the topic was looked through, or all that were named."""
    all_errors: bool = True
    """The error text was searched for in all of those."""

    @property
    def whole(self) -> bool:
        """There are no others that match."""
        return self.whole_topic and self.all_errors

    @property
    def count(self) -> Count:
        return Count(len(self.offsets), self.whole)


@dataclass(frozen=True, slots=True)
class DeadLetterSummary:
    """A dead letter in a list; times in epoch milliseconds."""

    offset: int
    """Its offset in the DLQ topic."""
    key: str
    """The partition key."""
    ref: GroupRef
    """The group that it failed in, and the topic that the message was published to."""
    original_id: str
    """The id of the message."""
    original_offset: int
    """The offset of the message."""
    failed_at: int
    """When it failed for the last time."""
    attempts: int
    """How many attempts failed."""
    size: int
    """Size of its payload in bytes."""
    error: str
    """The last 300 characters of the last traceback or of the reason."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter with what it says."""

    topic: str
    """The DLQ topic."""
    message_id: str
    listed: DeadLetterSummary
    error: str
    payload: bytes
    """No more than its first ``READ_BYTES``."""
    metadata: dict[str, Any]
    published_at: int
    """When it took its place in the DLQ topic."""

    @property
    def whole(self) -> bool:
        """``payload`` is all of it."""
        return self.listed.size <= READ_BYTES


@dataclass(frozen=True, slots=True)
class DeadLetterListing:
    """Dead letters that match, and how many there are."""

    dead_letters: tuple[DeadLetterSummary, ...]
    """Newest first."""
    count: Count
    """Of all that match; not exact where more dead letters were not read."""


def list_dead_letters(
    topic: str,
    *,
    group: str | None = None,
    error: str | None = None,
    since: int | None = None,
    until: int | None = None,
    before: int | None = None,
    limit: int = 50,
    using: str | None = None,
    bounds: Bounds = PAGES,
) -> DeadLetterListing:
    """List the dead letters of a topic, newest first, without their payloads.

    No more than ``bounds.dead_letters`` of the topic are read, the first ones by partition key.

    Args:
        topic: the topic that the messages were published to, or its DLQ topic.
        group: only those that failed in this consumer group.
        error: only those whose error contains this text, of the newest ``bounds.errors``.
        since: only those that failed at or after this time, in epoch milliseconds.
        until: only those that failed at or before this time, in epoch milliseconds.
        before: only offsets (in the DLQ topic) below this one.
        limit: maximum number of dead letters.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        bounds: how much to read.

    Raises:
        InvalidMessage: there is no database ``using``.
        django.db.Error: the database refuses or does not answer.
    """
    session = Session(queue_alias(using))
    wanted = DeadLetterFilter(naming.dlq_topic(topic), group=group, error=error, since=since, until=until)
    found = look(session, wanted, bounds=bounds)
    offsets = [offset for offset in found.offsets if before is None or offset < before]
    return DeadLetterListing(tuple(at(session, offsets[:limit])), found.count)


def dlq_topics(session: Session, *, bounds: Bounds = PAGES) -> list[tuple[str, Count]]:
    """The DLQ topics that hold messages, by name; each count stops at ``bounds.dead_letters``."""
    return [(topic, _number(session, topic, bounds)) for topic in all_topics(session) if naming.is_dlq(topic)]


def _number(session: Session, topic: str, bounds: Bounds) -> Count:
    most = bounds.dead_letters
    hint = session.dialect.force_index("queue_messages_partition")
    row = session.row(
        f"SELECT COUNT(*) FROM (SELECT 1 FROM {LOG}{hint} WHERE topic = %s LIMIT %s) w", (topic, most + 1)
    )
    assert row is not None  # noqa: S101  # an aggregate has one row
    return Count.up_to(most, int(row[0]))


def look(
    session: Session, letters: DeadLetterFilter, *, newest: int | None = None, bounds: Bounds = PAGES
) -> DeadLetterMatches:
    """Goes through the named dead letters, or the first ``bounds.dead_letters`` of the topic, for those that match.

    Args:
        newest: leaves out those of a higher offset, which have come since it was seen.
    """
    found, whole = _matching(session, dataclasses.replace(letters, error=None), bounds)
    found = sorted((row for row in found if newest is None or row[0] <= newest), reverse=True)
    all_errors = True
    if letters.error is not None:
        all_errors = len(found) <= bounds.errors
        saying = _saying(session, letters, [int(row[0]) for row in found[: bounds.errors]])
        found = [row for row in found if row[0] in saying]
    refs = Counter(GroupRef(group, topic) for _, group, topic in found)
    offsets = tuple(int(row[0]) for row in found)
    return DeadLetterMatches(letters.topic, offsets, dict(refs.most_common()), whole, all_errors)


def _matching(session: Session, letters: DeadLetterFilter, bounds: Bounds) -> tuple[list[tuple[Any, ...]], bool]:
    """(offset, group, first topic) of dead letters, and whether there was no bound to them."""
    condition, parameters = letters.condition()
    select = "SELECT m.`offset`, m.failed_group, m.original_topic"
    if letters.offsets is not None:
        found: list[tuple[Any, ...]] = []
        for chunk in session.chunks(sorted(set(letters.offsets))):
            found += session.rows(
                f"{select} FROM {session.dialect.rows(('o',), len(chunk))} {session.dialect.join_to(LOG, 'm')} "
                f"ON m.`offset` = v.o AND m.topic = %s AND {condition}",
                (*chunk, letters.topic, *parameters),
            )
        return found, True
    hint = session.dialect.force_index("queue_messages_partition")
    found = session.rows(
        f"{select} FROM (SELECT `offset` AS place FROM {LOG}{hint} WHERE topic = %s "
        f"ORDER BY partition_key, `offset` LIMIT %s) w {session.dialect.join_to(LOG, 'm')} "
        f"ON m.`offset` = w.place WHERE {condition}",
        (letters.topic, bounds.dead_letters, *parameters),
    )
    return found, _number(session, letters.topic, bounds).exact


def _saying(session: Session, letters: DeadLetterFilter, offsets: Sequence[int]) -> set[int]:
    """Those whose error has the text in it."""
    condition, parameters = DeadLetterFilter(letters.topic, error=letters.error).condition()
    found: set[int] = set()
    for chunk in session.chunks(sorted(offsets)):
        found.update(
            int(offset)
            for (offset,) in session.rows(
                f"SELECT m.`offset` FROM {session.dialect.rows(('o',), len(chunk))} "
                f"{session.dialect.join_to(LOG, 'm')} "
                f"ON m.`offset` = v.o AND {condition}",
                (*chunk, *parameters),
            )
        )
    return found


def kinds(session: Session, found: DeadLetterMatches, *, bounds: Bounds = PAGES) -> list[ErrorKind]:
    """What the newest ``bounds.errors`` of those found failed of, the most frequent first."""
    number: Counter[tuple[GroupRef, str, bool]] = Counter()
    for chunk in session.chunks(found.offsets[: bounds.errors]):
        for group, topic, end in session.rows(
            f"SELECT m.failed_group, m.original_topic, {session.dialect.ending('m.last_error', LINE)} "
            f"FROM {session.dialect.rows(('o',), len(chunk))} {session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o",
            sorted(chunk),
        ):
            number[GroupRef(group, topic), messages.last_line(end), is_cut(end)] += 1
    return [ErrorKind(ref, line, count, cut) for (ref, line, cut), count in number.most_common()]


def is_cut(end: str) -> bool:
    """Whether the last line of an error begins before its last ``LINE`` characters, which are given."""
    return len(end) >= LINE and messages.last_line(end) == end.strip()


def at(session: Session, offsets: Sequence[int]) -> list[DeadLetterSummary]:
    """Dead letters by their offsets, newest first; those that are gone are left out."""
    end = session.dialect.ending("m.last_error", LINE)
    found: list[DeadLetterSummary] = []
    for chunk in session.chunks(sorted(offsets)):
        found += [
            _listed(row)
            for row in session.rows(
                "SELECT m.`offset`, m.partition_key, m.failed_group, m.original_topic, m.original_id, "
                f"m.original_offset, m.failed_at, m.failure_count, m.size, {end} "
                f"FROM {session.dialect.rows(('o',), len(chunk))} {session.dialect.join_to(LOG, 'm')} "
                "ON m.`offset` = v.o AND m.failed_group <> ''",
                chunk,
            )
        ]
    return sorted(found, key=lambda letter: -letter.offset)


def one(session: Session, offset: int) -> DeadLetter | None:
    """A dead letter with its payload, or None: there is none at this offset (any more)."""
    row = session.row(
        "SELECT m.`offset`, m.partition_key, m.failed_group, m.original_topic, m.original_id, m.original_offset, "
        "m.failed_at, m.failure_count, m.size, m.last_error, m.topic, m.id, SUBSTR(m.payload, 1, %s), m.metadata, "
        f"m.published_at FROM {LOG} m WHERE m.`offset` = %s AND m.failed_group <> ''",
        (READ_BYTES, offset),
    )
    if row is None:
        return None
    topic, message_id, payload, metadata, published_at = row[10:]
    return DeadLetter(
        topic,
        message_id,
        _listed(row[:10]),
        row[9],
        payloads.content(payload),
        messages.decode_metadata(metadata),
        int(published_at),
    )


def _listed(row: Sequence[Any]) -> DeadLetterSummary:
    offset, key, group, topic, original_id, original_offset, failed_at, attempts, size, error = row
    return DeadLetterSummary(
        int(offset),
        key,
        GroupRef(group, topic),
        original_id,
        int(original_offset),
        int(failed_at),
        int(attempts),
        int(size),
        error,
    )


class DeadLetterCount(NamedTuple):
    """How many dead letters a group has."""

    all: Count
    recent: Count


NO_DEAD_LETTERS = DeadLetterCount(Count(0), Count(0))


def count_by_group(
    session: Session, since: int, topics: Sequence[str], *, bounds: Bounds = PAGES
) -> dict[tuple[str, GroupRef], DeadLetterCount]:
    """Dead letters by DLQ topic and the group that failed them; each topic's count stops at ``bounds.count``.

    Args:
        since: those that failed from then on are recent (epoch milliseconds).
    """
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
                number, recent = (Count(min(int(count), most), exact) for count in counts)
                found[topic, GroupRef(group, original)] = DeadLetterCount(number, recent)
    return found
