"""Lists of messages in the log, newest first: of all topics, a topic or a partition; from a time; by message id.

A page reads a bounded number of rows. If no index answers the question, it walks along the primary key for a bounded
number of rows and returns which ones.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.db.tables import LOG
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.names.keys import hashed_partition
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service import log, log_places, messages, partitions, payloads
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.log import first_since
from django_mysqlqueue.sql.session import Session, built

CLOCK_MS = 2000
"""Milliseconds that a publisher's clock may be ahead of the database's for the time in its id to be useful."""
LAST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class LogMessage:
    """A message in the log, without its payload. Times are in epoch milliseconds."""

    offset: int
    """Its offset in the log."""
    topic: str
    key: str
    """The partition key."""
    message_id: str
    size: int
    """Size of its payload in bytes."""
    created_at: int
    """When it was published."""
    published_at: int
    """When it entered the log."""
    target_group: str
    """The only group that receives it; empty if all groups do."""
    failed_group: str
    """The group that dead-lettered the message; empty if it is not a dead letter."""
    original_id: str
    """The id of the original, if this is a dead letter or a redriven message; otherwise empty."""
    original_topic: str
    """The topic of the original."""
    original_offset: int
    """The offset of the original."""


COLUMNS = (
    "m.`offset`, m.topic, m.partition_key AS `key`, m.id AS message_id, m.size, m.created_at, m.published_at, "
    "m.target_group, m.failed_group, m.original_id, m.original_topic, m.original_offset"
)
"""Columns of a ``LogMessage`` of the log as ``m``."""


@dataclass(frozen=True, slots=True)
class MessageListing:
    """A page of messages in the log."""

    entries: list[LogMessage]
    """Newest first."""
    newer: int | None
    """The argument ``after`` for the next newer page; None if this is the newest."""
    older: int | None
    """The argument ``before`` for the next older page; None if there is none."""
    looked: tuple[int, int] | None = None
    """The lowest and highest offset that were read, if only a part of the log was searched."""


@checked()
def list_messages(
    *,
    topic: str | None = None,
    key: str | None = None,
    before: int | None = None,
    after: int | None = None,
    limit: int = 50,
    using: str | None = None,
    bounds: Bounds = PAGES,
) -> MessageListing:
    """List messages in the log, newest first, without their payloads.

    A topic with more than ``bounds.merged_partitions`` partitions is read by walking ``bounds.walked`` messages of the
    log, so a page may have fewer messages than the limit although there are more.

    Args:
        topic: only messages of this topic.
        key: only messages of the partition with this key, which may be ``""``.
        before: only offsets below this one.
        after: the next messages above this offset, instead of the newest ones.
        limit: maximum number of messages.
        using: alias of the database (default: that of the topic, else of the queue).
        bounds: limits of what is read.
    """
    session = Session(queue_alias(using, topic=topic))
    is_newer = after is not None
    start = after if after is not None else LAST if before is None else before
    keys = [key] if key is not None else None
    if topic is not None and keys is None:
        keys = partitions.all_in_log(session, topic, most=bounds.merged_partitions)
    looked: tuple[int, int] | None = None
    if topic is None:
        offsets = [place.offset for place in log_places.walk(session, start, limit + 1, newer=is_newer)]
    elif keys is not None:
        offsets = log_places.in_partitions(session, topic, keys, start, limit + 1, newer=is_newer)
    else:
        walked = log_places.walk(session, start, bounds.walked, newer=is_newer)
        offsets = [place.offset for place in walked if place.topic == topic]
        if len(walked) == bounds.walked and len(offsets) <= limit:
            looked = (walked[0].offset, walked[-1].offset)
    shown = offsets[:limit]  # nearest to the start first
    further = shown[-1] if len(offsets) > limit else looked and looked[-1]
    seen = looked and (min(looked), max(looked))
    if after is not None:
        return MessageListing(entries(session, shown), further, shown[0] if shown else after + 1, seen)
    newer = None if before is None else shown[0] if shown else before - 1
    return MessageListing(entries(session, shown), newer, further, seen)


def entries(session: Session, offsets: Sequence[int]) -> list[LogMessage]:
    """Return the messages at some offsets, newest first, without those that are not in the log."""
    found = [built(LogMessage, row) for row in log.at_offsets(session, COLUMNS, offsets)]
    return sorted(found, key=lambda entry: -entry.offset)


# -- by id --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IdSearch:
    """The result of a search for an id."""

    entries: list[LogMessage]
    complete: bool
    """True if all partitions were searched, or the one that was named."""
    looked: tuple[int, int] | None = None
    """The lowest and highest offset that were searched around the time in the id; None if there is no such time."""


def by_id(
    session: Session, message_id: str, *, topic: str | None = None, key: str | None = None, bounds: Bounds = PAGES
) -> IdSearch:
    """Search messages by id: in the partition of one without a key and around the time in the id, else in all."""
    if topic is not None and key is not None:
        return IdSearch(entries(session, list(at_ids(session, [(topic, key, message_id)]).values())), complete=True)
    chosen = log.all_topics(session) if topic is None else [topic]
    settings = get_settings()
    guesses = [
        (one, hashed_partition(message_id, number), message_id)
        for one in chosen
        for number in {settings.partitions_of(one) or settings.keyless_partitions, settings.keyless_partitions}
    ]
    places = set(at_ids(session, guesses).values())
    looked, moment = None, _time_of(message_id)
    if moment is not None:
        near, looked = _around(session, message_id, first_since(session, moment - CLOCK_MS), bounds.walked)
        places |= near
    left = bounds.searched_partitions
    if moment is None or not places:
        for one in chosen:
            if left < 0:
                break
            keys, whole = partitions.last_offsets(session, one, limit=left)
            places |= set(at_ids(session, [(one, key, message_id) for key in keys]).values())
            left = left - len(keys) if whole else -1
    found = [entry for entry in entries(session, list(places)) if topic in (None, entry.topic)]
    return IdSearch(found, left >= 0, looked)


def at_ids(session: Session, ids: Sequence[tuple[str, str, str]]) -> dict[tuple[str, str, str], int]:
    """Return a dict from (topic, partition key, id) to offset, for the messages that are in the log."""
    rows = session.joined(
        "SELECT m.topic, m.partition_key, m.id, m.`offset`",
        "tki",
        ids,
        f"{session.dialect.join_to(LOG, 'm', 'queue_messages_id')} "
        "ON m.topic = v.t AND m.partition_key = v.k AND m.id = v.i",
    )
    return {tuple(place): offset for *place, offset in rows}


def _around(session: Session, message_id: str, start: int, length: int) -> tuple[set[int], tuple[int, int] | None]:
    """Search an id among the messages from an offset on."""
    walked = (
        f"(SELECT `offset` AS place, id FROM {LOG}{session.dialect.force_index('PRIMARY')} "
        "WHERE `offset` >= %s ORDER BY `offset` LIMIT %s) w"
    )
    first, last = session.one(f"SELECT MIN(w.place), MAX(w.place) FROM {walked}", (start, length))
    if first is None:
        return set(), None
    rows = session.rows(f"SELECT w.place FROM {walked} WHERE w.id = %s", (start, length, message_id))
    return {place for (place,) in rows}, (first, last)


def _time_of(message_id: str) -> int | None:
    """Return when an id was created, in epoch milliseconds, if it is a UUID of version 7, as the queue's ids are."""
    try:
        value = uuid.UUID(message_id)
    except ValueError:
        return None
    return value.int >> 80 if value.version == 7 else None


