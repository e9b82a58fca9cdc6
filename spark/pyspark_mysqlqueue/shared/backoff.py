# Generated from django_mysqlqueue/options/backoff.py by tools/shared_modules.py.
"""Exponential backoff. This module does not import Django, because Spark's executors do not have it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with jitter, in seconds.

    The delay after attempt n is ``initial * factor ** (n - 1)``, at most ``maximum``, multiplied by a random number
    between ``1 - jitter`` and ``1 + jitter``.
    """

    initial: float = 1.0
    factor: float = 2.0
    maximum: float = 3600.0
    jitter: float = 0.2

    def delay(self, attempt: int, rng: Callable[[], float] = random.random) -> float:
        """Return the delay in seconds after a failed attempt.

        Args:
            attempt: the number of the attempt, from 1.
            rng: returns a random number from 0 to 1.
        """
        try:
            # As a float: the power of an int can have millions of digits.
            wait = min(self.initial * float(self.factor) ** (attempt - 1), self.maximum)
        except OverflowError:  # The largest float is near 2 ** 1024.
            wait = self.maximum if self.initial else 0.0
        return max(0.0, wait * (1 + self.jitter * (2 * rng() - 1)))


@dataclass(slots=True)
class Failures:
    """A count of failures in a row, for a loop that waits longer after each."""

    backoff: Backoff
    count: int = 0

    def add(self) -> float:
        """Count a failure, and return the seconds to wait."""
        self.count += 1
        return self.backoff.delay(self.count)

    def clear(self) -> int:
        """Note a success, and return the number of failures before it."""
        count, self.count = self.count, 0
        return count
