"""The topics that are queues of jobs: those that ``TASKS`` names. The tasks that have a rate or a time limit."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from django_mysqlqueue.names.rules import JOB_PREFIX
from django_mysqlqueue.options.delivery_limits import Rate

find: Callable[[], Collection[str]] | None = None
"""Returns the topics; set by the app if there is a framework for tasks."""

find_option: Callable[[str, str, str, str], Any] | None = None
"""Returns an option of jobs, by its name, the alias of the backend, the queue and the path of the task; set by the app
if there is a framework for tasks."""
declared: dict[str, None] = {}
"""The path of each task that this process has declared, in the order of declaration."""

rates: dict[str, Rate] = {}
"""By the path of each task that this process has imported, its rate (``@job(rate=)``), if it has one. It is that of the
key of the task's jobs."""

time_limits: dict[str, float] = {}
"""By the path of each task that this process has imported, its ``@job(max_processing_time=)``, if it has one."""


def option_of(name: str, backend: str, queue_name: str, task_path: str) -> Any:
    """Return an option of the jobs of a task, for those that no ``enqueue()`` makes; None if the task is unknown."""
    return None if find_option is None else find_option(name, backend, queue_name, task_path)


def topics() -> Collection[str]:
    """Return the topics of all queues of jobs; none if there is no framework for tasks."""
    return () if find is None else find()


def is_queue(topic: str) -> bool:
    """Return whether a topic is a queue of jobs. A project may have other topics whose names begin in the same way."""
    return topic.startswith(JOB_PREFIX) and topic in topics()
