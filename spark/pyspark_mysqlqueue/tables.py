"""Read the queue's other tables: recorded deliveries, rollups, groups, and the offsets that GC has removed.

Recorded deliveries may be many, so Spark's tasks read them. The other tables are small and are read here.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyspark_mysqlqueue.databases import Database, Place
from pyspark_mysqlqueue.log_offsets import milliseconds
from pyspark_mysqlqueue.log_schema import COLLECTED
from pyspark_mysqlqueue.reading import Span
from pyspark_mysqlqueue.shared import log_queries
from pyspark_mysqlqueue.shared.sizes import LATENCY_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVENTS = "queue_delivery_events"
ROLLUPS = "queue_rollups"
GROUPS = "queue_consumer_groups"

EVENTS_DDL = (
    "id BIGINT, consumer_group STRING, topic STRING, partition_key STRING, message_offset BIGINT, attempt BIGINT, "
    "outcome STRING, delivered_at TIMESTAMP, settled_at TIMESTAMP, handled_ms BIGINT, settled_by STRING, error STRING"
)
"""``outcome`` is acked, failed, snoozed, lost, dead_lettered, deleted, expired or superseded, or an operation:
redriven, replaced or discarded."""
ROLLUPS_DDL = (
    "grain BIGINT, bucket_at TIMESTAMP, consumer_group STRING, topic STRING, acked BIGINT, failed BIGINT, "
    f"dead_lettered BIGINT, {', '.join(f'{name} BIGINT' for name in LATENCY_COLUMNS)}"
)
"""``grain`` is the length of a row's period in seconds."""
GROUPS_DDL = "consumer_group STRING, topic STRING, mode STRING, start_offset BIGINT, paused BOOLEAN, unsettled BIGINT"
"""``unsettled`` is the number of messages in the log that the group has neither acked nor dead-lettered."""

CHUNK = 20_000
"""Number of ids that one query reads."""
TASK = 200_000
"""Number of ids that one task reads."""


@dataclass(frozen=True, slots=True)
class Group:
    """The current state of a consumer group on a topic."""

    consumer_group: str
    topic: str
    mode: str
    start_offset: int
    paused: bool
    unsettled: int


@dataclass(frozen=True, slots=True)
class Collected:
    """The messages of a topic that GC has removed."""

    topic: str
    offset: int
    """The highest offset among them."""
    published_at: int
    """When the last of them entered the log, in epoch milliseconds."""


