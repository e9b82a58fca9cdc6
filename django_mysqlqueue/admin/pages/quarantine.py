"""The list of messages that the log has refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.pages.base import PAGE_ROWS, Page
from django_mysqlqueue.inspection import QuarantinedRow, list_quarantined
from django_mysqlqueue.service import log


class QuarantinePage(Page):
    """The list of messages that the log has refused."""

    name = "quarantine"
    title = gettext_lazy("Quarantine")
    filters = ("topic",)
    position = "after"
    shows_several_topics = True

    def context(self) -> dict[str, Any]:
        topic = self.about = self.text("topic")
        topics = [one for one in log.quarantined(self.session) if self.may_view(one)]
        found = self._found(topic, topics)
        rows = found[:PAGE_ROWS]
        last = rows[-1].quarantine_id if rows else None
        return {
            "topics": topics if topic is None or topic in topics else [*topics, topic],
            "topic": topic or "",
            "rows": rows,
            "operable": self.operable(row.topic for row in rows),
            "upto": last,
            "next_place": last if len(found) > len(rows) else None,
        }

    def _found(self, topic: str | None, topics: Sequence[str]) -> list[QuarantinedRow]:
        """Return the messages of the page and the one after it; of several topics, those that the user may view."""
        after = self.number("after") or 0
        names = topics if topic is None and self.topics_to_view() is not None else [topic]
        found = [
            row
            for name in names
            for row in list_quarantined(topic=name, after=after, limit=PAGE_ROWS + 1, using=self.using)
        ]
        return sorted(found, key=lambda row: row.quarantine_id)[: PAGE_ROWS + 1]
