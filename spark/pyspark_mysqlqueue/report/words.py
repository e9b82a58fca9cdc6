"""Format numbers, times and names for readers."""

from __future__ import annotations

import datetime

from pyspark_mysqlqueue.shared.escaping import visible

NOTHING = "\N{EN DASH}"
"""Shown instead of a missing value."""
SHOWN = 120
"""Maximum number of characters of a text that are shown."""


def shown(text: str, limit: int = SHOWN) -> str:
    """Return a text on one line, with invisible characters as escape sequences, and shortened to ``limit`` characters.

    HTML is not escaped: the template does that.
    """
    found = visible(text[: limit + 1])
    return found[: limit - 1] + "…" if len(found) > limit else found


def name(text: str, limit: int = 60) -> str:
    """Return a topic, key, group or error in quotation marks, for a sentence."""
    return f"“{shown(text, limit)}”" if text else "“” (empty)"


def number(value: float | None) -> str:
    """Return a number with thousands separators, and with decimals if it is small and not whole."""
    if value is None:
        return NOTHING
    if isinstance(value, float) and not value.is_integer() and abs(value) < 100:
        return f"{value:,.2f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,.0f}"


def counted(value: int, one: str, many: str = "") -> str:
    """Return a number with its noun: ``1 message``, ``2 messages``."""
    return f"{value:,} {one if value == 1 else many or one + 's'}"


def share(value: float | None) -> str:
    """Return a share from 0 to 1 as a percentage."""
    if value is None:
        return NOTHING
    if 0 < value < 0.001:
        return "< 0.1 %"
    return f"{value:.0%}".replace("%", " %") if value in (0, 1) else f"{value * 100:.1f} %"


def size(value: float | None) -> str:
    """Return a number of bytes in decimal units."""
    if value is None:
        return NOTHING
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def duration(milliseconds: float | None) -> str:
    """Return a duration with its unit: ``350 ms``, ``1.5 s``, ``12 min``, ``3.2 h``, ``4 days``."""
    if milliseconds is None:
        return NOTHING
    if milliseconds < 0:
        return "-" + duration(-milliseconds)
    if milliseconds < 1000:
        return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.2g} ms"
    seconds = milliseconds / 1000
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86400:.1f} days"


def stretch(seconds: int) -> str:
    """Return the name of a step's length: ``second``, ``15 minutes``, ``day``."""
    for length, word in ((604_800, "week"), (86400, "day"), (3600, "hour"), (60, "minute"), (1, "second")):
        if seconds % length == 0:
            count = seconds // length
            return word if count == 1 else f"{count} {word}s"
    raise ValueError(f"{seconds}: must be a whole number of seconds")


def within(seconds: int) -> str:
    """Return the length of a step with an article: ``a minute``, ``an hour``, ``3 hours``."""
    text = stretch(seconds)
    if text[0].isdigit():
        return text
    return f"an {text}" if text == "hour" else f"a {text}"


def moment(value: datetime.datetime | None) -> str:
    """Return a time in UTC, to the second."""
    if value is None:
        return NOTHING
    return value.astimezone(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def date(value: datetime.date | None) -> str:
    """Return a date in ISO 8601."""
    return NOTHING if value is None else value.isoformat()


def enumeration(parts: list[str], most: int = 4) -> str:
    """Join parts: ``a``, ``a and b``, ``a, b and c``, ``a, b, c, d and 3 more``."""
    if len(parts) > most:
        return f"{', '.join(parts[:most])} and {len(parts) - most} more"
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
