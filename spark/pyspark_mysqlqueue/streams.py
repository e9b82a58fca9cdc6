"""The log as a stream, and streams into the queue. Needs PySpark 4.2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from pyspark_mysqlqueue import log_marks, log_offsets, readers, reading
from pyspark_mysqlqueue.databases import Database
from pyspark_mysqlqueue.log_marks import Position
from pyspark_mysqlqueue.options import SourceOptions
from pyspark_mysqlqueue.readers import Reader
from pyspark_mysqlqueue.reading import Query, Span
from pyspark_mysqlqueue.sink import Sink, Written
from pyspark_mysqlqueue.source import planned, read

if TYPE_CHECKING:
    import pyarrow as pa


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the log as a stream. An offset is a ``Position``: all messages up to there have been read.

    The offset of a stream that began at ``earliest`` also contains ``collected``: the highest offset that GC had
    removed by then, until the stream has passed it. Messages that are left below it are read without a check. That of a
    stream with a start for each topic contains ``starts``: the floors of the topics that the stream has not passed.
    """

    def __init__(self, options: SourceOptions, query: Query) -> None:
        self.options = options
        self.query = query
        self.target: int | None = None
        self.registered: Position | None = None
        """The position that the registered reader has stored."""

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offset at which a new stream begins.

        Raises:
            DataLossError: GC has removed messages that were published at or after ``startingTimestamp``.
            PipelineError: The start is beyond the end of the log.
        """
        with self.options.place.connect() as database:
            log_offsets.warn_of_unknown_topics(database, self.options.topics)
            begin = log_offsets.initial(database, log_offsets.resolved(database, self.options))
            offset = log_marks.stored(database, begin)
            self._register(database, Position.of(offset))
        return offset

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of a micro-batch: ``maxOffsetsPerTrigger``, else all available messages."""
        rows = self.options.max_offsets_per_trigger
        return ReadMaxRows(rows) if rows else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Set the end of the stream to the current end of the log."""
        with self.options.place.connect() as database:
            self.target = log_offsets.highest(database)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next micro-batch.

        Raises:
            DataLossError: ``start`` is not an offset of this log.
        """
        with self.options.place.connect() as database:
            last = log_offsets.highest(database)
            stored = Position.of(start)
            position = self._checked(database, stored)
            # Spark has committed the micro-batch that ends here. It calls ``commit`` only after the next one.
            self._register(database, position)
            above = position.offset
            if self.target is not None:
                last = min(last, self.target)
            if isinstance(limit, ReadMaxRows):
                last = log_offsets.after_rows(database, above, limit.max_rows, last)
            if position != stored:
                return log_marks.stored(database, {"offset": max(last, above)})
            return dict(start) if last <= above else log_marks.stored(database, log_offsets.moved(start, last))

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the end of the log."""
        with self.options.place.connect() as database:
            return {"offset": log_offsets.highest(database)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the spans of a micro-batch.

        Raises:
            DataLossError: GC has removed messages of the micro-batch, or it is not one of this log.
        """
        span = Span(start["offset"], end["offset"])
        if len(span) == 0:
            return []
        watch = start.get("collected", 0) if self.options.fail_on_data_loss else None
        query = replace(self.query, watch_above=watch, floors=log_offsets.floors_of(start))
        with self.options.place.connect() as database:
            # Spark runs a micro-batch again that was not committed, perhaps on another database.
            self._checked(database, Position.of(end))
            query = query.also(log_offsets.resolved(database, self.options).wanted)
            reading.check_complete(database, query, span.above)
        return planned(span, self.options, query)

    def _checked(self, database: Database, position: Position) -> Position:
        return log_marks.checked(database, position, fail_on_data_loss=self.options.fail_on_data_loss)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a span."""
        return read(self.options.place, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: ``latestOffset`` stores the position of a registered reader."""

    def _register(self, database: Database, position: Position) -> None:
        if self.options.reader and position != self.registered:
            reader = Reader(position.offset, "", position.marked_offset, position.mark)
            readers.move(database, self.options.reader, reader, self.options.topics)
            self.registered = position


class OutboxStreamWriter(DataSourceStreamArrowWriter):
    """The writer of ``df.writeStream.format("mysqlqueue")``. A repeated micro-batch publishes no message twice."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of a task to the outbox, and commit them."""
        return Written(self.sink.write(iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: each task has committed its own rows."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: rows that tasks have committed stay. Spark runs the micro-batch again."""
