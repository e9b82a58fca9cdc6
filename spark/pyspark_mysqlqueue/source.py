"""The Spark data source ``mysqlqueue``: the log as a table and as a stream. The module ``sink`` has the sink.

``docs/reference/pipeline.md`` describes the options. Spark passes them as a case-insensitive mapping.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from pyspark_mysqlqueue import log_offsets, log_schema, reading
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.options import SourceOptions
from pyspark_mysqlqueue.reading import Query, Span

if TYPE_CHECKING:
    import pyarrow as pa

MOST_VALUES = 1000
"""Maximum number of values in an IN list that is pushed down. Spark evaluates longer ones."""
PUSHED_TEXTS = frozenset({"topic", "partition_key", "id"})
"""Text columns whose filters are pushed down."""


class SpanPartition(InputPartition):
    """A span of the log for one task, and the offset above which GC must not have removed anything (None: no check)."""

    def __init__(self, above: int, up_to: int, watch_above: int | None) -> None:
        super().__init__((above, up_to, watch_above))


class MysqlQueueSource(DataSource):
    """The data source of ``spark.read.format("mysqlqueue")``, ``readStream``, ``write`` and ``writeStream``."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "mysqlqueue"

    def schema(self) -> str:
        """Return the log's columns as a Spark schema string."""
        return log_schema.ddl()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of the log as a table.

        Raises:
            PipelineError: An option or a column is invalid.
        """
        options = SourceOptions.of(self.options)
        kind = PushingLogReader if options.push_filters else LogReader
        return kind(options, checked_columns(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return a reader of the log as a stream.

        Raises:
            PipelineError: An option or a column is invalid.
        """
        return LogStreamReader(SourceOptions.of(self.options), checked_columns(schema))

    def writer(self, schema: StructType, overwrite: bool) -> Any:  # noqa: FBT001
        """Return a writer of messages.

        Raises:
            PipelineError: An option, the mode or a column is invalid.
        """
        from pyspark_mysqlqueue.sink import OutboxWriter, Sink

        return OutboxWriter(Sink.of(self.options, schema, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: FBT001, N802
        """Return a writer of messages from a stream.

        Raises:
            PipelineError: An option, the mode or a column is invalid.
        """
        from pyspark_mysqlqueue.sink import OutboxStreamWriter, Sink

        return OutboxStreamWriter(Sink.of(self.options, schema, overwrite=overwrite))


def checked_columns(schema: StructType) -> tuple[str, ...]:
    """Return the names of the columns of a schema. It may leave out columns of the log and change their order.

    Raises:
        PipelineError: The log does not have a column, or has it with another type, or the schema is empty.
    """
    for field in schema.fields:
        column = log_schema.BY_NAME.get(field.name)
        if column is None:
            raise PipelineError(f"unknown column {field.name!r}: the log has {', '.join(log_schema.NAMES)}")
        if field.dataType.simpleString().upper() != column.spark_type:
            raise PipelineError(
                f"column {field.name!r} of type {field.dataType.simpleString().upper()}: must be {column.spark_type}"
            )
    if not schema.fields:
        raise PipelineError("the schema has no columns")
    return tuple(field.name for field in schema.fields)


class LogReader(DataSourceReader):
    """Reads the log between two offsets, which are determined when Spark plans the query."""

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self.options = options
        self.query = Query(columns, options.wanted)
        self.first = 0
        """The lowest offset that the filters allow."""
        self.last: int | None = None
        """The highest offset that the filters allow (None: any)."""

    def partitions(self) -> Sequence[InputPartition]:
        """Return the spans to read.

        Raises:
            DataLossError: GC has removed messages of the range.
        """
        with self.options.place.connect() as database:
            watch: int | None
            above, up_to, watch = log_offsets.batch(database, self.options)
            span = Span(max(above, self.first - 1), up_to if self.last is None else min(up_to, self.last))
            watch = max(watch, span.above) if self.options.fail_on_data_loss else None
            reading.check_complete(database, replace(self.query, watch_above=watch), span.above)
        return planned(span, self.options, self.query, watch)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a span."""
        return read(self.options, self.query, partition)


def read(options: SourceOptions, query: Query, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a span.

    Raises:
        DataLossError: GC has removed messages of the span.
    """
    above, up_to, watch = partition.value
    return reading.read(options.place, replace(query, watch_above=watch), Span(above, up_to))


class PushingLogReader(LogReader):
    """A reader that accepts filters. Spark refuses such a class unless its setting for filter pushdown is on."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        """Add filters to the query. Yield those that Spark must evaluate."""
        for one in filters:
            if not self._takes(one):
                yield one

    def _takes(self, one: Filter) -> bool:
        attribute: tuple[str, ...] = getattr(one, "attribute", ())
        value = getattr(one, "value", None)
        if len(attribute) != 1:
            return False
        (name,) = attribute
        if isinstance(one, IsNotNull):
            # A time that no timestamp can represent is NULL, too.
            return log_schema.BY_NAME[name].kind != "time" and not log_schema.BY_NAME[name].nullable
        if name == "offset":
            return self._takes_offset(one, value)
        if name not in PUSHED_TEXTS:
            return False
        if not isinstance(one, (EqualTo, In)):
            return False
        values = tuple(one.value) if isinstance(one, In) else (value,)
        if len(values) > MOST_VALUES or not all(isinstance(text, str) for text in values):
            return False
        self.query = replace(self.query, wanted=(*self.query.wanted, (name, values)))
        return True

    def _takes_offset(self, one: Filter, value: Any) -> bool:
        if isinstance(one, In):
            if not value or not all(type(number) is int for number in value):
                return False
            # Only the range is pushed down. Spark evaluates the list.
            self._narrow(min(value), max(value))
            return False
        if type(value) is not int:
            return False
        if isinstance(one, EqualTo):
            self._narrow(value, value)
        elif isinstance(one, GreaterThan):
            self._narrow(value + 1, None)
        elif isinstance(one, GreaterThanOrEqual):
            self._narrow(value, None)
        elif isinstance(one, LessThan):
            self._narrow(None, value - 1)
        elif isinstance(one, LessThanOrEqual):
            self._narrow(None, value)
        else:
            return False
        return True

    def _narrow(self, first: int | None, last: int | None) -> None:
        if first is not None:
            self.first = max(self.first, first)
        if last is not None:
            self.last = last if self.last is None else min(self.last, last)


def planned(span: Span, options: SourceOptions, query: Query, watch: int | None) -> list[InputPartition]:
    """Return one partition per task.

    Args:
        span: The span to read.
        options: The options, of which ``numPartitions`` is the number of partitions.
        query: The query.
        watch: The offset above which GC must not have removed anything (None: no check).

    Returns:
        At least one partition: for an empty list, Spark would create a partition of its own.
    """
    if len(span) == 0:
        return [SpanPartition(0, 0, None)]
    number = options.num_partitions
    if number is None:
        # A single partition of the log is read along the index of partitions, where splitting by offsets does not help.
        one = query.index == log_schema.BY_PARTITION
        number = 1 if one else min(options.MOST_PARTITIONS, -(-len(span) // options.ROWS_PER_PARTITION))
    return [SpanPartition(piece.above, piece.up_to, watch) for piece in span.split(number)]


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the log as a stream. The offset ``{"offset": n}`` means that all messages up to n have been read.

    The offset of a stream that began at ``earliest`` also contains ``collected``: the highest offset that GC had
    removed by then, until the stream has passed it. Messages that are left below it are read without a check.
    """

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self.options = options
        self.query = Query(columns, options.wanted)
        self.target: int | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        """Return the offset at which a new stream begins.

        Raises:
            DataLossError: GC has removed messages that were published at or after ``startOffset``.
            PipelineError: The stream has an ``endOffset``, or its start is beyond the end of the log.
        """
        with self.options.place.connect() as database:
            return log_offsets.initial(database, self.options)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of a micro-batch: ``maxRowsPerBatch``, else all available messages."""
        rows = self.options.max_rows_per_batch
        return ReadMaxRows(rows) if rows else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Set the end of the stream to the current end of the log."""
        with self.options.place.connect() as database:
            self.target = log_offsets.highest(database)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """Return the end of the next micro-batch.

        Raises:
            PipelineError: ``start`` is beyond the end of the log.
        """
        above = start["offset"]
        with self.options.place.connect() as database:
            last = log_offsets.highest(database)
            if last < above:
                raise log_offsets.log_is_behind(above, last)
            if self.target is not None:
                last = min(last, self.target)
            if isinstance(limit, ReadMaxRows):
                last = log_offsets.after_rows(database, above, limit.max_rows, last)
        return dict(start) if last <= above else log_offsets.moved(start, last)

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802
        """Return the end of the log."""
        with self.options.place.connect() as database:
            return {"offset": log_offsets.highest(database)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return the spans of a micro-batch.

        Raises:
            DataLossError: GC has removed messages of the micro-batch.
        """
        span = Span(start["offset"], end["offset"])
        if len(span) == 0:
            return []
        watch = start.get("collected", 0) if self.options.fail_on_data_loss else None
        with self.options.place.connect() as database:
            reading.check_complete(database, replace(self.query, watch_above=watch), span.above)
        return planned(span, self.options, self.query, watch)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a span."""
        return read(self.options, self.query, partition)

    def commit(self, end: dict[str, int]) -> None:
        """Do nothing: Spark stores the offsets, and the queue does not keep track of streams."""
