"""An attempt of a job, and the context that its task gets."""

from __future__ import annotations

import asyncio
import datetime
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from django_mysqlqueue.db.sizes import RETRY_REASON_LENGTH
from django_mysqlqueue.runtime import stopping
from django_mysqlqueue.service import job_progress, job_rows, job_stages
from django_mysqlqueue.service.deliveries import JobEnd, JobRetry
from django_mysqlqueue.service.job_rows import JobRow, StartedJob
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.retry_later import RetryLater
from django_mysqlqueue.tasks.backend import with_backend
from django_mysqlqueue.tasks.exceptions import RetriedTooLong
from django_mysqlqueue.tasks.framework import AnyResult, AnyTask, TaskContext, TaskResultDoesNotExist
from django_mysqlqueue.tasks.options import JobOptions
from django_mysqlqueue.tasks.results import as_result

LONGEST_RETRIES = 86_400
"""Seconds for which a job may wait for attempts without counting any."""


class Again(NamedTuple):
    """A task's wish to be called again after this call, which was no attempt."""

    delay_ms: int
    reason: str
    end: JobEnd


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt of a job, from its claim on."""

    using: str
    """Alias of the queue's database."""
    row: JobRow
    """The row of its result, after the claim, with the ``last_attempted_at`` of the attempt before."""
    clock: float
    """When it was claimed, by the monotonic clock."""
    now_ms: int
    """The same by the database's clock, in epoch milliseconds."""
    published_at: int
    """When its message entered the log, in epoch milliseconds."""
    number: int = 1
    """The number of the attempt of its message, from 1: losses count, too."""
    message: str = ""
    """The id of its message."""
    is_locked: bool = False
    """Whether another transaction had locked the result when the job was claimed."""
    is_second: bool = False
    """Whether the claim has another message of the job, which comes first."""
    task: AnyTask | None = None
    options: JobOptions | None = None
    result: AnyResult | None = None
    started_at: int = 0
    returned: Any = None
    """The return value."""
    value: str = ""
    """The return value as JSON."""
    progress: str = ""
    """The last progress, as JSON."""
    stored: StartedJob | None = None
    """What the monitor has stored."""
    is_monitored: bool = False
    """Whether a monitor stores its progress, and looks for requests to stop."""
    asks: bool = False
    """Whether the task wants to know whether it is to stop."""
    cancelled: bool = False
    """Whether the job was asked to stop, as far as this process knows."""
    again: Again | None = None
    """The task's wish to be called again."""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to call: the job has ended, or another message waits or runs in place of this."""
        return self.row.is_finished or not self.row.is_run_by((self.message,))

    @property
    def is_blocked(self) -> bool:
        """Whether it cannot start now."""
        return self.is_locked or self.is_second

    def now(self) -> int:
        """Return the database's time in epoch milliseconds."""
        return self.now_ms + round((time.monotonic() - self.clock) * 1000)

    @property
    def _first_start(self) -> int:
        return self.started_at if self.row.worker_ids.count("\n") == 1 else 0

    @property
    def lost(self) -> list[bool]:
        """Whether each error since the job was last restarted is the loss of a subscriber."""
        lost = f'"{job_rows.EXCEPTIONS}.WorkerLost"'
        return [lost in line for line in job_rows.since_restart(self.row.errors)]

    @property
    def losses(self) -> int:
        """How many subscribers were lost while they handled the job, after the first one, which costs nothing."""
        return max(0, self.number - 1 - self.lost.count(False))

    @property
    def counted(self) -> int:
        """The number of the attempt, from 1, as ``max_attempts`` counts it: without losses."""
        return self.number - self.losses

    @property
    def max_attempts(self) -> int | None:
        """The number of failed attempts after which the job has FAILED; None: no limit."""
        return (self.options or JobOptions()).max_attempts

    def started(self) -> StartedJob:
        """Return what is to be stored while it runs."""
        return StartedJob(self.row.id, self._first_start, self.started_at, self.progress)

    def end(self, errors: str | None = None) -> JobEnd:
        """Return what it leaves for the result."""
        return JobEnd(
            self.row.id,
            self._first_start,
            self.started_at,
            self.value,
            errors,
            self.progress or None,
            stage=self.row.stage,
        )

    def taken_back(self) -> JobEnd:
        """Return what makes the result that of the attempt before."""
        *earlier, _ = job_rows.lines(self.row.worker_ids)
        workers = "".join(f"{worker}\n" for worker in earlier)
        return JobEnd(self.row.id, attempted_at=self.row.last_attempted_at, worker_ids=workers)

    def retry(self, delay_ms: int, reason: str = "", since: int = 0) -> JobRetry:
        """Return a wait for the next attempt. ``since``: as in ``JobRetry``."""
        return JobRetry(self.now() + delay_ms, _cut(reason), since)

    def uncounted(self, delay_ms: int, reason: str) -> JobEnd:
        """Return the end of an attempt that does not count.

        Raises:
            RetriedTooLong: the job would have waited for too long so.
        """
        now = self.now()
        since = self.row.retry_since or now
        if now + delay_ms > since + LONGEST_RETRIES * 1000:
            began = job_rows.moment(since)
            raise RetriedTooLong(
                f"delay={delay_ms / 1000:g}: the job has asked since {began:%Y-%m-%d %H:%M:%S} for attempts without "
                f"counting any, and may wait for {LONGEST_RETRIES} s (a day) in all so."
            )
        return self.taken_back()._replace(progress=self.progress or None, retry=self.retry(delay_ms, reason, since))


