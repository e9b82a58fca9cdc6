"""Jobs in tests: the jobs that were enqueued, and a context to call a task with."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Sequence
from typing import Any

from django_mysqlqueue.arguments import shown
from django_mysqlqueue.models import JobResult, OutboxMessage, QueueMessage
from django_mysqlqueue.names.ids import new_message_id
from django_mysqlqueue.names.rules import job_topic
from django_mysqlqueue.service import job_progress, job_rows
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.job_progress import Progress
from django_mysqlqueue.service.job_rows import JobRow
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.tasks.attempts import Attempt, JobContext
from django_mysqlqueue.tasks.backend import by_alias, with_backend
from django_mysqlqueue.tasks.framework import AnyResult, AnyTask, Task, normalize_json
from django_mysqlqueue.tasks.options import options_of
from django_mysqlqueue.tasks.results import as_result

MOST_ATTEMPTS = 10_000


class RecordingContext(JobContext):
    """The context of a task in a test, which reads no database.

    Attributes:
        reports: each progress that the task has reported, in order.
        retries: the delay in seconds and the reason of each ``retry()``, in order.
    """

    reports: list[Progress]
    retries: list[tuple[float, str]]
    _stopping: bool
    _previous: list[AnyResult]

    def __init__(
        self, attempt: Attempt, task_result: AnyResult, previous: list[AnyResult], *, stopping: bool = False
    ) -> None:
        super().__init__(attempt, task_result)
        # The context is frozen.
        object.__setattr__(self, "reports", [])
        object.__setattr__(self, "retries", [])
        object.__setattr__(self, "_stopping", stopping)
        object.__setattr__(self, "_previous", previous)

    def progress(self, done: float, total: float | None = None, message: str = "") -> None:
        """Report progress, which is recorded in ``reports``."""
        super().progress(done, total, message)
        found = job_progress.decode(self._attempt.progress)
        assert found is not None  # noqa: S101  # It has just been set.
        self.reports.append(found)

    def retry(self, delay: float | datetime.timedelta = 0, *, reason: str = "") -> None:
        """Ask for the next call of the task, which is recorded in ``retries``."""
        super().retry(delay, reason=reason)
        assert self._attempt.again is not None  # noqa: S101  # It has just been set.
        self.retries.append((self._attempt.again.delay_ms / 1000, reason))

    @property
    def stopping(self) -> bool:
        """Whether the process is stopping, as the test has said."""
        return self._stopping

    def previous_results(self) -> list[AnyResult]:
        """Return the results that the test has given."""
        return self._previous


def make_context(
    task: AnyTask, *, attempt: int, cancelled: bool, stopping: bool, previous: Iterable[Any]
) -> RecordingContext:
    """Return the context of an attempt of a job, after as many failures as it takes.

    ``previous``: the return values of the jobs of the stage before in its chain.

    Raises:
        ValueError: an argument breaks a rule. The text names it.
    """
    _require_task(task)
    if not 1 <= attempt <= MOST_ATTEMPTS:
        raise ValueError(f"attempt {attempt}: must be from 1 to {MOST_ATTEMPTS:,}")
    now = time.time_ns() // 1_000_000
    row = JobRow(
        id=new_message_id(),
        backend=task.backend,
        queue_name=task.queue_name,
        task_path=task.module_path,
        arguments=job_rows.as_json({"args": [], "kwargs": {}}),
        priority=task.priority,
        run_after=0,
        status=job_rows.RUNNING,
        enqueued_at=now,
        started_at=now,
        last_attempted_at=now,
        finished_at=0,
        return_value="",
        errors=job_rows.error_line("builtins.Exception", "") * (attempt - 1),
        worker_ids="test\n" * attempt,
        progress="",
        cancel_requested_at=0,
        stage="",
        expires_in=0,
        retry_at=0,
        retry_since=0,
        redriven_id="",
    )
    backend = by_alias().get(task.backend)
    of_queue = {} if backend is None else backend.queue_options.get(task.queue_name, {})
    result = as_result(row, task)
    made = Attempt(
        queue_alias(topic=job_topic(task.queue_name)),
        row,
        clock=time.monotonic(),
        now_ms=now,
        published_at=now,
        number=attempt,
        task=task,
        options=options_of(task.func, of_queue),
        result=result,
        started_at=now,
        is_monitored=True,  # Otherwise ``cancelled`` would ask the database.
        cancelled=cancelled,
    )
    return RecordingContext(made, result, [_successful(row, task, value) for value in previous], stopping=stopping)


def _require_task(task: object) -> None:
    if not isinstance(task, Task):
        raise ValueError(f"task {shown(task)}: must be a task")


def _successful(row: JobRow, task: AnyTask, value: Any) -> AnyResult:
    try:
        text = job_rows.as_json(normalize_json(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"previous_results {shown(value)}: must be JSON-serializable: {error}") from error
    return as_result(row._replace(id=new_message_id(), status=job_rows.SUCCESSFUL, return_value=text), task)


def enqueued_in(aliases: Sequence[str], task: AnyTask | None) -> list[AnyResult]:
    """Return the results of a task's jobs, or of all, in the order in which their messages were published.

    Jobs of later stages of a chain, which have no message yet, come last.

    Raises:
        ValueError: ``task`` is not a task.
    """
    if task is not None:
        _require_task(task)
    return [result for alias in aliases for result in _enqueued(alias, task)]


def _enqueued(alias: str, task: AnyTask | None) -> list[AnyResult]:
    jobs = JobResult.objects.using(alias).all()
    if task is not None:
        jobs = jobs.filter(task_path=task.module_path)
    rows = job_rows.read(Session(alias), jobs.values_list("id", flat=True))
    places: dict[str, int] = {}
    for model, order in ((QueueMessage, "offset"), (OutboxMessage, "outbox_id")):
        messages = model._default_manager.using(alias).filter(failed_group="").order_by(order)
        for message in messages.values_list("message_id", flat=True):
            places.setdefault(message, len(places))
    ordered = sorted(rows, key=lambda job: (places.get(job, len(places)), job))
    return [as_result(with_backend(rows[job]), task) for job in ordered]
