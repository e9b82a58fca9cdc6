"""The poller: the one thread of a subscriber that moves work between database and inbox.

It sequences, notices news, takes and gives back leases, claims, writes
outcomes, extends, and does the housekeeping in turn. Everything it remembers is
a hint that can be started anew; what counts is decided under locks in the
database.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from django.db import Error, connections

from django_mysqlqueue.conf import Settings
from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.housekeeping import Housekeeping
from django_mysqlqueue.runtime.inbox import Inbox
from django_mysqlqueue.runtime.log import event, is_worth_a_line
from django_mysqlqueue.runtime.ordered import OrderedWork
from django_mysqlqueue.runtime.registry import Handler
from django_mysqlqueue.runtime.shared import SharedWork
from django_mysqlqueue.runtime.watching import Watch
from django_mysqlqueue.runtime.work import GroupWork
from django_mysqlqueue.service import groups, heartbeats, leasing, news, rollups, sequencing, topics
from django_mysqlqueue.service.groups import GroupRef
from django_mysqlqueue.service.subsets import EVERYTHING, Subset
from django_mysqlqueue.service.transactions import Retry, Session

SEQUENCER_PASSES = 4
"""Passes of the sequencer in a poll, so that flushes and extensions are not starved."""
NEWS_ROWS = 2000
NEWS_PASSES = 5
ROLLUP_INTERVAL = 10.0
"""Seconds between two writes of what was counted for the charts."""
LOOK_PAUSE = 10
"""A look at the outbox walks uncommitted rows too: wait this many times as long as the last one took."""


class Pulse(Protocol):
    """What the poller asks the heart."""

    beat_at: float

    def good(self) -> bool: ...

    def must_verify(self) -> bool: ...

    def verified(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Clock:
    """The database's clock, carried on by the monotonic clock between looks."""

    offset_ms: float

    @classmethod
    def at(cls, database_ms: int) -> Clock:
        return cls(database_ms - time.monotonic() * 1000)

    def now(self) -> int:
        """Epoch milliseconds."""
        return int(time.monotonic() * 1000 + self.offset_ms)


