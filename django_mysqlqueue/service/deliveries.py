"""The values that pass between claiming, the subscriber process and settling."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from django_mysqlqueue.service.refs import GroupRef


class Claimed(NamedTuple):
    """A delivery that a claim has handed to this process: one row and its token.

    (A tuple is made in a fifth of the time of a frozen dataclass, and each message needs three.)
    """

    ref: GroupRef
    key: str
    offset: int
    token: int
    attempt: int
    """The number of this attempt, fixed at the claim; 1 is the first."""
    suspect: bool
    """An earlier holder of this message vanished: its start goes on record before it runs."""
    size: int
    """Payload size in bytes."""
    delivered_at: int = 0
    """When it was claimed, epoch milliseconds."""
    by: str = ""
    """The subscriber that claimed it."""


class Kind(Enum):
    """What became of a delivery."""

    ACK = "ack"
    SETTLED = "settled"
    """Already written by the handler's own transaction; the watermark may pass it."""
    NACK = "nack"
    SNOOZE = "snooze"
    REJECT = "reject"
    GIVE_BACK = "give_back"
    """Claimed and never started."""
    DELETED = "deleted"
    """Its message was deleted from the log after the claim: settled without having run."""
    STALE = "stale"
    """Found to be another's before it started: nothing is written, only forgotten here."""


class Outcome(NamedTuple):
    """A delivery's end in this process, to be written by the next flush."""

    delivery: Claimed
    kind: Kind
    delay_ms: int = 0
    error: str = ""
    said: Kind | None = None
    """Where ``kind`` is SETTLED: what the handler's own transaction has written."""
    handled_ms: int = 0
    """How long the handler's call took; one call of a batch handler is counted for each of its messages."""
    held: object = None
    """What the process wants to find with it again after the flush; nothing here looks at it."""


@dataclass(slots=True)
class Flushed:
    """What a flush found."""

    stale: list[Outcome] = field(default_factory=list)
    """Outcomes whose delivery was no longer this process's: nothing was changed for them."""
    locked: list[Outcome] = field(default_factory=list)
    """Outcomes whose row another transaction has locked: to be written by a later flush."""
    dead: list[tuple[Claimed, str]] = field(default_factory=list)
    """Deliveries that went to the DLQ, and the error."""
    waiting: dict[tuple[str, int], int] = field(default_factory=dict)
    """(partition key, offset) of what is to come again → when, epoch milliseconds."""
    watermarks: dict[str, int] = field(default_factory=dict)
    """New watermarks, to be stored by the same transaction."""
    unfinished: set[str] = field(default_factory=set)
    """Partitions whose watermark has further to go: flush them again."""
    skipped: set[str] = field(default_factory=set)
    """Partitions whose offsets row was locked by another: flush them again a little later."""
