"""Analyze the deliveries of consumer groups: latency until settlement, failures and the subscribers' shares.

Analyses of recorded deliveries depend on the setting ``RECORD_DELIVERIES`` of each group. ``recording`` tells how many
deliveries are recorded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark_mysqlqueue.analytics.common import SHARES, kind_of, milliseconds_between, percentiles
from pyspark_mysqlqueue.shared.sizes import LATENCY_BOUNDS_MS, LATENCY_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SETTLED = ("acked", "dead_lettered")
"""Outcomes that settle a message for a group."""
ENOUGH = 0.98
"""Share of the acks in the rollups from which all deliveries count as recorded. The numbers can differ a little: a
killed process loses some of its counts, and rows at the edges of a period may fall on either side."""
BOUNDS = tuple(f"p{round(share * 100)}_within_ms" for share in SHARES)


def settlements(events: DataFrame) -> DataFrame:
    """Return when each group first settled each message: ``consumer_group, topic, message_offset, settled_at``.

    Only the first time counts. After a seek, a group settles a message again, which says nothing about its latency.
    """
    from pyspark.sql import functions as f

    return (
        events.where(f.col("outcome").isin(*SETTLED))
        .groupBy("consumer_group", "topic", "message_offset")
        .agg(f.min("settled_at").alias("settled_at"))
    )


def recording(groups: DataFrame, events: DataFrame, rollups: DataFrame) -> DataFrame:
    """Return how many deliveries of each group are recorded.

    The columns are ``consumer_group, topic, recorded, acks_recorded, acks_counted, failures_recorded,
    failures_counted``.

    ``…_recorded`` are numbers of recorded deliveries. ``…_counted`` are numbers from the rollups (NULL: no rollups),
    which also count an attempt that ends in a dead letter as failed. ``recorded`` is one of

    - ``all``: every delivery is recorded;
    - ``some``: acks are recorded, but fewer than the rollups count;
    - ``failures``: failures are recorded, acks are not;
    - ``nothing``: no delivery is recorded, although the rollups count some;
    - ``idle``: no delivery is recorded or counted, so it is unknown what would be recorded.
    """
    from pyspark.sql import functions as f

    by = ["consumer_group", "topic"]
    of_events = events.groupBy(*by).agg(
        f.count_if(f.col("outcome") == "acked").alias("acks_recorded"),
        f.count_if(f.col("outcome").isin("failed", "lost", "dead_lettered")).alias("failures_recorded"),
    )
    of_rollups = (
        rollups.where("grain = 3600")
        .groupBy(*by)
        .agg(
            f.sum("acked").alias("acks_counted"),
            f.sum(f.greatest("failed", "dead_lettered")).alias("failures_counted"),
        )
    )
    found = (
        groups.select(*by)
        .join(of_events, by, "left")
        .join(of_rollups, by, "left")
        .fillna(0, ["acks_recorded", "failures_recorded"])
    )
    counted = f.coalesce("acks_counted", f.lit(0))
    level = (
        f.when((f.col("acks_recorded") > 0) & (f.col("acks_recorded") >= counted * ENOUGH), "all")
        .when(f.col("acks_recorded") > 0, "some")
        .when(f.col("failures_recorded") > 0, "failures")
        .when(counted > 0, "nothing")
        .otherwise("idle")
    )
    return (
        found.withColumn("recorded", level)
        .select(*by, "recorded", "acks_recorded", "acks_counted", "failures_recorded", "failures_counted")
        .orderBy("topic", "consumer_group")
    )


def settle_latency(log: DataFrame, events: DataFrame) -> DataFrame:
    """Return the latency from entering the log to the first ack or dead letter, per group, from recorded deliveries.

    The columns are ``consumer_group, topic, messages, p50_ms, p90_ms, p99_ms, max_ms``. Only messages in ``log`` are
    counted. For a group without recorded acks, only dead letters are counted, which are not representative: call
    ``recording`` first.
    """
    from pyspark.sql import functions as f

    published = log.select("topic", f.col("offset").alias("message_offset"), "published_at")
    ended = settlements(events).join(published, ["topic", "message_offset"])
    took = milliseconds_between(f.col("published_at"), f.col("settled_at"))
    return percentiles(ended, ["consumer_group", "topic"], took, "messages").orderBy("topic", "consumer_group")


def handling(events: DataFrame) -> DataFrame:
    """Return the handler's time for recorded acks, per group: ``consumer_group, topic, acks, p50_ms, …, max_ms``."""
    from pyspark.sql import functions as f

    acked = events.where("outcome = 'acked'")
    return percentiles(acked, ["consumer_group", "topic"], f.col("handled_ms"), "acks").orderBy(
        "topic", "consumer_group"
    )


