"""Parse the options of a report."""

from __future__ import annotations

import datetime
import re

from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.options import parse_time

UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_AGO = re.compile(r"(\d{1,6})([mhdw])")


def parse_moment(name: str, text: str, now: datetime.datetime) -> datetime.datetime:
    """Parse a time in ISO 8601 (in UTC if it has no UTC offset), a date, or a duration before now.

    Args:
        name: The name of the option, for the error.
        text: The text. A duration is a number of minutes, hours, days or weeks: ``90m``, ``36h``, ``14d``, ``2w``.
        now: The current time.

    Raises:
        PipelineError: The text is none of these.
    """
    rule = (
        f"{name} {text!r}: must be a time such as 2026-11-22T06:00:00Z, a date such as 2026-11-22, or a duration such "
        "as 36h or 14d"
    )
    if ago := _AGO.fullmatch(text):
        try:
            return now - datetime.timedelta(**{UNITS[ago[2]]: int(ago[1])})
        except OverflowError:
            raise PipelineError(rule) from None
    try:
        return parse_time(text)
    except ValueError:
        raise PipelineError(rule) from None
