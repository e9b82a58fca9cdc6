"""Scheduled messages."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.pages.base import Page


class ScheduledPage(Page):
    name = "scheduled"
    title = gettext_lazy("Scheduled")
    template = "scheduled.html"

    def context(self) -> dict[str, Any]:
        return {}