class JobContext(TaskContext):
    """The context of a task with ``takes_context=True``."""

    __slots__ = ("_attempt",)

    _attempt: Attempt

    def __init__(self, attempt: Attempt, task_result: AnyResult) -> None:
        super().__init__(task_result=task_result)
        object.__setattr__(self, "_attempt", attempt)

    def progress(self, done: float, total: float | None = None, message: str = "") -> None:
        """Report progress. It is stored at most once per second, on a connection of its own, and with the outcome.

        Call it as often as you like: it costs no query. With SQLite, that of an atomic job is stored at its end.

        Args:
            done: how much is done, in any unit.
            total: how much there is to do, in the same unit; None if that is unknown.
            message: a text for people. Only its first 200 characters are stored.

        Raises:
            ValueError: a number is negative or not finite, or ``total`` is 0.
            TypeError: it is not a number.
        """
        self._attempt.progress = job_progress.encode(done, total, message, self._attempt.now())

    @property
    def attempt(self) -> int:
        """The number of the attempt, from 1, as ``max_attempts`` counts it: one more than attempts have failed.

        It begins at 1 again after a redrive.
        """
        return self._attempt.counted

    @property
    def max_attempts(self) -> int | None:
        """The number of failed attempts after which the job has FAILED, or None for no limit."""
        return self._attempt.max_attempts

    @property
    def is_last_attempt(self) -> bool:
        """Whether the job has FAILED if this attempt fails.

        An atomic job that fails because of the database is retried even so.
        """
        most = self._attempt.max_attempts
        return most is not None and self._attempt.counted >= most

    @property
    def losses(self) -> int:
        """How many subscribers were lost after they had claimed the job. No attempt counts them.

        A job that loses its subscriber ``max_attempts`` times after the first has FAILED, independent of its attempts.
        """
        return sum(self._attempt.lost)

    @property
    def stopping(self) -> bool:
        """Whether the process is stopping: after SIGTERM, for example. Then ``SHUTDOWN_TIMEOUT`` is left for the task.

        It costs no query.
        """
        return stopping.is_asked()

    @property
    def cancelled(self) -> bool:
        """Whether the job was asked to stop (``cancel_job()``). The answer is about a second old at most.

        A task that stops should raise ``JobCancelled``: then an atomic job is rolled back, and the job is not retried.
        """
        attempt = self._attempt
        attempt.asks = True
        if not attempt.is_monitored and not attempt.cancelled and not _is_in_event_loop():
            attempt.cancelled = bool(job_rows.cancel_requested(Session(attempt.using), [attempt.row.id]))
        return attempt.cancelled

    def retry(self, delay: float | datetime.timedelta = 0, *, reason: str = "") -> None:
        """Let the task be called again after a delay. Call this as its last act, and return.

        The job keeps its result, and no attempt is counted. What an atomic task has written commits together with the
        wait. If the delivery was revoked meanwhile, both are rolled back. The return value is not stored. If the task
        raises an exception afterwards, that counts. To roll back, raise ``RetryLater``.

        Args:
            delay: time until the next call, in seconds or as a timedelta.
            reason: why, for people.

        Raises:
            InvalidMessage: an argument breaks a rule, which the error names.
            RetriedTooLong: the job would wait without counting attempts for more than a day in all.
        """
        asked = RetryLater(delay, reason=reason, counts=False)
        end = self._attempt.uncounted(asked.delay_ms, reason)
        self._attempt.again = Again(asked.delay_ms, reason, end)

    def previous_results(self) -> list[AnyResult]:
        """Return the results of the stage before the one of this job in its chain, in order; outside a chain, none.

        Raises:
            TaskResultDoesNotExist: one of them was deleted after ``RESULTS_RETENTION``.
            ImportError: this process does not have one of their tasks.
        """
        stage = self._attempt.row.stage
        if not stage or stage.endswith(job_stages.FIRST):
            return []
        session = Session(self._attempt.using)
        before = job_stages.before(session, stage)
        if before is None:
            raise TaskResultDoesNotExist(f"the stage before {stage}")
        rows = job_rows.read(session, before.job_ids)
        for job in before.job_ids:
            if job not in rows:
                raise TaskResultDoesNotExist(job)
        return [as_result(with_backend(rows[job])) for job in before.job_ids]


def _cut(reason: str) -> str:
    """Return a reason that fits its column, and that UTF-8 can encode."""
    return reason.encode("utf-8", "backslashreplace").decode()[:RETRY_REASON_LENGTH]


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
