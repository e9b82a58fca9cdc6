"""The tasks that this process could not run, although it was given jobs of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

MOST = 20
"""Maximum number of tasks that are remembered for a queue: they are part of a heartbeat row."""
LONGEST_ERROR = 300
"""Maximum number of characters of an error that is remembered."""


class Unknown(NamedTuple):
    """Since when a process cannot run a task, and why."""

    since: int
    """In epoch milliseconds of the database's clock."""
    error: str


NO_TASKS: Mapping[str, Unknown] = MappingProxyType({})


class UnknownTasks:
    """Those of one queue. Handler threads add to it, and the poller and the metrics read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.deliveries = 0
        """Number of deliveries of jobs that this process could not run."""
        self.tasks = NO_TASKS
        """The tasks by path. A change makes another mapping."""

    def add(self, path: str, since: int, error: str) -> None:
        """Note that a job of a task could not run, at a time in epoch milliseconds."""
        with self._lock:
            self.deliveries += 1
            if path not in self.tasks and len(self.tasks) < MOST:
                self.tasks = MappingProxyType({**self.tasks, path: Unknown(since, error[:LONGEST_ERROR])})

    def discard(self, path: str) -> None:
        """Note that a task can run."""
        if path in self.tasks:
            with self._lock:
                self.tasks = MappingProxyType({name: one for name, one in self.tasks.items() if name != path})


def as_text(tasks: Mapping[str, Unknown]) -> str:
    """Return tasks as a heartbeat row has them; empty if there are none."""
    return json.dumps(dict(tasks)) if tasks else ""


def parsed(text: object) -> dict[str, Unknown]:
    """Return the tasks in a heartbeat row."""
    return {path: Unknown(*one) for path, one in json.loads(text).items()} if isinstance(text, str) else {}
