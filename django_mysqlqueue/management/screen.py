"""The screen of ``queuestatus --watch``. Only this module imports rich, which the extra ``watch`` installs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import SegmentLines
from rich.table import Table
from rich.text import Text

from django_mysqlqueue.inspection.causes import Cause, QueueStatus, unavailable
from django_mysqlqueue.inspection.overview import QueueOverview
from django_mysqlqueue.inspection.problem import NOTE
from django_mysqlqueue.inspection.trends import GroupRow
from django_mysqlqueue.management.group_table import COLUMNS, group_table
from django_mysqlqueue.management.keys import HELP, START, View
from django_mysqlqueue.management.tables import GAP, details
from django_mysqlqueue.management.watching import Snapshot, Watched
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.text.escaping import visible
from django_mysqlqueue.text.humanize import counted, duration, moment, since_moment

CAUSES = 7
"""Maximum number of causes."""
LARGE = 40
"""Lines of a screen on which each cause has its error and its next step."""
LATE = 2.0
"""Seconds after which the screen says that it waits for an answer."""
DEFAULT_SIZE = (80, 24)
"""For terminals that do not know their size."""
BADGES = {"ok": "bold black on green", "degraded": "bold black on yellow", "stopped": "bold white on red"}
STYLES = ("bold red", "yellow", "green")
"""By severity of a problem, or rank of a state."""


def _table(rows: Sequence[GroupRow], width: int, chosen: GroupRef | None) -> Table:
    """Return the table with as many columns as there is room for."""
    found = group_table(rows, width)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for column, own in zip(found.columns, found.widths, strict=True):
        table.add_column(
            Text(column.title),
            justify="right" if column.is_number else "left",
            width=own,
            no_wrap=True,
            overflow="ellipsis",
            vertical="bottom",
        )
    for row, texts in zip(rows, found.cells, strict=True):
        cells = [
            Text(text, _style(row) if column.title == "state" else "")
            for column, text in zip(found.columns, texts, strict=True)
        ]
        table.add_row(*cells, style="reverse" if row.group.ref == chosen else "")
    return table


def _style(row: GroupRow) -> str:
    return STYLES[row.state.rank] if row.state.rank < NOTE or row.state.kind == "working" else ""


# -- a database ------------------------------------------------------------------


def _line(*parts: tuple[str, str] | str) -> Text:
    """Return a text of one line, which is cut where the screen ends."""
    pieces = [(visible(part), "") if isinstance(part, str) else (visible(part[0]), part[1]) for part in parts]
    return Text.assemble(*pieces, no_wrap=True, overflow="ellipsis")


def _banner(status: QueueStatus, now: int = 0) -> Iterator[Text]:
    symptoms = facts = ""
    if status.cause is not None and status.state != "ok":
        symptoms, facts = _symptoms(status.cause), status.cause.facts(now, when=since_moment)
    badge = (f" {status.name.upper()} ", BADGES[status.state])
    yield Text.assemble(badge, f" {visible(status.headline())}", (symptoms, "dim"))
    if facts:
        yield _line((f"  {facts}", "dim"))
    if status.advice:
        yield Text.assemble(("Next step: ", "bold"), visible(status.advice))


def _numbers(found: QueueOverview) -> Iterator[Text]:
    parts = [f"Backlog {found.lag}"]
    if found.oldest_at is not None:
        parts.append(f"oldest {duration((found.now - found.oldest_at) / 1000)}")
    parts += [f"in flight {found.in_flight}", f"retrying {found.retrying}", f"dead letters {found.dead_letters}"]
    yield Text(", ".join([*parts, f"live subscribers {len(found.live):,}"]))
    outbox = f"Outbox {found.outbox.waiting} due"
    if found.outbox.waiting_since is not None:
        outbox += f" (oldest {duration((found.now - found.outbox.waiting_since) / 1000)})"
    ago = f"{duration((found.now - found.sequenced_at) / 1000)} ago" if found.sequenced_at else "never"
    yield Text(f"{outbox}, {found.outbox.scheduled} scheduled; last offset {found.last_offset:,}, sequencer {ago}")


def _symptoms(cause: Cause) -> str:
    number = len(cause.symptoms)
    return f" ({counted(number, 'symptom')})" if number else ""


def _cause(cause: Cause, now: int, *, in_detail: bool) -> Iterator[Text]:
    yield _line(("● ", STYLES[cause.severity]), cause.headline(), (_symptoms(cause), "dim"))
    if in_detail:
        for text in [*details(cause, now), cause.advice]:
            yield _line(f"  {text}")


def _database(
    one: Watched, view: View, *, width: int, height: int, most: int, seconds: float, waited: float
) -> Iterator[RenderableType]:
    found, heading = one.found, [(f"Database {one.alias!r}", "bold")]
    if found is not None:
        heading.append((f"  {moment(found.overview.now)[:19]}", "dim"))
    if waited >= LATE and not one.problem:
        heading.append((f"  no answer for {duration(waited)}", "yellow"))
    yield _line(*heading)
    if one.problem:
        yield from _banner(unavailable(one.alias, one.problem))
        yield _line((f"It is tried again {_every(seconds)}.", "dim"))
    elif found is None:
        yield _line(("Reading…", "dim"))
    elif (row := _opened(one, view)) is not None:
        yield from _group(row, found)
    else:
        yield from _snapshot(found, height=height)
        yield from _groups(one, view, width=width, most=most)


def _snapshot(found: Snapshot, *, height: int) -> Iterator[RenderableType]:
    yield from _banner(found.status, found.overview.now)
    yield from _numbers(found.overview)
    most = min(CAUSES, max(1, height // 6))
    # The banner is about the worst.
    causes = [one for one in found.causes if found.status.state == "ok" or one is not found.status.cause]
    for cause in causes[:most]:
        yield from _cause(cause, found.overview.now, in_detail=height >= LARGE)
    if len(causes) > most:
        yield _line((f"  {counted(len(causes) - most, 'more problem')}", "dim"))


def _groups(one: Watched, view: View, *, width: int, most: int) -> Iterator[RenderableType]:
    """Yield the list, from the first group or up to the chosen one."""
    rows = one.rows(view)
    chosen = view.chosen.ref if view.chosen is not None and view.chosen.alias == one.alias else None
    number = next((number for number, row in enumerate(rows) if row.group.ref == chosen), 0)
    first = max(0, number + 1 - most)
    if rows:
        yield Text("")
        yield _table(rows[first : first + most], width, chosen)
    left = len(rows) - most
    if left > 0:
        yield _line((counted(left, "more group"), "dim"))
    elif one.found is not None and one.found.overview.more_groups:
        yield _line(("There are more groups. Only the first ones by topic and name are read.", "dim"))


# -- a group ---------------------------------------------------------------------


def _opened(one: Watched, view: View) -> GroupRow | None:
    """Return the group of a database that is open; None if it has none, or no longer."""
    if view.mode != "group" or view.chosen is None or view.chosen.alias != one.alias:
        return None
    return next((row for row in one.rows(view) if row.group.ref == view.chosen.ref), None)


def _group(row: GroupRow, found: Snapshot) -> Iterator[RenderableType]:
    group = row.group
    yield _line((str(group.ref), "bold"), "  ", (row.state.text, _style(row)))
    for cause in found.causes:
        if group.ref in cause.refs:
            yield from _cause(cause, found.overview.now, in_detail=True)
    facts = [(column.title.replace("\n", " "), column.text(row)) for column in COLUMNS[1:]]
    facts += [("filter", str(group.filter))] if group.filter is not None else []
    facts += [(one.name, f"{one.text} (overridden by {one.by}, {moment(one.at)[:19]})") for one in group.overrides]
    facts += [("subscriber", one.name) for one in group.live]
    yield from (_line((f"{name:<16}", "dim"), text) for name, text in facts)


# -- the screen ------------------------------------------------------------------


def _every(seconds: float) -> str:
    return f"every {duration(seconds)}"


class Screen:
    """Draws the databases one below the other."""

    def __init__(self, console: Console, live: Live, seconds: float) -> None:
        self._console = console
        self._live = live
        self._seconds = seconds

    def size(self) -> tuple[int, int]:
        """Return the columns and lines of the terminal."""
        width, height = os.get_terminal_size(self._console.file.fileno())
        return width or DEFAULT_SIZE[0], height or DEFAULT_SIZE[1]

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Show the terminal's earlier contents for a time, and what is written meanwhile."""
        self._live.stop()
        yield
        self._live.start()

    def show(self, databases: Sequence[Watched], view: View = START) -> None:
        """Draw the screen."""
        self._console.size = self.size()
        self._live.update(SegmentLines(self._lines(databases, view), new_lines=True), refresh=True)

    def _lines(self, databases: Sequence[Watched], view: View) -> list[Any]:
        """Return the lines. If there are too many, the longest tables are cut first."""
        height = self._console.height
        every = {one.alias: len(one.rows(view)) for one in databases}
        rows = dict(every)
        while True:
            lines = self._render(databases, view, rows)
            excess = len(lines) - height
            longest = max(rows, key=lambda alias: rows[alias])
            if excess <= 0 or rows[longest] <= 1:
                break
            # The first cut adds a line: that there are more groups. Half of a table is the most: others may be as long.
            cut = excess + (rows[longest] == every[longest])
            rows[longest] -= min(cut, max(1, rows[longest] // 2))
        if excess > 0:
            more = Text("The window is too small for the rest.", "dim", no_wrap=True, overflow="ellipsis")
            lines = [*lines[: height - 1], *self._console.render_lines(more)]
        return lines

    def _render(self, databases: Sequence[Watched], view: View, rows: dict[str, int]) -> list[Any]:
        width, height = self._console.size
        parts: list[RenderableType] = [self._head(view)]
        if view.mode == "help":
            parts += [_line((f"{key:<12}", "bold"), text) for key, text in HELP.items()]
            return self._console.render_lines(Group(*parts))
        shown = [one for one in databases if _opened(one, view)] or databases
        for one in shown:
            waited = 0.0 if one.answer is None else time.monotonic() - one.started
            if len(shown) > 1:
                parts.append(Text(""))
            parts += _database(
                one,
                view,
                width=width,
                height=height // len(databases),
                most=rows[one.alias],
                seconds=self._seconds,
                waited=waited,
            )
        return self._console.render_lines(Group(*parts))

    def _head(self, view: View) -> Text:
        if view.mode == "filter":
            return _line(("Filter: ", "bold"), f"{view.filter}_", ("  Enter keeps it, Esc clears it.", "dim"))
        text = f"queuestatus, {_every(self._seconds)}. Press h for the keys, q to quit."
        chosen = f" Chosen: {view.chosen.ref}." if view.chosen is not None else ""
        return _line((text, "dim"), (f" Filter: {view.filter}." if view.filter else "", "yellow"), chosen)


@contextlib.contextmanager
def opened(out: Any, *, seconds: float, color: bool = True) -> Iterator[Screen]:
    """Show a screen on a terminal. At the end, the terminal has its earlier contents again.

    ``color``: whether to use colors, unless the environment has ``NO_COLOR``.
    """
    encoding = getattr(out, "encoding", None) or "utf-8"
    with open(out.fileno(), "w", encoding=encoding, errors="backslashreplace", closefd=False) as file:
        console = Console(
            file=file,
            force_terminal=True,
            force_interactive=True,
            no_color=None if color else True,
            markup=False,
            emoji=False,
            highlight=False,
        )
        with Live(
            console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        ) as live:
            yield Screen(console, live, seconds)
