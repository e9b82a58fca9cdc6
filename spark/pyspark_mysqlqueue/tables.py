"""The log, recorded deliveries, rollups and groups as tables of DuckDB. Needs neither Spark nor Java."""

from __future__ import annotations

import datetime
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_mysqlqueue import log_offsets
from pyspark_mysqlqueue.archive.root import Root
from pyspark_mysqlqueue.archive.table import Table, unarchived
from pyspark_mysqlqueue.batches import SPARK_TIME, schema
from pyspark_mysqlqueue.databases import Database, Place
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.log_offsets import milliseconds
from pyspark_mysqlqueue.log_schema import BY_NAME, NAMES, Log
from pyspark_mysqlqueue.reading import NEVER, Query, Span, read
from pyspark_mysqlqueue.shared.sizes import LATENCY_COLUMNS

if TYPE_CHECKING:
    import duckdb

CHUNK = 20_000
"""Number of ids of recorded deliveries that one query reads."""
TEXTS = ("consumer_group", "topic", "partition_key", "mode", "outcome", "settled_by", "error")
"""The columns that are texts. Those that end in ``_at`` are times, the others are numbers."""


class Source(NamedTuple):
    """A table of the database, and what is read of it."""

    table: str
    columns: tuple[str, ...]
    time: str
    """The column that ``since`` and ``until`` apply to (empty: they do not)."""


SOURCES = {
    "deliveries": Source(
        "queue_delivery_events",
        ("id", "consumer_group", "topic", "partition_key", "message_offset", "attempt", "outcome", "delivered_at",
         "settled_at", "handled_ms", "settled_by", "error"),
        "settled_at",
    ),
    "rollups": Source(
        "queue_rollups",
        ("grain", "bucket_at", "consumer_group", "topic", "acked", "failed", "dead_lettered", "filtered", "expired",
         "superseded", *LATENCY_COLUMNS, "backlog", "oldest_ms"),
        "bucket_at",
    ),
    "groups": Source("queue_consumer_groups", ("consumer_group", "topic", "mode", "start_offset", "paused"), ""),
}  # fmt: skip


def connect(
    place: Place,
    root: Root | None = None,
    *,
    topics: Sequence[str] | None = None,
    since: datetime.datetime | None = None,
    until: datetime.datetime | None = None,
    columns: Sequence[str] = NAMES,
    tables: Sequence[str] = tuple(SOURCES),
) -> duckdb.DuckDBPyConnection:
    """Return a connection of DuckDB with the queue's tables. Times are in UTC.

    The table ``log`` has the archive, followed by the messages of the live log that are not archived yet. Queries read
    the archive from its files; the rest is copied when the function is called, and DuckDB moves to disk what does not
    fit in memory. Select ``columns``, since payloads are most of it.

    Args:
        place: The queue's database.
        root: The archive (None: the live log only).
        topics: Only these topics (None: all).
        since: Only messages that entered the log, deliveries that ended, and periods of rollups that began at or after
            this time.
        until: Only those before this time.
        columns: One or more columns of the log.
        tables: The other tables: ``deliveries``, ``rollups`` and ``groups``.

    Raises:
        DataLossError: GC has removed messages that the archive does not contain.
        PipelineError: A time has no time zone, a column or table does not exist, or DuckDB is not installed.
    """
    for name, moment in (("since", since), ("until", until)):
        if moment is not None and moment.tzinfo is None:
            raise PipelineError(f"{name} {moment.isoformat()}: must have a time zone")
    for kind, given, known in (("columns", columns, NAMES), ("tables", tables, SOURCES)):
        if unknown := [name for name in given if name not in known]:
            raise PipelineError(f"{kind} {unknown!r}: must be among {', '.join(known)}")
    try:
        import duckdb
    except ImportError as error:
        raise PipelineError(f"{error}: run pip install 'pyspark-mysqlqueue[report]'") from error
    spill = Path(tempfile.gettempdir()) / f"mysqlqueue-{uuid.uuid4().hex}"
    duck = duckdb.connect(config={"temp_directory": str(spill)})
    duck.execute("SET TimeZone = 'UTC'")
    least, most = (default if at is None else milliseconds(at) for at, default in ((since, 0), (until, NEVER)))
    parts, above = ["live"], 0
    with place.connect() as database:
        last = log_offsets.highest(database)
        if root is None:
            watch = log_offsets.collected(database, topics)
        else:
            table, log = Table.find(root), log_offsets.identity(database)
            watch = above = unarchived(database, table, log, topics)
            if table is not None:
                duck.register("archive", _archived(table, log, above, topics, since, until))
                parts.insert(0, "archive")
        first, end = log_offsets.between(database, least, most)
        for name in tables:
            _copy(duck, name, _schema(SOURCES[name]), _rows(database, SOURCES[name], topics, least, most))
    query = Query(tuple(columns), _wanted(topics), watch_above=watch, since=least, before=most)
    span = Span(max(above, first - 1), min(last, end))
    _copy(duck, "live", schema(tuple(BY_NAME[name] for name in columns)), read(place, query, span))
    names = ", ".join(f'"{name}"' for name in columns)
    duck.execute(f"CREATE TEMP VIEW log AS {' UNION ALL '.join(f'SELECT {names} FROM {part}' for part in parts)}")
    return duck


