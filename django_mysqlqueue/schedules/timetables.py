"""When a schedule is due: at the times of a cron line, or after each interval."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from zoneinfo import ZoneInfo

from django_mysqlqueue.text.humanize import duration

FIELDS = 5
"""Number of fields of a cron line."""
SHORTEST = 1000
"""Shortest interval, in milliseconds."""
LONGEST = 366 * 86_400_000
"""Longest interval, in milliseconds."""
HOUR = 3_600_000
WINDOWS = (HOUR, 24 * HOUR, 35 * 24 * HOUR, 370 * 24 * HOUR)
"""Milliseconds before a time in which the last ticks are searched, shorter ones first."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """When a schedule is due: ``cron`` with its time zone, or ``every_ms``. Times are in epoch milliseconds."""

    cron: str = ""
    """A line of five fields; empty: there is an interval."""
    timezone: str = ""
    """The time zone of the line."""
    every_ms: int = 0
    """The interval in milliseconds; 0: there is a line."""

    def __str__(self) -> str:
        return self.cron or f"every {duration(self.every_ms / 1000)}"

    def following(self, after: int) -> int | None:
        """Return the first tick after a time; None if there is none within 50 years.

        ``after``: the time. The ticks of an interval are counted from there, so it must be a tick, or their start.

        Raises:
            ValueError: this host does not know the time zone, or this release does not know the line.
        """
        return after + self.every_ms if self.every_ms else next(self._ticks(after), None)

    def latest(self, after: int, until: int, most: int) -> list[int]:
        """Return the last ticks after one time and not after another, in their order.

        ``after``: the first time, as for ``following``.

        Raises:
            ValueError: as for ``following``.
        """
        if self.every_ms:
            number = max(0, (until - after) // self.every_ms)
            return [after + place * self.every_ms for place in range(max(1, number - most + 1), number + 1)]
        found: list[int] = []
        for window in (*WINDOWS, until - after):
            start = max(after, until - window)
            found = list(takewhile(lambda tick: tick <= until, self._ticks(start)))
            if len(found) >= most or start == after:
                break
        return found[-most:]

    def _ticks(self, after: int) -> Iterator[int]:
        """Yield the times of the line after a time."""
        from cronsim import CronSim, CronSimError

        last = after
        try:
            zone = ZoneInfo(self.timezone)
            moments = CronSim(self.cron, datetime.datetime.fromtimestamp(after // 1000, zone))
        except (KeyError, OSError, CronSimError) as error:
            raise ValueError(f"{self.cron} in {self.timezone!r}: {error}") from None
        for moment in moments:
            tick = int(moment.timestamp()) * 1000
            # From within the second of two equal hours, the first one is found again.
            if tick > last:
                last = tick
                yield tick


def timetable(cron: Any, every: Any, timezone: Any, default_timezone: str) -> Timetable:
    """Return the timetable of a declaration.

    ``cron``: a cron line of five fields, or None. ``every``: an interval as a timedelta or in seconds, or None.
    ``timezone``: the time zone of the cron line, or None.

    Raises:
        ValueError: a value breaks a rule. The error names the value and the rule.
    """
    from cronsim import CronSim, CronSimError

    if (cron is None) == (every is None):
        raise ValueError("pass a cron line or every, and not both")
    if cron is None:
        if timezone is not None:
            raise ValueError(f"timezone={timezone!r}: it is for cron lines, intervals have none")
        return Timetable(every_ms=_interval(every))
    found = Timetable(cron=_line(cron), timezone=_zone(default_timezone if timezone is None else timezone))
    try:
        CronSim(found.cron, datetime.datetime.fromtimestamp(0, datetime.UTC))
    except CronSimError as error:
        raise ValueError(
            f"cron={cron!r}: is not a valid cron line ({error}). Its fields are minute, hour, day of the month, month "
            "and day of the week"
        ) from None
    # A line that is never due is not due from any time on.
    if found.following(0) is None:
        raise ValueError(f"cron={cron!r}: there is no such date")
    return found


def _line(cron: Any) -> str:
    if not isinstance(cron, str):
        raise ValueError(f"cron={cron!r}: must be a str, such as '0 3 * * *'")
    parts = cron.split()
    if len(parts) != FIELDS:
        raise ValueError(
            f"cron={cron!r}: must have five fields (minute, hour, day of the month, month, day of the week), not "
            f"{len(parts)}"
        )
    return " ".join(parts)


def _zone(timezone: Any) -> str:
    try:
        return ZoneInfo(timezone).key
    except (KeyError, ValueError, OSError, TypeError, AttributeError):
        raise ValueError(f"timezone={timezone!r}: must be the name of a time zone, such as 'Europe/Berlin'") from None


def _interval(every: Any) -> int:
    if isinstance(every, datetime.timedelta):
        seconds = every.total_seconds()
    elif isinstance(every, (int, float)) and not isinstance(every, bool):
        seconds = float(every)
    else:
        raise ValueError(f"every={every!r}: must be a timedelta, or a number of seconds")
    if not SHORTEST <= seconds * 1000 <= LONGEST:
        raise ValueError(f"every={every!r}: must be at least 1 second and at most 366 days")
    return round(seconds * 1000)
