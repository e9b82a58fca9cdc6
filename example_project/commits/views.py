"""A page that shows commits as they arrive. It follows the topic without a consumer group."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.mixins import LoginRequiredMixin
from django.views.generic import TemplateView

from django_mysqlqueue.tails import ReceivedMessage, TailView
from example_project.commits.events import TOPIC, CommitEvent


class CommitStream(TailView):
    """The events of the page. Users need the permission to see payloads; the page needs only some of their fields."""

    topics = (TOPIC,)

    def serialize(self, message: ReceivedMessage) -> dict[str, Any]:
        event = CommitEvent.from_payload(message.payload)
        return {
            "offset": message.offset,
            "repository": event.repository,
            "sequence": event.sequence,
            "sha": event.sha[:10],
            "files": event.files,
        }


class LivePage(LoginRequiredMixin, TemplateView):
    login_url = "admin:login"
    template_name = "commits/live.html"
    extra_context = {"topic": TOPIC}
