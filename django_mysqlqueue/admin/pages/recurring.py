"""The list of recurring schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.formatting import moment
from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.admin.permissions import may_operate
from django_mysqlqueue.inspection import ScheduleRun, ScheduleStatus, list_schedules
from django_mysqlqueue.inspection.schedules import with_declared
from django_mysqlqueue.text.humanize import duration, shortened

SHOWN_RUNS = 5
"""Number of last runs of each schedule."""
ERROR_SHOWN = 200
"""Maximum length of an error in the list, in characters."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a schedule in the table."""

    run: ScheduleRun
    at: str
    took: str
    error: str
    """The last line of its last error; its class if the user may not view it."""
    style: str
    """The class of the tag with its status."""


@dataclass(frozen=True, slots=True)
class Row:
    """A schedule in the table."""

    schedule: ScheduleStatus
    next_at: str
    due_in: str
    """Time until it is due; empty if it is not due, or overdue."""
    overdue: str
    """For how long it is overdue, if that is a problem."""
    last_at: str
    paused_since: str
    seen: str
    """Time since a process that declares it was last seen."""
    runs: list[Run]
    may_operate: bool


STYLES = {"SUCCESSFUL": "mq-ok", "FAILED": "mq-bad"}


class RecurringPage(Page):
    """The list of recurring schedules."""

    name = "recurring"
    title = gettext_lazy("Recurring")
    template = "recurring.html"
    shows_several_topics = True

    def context(self) -> dict[str, Any]:
        topic = self.text("topic")
        self.about = topic
        found = with_declared(list_schedules(topic=topic, using=self.using, runs=SHOWN_RUNS), self.using, topic=topic)
        sees_all = self.topics_to_view() is None
        rows = [self._row(one) for one in found if (self.may_view(one.topic) if one.topic else sees_all)]
        return {"rows": rows, "may_operate_any": any(row.may_operate for row in rows)}

    def _row(self, one: ScheduleStatus) -> Row:
        waits = 0.0 if one.next_tick is None else (one.next_tick - one.now) / 1000
        return Row(
            one,
            _second(one.next_tick),
            duration(waits) if waits > 0 else "",
            duration(one.overdue) if one.overdue >= self.stall_times.tick else "",
            _second(one.last_run),
            _second(one.paused_at),
            duration((one.now - one.seen_at) / 1000) if one.seen_at else "",
            [self._run(run, sees_errors=self.errors.shows(one.topic)) for run in one.runs],
            bool(one.registered_at) and may_operate(self.request, one.topic or None),
        )

    @staticmethod
    def _run(run: ScheduleRun, *, sees_errors: bool) -> Run:
        took = "" if run.duration is None else duration(run.duration)
        error = (sees_errors and shortened(run.error_line, most=ERROR_SHOWN)) or run.error
        return Run(run, _second(run.tick), took, error, STYLES.get(run.status, ""))


def _second(milliseconds: int | None) -> str:
    """Return a time to the second: no tick needs more."""
    return moment(milliseconds).partition(".")[0]
