"""The audit log: what operators did."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_mysqlqueue import naming
from django_mysqlqueue.admin.context import BadQuery
from django_mysqlqueue.admin.csv_export import ROWS_AT_ONCE, Export
from django_mysqlqueue.admin.formatting import moment, redacted
from django_mysqlqueue.admin.pages.base import PAGE_ROWS, Page
from django_mysqlqueue.admin.permissions import may_view_operations, operations_to_view
from django_mysqlqueue.humanize import duration, shortened
from django_mysqlqueue.inspection import operations_log
from django_mysqlqueue.inspection.operations_log import OperationEntry, OperationFilter, with_dlq
from django_mysqlqueue.service import log
from django_mysqlqueue.sql.session import Session

ACTIONS = {
    "allowed_users": gettext_lazy("Register allowed users"),
    "cancel": gettext_lazy("Cancel scheduled messages"),
    "cancel jobs": gettext_lazy("Cancel jobs"),
    "dead_letter": gettext_lazy("Dead-letter"),
    "delete recurring": gettext_lazy("Delete recurring schedule"),
    "deliver now": gettext_lazy("Deliver scheduled messages now"),
    "discard": gettext_lazy("Discard dead letters"),
    "drop": gettext_lazy("Drop group"),
    "filter": gettext_lazy("Register filter"),
    "forget": gettext_lazy("Forget subscriber"),
    "limits": gettext_lazy("Register limits"),
    "mode": gettext_lazy("Change mode"),
    "move": gettext_lazy("Move topic"),
    "pause": gettext_lazy("Pause group"),
    "pause recurring": gettext_lazy("Pause recurring schedule"),
    "publish": gettext_lazy("Publish a test message"),
    "redrive": gettext_lazy("Redrive dead letters"),
    "release": gettext_lazy("Release leases"),
    "replace": gettext_lazy("Edit and redrive"),
    "replay": gettext_lazy("Replay a range"),
    "reschedule": gettext_lazy("Reschedule messages"),
    "resume": gettext_lazy("Resume group"),
    "resume recurring": gettext_lazy("Resume recurring schedule"),
    "retry": gettext_lazy("Retry"),
    "run recurring": gettext_lazy("Run recurring schedule"),
    "seek": gettext_lazy("Seek"),
    "settings": gettext_lazy("Override options"),
}
"""The operations of the audit log, by their names there."""

STATES = {
    "running": gettext_lazy("running"),
    "interrupted": gettext_lazy("interrupted"),
    "ended": gettext_lazy("ended"),
}
CSS = {"running": "mq-busy", "interrupted": "mq-bad", "ended": ""}
FILTERS = ("topic", "group", "by", "kind", "state")
LONG = 120
"""Number of characters of an operation's arguments above which the rest is folded."""
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:[+-]\d\d:\d\d|Z)?")


def _dead_letters(number: int) -> str:
    return ngettext("%(number)s dead letter", "%(number)s dead letters", number) % {"number": f"{number:,}"}


def _deliveries(number: int) -> str:
    return ngettext("%(number)s delivery", "%(number)s deliveries", number) % {"number": f"{number:,}"}


def _leases(number: int) -> str:
    return ngettext("%(number)s lease", "%(number)s leases", number) % {"number": f"{number:,}"}


def _messages(number: int) -> str:
    return ngettext("%(number)s message", "%(number)s messages", number) % {"number": f"{number:,}"}


def _jobs(number: int) -> str:
    return ngettext("%(number)s job", "%(number)s jobs", number) % {"number": f"{number:,}"}


def _groups(number: int) -> str:
    return ngettext("%(number)s group", "%(number)s groups", number) % {"number": f"{number:,}"}


UNITS: dict[str, Callable[[int], str]] = {
    "cancel": _messages,
    "cancel jobs": _jobs,
    "dead_letter": _deliveries,
    "deliver now": _messages,
    "discard": _dead_letters,
    "drop": _deliveries,
    "forget": _groups,
    "publish": _messages,
    "redrive": _dead_letters,
    "release": _leases,
    "replace": _dead_letters,
    "replay": _messages,
    "reschedule": _messages,
    "retry": _deliveries,
    "seek": _deliveries,
}
"""By action, the text for the number of what it has changed. Others change no countable rows."""


def label_of(action: str) -> str:
    """Return the name of an operation for people. Later releases may have stored others."""
    return str(ACTIONS.get(action, action))


def changed_text(entry: OperationEntry) -> str:
    """Return what an operation has changed so far, such as "120 of 2,000 dead letters"; empty if it counts nothing."""
    unit = UNITS.get(entry.action)
    if unit is None:
        return ""
    if entry.total and entry.state != "ended":
        return _("%(number)s of %(total)s") % {"number": f"{entry.changed:,}", "total": unit(entry.total)}
    return unit(entry.changed)


def detail_text(entry: OperationEntry) -> str:
    """Return the arguments of an operation, with times in the project's time zone, and redacted."""
    topic = naming.first_topic(entry.topic)
    return redacted(TIME.sub(_local, entry.detail), topic=topic, kind="error") if entry.detail else ""


