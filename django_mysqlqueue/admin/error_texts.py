"""What a user may see of the texts of errors: the one place that decides it for pages, exports and operations."""

from __future__ import annotations

from django.http import HttpRequest
from django.utils.translation import gettext as _

from django_mysqlqueue.admin.permissions import may_see_errors
from django_mysqlqueue.inspection.redaction import redacted
from django_mysqlqueue.options.conf import get_settings


class ErrorTexts:
    """The texts of errors for one user: redacted, and without those of jobs if the user may not view them."""

    def __init__(self, request: HttpRequest) -> None:
        self.request = request
        self._shows: dict[str, bool] = {}

    def shows(self, topic: str) -> bool:
        """Return True if the user may view the texts of errors of a topic."""
        if topic not in self._shows:
            self._shows[topic] = may_see_errors(self.request, topic)
        return self._shows[topic]

    def whole(self, text: str, topic: str) -> str:
        """Return a whole error, or its whole last line; empty if there is none."""
        if not text:
            return ""
        return redacted(text, topic=topic, kind="error") if self.shows(topic) else _("(errors of jobs are hidden)")

    def line(self, line: str, topic: str, cut: bool) -> str:  # noqa: FBT001
        """Return the last line of an error.

        If ``REDACT`` is set and only the end of the line was read, none of it is shown: ``REDACT`` might not recognize
        a part of what it hides.

        ``cut``: True if only the end of the line was read.
        """
        if cut and get_settings().redact is not None and self.shows(topic):
            return _("(line too long to redact)")
        return self.whole(line, topic)
