"""The loop of ``queuestatus --watch``: reads databases every few seconds until a key ends it."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import termios
import threading
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TextIO

from django.core.management.base import CommandError

from django_mysqlqueue.inspection.bounds import PAGES
from django_mysqlqueue.inspection.causes import Cause, QueueStatus, state_of
from django_mysqlqueue.inspection.overview import QueueOverview, get_overview
from django_mysqlqueue.inspection.problem import Problem
from django_mysqlqueue.inspection.problems import find_problems
from django_mysqlqueue.inspection.trends import GroupRow, read_rows, with_samples
from django_mysqlqueue.management.keys import START, Place, View, press, split
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.several import ANSWER_SECONDS, TOTAL_SECONDS, start_each

SECONDS = 2.0
"""Seconds between two reads, by default."""
SHORTEST = 0.5
LONGEST = 3600.0
REDRAW_SECONDS = 1.0
"""Seconds after which the screen is drawn again even if nothing was read."""
TICK = 0.1
"""Seconds after which the loop looks for answers and for another size of the terminal. A key ends the wait."""
ESCAPE_SECONDS = 0.05
"""Seconds in which the rest of an escape sequence arrives; the key Esc has none."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of one database, within the bounds of the dashboard's pages."""

    overview: QueueOverview
    causes: Sequence[Cause]
    """Worst first."""
    status: QueueStatus
    rows: Sequence[GroupRow]
    """The worst states first, then the longest backlogs."""


def read_snapshot(using: str) -> Snapshot:
    """Read the state of one database."""
    overview = with_samples(get_overview(using=using, bounds=PAGES))
    state = state_of(overview, find_problems(overview))
    return Snapshot(overview, state.causes, state.status, sorted_rows(overview, state.problems))


def sorted_rows(overview: QueueOverview, problems: Sequence[Problem]) -> list[GroupRow]:
    """Return the rows of groups: the worst states first, then the longest backlogs."""
    rows = read_rows(overview, problems)
    return sorted(rows, key=lambda row: (row.state.rank, -row.group.lag.value, row.group.ref))


@dataclass(slots=True)
class Watched:
    """A database that is watched."""

    alias: str
    found: Snapshot | None = None
    """What was read last."""
    problem: str = ""
    """Why it could not be read since."""
    answer: Future[Snapshot] | None = None
    """What is being read."""
    started: float = 0.0
    """When reading it began, by the monotonic clock."""
    due: float = 0.0
    """When the next read begins."""

    def rows(self, view: View) -> list[GroupRow]:
        """Return the groups that the list shows."""
        if self.found is None or self.problem:
            return []
        wanted = view.filter.casefold()
        return [row for row in self.found.rows if wanted in str(row.group.ref).casefold()]

    def turn(self, read: Callable[[str], Snapshot], seconds: float) -> bool:
        """Begin to read, or take what was read; return True if there is something new to show.

        ``read``: reads the database of an alias; raises ``CommandError`` if it cannot be read.
        """
        now = time.monotonic()
        if self.answer is None:
            if now < self.due:
                return False
            self.started = now
            only = [self.alias]
            self.answer = start_each(only, read, seconds=ANSWER_SECONDS, connect=ANSWER_SECONDS)[self.alias]
        if not self.answer.done():
            if self.problem or now - self.started < TOTAL_SECONDS:
                return False
            self.problem = failures.explain_silence(self.alias, TOTAL_SECONDS)
            return True
        answer, self.answer = self.answer, None
        self.due = time.monotonic() + seconds
        try:
            self.found, self.problem = answer.result(), ""
        except CommandError as error:
            self.problem = str(error)
        return True


