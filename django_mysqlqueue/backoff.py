"""How long to wait before something that failed is tried again. Imports no Django: Spark's executors need none."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential backoff with jitter, in seconds.

    The wait after attempt n is ``initial * factor ** (n - 1)``, at most
    ``maximum``, times a random factor between ``1 - jitter`` and ``1 + jitter``.
    """

    initial: float = 1.0
    factor: float = 2.0
    maximum: float = 3600.0
    jitter: float = 0.2

    def delay(self, attempt: int, rng: Callable[[], float] = random.random) -> float:
        """Seconds to wait after the given attempt (1 is the first) has failed."""
        try:
            # As a float: whole numbers would be multiplied out to millions of digits.
            wait = min(self.initial * float(self.factor) ** (attempt - 1), self.maximum)
        except OverflowError:  # a float's exponent ends near 2 ** 1024
            wait = self.maximum if self.initial else 0.0
        return max(0.0, wait * (1 + self.jitter * (2 * rng() - 1)))


@dataclass(slots=True)
class Failures:
    """Counts how often in a row something failed, for a loop that waits longer each time."""

    backoff: Backoff
    count: int = 0

    def add(self) -> float:
        """One more; returns the seconds to wait."""
        self.count += 1
        return self.backoff.delay(self.count)

    def clear(self) -> int:
        """It succeeded; returns how often it had failed."""
        count, self.count = self.count, 0
        return count
