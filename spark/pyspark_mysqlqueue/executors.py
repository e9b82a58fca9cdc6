"""Run work on Spark's executors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from pyspark_mysqlqueue.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
R = TypeVar("R")


def spread(spark: SparkSession, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Call ``work`` for each item, in one Spark task per item. Spark retries a task that fails.

    Args:
        spark: A classic session. Spark Connect has no RDDs, and its ``mapInArrow`` would need pandas.
        work: A function that Spark can pickle.
        items: The arguments.

    Returns:
        The results in the order of the items.

    Raises:
        PipelineError: ``work`` raised it. It is not retried.
        Exception: The last error of a task that failed every time.
    """
    if not items:
        return []

    def attempt(item: T) -> list[R] | PipelineError:
        try:
            return [work(item)]
        except PipelineError as error:  # a retry would fail the same way, and Spark would wrap the error in Java's
            return error

    found: list[R] = []
    for result in spark.sparkContext.parallelize(items, len(items)).map(attempt).collect():
        if isinstance(result, PipelineError):
            raise result
        found += result
    return found
