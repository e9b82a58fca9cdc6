"""Tables in the output of commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.management.base import OutputWrapper

from django_mysqlqueue.text.escaping import visible


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
