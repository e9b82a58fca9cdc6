"""The columns of the groups in ``queuestatus``, with and without ``--watch``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from django_mysqlqueue.inspection.trends import SETTLED_MINUTES, GroupRow
from django_mysqlqueue.management.tables import GAP, width_of
from django_mysqlqueue.text.escaping import visible

NAME = 20
"""Columns of the terminal to which the name shrinks before other columns are left out."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table."""

    title: str
    text: Callable[[GroupRow], str]
    place: int
    """The columns with the highest numbers are left out first."""
    is_number: bool = True


COLUMNS = (
    Column("group/topic", lambda row: str(row.group.ref), 0, is_number=False),
    Column("state", lambda row: _state(row), 1, is_number=False),
    Column("mode", lambda row: row.group.mode, 13, is_number=False),
    Column("backlog", lambda row: str(row.group.lag), 2),
    Column("in\nflight", lambda row: str(row.group.in_flight), 11),
    Column("retrying", lambda row: str(row.group.retrying), 10),
    Column("oldest", lambda row: row.oldest or "-", 3),
    Column("in/s", lambda row: row.entered, 7),
    Column("out/s", lambda row: row.settled, 6),
    Column("time to\ndrain", lambda row: _drain(row), 4),
    Column(f"failed,\n{SETTLED_MINUTES} min", lambda row: f"{row.failed:,}", 9),
    Column("dead\nletters", lambda row: str(row.group.dead_letters), 5),
    Column("limits", lambda row: _limits(row), 12, is_number=False),
    Column("subscribers", lambda row: str(len(row.group.live)), 8),
)
OF_NOW = tuple(column for column in COLUMNS if column.place not in (4, 6, 7, 9, 12, 13))
"""Those that need no comparison with earlier, for a list that is read once."""


def _state(row: GroupRow) -> str:
    return f"{row.state.text}, paused" if row.group.paused and row.state.kind != "paused" else row.state.text


def _drain(row: GroupRow) -> str:
    return f"{row.time_to_drain} ({row.drained_at})" if row.drained_at else row.time_to_drain


def _limits(row: GroupRow) -> str:
    return f"{row.limits or '-'}{' (reached)' if row.group.limited else ''}"


@dataclass(frozen=True, slots=True)
class GroupTable:
    """The columns that fit, with the texts and widths of their cells."""

    columns: Sequence[Column]
    cells: Sequence[Sequence[str]]
    widths: Sequence[int]


def group_table(
    rows: Sequence[GroupRow], width: float, *, columns: Sequence[Column] = COLUMNS, is_folded: bool = True
) -> GroupTable:
    """Return the table with as many of the columns as there is room for.

    ``is_folded``: whether the titles have their line breaks.
    """
    texts = {column: [visible(column.text(row)) for row in rows] for column in columns}
    widths = {
        column: max(map(width_of, [*(column.title.split("\n") if is_folded else [column.title]), *texts[column]]))
        for column in columns
    }
    name, shown = columns[0], list(columns)

    def others() -> int:
        return sum(widths[column] + GAP for column in shown[1:])

    while len(shown) > 1 and min(widths[name], NAME) + others() > width:
        shown.remove(max(shown, key=lambda column: column.place))
    widths[name] = int(max(1, min(widths[name], width - others())))
    cells = list(zip(*(texts[column] for column in shown), strict=True))
    return GroupTable(shown, cells, [widths[column] for column in shown])
