"""The input and the output of the checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from soak import plan
from soak.records import Step, Transaction

SHOWN = 10
"""Maximum number of violations that a verdict lists."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the ledger: a committed message."""

    message_id: str
    publisher: str
    number: int
    key: str
    scheduled: bool
    at: float
    """When it was published, by the database's clock, in epoch milliseconds."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    message_id: str
    group: str
    attempts: int
    error: str


@dataclass(frozen=True, slots=True)
class SetAside:
    """A message of the quarantine."""

    alias: str
    topic: str
    message_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Collected:
    """The log of a database before and after the last GC."""

    now: float
    """The time before the GC, by the database's clock, in epoch milliseconds."""
    before: Mapping[str, float]
    """Message id → when the message entered the log, in epoch milliseconds."""
    after: Mapping[str, float]
    alias: str = plan.HOME
    topics: Sequence[str] = (plan.TOPIC,)


@dataclass(frozen=True, slots=True)
class Progress:
    """The positions in a database of every group in every partition, at one moment."""

    at: float
    """When the result was read. All times are from the clock of ``records.now`` unless stated otherwise."""
    places: Mapping[tuple[str, str], tuple[int, int]]
    """(group, partition) → watermark and position, as of ``plan.place``."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A disturbance of a process or of the server."""

    kind: str
    since: float
    until: float
    """When it ended: for a kill the same as ``since``, for a freeze when the process was resumed."""
    pid: int = 0
    """The process; 0 means the server or connections."""
    group: str = ""
    """The only group that it concerns."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The input of the checks."""

    ledger: Sequence[Entry]
    transactions: Sequence[Transaction]
    steps: Mapping[str, Sequence[Step]]
    """Group → its steps, in the order in which they happened."""
    effects: Mapping[str, Counter[str]]
    """Atomic group → how often each message's effect was committed, in the order of the first effects."""
    dead: Sequence[DeadLetter]
    progress: Sequence[Progress] = ()
    """In chronological order."""
    troubles: Sequence[Trouble] = ()
    refused: Sequence[str] = ()
    """The ids of the committed messages that the log must refuse."""
    set_aside: Sequence[SetAside] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check: what it compared, and the violations that it found."""

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
