"""The page of a job."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.db import connections
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_mysqlqueue.admin import charts, contents
from django_mysqlqueue.admin.context import BadQuery
from django_mysqlqueue.admin.formatting import SHOWN_CHARACTERS, moment
from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.admin.pages.jobs import CSS, label_of, took, waits_until
from django_mysqlqueue.admin.pages.steps import Step, error_parts, recurring_steps
from django_mysqlqueue.inspection import JobDetails, JobError, JobSummary, jobs, message_history
from django_mysqlqueue.inspection.subscribers import read_subscribers
from django_mysqlqueue.models import DeliveryEvent
from django_mysqlqueue.names.rules import JOB_GROUP
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service import job_stages
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.wakeups import RESULTS, Listening
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.escaping import visible
from django_mysqlqueue.text.humanize import duration

SHOWN_ERRORS = 20
SHOWN_SUBSCRIBERS = 20
WAIT = 3.0
"""Seconds for which a refresh waits for the end of a job."""
_waiting = threading.BoundedSemaphore(4)
"""How many threads of a process do so: the others are for other requests."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """An error on the page."""

    number: int
    """Its place among the errors of the job, from 1."""
    exception: str
    line: str
    traceback: str
    """Empty if it has no more than the line, or if the user may not view it."""


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the job's time."""

    css: str
    name: str
    milliseconds: int

    @property
    def time(self) -> str:
        return duration(self.milliseconds / 1000)


