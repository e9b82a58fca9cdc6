"""Counts that may stop before the end, so that what they count may be as long as it likes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Count:
    """A number that may stand for more: a count that stopped."""

    value: int
    exact: bool = True

    @classmethod
    def up_to(cls, cap: int, number: int) -> Count:
        """The count of a query that stops at ``cap + 1``."""
        return cls(min(number, cap), number <= cap)

    def __str__(self) -> str:
        return f"{self.value:,}" if self.exact else f"{self.value:,}+"

    def __add__(self, other: Count) -> Count:
        return Count(self.value + other.value, self.exact and other.exact)

    def __bool__(self) -> bool:
        return self.value > 0

    def capped(self, cap: int) -> Count:
        """The same, stopped at ``cap``: of a sum of two that stopped, one cap is enough."""
        return Count(min(self.value, cap), self.exact and self.value <= cap)


def total(counts: Iterable[Count]) -> Count:
    """The sum of some counts; of none it is 0."""
    return sum(counts, Count(0))
