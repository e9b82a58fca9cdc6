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
from dataclasses import dataclass
from typing import Any, TextIO

from django.core.management.base import CommandError

from django_mysqlqueue.inspection.bounds import PAGES
from django_mysqlqueue.inspection.causes import Cause, QueueStatus, state_of
from django_mysqlqueue.inspection.overview import QueueOverview, get_overview
from django_mysqlqueue.inspection.problem import Problem
from django_mysqlqueue.inspection.problems import find_problems
from django_mysqlqueue.inspection.trends import GroupRow, read_rows, with_samples
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
    show: Callable[[Sequence[Watched]], None],
    *,
    seconds: float,
    size: Callable[[], object],
    keys: TextIO,
) -> None:
    """Show databases until the key q is pressed. A database that does not answer is tried again.

    ``read``: reads the database of an alias; raises ``CommandError`` if it cannot be read.
    """
    databases = [Watched(alias) for alias in aliases]
    drawn_at, drawn_size = -math.inf, None
    with _ended_by_signals(), _keys(keys) as pressed:
        while True:
            news = [one.turn(read, seconds) for one in databases]
            now, current = time.monotonic(), size()
            if any(news) or current != drawn_size or now - drawn_at >= REDRAW_SECONDS:
                show(databases)
                drawn_at, drawn_size = now, current
            if "q" in pressed(TICK).lower():
                return


@contextlib.contextmanager
def _keys(terminal: TextIO) -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for keys. Until the end, the terminal passes on each key at once, without echo."""
    if not terminal.isatty():
        yield lambda seconds: time.sleep(seconds) or ""  # type: ignore[func-returns-value]
        return
    fd = terminal.fileno()
    before = termios.tcgetattr(fd)
    mode = termios.tcgetattr(fd)
    mode[3] &= ~(termios.ECHO | termios.ICANON)
    # A shell would show its prompt on this screen after Ctrl-Z.
    mode[6][termios.VSUSP] = bytes([os.fpathconf(fd, "PC_VDISABLE")])
    mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
    termios.tcsetattr(fd, termios.TCSAFLUSH, mode)

    def pressed(seconds: float) -> str:
        if not select.select([fd], [], [], seconds)[0]:
            return ""
        try:
            return os.read(fd, 1024).decode(errors="replace") or "q"
        except OSError:  # the terminal was closed
            return "q"

    try:
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSAFLUSH, before)


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
