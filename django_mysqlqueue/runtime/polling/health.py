"""Whether the work for a group goes well: its pauses after turns that failed, and after breakdowns."""

from __future__ import annotations

import time

from django_mysqlqueue.options.backoff import Backoff, Failures

REST = Backoff(initial=0.1, maximum=5.0, jitter=0.0)
"""The pause of a group after a failed turn. Other groups continue."""
RECOVERED = 60.0
"""Seconds after a breakdown without another one, after which a group counts as recovered."""


class Health:
    """The failures of the work for one group. They are all that a group still knows after a breakdown."""

    def __init__(self) -> None:
        self.rests_until = 0.0
        """The end of the group's pause, by the monotonic clock."""
        self.failures = Failures(REST)
        """Turns in a row that the database has made fail."""
        self.breakdowns = Failures(REST)
        """Times that the work for this group broke down, each less than ``RECOVERED`` seconds after the one before."""
        self.error: Exception | None = None
        """What it broke down with last, until it counts as recovered."""
        self.broke_at = 0.0
        """When that was, by the monotonic clock."""

    @property
    def is_down(self) -> bool:
        """Whether the group pauses after a breakdown."""
        return self.error is not None and time.monotonic() < self.rests_until

    def rest(self, seconds: float) -> None:
        """Pause the group from now on."""
        self.rests_until = time.monotonic() + seconds

    def failed(self) -> None:
        """Note that a turn failed, and pause the group for a while."""
        self.rest(self.failures.add())

    def succeeded(self) -> None:
        """Note that a turn succeeded."""
        self.failures.clear()

    def broke_down(self, error: Exception) -> None:
        """Note that the work broke down, and pause the group for a while."""
        self.error, self.broke_at = error, time.monotonic()
        self.rests_until = self.broke_at + self.breakdowns.add()

    def recover(self) -> None:
        """Forget the last breakdown if the group has worked well since."""
        if self.error is not None and time.monotonic() > self.broke_at + RECOVERED:
            self.error = None
            self.breakdowns.clear()
