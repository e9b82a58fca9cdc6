"""Messages of the log, and a message's life."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.pages.base import Page


class MessagesPage(Page):
    name = "messages"
    title = gettext_lazy("Messages")
    template = "messages.html"

    def context(self) -> dict[str, Any]:
        return {}


class MessagePage(Page):
    name = "message"
    title = gettext_lazy("Message")
    template = "message.html"
    in_menu = False

    def context(self) -> dict[str, Any]:
        return {}
