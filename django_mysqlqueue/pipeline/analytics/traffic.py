"""How much came, when, and how long it took into the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_mysqlqueue.pipeline.analytics.common import milliseconds_between, percentiles, step

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MINUTE = 60


def topics(log: DataFrame) -> DataFrame:
    """Each topic: ``topic, messages, bytes, keys, dead_letters, first_at, last_at``, the largest first."""
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
    """Messages and payload bytes that took their place in the log: ``at, topic, messages, bytes``.

    Args:
        seconds: length of a stretch; ``at`` is when it began. Stretches without a message have no row.
    """
    from pyspark.sql import functions as f

    return (
        log.where("published_at IS NOT NULL")
        .groupBy(step(f.col("published_at"), seconds).alias("at"), "topic")
        .agg(f.count("*").alias("messages"), f.sum("size").alias("bytes"))
        .orderBy("at", "topic")
    )


def publish_latency(log: DataFrame, *, seconds: int | None = None) -> DataFrame:
    """From the publisher's insert (``created_at``) to the place in the log, by topic; with ``seconds`` by time instead.

    ``topic`` or ``at``, then ``messages, p50_ms, p90_ms, p99_ms, max_ms``. It
    includes the rest of the publisher's transaction, and the delay of what was
    scheduled for later: the log does not keep ``deliver_at``.
    """
    from pyspark.sql import functions as f

    by = f.col("topic") if seconds is None else step(f.col("published_at"), seconds).alias("at")
    took = milliseconds_between(f.col("created_at"), f.col("published_at"))
    known = log.where("published_at IS NOT NULL AND created_at IS NOT NULL")
    return percentiles(known, [by], took, "messages").orderBy("topic" if seconds is None else "at")


def hours(log: DataFrame) -> DataFrame:
    """The hours of the week: ``weekday`` (1 is Monday), ``hour`` (0 to 23), ``messages``, ``days``.

    ``days`` is on how many different dates that hour had a message.
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
    """What each day added: ``day, topic, messages, bytes`` (of payloads). Days without a message have no row."""
    from pyspark.sql import functions as f

    return (
        log.where("published_at IS NOT NULL")
        .groupBy(f.to_date("published_at").alias("day"), "topic")
        .agg(f.count("*").alias("messages"), f.sum("size").alias("bytes"))
        .orderBy("day", "topic")
    )
