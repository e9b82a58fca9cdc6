"""Lists as CSV, page by page, safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import io
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.http import StreamingHttpResponse
from django.utils import timezone, translation
from django.utils.translation import gettext as _

MOST_ROWS = 10_000
"""Maximum number of rows of an export."""
SECONDS = 20
"""Seconds after which no further rows are read: a filter may match few of very many rows."""
ROWS_AT_ONCE = 500
"""Number of rows that are read at a time."""
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""Beginnings of texts that a spreadsheet may take for a formula. The last four are full-width characters."""


@dataclass(frozen=True, slots=True)
class Export:
    """A list as CSV."""

    name: str
    """Name of the file, without ``.csv``."""
    header: Sequence[Any]
    pages: Iterable[Iterable[Sequence[Any]]]
    """The rows, as many at a time as were read. Reading a page is bounded in time."""


def cell(value: Any) -> Any:
    """Return a value for a cell. A text that a spreadsheet may take for a formula begins with an apostrophe.

    It may even if spaces come first, since some spreadsheets remove them.
    """
    text = str(value)
    is_formula = not isinstance(value, int) and (text.startswith(FORMULA) or text.lstrip().startswith(FORMULA))
    return f"'{text}" if is_formula else text


def response(export: Export) -> StreamingHttpResponse:
    """Return a response that sends the rows while they are read: at most ``MOST_ROWS``, for at most ``SECONDS``.

    The first rows are read before it is returned, so that an error becomes an error page.
    """
    pages = _in_language(iter(export.pages))
    first = list(itertools.islice(pages, 1))
    text = _("Not complete: an export has at most %(number)s rows and takes at most %(seconds)s seconds.")
    cut = text % {"number": f"{MOST_ROWS:,}", "seconds": SECONDS}
    lines = _lines([str(one) for one in export.header], itertools.chain(first, pages), cut)
    found = StreamingHttpResponse(lines, content_type="text/csv; charset=utf-8")
    found["Content-Disposition"] = f'attachment; filename="{export.name}.csv"'
    found["Cache-Control"] = "no-store"
    return found


def _in_language(pages: Iterator[Iterable[Sequence[Any]]]) -> Iterator[list[Sequence[Any]]]:
    """Yield pages that are read in the language and time zone of now: middleware has ended while they are sent."""
    language, zone = translation.get_language(), timezone.get_current_timezone()
    while True:
        with translation.override(language), timezone.override(zone):
            page = next(pages, None)
            if page is None:
                return
            rows = list(page)
        yield rows


def _lines(header: Sequence[str], pages: Iterable[Sequence[Sequence[Any]]], cut: str) -> Iterator[str]:
    # Spreadsheets take a file without this mark for another encoding than UTF-8.
    yield "\ufeff" + _text([header])
    left = MOST_ROWS
    end = time.monotonic() + SECONDS
    for rows in pages:
        yield _text(rows[:left])
        if len(rows) > left or time.monotonic() > end:
            yield _text([[cut]])
            return
        left -= len(rows)


def _text(rows: Iterable[Sequence[Any]]) -> str:
    lines = io.StringIO()
    csv.writer(lines, quoting=csv.QUOTE_ALL).writerows([cell(value) for value in row] for row in rows)
    return lines.getvalue()
