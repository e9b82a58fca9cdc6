"""The values that are passed between claiming, the subscriber process and settling."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from django_mysqlqueue.options.delivery_limits import NO_KEY, NO_LIMITS, DeliveryLimits
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service.refs import GroupRef


class Slot(NamedTuple):
    """The right to start one message within a span of time, by this process's monotonic clock in seconds."""

    key: str
    """The key of the limits per key; ``NO_KEY`` if the message has none."""
    after: float
    before: float

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys in whose accounts it is: that of the group, and the message's."""
        return (NO_KEY,) if self.key == NO_KEY else (NO_KEY, self.key)


class Candidate(NamedTuple):
    """A message that a claim looks at. If it was deleted, it is claimed, and the process finds out."""

    key: str
    """Its partition."""
    offset: int
    target: str = ""
    """The only group that gets it; empty: all."""
    size: int = 0
    expires_at: int | None = None
    coalesce_key: str | None = None
    publisher_key: str | None = None
    """None if no limit needs it."""
    metadata: str = ""
    """As JSON text; empty if neither a limit nor a filter needs it."""
    attempts: int = 0
    """Number of attempts of a job before it was moved (``job_retries``)."""


class JobName(NamedTuple):
    """The name of a job, wherever one of its deliveries is reported."""

    id: str
    task: str
    """The dotted path of its task."""


class Claimed(NamedTuple):
    """A delivery that this process has claimed: one row and its token.

    It is a tuple because creating one takes a fifth of the time of a frozen dataclass, and each message needs three.
    """

    ref: GroupRef
    key: str
    offset: int
    token: int
    """A random number above 0 that the row has, too."""
    attempt: int
    """The number of this attempt, from 1, set at the claim."""
    suspect: bool
    """Whether it is a suspected poison message, because an earlier subscriber was lost with it: its start is recorded
    before it runs."""
    size: int
    """Payload size in bytes."""
    delivered_at: int = 0
    """When it was claimed, in epoch milliseconds."""
    by: str = ""
    """The subscriber that claimed it."""
    slot: Slot | None = None
    """The right to start, if the group has limits."""
    job: JobName | None = None
    """The job that it is of, once the process has read it; None: it is of none."""


class Action(Enum):
    """The action of a flush on a delivery, chosen by the handler, or by its process without calling the handler."""

    ACK = "ack"
    NACK = "nack"
    SNOOZE = "snooze"
    REJECT = "reject"
    RELEASE = "release"
    """Make it due again without counting an attempt: it never started, or it did not fail itself."""
    DELETED = "deleted"
    """Settle it without a call: its message was deleted from the log after the claim."""
    EXPIRED = "expired"
    """Settle it without a call: its message has expired."""
    SUPERSEDED = "superseded"
    """Settle it without a call: a later message has the same coalesce key."""
    STALE = "stale"
    """Only forget it here: it was found to be stale before it started."""


OUTCOMES = {
    Action.ACK: Outcome.ACKED,
    Action.NACK: Outcome.FAILED,
    Action.SNOOZE: Outcome.SNOOZED,
    Action.REJECT: Outcome.DEAD_LETTERED,
    Action.RELEASE: Outcome.RELEASED,
    Action.DELETED: Outcome.DELETED,
    Action.EXPIRED: Outcome.EXPIRED,
    Action.SUPERSEDED: Outcome.SUPERSEDED,
    Action.STALE: Outcome.LOST,
}
"""The outcome of each action, except for two cases that the flush decides: a nack of the last attempt dead-letters,
and a delivery that is stale by then is lost."""


UNCALLED = (Action.EXPIRED, Action.SUPERSEDED)
"""The actions that settle a message that the handler need not get."""


class JobRetry(NamedTuple):
    """The wait of a job for its next attempt. Times are in epoch milliseconds."""

    retry_at: int
    """When it is due."""
    retry_reason: str = ""
    retry_since: int = 0
    """Since when the job has asked for attempts without counting any; 0: it has not."""
    redriven_id: str | None = None
    """The id of the copy that waits in the place of its message; None: the message does."""


class Copy(NamedTuple):
    """The copy of a message with which a job waits for long."""

    id: str
    is_due: bool
    """Whether it is due at once, because the job was asked to stop."""


