"""Tables and paragraphs in the output of commands, which can be limited to a screen."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from django.core.management.base import OutputWrapper

from django_mysqlqueue.text.escaping import visible
from django_mysqlqueue.text.humanize import counted, since_moment

if TYPE_CHECKING:
    from django_mysqlqueue.inspection.causes import Cause

GAP = 2
"""Columns between two columns of a table."""


def width_of(text: str) -> int:
    """Return how many columns of a terminal a text takes, or a few more if it has emoji of several characters."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(one) in "WF" else not unicodedata.combining(one) for one in text)


def cut(text: str, width: float) -> str:
    """Cut a text that takes more columns than ``width``; it then ends with ``…``."""
    if width_of(text) <= width:
        return text
    used, place = 1, 0
    while (used := used + width_of(text[place])) <= width:
        place += 1
    return f"{text[:place]}…"


def folded(text: str, width: float, *, most: int) -> list[str]:
    """Return the lines of a text that is broken at spaces, ``most`` at most; what is longer is cut."""
    first, *words = text.split(" ")
    lines = [first]
    for word in words:
        if len(lines) < most and width_of(lines[-1]) + 1 + width_of(word) > width:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return [cut(line, width) for line in lines]


def table_lines(
    header: Sequence[str], rows: Sequence[Sequence[Any]], *, width: float = inf, right: Sequence[bool] | None = None
) -> list[str]:
    """Return rows in columns below their header. Invisible characters are escaped.

    Args:
        header: the titles.
        rows: the values, in the order of the titles.
        width: maximum width; the widest columns become narrower until it is kept.
        right: the columns that are aligned to the right (default: those of numbers).
    """
    cells = [tuple(header), *[tuple(visible(str(value)) for value in row) for row in rows]]
    widths = [max(map(width_of, column)) for column in zip(*cells, strict=True)]
    while sum(widths) + GAP * len(widths) > width:
        widths[widths.index(max(widths))] -= 1
    if right is None:
        right = [all(isinstance(value, int) for value in column) for column in zip(*rows, strict=True)]
    return [_line(row, widths, right or [False] * len(widths)) for row in cells]


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    parts = []
    for value, width, is_right in zip(row, widths, right, strict=True):
        text = cut(value, width)
        room = " " * (width - width_of(text))
        parts.append(room + text if is_right else text + room)
    return f"  {'  '.join(parts).rstrip()}"


def write_table(out: OutputWrapper, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows in columns below their header."""
    for line in table_lines(header, rows):
        out.write(line)


def details(cause: Cause, now: int) -> list[str]:
    """Return the most frequent error of a cause, and how much it holds up and since when; without what is not known."""
    return [line for line in (cause.error, cause.facts(now, when=since_moment)) if line]


@dataclass
class Page:
    """The output of a command: all lines, or as many as a screen has room for."""

    out: OutputWrapper
    width: float = inf
    left: float = inf
    """The number of lines that may follow."""

    def lines(self, text: str, *, indent: int = 0, most: int = 2, style: Callable[[str], str] = str) -> list[str]:
        """Return a text as lines of the page, ``most`` at most. Invisible characters are escaped."""
        parts = folded(visible(text), self.width - indent, most=most)
        return [" " * indent + style(part) for part in parts]

    def write(self, lines: Sequence[str]) -> None:
        """Write lines."""
        for line in lines:
            self.out.write(line)
        self.left -= len(lines)

    def section(self, head: Sequence[str], blocks: Sequence[Sequence[str]], noun: str, *, keep: int = 0) -> None:
        """Write the first blocks of lines, and how many there are more.

        Args:
            head: the lines above them.
            blocks: the blocks; each is written as a whole, or not at all.
            noun: what a block is about.
            keep: number of lines to leave for what follows.
        """
        room = self.left - keep - 1 - len(head)
        shown = 0
        if sum(map(len, blocks)) > room:
            room -= 1
            while (room := room - len(blocks[shown])) >= 0:
                shown += 1
        else:
            shown = len(blocks)
        self.write(["", *(head if shown else ()), *(line for block in blocks[:shown] for line in block)])
        if shown < len(blocks):
            what = f"more {noun}" if shown else noun
            self.write([f"  {counted(len(blocks) - shown, what)}: --all"])