def watch(
    aliases: Sequence[str],
    read: Callable[[str], Snapshot],
    show: Callable[[Sequence[Watched], View], None],
    *,
    seconds: float,
    size: Callable[[], object],
    keys: TextIO,
    change: Callable[[Place, str], None],
) -> None:
    """Show databases until the key q is pressed. A database that does not answer is tried again.

    Args:
        aliases: the databases.
        read: reads the database of an alias; raises ``CommandError`` if it cannot be read.
        show: draws the screen.
        seconds: seconds between two reads.
        size: returns the size of the terminal.
        keys: where keys are read, if it is a terminal.
        change: runs ``queuepause`` or ``queueresume`` on a group, in a terminal with its usual settings.
    """
    databases, view = [Watched(alias) for alias in aliases], START
    drawn_at, drawn_size, drawn_view = -math.inf, None, view
    with _ended_by_signals(), _keyboard(keys) as keyboard:
        while True:
            news = [one.turn(read, seconds) for one in databases]
            now, current = time.monotonic(), size()
            if any(news) or (current, view) != (drawn_size, drawn_view) or now - drawn_at >= REDRAW_SECONDS:
                show(databases, view)
                drawn_at, drawn_size, drawn_view = now, current, view
            for key in split(keyboard.pressed(TICK)):
                groups = {Place(one.alias, row.group.ref): row.group for one in databases for row in one.rows(view)}
                view = press(view, key, [*groups])
                if view.mode == "end":
                    return
                if view.is_asked and view.chosen is not None:
                    with keyboard.released():
                        change(view.chosen, "queueresume" if groups[view.chosen].paused else "queuepause")
                    view, drawn_at = replace(view, is_asked=False), -math.inf
                    for one in databases:
                        one.due = 0.0
                    break


class _NoKeyboard:
    """Stands for keys that cannot be read: stdin is not a terminal."""

    def pressed(self, seconds: float) -> str:
        """Wait."""
        time.sleep(seconds)
        return ""

    def released(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()


class _Keyboard:
    """The keys of a terminal, which passes on each key at once, without echo, unless it is released."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._before = termios.tcgetattr(fd)

    def take(self) -> None:
        """Begin."""
        mode = termios.tcgetattr(self._fd)
        mode[3] &= ~(termios.ECHO | termios.ICANON)
        # A shell would show its prompt on this screen after Ctrl-Z.
        mode[6][termios.VSUSP] = bytes([os.fpathconf(self._fd, "PC_VDISABLE")])
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        # The screen may be shown already: a key that was pressed since is kept.
        termios.tcsetattr(self._fd, termios.TCSADRAIN, mode)

    def restore(self) -> None:
        """Give the terminal its earlier settings. Keys that nobody has read answer no question: they are discarded."""
        termios.tcsetattr(self._fd, termios.TCSAFLUSH, self._before)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Give the terminal its earlier settings for a time, so that a line can be typed."""
        self.restore()
        yield
        self.take()

    def pressed(self, seconds: float) -> str:
        """Wait for keys."""
        data = self._read(seconds)
        if data.endswith(b"\x1b"):
            data += self._read(ESCAPE_SECONDS)
        return data.decode(errors="replace")

    def _read(self, seconds: float) -> bytes:
        if not select.select([self._fd], [], [], seconds)[0]:
            return b""
        try:
            return os.read(self._fd, 1024) or b"q"
        except OSError:  # the terminal was closed
            return b"q"


@contextlib.contextmanager
def _keyboard(terminal: TextIO) -> Iterator[_Keyboard | _NoKeyboard]:
    """Yield the keys. At the end, the terminal has its earlier settings."""
    if not terminal.isatty():
        yield _NoKeyboard()
        return
    keyboard = _Keyboard(terminal.fileno())
    try:
        keyboard.take()
        yield keyboard
    finally:
        keyboard.restore()


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make SIGTERM raise ``SystemExit``, so that the terminal is restored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def interval(text: str) -> float:
    """Parse the value of ``--watch``."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not SHORTEST <= seconds <= LONGEST:
        raise ArgumentTypeError(f"{text!r}: must be a number of seconds from {SHORTEST:g} to {LONGEST:g}")
    return seconds


def require_terminal(out: Any, environment: Mapping[str, str]) -> None:
    """Require a terminal that can show a screen."""
    if not out.isatty():
        problem = "stdout is not one"
    elif (name := environment.get("TERM", "")) in ("", "dumb", "unknown"):
        problem = f"TERM is {name!r}"
    else:
        return
    raise CommandError(f"--watch needs a terminal with a screen, but {problem}: use --format json, or omit --watch.")
