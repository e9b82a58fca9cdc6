"""Format numbers, times and names for readers."""

from __future__ import annotations

import datetime

from pyspark_mysqlqueue.shared.escaping import visible

NOTHING = "\N{EN DASH}"
"""Shown instead of a missing value."""


def shown(text: str, limit: int = 120) -> str:
    """Return a text on one line, with invisible characters as escape sequences, and shortened to ``limit`` characters.

    HTML is not escaped: the template does that.
    """
    found = visible(text[: limit + 1])
    return found[: limit - 1] + "…" if len(found) > limit else found


def name(text: str, limit: int = 60) -> str:
    """Return a topic or key in quotation marks, for a sentence."""
    return f"“{shown(text, limit)}”" if text else "“” (empty)"


def number(value: float) -> str:
    """Return a number with thousands separators, and with decimals if it is small and not whole."""
    if isinstance(value, float) and not value.is_integer() and abs(value) < 100:
        return f"{value:,.2f}" if abs(value) < 10 else f"{value:,.1f}"
    return f"{value:,.0f}"


def counted(value: int, noun: str) -> str:
    """Return a number with its noun: ``1 message``, ``2 messages``."""
    return f"{value:,} {noun if value == 1 else noun + 's'}"


def share(value: float) -> str:
    """Return a share from 0 to 1 as a percentage."""
    if 0 < value < 0.001:
        return "< 0.1 %"
    return f"{value:.0%}".replace("%", " %") if value in (0, 1) else f"{value * 100:.1f} %"


def size(value: float) -> str:
    """Return a number of bytes in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def short(value: float) -> str:
    """Return a number for an axis: ``1.5k``, ``20M``."""
    for unit in ("", "k", "M"):
        if value < 1000:
            return f"{value:g}{unit}"
        value /= 1000
    return f"{value:g}G"


def moment(value: datetime.datetime) -> str:
    """Return a time in UTC, to the second."""
    return value.astimezone(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def enumeration(parts: list[str], most: int = 4) -> str:
    """Join parts: ``a``, ``a and b``, ``a, b and c``, ``a, b, c, d and 3 more``."""
    if len(parts) > most:
        return f"{', '.join(parts[:most])} and {len(parts) - most} more"
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
