"""The places of registered readers in the log. GC waits for them as for a consumer group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pyspark_mysqlqueue.databases import Database
from pyspark_mysqlqueue.log_schema import READERS


class Reader(NamedTuple):
    """A registered reader."""

    read_offset: int
    """It has read all messages up to this offset."""
    owner: str
    """Who keeps the place elsewhere, for example the id of the archive's Delta table."""
    marked_offset: int = 0
    mark: int = 0
    """The newest mark of the log up to there, and its offset; 0: none is stored."""


def find(database: Database, name: str) -> Reader | None:
    """Return a reader's place, or None if it is not registered."""
    rows = database.rows(f"SELECT read_offset, owner, marked_offset, mark FROM {READERS} WHERE name = %s", (name,))
    return Reader(*rows[0]) if rows else None


def move(database: Database, name: str, reader: Reader, topics: Sequence[str] | None = None) -> None:
    """Note how far a reader has read, and register it if it is new.

    Args:
        database: A connection.
        name: The reader's name.
        reader: Its place.
        topics: The topics that it reads (None: all). It gives up others.
    """
    with database.transaction():
        database.execute(f"DELETE FROM {READERS} WHERE name = %s", (name,))
        for topic in ("",) if topics is None else topics:
            database.execute(
                f"INSERT INTO {READERS} (name, topic, read_offset, owner, marked_offset, mark, moved_at) "
                f"VALUES (%s, %s, %s, %s, %s, %s, {database.now_ms})",
                (name, topic, *reader),
            )
