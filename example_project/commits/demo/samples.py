"""Samples: one line for each start of a handler, from which the demo computes progress and latency.

Each subscriber process appends its lines to a file of its own, which takes microseconds and no SQL statement. Nothing
is written unless the environment variable DEMO_SAMPLES names a folder.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TextIO

from django_mysqlqueue import Delivery

FOLDER = "DEMO_SAMPLES"
_lock = threading.Lock()


@cache
def _file(folder: str) -> TextIO:
    # Line-buffered: no sample is lost if the process is killed.
    return Path(folder, f"{os.getpid()}.txt").open("a", buffering=1, encoding="ascii")


def record(delivery: Delivery) -> None:
    """Record that the handler of a delivery starts now."""
    folder = os.environ.get(FOLDER)
    if folder:
        now = round(time.time() * 1000)
        created = round(delivery.created_at.timestamp() * 1000)
        with _lock:
            _file(folder).write(f"{delivery.group} {delivery.offset} {delivery.attempt} {created} {now}\n")


@dataclass(slots=True)
class GroupSamples:
    """The samples of one group."""

    first: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Offset → the times of the insert into the outbox and of the first attempt's start (epoch milliseconds)."""
    starts: int = 0
    attempts: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(offset, attempt) → number of times that the handler was started for it."""
    last_start: int = 0

    def add(self, offset: int, attempt: int, created: int, started: int) -> None:
        self.starts += 1
        self.attempts[offset, attempt] += 1
        self.last_start = max(self.last_start, started)
        if offset not in self.first or started < self.first[offset][1]:
            self.first[offset] = created, started

    @property
    def retries(self) -> int:
        """The number of attempts after the first attempts."""
        return sum(1 for _, attempt in self.attempts if attempt > 1)

    @property
    def repeats(self) -> int:
        """The number of times that an attempt was started again."""
        return self.starts - len(self.attempts)


class SampleReader:
    """Read the subscribers' samples while they are written."""

    def __init__(self, folder: Path, groups: tuple[str, ...]) -> None:
        self.groups = {group: GroupSamples() for group in groups}
        self._folder = folder
        self._read: dict[Path, int] = {}

    @property
    def handled(self) -> int:
        """The number of messages whose handler has started, summed over the groups."""
        return sum(len(group.first) for group in self.groups.values())

    def read(self) -> None:
        """Read the complete lines that were appended since the last call."""
        for path in self._folder.glob("*.txt"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # it is being written
                    self._read[path] = self._read.get(path, 0) + len(line)
                    group, *numbers = line.decode("ascii").split()
                    self.groups[group].add(*map(int, numbers))
