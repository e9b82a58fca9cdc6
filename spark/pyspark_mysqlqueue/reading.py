"""Read a range of the log.

A range at or below the highest offset is final: no message appears in it later, and only GC and operators who redrive
or discard dead letters remove messages. So a range is read in chunks, each in a short snapshot of its own. After a lost
connection, reading resumes after the last row.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark_mysqlqueue import databases
from pyspark_mysqlqueue.databases import Database, Place
from pyspark_mysqlqueue.errors import DataLossError
from pyspark_mysqlqueue.log_schema import BY_PARTITION, COLLECTED, LOG
from pyspark_mysqlqueue.shared.backoff import Backoff

if TYPE_CHECKING:
    import pyarrow as pa

    from pyspark_mysqlqueue.batches import Selection

CHUNK = 50_000
"""Maximum number of offsets that are read in one snapshot."""
FETCH_ROWS = 2_000
FETCH_BYTES = 16 * 2**20
"""Limits of one batch. Only payloads count as bytes."""
FIRST_FETCH = 100
"""Maximum number of rows that are fetched at a time if payloads are selected."""
NEVER = 2**63 - 1
"""A time after those of all messages, in epoch milliseconds."""
TRIES = 6
"""Number of consecutive lost connections, without a row in between, after which reading fails."""
RECONNECT = Backoff(initial=0.5, jitter=0.0)
"""The pause before each new connection."""


@dataclass(frozen=True, slots=True)
class Span:
    """The offsets above ``above``, up to and including ``up_to``."""

    above: int
    up_to: int

    def __len__(self) -> int:
        return max(0, self.up_to - self.above)

    def split(self, pieces: int) -> list[Span]:
        """Split the span into at most ``pieces`` spans of nearly equal length.

        None of them is empty, so an empty span has none.
        """
        pieces = max(1, min(pieces, len(self)))
        marks = [self.above + len(self) * number // pieces for number in range(pieces + 1)]
        return [Span(low, high) for low, high in itertools.pairwise(marks) if high > low]


@dataclass(frozen=True, slots=True)
class Query:
    """The columns and rows to read from a span. Spark pickles it for executors.

    Attributes:
        columns: The names of the columns, in the order of the result.
        wanted: Conditions that must all hold: a text column and its allowed values.
        watch_above: GC must not have removed messages above this offset (None: read the messages that are left).
        floors: Topics of which only later offsets are read: the topic, the offset above which it is read, and the one
            above which GC must not have removed anything.
        ceilings: Topics of which only earlier offsets are read: the topic and the last offset.
        since: Only messages that entered the log at this time or later, in epoch milliseconds.
        before: Only messages that entered the log before this time.
        is_kafka: Whether the columns are those of ``kafka_schema``, not the log's.
    """

    columns: tuple[str, ...]
    wanted: tuple[tuple[str, tuple[str, ...]], ...] = ()
    watch_above: int | None = None
    floors: tuple[tuple[str, int, int], ...] = ()
    ceilings: tuple[tuple[str, int], ...] = ()
    since: int = 0
    before: int = NEVER
    is_kafka: bool = False

    def selection(self) -> Selection:
        """Return the selection of the columns."""
        from pyspark_mysqlqueue.batches import Selection
        from pyspark_mysqlqueue.kafka_columns import KafkaSelection

        return (KafkaSelection if self.is_kafka else Selection)(self.columns)

    def also(self, wanted: tuple[tuple[str, tuple[str, ...]], ...]) -> Query:
        """Return the query with further conditions, in the form of ``wanted``."""
        return replace(self, wanted=(*self.wanted, *wanted))

    def condition(self) -> tuple[str, list[Any]]:
        """Return the conditions to append to the WHERE clause, and their parameters."""
        sql = ""
        parameters: list[Any] = []
        for name, values in self.wanted:
            sql += f" AND {name} IN ({', '.join(['%s'] * len(values))})" if values else " AND 1 = 0"
            parameters += values
        for topic, above, _ in self.floors:
            sql += " AND (topic <> %s OR `offset` > %s)"
            parameters += (topic, above)
        for topic, up_to in self.ceilings:
            sql += " AND (topic <> %s OR `offset` <= %s)"
            parameters += (topic, up_to)
        if self.since > 0:
            sql += " AND published_at >= %s"
            parameters.append(self.since)
        if self.before < NEVER:
            sql += " AND published_at < %s"
            parameters.append(self.before)
        return sql, parameters

    @property
    def topics(self) -> tuple[str, ...] | None:
        """The topics that the rows can have (None: any)."""
        chosen: set[str] | None = None
        for name, values in self.wanted:
            if name == "topic":
                chosen = set(values) if chosen is None else chosen & set(values)
        return None if chosen is None else tuple(sorted(chosen))

    @property
    def index(self) -> str:
        """The index to force. Without a hint, the servers scan a whole secondary index for a condition on the topic.

        A single partition is read along the index of partitions, everything else along the primary key.
        """
        one = {name for name, values in self.wanted if len(values) == 1}
        return BY_PARTITION if {"topic", "partition_key"} <= one else "PRIMARY"


def read(place: Place, query: Query, span: Span) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a span in offset order. Lost connections are replaced.

    Raises:
        DataLossError: GC has removed messages above ``query.watch_above``.
    """
    selection = query.selection()
    above, failures = span.above, 0
    while above < span.up_to:
        try:
            with place.connect() as database:
                while above < span.up_to:
                    end = min(above + CHUNK, span.up_to)
                    with database.snapshot():
                        # Check before reading: after a lost connection, reading resumes later than this chunk's start.
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
    """Yield the rows of a span in pieces of about ``FETCH_ROWS`` rows or ``FETCH_BYTES`` bytes.

    The number of rows to fetch is adjusted, because later rows may be much larger.
    """
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
    """Check that GC has removed no message that the query has yet to read.

    Args:
        database: A connection.
        query: The query.
        above: The query has read up to this offset.

    Raises:
        DataLossError: GC has removed messages above this offset and above ``query.watch_above``.
    """
    if query.watch_above is None:
        return
    topics = query.topics
    among = "" if topics is None else f" AND topic IN ({', '.join(['%s'] * len(topics))})"
    if topics == ():
        return
    floors = " AND (topic <> %s OR collected_offset > %s)" * len(query.floors)
    lost = database.rows(
        f"SELECT topic, collected_offset FROM {COLLECTED} WHERE collected_offset > %s{among}{floors} "
        "ORDER BY collected_offset DESC LIMIT 1",
        (
            max(above, query.watch_above),
            *(topics or ()),
            *itertools.chain.from_iterable((topic, watch) for topic, _, watch in query.floors),
        ),
    )
    if lost:
        topic, offset = lost[0]
        raise DataLossError(
            f"topic {topic!r}: GC has removed messages up to offset {offset}, but offsets above {above} had not been "
            "read; read them from the archive, or set failOnDataLoss to false to skip them"
        )
