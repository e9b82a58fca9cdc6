"""The Spark data source ``mysqlqueue``: the log as a table and as a stream; the sink is in ``sink``.

Options are described in ``docs/reference/pipeline.md``. Spark hands them over in a
case-insensitive mapping, which stays as it is.
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

from django_mysqlqueue.pipeline import log_offsets, log_schema, reading
from django_mysqlqueue.pipeline.errors import PipelineError
from django_mysqlqueue.pipeline.options import SourceOptions
from django_mysqlqueue.pipeline.reading import Query, Span

if TYPE_CHECKING:
    import pyarrow as pa

MOST_VALUES = 1000
"""Longer IN lists are left to Spark."""
PUSHED_TEXTS = frozenset({"topic", "partition_key", "id"})


class SpanPartition(InputPartition):
    """A span of the log for one task, and above which offset nothing of it may have been collected (None: anywhere)."""

    def __init__(self, above: int, up_to: int, watch_above: int | None) -> None:
        super().__init__((above, up_to, watch_above))


class MysqlQueueSource(DataSource):
    """``spark.read.format("mysqlqueue")``, ``readStream``, ``write`` and ``writeStream``."""

    @classmethod
    def name(cls) -> str:
        return "mysqlqueue"

    def schema(self) -> str:
        return log_schema.ddl()

    def reader(self, schema: StructType) -> DataSourceReader:
        options = SourceOptions.of(self.options)
        kind = PushingLogReader if options.push_filters else LogReader
        return kind(options, checked_columns(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return LogStreamReader(SourceOptions.of(self.options), checked_columns(schema))

    def writer(self, schema: StructType, overwrite: bool) -> Any:  # noqa: FBT001
        from django_mysqlqueue.pipeline.sink import OutboxWriter, Sink

        return OutboxWriter(Sink.of(self.options, schema, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: FBT001, N802
        from django_mysqlqueue.pipeline.sink import OutboxStreamWriter, Sink

        return OutboxStreamWriter(Sink.of(self.options, schema, overwrite=overwrite))


def checked_columns(schema: StructType) -> tuple[str, ...]:
    """The names of a user's schema, which may be narrower than the log and in another order.

    Raises:
        PipelineError: a column that the log lacks, or has with another type.
    """
    for field in schema.fields:
        column = log_schema.BY_NAME.get(field.name)
        if column is None:
            raise PipelineError(f"column {field.name!r}: the log has {', '.join(log_schema.NAMES)}")
        if field.dataType.simpleString().upper() != column.spark_type:
            raise PipelineError(
                f"column {field.name!r} of type {field.dataType.simpleString().upper()}: it is {column.spark_type}"
            )
    if not schema.fields:
        raise PipelineError("the schema has no column")
    return tuple(field.name for field in schema.fields)


class LogReader(DataSourceReader):
    """The log between two offsets, as they are when the query is planned."""

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self.options = options
        self.query = Query(columns, options.wanted)
        self.first = 0
        """Filters leave nothing below it."""
        self.last: int | None = None

    def partitions(self) -> Sequence[InputPartition]:
        with self.options.place.connect() as database:
            watch: int | None
            above, up_to, watch = log_offsets.batch(database, self.options)
            span = Span(max(above, self.first - 1), up_to if self.last is None else min(up_to, self.last))
            watch = max(watch, span.above) if self.options.fail_on_data_loss else None
            reading.check_complete(database, replace(self.query, watch_above=watch), span.above)
        return planned(span, self.options, self.query, watch)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(self.options, self.query, partition)


def read(options: SourceOptions, query: Query, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    above, up_to, watch = partition.value
    return reading.read(options.place, replace(query, watch_above=watch), Span(above, up_to))


class PushingLogReader(LogReader):
    """One that takes filters. Spark refuses such a reader unless its setting for that is on, so it is a class apart."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
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
            return log_schema.BY_NAME[name].kind != "time"  # nothing else is ever NULL
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
            # The numbers between them are left to Spark.
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
    """One partition for each task. Spark makes a partition of its own of an empty list."""
    if len(span) == 0:
        return [SpanPartition(0, 0, None)]
    number = options.num_partitions
    if number is None:
        # One partition of the log is read along its own index: to cut it by offsets would help nobody.
        one = query.index == log_schema.BY_PARTITION
        number = 1 if one else min(options.MOST_PARTITIONS, -(-len(span) // options.ROWS_PER_PARTITION))
    return [SpanPartition(piece.above, piece.up_to, watch) for piece in span.split(number)]


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The log as a stream. An offset ``{"offset": n}`` says that all up to n have been read.

    A stream that began at ``earliest`` also remembers what GC had collected by
    then (``collected``), until it has passed that: leftovers below are read as
    they are found.
    """

    def __init__(self, options: SourceOptions, columns: tuple[str, ...]) -> None:
        self.options = options
        self.query = Query(columns, options.wanted)
        self.target: int | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        with self.options.place.connect() as database:
            return log_offsets.initial(database, self.options)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        rows = self.options.max_rows_per_batch
        return ReadMaxRows(rows) if rows else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        with self.options.place.connect() as database:
            self.target = log_offsets.highest(database)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
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
        with self.options.place.connect() as database:
            return {"offset": log_offsets.highest(database)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        span = Span(start["offset"], end["offset"])
        if len(span) == 0:
            return []
        watch = start.get("collected", 0) if self.options.fail_on_data_loss else None
        with self.options.place.connect() as database:
            reading.check_complete(database, replace(self.query, watch_above=watch), span.above)
        return planned(span, self.options, self.query, watch)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read(self.options, self.query, partition)

    def commit(self, end: dict[str, int]) -> None:
        """Nothing to do: the offsets are Spark's, and the log is not told who has read it."""
