"""What became of messages in the groups: latency until settlement, failures, who did the work.

What rests on recorded deliveries knows only what ``RECORD_DELIVERIES`` keeps of
a group: ``recording`` tells how much that is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_mysqlqueue.limits import LATENCY_BOUNDS_MS
from django_mysqlqueue.pipeline.analytics.common import SHARES, kind_of, milliseconds_between, percentiles
from django_mysqlqueue.pipeline.tables import BUCKETS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SETTLED = ("acked", "dead_lettered")
"""Outcomes after which a group is done with a message."""
ENOUGH = 0.98
"""Of the acks that the rollups counted: if so many are on record, all are. (A killed process takes some of
its counts with it, and rows at the edges of a period fall on this or that side.)"""
BOUNDS = tuple(f"p{round(share * 100)}_within_ms" for share in SHARES)


def settlements(events: DataFrame) -> DataFrame:
    """The first end of each message for a group: ``consumer_group, topic, message_offset, settled_at``.

    After a seek a group settles a message again; that says nothing of how long it waited.
    """
    from pyspark.sql import functions as f

    return (
        events.where(f.col("outcome").isin(*SETTLED))
        .groupBy("consumer_group", "topic", "message_offset")
        .agg(f.min("settled_at").alias("settled_at"))
    )


def recording(groups: DataFrame, events: DataFrame, rollups: DataFrame) -> DataFrame:
    """How much is known of each group.

    ``consumer_group, topic, recorded, acks_recorded, acks_counted, failures_recorded, failures_counted``.

    ``…_recorded`` are recorded deliveries, ``…_counted`` the rollups' (NULL: there is none), in which an attempt that
    ends in a dead letter is counted as a failed one, too.
    ``recorded`` is ``all``; ``some`` (acks are on record, but fewer than were counted); ``failures`` (failures
    are on record, acks are not); ``nothing``; or ``idle`` (nothing is on record and nothing was counted: it
    cannot be told what would be recorded).
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
    """From the place in the log to the first ack or dead letter, by group, where that is on record.

    ``consumer_group, topic, messages, p50_ms, p90_ms, p99_ms, max_ms``: of
    messages that are in ``log``. A group without recorded acks has its dead
    letters only, which are no picture of it: ask ``recording`` first.
    """
    from pyspark.sql import functions as f

    published = log.select("topic", f.col("offset").alias("message_offset"), "published_at")
    ended = settlements(events).join(published, ["topic", "message_offset"])
    took = milliseconds_between(f.col("published_at"), f.col("settled_at"))
    return percentiles(ended, ["consumer_group", "topic"], took, "messages").orderBy("topic", "consumer_group")


def handling(events: DataFrame) -> DataFrame:
    """Time in the handler of recorded acks, by group: ``consumer_group, topic, acks, p50_ms, …, max_ms``."""
    from pyspark.sql import functions as f

    acked = events.where("outcome = 'acked'")
    return percentiles(acked, ["consumer_group", "topic"], f.col("handled_ms"), "acks").orderBy(
        "topic", "consumer_group"
    )


def settle_bounds(rollups: DataFrame) -> DataFrame:
    """From the place in the log to the ack, by group, as the rollups' buckets know it: within which bound.

    ``consumer_group, topic, acks, p50_within_ms, p90_within_ms, p99_within_ms``; NULL: above the last bound, an
    hour. It reads the rows of hours, so a period's edges are rounded to hours.
    """
    from pyspark.sql import functions as f

    sums = (
        rollups.where("grain = 3600")
        .groupBy("consumer_group", "topic")
        .agg(f.sum("acked").alias("acks"), *(f.sum(name).alias(name) for name in BUCKETS))
        .where("acks > 0")
    )
    total = sum((f.col(name) for name in BUCKETS), f.lit(0))
    running = f.lit(0)
    within = {name: f.when(f.lit(False), f.lit(0)) for name in BOUNDS}  # noqa: FBT003
    for bucket, bound in zip(BUCKETS, LATENCY_BOUNDS_MS, strict=False):  # the last bucket has no bound
        running = running + f.col(bucket)
        for name, share in zip(BOUNDS, SHARES, strict=True):
            within[name] = within[name].when(running >= total * share, f.lit(bound))
    return (
        sums.withColumns(within).select("consumer_group", "topic", "acks", *BOUNDS).orderBy("topic", "consumer_group")
    )


def failures(events: DataFrame) -> DataFrame:
    """Failed attempts by group and error.

    ``consumer_group, topic, error, failed, lost, dead_lettered, messages, last_at``.

    ``error`` is its last line with ``N`` for each number. ``failed`` attempts come again, ``lost`` are those
    whose process vanished, ``dead_lettered`` ended a message.
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
    """The log's dead letters by group, topic and error, whatever is recorded of deliveries.

    ``consumer_group, topic, error, dead_letters, mean_attempts, first_at, last_at``; the topic is the original one,
    the error its last line with ``N`` for each number.
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
    """Who settled how much of a group's messages: ``consumer_group, topic, subscriber, settled, share, of_fair_share``.

    ``of_fair_share`` is 1 where a subscriber did as much as the mean of those
    that did anything. One that lived for a part of the period only did less.
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