def _local(found: re.Match[str]) -> str:
    try:
        at = datetime.datetime.fromisoformat(found[0])
    except ValueError:
        return found[0]
    return found[0] if at.tzinfo is None else moment(int(at.timestamp() * 1000)).removesuffix(".000")


@dataclass(frozen=True, slots=True)
class OperationRow:
    """An operation in the table."""

    entry: OperationEntry
    label: str
    detail: str
    short_detail: str
    """Its beginning; empty if it is short."""
    changed: str
    started: str
    took: str
    """How long it took, or has taken so far."""
    state: str
    css: str
    silent: str
    """Time since the last progress of an interrupted operation."""


class OperationsPage(Page):
    """The audit log of one database."""

    name = "operations"
    title = gettext_lazy("Operations")
    template = "operations.html"
    shows_several_topics = True
    exports = True

    @classmethod
    def may_open(cls, request: HttpRequest) -> bool:
        """Return whether the user may view some operations."""
        return may_view_operations(request)

    def topics_to_view(self) -> frozenset[str] | None:
        """Return the topics whose operations the user may view; None: all operations."""
        return operations_to_view(self.request, self.using)

    def may_view(self, topic: str) -> bool:
        """Return whether the user may view the operations on a topic."""
        topics = self.topics_to_view()
        return topics is None or naming.first_topic(topic) in topics

    def context(self) -> dict[str, Any]:
        session = Session(self.using)
        wanted = self.wanted()
        before = self.number("before")
        found = operations_log.look(session, wanted, before=before, limit=PAGE_ROWS, bounds=self.bounds)
        visible = self.topics_to_view()
        now = session.now()
        return {
            "rows": [self._row(entry, now) for entry in found.entries],
            "listing": found,
            "next_before": found.before,
            "is_first": before is None,
            "unfinished": operations_log.count_unfinished(
                session, None if visible is None else with_dlq(visible), bounds=self.bounds
            ),
            "sees_all": visible is None,
            "topics": [topic for topic in log.all_topics(session) if self.may_view(topic)],
            "kinds": sorted(((action, str(label)) for action, label in ACTIONS.items()), key=lambda one: one[1]),
            "states": list(STATES.items()),
            "given": {name: self.text(name) or "" for name in FILTERS},
            "filtered": any(self.text(name) for name in FILTERS),
            "searched": f"{self.bounds.operations:,}",
        }

    def export(self) -> Export:
        header = (
            *(_("started at"), _("ended at"), _("state"), _("operation"), _("arguments"), _("group"), _("topic")),
            *(_("by"), _("reason"), _("changed")),
        )
        return Export("operations", header, self._pages(self.wanted(), self.number("before")))

    def _pages(self, wanted: OperationFilter, before: int | None) -> Iterator[list[tuple[Any, ...]]]:
        place = before
        while True:
            with self.reading():
                found = operations_log.look(
                    Session(self.using), wanted, before=place, limit=ROWS_AT_ONCE, bounds=self.bounds
                )
            yield [self._cells(entry) for entry in found.entries]
            place = found.before
            if place is None:
                return

    @staticmethod
    def _cells(entry: OperationEntry) -> tuple[Any, ...]:
        times = (moment(entry.started_at), moment(entry.ended_at))
        what = (str(STATES[entry.state]), label_of(entry.action), detail_text(entry))
        return *times, *what, entry.group, entry.topic, entry.actor, entry.reason, entry.changed

    def wanted(self) -> OperationFilter:
        """Return the filter of the query string, with only the operations that the user may view."""
        topic, state, kind = self.text("topic"), self.text("state"), self.text("kind")
        if state is not None and state not in STATES:
            text = _("state=%(state)r is not one of %(states)s.")
            raise BadQuery(text % {"state": state, "states": ", ".join(STATES)})
        topics = self.topics_to_view() if topic is None else [topic]
        return OperationFilter(
            group=self.text("group"),
            topics=None if topics is None else with_dlq(topics),
            actor=self.text("by"),
            actions=None if kind is None else [kind],
            state=state,  # type: ignore[arg-type]
        )

    @staticmethod
    def _row(entry: OperationEntry, now: int) -> OperationRow:
        silent = ""
        took = duration((entry.ended_at - entry.started_at) / 1000) if entry.ended_at else ""
        if entry.state == "running":
            took = _("%(time)s so far") % {"time": duration((now - entry.started_at) / 1000)}
        elif entry.state == "interrupted":
            silent = duration((now - max(entry.started_at, entry.progress_at)) / 1000)
        detail = detail_text(entry)
        return OperationRow(
            entry,
            label_of(entry.action),
            detail,
            shortened(detail, most=LONG) if len(detail) > LONG else "",
            changed_text(entry),
            moment(entry.started_at),
            took,
            str(STATES[entry.state]),
            CSS[entry.state],
            silent,
        )
