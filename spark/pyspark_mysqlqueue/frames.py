"""The log and the archive as DataFrames."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark_mysqlqueue import log_offsets
from pyspark_mysqlqueue.archive.table import Table, unarchived
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.log_schema import BY_NAME, ddl
from pyspark_mysqlqueue.options import EVERY_TOPIC
from pyspark_mysqlqueue.session import PUSHDOWN
from pyspark_mysqlqueue.shared.keys import PARTITION_PREFIX

LANE_PREFIX = rf"(?s)\A{PARTITION_PREFIX}[+-].{{3}}:"
"""A regular expression in Java's syntax: the rule of ``lane_of``."""

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from pyspark_mysqlqueue.archive.root import Root
    from pyspark_mysqlqueue.databases import Place
    from pyspark_mysqlqueue.log_schema import Log
    from pyspark_mysqlqueue.reading import Span


def json_payload(schema: StructType | str, payload: str = "payload") -> Column:
    """Return a column that parses JSON payloads. A payload or field that does not match the schema is NULL.

    Args:
        schema: A ``StructType`` or a DDL string such as ``"n INT, name STRING"``.
        payload: The name of the binary column.
    """
    from pyspark.sql import functions

    # Not CAST, which fails the query if a payload is not UTF-8.
    return functions.from_json(functions.try_validate_utf8(functions.col(payload).cast("string")), schema)


def publisher_key(partition_key: str = "partition_key", publisher_key: str = "publisher_key") -> Column:
    """Return a column with the key that a message was published with, as ``delivery.key``: NULL if there was none.

    Args:
        partition_key: The name of the column with the partition, as it is stored.
        publisher_key: The name of the column with the key, which is NULL if the partition contains it.
    """
    from pyspark.sql import functions

    partition = functions.regexp_replace(partition_key, LANE_PREFIX, "")
    unhashed = functions.when(~partition.startswith(PARTITION_PREFIX), partition)
    return functions.coalesce(publisher_key, unhashed)


def log(
    spark: SparkSession,
    place: Place,
    *,
    topics: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    **options: str,
) -> DataFrame:
    """Return the live log. With PySpark 4.1 or later, filters are pushed down into SQL.

    Args:
        spark: The session. The function switches on its setting for filter pushdown.
        place: The queue's database.
        topics: Only these topics (None: all).
        columns: The columns to read (None: all). Spark does not tell Python data sources which ones a query needs.
        **options: Options of the data source.

    Raises:
        PipelineError: A column does not exist, or Spark does not find the data source.
    """
    from pyspark.sql import datasource

    reader = spark.read.format("mysqlqueue")
    if hasattr(datasource, "Filter"):
        spark.conf.set(PUSHDOWN, "true")
        reader = reader.option("pushFilters", "true")
    if columns is not None:
        reader = reader.schema(_ddl(columns))
    subscription = ("subscribePattern", EVERY_TOPIC) if topics is None else ("subscribe", json.dumps(list(topics)))
    try:
        return reader.options(**place.options()).option(*subscription).options(**options).load()
    except Exception as error:  # of the JVM or, in Spark Connect, of gRPC
        if "DATA_SOURCE_NOT_FOUND" not in str(error):
            raise
        raise PipelineError(
            f"Spark's Python does not have this package: set PYSPARK_PYTHON={sys.executable} before the session "
            "starts. If it has it, register the source: spark.dataSource.register(pyspark_mysqlqueue.DefaultSource)"
        ) from error


def _ddl(columns: Sequence[str]) -> str:
    unknown = [name for name in columns if name not in BY_NAME]
    if unknown or not columns:
        raise PipelineError(f"columns {unknown or list(columns)!r}: must be one or more of {', '.join(BY_NAME)}")
    return ddl(BY_NAME[name] for name in columns)


