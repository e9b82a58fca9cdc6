"""Contents of messages in a list: their beginnings, and a search for a text in the newest ones of a topic.

No index contains payloads. So a search reads a bounded number of messages, of bytes, and of seconds, and returns where
it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.inspection.log_entries import LOG, LogMessage, list_messages
from django_mysqlqueue.service import messages, payloads
from django_mysqlqueue.sql.session import Session

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
    """Number of messages that were searched."""
    read: int
    """Number of bytes of their payloads."""
    offsets: tuple[int, int] | None
    """The lowest and the highest offset that were searched; None if the topic has no older messages."""
    older: int | None
    """The argument ``before`` to continue the search; None if it has come to the end of the topic."""


def beginnings(session: Session, offsets: Sequence[int], most: int) -> dict[int, Beginning]:
    """Return the first bytes of payloads by offset, without those of messages that are not in the log."""
    found: dict[int, Beginning] = {}
    for chunk in session.chunks(sorted(offsets)):
        for offset, payload, metadata in session.rows(
            f"SELECT m.`offset`, SUBSTR(m.payload, 1, %s), m.metadata "
            f"FROM {session.dialect.rows(('o',), len(chunk))} {session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o",
            (most, *chunk),
        ):
            found[int(offset)] = Beginning(payloads.content(payload), messages.decode_metadata(metadata))
    return found


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
    """Search a text in the payloads, the metadata and the coalesce keys of messages, newest first, as they are stored.

    The search ends after ``bounds.contents`` messages, ``bounds.content_bytes`` or ``bounds.content_seconds``.

    ``key``: only messages of the partition with this key. ``before``: only offsets below this one.
    """
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


def _chunks(entries: Sequence[LogMessage]) -> Iterator[list[LogMessage]]:
    chunk: list[LogMessage] = []
    size = 0
    for entry in entries:
        if chunk and (len(chunk) == CHUNK_ROWS or size + entry.size > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(entry)
        size += entry.size
    if chunk:
        yield chunk


def _matching(session: Session, offsets: Sequence[int], text: str) -> set[int]:
    rows = session.rows(
        f"SELECT m.`offset` FROM {session.dialect.rows(('o',), len(offsets))} {session.dialect.join_to(LOG, 'm')} "
        "ON m.`offset` = v.o AND (INSTR(m.payload, %s) > 0 OR INSTR(m.metadata, %s) > 0 "
        "OR INSTR(m.coalesce_key, %s) > 0)",
        (*sorted(offsets), text, text, text),
    )
    return {int(offset) for (offset,) in rows}
