"""The database's clock, as a process knows it from its own monotonic clock."""

from __future__ import annotations

import time

STEP_MS = 500
"""Milliseconds. A larger difference between the two clocks since the last poll is a step; a smaller one is slewing."""


class DatabaseClock:
    """The database's clock, continued by the monotonic clock between polls.

    After a step in either direction, heartbeats and visibility timeouts that were written before it look too old, or
    lie in the future, although their subscribers live. Live subscribers write them again, so nothing is judged by them
    until their duration has passed since the step, by this process's monotonic clock. A subscriber that has not written
    them by then starts nothing any more by its own. A transaction that judges by them compares the
    clocks itself (``check``), because the step may have happened since the last poll.
    """

    def __init__(self) -> None:
        self.offset_ms = 0.0
        """The database's clock minus the monotonic one: the lower bound of the last poll."""
        self._highest_ms = float("inf")
        self._stepped_at = float("-inf")

    def set(self, database_ms: int, took: float) -> float:
        """Set the clock, and return by how many seconds the database's clock has stepped; 0.0 if it has not."""
        step = self.check(database_ms, took) if self._highest_ms < float("inf") else 0.0
        self.offset_ms, self._highest_ms = self._bounds(database_ms, took)
        return step

    def now(self) -> int:
        """Return the current time of the database in epoch milliseconds."""
        return int(time.monotonic() * 1000 + self.offset_ms)

    def check(self, database_ms: int, took: float) -> float:
        """Compare the clocks as in ``set``, and return by how many seconds the database's clock has stepped."""
        lowest, highest = self._bounds(database_ms, took)
        step = max(0.0, lowest - self._highest_ms) + min(0.0, highest - self.offset_ms)
        if abs(step) <= STEP_MS:
            return 0.0
        self._stepped_at = time.monotonic()
        return step / 1000

    def is_doubtful(self, milliseconds: float) -> bool:
        """Return whether the clock has stepped in the last milliseconds, by the monotonic clock."""
        return time.monotonic() < self._stepped_at + milliseconds / 1000

    def _bounds(self, database_ms: int, took: float) -> tuple[float, float]:
        """Return the lowest and the highest difference of the clocks: the database read its own in the meantime."""
        lowest = database_ms - time.monotonic() * 1000
        return lowest, lowest + took * 1000 + 1
