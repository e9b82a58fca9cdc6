"""The Spark data source ``mysqlqueue``: the log as a table. The module ``sink`` has the sink.

What newer versions of PySpark have is in modules that are imported on use: ``pushdown`` and ``streams``.

``docs/reference/pipeline.md`` describes the options. Spark passes them as a case-insensitive mapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from pyspark_mysqlqueue import log_offsets, log_schema, reading
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.options import SourceOptions
from pyspark_mysqlqueue.reading import Query, Span

if TYPE_CHECKING:
    import pyarrow as pa


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
        kind = LogReader if not options.push_filters else _newer("pushdown", "4.1", "pushFilters").PushingLogReader
        found: DataSourceReader = kind(options, checked_columns(schema))
        return found

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return a reader of the log as a stream.

        Raises:
            PipelineError: An option or a column is invalid.
        """
        streams = _newer("streams", "4.2", "readStream")
        found: DataSourceStreamReader = streams.LogStreamReader(SourceOptions.of(self.options), checked_columns(schema))
        return found

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
