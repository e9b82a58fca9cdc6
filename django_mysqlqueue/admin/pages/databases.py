"""The first page if the queue has several databases: the state of each, and the problems of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_mysqlqueue.admin.pages.overview import Card, Linked, OverviewPage, Summary
from django_mysqlqueue.admin.permissions import visible
from django_mysqlqueue.sql.several import Unread, read_each


@dataclass(frozen=True, slots=True)
class DatabaseRow:
    """A database in the table."""

    alias: str
    link: str
    state: str
    css: str
    cards: list[Card]
    """Its numbers; empty if it could not be read."""


@dataclass(frozen=True, slots=True)
class DatabaseProblem:
    """A problem of a database, or the reason why it could not be read."""

    alias: str
    severity: int
    kind: str
    group: str
    text: str
    link: str
    action: str


class DatabasesPage(OverviewPage):
    """The overview: of one database, or of all if there are several and the query string names none."""

    shows_all_databases = True

    def context(self) -> dict[str, Any]:
        if self.dashboard.database or not self.dashboard.databases:
            return super().context()
        self.template = "databases.html"
        found = self._summaries()
        problems = [problem for alias, one in found.items() for problem in self._problems(alias, one)]
        return {
            "headings": next((one.cards for one in found.values() if isinstance(one, Summary)), []),
            "rows": [self._state(alias, one) for alias, one in found.items()],
            "problems": sorted(problems, key=lambda problem: problem.severity),
        }

    def _summaries(self) -> dict[str, Summary | Unread]:
        """Read all databases at once, apart from those that did not answer to the question for the user's topics.

        Each is waited for as ``read_each`` says, so that one that is down delays the page by that time at most.
        """
        unread = visible(self.request).unread
        pages = {alias: OverviewPage(self.dashboard.on(alias), self.request) for alias in self.dashboard.databases}
        for alias, page in pages.items():
            page.using = alias
        read = read_each([alias for alias in pages if alias not in unread], lambda alias: pages[alias].read())
        found: dict[str, Summary | Unread] = {}
        for alias, page in pages.items():
            one = unread[alias] if alias in unread else read[alias]
            found[alias] = one if isinstance(one, Unread) else page.summary(*one)
        return found

    def _state(self, alias: str, found: Summary | Unread) -> DatabaseRow:
        link = self.dashboard.url("changelist", database=alias)
        if isinstance(found, Unread):
            return DatabaseRow(alias, link, _("unavailable"), "mq-bad", [])
        number = len(found.problems)
        if not number:
            return DatabaseRow(alias, link, _("no problems"), "mq-ok", found.cards)
        state = ngettext("%(number)s problem", "%(number)s problems", number) % {"number": number}
        is_bad = any(one.problem.severity == 0 for one in found.problems)
        return DatabaseRow(alias, link, state, "mq-bad" if is_bad else "", found.cards)

    def _problems(self, alias: str, found: Summary | Unread) -> list[DatabaseProblem]:
        if isinstance(found, Unread):
            link = self.dashboard.url("changelist", database=alias)
            return [DatabaseProblem(alias, 0, "unavailable", "", found.reason, link, _("Open database"))]
        return [self._named(alias, one) for one in found.problems]

    @staticmethod
    def _named(alias: str, one: Linked) -> DatabaseProblem:
        problem = one.problem
        group = str(problem.ref or "")
        return DatabaseProblem(alias, problem.severity, problem.kind, group, problem.text, one.link, one.action)
