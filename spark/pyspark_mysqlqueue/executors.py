"""Run work on Spark's executors or, without Spark, in processes of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing import get_context
from typing import TYPE_CHECKING, TypeVar

from pyspark_mysqlqueue import databases
from pyspark_mysqlqueue.databases import URL_VARIABLE
from pyspark_mysqlqueue.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")
R = TypeVar("R")


def spread(spark: SparkSession | None, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Call ``work`` for each item, in one task per item. Spark retries a task that fails.

    Args:
        spark: A classic session (Spark Connect has no RDDs, and its ``mapInArrow`` would need pandas). None: use
            processes of this machine, as many as it has CPUs.
        work: A function that can be pickled.
        items: The arguments.

    Returns:
        The results in the order of the items.

    Raises:
        PipelineError: ``work`` raised it, or an error of the driver or the operating system. It is not retried. Or a
            process was killed.
        Exception: The last error of a task that failed every time.
    """
    if not items:
        return []
    if spark is None:
        with databases.faults():
            return _in_processes(work, items)

    def attempt(item: T) -> list[R] | PipelineError:
        try:
            with databases.faults():
                return [work(item)]
        except PipelineError as error:  # a retry would fail the same way, and Spark would wrap the error in Java's
            return error

    found: list[R] = []
    for result in spark.sparkContext.parallelize(items, len(items)).map(attempt).collect():
        if isinstance(result, PipelineError):
            raise result
        found += result
    return found


def _in_processes(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    pool = _pool(os.environ.get(URL_VARIABLE, ""))
    waiting = [pool.submit(work, item) for item in items]
    try:
        return [one.result() for one in waiting]
    except BrokenProcessPool as error:
        _pool.cache_clear()
        raise PipelineError(
            "a process of this run was killed, perhaps because the machine has too little memory; what was committed "
            "before stays, so run again"
        ) from error
    except BaseException:
        for one in waiting:
            one.cancel()
        raise


@lru_cache(maxsize=1)
def _pool(url: str) -> ProcessPoolExecutor:
    """Return the processes, which know the database of the time when they were started."""
    # A fork of a process with the threads of Arrow or of a database's driver may hang.
    return ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn"))
