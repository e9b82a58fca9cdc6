"""Why an outcome that no serial order has is right: a sentence for each kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.interleavings.explore import Unserial


@dataclass(frozen=True)
class Reason:
    """A kind of outcome."""

    name: str
    sentence: str
    fits: Callable[[Unserial], bool]


REASONS = (
    Reason(
        "between-transactions",
        "It is as if each transaction had run alone, in some order (conflict-serializable). An operation of several "
        "transactions is not one step: what others commit between two of them it meets as it is then.",
        lambda one: one.between,
    ),
    Reason(
        "passed-over",
        "A statement passed over rows that the other one had locked (SKIP LOCKED). It did less, and says so where it "
        "matters (busy, locked, skipped, later); the next poll does the rest, as the drain shows.",
        lambda one: one.passed_over,
    ),
    Reason(
        "waited",
        "A statement waited for the other's COMMIT and went on with the rows as they were then: between what it had "
        "read before and what it did afterwards the other one has come.",
        lambda one: one.waited,
    ),
    Reason(
        "read-committed",
        "The transaction read before the other one's COMMIT and once more, or locked rows, after it: each statement "
        "sees what is committed when it begins. What counts is decided by the statement that locks.",
        lambda one: one.read_before,
    ),
)


def of(one: Unserial) -> str:
    """The name of the first reason that fits; ``""``: none does."""
    return next((reason.name for reason in REASONS if reason.fits(one)), "")