def events(
    spark: SparkSession,
    place: Place,
    *,
    topics: Sequence[str] | None = None,
    since: datetime.datetime | None = None,
    until: datetime.datetime | None = None,
) -> DataFrame:
    """Return recorded deliveries (``EVENTS_DDL``).

    Args:
        spark: The session.
        place: The queue's database.
        topics: Only these topics (None: all).
        since: Only deliveries that ended at or after this time.
        until: Only deliveries that ended before this time.
    """
    with place.connect() as database:
        first, last = database.row(f"SELECT COALESCE(MIN(id), 1), COALESCE(MAX(id), 0) FROM {EVENTS}")
    span = Span(int(first) - 1, int(last))
    if not len(span):
        return spark.createDataFrame([], EVENTS_DDL)
    condition, parameters = _condition("settled_at", topics, since, until)
    read = partial(_events, place, condition, parameters)
    spans = span.split(-(-len(span) // TASK))
    raw = EVENTS_DDL.replace("TIMESTAMP", "BIGINT")
    rows = spark.createDataFrame(spark.sparkContext.parallelize(spans, len(spans)).flatMap(read), raw)
    return _with_times(rows, "delivered_at", "settled_at")


def _events(place: Place, condition: str, parameters: Sequence[Any], span: Span) -> Iterator[tuple[Any, ...]]:
    names = ", ".join(column.split()[0] for column in EVENTS_DDL.split(", "))
    with place.connect() as database:
        for low in range(span.above, span.up_to, CHUNK):
            yield from database.rows(
                f"SELECT {names} FROM {EVENTS}{database.force_index('PRIMARY')} "
                f"WHERE id > %s AND id <= %s{condition} ORDER BY id",
                (low, min(low + CHUNK, span.up_to), *parameters),
            )


def rollups(
    spark: SparkSession,
    place: Place,
    *,
    topics: Sequence[str] | None = None,
    since: datetime.datetime | None = None,
    until: datetime.datetime | None = None,
) -> DataFrame:
    """Return rollups (``ROLLUPS_DDL``).

    Args:
        spark: The session.
        place: The queue's database.
        topics: Only these topics (None: all).
        since: Only rollups whose minute or hour begins at or after this time.
        until: Only rollups whose minute or hour begins before this time.
    """
    condition, parameters = _condition("bucket_at", topics, since, until)
    names = ", ".join(column.split()[0] for column in ROLLUPS_DDL.split(", "))
    with place.connect() as database:
        found = database.rows(f"SELECT {names} FROM {ROLLUPS} WHERE 1 = 1{condition}", parameters)
    return _with_times(spark.createDataFrame(found, ROLLUPS_DDL.replace("TIMESTAMP", "BIGINT")), "bucket_at")


def groups(database: Database, topics: Sequence[str] | None = None) -> list[Group]:
    """Return every registered group with the number of its unsettled messages. Counting reads each topic's log."""
    condition, parameters = _condition("", topics, None, None)
    rows = database.rows(
        f"SELECT consumer_group, topic, mode, start_offset, paused FROM {GROUPS} WHERE 1 = 1{condition} "
        "ORDER BY topic, consumer_group",
        parameters,
    )
    return [
        Group(group, topic, mode, int(start), bool(paused), _unsettled(database, group, topic, int(start)))
        for group, topic, mode, start, paused in rows
    ]


def groups_frame(spark: SparkSession, found: Sequence[Group]) -> DataFrame:
    """Return groups as a DataFrame (``GROUPS_DDL``)."""
    rows = [(one.consumer_group, one.topic, one.mode, one.start_offset, one.paused, one.unsettled) for one in found]
    return spark.createDataFrame(rows, GROUPS_DDL)


def _unsettled(database: Database, group: str, topic: str, start: int) -> int:
    # One statement: with two, a claim in between would be counted twice or not at all.
    (count,) = database.row(
        f"SELECT (SELECT COUNT(*) {log_queries.claimed(database)}) "
        f"+ (SELECT COUNT(*) {log_queries.unclaimed_of_topic(database)})",
        (group, topic, False, group, topic, start, group),
    )
    return int(count)


def collected(database: Database, topics: Sequence[str] | None = None) -> list[Collected]:
    """Return the topics from which GC has removed messages."""
    condition, parameters = _condition("", topics, None, None)
    rows = database.rows(
        f"SELECT topic, collected_offset, published_at FROM {COLLECTED} WHERE 1 = 1{condition} ORDER BY topic",
        parameters,
    )
    return [Collected(topic, int(offset), int(at)) for topic, offset, at in rows]


def now(database: Database) -> datetime.datetime:
    """Return the time of the database's clock."""
    (moment,) = database.row(f"SELECT {database.now_ms}")
    return datetime.datetime.fromtimestamp(int(moment) / 1000, datetime.timezone.utc)


def _condition(
    column: str,
    topics: Sequence[str] | None,
    since: datetime.datetime | None,
    until: datetime.datetime | None,
) -> tuple[str, list[Any]]:
    sql = ""
    parameters: list[Any] = []
    if topics is not None:
        sql += f" AND topic IN ({', '.join(['%s'] * len(topics))})" if topics else " AND 1 = 0"
        parameters += topics
    if since is not None:
        sql += f" AND {column} >= %s"
        parameters.append(milliseconds(since))
    if until is not None:
        sql += f" AND {column} < %s"
        parameters.append(milliseconds(until))
    return sql, parameters


def _with_times(frame: DataFrame, *names: str) -> DataFrame:
    from pyspark.sql import functions

    return frame.withColumns({name: functions.timestamp_millis(name) for name in names})
