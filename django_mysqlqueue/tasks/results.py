"""Rows of results as ``TaskResult`` of Django's framework."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from typing import Any

from django.utils import timezone

from django_mysqlqueue.service.job_rows import JobRow, lines, moment
from django_mysqlqueue.tasks.framework import AnyResult, AnyTask, InvalidTask, TaskError, TaskResult, TaskResultStatus
from django_mysqlqueue.tasks.importing import find_task


def as_result(row: JobRow, task: AnyTask | None = None, arguments: Mapping[str, Any] | None = None) -> AnyResult:
    """Return a row as a result.

    ``task``: its task, if it is known. ``arguments``: its ``args`` and ``kwargs`` (default: those of the row).

    Raises:
        ImportError: this process has no task with the row's path.
    """
    found = find_task(row.task_path) if task is None else task
    if arguments is None:
        arguments = json.loads(row.arguments)
    result: AnyResult = TaskResult(
        task=_as_enqueued(found, row),
        id=row.id,
        status=TaskResultStatus(row.status),
        enqueued_at=moment(row.enqueued_at),
        started_at=moment(row.started_at),
        finished_at=moment(row.finished_at),
        last_attempted_at=moment(row.last_attempted_at),
        args=arguments["args"],
        kwargs=arguments["kwargs"],
        backend=row.backend,
        errors=errors_of(row.errors),
        worker_ids=lines(row.worker_ids),
    )
    change(result, _return_value=json.loads(row.return_value) if row.return_value else None)
    return result


def errors_of(column: str) -> list[TaskError]:
    """Return the errors in the column ``errors``."""
    return [TaskError(**json.loads(line)) for line in lines(column)]


def timed(task: AnyTask) -> AnyTask:
    """Return a task with its time as it is stored: in milliseconds. A timedelta counts from now.

    Raises:
        InvalidTask: the timedelta is too long, or the time is neither a timedelta nor a datetime.
    """
    at: Any = task.run_after  # The framework documents a timedelta, although its annotation has none.
    if isinstance(at, datetime.timedelta):
        try:
            at = timezone.now() + at
        except OverflowError:
            raise InvalidTask(f"run_after={task.run_after!r} is too far away.") from None
    elif at is None:
        return task
    elif not isinstance(at, datetime.datetime):
        raise InvalidTask(f"run_after={at!r}: must be a datetime or a timedelta{_instead_of(at)}.")
    return _with(task, run_after=in_milliseconds(at))


def _instead_of(number: object) -> str:
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return ""
    return f"; for {number} seconds from now, write run_after=timedelta(seconds={number})"


def in_milliseconds(at: datetime.datetime) -> datetime.datetime:
    """Return a time as it is stored."""
    return at.replace(microsecond=at.microsecond // 1000 * 1000)


def in_queue(task: AnyTask, queue_name: str) -> AnyTask:
    """Return a task with another queue."""
    return _with(task, queue_name=queue_name)


def _as_enqueued(task: AnyTask, row: JobRow) -> AnyTask:
    enqueued = {
        "priority": row.priority,
        "queue_name": row.queue_name,
        "backend": row.backend,
        "run_after": moment(row.run_after),
    }
    if all(getattr(task, name) == value for name, value in enqueued.items()):
        return task  # It is frozen.
    return _with(task, **enqueued)


def _with(task: AnyTask, **values: Any) -> AnyTask:
    """Return a copy of a task with other values. It is not validated: the queue or the backend may be gone by now."""
    copy: AnyTask = object.__new__(type(task))
    change(copy, **{field.name: getattr(task, field.name) for field in dataclasses.fields(task)} | values)
    return copy


def change(frozen: AnyResult | AnyTask, **values: Any) -> None:
    """Change fields of a result or a task, which is frozen, as the framework's own backends do."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)
