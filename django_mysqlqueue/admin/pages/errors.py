"""The page of errors: those of retrying messages, of dead letters and of past attempts, grouped by kind."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin import charts
from django_mysqlqueue.admin.context import BadQuery
from django_mysqlqueue.admin.pages.base import PAGE_ROWS, Page
from django_mysqlqueue.admin.permissions import may_operate
from django_mysqlqueue.inspection import ErrorKind
from django_mysqlqueue.inspection.error_kinds import HOURS, find_errors
from django_mysqlqueue.options.topics import dlq_topic, first_topic, is_dlq
from django_mysqlqueue.service.groups import registered_refs
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.text.humanize import since_text

STATES = {
    "retrying": gettext_lazy("retrying"),
    "dead_letters": gettext_lazy("dead letters"),
    "settled": gettext_lazy("settled"),
}
NO_CLASS = "-"
"""In the filter by class: only errors that begin with no class."""
FILTERS = ("topic", "group", "class", "state")


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """A kind of error in the table."""

    kind: ErrorKind
    dlq_topic: str
    first: str
    last: str
    trend: SafeString
    may_operate: bool
    """True if the user may run operations on the topic."""
    may_dead_letter: bool
    """True if messages of the topic can be dead-lettered: those of a DLQ topic cannot."""


class ErrorsPage(Page):
    """The errors of handlers, grouped by kind."""

    name = "errors"
    title = gettext_lazy("Errors")
    template = "errors.html"
    shows_several_topics = True

    def context(self) -> dict[str, Any]:
        topic, group, state, wanted = (self.text(name) for name in ("topic", "group", "state", "class"))
        topic = self.about = None if topic is None else first_topic(topic)
        if state is not None and state not in STATES:
            text = _("state=%(state)r is not one of %(states)s.")
            raise BadQuery(text % {"state": state, "states": ", ".join(STATES)})
        found = find_errors(
            Session(self.using),
            topic=topic,
            group=group,
            topics=self.topics_to_view(),
            shown=self.errors.line,
            bounds=self.bounds,
        )
        kinds = [
            kind
            for kind in found.kinds
            if (state is None or state in kind.states) and wanted in (None, kind.error_class or NO_CLASS)
        ]
        shown = kinds[:PAGE_ROWS]
        topics = {kind.ref.topic for kind in shown}
        operable = {one for one in topics if may_operate(self.request, one)}
        refs = [ref for ref in registered_refs(self.using) if self.may_view(ref.topic)]
        return {
            "rows": [self._row(kind, operable, found.now) for kind in shown],
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
            "group": group or "",
            "classes": sorted(
                {kind.error_class for kind in found.kinds if kind.error_class}
                | ({wanted} if wanted else set()) - {NO_CLASS}
            ),
            "has_classless": wanted == NO_CLASS or any(not kind.error_class for kind in found.kinds),
            "class": wanted or "",
            "states": STATES.items(),
            "state": state or "",
            "filtered": any(self.text(name) for name in FILTERS),
        }

    @staticmethod
    def _row(kind: ErrorKind, operable: Collection[str], now: int) -> ErrorRow:
        label = _("%(number)s in the last %(hours)s hours") % {"number": kind.attempts, "hours": HOURS}
        may_operate = kind.ref.topic in operable
        return ErrorRow(
            kind,
            dlq_topic(kind.ref.topic),
            since_text(kind.first_at, now),
            since_text(kind.last_at, now),
            charts.sparkline(kind.by_hour, label),
            may_operate,
            may_operate and not is_dlq(kind.ref.topic),
        )
