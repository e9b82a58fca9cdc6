"""What an edit changes, line by line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from django.utils.translation import gettext as _

CONTEXT = 3
"""Number of unchanged lines around a change."""
MOST_LINES = 2000
"""Maximum number of lines that are compared: the time grows with their square."""


class DiffLine(NamedTuple):
    """A line of a unified diff."""

    tag: str
    """The HTML element: "ins", "del" or "span"."""
    text: str


def unified(before: str, after: str) -> list[DiffLine]:
    """Return the unified diff of two texts, without the names of files."""
    old, new = before.splitlines(), after.splitlines()
    start = _common(old, new)
    end = _common(old[start:][::-1], new[start:][::-1])
    # Only what differs is compared, with its context.
    first, rest = max(0, start - CONTEXT), max(0, end - CONTEXT)
    old, new = old[first : len(old) - rest], new[first : len(new) - rest]
    if max(len(old), len(new)) > MOST_LINES:
        return [DiffLine("span", _("(too many lines have changed to compare them)"))]
    return [_line(line, first) for line in list(difflib.unified_diff(old, new, n=CONTEXT, lineterm=""))[2:]]


def _common(old: Sequence[str], new: Sequence[str]) -> int:
    """Return the number of equal lines at the beginning."""
    return sum(1 for pair in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))


def _line(text: str, first: int) -> DiffLine:
    """Return a line of the diff of two texts without their first lines."""
    if text.startswith("@@"):
        text = re.sub(r"([-+])(\d+)", lambda found: f"{found[1]}{int(found[2]) + first}", text)
    return DiffLine({"+": "ins", "-": "del"}.get(text[:1], "span"), text)
