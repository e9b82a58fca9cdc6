"""What the poller and the groups that it polls share. Nobody writes into another's fields: they meet here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from django_mysqlqueue.conf import Settings
from django_mysqlqueue.runtime.handling.inbox import Inbox
from django_mysqlqueue.runtime.handling.observers import Watch
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import EVERYTHING, Subset


class Heartbeat(Protocol):
    """What is asked of the thread that sends heartbeats."""

    beat_at: float
    """When the last successful beat was sent, by the monotonic clock."""

    def good(self) -> bool:
        """Whether this process's leases are certainly its own."""

    def must_verify(self) -> bool:
        """Whether they have to be read again under lock, since they may have run out."""

    def verified(self) -> None:
        """They have been."""


class Clock:
    """The database's clock, carried on by the monotonic clock between polls."""

    def __init__(self) -> None:
        self.offset_ms = 0.0
        self.set(0)

    def set(self, database_ms: int) -> None:
        """What the database's clock says at this moment, epoch milliseconds."""
        self.offset_ms = database_ms - time.monotonic() * 1000

    def now(self) -> int:
        """Epoch milliseconds."""
        return int(time.monotonic() * 1000 + self.offset_ms)


class Progress:
    """When the poller's thread last got anywhere, by the monotonic clock: other threads watch it."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    def made(self) -> None:
        self.at = time.monotonic()


class Stealing:
    """Whether leases of other subscribers may be stolen after a connection error.

    The first to come back from a database stall must not steal everything, since
    the others are about to send heartbeats. So nothing is stolen before one
    renewal interval has passed since the first heartbeat that followed the error.
    """

    def __init__(self, heartbeat: Heartbeat, interval: float) -> None:
        self._heartbeat = heartbeat
        self._interval = interval
        self._recovered_at: float | None = None
        self._from = 0.0

    def suspend(self) -> None:
        """The connection broke just now."""
        self._recovered_at = time.monotonic()
        self._from = float("inf")

    def suspend_from_last_beat(self) -> None:
        """The connection was replaced because the last heartbeat came by a new one: that beat is the first."""
        self._recovered_at = float("-inf")
        self._from = float("inf")

    def is_allowed(self) -> bool:
        if self._recovered_at is not None and self._heartbeat.beat_at > self._recovered_at:
            self._from = self._heartbeat.beat_at + self._interval
            self._recovered_at = None
        return time.monotonic() >= self._from


class Prefetch:
    """Shares PREFETCH out among the groups that have something to do."""

    def __init__(self, inbox: Inbox, most: int) -> None:
        self._inbox = inbox
        self._most = most
        self._has_work: dict[GroupRef, Callable[[], bool]] = {}

    def join(self, ref: GroupRef, has_work: Callable[[], bool]) -> None:
        """A group takes part; ``has_work`` says whether there are partitions to look at."""
        self._has_work[ref] = has_work

    def room(self, ref: GroupRef, *, least: int, batch_size: int, max_bytes: int) -> int:
        """How many deliveries a group may claim now: none until there is room for a worthwhile batch.

        A group that gets something to do later has its equal part whatever is
        free, so at most twice PREFETCH wait.

        Args:
            least: how many of the group may wait, however full the others have made the inbox.
            batch_size: how many one claim takes.
            max_bytes: with as many payload bytes waiting nothing is claimed.
        """
        counts = self._inbox.waiting_counts()
        active = sum(one == ref or counts[one][0] > 0 or busy() for one, busy in self._has_work.items())
        share = max(least, self._most // active)
        free = self._most - sum(count for count, _ in counts.values())
        waiting, size = counts[ref]
        most = min(batch_size, share)
        room = min(most, max(min(share - waiting, free), least - waiting))
        worthwhile = waiting == 0 or room >= (most + 1) // 2
        return room if worthwhile and size < max_bytes else 0


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a process takes on at a time."""

    waiting_bytes: int = 64 * 1_048_576
    """Payload bytes that it keeps waiting, shared out among its groups."""
    flushed: int = 1000
    """Partitions whose watermarks one flush moves on, beside those that it has settlements of."""
    locked_pause_ms: int = 200
    """How long a partition is left alone in which somebody has locked a row that is due."""


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Context:
    """The poller's surroundings, the same for all groups of a process."""

    using: str
    subscriber: str
    """The full name in the database."""
    settings: Settings
    inbox: Inbox
    heartbeat: Heartbeat
    groups: int
    """How many groups this process works for."""
    batch_size: int
    """Messages that one claim takes at most."""
    subset: Subset = EVERYTHING
    threads: int = 1
    """Handler threads."""
    takes_all: bool = False
    """It works for a moment, alone: fair shares are not for it."""
    limits: Limits = LIMITS
    clock: Clock = field(default_factory=Clock)
    progress: Progress = field(default_factory=Progress)
    prefetch: Prefetch = field(init=False)
    stealing: Stealing = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefetch", Prefetch(self.inbox, self.settings.prefetch))
        object.__setattr__(self, "stealing", Stealing(self.heartbeat, self.settings.lease_renewal_interval))

    @property
    def watch(self) -> Watch:
        return self.inbox.watch

    @property
    def lease_ms(self) -> int:
        return int(self.settings.lease_duration * 1000)

    @property
    def enough(self) -> int:
        """Outcomes that are worth a flush before their delay is over."""
        return max(1, self.batch_size // 2)
