"""The places of registered readers in the log. GC waits for them as for a consumer group."""

from __future__ import annotations

from typing import NamedTuple

from pyspark_mysqlqueue.databases import Database
from pyspark_mysqlqueue.log_schema import READERS


class Reader(NamedTuple):
    """A registered reader."""

    read_offset: int
    """It has read all messages up to this offset."""
    owner: str
    """Who keeps the place elsewhere, for example the id of the archive's Delta table."""


def find(database: Database, name: str) -> Reader | None:
    """Return a reader's place, or None if it is not registered."""
    rows = database.rows(f"SELECT read_offset, owner FROM {READERS} WHERE name = %s", (name,))
    return Reader(int(rows[0][0]), str(rows[0][1])) if rows else None


def move(database: Database, name: str, reader: Reader) -> None:
    """Note how far a reader has read, and register it if it is new."""
    with database.transaction():
        database.execute(f"DELETE FROM {READERS} WHERE name = %s", (name,))
        database.execute(
            f"INSERT INTO {READERS} (name, read_offset, owner, moved_at) VALUES (%s, %s, %s, {database.now_ms})",
            (name, reader.read_offset, reader.owner),
        )
