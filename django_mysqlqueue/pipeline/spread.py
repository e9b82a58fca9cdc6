"""Work spread over Spark's executors, one item for each task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
R = TypeVar("R")


def spread(spark: SparkSession, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """What ``work`` returns for each item, in their order. Spark runs a failed task again; the last error is raised.

    An RDD: ``mapInArrow`` would need pandas, for nothing. (So the session is a classic one, not Spark Connect's.)
    """
    if not items:
        return []
    return spark.sparkContext.parallelize(items, len(items)).map(work).collect()
