"""How much a group had still to settle, over time.

Both functions count a stretch of time as one step: a row says what was open at
its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_mysqlqueue.pipeline.analytics.common import step
from django_mysqlqueue.pipeline.analytics.deliveries import settlements

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def lag(log: DataFrame, events: DataFrame, groups: DataFrame, *, seconds: int = 60) -> DataFrame:
    """From recorded deliveries: ``consumer_group, topic, at, published, settled, lag``.

    Of the messages in ``log`` alone: what was published before its first one and
    was still open then is not counted. Only for groups that have every delivery
    recorded; pass those in ``groups``.

    Args:
        seconds: length of a step; ``at`` is its end. Steps in which nothing changed have no row.
    """
    from pyspark.sql import functions as f

    published = _published(log, groups).withColumnRenamed("offset", "message_offset")
    settled = settlements(events).join(
        published.select("consumer_group", "topic", "message_offset"), ["consumer_group", "topic", "message_offset"]
    )
    return _running(_counted(published, "published_at", seconds), _counted(settled, "settled_at", seconds)).select(
        "consumer_group",
        "topic",
        f.timestamp_millis(f.unix_millis("at") + seconds * 1000).alias("at"),
        "published",
        "settled",
        f.col("open").alias("lag"),
    )


def lag_by_rollups(log: DataFrame, rollups: DataFrame, groups: DataFrame, *, seconds: int = 60) -> DataFrame:
    """From the rollups' counts, backwards from what is open now: columns as in ``lag``.

    ``log`` and ``rollups`` must reach to now. What a killed process had not
    counted, and what a seek let a group handle again, make the past wrong by as
    much; it is never shown below 0.

    Args:
        seconds: the rollups' grain, 60 or 3600.
    """
    from pyspark.sql import functions as f

    by = ["consumer_group", "topic"]
    settled = (
        rollups.where(f"grain = {int(seconds)}")
        .join(groups.select(*by), by)
        .select(*by, f.col("bucket_at").alias("at"), (f.col("acked") + f.col("dead_lettered")).alias("count"))
    )
    found = _running(_counted(_published(log, groups), "published_at", seconds), settled)
    from pyspark.sql import Window

    last = f.last("open").over(
        Window.partitionBy(*by).orderBy("at").rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    )
    return (
        found.withColumn("change", f.col("open") - last)
        .join(groups.select(*by, "unsettled"), by)
        .select(
            *by,
            f.timestamp_millis(f.unix_millis("at") + seconds * 1000).alias("at"),
            "published",
            "settled",
            f.greatest(f.col("unsettled") + f.col("change"), f.lit(0)).alias("lag"),
        )
        .orderBy("topic", "consumer_group", "at")
    )


def _published(log: DataFrame, groups: DataFrame) -> DataFrame:
    """A row for each message and group that it is for."""
    from pyspark.sql import functions as f

    wanted = groups.select("consumer_group", "topic", "start_offset")
    return (
        log.join(f.broadcast(wanted), "topic")
        .where("offset > start_offset AND target_group IN ('', consumer_group) AND published_at IS NOT NULL")
        .select("consumer_group", "topic", "offset", "published_at")
    )


def _counted(frame: DataFrame, moment: str, seconds: int) -> DataFrame:
    from pyspark.sql import functions as f

    at = step(f.col(moment), seconds).alias("at")
    return frame.groupBy("consumer_group", "topic", at).agg(f.count("*").alias("count"))


def _running(published: DataFrame, settled: DataFrame) -> DataFrame:
    """``consumer_group, topic, at, published, settled`` of each step, and ``open``: the running difference."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    by = ["consumer_group", "topic"]
    none = f.lit(0).cast("bigint")
    both = published.select(*by, "at", f.col("count").alias("published"), none.alias("settled")).unionByName(
        settled.select(*by, "at", none.alias("published"), f.col("count").alias("settled"))
    )
    until = Window.partitionBy(*by).orderBy("at").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    return (
        both.groupBy(*by, "at")
        .agg(f.sum("published").alias("published"), f.sum("settled").alias("settled"))
        .withColumn("open", f.sum(f.col("published") - f.col("settled")).over(until))
        .orderBy("topic", "consumer_group", "at")
    )
