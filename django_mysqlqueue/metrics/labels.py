"""The values of the label ``task``."""

from __future__ import annotations

from django_mysqlqueue.options import job_queues

TASKS = 200
"""Maximum number of tasks with a label of their own."""
OTHER = "other"
"""The label of all other tasks."""


class TaskLabels:
    """The labels of tasks: the paths of the first that the process has declared, as it knows them now."""

    def __init__(self) -> None:
        self._named = frozenset(list(job_queues.declared)[:TASKS])

    def of(self, task: str) -> str:
        """Return the label of the task with a path."""
        return task if task in self._named else OTHER
