"""The list of recurring schedules."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.admin.permissions import may
from django_mysqlqueue.inspection import list_schedules
from django_mysqlqueue.inspection.schedules import with_declared
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.permissions import EDIT_SCHEDULES, OPERATE, SEE_PAYLOADS

SHOWN_RUNS = 5
"""Number of last runs of each schedule."""


class RecurringPage(Page):
    """The list of recurring schedules."""

    name = "recurring"
    title = gettext_lazy("Recurring")
    shows_several_topics = True

    def context(self) -> dict[str, Any]:
        topic = self.about = self.text("topic")
        found = with_declared(list_schedules(topic=topic, using=self.using, runs=SHOWN_RUNS), self.using, topic=topic)
        sees_all = self.topics_to_view() is None
        rows = [one for one in found if (self.may_view(one.topic) if one.topic else sees_all)]
        operable = {one.name for one in rows if one.registered_at and may(self.request, one.topic or None, OPERATE)}
        editable = {one.name for one in rows if one.editable and may(self.request, one.topic or None, EDIT_SCHEDULES)}
        return {
            "rows": rows,
            "operable": operable,
            "editable": {
                one.name for one in rows if one.name in editable and may(self.request, one.topic, SEE_PAYLOADS)
            },
            "deletable": editable
            | {one.name for one in rows if one.name in operable and not one.declared and not one.editable},
            "may_create": self.may_create,
            "shows_errors_of": {one.topic for one in rows if self.errors.shows(one.topic)},
        }

    @property
    def may_create(self) -> bool:
        """Whether the user may make a schedule of some task."""
        topics = job_queues.find() if job_queues.find is not None else ()
        return any(self.may_view(topic) and may(self.request, topic, EDIT_SCHEDULES) for topic in topics)
