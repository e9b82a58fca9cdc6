"""When a schedule is due: at the times of a cron line, after each interval, or once."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from zoneinfo import ZoneInfo

from django.utils.timezone import is_naive, make_aware

from django_mysqlqueue.db.sizes import LATEST_DELIVERY
from django_mysqlqueue.text.humanize import duration, moment

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
    """When a schedule is due: ``cron`` with its time zone, ``every_ms``, or once. Times are in epoch milliseconds."""

    cron: str = ""
    """A line of five fields; empty: there is none."""
    timezone: str = ""
    """The time zone of the line."""
    every_ms: int = 0
    """The interval in milliseconds; 0: there is none."""
    start_ms: int | None = None
    """The first tick of the interval, or, without one, the only tick. None: they are counted from the last tick."""
    spread: bool = False
    """Whether ``start_ms`` was chosen by the name of the schedule: somewhere in the first interval since 1970."""

    def __str__(self) -> str:
        if self.cron:
            return self.cron
        if not self.every_ms:
            return f"once at {moment(self.start_ms)}"
        every = f"every {duration(self.every_ms / 1000)}"
        return every if self.start_ms is None or self.spread else f"{every} from {moment(self.start_ms)}"

    def following(self, after: int) -> int | None:
        """Return the first tick after a time; None if there is none within 50 years.

        ``after``: the time. The ticks of an interval without a start are counted from there, so it must be a tick, or
        when the schedule was registered.

        Raises:
            ValueError: this host does not know the time zone, or this release does not know the line.
        """
        if self.cron:
            return next(self._ticks(after), None)
        start = after + self.every_ms if self.start_ms is None else self.start_ms
        if start > after:
            return start
        return start + ((after - start) // self.every_ms + 1) * self.every_ms if self.every_ms else None

    def latest(self, after: int, until: int, most: int) -> list[int]:
        """Return the last ticks after one time and not after another, in their order.

        ``after``: the first time, as for ``following``.

        Raises:
            ValueError: as for ``following``.
        """
        if not self.cron:
            first = self.following(after)
            if first is None or first > until:
                return []
            last = (until - first) // self.every_ms if self.every_ms else 0
            return [first + place * self.every_ms for place in range(max(0, last - most + 1), last + 1)]
        found: list[int] = []
        for window in (*WINDOWS, until - after):
            start = max(after, until - window)
            found = list(takewhile(lambda tick: tick <= until, self._ticks(start)))
            if len(found) >= most or start == after:
                break
        return found[-most:]

    def upcoming(self, after: int, now: int, most: int) -> list[int]:
        """Return the next ticks after now, in their order.

        ``after``: the time up to which ticks are decided, as for ``following``.

        Raises:
            ValueError: as for ``following``.
        """
        passed = self.latest(after, now, 1)
        found: list[int] = []
        tick = self.following(passed[0] if passed else after)
        while tick is not None and len(found) < most:
            found.append(tick)
            tick = self.following(tick)
        return found

    def _ticks(self, after: int) -> Iterator[int]:
        """Yield the times of the line after a time."""
        from cronsim import CronSim, CronSimError

        last = after
        try:
            zone = ZoneInfo(self.timezone)
            times = CronSim(self.cron, datetime.datetime.fromtimestamp(after // 1000, zone))
        except (KeyError, OSError, CronSimError) as error:
            raise ValueError(f"{self.cron} in {self.timezone!r}: {error}") from None
        for time in times:
            tick = int(time.timestamp()) * 1000
            # From within the second of two equal hours, the first one is found again.
            if tick > last:
                last = tick
                yield tick


def timetable(
    cron: Any, every: Any, timezone: Any, default_timezone: str, *, start: Any = None, spread: str = ""
) -> Timetable:
    """Return the timetable of a declaration.

    ``cron``: a cron line of five fields, or None. ``every``: an interval as a timedelta or in seconds, or None.
    ``timezone``: the time zone of the cron line, or None. ``start``: the first tick of the interval as a datetime, or
    None. ``spread``: the name by which a start is chosen; empty: none is.

    Raises:
        ValueError: a value breaks a rule. The error names the value and the rule.
    """
    from cronsim import CronSim, CronSimError

    if (cron is None) == (every is None):
        raise ValueError("pass a cron line or every, and not both")
    if cron is None:
        if timezone is not None:
            raise ValueError(f"timezone={timezone!r}: it is for cron lines, intervals have none")
        every_ms = _interval(every)
        if start is not None:
            return Timetable(every_ms=every_ms, start_ms=_milliseconds("start", start))
        return Timetable(every_ms=every_ms, start_ms=_place(spread, every_ms) if spread else None, spread=bool(spread))
    if start is not None or spread:
        raise ValueError("start and spread are for intervals (every): a cron line has its own times")
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


def once(at: Any) -> Timetable:
    """Return the timetable of a schedule that runs once.

    ``at``: when, as a datetime; without a time zone in that of the project.

    Raises:
        ValueError: it is not such a time. The error names the value and the rule.
    """
    return Timetable(start_ms=_milliseconds("at", at))


def _place(name: str, every_ms: int) -> int:
    """Return the place of a schedule in its interval, in milliseconds: it stays the same, and others have others."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % every_ms


def _milliseconds(option: str, value: Any) -> int:
    """Return a time, without parts of a second: forms do not show them."""
    if not isinstance(value, datetime.datetime):
        raise ValueError(f"{option}={value!r}: must be a datetime")
    try:
        found = int((make_aware(value) if is_naive(value) else value).timestamp()) * 1000
    except (OverflowError, ValueError, OSError) as error:
        raise ValueError(f"{option}={value!r}: is not a valid time ({error})") from None
    if not 0 < found < LATEST_DELIVERY:
        raise ValueError(f"{option}={value!r}: must be after 1970 and before the year 10000 in UTC")
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
