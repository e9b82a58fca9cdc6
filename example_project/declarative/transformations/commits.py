"""Commits from the queue in three layers of tables.

``commits_bronze`` holds the messages of the log, unchanged. ``commits_silver`` holds the payloads' fields as typed
columns. ``commits_by_repository`` and ``commits_by_day`` hold totals.
"""

from __future__ import annotations

from pyspark import pipelines as dp
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from pyspark_mysqlqueue.frames import json_payload

EVENT = (
    "repository STRING, sequence INT, sha STRING, committed_at BIGINT, parents INT, "
    "files INT, insertions INT, deletions INT"
)


def session() -> SparkSession:
    found = SparkSession.getActiveSession()
    if found is None:
        raise RuntimeError("No Spark session is active. Run this file with spark-pipelines.")
    return found


@dp.materialized_view(comment="The messages of the log, unchanged")
def commits_bronze() -> DataFrame:
    return session().read.format("mysqlqueue").option("subscribe", "commits").load()


@dp.materialized_view(comment="Commits with typed columns; payloads that are not commits are left out")
def commits_silver() -> DataFrame:
    bronze = session().read.table("commits_bronze")
    return (
        bronze.withColumn("event", json_payload(EVENT))
        .where("event.sha IS NOT NULL AND event.repository IS NOT NULL")
        .select("offset", "published_at", "event.*")
        .withColumn("committed_at", f.timestamp_seconds("committed_at"))
    )


def _sums(*by: Column) -> DataFrame:
    return (
        session()
        .read.table("commits_silver")
        .groupBy(*by)
        .agg(
            f.count("*").alias("commits"),
            f.count_if(f.col("parents") > 1).alias("merges"),
            f.sum("files").alias("files"),
            f.sum("insertions").alias("insertions"),
            f.sum("deletions").alias("deletions"),
        )
    )


@dp.materialized_view(comment="Totals per repository and day, as the example's handlers compute them")
def commits_by_day() -> DataFrame:
    return _sums(f.col("repository"), f.to_date("committed_at").alias("day"))


@dp.materialized_view(comment="Totals per repository")
def commits_by_repository() -> DataFrame:
    return _sums(f.col("repository"))
