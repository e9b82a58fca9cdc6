"""What a report is made of, before it is HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from django_mysqlqueue.pipeline.report import words

Kind = Literal["text", "number", "share", "ms", "bytes", "time", "day"]
WRITTEN: Mapping[str, Callable[[Any], str]] = {
    "text": words.shown,
    "number": words.number,
    "share": words.share,
    "ms": words.duration,
    "bytes": words.size,
    "time": words.moment,
    "day": words.date,
}
ROWS_SHOWN = 50
"""Of a table in the page; the files have all."""
OPEN_ROWS = 12
"""A longer table is folded."""


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column: its name in the files, its heading in the page, and how values are written."""

    name: str
    heading: str
    kind: Kind = "number"

    @property
    def is_text(self) -> bool:
        return self.kind in ("text", "time", "day")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a picture, or alone."""

    name: str
    """Of its files."""
    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Mapping[str, Any]]
    order: str = ""
    """In words, if the page shows the first rows only."""

    @property
    def cells(self) -> list[list[str]]:
        return [
            [
                words.NOTHING if row[column.name] is None else WRITTEN[column.kind](row[column.name])
                for column in self.columns
            ]
            for row in self.rows[:ROWS_SHOWN]
        ]

    @property
    def left_out(self) -> int:
        return max(0, len(self.rows) - ROWS_SHOWN)

    @property
    def is_folded(self) -> bool:
        return len(self.rows) > OPEN_ROWS


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart for two widths, and what it shows in words."""

    title: str
    text: str
    """For those who do not see it."""
    wide: str
    """SVG, safe to put into a page."""
    narrow: str


@dataclass(frozen=True, slots=True)
class Section:
    """One question and its answer."""

    id: str
    title: str
    says: Sequence[str] = ()
    """Sentences, from the data."""
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    unknown: Sequence[str] = ()
    """What it cannot know, and how to come to know it."""


@dataclass(frozen=True, slots=True)
class Headline:
    """A number that stands out."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """The whole report."""

    title: str
    period: str
    headlines: Sequence[Headline]
    sections: Sequence[Section]
    made: str
    about: Sequence[str] = field(default=())
    """What it rests on, in sentences."""
