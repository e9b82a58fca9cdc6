"""Analyze the published messages: their number, their times and their latency into the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark_mysqlqueue.analytics.common import milliseconds_between, percentiles, step

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MINUTE = 60


def topics(log: DataFrame) -> DataFrame:
    """Return the topics: ``topic, messages, bytes, keys, dead_letters, first_at, last_at``, largest first."""
    from pyspark.sql import functions as f

    return (
        log.groupBy("topic")
        .agg(
            f.count("*").alias("messages"),
            f.sum("size").alias("bytes"),
            f.countDistinct("partition_key").alias("keys"),
            f.count_if(f.col("failed_group") != "").alias("dead_letters"),
            f.min("published_at").alias("first_at"),
            f.max("published_at").alias("last_at"),
        )
        .orderBy(f.desc("messages"), "topic")
    )


def throughput(log: DataFrame, *, seconds: int = MINUTE) -> DataFrame:
    """Return the messages and payload bytes that entered the log in each step: ``at, topic, messages, bytes``.

    Args:
        log: The messages.
        seconds: The length of a step. ``at`` is its beginning. Steps without a message have no row.
    """
    from pyspark.sql import functions as f

    return (
        log.where("published_at IS NOT NULL")
        .groupBy(step(f.col("published_at"), seconds).alias("at"), "topic")
        .agg(f.count("*").alias("messages"), f.sum("size").alias("bytes"))
        .orderBy("at", "topic")
    )


def publish_latency(log: DataFrame, *, seconds: int | None = None) -> DataFrame:
    """Return the latency from the publisher's insert (``created_at``) to the log (``published_at``).

    It includes the time from the insert to the commit of the publisher's transaction, and the delay of scheduled
    messages, because the log does not contain ``deliver_at``. The columns are ``topic`` or ``at``, and ``messages,
    p50_ms, p90_ms, p99_ms, max_ms``.

    Args:
        log: The messages.
        seconds: Group by steps of this length instead of by topic.
    """
    from pyspark.sql import functions as f

    by = f.col("topic") if seconds is None else step(f.col("published_at"), seconds).alias("at")
    took = milliseconds_between(f.col("created_at"), f.col("published_at"))
    known = log.where("published_at IS NOT NULL AND created_at IS NOT NULL")
    return percentiles(known, [by], took, "messages").orderBy("topic" if seconds is None else "at")


def hours(log: DataFrame) -> DataFrame:
    """Return the messages per hour of the week: ``weekday`` (1 is Monday), ``hour`` (0 to 23), ``messages``, ``days``.

    ``days`` is the number of dates on which the hour had a message.
    """
    from pyspark.sql import functions as f

    at = f.col("published_at")
    return (
        log.where("published_at IS NOT NULL")
        .groupBy((f.weekday(at) + 1).alias("weekday"), f.hour(at).alias("hour"))
        .agg(f.count("*").alias("messages"), f.countDistinct(f.to_date(at)).alias("days"))
        .orderBy("weekday", "hour")
    )


def days(log: DataFrame) -> DataFrame:
    """Return the messages and payload bytes per day: ``day, topic, messages, bytes``. Days without any have no row."""
    from pyspark.sql import functions as f

    return (
        log.where("published_at IS NOT NULL")
        .groupBy(f.to_date("published_at").alias("day"), "topic")
        .agg(f.count("*").alias("messages"), f.sum("size").alias("bytes"))
        .orderBy("day", "topic")
    )
