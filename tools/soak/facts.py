"""What the checks look at, and what they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from soak.records import Step, Transaction

SHOWN = 10
"""Violations that a verdict names."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the ledger: a message that was committed."""

    message_id: str
    publisher: str
    number: int
    key: str
    scheduled: bool
    at: float
    """The database's clock, epoch milliseconds."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    message_id: str
    group: str
    attempts: int
    error: str


@dataclass(frozen=True, slots=True)
class Collected:
    """The log before and after a last GC."""

    now: float
    """The database's clock before it, epoch milliseconds."""
    before: Mapping[str, float]
    """By message id: when it took its place in the log, epoch milliseconds."""
    after: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where every group was in every partition, at one moment."""

    at: float
    """When the answer had come; by the clock of ``records.now``, like all times that are not said to be others."""
    places: Mapping[tuple[str, str], tuple[int, int]]
    """By group and partition: watermark and cursor."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that was done to a process or to the server."""

    kind: str
    since: float
    until: float
    """Of a kill the same; of a freeze when it was thawed."""
    pid: int = 0
    """Whom it hit; 0: the server, or connections."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that the checks look at."""

    ledger: Sequence[Entry]
    transactions: Sequence[Transaction]
    steps: Mapping[str, Sequence[Step]]
    """By group, in the order in which they happened."""
    effects: Mapping[str, Counter[str]]
    """By atomic group: how often each message's effect was committed."""
    dead: Sequence[DeadLetter]
    progress: Sequence[Progress] = ()
    """In the order of time."""
    troubles: Sequence[Trouble] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """One check: what it compared and what it found."""

    name: str
    compared: str
    violations: tuple[str, ...] = ()
    count: int = field(default=0)

    @property
    def ok(self) -> bool:
        return self.count == 0


def verdict(name: str, compared: str, violations: Iterable[str]) -> Verdict:
    found = list(violations)
    return Verdict(name, compared, tuple(found[:SHOWN]), len(found))
