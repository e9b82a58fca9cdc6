"""What messages say: read from the log after a claim has committed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.service.transactions import Session

LOG = QueueMessage._meta.db_table


class Body(NamedTuple):
    """A message's content, read from the log after the claim has committed."""

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


def read(using: str, offsets: Iterable[int]) -> dict[int, Body]:
    """Reads messages from the log, outside any transaction.

    A process that is frozen while rows stream to it must hold no locks (they
    were kept for 60 s). An offset that is missing has been collected or
    discarded meanwhile.
    """
    session = Session(using)
    found: dict[int, Body] = {}
    for chunk in session.chunks(sorted(offsets)):
        for offset, message_id, payload, *more in session.rows(
            "SELECT m.`offset`, m.id, m.payload, m.metadata, m.original_id, m.published_at, m.created_at, "
            "m.original_topic, m.failed_group, m.failure_count, m.last_error "
            f"FROM {LOG} m{session.dialect.force_index('PRIMARY')} "
            f"WHERE m.`offset` IN ({session.dialect.placeholders(len(chunk), '%s')})",
            chunk,
        ):
            found[offset] = Body(message_id, content(payload), *more)
    return found


def content(payload: object) -> bytes:
    """SQLite keeps what plain SQL gave it: a payload may be text there, or a number, which is not so many NULs."""
    return bytes(payload) if isinstance(payload, (bytes, bytearray, memoryview)) else str(payload).encode()
