"""The contents of messages, read from the log after a claim has committed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from django_mysqlqueue.db.tables import LOG
from django_mysqlqueue.sql.session import Session


class Body(NamedTuple):
    """The content of a message."""

    message_id: str
    payload: bytes
    metadata: str | bytes
    original_id: str
    published_at: int
    created_at: int
    original_topic: str = ""
    failed_group: str = ""
    failure_count: int = 0
    last_error: str = ""
    target_group: str = ""
    publisher_key: str | None = None
    """The publisher's key, if it was hashed to the partition."""
    expires_at: int | None = None
    """When the message expires, in epoch milliseconds; None: never."""
    coalesce_key: str | None = None


def read(using: str, offsets: Iterable[int]) -> dict[int, Body]:
    """Return messages of the log by offset, read outside of any transaction.

    A process that freezes while it receives rows must not hold locks (they were kept for 60 s). A missing offset does
    not prove that the message is deleted: see ``deleted``.
    """
    session = Session(using)
    rows = session.among(
        "SELECT m.`offset`, m.id, m.payload, m.metadata, m.original_id, m.published_at, m.created_at, "
        "m.original_topic, m.failed_group, m.failure_count, m.last_error, m.target_group, "
        "m.publisher_key, m.expires_at, m.coalesce_key "
        f"FROM {LOG} m{session.dialect.force_index('PRIMARY')} WHERE m.`offset` IN {{keys}}",
        offsets,
    )
    return {offset: Body(message_id, content(payload), *more) for offset, message_id, payload, *more in rows}


def deleted(using: str, offsets: Iterable[int]) -> set[int]:
    """Return the offsets that, as the database confirms, are not in the log: GC or an operator has deleted them.

    A message that is missing from an answer may still exist: ``sql_select_limit``, or something between the server and
    this process, may have cut off the answer. So this query returns a row for each offset.
    """
    select = f"SELECT v.o, EXISTS (SELECT 1 FROM {LOG} m WHERE m.`offset` = v.o)"
    rows = Session(using).joined(select, "o", offsets, "")
    return {int(offset) for offset, is_there in rows if not is_there}


def content(payload: object) -> bytes:
    """Return a payload as bytes. SQLite stores values of any type: plain SQL may have inserted a text or a number."""
    return bytes(payload) if isinstance(payload, (bytes, bytearray, memoryview)) else str(payload).encode()
