"""Dead letters."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.pages.base import Page


class DeadLettersPage(Page):
    name = "deadletters"
    title = gettext_lazy("Dead letters")
    template = "deadletters.html"

    def context(self) -> dict[str, Any]:
        return {}
