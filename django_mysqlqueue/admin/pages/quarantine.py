"""The list of messages that the log has refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.formatting import moment
from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.admin.permissions import may_operate
from django_mysqlqueue.inspection import QuarantinedRow, list_quarantined

SHOWN = 100
"""Maximum number of messages on the page."""


@dataclass(frozen=True, slots=True)
class Row:
    """A message in the table."""

    message: QuarantinedRow
    at: str
    reason: str
    """The error of the database; empty if the user may not view it."""
    may_operate: bool


class QuarantinePage(Page):
    """The list of messages that the log has refused."""

    name = "quarantine"
    title = gettext_lazy("Quarantine")
    template = "quarantine.html"
    in_menu = False  # The problem on the overview links to it; without one, it is empty.
    shows_several_topics = True

    def context(self) -> dict[str, Any]:
        found = list_quarantined(limit=SHOWN, using=self.using)
        rows = [
            Row(
                one,
                moment(one.quarantined_at),
                one.reason if self.errors.shows(one.topic) else "",
                may_operate(self.request, one.topic),
            )
            for one in found
            if self.may_view(one.topic)
        ]
        return {"rows": rows, "may_operate_any": any(row.may_operate for row in rows)}
