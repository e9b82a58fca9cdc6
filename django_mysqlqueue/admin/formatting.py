"""How pages show times, payloads and errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.humanize import messages as messages
from django_mysqlqueue.humanize import moment as moment
from django_mysqlqueue.redaction import redacted as redacted
from django_mysqlqueue.service.messages import last_line as last_line

SHOWN_CHARACTERS = 20_000
"""A page shows no more of a payload or an error than that."""
LINES = json.JSONEncoder(indent=2, ensure_ascii=False)
INDENTED_CHARACTERS = 100_000
"""In lines JSON is no longer than that: each of 10,000 brackets within each other has a line, indented as deep."""


def payload_text(beginning: bytes, size: int) -> str:
    """A payload as text: JSON in readable lines, anything else as it is, bytes that are no text escaped.

    Args:
        beginning: the payload, or as much of it as was read.
        size: its size in bytes, which is named if not all of it is shown.
    """
    if size <= SHOWN_CHARACTERS:
        try:
            lines = json_lines(json.loads(beginning))
        except (ValueError, RecursionError):
            lines = None
        if lines is not None:
            return lines
    text = beginning[:SHOWN_CHARACTERS].decode(errors="backslashreplace")
    if size > SHOWN_CHARACTERS:
        text += "\n… " + _("(%(size)s bytes in all)") % {"size": f"{size:,}"}
    return text


def json_lines(value: Any, *, most: int = INDENTED_CHARACTERS) -> str | None:
    """JSON in readable lines; None: nested too deep for that, or longer than ``most`` characters.

    Half a surrogate pair, which JSON may name and no page can be sent with, stays the escape that it was.
    """
    pieces: list[str] = []
    length = 0
    try:
        for piece in LINES.iterencode(value):
            pieces.append(piece)
            length += len(piece)
            if length > most:
                return None
    except RecursionError:
        return None
    return "".join(pieces).encode("utf-8", "backslashreplace").decode()


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Metadata as text: JSON in readable lines, or where it is too deep for that in a single one."""
    lines = json_lines(metadata)
    return json.dumps(metadata) if lines is None else lines


def redacted_line(line: str, *, topic: str, cut: bool) -> str:
    """What ``REDACT`` leaves of an error's last line; nothing of one of which only the end was read.

    That end may be a part of what is to be hidden, which nothing recognises.
    """
    if cut and get_settings().redact is not None:
        return _("(a line that is too long to be redacted here)")
    return redacted(line, topic=topic, kind="error")