class JobPage(Page):
    """The page of a job."""

    name = "job"
    title = gettext_lazy("Job")
    in_menu = False

    def heading(self) -> str:
        job_id = self.text("id")
        return str(self.title) if job_id is None else _("Job %(id)s") % {"id": visible(job_id[:200])}

    def context(self) -> dict[str, Any]:
        job_id = self.text("id")
        if job_id is None:
            raise BadQuery(_("The parameter %(name)s is required.") % {"name": "id"})
        self.about = self.text("topic")
        session = self.session
        found = self._read(job_id)
        if found is None or (self.about is not None and found.summary.queue not in jobs.queues_of([self.about])):
            return {"job": None}
        job = found.summary
        self.about = job.topic
        self.live = not job.has_ended
        spans = list(self._spans(job))
        return {
            "job": job,
            "status": label_of(job.status),
            "css": CSS.get(job.status, ""),
            "took": took(job, self.now),
            "subscribers": found.subscribers[-SHOWN_SUBSCRIBERS:],
            "more_subscribers": max(0, job.attempts - SHOWN_SUBSCRIBERS),
            "spans": spans,
            "bar": self._bar(spans),
            "notes": list(self._notes(session, found)),
            "cancel_value": "" if job.has_ended or found.cancel_requested_at else json.dumps(job.id),
            "error_count": found.error_count,
            "shown_errors": SHOWN_ERRORS,
            **self._contents(found),
        }

    def _read(self, job_id: str) -> JobDetails | None:
        """Read the job; a refresh of the page waits until a job has ended, where that blocks no other request."""
        # In a transaction (ATOMIC_REQUESTS), it might see the same again.
        can_wait = self.request.META.get("wsgi.multithread") and not connections[self.using].in_atomic_block
        if not can_wait or get_settings().bell is None:
            return self._details(job_id)
        self.pause = 1
        if self.request.headers.get("X-Requested-With") != "fetch" or not _waiting.acquire(blocking=False):
            return self._details(job_id)
        ended = threading.Event()
        with contextlib.ExitStack() as stack:
            stack.callback(_waiting.release)
            stack.callback(Listening(self.using, [RESULTS], ended.set).stop)
            found = self._details(job_id)
            if found is not None and not found.summary.has_ended and ended.wait(WAIT):
                found = self._details(job_id)
            return found

    def _details(self, job_id: str) -> JobDetails | None:
        return jobs.read(self.session, job_id, most=SHOWN_CHARACTERS + 1)

    # -- its contents ---------------------------------------------------------

    def _contents(self, found: JobDetails) -> dict[str, Any]:
        first = found.error_count - len(found.errors) + 1
        numbered = list(enumerate(found.errors, first))[-SHOWN_ERRORS:]
        topic = found.summary.topic
        shown: dict[str, Any] = {"errors": [self._error(number, error, topic) for number, error in reversed(numbered)]}
        if self.may_see_payloads:
            value, size = found.return_value.encode(), found.return_value_size
            shown["arguments"] = contents.payload(found.arguments.encode(), found.arguments_size, topic=topic)
            shown["return_value"] = contents.payload(value, size, topic=topic) if value else ""
        return shown

    def _error(self, number: int, error: JobError, topic: str) -> ErrorRow:
        if not self.errors.shows(topic):
            return ErrorRow(number, error.exception_class_path, "", "")
        line, traceback = error_parts(self.errors.whole(error.traceback, topic))
        return ErrorRow(number, error.exception_class_path, line, traceback[-SHOWN_CHARACTERS:])

    # -- its times ------------------------------------------------------------

    def _spans(self, job: JobSummary) -> Iterable[Span]:
        """Yield what the job's time was spent on, from the time at which it was due."""
        due = max(job.enqueued_at, job.run_after)
        started = job.started_at or (job.finished_at if job.has_ended else self.now)
        if started > due:
            yield Span("mq-waited", _("waiting for its first attempt"), started - due)
        if not job.started_at:
            return
        last = max(job.last_attempted_at, job.started_at)
        if job.has_ended and job.took_ms is None:
            last = job.finished_at
        if last > job.started_at:
            yield Span("mq-failed", _("earlier attempts, and waiting between them"), last - job.started_at)
        if job.took_ms is not None:
            css = "mq-dead" if job.status == "FAILED" else "mq-acked"
            yield Span(css, _("last attempt"), job.took_ms)
        elif not job.has_ended and self.now > last:
            yield Span("mq-acked", _("since its last known start"), self.now - last)

    @staticmethod
    def _bar(spans: list[Span]) -> SafeString:
        label = ", ".join(f"{span.name}: {span.time}" for span in spans)
        return charts.strip([(span.css, f"{span.name}: {span.time}", span.milliseconds) for span in spans], label)

    # -- what belongs to it ---------------------------------------------------

    def _notes(self, session: Session, found: JobDetails) -> Iterable[Step]:
        """Yield facts about the job, with links to its message and its dead letter."""
        job = found.summary
        yield from recurring_steps(self.dashboard, job.id)
        if (waits := self._waits_in_chain(session, found)) is not None:
            yield Step(waits)
            return
        if job.waits_at(self.now):
            yield Step(waits_until(job, with_reason=self.errors.shows(job.topic)))
        is_ahead = job.status == "READY" and job.run_after > self.now
        offset = jobs.message_offset(session, job, search=not is_ahead, bounds=self.bounds)
        if job.status == "RUNNING" and found.cancel_requested_at:
            text = _("It was asked to stop at %(time)s. It will stop only if its task reads context.cancelled.")
            yield Step(text % {"time": moment(found.cancel_requested_at)}, css="mq-severity-1")
        if job.status == "RUNNING" and found.subscribers:
            yield from self._holder(session, found.subscribers[-1], job)
        if offset is not None:
            link = self.dashboard.url("message", offset=offset)
            text = _("Its message is at offset %(offset)s of %(topic)s.") % {"offset": offset, "topic": job.topic}
            if job.status == "READY" and found.error_count:
                text += " " + _("The page of the message says when the next attempt is due.")
            yield Step(text, link=link, link_text=_("Open message"))
            if job.status == "FAILED":
                yield from self._dead_letter(session, job, offset)
        elif job.has_ended:
            yield Step(_("Its message is no longer in the log."))
        elif job.status == "RUNNING":
            yield Step(_("No message with its id is in the log: it was redriven as a message with another id."))
        else:
            text = _(
                "No message with its id is in the log: it is scheduled, has not entered the log yet, is in the "
                "quarantine, or was redriven as a message with another id."
            )
            if is_ahead:
                text = _("It is due in %(time)s.") % {"time": duration((job.run_after - self.now) / 1000)}
            link = self.dashboard.url("scheduled", topic=job.topic, id=job.id)
            yield Step(text, link=link, link_text=_("Open scheduled message"))

    def _waits_in_chain(self, session: Session, found: JobDetails) -> str | None:
        """Return what a job waits for whose stage has not begun, or None."""
        before = job_stages.before(session, found.stage) if found.stage and found.summary.status == "READY" else None
        if before is None or not before.remaining:
            return None
        text = ngettext(
            "It waits for %(number)d job of the stage before it in its chain.",
            "It waits for %(number)d jobs of the stage before it in its chain.",
            before.remaining,
        )
        return text % {"number": before.remaining}

    def _holder(self, session: Session, subscriber: str, job: JobSummary) -> Iterable[Step]:
        """Yield that the subscriber that has claimed the job is lost, if it is."""
        rows = read_subscribers(session, lease_ms=self.lease_ms).get(GroupRef(JOB_GROUP, job.topic), ())
        if not any(row.live and row.name == subscriber for row in rows):
            text = _("Its subscriber %(name)s is lost. Another one will claim the job again.")
            yield Step(text % {"name": visible(subscriber)}, css="mq-severity-1")

    def _dead_letter(self, session: Session, job: JobSummary, offset: int) -> Iterable[Step]:
        """Yield a link to the job's dead letter, if it is in the DLQ."""
        ref = GroupRef(JOB_GROUP, job.topic)
        events = [
            event
            for event in message_history.recorded(session, offset, bounds=self.bounds)[0]
            if event.ref == ref and event.outcome == DeliveryEvent.Outcome.DEAD_LETTERED
        ][-1:]
        copies = message_history.made_of(session, events)
        for copy in copies.values():
            link = self.dashboard.url("deadletter", offset=copy)
            yield Step(
                _("Its dead letter can be redriven: the job then runs again."),
                "",
                "mq-severity-1",
                link=link,
                link_text=_("Open dead letter"),
            )
        if not events and get_settings().recorded_of(JOB_GROUP) == "none":
            link = self.dashboard.url("deadletters", topic=job.topic)
            text = _("Its dead letter is not recorded (RECORD_DELIVERIES). It may be in the DLQ.")
            yield Step(text, link=link, link_text=_("Open dead letters"))
