"""Format times, payloads and errors for pages."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext as _

from django_mysqlqueue.inspection.redaction import redacted as redacted
from django_mysqlqueue.service.messages import last_line as last_line
from django_mysqlqueue.service.rollups import Percentile
from django_mysqlqueue.text.humanize import duration
from django_mysqlqueue.text.humanize import messages as messages
from django_mysqlqueue.text.humanize import moment as moment

SHOWN_CHARACTERS = 20_000
"""Maximum number of characters of a payload or error that a page shows."""
LINES = json.JSONEncoder(indent=2, ensure_ascii=False)
INDENTED_CHARACTERS = 100_000
"""Maximum length of indented JSON, in characters: with 10,000 nested brackets, indentation would explode."""


def latency_text(found: Percentile | None) -> str:
    """Format a percentile of the latency as the bound that is known: ``≤ 10 min``, ``> 1 d``; ``-`` without acks."""
    return "-" if found is None else f"{'>' if found.above else '≤'} {duration(found.ms / 1000)}"


def clock(milliseconds: int) -> str:
    """Format the time of day of epoch milliseconds in the active language and the current time zone."""
    return date_format(_local(milliseconds), "TIME_FORMAT")


def date(milliseconds: int) -> str:
    """Format the date of epoch milliseconds in the active language and the current time zone."""
    return date_format(_local(milliseconds), "SHORT_DATE_FORMAT")


def day(milliseconds: int) -> str:
    """Format the day and month of epoch milliseconds in the active language and the current time zone."""
    return date_format(_local(milliseconds), "MONTH_DAY_FORMAT")


def _local(milliseconds: int) -> datetime.datetime:
    return timezone.localtime(datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC))


def payload_text(beginning: bytes, size: int) -> str:
    """Return a payload as text: JSON indented, other text unchanged, bytes that are not UTF-8 escaped.

    ``size``: its size in bytes, which the text names if it is cut.
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
        text += "\n… " + _("(%(size)s bytes in total)") % {"size": f"{size:,}"}
    return text


def json_lines(value: Any, *, most: int = INDENTED_CHARACTERS) -> str | None:
    """Return a value as indented JSON, or None if it is nested too deeply or the text would be too long.

    A lone surrogate, which JSON can escape but UTF-8 cannot encode, stays escaped.
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
    """Return metadata as indented JSON, or in a single line if it is nested too deeply."""
    lines = json_lines(metadata)
    return json.dumps(metadata) if lines is None else lines
