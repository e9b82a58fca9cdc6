"""The list of jobs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.csv_export import ROWS_AT_ONCE, Export
from django_mysqlqueue.admin.formatting import moment
from django_mysqlqueue.admin.pages.base import PAGE_ROWS, Page
from django_mysqlqueue.inspection import JobListing, JobSummary, count_jobs, jobs
from django_mysqlqueue.inspection.jobs import STATUSES, JobFilter
from django_mysqlqueue.models import JobResult
from django_mysqlqueue.names.rules import JOB_PREFIX
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.topics import first_topic
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.text.escaping import visible
from django_mysqlqueue.text.humanize import duration

LABELS = dict(JobResult.Status.choices)
CSS = {"READY": "", "RUNNING": "mq-busy", "FAILED": "mq-bad", "SUCCESSFUL": "mq-ok"}


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job in the table."""

    job: JobSummary
    status: str
    css: str
    took: str
    waits: str
    """Until when it waits for its next attempt, and why; empty: it does not."""


def label_of(status: str) -> str:
    """Return the label of a status. Plain SQL may have stored others."""
    return str(LABELS.get(status, status))


def took(job: JobSummary, now: int) -> str:
    """Return the duration of a job's last attempt, or of the one that has not ended; empty if it is not known."""
    if job.status == "RUNNING" and job.started_at and job.attempts == 1:
        return _("%(time)s so far") % {"time": duration((now - job.started_at) / 1000)}
    return "" if job.took_ms is None else duration(job.took_ms / 1000)


def waits_until(job: JobSummary, *, with_reason: bool) -> str:
    """Return until when a job waits for its next attempt, and why."""
    if job.retry_reason and with_reason:
        text = _("waits until %(time)s: %(reason)s")
        return text % {"time": moment(job.retry_at), "reason": visible(job.retry_reason)}
    return _("waits until %(time)s") % {"time": moment(job.retry_at)}


class JobsPage(Page):
    """The list of jobs."""

    name = "jobs"
    title = gettext_lazy("Jobs")
    filters = ("status", "task", "topic", "since", "until", "id")
    position = "after"
    shows_several_topics = True
    exports = True

    @classmethod
    def is_in_menu(cls) -> bool:
        try:
            return bool(job_queues.topics())
        except ImproperlyConfigured:
            return True  # The page shows the reason. The others do not need TASKS.

    def context(self) -> dict[str, Any]:
        self._choose_topic()
        status = self._status()
        tasks = self._tasks()
        found = self._found(status, tasks, after=self._after(), limit=PAGE_ROWS)
        return {
            "rows": [self._row(job) for job in found.jobs],
            "operable": self.operable(job.topic for job in found.jobs if not job.has_ended),
            "cancels_task": self.about if self.text("task") and self.about and self.operable([self.about]) else None,
            "listing": found,
            "next_place": None if found.after is None else f"{found.after[0]}:{found.after[1]}",
            "order_text": self._order(status),
            "by_end": JobFilter(status).by_end,
            "status": status or "",
            "statuses": [(one, label_of(one)) for one in STATUSES],
            "topic": self.about or "",
            "topics": self._topics(),
            # The browser shows them, and sends them as they are.
            "tasks": [task for task in (tasks or [])[: self.bounds.job_tasks] if visible(task) == task],
            "counts": [] if tasks is None or self.is_filtered else self._counts(),
            "searched": f"{self.bounds.jobs:,}",
            "merged": f"{self.bounds.job_tasks:,}",
        }

    def _choose_topic(self) -> None:
        topic = self.text("topic")
        self.about = None if topic is None else first_topic(topic)

    def _status(self) -> str | None:
        status = (self.text("status") or "").upper()
        return status if status in STATUSES else self.choice("status", STATUSES)

    def _tasks(self) -> list[str] | None:
        """Return the names of all tasks; None if the user may not view all topics: names belong to their queues."""
        return jobs.tasks(self.session, bounds=self.bounds) if self.topics_to_view() is None else None

    def export(self) -> Export:
        self._choose_topic()
        status = self._status()

        def read(after: tuple[int, str] | None) -> tuple[Iterable[tuple[Any, ...]], tuple[int, str] | None]:
            found = self._found(status, self._tasks(), after=after, limit=ROWS_AT_ONCE)
            return map(self._cells, found.jobs), found.after

        header = (
            *(_("id"), _("task"), _("status"), _("queue"), _("priority"), _("enqueued"), _("started"), _("finished")),
            *(_("milliseconds"), _("attempts")),
        )
        return Export("jobs", header, self.read_pages(read, self._after()))

    @staticmethod
    def _cells(job: JobSummary) -> tuple[Any, ...]:
        times = (moment(job.enqueued_at), moment(job.started_at), moment(job.finished_at))
        took = "" if job.took_ms is None else job.took_ms
        return job.id, job.task, label_of(job.status), job.queue, job.priority, *times, took, job.attempts

    def _found(
        self, status: str | None, tasks: list[str] | None, *, after: tuple[int, str] | None, limit: int
    ) -> JobListing:
        """Return the page of the list, or the job with the id of the query string."""
        topics = self.topics_to_view() if self.about is None else frozenset({self.about})
        job_id = self.text("id")
        if job_id is not None:
            one = jobs.summaries(self.session, [job_id]).values()
            shown = tuple(job for job in one if topics is None or job.topic in topics)
            return JobListing(shown, None, whole=True)
        since, until = self.period()
        queues = None if topics is None else jobs.queues_of(topics)
        wanted = JobFilter(status, self.text("task"), queues, since, until)
        return jobs.look(self.session, wanted, after=after, limit=limit, known=tasks, bounds=self.bounds)

    def _after(self) -> tuple[int, str] | None:
        text = self.text("after")
        if text is None:
            return None
        at, colon, job_id = text.partition(":")
        digits = at.removeprefix("-")
        if not (colon and digits.isascii() and digits.isdecimal() and len(digits) < 20):
            self.no_position()
        return max(jobs.FIRST, min(int(at), jobs.LAST)), job_id

    def _topics(self) -> list[tuple[str, str]]:
        """Return the topics of the queues to choose from, with the names of the queues."""
        named = () if self.about is None else (self.about,)
        found = {topic for topic in (*job_queues.topics(), *named) if self.may_view(topic)}
        return [(topic, topic.removeprefix(JOB_PREFIX)) for topic in sorted(found)]

    def _counts(self) -> list[tuple[str, str, Count]]:
        """Return the statuses with their labels and numbers of jobs."""
        counts = count_jobs(using=self.using, bounds=self.bounds)
        return [(status, label_of(status), counts[status]) for status in STATUSES]

    @staticmethod
    def _order(status: str | None) -> str:
        if status is None:
            return _("last enqueued first")
        if JobFilter(status).by_end:
            return _("last finished first")
        if status == JobResult.Status.RUNNING:
            return _("including prefetched ones, in descending order of their ids")
        return _("in descending order of their ids")

    def _row(self, job: JobSummary) -> JobRow:
        waits = waits_until(job, with_reason=self.errors.shows(job.topic)) if job.waits_at(self.now) else ""
        return JobRow(job, label_of(job.status), CSS.get(job.status, ""), took(job, self.now), waits)
