"""Tables in the output of commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.core.management.base import OutputWrapper

from django_mysqlqueue.text.escaping import visible
from django_mysqlqueue.text.humanize import since_moment

if TYPE_CHECKING:
    from django_mysqlqueue.inspection.causes import Cause


def write_table(out: OutputWrapper, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows in columns; numbers are aligned to the right. Invisible characters are escaped."""
    cells = [header, *[tuple(visible(str(value)) for value in row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numeric = [all(isinstance(row[column], int) for row in rows) for column in range(len(header))]
    for row in cells:
        line = "  ".join(
            value.rjust(width) if right else value.ljust(width)
            for value, width, right in zip(row, widths, numeric, strict=True)
        )
        out.write(f"  {line.rstrip()}")


def details(cause: Cause, now: int) -> list[str]:
    """Return the most frequent error of a cause, and how much it holds up and since when; without what is not known."""
    error = cause.sample.error if cause.sample else ""
    return [line for line in (error, cause.facts(now, when=since_moment)) if line]
