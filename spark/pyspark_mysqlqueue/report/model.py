"""The contents of a report, before they are rendered as HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pyspark_mysqlqueue.report import words

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
"""Maximum number of rows of a table on the page. The files have all rows."""
OPEN_ROWS = 12
"""Maximum number of rows of a table that is not collapsed."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its name in the files, its heading on the page, and the kind of its values."""

    name: str
    heading: str
    kind: Kind = "number"

    @property
    def is_text(self) -> bool:
        """Whether values are aligned to the left."""
        return self.kind in ("text", "time", "day")


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a section."""

    name: str
    """The name of its files, without a suffix."""
    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Mapping[str, Any]]
    order: str = ""
    """The order of the rows, which the page shows if it leaves rows out."""

    @property
    def cells(self) -> list[list[str]]:
        """The rows on the page, as text."""
        return [
            [
                words.NOTHING if row[column.name] is None else WRITTEN[column.kind](row[column.name])
                for column in self.columns
            ]
            for row in self.rows[:ROWS_SHOWN]
        ]

    @property
    def left_out(self) -> int:
        """The number of rows that are not on the page."""
        return max(0, len(self.rows) - ROWS_SHOWN)

    @property
    def is_folded(self) -> bool:
        """Whether the table is collapsed."""
        return len(self.rows) > OPEN_ROWS


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart in two widths, and a description of it."""

    title: str
    text: str
    """The description, for screen readers."""
    wide: str
    """The SVG for wide screens. Its texts are escaped."""
    narrow: str
    """The SVG for narrow screens. Its texts are escaped."""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the report."""

    id: str
    title: str
    says: Sequence[str] = ()
    """Sentences about the data."""
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    unknown: Sequence[str] = ()
    """Sentences about missing data, and how to collect it."""


@dataclass(frozen=True, slots=True)
class Headline:
    """A number at the top of the report."""

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
    """Sentences about the data that the report covers."""
