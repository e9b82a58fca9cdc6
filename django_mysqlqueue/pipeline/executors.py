"""Work spread over Spark's executors, one item for each task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from django_mysqlqueue.pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
R = TypeVar("R")


def spread(spark: SparkSession, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """What ``work`` returns for each item, in their order. Spark runs a failed task again; the last error is raised.

    A ``PipelineError`` is raised at once, as it is.

    An RDD: ``mapInArrow`` would need pandas, for nothing. (So the session is a classic one, not Spark Connect's.)
    """
    if not items:
        return []

    def attempt(item: T) -> list[R] | PipelineError:
        try:
            return [work(item)]
        except PipelineError as error:  # another try would end the same way, and Spark would wrap it up in Java
            return error

    found: list[R] = []
    for result in spark.sparkContext.parallelize(items, len(items)).map(attempt).collect():
        if isinstance(result, PipelineError):
            raise result
        found += result
    return found
