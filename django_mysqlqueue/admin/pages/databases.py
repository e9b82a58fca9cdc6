"""The first page if the queue has several databases: the state of each, and the problems of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django_mysqlqueue.admin import causes
from django_mysqlqueue.admin.pages.overview import Card, OverviewPage, Summary
from django_mysqlqueue.admin.permissions import visible
from django_mysqlqueue.admin.status import worst
from django_mysqlqueue.sql.several import Unread, read_each

CSS = {"ok": "mq-ok", "degraded": "mq-warn", "stopped": "mq-bad"}
"""By state, the class of its name."""


@dataclass(frozen=True, slots=True)
class DatabaseRow:
    """A database in the table."""

    alias: str
    link: str
    state: str
    css: str
    cards: list[Card]
    """Its numbers; empty if it could not be read."""


class DatabasesPage(OverviewPage):
    """The overview: of one database, or of all if there are several and the query string names none."""

    shows_all_databases = True

    def context(self) -> dict[str, Any]:
        if self.dashboard.database or not self.dashboard.databases:
            return super().context()
        self.template = "databases.html"
        found = self._summaries()
        shown = [cause for one in found.values() for cause in one.causes]
        alias, status = worst({alias: one.status for alias, one in found.items()})
        return {
            "banner": causes.banner(self.dashboard.on(alias), status),
            "headings": next((one.cards for one in found.values() if one.cards), []),
            "rows": [self._database_row(alias, one) for alias, one in found.items()],
            **causes.split(sorted(shown, key=lambda one: one.cause.rank)),
        }

    def _summaries(self) -> dict[str, Summary]:
        """Read all databases at once, apart from those that did not answer to the question for the user's topics.

        Each is waited for as ``read_each`` says, so that one that is down delays the page by that time at most.
        """
        unread = visible(self.request).unread
        pages = {alias: OverviewPage(self.dashboard.on(alias), self.request) for alias in self.dashboard.databases}
        for alias, page in pages.items():
            page.using = alias
        read = read_each([alias for alias in pages if alias not in unread], lambda alias: pages[alias].read())
        found: dict[str, Summary] = {}
        for alias, page in pages.items():
            one = unread[alias] if alias in unread else read[alias]
            found[alias] = page.unread(one.reason) if isinstance(one, Unread) else page.summary(one, alias=alias)
        return found

    def _database_row(self, alias: str, found: Summary) -> DatabaseRow:
        link = self.dashboard.url("changelist", database=alias)
        return DatabaseRow(alias, link, found.status.name, CSS[found.status.state], found.cards)
