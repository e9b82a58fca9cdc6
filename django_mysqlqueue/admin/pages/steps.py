"""Steps in the history of a message or job, as its page shows them."""

from __future__ import annotations

from dataclasses import dataclass

from django.utils.translation import gettext as _

from django_mysqlqueue.admin.context import DashboardContext
from django_mysqlqueue.admin.formatting import last_line
from django_mysqlqueue.inspection import LogMessage, jobs
from django_mysqlqueue.names.ids import schedule_of
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.topics import first_topic
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.escaping import visible


@dataclass(frozen=True, slots=True)
class Step:
    """An event of the message's history, or its current state."""

    text: str
    at: str = ""
    css: str = ""
    error: str = ""
    traceback: str = ""
    anchor: str = ""
    """Id of the traceback's element, so that it stays open when the page refreshes itself."""
    link: str = ""
    link_text: str = ""


def error_parts(error: str) -> tuple[str, str]:
    """Return the last line of an error, and the whole error if it has others."""
    line = last_line(error)
    return line, error if error.strip() != line else ""


def recurring_steps(dashboard: DashboardContext, message_id: str) -> list[Step]:
    """Return a link to the recurring schedules, if a message or job is a run of one."""
    name = schedule_of(message_id)
    if not name:
        return []
    text = _("This is a run of the recurring schedule %(name)s.") % {"name": name}
    return [Step(text, link=dashboard.url("recurring"), link_text=_("Open recurring schedules"))]


def job_steps(session: Session, dashboard: DashboardContext, entry: LogMessage) -> list[Step]:
    """Return a link to the job that a message carries, if its topic is a queue of jobs and it has a result."""
    if not job_queues.is_queue(first_topic(entry.topic)):
        return []
    return [
        Step(
            _("This message is a job of the task %(task)s.") % {"task": visible(job.task)},
            link=dashboard.url("job", id=job.id, topic=job.topic),
            link_text=_("Open job"),
        )
        for job in jobs.summaries(session, [entry.original_id or entry.message_id]).values()
    ]
