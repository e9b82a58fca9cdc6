"""The log and the archive as DataFrames."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from django_mysqlqueue.pipeline import log_offsets
from django_mysqlqueue.pipeline.archive import manifest
from django_mysqlqueue.pipeline.errors import DataLossError, PipelineError
from django_mysqlqueue.pipeline.log_schema import BY_NAME, ddl
from django_mysqlqueue.pipeline.session import PUSHDOWN

CLOCK_STEP = datetime.timedelta(hours=26)
"""By how much the server's clock may have been set back: times in the log are in order but for that.

More than a wrong time zone.
"""

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from django_mysqlqueue.pipeline.archive.files import Root
    from django_mysqlqueue.pipeline.archive.manifest import Segment
    from django_mysqlqueue.pipeline.databases import Database, Place
    from django_mysqlqueue.pipeline.reading import Span


def json_payload(schema: StructType | str, payload: str = "payload") -> Column:
    """The payload as a struct of the given schema; NULL, or a NULL field, where it is not of that form.

    Args:
        schema: a ``StructType`` or a DDL string such as ``"n INT, name STRING"``.
        payload: the name of the binary column.
    """
    from pyspark.sql import functions

    # Not CAST, which fails the query on bytes that are no UTF-8.
    return functions.from_json(functions.try_validate_utf8(functions.col(payload).cast("string")), schema)


def log(spark: SparkSession, place: Place, *, columns: Sequence[str] | None = None, **options: str) -> DataFrame:
    """The live log; ``options`` are those of the source, filters are pushed into SQL.

    Args:
        spark: the session; its setting for filter pushdown is switched on.
        place: where the queue's database is.
        columns: only these are read. (Spark does not tell Python sources which ones a query needs.)
    """
    spark.conf.set(PUSHDOWN, "true")
    reader = spark.read.format("mysqlqueue").option("pushFilters", "true")
    if columns is not None:
        reader = reader.schema(_ddl(columns))
    return reader.options(**{**place.options(), **options}).load()


def _ddl(columns: Sequence[str]) -> str:
    unknown = [name for name in columns if name not in BY_NAME]
    if unknown or not columns:
        raise PipelineError(f"columns {unknown or list(columns)!r}: must be some of {', '.join(BY_NAME)}")
    return ddl(BY_NAME[name] for name in columns)


def archive(
    spark: SparkSession,
    place: Place,
    root: Root,
    *,
    topics: Sequence[str] | None = None,
    since: datetime.datetime | None = None,
    until: datetime.datetime | None = None,
) -> DataFrame:
    """What the archive holds: the files that the manifest names, no others, with the log's columns.

    Args:
        topics: only these; other topics' files are not opened.
        since: only what was published then or later; files of earlier days are not opened.
        until: only what was published before.
    """
    with place.connect() as database:
        known = manifest.segments(database)
    return archived(spark, root, known, topics=topics, since=since, until=until)


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
    """The archive up to its end and the live log behind it: each message once.

    Without a root it is what the log still holds. Of the log what was published long before ``since`` is not read.

    Args:
        topics: as in ``archive``; so are ``since`` and ``until``.
        columns: only these are read; with ``since`` or ``until`` the column ``published_at`` must be among them.

    Raises:
        DataLossError: GC has removed what the archive does not hold.
        PipelineError: a moment without a time zone.
    """
    from pyspark.sql import functions

    _check_moments(since=since, until=until)
    options = {} if topics is None else {"topics": json.dumps(list(topics))}
    with place.connect() as database:
        known = [] if root is None else manifest.segments(database)
        first = None if since is None else _first(database, since)
        if root is not None:
            end = manifest.archived(known)
            options["startOffset"] = str(end + 1)
            # Here, not only when the rows are read: what is gone has no time that would say whether it was wanted.
            gone = log_offsets.collected(database, topics)
            if gone > end:
                raise DataLossError(
                    f"GC has removed messages up to offset {gone}, and the archive holds those up to {end} alone: some "
                    "are nowhere. Run queuearchive to go on with what is left; ARCHIVE_REQUIRED lets GC wait for it"
                )
    read = None if columns is None else tuple(dict.fromkeys(["offset", *columns]))
    live = log(spark, place, columns=read, **options)
    if first is not None:
        # The source takes this condition into its ranges.
        live = live.where(functions.col("offset") >= first)
    live = _within(live if columns is None else live.select(*columns), since, until)
    if root is None:
        return live
    # What lies behind a hole is in the log.
    chain = [segment for segment in known if segment.hi <= manifest.archived(known)]
    old = archived(spark, root, chain, topics=topics, since=since, until=until)
    return (old if columns is None else old.select(*columns)).unionByName(live)


def archived(
    spark: SparkSession,
    root: Root,
    known: Sequence[Segment],
    *,
    topics: Sequence[str] | None = None,
    since: datetime.datetime | None = None,
    until: datetime.datetime | None = None,
    span: Span | None = None,
) -> DataFrame:
    """As ``archive``, of segments that the caller has read from the manifest, and of a span of offsets alone."""
    from pyspark.sql import functions

    _check_moments(since=since, until=until)
    first = "" if since is None else since.astimezone(datetime.UTC).date().isoformat()
    last = "~" if until is None else until.astimezone(datetime.UTC).date().isoformat()
    paths = [
        root.spark_path(f"{segment.path}/{file.path}")
        for segment in known
        for file in segment.files
        if (topics is None or file.topic in topics)
        and first <= file.day <= last
        and (span is None or (file.hi > span.above and file.lo <= span.up_to))
    ]
    if not paths:
        return spark.createDataFrame([], ddl())
    # Only these files, without a guess at columns from the names of folders.
    found = spark.read.schema(ddl()).option("recursiveFileLookup", "true").parquet(*paths)
    if span is not None:
        found = found.where(functions.col("offset").between(span.above + 1, span.up_to))
    return _within(found, since, until)


def _first(database: Database, since: datetime.datetime) -> int:
    """An offset below which nothing is of that moment or later."""
    floor = datetime.datetime.min.replace(tzinfo=datetime.UTC) + CLOCK_STEP
    return log_offsets.first_since(database, max(since, floor) - CLOCK_STEP)


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
