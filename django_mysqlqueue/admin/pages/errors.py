"""The page of errors: those of retrying messages, of dead letters and of past attempts, grouped by kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin import charts
from django_mysqlqueue.admin.pages.base import PAGE_ROWS, Page
from django_mysqlqueue.inspection import ErrorKind
from django_mysqlqueue.inspection.error_kinds import HOURS, find_errors
from django_mysqlqueue.options.topics import dlq_topic, first_topic
from django_mysqlqueue.service.groups import registered_refs
from django_mysqlqueue.text.humanize import since_text, task_name

STATES = {
    "retrying": gettext_lazy("retrying"),
    "dead_letters": gettext_lazy("dead letters"),
    "settled": gettext_lazy("settled"),
}
NO_CLASS = "-"
"""In the filter by class: only errors that begin with no class."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """A kind of error in the table."""

    kind: ErrorKind
    dlq_topic: str
    first: str
    last: str
    trend: SafeString


class ErrorsPage(Page):
    """The errors of handlers, grouped by kind."""

    name = "errors"
    title = gettext_lazy("Errors")
    filters = ("topic", "group", "task", "class", "state")
    shows_several_topics = True

    def context(self) -> dict[str, Any]:
        topic, group, task, wanted = (self.text(name) for name in ("topic", "group", "task", "class"))
        topic = self.about = None if topic is None else first_topic(topic)
        state = self.choice("state", STATES)
        found = find_errors(
            self.session,
            topic=topic,
            group=group,
            topics=self.topics_to_view(),
            shown=self.errors.line,
            bounds=self.bounds,
        )
        kinds = [
            kind
            for kind in found.kinds
            if (state is None or state in kind.states)
            and wanted in (None, kind.error_class or NO_CLASS)
            and (task is None or task in kind.tasks)
        ]
        shown = kinds[:PAGE_ROWS]
        classes = {kind.error_class or NO_CLASS for kind in found.kinds} | ({wanted} if wanted else set())
        tasks = {one for kind in found.kinds for one in kind.tasks} | ({task} if task else set())
        refs = [ref for ref in registered_refs(self.using) if self.may_view(ref.topic)]
        return {
            "rows": [self._row(kind, found.now) for kind in shown],
            "operable": self.operable(kind.ref.topic for kind in shown),
            "more": len(kinds) - len(shown),
            "listing": found,
            "hours": HOURS,
            "errors_read": f"{self.bounds.errors:,}",
            "groups_read": f"{self.bounds.groups:,}",
            "topics": sorted({first_topic(ref.topic) for ref in refs} | ({topic} if topic else set())),
            "topic": topic or "",
            "groups": sorted(
                {ref.group for ref in refs} | {kind.ref.group for kind in shown} | ({group} if group else set())
            ),
            "tasks": [(one, task_name(one)) for one in sorted(tasks)],
            "classes": [*sorted(classes - {NO_CLASS}), *([(NO_CLASS, _("none"))] if NO_CLASS in classes else [])],
            "states": STATES.items(),
        }

    @staticmethod
    def _row(kind: ErrorKind, now: int) -> ErrorRow:
        label = _("%(number)s in the last %(hours)s hours") % {"number": kind.attempts, "hours": HOURS}
        return ErrorRow(
            kind,
            dlq_topic(kind.ref.topic),
            since_text(kind.first_at, now),
            since_text(kind.last_at, now),
            charts.sparkline(kind.by_hour, label),
        )