CHUNK_ROWS = 50
CHUNK_BYTES = 1_000_000
"""Maximum numbers of messages and of bytes of payloads that one statement searches. One message may be larger."""


class Beginning(NamedTuple):
    """The first bytes of a message's payload, and its metadata."""

    payload: bytes
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ContentSearch:
    """The result of a search in the contents of messages."""

    entries: list[LogMessage]
    """Those that contain the text, newest first."""
    searched: int
    read: int
    """Number of bytes of the payloads of those that were searched."""
    offsets: tuple[int, int] | None
    """The lowest and the highest offset that were searched; None if the topic has no older messages."""
    older: int | None
    """The argument ``before`` to continue the search; None if it has come to the end of the topic."""


def beginnings(session: Session, offsets: Sequence[int], most: int) -> dict[int, Beginning]:
    """Return the first bytes of payloads by offset, without those of messages that are not in the log."""
    columns = "m.`offset`, SUBSTR(m.payload, 1, %s), m.metadata"
    return {
        offset: Beginning(payloads.content(payload), messages.decode_metadata(metadata))
        for offset, payload, metadata in log.at_offsets(session, columns, offsets, before=[most])
    }


def search(
    session: Session,
    text: str,
    *,
    topic: str,
    key: str | None = None,
    before: int | None = None,
    limit: int = 50,
    bounds: Bounds = PAGES,
) -> ContentSearch:
    """Search a text in payloads, metadata and coalesce keys as stored, newest first, until a bound is reached."""
    listing = list_messages(
        topic=topic, key=key, before=before, limit=bounds.contents, using=session.using, bounds=bounds
    )
    end = time.monotonic() + bounds.content_seconds
    found: list[LogMessage] = []
    searched, read = 0, 0
    older = listing.older
    for chunk in _chunks(listing.entries):
        matching = _matching(session, [entry.offset for entry in chunk], text)
        found += [entry for entry in chunk if entry.offset in matching]
        searched += len(chunk)
        read += sum(entry.size for entry in chunk)
        if searched == len(listing.entries):
            break
        if len(found) >= limit or read >= bounds.content_bytes or time.monotonic() >= end:
            older = chunk[-1].offset
            break
    last = listing.entries[searched - 1].offset if searched else None
    if len(found) > limit:
        found, older = found[:limit], found[limit - 1].offset
        last = older
    offsets = listing.looked if last is None else (last, listing.entries[0].offset)
    return ContentSearch(found, searched, read, offsets, older)


def _chunks(entries: Sequence[LogMessage]) -> Iterator[Sequence[LogMessage]]:
    start, size = 0, 0
    for number, entry in enumerate(entries):
        if number > start and (number - start == CHUNK_ROWS or size + entry.size > CHUNK_BYTES):
            yield entries[start:number]
            start, size = number, 0
        size += entry.size
    if entries:
        yield entries[start:]


def _matching(session: Session, offsets: Sequence[int], text: str) -> set[int]:
    contains = "(INSTR(m.payload, %s) > 0 OR INSTR(m.metadata, %s) > 0 OR INSTR(m.coalesce_key, %s) > 0)"
    return {row.offset for row in log.at_offsets(session, "m.`offset`", offsets, contains, after=[text] * 3)}
