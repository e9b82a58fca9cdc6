"""The values that pass between claiming, the subscriber process and settling."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from django_mysqlqueue.outcomes import Outcome
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


class Action(Enum):
    """What a flush does with a delivery: a handler's verb, or what its process found without calling the handler."""

    ACK = "ack"
    NACK = "nack"
    SNOOZE = "snooze"
    REJECT = "reject"
    RELEASE = "release"
    """Make it due again, uncounted: it was claimed and never started, or did not fail itself."""
    DELETED = "deleted"
    """Its message was deleted from the log after the claim: settle it without having run."""
    STALE = "stale"
    """Found to be another's before it started: write nothing, only forget it here."""


OUTCOMES = {
    Action.ACK: Outcome.ACKED,
    Action.NACK: Outcome.FAILED,
    Action.SNOOZE: Outcome.SNOOZED,
    Action.REJECT: Outcome.DEAD_LETTERED,
    Action.RELEASE: Outcome.RELEASED,
    Action.DELETED: Outcome.DELETED,
    Action.STALE: Outcome.LOST,
}
"""The outcome of each action, but for two cases that the flush decides: a nack of the last attempt dead-letters, and
whatever is done with a delivery that is another's by then, it is lost."""


class Settlement(NamedTuple):
    """A delivery's end in this process, to be written by the next flush."""

    delivery: Claimed
    action: Action
    delay_ms: int = 0
    error: str = ""
    is_written: bool = False
    """The handler's own transaction has written it (an ack or a reject); the flush only moves the watermark past it."""
    handled_ms: int = 0
    """How long the handler's call took; one call of a batch handler is counted for each of its messages."""
    held: object = None
    """What the process wants to find with it again after the flush; nothing here looks at it."""


@dataclass(slots=True)
class Flushed:
    """What a flush found."""

    stale: list[Settlement] = field(default_factory=list)
    """Settlements whose delivery was no longer this process's: nothing was changed for them."""
    locked: list[Settlement] = field(default_factory=list)
    """Settlements whose row another transaction has locked: to be written by a later flush."""
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
