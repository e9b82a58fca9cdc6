"""The list of recurring schedules."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.admin.permissions import may_operate
from django_mysqlqueue.inspection import list_schedules
from django_mysqlqueue.inspection.schedules import with_declared

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
        return {
            "rows": rows,
            "operable": {
                one.name for one in rows if one.registered_at and may_operate(self.request, one.topic or None)
            },
            "shows_errors_of": {one.topic for one in rows if self.errors.shows(one.topic)},
        }
