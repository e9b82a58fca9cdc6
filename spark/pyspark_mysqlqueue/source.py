"""The Spark data source ``mysqlqueue``: the log as a table. The module ``sink`` has the sink.

What newer versions of PySpark have is in modules that are imported on use: ``pushdown`` and ``streams``.

``docs/reference/pipeline.md`` describes the options. Spark passes them as a case-insensitive mapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from pyspark_mysqlqueue import kafka_schema, log_offsets, log_schema, reading
from pyspark_mysqlqueue.databases import Place
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.options import SourceOptions, kafka_headers
from pyspark_mysqlqueue.reading import Query, Span

if TYPE_CHECKING:
    import pyarrow as pa


class SpanPartition(InputPartition):
    """A span of the log for one task, and what the task reads of it."""

    def __init__(self, span: Span, query: Query) -> None:
        super().__init__((span, query))


class MysqlQueueSource(DataSource):
    """The data source of ``spark.read.format("mysqlqueue")``, ``readStream``, ``write`` and ``writeStream``."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "mysqlqueue"

    def schema(self) -> str:
        """Return the columns of the log, or those of Spark's Kafka source, as a Spark schema string.

        Raises:
            PipelineError: An option is invalid.
        """
        with_headers = kafka_headers(self.options)
        return log_schema.ddl() if with_headers is None else kafka_schema.ddl(with_headers=with_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of the log as a table.

        Raises:
            PipelineError: An option or a column is invalid.
        """
        options = SourceOptions.of(self.options)
        kind = LogReader if not options.push_filters else _newer("pushdown", "4.1", "pushFilters").PushingLogReader
        found: DataSourceReader = kind(options, self._query(schema))
        return found

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return a reader of the log as a stream.

        Raises:
            PipelineError: An option or a column is invalid.
        """
        streams = _newer("streams", "4.2", "readStream")
        options = SourceOptions.of(self.options, is_stream=True)
        found: DataSourceStreamReader = streams.LogStreamReader(options, self._query(schema))
        return found

    def _query(self, schema: StructType) -> Query:
        with_headers = kafka_headers(self.options)
        if with_headers is None:
            return Query(checked_columns(schema, log_schema.TYPES, "the log"))
        types = {name: kafka_schema.TYPES[name] for name in kafka_schema.names(with_headers=with_headers)}
        return Query(checked_columns(schema, types, "columns='kafka'"), is_kafka=True)

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
        from pyspark_mysqlqueue.sink import Sink

        streams = _newer("streams", "4.2", "writeStream")
        return streams.OutboxStreamWriter(Sink.of(self.options, schema, overwrite=overwrite))


def _newer(module: str, version: str, what: str) -> Any:
    """Import a module that a newer PySpark is needed for.

    Raises:
        PipelineError: PySpark is older.
    """
    try:
        return import_module(f"pyspark_mysqlqueue.{module}")
    except ImportError as error:
        raise PipelineError(f"{what} needs PySpark {version} or later: {error}") from error


def checked_columns(schema: StructType, types: Mapping[str, str], what: str) -> tuple[str, ...]:
    """Return the names of the columns of a schema. It may leave out columns and change their order.

    Args:
        schema: The schema.
        types: The types of the columns, as ``simpleString()`` writes them.
        what: What has these columns, for the error.

    Raises:
        PipelineError: A column does not exist or has another type, or the schema is empty.
    """
    for field in schema.fields:
        if field.name not in types:
            raise PipelineError(f"unknown column {field.name!r}: {what} has {', '.join(types)}")
        if field.dataType.simpleString() != types[field.name]:
            raise PipelineError(
                f"column {field.name!r} of type {field.dataType.simpleString().upper()}: must be "
                f"{types[field.name].upper()}"
            )
    if not schema.fields:
        raise PipelineError("the schema has no columns")
    return tuple(field.name for field in schema.fields)


class LogReader(DataSourceReader):
    """Reads the log between two offsets, which are determined when Spark plans the query."""

    def __init__(self, options: SourceOptions, query: Query) -> None:
        self.options = options
        self.query = query
        self.first = 0
        """The lowest offset that the filters allow."""
        self.last: int | None = None
        """The highest offset that the filters allow (None: any)."""
        self.since, self.before = 0, reading.NEVER
        """The times that the filters allow: the first one, and the one after the last one, in epoch milliseconds."""

    def partitions(self) -> Sequence[InputPartition]:
        """Return the spans to read.

        Raises:
            DataLossError: GC has removed messages of the range.
        """
        with self.options.place.connect() as database:
            log_offsets.warn_of_unknown_topics(database, self.options.topics)
            options = log_offsets.resolved(database, self.options)
            found = log_offsets.batch(database, options)
            first, last = log_offsets.between(database, self.since, self.before)
            up_to = min(found.up_to, last) if self.last is None else min(found.up_to, last, self.last)
            span = Span(max(found.above, first - 1, self.first - 1), up_to)
            query = replace(
                self.query.also(options.wanted),
                watch_above=max(found.watch, span.above) if options.fail_on_data_loss else None,
                floors=found.floors,
                ceilings=found.ceilings,
                since=self.since,
                before=self.before,
            )
            reading.check_complete(database, query, span.above)
        return planned(span, options, query)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a span."""
        return read(self.options.place, partition)


def read(place: Place, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a span.

    Raises:
        DataLossError: GC has removed messages of the span.
    """
    span, query = partition.value
    return reading.read(place, query, span)


def planned(span: Span, options: SourceOptions, query: Query) -> list[InputPartition]:
    """Return one partition per task.

    Args:
        span: The span to read.
        options: The options, with the minimum number of partitions.
        query: The query.

    Returns:
        At least one partition: for an empty list, Spark would create a partition of its own.
    """
    if len(span) == 0:
        return [SpanPartition(Span(0, 0), query)]
    # A single partition of the log is read along the index of partitions, where splitting by offsets does not help.
    is_one = query.index == log_schema.BY_PARTITION
    number = 1 if is_one else min(options.MOST_PARTITIONS, -(-len(span) // options.OFFSETS_PER_PARTITION))
    return [SpanPartition(piece, query) for piece in span.split(max(number, options.min_partitions))]
