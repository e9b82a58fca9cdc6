"""Counts that may stop before the end, so that their cost is bounded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.utils.translation import gettext as _

from django_mysqlqueue.text.humanize import duration


@dataclass(frozen=True, slots=True)
class Count:
    """A number that is exact, or a lower bound if the count stopped, or was exact some seconds ago."""

    value: int
    exact: bool = True
    age: float = 0.0
    """Seconds since the number was exact; 0 if it is current. If it is not, ``exact`` is False."""
    least: int = 0
    """If the number is not current, a current lower bound."""

    @classmethod
    def up_to(cls, cap: int, number: int) -> Count:
        """Return the count of a query that stops at ``cap + 1``."""
        return cls(min(number, cap), number <= cap)

    def __str__(self) -> str:
        if self.age:
            return _("≈ %(number)s (%(age)s ago)") % {"number": f"{self.value:,}", "age": duration(self.age)}
        return f"{self.value:,}" if self.exact else f"{self.value:,}+"

    def __add__(self, other: Count) -> Count:
        both = (self, other)
        least = sum(one.least if one.age else one.value for one in both)
        if any(not one.exact and not one.age for one in both):
            return Count(least, exact=False)
        age = max(self.age, other.age)
        return Count(self.value + other.value, self.exact and other.exact, age, least if age else 0)

    def __bool__(self) -> bool:
        return self.value > 0

    def capped(self, cap: int) -> Count:
        """Return this count, cut off at ``cap``."""
        return Count(min(self.value, cap), self.exact and self.value <= cap)


def total(counts: Iterable[Count]) -> Count:
    """Return the sum of counts; 0 if there are none."""
    return sum(counts, Count(0))