class JobEnd(NamedTuple):
    """What becomes of a job's result after an attempt. The status depends on what is written for the delivery."""

    id: str
    started_at: int = 0
    """When the first attempt started; 0: leave it."""
    attempted_at: int = 0
    """When this attempt started; 0: it did not."""
    return_value: str = ""
    """JSON; empty if the attempt failed."""
    errors: str | None = None
    """All errors up to now; None: leave them."""
    progress: str | None = None
    """The last progress, as JSON; None: leave it."""
    worker_ids: str | None = None
    """The subscribers that had the job; None: leave them; empty: it has not been attempted."""
    stage: str = ""
    """The stage of its chain, if it has one."""
    retry: JobRetry | None = None
    """The wait for the next attempt, if it waits."""


NOT_BEGUN = JobEnd("")
"""Stands for a job that its claim has not made RUNNING: its result is left as it is, because no result has this id."""


class Settlement(NamedTuple):
    """The end of a delivery in this process, to be written by the next flush."""

    delivery: Claimed
    action: Action
    delay_ms: int = 0
    error: str = ""
    is_written: bool = False
    """Whether the handler's transaction has written it (an ack or a reject): the flush only advances the watermark."""
    handled_ms: int = 0
    """Duration of the handler's call in milliseconds; for a batch, that of the whole call."""
    is_final: bool | None = None
    """Whether a failure dead-letters the message, as its handler was told. None: ``max_attempts`` decides."""
    is_started: bool = True
    """Whether the handler was called. A message that has expired is dead-lettered before its attempt starts, and a
    release may come before or after the call."""
    job: JobEnd | None = None
    """What the attempt left for the result of a job."""
    held: object = None
    """An object that the process wants to get back after the flush. The service layer does not use it."""


class Returned(NamedTuple):
    """Slots of a limited key whose messages have not started."""

    number: int
    since: int
    """When the first of them was reserved, in epoch milliseconds."""


@dataclass(frozen=True, slots=True)
class Holding:
    """The slots that a subscriber process holds, as it knows it."""

    subscriber: str
    limits: DeliveryLimits = NO_LIMITS
    """The limits of the group, for all its subscribers together."""
    lease_ms: int = 0
    """LEASE_DURATION in milliseconds: after it, a subscriber without heartbeats holds no slots."""
    held: Mapping[str, int] = field(default_factory=dict)
    """By limited key, the number of its messages that wait or run; ``NO_KEY``: all of the group."""
    stored: Mapping[str, int] = field(default_factory=dict)
    """The numbers that its rows have."""
    doubtful: Collection[str] = ()
    """Keys whose rows may have another number, because the outcome of a COMMIT is unknown."""
    returned: Mapping[str, Returned] = field(default_factory=dict)
    """Slots to release."""
    written: set[str] = field(default_factory=set)
    """Keys whose rows its transaction has written, even if the outcome of its COMMIT is unknown."""


@dataclass(slots=True)
class JobEnds:
    """What has become of jobs, to be written by the transaction that writes it for their deliveries."""

    ends: list[tuple[JobEnd, str]] = field(default_factory=list)
    """The ends of attempts, each with the job's status. Of several of one job, those after its end do not count."""
    reasons: dict[str, tuple[str, str]] = field(default_factory=dict)
    """For jobs that end without a call, by id: the name of an exception in ``tasks.exceptions``, and its text. What an
    attempt has left counts, too, but not that it is to be retried."""
    released: dict[str, str] = field(default_factory=dict)
    """For jobs whose claims have ended before they started, by id: the subscriber, which does not count as a worker.
    They are READY again. A job without an attempt keeps ``started_at``: the time for which its task may be unknown
    counts from there."""


@dataclass(slots=True)
class Flushed:
    """The result of a flush."""

    stale: list[Settlement] = field(default_factory=list)
    """Settlements of stale deliveries: nothing was written for them."""
    locked: list[Settlement] = field(default_factory=list)
    """Settlements whose row another transaction has locked: a later flush has to write them."""
    dead: list[tuple[Claimed, str]] = field(default_factory=list)
    """Deliveries that were dead-lettered, with the error."""
    moved: dict[tuple[str, int], Copy] = field(default_factory=dict)
    """(partition key, offset) of messages of jobs that were settled → the copy that waits instead."""
    waiting: dict[tuple[str, int], int] = field(default_factory=dict)
    """(partition key, offset) of messages to be redelivered → when, in epoch milliseconds."""
    watermarks: dict[str, int] = field(default_factory=dict)
    """New watermarks, to be stored by the same transaction."""
    unfinished: set[str] = field(default_factory=set)
    """Partitions whose watermark can advance further: flush them again."""
    held: dict[str, int] | None = None
    """By limited key, the slots that the subscriber's rows say it holds; None if none was to be written."""
    skipped: set[str] = field(default_factory=set)
    """Partitions whose offsets row another transaction had locked: flush them again a little later."""