def archive(
    spark: SparkSession,
    place: Place,
    root: Root,
    *,
    topics: Sequence[str] | None = None,
    since: datetime.datetime | None = None,
    until: datetime.datetime | None = None,
    span: Span | None = None,
) -> DataFrame:
    """Return the archived messages of this queue's log, with the log's columns. Spark needs no jar of Delta.

    Args:
        spark: The session.
        place: The queue's database, whose log is read.
        root: The archive.
        topics: Only these topics (None: all).
        since: Only messages that entered the log at or after this time. Files of earlier days are not opened.
        until: Only messages that entered the log before this time.
        span: Only these offsets (None: all).

    Raises:
        PipelineError: A time has no time zone.
    """
    with place.connect() as database:
        log = log_offsets.identity(database)
    return archived(spark, Table.find(root), log, topics=topics, since=since, until=until, span=span)


def everything(
    spark: SparkSession,
    place: Place,
    root: Root | None,
    *,
    topics: Sequence[str] | None = None,
    since: datetime.datetime | None = None,
    until: datetime.datetime | None = None,
    columns: Sequence[str] | None = None,
) -> DataFrame:
    """Return the archive, followed by the messages of the live log that are not archived yet.

    Args:
        spark: The session.
        place: The queue's database.
        root: The archive (None: return the live log only).
        topics: As for ``archive``.
        since: As for ``archive``. Most older rows of the live log are not read.
        until: As for ``archive``.
        columns: The columns to read (None: all). With ``since`` or ``until``, ``published_at`` must be one of them.

    Raises:
        DataLossError: GC has removed messages that the archive does not contain.
        PipelineError: A time has no time zone, or a column does not exist.
    """
    _check_moments(since=since, until=until)
    options = {}
    table = identity = None
    with place.connect() as database:
        if root is not None:
            table, identity = Table.find(root), log_offsets.identity(database)
            options["startingOffsets"] = str(unarchived(database, table, identity, topics) + 1)
    live = _within(log(spark, place, topics=topics, columns=columns, **options), since, until)
    if table is None or identity is None:
        return live
    old = archived(spark, table, identity, topics=topics, since=since, until=until)
    return (old if columns is None else old.select(*columns)).unionByName(live)


def archived(
    spark: SparkSession,
    table: Table | None,
    log: Log,
    *,
    topics: Sequence[str] | None = None,
    since: datetime.datetime | None = None,
    until: datetime.datetime | None = None,
    span: Span | None = None,
) -> DataFrame:
    """Return archived messages of a log, as ``archive``, of a version of the table that the caller has opened."""
    from pyspark.sql import functions

    _check_moments(since=since, until=until)
    first = datetime.date.min if since is None else since.astimezone(datetime.timezone.utc).date()
    last = datetime.date.max if until is None else until.astimezone(datetime.timezone.utc).date()
    if table is None:
        return spark.createDataFrame([], ddl())
    paths = [
        table.root.spark_path(file.path)
        for file in table.files()
        if first <= file.day <= last
        and (topics is None or file.may_have(topics))
        and (span is None or file.offsets is None or (file.offsets[1] > span.above and file.offsets[0] <= span.up_to))
    ]
    if not paths:
        return spark.createDataFrame([], ddl())
    # recursiveFileLookup: read only these files, and derive no columns from the names of folders.
    found = (
        spark.read.schema(f"log STRING, epoch BIGINT, {ddl()}").option("recursiveFileLookup", "true").parquet(*paths)
    )
    found = found.where((functions.col("log") == log.id) & (functions.col("epoch") == log.epoch)).drop("log", "epoch")
    if topics is not None:
        found = found.where(functions.col("topic").isin(*topics))
    if span is not None:
        found = found.where(functions.col("offset").between(span.above + 1, span.up_to))
    return _within(found, since, until)


def _check_moments(**moments: datetime.datetime | None) -> None:
    for name, moment in moments.items():
        if moment is not None and moment.tzinfo is None:
            raise PipelineError(f"{name} {moment.isoformat()}: must have a time zone")


def _within(frame: DataFrame, since: datetime.datetime | None, until: datetime.datetime | None) -> DataFrame:
    from pyspark.sql import functions

    moment = functions.col("published_at")
    if since is not None:
        frame = frame.where(moment >= functions.lit(since))
    return frame if until is None else frame.where(moment < functions.lit(until))