def settle_bounds(rollups: DataFrame) -> DataFrame:
    """Return upper bounds of the latency from entering the log to the ack, per group, from the buckets of the rollups.

    The columns are ``consumer_group, topic, acks, p50_within_ms, p90_within_ms, p99_within_ms``. NULL means more than
    the last bound, one day. Only hourly rollups are read, so the edges of a period are rounded to hours.
    """
    from pyspark.sql import functions as f

    sums = (
        rollups.where("grain = 3600")
        .groupBy("consumer_group", "topic")
        .agg(f.sum("acked").alias("acks"), *(f.sum(name).alias(name) for name in LATENCY_COLUMNS))
        .where("acks > 0")
    )
    total = sum((f.col(name) for name in LATENCY_COLUMNS), f.lit(0))
    running = f.lit(0)
    within = {name: f.when(f.lit(False), f.lit(0)) for name in BOUNDS}  # noqa: FBT003
    for bucket, bound in zip(LATENCY_COLUMNS, LATENCY_BOUNDS_MS, strict=False):  # the last bucket has no bound
        running = running + f.col(bucket)
        for name, share in zip(BOUNDS, SHARES, strict=True):
            within[name] = within[name].when(running >= total * share, f.lit(bound))
    return (
        sums.withColumns(within).select("consumer_group", "topic", "acks", *BOUNDS).orderBy("topic", "consumer_group")
    )


def failures(events: DataFrame) -> DataFrame:
    """Return failed attempts per group and error, from recorded deliveries.

    The columns are ``consumer_group, topic, error, failed, lost, dead_lettered, messages, last_at``. ``error`` is the
    last line of the error with ``N`` for each number. ``failed`` attempts were retried, ``lost`` attempts ended because
    their process was lost or their outcome came too late, and ``dead_lettered`` attempts moved their message to the
    DLQ.
    """
    from pyspark.sql import functions as f

    bad = ("failed", "lost", "dead_lettered")
    counts = [f.count_if(f.col("outcome") == name).alias(name) for name in bad]
    return (
        events.where(f.col("outcome").isin(*bad))
        .groupBy("consumer_group", "topic", kind_of(f.col("error")).alias("error"))
        .agg(*counts, f.countDistinct("message_offset").alias("messages"), f.max("settled_at").alias("last_at"))
        .orderBy(f.desc(f.col("failed") + f.col("lost") + f.col("dead_lettered")), "consumer_group", "topic", "error")
    )


def dead_letters(log: DataFrame) -> DataFrame:
    """Return the dead letters in the log per group, topic and error. Needs no recorded deliveries.

    The columns are ``consumer_group, topic, error, dead_letters, mean_attempts, first_at, last_at``. ``topic`` is the
    original topic, ``error`` the last line of the error with ``N`` for each number.
    """
    from pyspark.sql import functions as f

    return (
        log.where("failed_group <> ''")
        .groupBy(
            f.col("failed_group").alias("consumer_group"),
            f.col("original_topic").alias("topic"),
            kind_of(f.col("last_error")).alias("error"),
        )
        .agg(
            f.count("*").alias("dead_letters"),
            f.avg("failure_count").alias("mean_attempts"),
            f.min("failed_at").alias("first_at"),
            f.max("failed_at").alias("last_at"),
        )
        .orderBy(f.desc("dead_letters"), "consumer_group", "topic", "error")
    )


def consumers(events: DataFrame) -> DataFrame:
    """Return the messages that each subscriber settled.

    The columns are ``consumer_group, topic, subscriber, settled, share, of_fair_share``. ``of_fair_share`` is 1 for a
    subscriber that settled as many messages as the average of the group's subscribers with a settled message (this is
    not the fair share of partitions). A subscriber that ran for only a part of the period settled fewer.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    group = Window.partitionBy("consumer_group", "topic")
    return (
        events.where(f.col("outcome").isin(*SETTLED))
        .groupBy("consumer_group", "topic", f.col("settled_by").alias("subscriber"))
        .agg(f.count("*").alias("settled"))
        .withColumn("share", f.col("settled") / f.sum("settled").over(group))
        .withColumn("of_fair_share", f.col("settled") / f.avg("settled").over(group))
        .orderBy("topic", "consumer_group", f.desc("settled"), "subscriber")
    )