def _archived(
    table: Table,
    log: Log,
    up_to: int,
    topics: Sequence[str] | None,
    since: datetime.datetime | None,
    until: datetime.datetime | None,
) -> Any:
    field = pc.field
    wanted = (field("log") == log.id) & (field("epoch") == log.epoch) & (field("offset") <= up_to)
    if topics is not None:
        wanted &= field("topic").isin(pa.array(topics, pa.string()))
    if since is not None:
        wanted &= field("published_at") >= pa.scalar(since, SPARK_TIME)
    if until is not None:
        wanted &= field("published_at") < pa.scalar(until, SPARK_TIME)
    return table.delta.to_pyarrow_dataset().filter(wanted)


def _copy(duck: duckdb.DuckDBPyConnection, name: str, columns: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    duck.register("incoming", pa.RecordBatchReader.from_batches(columns, batches))
    duck.execute(f"CREATE TABLE {name} AS SELECT * FROM incoming")
    duck.unregister("incoming")


def _schema(source: Source) -> pa.Schema:
    def kind(name: str) -> pa.DataType:
        return pa.string() if name in TEXTS else SPARK_TIME if name.endswith("_at") else pa.int64()

    return pa.schema([(name, kind(name)) for name in source.columns])


def _rows(
    database: Database, source: Source, topics: Sequence[str] | None, since: int, before: int
) -> Iterator[pa.RecordBatch]:
    condition, parameters = Query((), wanted=_wanted(topics)).condition()
    if source.time:
        condition += f" AND {source.time} >= %s AND {source.time} < %s"
        parameters += (since, before)
    select = f"SELECT {', '.join(source.columns)} FROM {source.table}"
    if "id" not in source.columns:
        yield _batch(_schema(source), database.rows(f"{select} WHERE 1 = 1{condition}", parameters))
        return
    select += f"{database.force_index('PRIMARY')} WHERE id >= %s AND id < %s{condition} ORDER BY id"
    first, last = database.row(f"SELECT COALESCE(MIN(id), 1), COALESCE(MAX(id), 0) FROM {source.table}")
    for low in range(first, last + 1, CHUNK):
        yield _batch(_schema(source), database.rows(select, (low, low + CHUNK, *parameters)))


def _batch(columns: pa.Schema, rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    arrays = []
    for field, found in zip(columns, zip(*rows, strict=True) if rows else [()] * len(columns), strict=True):
        values = [ms * 1000 if ms else None for ms in found] if field.type == SPARK_TIME else found
        arrays.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=columns)


def _wanted(topics: Sequence[str] | None) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return () if topics is None else (("topic", tuple(topics)),)
