"""The order of the rows in the table of consumer groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from django_mysqlqueue.inspection.trends import SETTLED_MINUTES, GroupRow


@dataclass(frozen=True, slots=True)
class Column:
    """A column by which the rows can be sorted."""

    name: str
    title: str
    is_number: bool = True
    order: str = ""
    """``"ascending"`` or ``"descending"`` if the rows are sorted by it."""
    next: str = ""
    """The value of the parameter ``sort`` that a click leads to."""


def _number(value: float | None) -> float:
    return -1.0 if value is None else value


KEYS: dict[str, Callable[[GroupRow], Any]] = {
    "group": lambda row: (row.group.ref.topic, row.group.ref.group),
    "state": lambda row: -row.state.rank,
    "backlog": lambda row: row.group.lag.value,
    "oldest": lambda row: _number(row.age_ms),
    "in": lambda row: _number(row.rates.entered),
    "out": lambda row: row.rates.settled,
    "drain": lambda row: _number(row.drain),
    "failed": lambda row: row.failed,
    "dead": lambda row: row.group.dead_letters.value,
    "limits": lambda row: row.limits,
    "subscribers": lambda row: len(row.group.live),
}
"""By name of a column, the value to sort by."""
ASCENDING = ("group", "limits")
"""Columns that a first click sorts in ascending order. Of the others, the largest values matter."""
DEFAULT = "-state"


def _titles() -> dict[str, str]:
    return {
        "group": _("group"),
        "state": _("state"),
        "backlog": _("backlog"),
        "oldest": _("oldest"),
        "in": _("in/s"),
        "out": _("out/s"),
        "drain": _("time to drain"),
        "failed": _("failed, %(number)s min") % {"number": SETTLED_MINUTES},
        "dead": _("dead letters"),
        "limits": _("limits"),
        "subscribers": _("subscribers"),
    }


def in_order(rows: list[GroupRow], sort: str | None) -> tuple[list[GroupRow], list[Column]]:
    """Return the rows sorted by a column, and the columns.

    ``sort``: name of a column, after ``-`` in descending order; unknown ones count as the default.
    """
    name = (sort or DEFAULT).removeprefix("-")
    if name not in KEYS:
        sort, name = DEFAULT, DEFAULT.removeprefix("-")
    descending = (sort or DEFAULT).startswith("-")
    columns = []
    for one, title in _titles().items():
        order = ("descending" if descending else "ascending") if one == name else ""
        goes_down = order == "ascending" or (not order and one not in ASCENDING)
        columns.append(
            Column(one, title, one not in ("group", "state", "limits"), order, f"{'-' if goes_down else ''}{one}")
        )
    return sorted(rows, key=KEYS[name], reverse=descending), columns
