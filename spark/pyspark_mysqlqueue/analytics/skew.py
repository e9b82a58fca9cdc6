"""Analyze the distribution of messages over partitions.

In ordered mode, the messages of a partition are handled one at a time, so the largest partition limits a group's speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def partitions(log: DataFrame) -> DataFrame:
    """Return the size of each partition: ``topic, partition_key, messages, bytes, share`` (of the topic's messages)."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    topic = Window.partitionBy("topic")
    return (
        log.groupBy("topic", "partition_key")
        .agg(f.count("*").alias("messages"), f.sum("size").alias("bytes"))
        .withColumn("share", f.col("messages") / f.sum("messages").over(topic))
    )


def skew(partitions: DataFrame) -> DataFrame:
    """Return the skew of each topic.

    The columns are ``topic, keys, messages, gini, top_share, top_1_percent, top_10_percent``. Shares are from 0 to 1.
    ``gini`` is the Gini coefficient: 0 if all keys have the same number of messages, near 1 if one key has almost all.
    ``top_share`` is the share of the largest key. The last two columns are the shares of the largest 1 % and 10 % of
    the keys, rounded up to whole keys.
    """
    from pyspark.sql import functions as f

    place = f.col("place")
    # With x ascending: 2 * sum(i * x) / (n * sum(x)) - (n + 1) / n; ``place`` is 1 for the largest key.
    total, keys = f.sum("messages"), f.max("keys")
    ascending = f.col("keys") - place + 1
    gini = 2 * f.sum(ascending * f.col("messages")) / (keys * total) - (keys + 1) / keys
    return (
        _ranked(partitions)
        .groupBy("topic")
        .agg(
            keys.alias("keys"),
            total.alias("messages"),
            gini.alias("gini"),
            f.max("share").alias("top_share"),
            f.sum(f.when(place <= f.ceil(f.col("keys") / 100), f.col("share"))).alias("top_1_percent"),
            f.sum(f.when(place <= f.ceil(f.col("keys") / 10), f.col("share"))).alias("top_10_percent"),
        )
        .orderBy(f.desc("messages"), "topic")
    )


def top_keys(partitions: DataFrame, count: int = 20) -> DataFrame:
    """Return the largest keys of each topic: ``topic, place, partition_key, messages, bytes, share``.

    ``place`` is the rank: 1 for the largest key.

    Raises:
        ValueError: ``count`` is below 1.
    """
    if count < 1:
        raise ValueError(f"count {count}: must be 1 or more")
    return (
        _ranked(partitions)
        .where(f"place <= {count}")
        .select("topic", "place", "partition_key", "messages", "bytes", "share")
        .orderBy("topic", "place")
    )


def concentration(partitions: DataFrame, points: int = 100) -> DataFrame:
    """Return the cumulative share of the largest keys: ``topic, keys_share, messages_share``, one row per point.

    A topic with fewer keys than ``points`` has one row per key.

    Raises:
        ValueError: ``points`` is below 1.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    if points < 1:
        raise ValueError(f"points {points}: must be 1 or more")
    until = Window.partitionBy("topic").orderBy("place").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    return (
        _ranked(partitions)
        .withColumn("up_to", f.sum("share").over(until))
        .groupBy("topic", f.ceil(f.col("place") / f.col("keys") * points).alias("point"))
        .agg(
            f.max(f.col("place") / f.col("keys")).alias("keys_share"),
            f.least(f.max("up_to"), f.lit(1.0)).alias("messages_share"),
        )
        .select("topic", "keys_share", "messages_share")
        .orderBy("topic", "keys_share")
    )


def _ranked(partitions: DataFrame) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    topic = Window.partitionBy("topic")
    order = topic.orderBy(f.desc("messages"), "partition_key")
    return partitions.withColumns({"place": f.row_number().over(order), "keys": f.count("*").over(topic)})
