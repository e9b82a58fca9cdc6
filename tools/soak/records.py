"""What handlers and publishers say of themselves, in files that survive any kill.

A line is one ``write`` to a file opened with O_APPEND: it is there as soon as
the call returns, whatever becomes of the process, and the lines of many
processes stand in the order in which they were written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STARTED, DONE, FAILED, REJECTED = "S", "D", "F", "R"
COMMITTED, ROLLED_BACK, UNKNOWN, REPEATED = "C", "B", "U", "P"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that a handler said of one delivery."""

    verb: str
    message_id: str
    key: str
    offset: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Transaction:
    """What a publisher says of one of its transactions: the messages ``first`` up to but not ``last``."""

    verb: str
    publisher: str
    first: int
    last: int
    note: str = ""


def write(path: Path, lines: Iterable[Step | Transaction]) -> None:
    os.write(_opened(path), "".join(f"{_text(line)}\n" for line in lines).encode())


def _text(line: Step | Transaction) -> str:
    if isinstance(line, Step):
        return f"{line.verb}|{line.message_id}|{line.key}|{line.offset}|{line.attempt}"
    return f"{line.verb}|{line.publisher}|{line.first}|{line.last}|{' '.join(line.note.split())}"


@cache
def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def steps(path: Path) -> list[Step]:
    return [
        Step(verb, message_id, key, int(offset), int(attempt))
        for verb, message_id, key, offset, attempt in _fields(path)
    ]


def transactions(path: Path) -> list[Transaction]:
    return [
        Transaction(verb, publisher, int(first), int(last), note)
        for verb, publisher, first, last, note in _fields(path)
    ]


def _fields(path: Path) -> Iterator[list[str]]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield line.split("|", 4)


def group_file(folder: Path, group: str) -> Path:
    return folder / f"group-{group}.steps"


def publishers_file(folder: Path) -> Path:
    return folder / "publishers.steps"
