"""Time that stands still except where a test moves it."""

from __future__ import annotations

import time

import pytest
from django.db import connection

from tests.support.harness import Sub
from tests.support.internals import dialect_of

EPOCH = 1_800_000_000_000


class Time:
    """The database's clock and the subscribers' monotonic one; both stand still until they are moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed = 0
        """Milliseconds; not set back between examples, like the clocks that it stands for."""
        self.hours_off = 0.0
        self._dialect = dialect_of(connection)
        self._began, real = time.monotonic(), time.time
        monkeypatch.setattr(self._dialect, "now_ms", str(EPOCH), raising=False)
        monkeypatch.setattr(time, "monotonic", lambda: self._began + self.passed / 1000)
        # A client's wall clock, which must not matter.
        monkeypatch.setattr(time, "time", lambda: real() + self.hours_off * 3600)

    @property
    def now(self) -> int:
        return EPOCH + self.passed

    def move(self, milliseconds: int) -> None:
        self.passed += milliseconds
        self._dialect.now_ms = str(self.now)

    def pass_in_sleeps_of(self, sub: Sub) -> None:
        """The poller of a subscriber that one thread drives sleeps at once, and the time has passed."""
        sub.inbox._poller.wait = lambda seconds: self.move(round(seconds * 1000) + 1)  # type: ignore[method-assign]
