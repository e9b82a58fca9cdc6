"""Archives and what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import polars
import pyarrow as pa

from django_mysqlqueue import Message, publish_many
from pyspark_mysqlqueue import frames
from pyspark_mysqlqueue.archive.run import Job
from pyspark_mysqlqueue.archive.table import Table
from pyspark_mysqlqueue.log_schema import NAMES
from tests.support.harness import sequence
from tests.support.spark_log import UTC, collected


def held(job: Job, **options: Any) -> list[tuple[Any, ...]]:
    return collected(frames.archive(job.spark, job.place, job.root, **options))


def contents(job: Job) -> list[tuple[Any, ...]]:
    """What every reader of Delta sees, in the log's columns."""
    rows = read(job).select(NAMES).sort_by("offset").to_pylist()
    return [
        tuple(value.astimezone(UTC) if isinstance(value, datetime) else value for value in row.values()) for row in rows
    ]


def read(job: Job) -> pa.Table:
    return Table.open(job.root).delta.to_pyarrow_table()


def some(count: int, topic: str = "t") -> None:
    publish_many(topic, (Message({"n": n}, key=f"k{n % 3}") for n in range(count)))
    sequence()


def parquet(job: Job) -> list[Path]:
    return sorted(Path(job.root.uri).glob("day=*/*.parquet"))


def named(job: Job) -> list[Path]:
    """The files of the table's newest version."""
    return sorted(Path(job.root.uri, file.path) for file in Table.open(job.root).files())


def readings(table: Table) -> Iterator[tuple[int, int]]:
    """Count the rows and the offsets of the table, as its readers do."""
    with duckdb.connect() as duck:
        duck.register("archive", table.delta.to_pyarrow_dataset())
        ((rows, different),) = duck.execute(
            'SELECT COUNT(*), COUNT(DISTINCT (log, epoch, "offset")) FROM archive'
        ).fetchall()
    yield rows, different
    frame = polars.scan_delta(table.delta).select("log", "epoch", "offset").collect()
    yield len(frame), len(frame.unique())
