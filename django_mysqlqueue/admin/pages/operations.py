"""The audit log: what operators did."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.csv_export import ROWS_AT_ONCE, Export
from django_mysqlqueue.admin.formatting import moment
from django_mysqlqueue.admin.pages.base import PAGE_ROWS, Page
from django_mysqlqueue.admin.permissions import may_view_operations, operations_to_view
from django_mysqlqueue.inspection import operations_log
from django_mysqlqueue.inspection.operations_log import (
    STATES,
    OperationEntry,
    OperationFilter,
    OperationListing,
    with_dlq,
)
from django_mysqlqueue.operations import ACTIONS
from django_mysqlqueue.options.topics import first_topic
from django_mysqlqueue.service import audit, log
from django_mysqlqueue.text.humanize import shortened

CSS = {"running": "mq-busy", "interrupted": "mq-bad", "ended": ""}
LONG = 120
"""Number of characters of an operation's arguments above which the rest is folded."""


@dataclass(frozen=True, slots=True)
class OperationRow:
    """An operation in the table."""

    entry: OperationEntry
    label: str
    detail: str
    short_detail: str
    """Its beginning; empty if it is short."""
    changed: str
    took: str
    """How long it took, has taken so far, or has made no progress."""
    state: str
    css: str


class OperationsPage(Page):
    """The audit log of one database."""

    name = "operations"
    title = gettext_lazy("Operations")
    filters = ("topic", "group", "by", "kind", "state")
    position = "before"
    shows_several_topics = True
    exports = True

    @classmethod
    def may_open(cls, request: HttpRequest) -> bool:
        return may_view_operations(request)

    def topics_to_view(self) -> frozenset[str] | None:
        return operations_to_view(self.request, self.using)

    def context(self) -> dict[str, Any]:
        session = self.session
        found = self._look(self.wanted(), self.number("before"), PAGE_ROWS)
        visible = self.topics_to_view()
        return {
            "rows": [self._row(entry) for entry in found.entries],
            "listing": found,
            "next_place": found.before,
            "unfinished": operations_log.count_unfinished(
                session, None if visible is None else with_dlq(visible), bounds=self.bounds
            ),
            "sees_all": visible is None,
            "topics": [topic for topic in log.all_topics(session) if self.may_view(topic)],
            "kinds": sorted(((name, str(action.label)) for name, action in ACTIONS.items()), key=lambda kind: kind[1]),
            "states": list(STATES.items()),
            "searched": f"{self.bounds.operations:,}",
        }

    def _look(self, wanted: OperationFilter, before: int | None, limit: int) -> OperationListing:
        return operations_log.look(self.session, wanted, before=before, limit=limit, bounds=self.bounds)

    def export(self) -> Export:
        wanted = self.wanted()

        def read(before: int | None) -> tuple[Iterable[tuple[Any, ...]], int | None]:
            found = self._look(wanted, before, ROWS_AT_ONCE)
            return map(self._cells, found.entries), found.before

        header = (
            *(_("started at"), _("ended at"), _("state"), _("operation"), _("arguments"), _("group"), _("topic")),
            *(_("by"), _("reason"), _("changed")),
        )
        return Export("operations", header, self.read_pages(read, self.number("before")))

    def _detail(self, entry: OperationEntry) -> str:
        """Return the arguments of an operation; of a filter by an error that the user may not view, only its name."""
        kept, name, error = entry.detail.partition(audit.ERROR_FILTER)
        topic = first_topic(entry.topic)
        if not self.errors.shows(topic):
            entry = dataclasses.replace(entry, detail=f"{kept}{name}{self.errors.whole(error, topic)}")
        return entry.detail_text

    def _cells(self, entry: OperationEntry) -> tuple[Any, ...]:
        times = (moment(entry.started_at), moment(entry.ended_at))
        what = (str(STATES[entry.state]), entry.label, self._detail(entry))
        return *times, *what, entry.group, entry.topic, entry.actor, entry.reason, entry.changed

    def wanted(self) -> OperationFilter:
        """Return the filter of the query string, with only the operations that the user may view."""
        topic, kind = self.text("topic"), self.text("kind")
        topics = self.topics_to_view() if topic is None else [topic]
        return OperationFilter(
            group=self.text("group"),
            topics=None if topics is None else with_dlq(topics),
            actor=self.text("by"),
            actions=None if kind is None else [kind],
            state=self.choice("state", STATES),  # type: ignore[arg-type]
        )

    def _row(self, entry: OperationEntry) -> OperationRow:
        detail = self._detail(entry)
        return OperationRow(
            entry,
            entry.label,
            detail,
            shortened(detail, most=LONG) if len(detail) > LONG else "",
            entry.changed_text,
            entry.duration_text(self.now),
            str(STATES[entry.state]),
            CSS[entry.state],
        )
