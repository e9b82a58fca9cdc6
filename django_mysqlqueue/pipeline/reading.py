"""Reads a range of the log.

A range at or below the highest offset is final: nothing appears in it any more,
and only GC and those who redrive or discard dead letters take something away.
So a range is read in pieces, each in a snapshot of its own, none of them held
open for long, and after a lost connection it goes on behind the last row.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django_mysqlqueue.backoff import Backoff
from django_mysqlqueue.pipeline import databases
from django_mysqlqueue.pipeline.databases import Database, Place
from django_mysqlqueue.pipeline.errors import DataLossError
from django_mysqlqueue.pipeline.log_schema import BY_PARTITION, COLLECTED, LOG

if TYPE_CHECKING:
    import pyarrow as pa

    from django_mysqlqueue.pipeline.batches import Selection

CHUNK = 50_000
"""Offsets that are read in one snapshot."""
FETCH_ROWS = 2_000
FETCH_BYTES = 16 * 2**20
"""Bounds of one batch; the bytes are those of payloads."""
FIRST_FETCH = 100
"""Rows that are fetched at a time, at most, where payloads are among them."""
TRIES = 6
"""Connections in a row that may be lost without a row read."""
RECONNECT = Backoff(initial=0.5, jitter=0.0)
"""The pause after each."""


@dataclass(frozen=True, slots=True)
class Span:
    """Offsets above one and up to another."""

    above: int
    up_to: int

    def __len__(self) -> int:
        return max(0, self.up_to - self.above)

    def split(self, pieces: int) -> list[Span]:
        """Into that many pieces of nearly equal length, none of them empty (an empty span has none)."""
        pieces = max(1, min(pieces, len(self)))
        marks = [self.above + len(self) * number // pieces for number in range(pieces + 1)]
        return [Span(low, high) for low, high in itertools.pairwise(marks) if high > low]


@dataclass(frozen=True, slots=True)
class Query:
    """What of a span is read. It travels to the executors.

    Attributes:
        columns: names, in the order of the result.
        wanted: for a text column, which of its values; all of these must hold.
        watch_above: offsets above this one must not have been collected by GC; None: whatever is there.
    """

    columns: tuple[str, ...]
    wanted: tuple[tuple[str, tuple[str, ...]], ...] = ()
    watch_above: int | None = None

    def condition(self) -> tuple[str, list[str]]:
        """The part of the WHERE behind the range, and its parameters."""
        sql = ""
        parameters: list[str] = []
        for name, values in self.wanted:
            sql += f" AND {name} IN ({', '.join(['%s'] * len(values))})" if values else " AND 1 = 0"
            parameters += values
        return sql, parameters

    @property
    def topics(self) -> tuple[str, ...] | None:
        """Which topics can be among the rows; None: all."""
        chosen: set[str] | None = None
        for name, values in self.wanted:
            if name == "topic":
                chosen = set(values) if chosen is None else chosen & set(values)
        return None if chosen is None else tuple(sorted(chosen))

    @property
    def index(self) -> str:
        """The index to read along: left to themselves the servers take a whole secondary one for any topic.

        One partition is read along its own, everything else along the primary key.
        """
        one = {name for name, values in self.wanted if len(values) == 1}
        return BY_PARTITION if {"topic", "partition_key"} <= one else "PRIMARY"


def read(place: Place, query: Query, span: Span) -> Iterator[pa.RecordBatch]:
    """The rows of a span in offset order.

    Raises:
        DataLossError: GC has removed rows that the query watches over.
    """
    from django_mysqlqueue.pipeline.batches import Selection

    selection = Selection(query.columns)
    above, failures = span.above, 0
    while above < span.up_to:
        try:
            with place.connect() as database:
                while above < span.up_to:
                    end = min(above + CHUNK, span.up_to)
                    with database.snapshot():
                        # Before the rows: after a lost connection nobody would look at where this chunk began.
                        check_complete(database, query, above)
                        for rows in rows_of(database, query, selection, Span(above, end)):
                            yield selection.batch(rows)
                            above, failures = rows[-1][0], 0
                    above, failures = end, 0
        except Exception as error:
            failures += 1
            if failures == TRIES or not databases.is_lost(error):
                raise
            time.sleep(RECONNECT.delay(failures))


def rows_of(database: Database, query: Query, selection: Selection, span: Span) -> Iterator[Sequence[tuple[Any, ...]]]:
    """A span's rows in pieces of about ``FETCH_ROWS`` or ``FETCH_BYTES``: the next rows may be much larger."""
    condition, parameters = query.condition()
    cursor = database.cursor(
        f"SELECT {selection.sql(database)} FROM {LOG}{database.force_index(query.index)} "
        f"WHERE `offset` > %s AND `offset` <= %s{condition} ORDER BY `offset`",
        (span.above, span.up_to, *parameters),
    )
    payload = selection.payload
    if payload is None:
        while rows := cursor.fetchmany(FETCH_ROWS):
            yield rows
        return
    piece: list[tuple[Any, ...]] = []
    size, step = 0, FIRST_FETCH
    while rows := cursor.fetchmany(step):
        found = sum(len(row[payload]) for row in rows)
        piece += rows
        size += found
        step = max(1, min(FIRST_FETCH, FETCH_BYTES * len(rows) // (found + 1)))
        if size >= FETCH_BYTES or len(piece) >= FETCH_ROWS:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def check_complete(database: Database, query: Query, above: int) -> None:
    """Raises ``DataLossError`` if GC has removed something above this offset that the query watches over."""
    if query.watch_above is None:
        return
    topics = query.topics
    among = "" if topics is None else f" AND topic IN ({', '.join(['%s'] * len(topics))})"
    if topics == ():
        return
    lost = database.rows(
        f"SELECT topic, collected_offset FROM {COLLECTED} WHERE collected_offset > %s{among} "
        "ORDER BY collected_offset DESC LIMIT 1",
        (max(above, query.watch_above), *(topics or ())),
    )
    if lost:
        topic, offset = lost[0]
        raise DataLossError(
            f"topic {topic!r}: GC has removed messages up to offset {offset}, and offsets above {above} were still to "
            "be read; read them from the archive, or set failOnDataLoss to false to go on with what is left"
        )
