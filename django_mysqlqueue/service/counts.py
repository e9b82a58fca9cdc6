"""Counts that may stop before the end, so that their cost is bounded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Count:
    """A number that is exact, or a lower bound if the count stopped, or was exact a moment ago."""

    value: int
    exact: bool = True
    about: bool = False
    """True if the number was exact a moment ago. ``exact`` is False then."""

    @classmethod
    def up_to(cls, cap: int, number: int) -> Count:
        """Return the count of a query that stops at ``cap + 1``."""
        return cls(min(number, cap), number <= cap)

    def __str__(self) -> str:
        if self.about:
            return f"≈ {self.value:,}"
        return f"{self.value:,}" if self.exact else f"{self.value:,}+"

    def __add__(self, other: Count) -> Count:
        exact = self.exact and other.exact
        is_bound = any(not one.exact and not one.about for one in (self, other))
        return Count(self.value + other.value, exact, about=not exact and not is_bound)

    def __bool__(self) -> bool:
        return self.value > 0

    def capped(self, cap: int) -> Count:
        """Return this count, cut off at ``cap``."""
        return Count(min(self.value, cap), self.exact and self.value <= cap)


def total(counts: Iterable[Count]) -> Count:
    """Return the sum of counts; 0 if there are none."""
    return sum(counts, Count(0))
