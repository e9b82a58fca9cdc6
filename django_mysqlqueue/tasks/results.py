"""Rows of results as ``TaskResult`` of Django's framework."""

from __future__ import annotations

import datetime
import json
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string

from django_mysqlqueue.service.job_results import JobRow
from django_mysqlqueue.tasks.framework import AnyResult, AnyTask, InvalidTask, TaskError, TaskResult, TaskResultStatus


def find_task(path: str) -> AnyTask:
    """Return the task with a dotted path.

    Raises:
        ImportError: there is nothing with this path.
        InvalidTask: it is not a task.
    """
    found: AnyTask = import_string(path)
    # Not isinstance: a backend may have a class of tasks of its own.
    if not hasattr(found, "get_backend") or not hasattr(found, "using"):
        raise InvalidTask(f"{path} is not a task: {found!r}")
    return found


def as_result(row: JobRow, task: AnyTask | None = None) -> AnyResult:
    """Return a row as a result.

    Args:
        row: the row.
        task: its task, if it is known.

    Raises:
        ImportError: this process has no task with the row's path.
    """
    found = find_task(row.task_path) if task is None else task
    arguments = json.loads(row.arguments)
    result: AnyResult = TaskResult(
        task=found.using(
            priority=row.priority,
            queue_name=row.queue_name,
            backend=row.backend,
            run_after=moment(row.run_after),
        ),
        id=row.id,
        status=TaskResultStatus(row.status),
        enqueued_at=moment(row.enqueued_at),
        started_at=moment(row.started_at),
        finished_at=moment(row.finished_at),
        last_attempted_at=moment(row.last_attempted_at),
        args=arguments["args"],
        kwargs=arguments["kwargs"],
        backend=row.backend,
        errors=[TaskError(**json.loads(line)) for line in row.errors.splitlines()],
        worker_ids=row.worker_ids.splitlines(),
    )
    change(result, _return_value=json.loads(row.return_value) if row.return_value else None)
    return result


def change(result: AnyResult, **values: Any) -> None:
    """Change fields of a result, which is frozen, as the framework's own backends do."""
    for name, value in values.items():
        object.__setattr__(result, name, value)


def moment(milliseconds: int) -> datetime.datetime | None:
    """Return epoch milliseconds as a datetime, aware if ``USE_TZ`` is True; None for 0."""
    if not milliseconds:
        return None
    seconds = milliseconds / 1000
    if settings.USE_TZ:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return datetime.datetime.fromtimestamp(seconds)  # noqa: DTZ006  # As Django's timezone.now().
