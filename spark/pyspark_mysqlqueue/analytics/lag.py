"""Compute the lag of consumer groups over time.

Both functions divide time into steps. A row has the lag at the end of its step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark_mysqlqueue.analytics.common import step
from pyspark_mysqlqueue.analytics.deliveries import settlements

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def lag(log: DataFrame, events: DataFrame, groups: DataFrame, *, seconds: int = 60) -> DataFrame:
    """Return the lag from recorded deliveries: ``consumer_group, topic, at, published, settled, lag``.

    Only messages in ``log`` are counted, not those that were published earlier and unsettled at its beginning.

    Args:
        log: The messages.
        events: The recorded deliveries.
        groups: The groups to return. Every delivery of these must be recorded.
        seconds: The length of a step. ``at`` is its end. Steps without a change have no row.
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
    """Return the lag computed backwards from the current lag with the counts of rollups. Columns as in ``lag``.

    Counts that a killed process lost, and messages that a group handled again after a seek, make earlier values wrong
    by that number. The lag is never below 0.

    Args:
        log: The messages. They must include the most recent ones.
        rollups: The rollups. They must include the most recent ones.
        groups: The groups to return.
        seconds: The length of the rollups, 60 or 3600.
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
    """Return one row for each message and each group that receives it."""
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
    """Return ``consumer_group, topic, at, published, settled`` of each step, and their running difference ``open``."""
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
