"""Format durations, counts and names for people. Commands and errors are in English; pages can be translated."""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Iterable, Sequence

from django.conf import settings as django_settings
from django.utils import formats, timezone
from django.utils.formats import number_format
from django.utils.translation import get_language_bidi, ngettext
from django.utils.translation import gettext as _

SHORT = 60
"""Maximum number of characters of a value in a table."""
LISTED = 20
"""Maximum number of names that an error lists."""
UNITS = (86_400, 3600, 60, 1)
"""Seconds of a day, an hour, a minute and a second."""


def partition_text(priority: int, partition: str, *, quoted: bool = False) -> str:
    """Format a partition: ``ada``, ``ada (priority 10)``, ``''``."""
    text = repr(partition) if quoted or not partition else partition
    return f"{text} ({_('priority')} {priority})" if priority else text


def task_name(path: str) -> str:
    """Return the short name of a task: ``geocode`` of ``shop.tasks.geocode``."""
    return path.rpartition(".")[2]


def duration(seconds: float) -> str:
    """Format a length of time in its two largest units.

    ``350 ms``, ``1.5 s``, ``45 s``, ``12 min 30 s``, ``3 h``, ``2 d 4 h``; a negative one is ``0 s``.
    """
    if seconds <= 0:
        return f"0 {_('s')}"
    if seconds < 0.9995:
        return f"{max(1, round(seconds * 1000))} {_('ms')}"
    if seconds < 9.95:
        return f"{seconds:.2g} {_('s')}"
    names = (_("d"), _("h"), _("min"), _("s"))
    place = next(place for place, size in enumerate(UNITS) if round(seconds) >= size)
    if UNITS[place] == 1:
        return f"{round(seconds)} {names[place]}"
    # Round to the smaller unit, so that a time limit of seven days is not "6 d 23 h" a second later.
    smaller = UNITS[place + 1]
    rounded = round(seconds / smaller) * smaller
    if place and rounded >= UNITS[place - 1]:
        return duration(rounded)
    large, small = divmod(rounded, UNITS[place])
    first = f"{large} {names[place]}"
    return f"{first} {small // smaller} {names[place + 1]}" if small else first


def messages_per_second(rate: float) -> str:
    """Format a rate with as many digits as matter, in the active language: ``0``, ``0.02``, ``3.5``, ``1,250``."""
    if not rate or rate >= 9.95:
        return number_format(round(rate), use_l10n=True, force_grouping=True)
    if rate < 0.005:
        return f"< {number_format(0.01, 2)}"
    return number_format(f"{rate:.2f}" if rate < 0.095 else f"{rate:.1f}")


def shortened(text: str, *, most: int = SHORT) -> str:
    """Cut a text that is longer than ``most`` characters for a column of a table; it then ends with ``…``."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun, in English: ``1 message``, ``2 messages``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def up_to(most: int, number: int) -> str:
    """Format a count that stops at ``most``: ``12``, ``10,000 or more``."""
    return f"{number:,}" if number < most else _("%(number)s or more") % {"number": f"{number:,}"}


def moment(milliseconds: int | None) -> str:
    """Format epoch milliseconds in the project's time zone, to the millisecond; 0 and None are ``""``.

    A value outside the years of Python's dates, such as the end of the year 9999 east of UTC, stays a number.
    """
    if not milliseconds:
        return ""
    value = _local(milliseconds)
    if value is None:
        return _("%(number)s ms after 1970") % {"number": milliseconds}
    return value.strftime("%Y-%m-%d %H:%M:%S.") + f"{value.microsecond // 1000:03d}"


def run_time(milliseconds: int, now: int) -> str:
    """Format a time that is to come in words: ``Monday 2026-11-30 03:00:00 (in 4 h 5 min)``."""
    value = _local(milliseconds)
    shown = moment(milliseconds)
    if value is not None:
        day = formats.date_format(value, "l")
        # Isolated: digits after a word of a language that is written from right to left are shown in another order.
        day = f"\N{FIRST STRONG ISOLATE}{day}\N{POP DIRECTIONAL ISOLATE}" if get_language_bidi() else day
        shown = f"{day} {formats.date_format(value, 'Y-m-d H:i:s')}"
    return _("%(time)s (in %(age)s)") % {"time": shown, "age": duration((milliseconds - now) / 1000)}


def _local(milliseconds: int) -> datetime.datetime | None:
    """Return epoch milliseconds in the project's time zone; None outside the years of Python's dates."""
    zone = timezone.get_current_timezone() if django_settings.USE_TZ else timezone.get_default_timezone()
    try:
        return datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC).astimezone(zone)
    except (OverflowError, ValueError, OSError):
        return None


def clock_text(milliseconds: int, now: int) -> str:
    """Return a time of day, localised: ``2:03 p.m.``; with the date if it is not today."""
    at, today = _local(milliseconds), _local(now)
    if at is None or today is None:
        return moment(milliseconds)
    is_today = at.date() == today.date()
    return formats.time_format(at) if is_today else formats.date_format(at, "SHORT_DATETIME_FORMAT")


def since_text(milliseconds: int, now: int) -> str:
    """Return when something began, localised, and how long ago: ``2:03 p.m. (12 min)``; with the date if not today."""
    return f"{clock_text(milliseconds, now)} ({duration((now - milliseconds) / 1000)})"


def since_moment(milliseconds: int, now: int) -> str:
    """Return when something began, and how long ago, for commands: ``2025-06-01 14:03:20 (12 min)``."""
    return f"{moment(milliseconds // 1000 * 1000).removesuffix('.000')} ({duration((now - milliseconds) / 1000)})"


def messages(number: int) -> str:
    """Format a number of messages for a page: ``1 message``, ``12 messages``."""
    return ngettext("%(number)s message", "%(number)s messages", number) % {"number": f"{number:,}"}


def listed(names: Sequence[str], *, most: int = LISTED) -> str:
    """List names for an error: ``a, b and 3 more``, ``none``."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more


def close_names(name: str, known: Iterable[str], *, most: int = 3) -> list[str]:
    """Return the known names that are similar to a misspelled one, ignoring case, the most similar first."""
    folded = {one.casefold(): one for one in sorted(known)}
    return [folded[close] for close in difflib.get_close_matches(name.casefold(), folded, n=most)]


def did_you_mean(names: Iterable[str]) -> str:
    """Return the question at the end of an error about a name: ``Did you mean a or b?``, or ``""`` without names."""
    text = " or ".join(names)
    return f"Did you mean {text}?" if text else ""
