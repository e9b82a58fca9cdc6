"""The list of scheduled messages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin import contents
from django_mysqlqueue.admin.pages.base import PAGE_ROWS, Page
from django_mysqlqueue.inspection import ScheduledMessage, jobs, list_scheduled, scheduled
from django_mysqlqueue.inspection.scheduled import ScheduledContent, ScheduledListing
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.service.counts import Count

PLACE = re.compile(r"([0-9]{1,19})_(-?[0-9]{1,3})_([0-9]{1,19})")
"""A position in the list: the time, the negative priority, and the primary key."""


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A scheduled message in the table."""

    message: ScheduledMessage
    is_job: bool
    """True if it is a job with a result."""
    payload: str | None = None
    """None if the user may not view it, or it no longer exists."""
    metadata: str = ""
    expires_at: int | None = None
    """None if it does not expire, or if the user may not view its metadata."""


class ScheduledPage(Page):
    """The list of scheduled messages."""

    name = "scheduled"
    title = gettext_lazy("Scheduled")
    filters = ("topic", "task", "id")
    position = "after"

    def context(self) -> dict[str, Any]:
        session = self.session
        topic = self.about = self.text("topic")
        message_id = self.text("id")
        if message_id is None:
            found = list_scheduled(
                topic=topic,
                task=self.text("task"),
                after=self._after(),
                limit=PAGE_ROWS,
                using=self.using,
                bounds=self.bounds,
            )
        else:
            with_id = () if topic is None else scheduled.with_id(session, topic, message_id)
            found = ScheduledListing(tuple(with_id), None, whole=True)
        seen = self.with_payloads(row.topic for row in found.rows)
        said: dict[int, ScheduledContent] = {}
        if seen:
            said = scheduled.contents(session, [row.outbox_id for row in found.rows if row.topic in seen])
        ids = [row.message_id for row in found.rows if job_queues.is_queue(row.topic)]
        of_jobs = set(jobs.summaries(session, ids))
        topics = [one for one in scheduled.topics(session, bounds=self.bounds) if self.may_view(one[0])]
        if topic is not None and topic not in dict(topics):
            topics.append((topic, Count(0)))
        return {
            "topics": topics,
            "needs_topic": message_id is not None and topic is None,
            "rows": [
                self._row(message, said.get(message.outbox_id), is_job=message.message_id in of_jobs)
                for message in found.rows
            ],
            "tasks": any(row.task for row in found.rows),
            "debounced": any(row.coalesce_key for row in found.rows),
            "whole": found.whole,
            "looked": f"{self.bounds.scheduled:,}",
            "next_place": None if found.after is None else "_".join(map(str, found.after)),
            "may_see_payloads": bool(seen) or self.may_see_payloads,
        }

    def _after(self) -> tuple[int, int, int] | None:
        text = self.text("after")
        if text is None:
            return None
        place = PLACE.fullmatch(text)
        if place is None:
            self.no_position()
        at, rank, row_id = (min(int(number), 2**62) for number in place.groups())
        return at, rank, row_id

    @staticmethod
    def _row(message: ScheduledMessage, content: ScheduledContent | None, *, is_job: bool) -> ScheduledRow:
        if content is None:
            return ScheduledRow(message, is_job)
        payload = contents.payload(content.payload, message.size, topic=message.topic)
        metadata = contents.metadata(content.metadata, topic=message.topic)
        return ScheduledRow(message, is_job, payload, metadata, content.expires_at)
