"""Waiting for jobs, cancelling them, and reading their progress."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from asgiref.sync import sync_to_async
from django.db import connections

from django_mysqlqueue.arguments import checked, sync_only
from django_mysqlqueue.exceptions import TransactionMismatch
from django_mysqlqueue.names.rules import job_topic
from django_mysqlqueue.service import job_progress, job_results, job_rows, scheduling, wakeups
from django_mysqlqueue.service.job_progress import Progress
from django_mysqlqueue.service.job_rows import JobRow
from django_mysqlqueue.sql.session import Session, run
from django_mysqlqueue.tasks.backend import alias_of, by_alias
from django_mysqlqueue.tasks.framework import AnyResult, InvalidTask, TaskResultDoesNotExist
from django_mysqlqueue.tasks.results import as_result, change

SHORTEST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
"""Seconds between two queries of ``wait``."""
OTHERS = 0.1
"""The part of a pause that is left before the next query after the end of a job, which may be another one."""
REFRESHED = ("status", "started_at", "finished_at", "last_attempted_at", "errors", "worker_ids", "_return_value")
"""The fields of a result that change."""


@sync_only("async_wait")
def wait(*results: AnyResult, timeout: float | None = None) -> None:
    """Wait until jobs have ended, and refresh their results.

    The pause between two queries is a tenth of the time that has passed, and at most a second. A query reads the
    statuses of all jobs that have not ended.

    Args:
        results: the results of the jobs.
        timeout: maximum number of seconds to wait; None: no limit.

    Raises:
        TimeoutError: a job has not ended in time. All results are as they were before.
        TransactionMismatch: a transaction of the queue's database is open: the job may have to wait for it to commit,
            and it might not see that the job has ended.
        TaskResultDoesNotExist: there is no result with this id any more.
        InvalidTask: a job of another backend has not ended.
    """
    waiting, ended = _Waiting(results), threading.Event()
    with waiting.woken(ended.set):
        for pause in _pauses(timeout):
            ended.clear()  # Before the query, which may miss what ends after it.
            if waiting.are_over():
                break
            if pause is None:
                raise waiting.timed_out(timeout)
            if ended.wait(pause):
                time.sleep(pause * OTHERS)
    for result in waiting.results:
        result.refresh()


async def async_wait(*results: AnyResult, timeout: float | None = None) -> None:
    """Wait in async code, as ``wait`` does."""
    waiting, ended = await sync_to_async(_Waiting)(results), asyncio.Event()
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # The loop was closed.
            loop.call_soon_threadsafe(ended.set)

    with waiting.woken(wake):
        for pause in _pauses(timeout):
            ended.clear()
            if await sync_to_async(waiting.are_over)():
                break
            if pause is None:
                raise waiting.timed_out(timeout)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), pause)
                await asyncio.sleep(pause * OTHERS)
    for result in waiting.results:
        await result.arefresh()


@checked()
def _pauses(timeout: float | None) -> Iterator[float | None]:
    """Yield the pause before the next query, in seconds; None: the time is over."""
    began = time.monotonic()
    while True:
        passed = time.monotonic() - began
        left = float("inf") if timeout is None else timeout - passed
        yield None if left <= 0 else min(left, LONGEST_PAUSE, max(SHORTEST_PAUSE, passed / 10))


class _Waiting:
    """The jobs that have not ended, by database."""

    def __init__(self, results: Sequence[AnyResult]) -> None:
        self._ids: dict[str, set[str]] = {}
        for result in results:
            if not _is_ours(result) and not result.is_finished:
                raise InvalidTask(f"The backend {result.backend!r} of TASKS is not a MySQLQueueBackend.")
        self.results = [result for result in results if _is_ours(result)]
        for result in self.results:
            self._ids.setdefault(alias_of(result), set()).add(result.id)
        for alias in self._ids:
            if connections[alias].in_atomic_block:
                raise TransactionMismatch(
                    f"wait() in a transaction of {alias!r}: a job that it has enqueued cannot start before it commits. "
                    "Wait after the transaction."
                )

    @contextlib.contextmanager
    def woken(self, wake: Callable[[], object]) -> Iterator[None]:
        """Call a function whenever jobs have ended in one of the databases."""
        with contextlib.ExitStack() as stack:
            for alias in self._ids:
                stack.callback(wakeups.Listening(alias, [wakeups.RESULTS], wake).stop)
            yield

    def are_over(self) -> bool:
        """Return whether all jobs have ended."""
        for alias, ids in self._ids.items():
            found = job_rows.statuses(Session(alias), ids)
            for missing in ids - set(found):
                raise TaskResultDoesNotExist(missing)
            ids -= {job for job, status in found.items() if status in (job_rows.SUCCESSFUL, job_rows.FAILED)}
        return not any(self._ids.values())

    def timed_out(self, timeout: float | None) -> TimeoutError:
        left = sorted(set().union(*self._ids.values()))
        others = f" and {len(left) - 1} others" if len(left) > 1 else ""
        return TimeoutError(f"The job {left[0]}{others} did not end within {timeout:g} s.")


@sync_only("acancel_job")
def cancel_job(result: AnyResult) -> None:
    """Cancel a job that waits, or ask one that runs to stop, and refresh its result.

    A job that waits has FAILED then, with ``JobCancelled``. One that runs stays RUNNING until its task stops, which has
    to look at ``context.cancelled``; if the attempt fails, or its subscriber is lost, it is not retried. A job that has
    ended stays as it is.

    This is part of the open transaction of the queue's database, if there is one. Commit it soon: subscribers wait for
    it to store the outcome of the job, and in a chain that of each job of its stage. If it cancels several jobs of a
    chain, begin with those of the earliest stage: otherwise it may end with a deadlock.

    Args:
        result: the result of the job. One of another backend is left as it is.

    Raises:
        TaskResultDoesNotExist: there is no result with this id any more.
        OperationRefused: the job is scheduled, and the open transaction is at SERIALIZABLE.
    """
    if not _is_ours(result):
        return
    alias = alias_of(result)

    def write(session: Session) -> JobRow:
        if result.task.run_after is not None:
            scheduling.cancel(result.id, topic=job_topic(result.task.queue_name), using=alias)
        job_results.request_cancel(session, [result.id])
        # Under lock: the snapshot of the transaction may be older.
        row = _row(session, result, session.dialect.for_update)
        if row.retry_at and row.is_finished:
            topic = job_topic(row.queue_name)
            scheduling.remove(session, list(scheduling.find(session, [topic], [row.id])), wait=False)
        return row

    now = as_result(run(alias, write), result.task)
    change(result, **{name: getattr(now, name) for name in REFRESHED})


async def acancel_job(result: AnyResult) -> None:
    """Cancel a job from async code, as ``cancel_job`` does, in a transaction of its own."""
    await sync_to_async(cancel_job)(result)


def progress_of(result: AnyResult) -> Progress | None:
    """Return the progress that the current attempt of a job, or the last one, has reported; None if there is none.

    Args:
        result: the result of the job. Jobs of other backends have none.

    Raises:
        TaskResultDoesNotExist: there is no result with this id any more.
    """
    if not _is_ours(result):
        return None
    return job_progress.decode(_row(Session(alias_of(result)), result).progress)


@checked()
def _is_ours(result: AnyResult) -> bool:
    return result.backend in by_alias()


def _row(session: Session, result: AnyResult, lock: str = "") -> JobRow:
    row = job_rows.read(session, [result.id], lock).get(result.id)
    if row is None:
        raise TaskResultDoesNotExist(result.id)
    return row
