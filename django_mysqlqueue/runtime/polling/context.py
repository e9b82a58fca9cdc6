"""State that the poller shares with the groups that it polls, so that none writes into another's fields."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from django_mysqlqueue.options.conf import Settings
from django_mysqlqueue.runtime.handling.inbox import Inbox
from django_mysqlqueue.runtime.handling.observers import Watch
from django_mysqlqueue.runtime.polling.relays import Relays
from django_mysqlqueue.runtime.polling.ticking import Ticker
from django_mysqlqueue.service.clocks import DatabaseClock
from django_mysqlqueue.service.heartbeats import RoundTrip
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import EVERYTHING, Subset
from django_mysqlqueue.service.wakeups import Listening
from django_mysqlqueue.subscriptions.handler import Handler


class Heartbeat(Protocol):
    """The interface of the heartbeat thread to the poller."""

    beat_at: float
    """When the last successful heartbeat was sent, by the monotonic clock."""

    def good(self) -> bool:
        """Return whether this process certainly still owns its leases."""

    def must_verify(self) -> bool:
        """Return whether the leases have to be read again under lock because they may have expired."""

    def verified(self, at: float) -> None:
        """Note that the leases have been read again under lock, from this monotonic time on."""


NEWEST = 256
"""Number of polls whose round trips are kept."""
LATELY = 30.0
"""Seconds for which they count: an idle process polls once a second. A slow database is to be seen in 45 seconds, with
the 10 seconds until the next heartbeat."""
FEW = 3
"""Number of the newest polls that count in any case: a process whose host's others poll for it does so every 30 s, and
one slow poll makes no slow database."""


class Progress:
    """When the poller's thread last made progress, by the monotonic clock, how fast its database answers, and its bell.

    Other threads watch it.

    Args:
        slow: seconds above which an answer is slow; None: none is.
    """

    def __init__(self, slow: float | None = None) -> None:
        self.at = time.monotonic()
        self._slow = slow
        self._slow_since: float | None = None
        """Since when half of the answers have been slow, by the monotonic clock."""
        self.listening: Listening | None = None
        self._polls: deque[tuple[float, float]] = deque(maxlen=NEWEST)
        """When the newest polls were answered, by the monotonic clock, and after how many seconds."""

    def made(self) -> None:
        """Note that there was progress."""
        self.at = time.monotonic()

    def answered(self, seconds: float) -> None:
        """Note how long the database took to answer a poll."""
        self._polls.append((time.monotonic(), seconds))

    def _lately(self) -> list[tuple[float, float]]:
        """Return the polls of the last ``LATELY`` seconds, or the newest ``FEW``."""
        polls = self._polls.copy()
        since = min(time.monotonic() - LATELY, polls[-min(FEW, len(polls))][0]) if polls else 0.0
        return [poll for poll in polls if poll[0] >= since]

    def round_trip(self) -> RoundTrip | None:
        """Return how long the newest polls took; None: no poll."""
        took = sorted(seconds for _, seconds in self._lately())
        return RoundTrip(took[(len(took) - 1) // 2], took[math.ceil(0.95 * len(took)) - 1]) if took else None

    def _slow_ms(self, p50: float) -> int:
        """Return for how many milliseconds half of the answers have been slow; -1 if they are not."""
        if self._slow is None or p50 <= self._slow:
            self._slow_since = None
            return -1
        if self._slow_since is None:
            begun = (at - seconds for at, seconds in self._lately() if seconds > self._slow)
            self._slow_since = min(begun, default=time.monotonic())
        return round(1000 * (time.monotonic() - self._slow_since))

    def facts(self) -> dict[str, str | int]:
        """Return what heartbeats show of this: round trips, since when they are slow, and when it was last rung."""
        found: dict[str, str | int] = {}
        if (took := self.round_trip()) is not None:
            slow_ms = self._slow_ms(took.p50)
            found |= {"p50_us": round(took.p50 * 1e6), "p95_us": round(took.p95 * 1e6), "slow_ms": slow_ms}
        bell, reason = (None, "") if self.listening is None else (self.listening.bell, self.listening.reason)
        if bell is not None:
            found["rung_ms"] = -1 if bell.rung_at is None else round(1000 * (time.monotonic() - bell.rung_at))
        return found if bell is None and not reason else {**found, "no_bell": reason}


class Stealing:
    """Whether leases of other subscribers may be stolen after a connection error, or a step of the database's clock.

    The first subscriber to return after a stall of the database must not steal all leases, because the others are
    about to send heartbeats. So nothing is stolen until one renewal interval after the first heartbeat that followed
    the error. After a step of the clock, nothing is stolen for the duration of a lease (``DatabaseClock``).
    """

    def __init__(self, heartbeat: Heartbeat, clock: DatabaseClock, settings: Settings) -> None:
        self._heartbeat = heartbeat
        self._clock = clock
        self._lease_ms = settings.lease_duration * 1000
        self._interval = settings.lease_renewal_interval
        self._recovered_at: float | None = None
        self._from = 0.0

    def suspend(self) -> None:
        """Allow no stealing from now on: the connection has just been lost."""
        self._recovered_at = time.monotonic()
        self._from = float("inf")

    def suspend_from_last_beat(self) -> None:
        """Allow no stealing until one interval after the last heartbeat.

        The connection was replaced because that heartbeat arrived through a new one, so it is the first that followed
        the error.
        """
        self._recovered_at = float("-inf")
        self._from = float("inf")

    def is_allowed(self) -> bool:
        """Return whether leases may be stolen now."""
        if self._recovered_at is not None and self._heartbeat.beat_at > self._recovered_at:
            self._from = self._heartbeat.beat_at + self._interval
            self._recovered_at = None
        return time.monotonic() >= self._from and not self._clock.is_doubtful(self._lease_ms)


class Prefetch:
    """Divide PREFETCH among the groups that have work."""

    def __init__(self, inbox: Inbox, most: int) -> None:
        self._inbox = inbox
        self._most = most
        self._has_work: dict[GroupRef, Callable[[], bool]] = {}
        """By group that shares PREFETCH: whether it has partitions to look at."""

    def join(self, ref: GroupRef, has_work: Callable[[], bool]) -> None:
        """Add a group that shares PREFETCH."""
        self._has_work[ref] = has_work

    def leave(self, ref: GroupRef) -> None:
        """Remove a group that has a number of its own."""
        self._has_work.pop(ref, None)

    def room(self, ref: GroupRef, *, priority: int, least: int, claim_size: int, max_bytes: int) -> int:
        """Return how many deliveries a group may claim now: 0 until there is room for a worthwhile batch.

        A group that gets work later has its equal share even if nothing is free, so at most twice PREFETCH wait, of
        each priority.

        ``priority``: the priority. The group's waiting deliveries with lower ones do not count. ``least``: number of
        the group's deliveries that may wait, however full the others have made the inbox; for a group with a number of
        its own, that number.
        """
        counts = self._inbox.waiting_counts()
        waiting, size = self._inbox.waiting(ref, priority=priority)
        counts[ref] = waiting
        share = free = least
        if ref in self._has_work:
            active = sum(group == ref or counts[group] > 0 or busy() for group, busy in self._has_work.items())
            share = max(least, self._most // active)
            free = self._most - sum(counts[group] for group in self._has_work)
        most = min(claim_size, share)
        room = min(most, max(min(share - waiting, free), least - waiting))
        worthwhile = waiting == 0 or room >= (most + 1) // 2
        return room if worthwhile and size < max_bytes else 0


class PollingLimits(NamedTuple):
    """Limits on the work of a process at a time."""

    waiting_bytes: int = 64 * 1_048_576
    """Payload bytes of waiting deliveries, divided among the groups."""
    flushed: int = 1000
    """Partitions whose watermarks one flush advances, in addition to those that it has settlements of."""
    locked_pause_ms: int = 200
    """Milliseconds for which nothing is claimed from a partition in which another transaction has locked a due row."""


LIMITS = PollingLimits()


@dataclass(frozen=True, slots=True)
class Context:
    """The environment of the poller, the same for all groups of a process."""

    using: str
    subscriber: str
    """The full name in the database."""
    settings: Settings
    inbox: Inbox
    heartbeat: Heartbeat
    groups: int
    """Number of groups that this process works for."""
    claim_size: int
    """Maximum number of messages per claim, for groups without a number of their own."""
    subset: Subset = EVERYTHING
    threads: int = 1
    """Number of handler threads."""
    takes_all: bool = False
    """Whether to ignore fair shares, because the subscriber runs only briefly and alone."""
    limits: PollingLimits = LIMITS
    clock: DatabaseClock = field(default_factory=DatabaseClock)
    progress: Progress = field(default_factory=Progress)
    relays: Relays = field(default_factory=lambda: Relays(""))
    """Those from this database to others."""
    ticker: Ticker = field(default_factory=lambda: Ticker(""))
    """The recurring schedules of this database."""
    prefetch: Prefetch = field(init=False)
    stealing: Stealing = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefetch", Prefetch(self.inbox, self.settings.prefetch))
        object.__setattr__(self, "stealing", Stealing(self.heartbeat, self.clock, self.settings))

    def concurrency(self, handler: Handler) -> int:
        """Return how many calls of a handler may run on the event loop at a time; 0: they run in threads."""
        shared = self.inbox.concurrency
        return (handler.concurrency or shared) if shared and handler.is_async else 0

    @property
    def watch(self) -> Watch:
        """The listeners to settled deliveries."""
        return self.inbox.watch

    @property
    def lease_ms(self) -> int:
        """LEASE_DURATION in milliseconds."""
        return int(self.settings.lease_duration * 1000)
