"""Records of handlers and publishers, in files that survive a SIGKILL.

Each record is one ``write`` to a file that was opened with O_APPEND. It is in the file when the call returns, even if
the process is killed afterwards, and the records of several processes are in the order in which they were written.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STARTED, DONE, FAILED, REJECTED = "S", "D", "F", "R"
LEFT = "L"
"""The handler raised an exception: it no longer works on any message of the call."""
ENDS = frozenset({DONE, FAILED, REJECTED, LEFT})
AGAIN = "A"
"""The payload was that of a duplicate of this message."""
WRONG = "W"
"""The payload was that of another message."""
SQL = "-sql"
"""The end of the name of a process that is a client in plain SQL."""
CANCELLED = "X"
"""The job has ended, because it was cancelled."""
COMMITTED, ROLLED_BACK, UNKNOWN, REPEATED = "C", "B", "U", "P"


@dataclass(frozen=True, slots=True)
class Step:
    """A record of a handler about a delivery."""

    verb: str
    message_id: str
    key: str
    offset: int
    attempt: int
    at: float = 0.0
    """By the clock of ``now``. All records of one write have the same time."""
    process: str = ""
    """The pid of the process and a random part, because pids are reused."""

    @property
    def pid(self) -> int:
        return int(self.process.partition("-")[0] or 0)


@dataclass(frozen=True, slots=True)
class Transaction:
    """A record of a publisher about a transaction with the messages from ``first`` up to but not including ``last``."""

    verb: str
    publisher: str
    first: int
    last: int
    note: str = ""
    at: float = 0.0
    """When the publisher knew the outcome."""


def now() -> float:
    """Return seconds of CLOCK_MONOTONIC, which all processes of the machine share and which is never set."""
    return time.monotonic()


def me() -> str:
    """Return the name of this process."""
    return _name(os.getpid())


@cache
def _name(pid: int) -> str:
    return f"{pid}-{secrets.token_hex(3)}"


def write(path: Path, lines: Iterable[Step | Transaction]) -> None:
    os.write(_opened(path), "".join(f"{_text(line)}\n" for line in lines).encode())


def _text(line: Step | Transaction) -> str:
    if isinstance(line, Step):
        return f"{line.verb}|{line.message_id}|{line.key}|{line.offset}|{line.attempt}|{line.at:.6f}|{line.process}"
    note = " ".join(line.note.split())
    return f"{line.verb}|{line.publisher}|{line.first}|{line.last}|{line.at:.6f}|{note}"


@cache
def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def steps(path: Path) -> list[Step]:
    return [
        Step(verb, message_id, key, int(offset), int(attempt), float(at), process)
        for verb, message_id, key, offset, attempt, at, process in _fields(path, 7)
    ]


def transactions(path: Path) -> list[Transaction]:
    return [
        Transaction(verb, publisher, int(first), int(last), note, float(at))
        for verb, publisher, first, last, at, note in _fields(path, 6)
    ]


def _fields(path: Path, count: int) -> Iterator[list[str]]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield line.split("|", count - 1)


def group_file(folder: Path, group: str) -> Path:
    return folder / f"group-{group}.steps"


def publishers_file(folder: Path) -> Path:
    return folder / "publishers.steps"


def producers_file(folder: Path) -> Path:
    """Return the file with the transactions of the producers of jobs."""
    return folder / "producers.steps"


def cancels_file(folder: Path) -> Path:
    """Return the file with the jobs that have ended because they were cancelled."""
    return folder / "cancelled-jobs.steps"