class Poller:
    """Runs in one thread until ``stop``; ``step`` is one turn, for tests that drive it by hand."""

    def __init__(
        self,
        using: str,
        subscriber: str,
        handlers: dict[GroupRef, Handler],
        settings: Settings,
        inbox: Inbox,
        heart: Pulse,
        *,
        batch_size: int,
        subset: Subset = EVERYTHING,
        threads: int = 1,
        takes_all: bool = False,
    ) -> None:
        self.using = using
        self.subscriber = subscriber
        self.settings = settings
        self.inbox = inbox
        self.heart = heart
        self.batch_size = batch_size
        self.subset = subset
        self.threads = threads
        self.takes_all = takes_all
        """It works for a moment, alone: fair shares are not for it."""
        self.progressed_at = time.monotonic()
        self.watch = Watch()
        inbox.is_watched = self.watch.is_wanted
        self.clock = Clock.at(0)
        self.works: list[GroupWork] = [
            (SharedWork if handler.shared else OrderedWork)(self, handler, groups=len(handlers))
            for handler in handlers.values()
        ]
        self.by_topic: dict[str, list[GroupWork]] = {}
        for work in self.works:
            self.by_topic.setdefault(work.ref.topic, []).append(work)
        self.ordered = [work for work in self.works if isinstance(work, OrderedWork)]
        self.shared = [work for work in self.works if isinstance(work, SharedWork)]
        self.housekeeping = Housekeeping(self)
        self.tallies = {ref: rollups.Tally() for ref in handlers}
        """What this process has counted since it last wrote."""
        self._next_rollup = time.monotonic() + ROLLUP_INTERVAL
        self._tail: int | None = None
        self._interval = settings.poll_interval
        self._next_poll = 0.0
        self._next_tick = 0.0
        self._ticked_at = float("-inf")
        self._free_pause = 0.0
        """Seconds between ticks for leases that are free and stay so."""
        self._failures = 0
        self._spoke_at = time.monotonic()
        self._recovered_at: float | None = None
        self._steal_from = 0.0
        self.outbox_idle = False
        """The last look found nothing due."""
        self.next_deliver_at: int | None = None

    @property
    def lease_ms(self) -> int:
        return int(self.settings.lease_duration * 1000)

    # -- the loop -------------------------------------------------------------

    def run(self, stopping: Callable[[], bool]) -> None:
        """Turns until ``stopping`` says so. A database error starts everything in memory anew."""
        while not stopping():
            self.progressed_at = time.monotonic()
            if self.guarded(self.step):
                self.sleep()

    def guarded(self, action: Callable[[], object]) -> bool:
        """Runs a step; after a database error drops the connection, waits, and starts anew."""
        try:
            action()
        except (Error, CommitOutcomeUnknown, Retry) as error:
            self._failures += 1
            if is_worth_a_line(self._failures):
                text = f"{type(error).__name__}: {error}"
                event(logging.WARNING, "poller.failed", error=text, failures=self._failures)
            sessions.drop(connections[self.using])
            self.start_anew()
            time.sleep(min(5.0, 0.05 * 2 ** min(self._failures, 10)) * (0.5 + random.random() / 2))
            return False
        if self._failures:
            event(logging.INFO, "poller.recovered", failures=self._failures)
            self._failures = 0
        return True

    def start_anew(self) -> None:
        """Forgets every hint. Leases are read again under lock, partitions loaded as when they were taken."""
        self._tail = None
        self._next_poll = self._next_tick = 0.0
        # The first to come back from a database stall must not steal everything: others are about to beat.
        self._recovered_at = time.monotonic()
        self._steal_from = float("inf")
        for work in self.works:
            work.start_anew()
        self.housekeeping.start_anew()

    def keep_alive(self) -> None:
        """Says something to the server before the session's idle time-out is over."""
        if time.monotonic() - self._spoke_at > self.settings.max_poll_interval:
            Session(self.using).row("SELECT 1")
            self._spoke_at = time.monotonic()

    def step(self) -> None:
        """One turn: verify, tick, poll, write and claim, keep house; each only when it is due."""
        if sessions.renew():
            self.start_anew()
            # The heart has beaten on its new connection: that is the beat from which stealing is counted.
            self._recovered_at = float("-inf")
        now = time.monotonic()
        self.keep_alive()
        if self.heart.must_verify():
            self._verify_leases()
        if now >= self._next_tick:
            self._tick()
            self._next_tick = time.monotonic() + self.settings.lease_renewal_interval
        if self.next_deliver_at is not None and self.clock.now() >= self.next_deliver_at:
            self.next_deliver_at = None  # the poll says which is next
            self.poll_soon()
        if now >= self._next_poll:
            self._poll()
        self.works.append(self.works.pop(0))
        for work in self.works:
            if time.monotonic() >= work.rests_until:
                self._turn(work)
        if now >= self._next_rollup:
            self.write_rollups()
        self.housekeeping.turn()

    def write_rollups(self) -> None:
        """Adds what was counted to the charts' rows; after an error it is written with the next ones."""
        self._next_rollup = time.monotonic() + ROLLUP_INTERVAL
        for ref, tally in self.tallies.items():
            for published_before in self.inbox.take_acked(ref):
                tally.acked(round(self.clock.offset_ms - published_before))
        rollups.add(self.using, self.tallies)
        self.tallies = {ref: rollups.Tally() for ref in self.tallies}

    def _turn(self, work: GroupWork) -> None:
        """A group whose turn fails must not keep the others from theirs, unless the connection is gone or read-only."""
        connection = connections[self.using]
        before = connection.connection
        try:
            work.turn()
        except Error as error:
            if not sessions.is_sound(connection, error, before=before):
                raise
            work.failures += 1
            event(
                logging.ERROR,
                "group.failed",
                group=work.ref.group,
                topic=work.ref.topic,
                error=f"{type(error).__name__}: {error}",
                failures=work.failures,
            )
            work.start_anew()
            self.housekeeping.scan_all()  # finds again what it has forgotten
            work.rests_until = time.monotonic() + min(5.0, 0.05 * 2 ** min(work.failures, 10))
        else:
            work.failures = 0

    def sleep(self) -> None:
        """Until the next thing that is due, or until something happens in this process."""
        now = time.monotonic()
        until = min(self._next_poll, self._next_tick, self.housekeeping.next_at, now + self.settings.max_poll_interval)
        until = min([until, *(max(work.wake_at(), work.rests_until) for work in self.works)])
        until = min([until, *(work.rests_until for work in self.works if work.rests_until > now)])
        clock = self.clock.now()
        times = [work.next_at() for work in self.works if work.rests_until <= now and work.room() > 0]
        times.append(self.next_deliver_at)
        for moment in times:
            if moment is not None:
                until = min(until, now + max(0.0, (moment - clock) / 1000))
        if any(work.wants_turn() and work.rests_until <= now for work in self.works):
            until = now
        if self.inbox.wait(max(0.0, until - now), enough=self.enough):
            self.poll_soon()

    @property
    def enough(self) -> int:
        """Outcomes that are worth a flush before their delay is over."""
        return max(1, self.batch_size // 2)

    def poll_soon(self) -> None:
        self._next_poll = 0.0
        self._interval = self.settings.poll_interval

    def look_now(self) -> None:
        """Polls and ticks with the next step."""
        self.poll_soon()
        self._next_tick = 0.0

    # -- polling --------------------------------------------------------------

    def _poll(self) -> None:
        """At most three queries when nothing happens, whatever the number of partitions and groups."""
        session = Session(self.using)
        began = time.monotonic()
        look = news.look(session, [work.ref for work in self.ordered])
        took = time.monotonic() - began
        self.clock = Clock.at(look.now)
        self.next_deliver_at = look.next_deliver_at
        self.outbox_idle = not look.due
        self._notice_free_leases(free=look.free_leases)
        moved, again = self._sequence() if look.due else (False, False)
        if self._tail is None:
            self._tail = topics.end_of_log(session)
            self.housekeeping.scan_all()
        read, more = self._read_news(session)
        if self.shared:
            # With a subset it walks other subsets' rows, too.
            began = time.monotonic()
            due = news.next_due(session, [work.ref for work in self.shared], self.subset)
            for work in self.shared:
                work.next_due = due.get(work.ref)
            took += time.monotonic() - began
        interval = self.settings.poll_interval
        found = moved or read
        self._interval = interval if found else min(self._interval * 1.5, self.settings.max_poll_interval)
        # Jitter keeps the processes of a fleet from looking all at once.
        pause = 0.0 if again or more else max(self._interval * (0.9 + random.random() / 5), LOOK_PAUSE * took)
        self._spoke_at = time.monotonic()
        self._next_poll = self._spoke_at + pause
        for group in self.works:
            group.polled()

    def _notice_free_leases(self, *, free: bool) -> None:
        """What another gives back is taken now, not at the next tick; what is not for this one less and less often."""
        if not free:
            self._free_pause = 0.0
        elif time.monotonic() >= self._ticked_at + self._free_pause:
            self._next_tick = 0.0
            self._free_pause = min(max(2 * self._free_pause, 0.25), self.settings.lease_renewal_interval)

    def _sequence(self) -> tuple[bool, bool]:
        """Moves what is due into the log; returns whether anything was, and whether to come again at once."""
        moved = 0
        for _ in range(SEQUENCER_PASSES):
            done = sequencing.sequence(self.using)
            moved += done.moved
            if done.busy or not done.more:
                self.outbox_idle = not done.busy
                return moved > 0, False
        return moved > 0, True

    def _read_news(self, session: Session) -> tuple[bool, bool]:
        """Tells the groups which partitions got messages; whether any did, and whether there is more to read."""
        read = False
        for _ in range(NEWS_PASSES):
            batch = news.since(session, self._tail or 0, limit=NEWS_ROWS)
            self._tail = batch.tail
            read = read or bool(batch.partitions)
            for topic, key in batch.partitions:
                for work in self.by_topic.get(topic, ()):
                    work.news(key)
            if not batch.more:
                return read, False
        return read, True

    def check_tail(self, session: Session) -> None:
        """After a failover the log may end below what has been read."""
        if self._tail is not None and topics.end_of_log(session) < self._tail:
            event(logging.WARNING, "poller.log_went_back", tail=self._tail)
            self._tail = None

    # -- leases ---------------------------------------------------------------

    def _tick(self) -> None:
        """Once a renewal interval, and when leases are free: shares, stale owners, extensions."""
        self._ticked_at = time.monotonic()
        session = Session(self.using)
        steering = groups.steering(session, [work.ref for work in self.works])
        for group in self.works:
            group.ask_again()
            found = steering.get(group.ref)
            if found is None:
                continue
            group.note_mode(found.mode)
            if group.note_revision(found.revision):
                group.start_anew()
                self.housekeeping.scan_all()
        if self.ordered:
            refs = [work.ref for work in self.ordered]
            leases = leasing.read(session, refs, self.lease_ms)
            live = heartbeats.live(session, refs, self.lease_ms)
            for work in self.ordered:
                others = [name for name, subset in live[work.ref].items() if subset == self.subset]
                work.rebalance(leases[work.ref], others, steal=self.may_steal())

    def may_steal(self) -> bool:
        """Not before one renewal interval after the first beat that followed a connection error."""
        if self._recovered_at is not None and self.heart.beat_at > self._recovered_at:
            self._steal_from = self.heart.beat_at + self.settings.lease_renewal_interval
            self._recovered_at = None
        return time.monotonic() >= self._steal_from

    def _verify_leases(self) -> None:
        for work in self.ordered:
            work.verify()
        self.heart.verified()
