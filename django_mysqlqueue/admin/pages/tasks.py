"""The list of tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.admin.pages.jobs import JobsPage
from django_mysqlqueue.admin.permissions import visible
from django_mysqlqueue.inspection import TaskSummary, summarize_tasks
from django_mysqlqueue.options import job_queues


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task in the table."""

    task: TaskSummary
    error: str
    """The last error, redacted."""
    rate: str
    """The rate of the task, if it has one and this process has imported it."""


class TasksPage(Page):
    """The list of tasks, for users who may view all topics: a task can have jobs in any queue."""

    name = "tasks"
    title = gettext_lazy("Tasks")
    pause = 10

    @classmethod
    def is_in_menu(cls) -> bool:
        return JobsPage.is_in_menu()

    @classmethod
    def may_open(cls, request: HttpRequest) -> bool:
        return None in visible(request).topics.values()

    def context(self) -> dict[str, Any]:
        found = summarize_tasks(using=self.using, bounds=self.bounds)
        return {
            "rows": [self._row(task) for task in found.tasks],
            "listing": found,
            "most": f"{self.bounds.job_tasks:,}",
        }

    def _row(self, task: TaskSummary) -> TaskRow:
        error = self.errors.line(task.error, task.failed_topic, task.error_is_cut) if task.failed_job else ""
        rate = job_queues.rates.get(task.task)
        return TaskRow(task, error, "" if rate is None else str(rate))
