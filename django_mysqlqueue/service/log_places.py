"""Searches for the next messages of the log above or below an offset.

``walk`` reads the log along its primary key, so its cost does not depend on topics and partitions. ``in_partitions``
reads an index, so its cost does not depend on other topics, but grows with the partitions. A result that something has
cut off (``sql_select_limit``) raises an error: a missing row would be taken for the end of the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django_mysqlqueue.db.tables import LOG
from django_mysqlqueue.sql.session import Session, last_row

COLUMNS = "`offset`, topic, partition_key, size, id"
SAMPLED, PARTITIONS = 100, 10
"""Maximum number of messages whose sizes are read to estimate others, and of their partitions."""
ROW, PAGES = 350, 1.3
"""Bytes that a message takes in the log and its indexes beside its payload, and how much larger pages are than their
rows: of 8,000 messages with 100 and with 1,000 bytes, each takes 580 and 1,747 bytes on MariaDB 11.8."""


class LogPlace(NamedTuple):
    """A message's place in the log."""

    offset: int
    topic: str
    key: str
    """The partition key."""
    size: int
    """Size of its payload in bytes."""
    id: str
    """Its id. In a log that was restored, another message may have the same offset."""


def walk(session: Session, start: int, length: int, *, newer: bool) -> list[LogPlace]:
    """Return the next messages of all topics, nearest first.

    ``newer``: True for those above ``start``, False for those below it.
    """
    rows = session.whole(
        f"SELECT * FROM (SELECT {COLUMNS} FROM {LOG}{session.dialect.force_index('PRIMARY')} WHERE {_next(newer)}) w"
        f"{last_row(5)}",
        (start, length),
    )
    return sorted((LogPlace(*row) for row in rows), reverse=not newer)


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
    rows = session.each(one, [(topic, key, start, limit) for key in keys], whole=1)
    return sorted((offset for (offset,) in rows), reverse=not newer)[:limit]


def at(session: Session, offsets: Sequence[int]) -> list[LogPlace]:
    """Return the places at some offsets, lowest first, without those that are not in the log."""
    select = "SELECT m.`offset`, m.topic, m.partition_key, m.size, m.id"
    rows = session.joined(select, "o", offsets, f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o")
    return sorted(LogPlace(*row) for row in rows)


def disk_per_message(session: Session, topic: str, keys: Sequence[str], after: int) -> float:
    """Return about how many bytes of disk a message of a topic takes, by the sizes of some in the first partitions."""
    places = at(session, in_partitions(session, topic, keys[:PARTITIONS], after, SAMPLED, newer=True))
    return (sum(place.size for place in places) / max(1, len(places)) + ROW) * PAGES


def disk_of_log(session: Session) -> int:
    """Return about how many bytes of disk the log takes, by its statistics; on SQLite, the size of the file."""
    statements = session.dialect.table_size
    rows = [row for sql in statements for row in session.rows(sql, (LOG,) if "%s" in sql else ())]
    return int(rows[0][0])


def _next(newer: bool) -> str:  # noqa: FBT001
    """Return the condition, order and limit. Parameters: the start and the limit."""
    return "`offset` > %s ORDER BY `offset` LIMIT %s" if newer else "`offset` < %s ORDER BY `offset` DESC LIMIT %s"
