"""Results of jobs, as the dashboard shows them."""

from __future__ import annotations

from typing import Any

from django_mysqlqueue.models import JobResult
from tests.support.internals import job_rows

NOW = 1_700_000_000_000
"""When the results begin, in epoch milliseconds."""


def job(name: str, **columns: Any) -> JobResult:
    """A result of the queue ``default``, enqueued at a time that follows from its name if it ends in a number."""
    number = int("".join(one for one in name if one.isdigit()) or 0)
    given = {
        "backend": "default",
        "queue_name": "default",
        "task_path": "shop.tasks.mail",
        "arguments": '{"args": [1], "kwargs": {}}',
        "enqueued_at": NOW + number * 1000,
    }
    return JobResult.objects.create(id=name, **given | columns)


def ended(name: str, status: str = "SUCCESSFUL", *, seconds: float = 1.5, **columns: Any) -> JobResult:
    """A job that started a second after it was enqueued, and has ended."""
    made = job(name, **{"status": status, "worker_ids": "host-7\n"} | columns)
    made.started_at = made.last_attempted_at = made.enqueued_at + 1000
    made.finished_at = int(made.started_at + seconds * 1000)
    made.return_value = columns.get("return_value", "null" if status == "SUCCESSFUL" else "")
    made.save()
    return made


def errors(*texts: str, exception: str = "builtins.ValueError") -> str:
    """The column with these errors."""
    frame = 'Traceback (most recent call last):\n  File "/srv/shop/tasks.py", line 7, in mail\n'
    return "".join(job_rows.error_line(exception, f"{frame}ValueError: {text}\n") for text in texts)
