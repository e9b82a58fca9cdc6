"""Searches for the next messages of the log above or below an offset.

``walk`` reads the log along its primary key, so its cost does not depend on topics and partitions. ``in_partitions``
reads an index, so its cost does not depend on other topics, but grows with the partitions. A result that something has
cut off (``sql_select_limit``) raises an error: a missing row would be taken for the end of the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.sql.session import UNION_TERMS, Session, flat, last_row

LOG = QueueMessage._meta.db_table
COLUMNS = "`offset`, topic, partition_key, size, id"


class Place(NamedTuple):
    """A message's place in the log."""

    offset: int
    topic: str
    key: str
    """The partition key."""
    size: int
    """Size of its payload in bytes."""
    id: str
    """Its id. In a log that was restored, another message may have the same offset."""


def walk(session: Session, start: int, length: int, *, newer: bool) -> list[Place]:
    """Return the next messages of all topics, nearest first.

    ``newer``: True for those above ``start``, False for those below it.
    """
    rows = session.whole(
        f"SELECT * FROM (SELECT {COLUMNS} FROM {LOG}{session.dialect.force_index('PRIMARY')} WHERE {_next(newer)}) w"
        f"{last_row(5)}",
        (start, length),
    )
    return sorted((Place(*row) for row in rows), reverse=not newer)


def in_partitions(
    session: Session, topic: str, keys: Sequence[str], start: int, limit: int, *, newer: bool
) -> list[int]:
    """Return the offsets of the next messages of partitions, nearest first.

    ``newer``: True for those above ``start``, False for those below it.
    """
    one = (
        f"SELECT `offset` FROM {LOG}{session.dialect.force_index('queue_messages_partition')} "
        f"WHERE topic = %s AND partition_key = %s AND {_next(newer)}"
    )
    found: list[int] = []
    for place in range(0, len(keys), UNION_TERMS):
        piece = keys[place : place + UNION_TERMS]
        rows = session.whole(
            session.dialect.union(*[one] * len(piece)) + last_row(1), flat((topic, key, start, limit) for key in piece)
        )
        found += (int(offset) for (offset,) in rows)
    return sorted(found, reverse=not newer)[:limit]


def at(session: Session, offsets: Sequence[int]) -> list[Place]:
    """Return the places at some offsets, lowest first, without those that are not in the log."""
    found: list[Place] = []
    for chunk in session.chunks(sorted(offsets)):
        rows = session.rows(
            "SELECT m.`offset`, m.topic, m.partition_key, m.size, m.id "
            f"FROM {session.dialect.rows(('o',), len(chunk))} {session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o",
            chunk,
        )
        found += [Place(*row) for row in rows]
    return sorted(found)


def _next(newer: bool) -> str:  # noqa: FBT001
    """Return the condition, order and limit. Parameters: the start and the limit."""
    return "`offset` > %s ORDER BY `offset` LIMIT %s" if newer else "`offset` < %s ORDER BY `offset` DESC LIMIT %s"
