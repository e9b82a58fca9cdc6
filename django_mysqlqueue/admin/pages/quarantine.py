"""The list of messages that the log has refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.formatting import moment
from django_mysqlqueue.admin.pages.base import PAGE_ROWS, Page
from django_mysqlqueue.admin.permissions import may_operate
from django_mysqlqueue.inspection import QuarantinedRow, list_quarantined
from django_mysqlqueue.service import log
from django_mysqlqueue.sql.session import Session


@dataclass(frozen=True, slots=True)
class Row:
    """A message in the table."""

    message: QuarantinedRow
    at: str
    reason: str
    """The error of the database, as the user may see it."""
    may_operate: bool


class QuarantinePage(Page):
    """The list of messages that the log has refused."""

    name = "quarantine"
    title = gettext_lazy("Quarantine")
    template = "quarantine.html"
    in_menu = False  # The problem on the overview links to it; without one, it is empty.
    shows_several_topics = True

    def context(self) -> dict[str, Any]:
        topic = self.about = self.text("topic")
        topics = [one for one in log.quarantined(Session(self.using)) if self.may_view(one)]
        found = self._found(topic, topics)
        shown = found[:PAGE_ROWS]
        rows = [
            Row(
                one,
                moment(one.quarantined_at),
                self.errors.whole(one.reason, one.topic),
                may_operate(self.request, one.topic),
            )
            for one in shown
        ]
        return {
            "topics": topics,
            "topic": topic or "",
            "rows": rows,
            "may_operate_any": any(row.may_operate for row in rows),
            "upto": shown[-1].quarantine_id if shown else None,
            "next_after": shown[-1].quarantine_id if len(found) > len(shown) else None,
            "is_first": not self.text("after"),
        }

    def _found(self, topic: str | None, topics: list[str]) -> list[QuarantinedRow]:
        """Return the messages of the page and the one after it; of several topics, those that the user may view."""
        after = self.number("after") or 0
        names: list[str | None] = [topic]
        if topic is None and self.topics_to_view() is not None:
            names = [*topics]
        found = [
            row
            for name in names
            for row in list_quarantined(topic=name, after=after, limit=PAGE_ROWS + 1, using=self.using)
        ]
        return sorted(found, key=lambda row: row.quarantine_id)[: PAGE_ROWS + 1]
