"""Archives and what they hold."""

from __future__ import annotations

from typing import Any

from django_mysqlqueue import Message, publish_many
from pyspark_mysqlqueue import frames
from pyspark_mysqlqueue.archive import manifest
from pyspark_mysqlqueue.archive.run import Job
from tests.support.harness import sequence
from tests.support.spark_log import collected

HOME = "0123456789ab"
"""An archive's folder below its root."""


def held(job: Job, **options: Any) -> list[tuple[Any, ...]]:
    return collected(frames.archive(job.spark, job.place, job.root, **options))


def some(count: int, topic: str = "t") -> None:
    publish_many(topic, (Message({"n": n}, key=f"k{n % 3}") for n in range(count)))
    sequence()


def parquet(job: Job) -> list[str]:
    from pathlib import Path

    return sorted(str(path) for path in Path(job.root.uri).rglob("*.parquet"))


def segments(job: Job) -> list[manifest.Segment]:
    with job.place.connect() as database:
        return manifest.segments(database)
