"""How unevenly messages are spread over partition keys.

A partition's messages are handled one after another, so the busiest key is the
slowest queue of an ordered group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def partitions(log: DataFrame) -> DataFrame:
    """``topic, partition_key, messages, bytes, share``: of its topic's messages."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    topic = Window.partitionBy("topic")
    return (
        log.groupBy("topic", "partition_key")
        .agg(f.count("*").alias("messages"), f.sum("size").alias("bytes"))
        .withColumn("share", f.col("messages") / f.sum("messages").over(topic))
    )


def skew(partitions: DataFrame) -> DataFrame:
    """By topic: ``topic, keys, messages, gini, top_share, top_1_percent, top_10_percent``, all shares from 0 to 1.

    ``gini`` is 0 where every key has as many messages as any other, and near 1
    where one has them all. ``top_share`` is the busiest key's share; the last two
    are those of the busiest hundredth and tenth of the keys (rounded up to whole keys).
    """
    from pyspark.sql import functions as f

    place = f.col("place")
    # With x ascending: 2 * sum(i * x) / (n * sum(x)) - (n + 1) / n; ``place`` counts from the busiest on.
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
    """Each topic's busiest keys: ``topic, place, partition_key, messages, bytes, share``, place 1 first.

    Raises:
        ValueError: a count below 1.
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
    """The share of messages that the busiest keys have: ``topic, keys_share, messages_share``, a row for each point.

    A topic with fewer keys than ``points`` has a row for each key.
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
