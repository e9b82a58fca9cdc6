"""What a report is asked for, as text."""

from __future__ import annotations

import datetime
import re

from django_mysqlqueue.pipeline.errors import PipelineError

UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGO = re.compile(r"(\d{1,6})([mhdw])")


def parse_moment(name: str, text: str, now: datetime.datetime) -> datetime.datetime:
    """A time in ISO 8601 (UTC unless it says otherwise), a day, or how long before ``now``: ``90m``, ``36h``, ``14d``.

    Raises:
        PipelineError: it is none of these; the text names the option (``name``), the value and the rule.
    """
    rule = (
        f"{name} {text!r}: must be a time like 2026-11-22T06:00:00Z, a day like 2026-11-22, or a length like 36h or 14d"
    )
    if ago := _AGO.fullmatch(text):
        try:
            return now - datetime.timedelta(**{UNITS[ago[2]]: int(ago[1])})
        except OverflowError:
            raise PipelineError(rule) from None
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise PipelineError(rule) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
