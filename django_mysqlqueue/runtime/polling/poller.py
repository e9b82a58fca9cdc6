"""The poller: the one thread of a subscriber that moves work between database and inbox.

It sequences, finds new messages, acquires and releases leases, claims, writes outcomes, extends deliveries and runs
the maintenance, in turn. All decisions about who takes a message are made under locks in the database. What the poller
remembers are hints that can be rebuilt from scratch; only the order within a partition rests on them (``ordered``).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from django.db import Error, connections

from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.options.backoff import Backoff, Failures
from django_mysqlqueue.options.conf import Settings
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.handling import call
from django_mysqlqueue.runtime.handling.lanes import Held
from django_mysqlqueue.runtime.log import error_line, event, failing
from django_mysqlqueue.runtime.polling.blocked import BlockedSequencer
from django_mysqlqueue.runtime.polling.context import Context
from django_mysqlqueue.runtime.polling.entered import Entered
from django_mysqlqueue.runtime.polling.group import Group
from django_mysqlqueue.runtime.polling.maintenance import Maintenance
from django_mysqlqueue.runtime.polling.ordered import OrderedMode
from django_mysqlqueue.runtime.polling.shared import SharedMode
from django_mysqlqueue.service import (
    bell,
    groups,
    heartbeats,
    leasing,
    log,
    polling,
    releasing,
    remote_bell,
    rollups,
    sequencing,
    wakeups,
)
from django_mysqlqueue.service.deliveries import Settlement
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import drop_connection
from django_mysqlqueue.sql.session import Retry, Session
from django_mysqlqueue.subscriptions import unknown_tasks
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.subscriptions.options import option_value
from django_mysqlqueue.subscriptions.unknown_tasks import NO_TASKS, Unknown

SEQUENCER_PASSES = 4
"""Maximum number of passes of the sequencer per poll, so that flushes and extensions are not starved."""
NEWS_ROWS = 2000
NEWS_PASSES = 5
ROLLUP_INTERVAL = 10.0
"""Seconds between two writes of the counts for the charts."""
FAILING_INTERVAL = 2.0
"""The same after an attempt has failed, until one succeeds: whoever repairs something waits for that."""
RETRY = Backoff(initial=0.075, maximum=3.75, jitter=1 / 3)
"""The pause after an error, 0.05 to 5 s. With jitter, so that not all processes return at once after an outage."""
FIRST_FREE_PAUSE = 0.25
"""Seconds between the first two ticks for leases that stay free."""
CUT_OFF_ROWS = 1000
"""Number of deliveries that one transaction releases when the process exits."""
RINGS_PER_SECOND = 150
"""How many rings the subscribers of a host answer together, at most: they would look more often than without the bell.
"""
LOOKING = 0.25
"""Seconds for which an idle process waits for what another one finds that is looking."""
OWN_POLL = 3
"""Number of renewal intervals after which an idle process polls, though another one has looked for it."""
LOOK_PAUSE = 10
"""The pause after a poll, as a multiple of its duration: reading the outbox walks uncommitted rows too."""


AnyGroup: TypeAlias = Group[OrderedMode] | Group[SharedMode]


def longest_silence(handlers: Iterable[Handler], settings: Settings) -> float:
    """Return the seconds after which the poller sends a statement even if nothing is due.

    An override of ``max_poll_interval`` does not change it: the session's idle timeout is set when the process starts.
    """
    intervals = (option_value(handler, "max_poll_interval", settings) for handler in handlers)
    return max(intervals, default=settings.max_poll_interval)


class Poller:
    """The poller. ``run`` loops until told to stop; tests and ``InlineSubscriber`` call ``step`` for single turns."""

    def __init__(self, context: Context, handlers: Mapping[GroupRef, Handler], *, only_scans: bool = False) -> None:
        self.context = context
        self.ordered = [Group(context, handler, OrderedMode) for handler in handlers.values() if not handler.shared]
        self.shared = [Group(context, handler, SharedMode) for handler in handlers.values() if handler.shared]
        in_any_mode: list[AnyGroup] = [*self.ordered, *self.shared]
        refs = list(handlers)
        self.groups = sorted(in_any_mode, key=lambda group: refs.index(group.ref))
        self.by_topic: dict[str, list[AnyGroup]] = {}
        for group in self.groups:
            self.by_topic.setdefault(group.ref.topic, []).append(group)
        self.entered = Entered()
        self._listening: wakeups.Listening | None = None
        self._is_rung = False
        self._no_bell = ""
        self.gateway: remote_bell.Gateway | None = None
        self._gateway_error = ""
        self._looks: bell.Looks | None = None
        self._blocked = BlockedSequencer(context.using)
        self.maintenance = Maintenance(
            context.using,
            self.groups,
            self.shared,
            check_tail=self.check_tail,
            clock=context.clock.now,
            entered=self.entered.whole,
            apart=self._apart,
            only_scans=only_scans,
        )
        self._next_rollup = time.monotonic() + ROLLUP_INTERVAL
        self._fails = False
        """Whether an attempt had failed when attempts were last counted."""
        self._tail: int | None = None
        self._pace = self._fastest()
        self._silence = longest_silence(handlers.values(), context.settings)
        self._idle_polls = 0
        """Number of polls in a row that found nothing."""
        self._next_poll = 0.0
        self._polled_at = float("-inf")
        self._ring_pause = 1 / RINGS_PER_SECOND
        """Seconds between two polls after rings."""
        self._rung = False
        """Whether there was a ring since the last poll."""
        self._vain_rings = 0
        """Number of polls in a row that came after a ring and found nothing."""
        self._busy_polls = 0
        """Number of polls in a row that found another process moving messages."""
        self._next_tick = 0.0
        self._ticked_at = float("-inf")
        self._free_pause = 0.0
        """Seconds between ticks for leases that stay free."""
        self._free_ticks = Failures(
            Backoff(FIRST_FREE_PAUSE, maximum=context.settings.lease_renewal_interval, jitter=0.0)
        )
        self._failures = Failures(RETRY)
        self._unscanned: set[GroupRef] = set()
        """Groups that broke down, whose work is looked for after the pause."""
        self._reported: dict[GroupRef, Exception | None] = {}
        """By group, the error that its heartbeat row shows."""
        self._unknown: dict[GroupRef, Mapping[str, Unknown]] = {}
        """By group, the unknown tasks that its heartbeat row shows."""
        self._spoke_at = time.monotonic()
        self.outbox_idle = False
        """Whether the last poll found nothing due in the outbox."""
        self.next_deliver_at: int | None = None

    def _fastest(self) -> Backoff:
        """Return the time between polls: that of the group that polls most often."""
        settings = self.context.settings
        handlers = [group.handler for group in self.groups]
        often, seldom = (
            min((option_value(handler, name, settings) for handler in handlers), default=getattr(settings, name))
            for name in ("poll_interval", "max_poll_interval")
        )
        # Jitter keeps the processes of a fleet from polling at the same time.
        return Backoff(often, 1.5, max(often, seldom), jitter=0.1)

    # -- the loop -------------------------------------------------------------

    def run(self, stopping: Callable[[], bool]) -> None:
        """Run turns until ``stopping`` returns True. After a database error, everything in memory is rebuilt."""
        while not stopping():
            self.context.progress.made()
            if self.guarded(self.step):
                self.sleep()

    def guarded(self, action: Callable[[], object]) -> bool:
        """Run an action. After a database error, drop the connection, forget every hint, and wait.

        Returns:
            Whether the action succeeded.
        """
        try:
            action()
        except (Error, CommitOutcomeUnknown, Retry) as error:
            pause = self._failures.add()
            text = f"{type(error).__name__}: {error}"
            failing(logging.WARNING, "poller.failed", error=text, failures=self._failures.count)
            drop_connection(connections[self.context.using])
            self.reset()
            time.sleep(pause)
            return False
        if failures := self._failures.clear():
            event(logging.INFO, "poller.recovered", failures=failures)
        return True

    def reset(self) -> None:
        """Forget every hint. Leases are then read again under lock, and partitions are loaded again."""
        self._tail = None
        self._next_poll = self._next_tick = 0.0
        self.context.stealing.suspend()
        for group in self.groups:
            with self._apart(group):
                group.reset()
        self.context.ticker.reset()
        self.maintenance.reset()

    def keep_alive(self) -> None:
        """Let the session rest before its idle timeout expires."""
        if time.monotonic() >= self._speaks_at():
            sessions.rest(self.context.using)
            self._spoke_at = time.monotonic()

    def _speaks_at(self) -> float:
        return self._spoke_at + (sessions.REST / 2 if sessions.rests(self.context.using) else self._silence)

    def step(self) -> None:
        """Run one turn: verify leases, tick, run schedules, poll, write, claim, maintain; each only if it is due."""
        if sessions.renew():
            self.reset()
            self.context.stealing.suspend_from_last_beat()
        now = time.monotonic()
        self.keep_alive()
        if self.context.heartbeat.must_verify():
            self._verify_leases()
        if now >= self._next_tick:
            self._tick()
            self._next_tick = time.monotonic() + self.context.settings.lease_renewal_interval
        self.context.ticker.turn()
        if self.next_deliver_at is not None and self.context.clock.now() >= self.next_deliver_at:
            self.next_deliver_at = None  # The poll sets the next one.
            self.poll_soon()
        if now >= self._next_poll and not self._is_looked_for():
            try:
                self._poll()
            finally:
                if self._looks is not None:
                    self._looks.end()
        self.groups[:] = [*self.groups[1:], *self.groups[:1]]
        for group in self.groups:
            if time.monotonic() >= group.health.rests_until:
                with self._apart(group):
                    self._turn(group)
        if now >= self._next_rollup:
            self.write_rollups()
        self.maintenance.turn()

    def write_rollups(self) -> None:
        """Add the counts since the last call to the rows of the charts. After an error they are kept for the next."""
        self._next_rollup = time.monotonic() + ROLLUP_INTERVAL
        tallies: dict[GroupRef, rollups.Tally] = {}
        for group in self.groups:
            with self._apart(group):
                tallies[group.ref] = group.counts.read()
        rollups.add(self.context.using, tallies)
        ended = [tally.fails for tally in tallies.values() if tally.fails is not None]
        self._fails = any(ended) if ended else self._fails
        if self._fails:
            self._next_rollup = time.monotonic() + FAILING_INTERVAL
        for group in self.groups:
            if group.ref in tallies:
                group.counts.start()

    @contextlib.contextmanager
    def _apart(self, group: AnyGroup) -> Iterator[None]:
        """Do work for one group. An error that is not the database's is a bug: it stops this group, not the others."""
        try:
            yield
        except (Error, CommitOutcomeUnknown, Retry):
            raise
        except Exception as error:  # noqa: BLE001
            failures = group.start_over(error)
            failing(
                logging.ERROR,
                "group.broken",
                group=group.ref.group,
                topic=group.ref.topic,
                error=error_line(error),
                failures=failures,
                exc_info=True,
            )
            self._unscanned.add(group.ref)
            self._next_tick = 0.0  # It reports the error, and releases what the group holds.

    def _turn(self, group: AnyGroup) -> None:
        """Run a group's turn. An error does not stop the other groups, unless the connection is lost or read-only."""
        if group.ref in self._unscanned:
            self._unscanned.discard(group.ref)
            self.maintenance.scan_all()
        connection = connections[self.context.using]
        before = connection.connection
        try:
            poll_soon = group.turn()
        except Error as error:
            if not sessions.is_sound(connection, error, before=before):
                raise
            event(
                logging.ERROR,
                "group.failed",
                group=group.ref.group,
                topic=group.ref.topic,
                error=f"{type(error).__name__}: {error}",
                failures=group.failed(),
            )
            self.maintenance.scan_all()  # The group has forgotten its work: find it again.
        else:
            group.health.succeeded()
            if poll_soon:
                self.poll_soon()

    def is_idle(self) -> bool:
        """Return whether no work is known. Groups that are paused or dropped do not count."""
        if not self.outbox_idle or self.maintenance.is_scanning():
            return False
        idle = 0
        for group in self.groups:
            with self._apart(group):
                idle += self.context.inbox.is_idle(group.ref) and (group.configuration.stopped or group.is_idle())
        return idle == len(self.groups)

    def group_of_other_mode(self) -> AnyGroup | None:
        """Return a group whose mode is no longer its handler's, or None."""
        return next((group for group in self.groups if group.configuration.other_mode), None)

    def flush_groups(self) -> None:
        """Write all outcomes."""
        for group in self.groups:
            with self._apart(group):
                group.flush_now()

    def release_leases(self) -> None:
        """Release all partitions with nothing in flight. A partition whose handler still runs keeps its lease."""
        for group in self.ordered:
            with self._apart(group):
                group.mode.release_free()

    def cut_off(self, seconds: float) -> None:
        """Write the outcomes that are left, and release what still runs, because the process exits.

        It may be called in another thread: the poller's may hang in the database, or have died.
        """
        until = time.monotonic() + seconds
        failures: list[Exception] = []
        exceeded: list[tuple[AnyGroup, list[Held]]] = []

        def write(group: AnyGroup, settlements: list[Settlement]) -> None:
            while settlements and time.monotonic() < until:
                part, settlements = settlements[:CUT_OFF_ROWS], settlements[CUT_OFF_ROWS:]
                releasing.release_unfinished(
                    self.context.using, group.ref, part, max_attempts=group.handler.max_attempts
                )

        self.context.inbox.close()
        for group in list(self.groups):
            try:
                settlements, calls = group.cut_off()
                exceeded += [(group, items) for items in calls]
                write(group, settlements)
            except Exception as error:  # noqa: BLE001  # The messages of the other groups are not lost for it.
                failures.append(error)
        # Last: receivers of the signals of jobs may take long.
        for group, items in exceeded:
            try:
                write(group, call.exceeded(items))
            except Exception as error:  # noqa: BLE001
                failures.append(error)
        if failures:
            raise failures[0]

    def sleep(self) -> None:
        """Sleep until something is due, or until something happens in this process."""
        now = time.monotonic()
        until = min(self._next_poll, self._next_tick, self.maintenance.next_at, self._speaks_at())
        until = min(until, self.context.ticker.next_at, self._reached(self.next_deliver_at, now))
        for group in self.groups:
            with self._apart(group):
                until = min(until, self._turn_at(group, now))
        if self.context.inbox.wait(max(0.0, until - now)):
            self._next_poll = min(self._next_poll, self._polled_at + self._pause_after_ring())
            self._idle_polls = 0
            self._rung = True

    def _pause_after_ring(self) -> float:
        """Return the time between two polls after rings. Those for nothing cause no more polls than work does."""
        return min(self._ring_pause * 2.0**self._vain_rings, max(self._ring_pause, self._pace.initial))

    def _turn_at(self, group: AnyGroup, now: float) -> float:
        """Return when a group needs a turn, by the monotonic clock."""
        if group.health.rests_until > now:
            return group.health.rests_until
        if group.wants_turn():
            return now
        due = group.mode.next_at() if group.planner.has_room_for_due() else None
        return min(group.wake_at(), self._reached(due, now))

    def _reached(self, moment: int | None, now: float) -> float:
        """Return when the database's clock reaches a time in epoch milliseconds, by the monotonic clock."""
        if moment is None:
            return float("inf")
        return now + max(0.0, (moment - self.context.clock.now()) / 1000)

    def poll_soon(self) -> None:
        """Poll with the next step."""
        self._next_poll = 0.0
        self._idle_polls = 0

    def look_now(self) -> None:
        """Poll and tick with the next step."""
        self.poll_soon()
        self._next_tick = 0.0

    # -- polling --------------------------------------------------------------

    def listen(self, listening: wakeups.Listening, gateway: remote_bell.Gateway | None = None) -> None:
        """Answer rings, and look for work together with the other processes of this host that work for the same groups.

        Whoever finds something rings for the others.

        ``gateway``: what passes on the rings of other hosts, if no other process does.
        """
        self.gateway = gateway
        self._listening = self.context.progress.listening = listening
        bell.clean(self.context.using)
        self._check_bell()

    def _check_bell(self) -> None:
        """Make up for sockets that were removed, and answer as many rings as the number of processes allows."""
        listening = self._listening
        if listening is None:
            return
        if listening.check():
            self.poll_soon()  # It may have missed rings.
        reason = listening.reason
        if listening.bell is not None and self._looks is None:
            refs = sorted(group.ref for group in self.groups)
            try:
                self._looks = bell.Looks(self.context.using, (refs, str(self.context.subset)))
            except bell.Unavailable as error:
                reason = str(error)
        if reason and reason != self._no_bell:
            event(logging.WARNING, "bell.unavailable", database=listening.using, error=reason)
        self._no_bell = reason
        if listening.bell is None:
            return
        self._ring_pause = listening.bell.neighbours() / RINGS_PER_SECOND
        if not self._is_rung and listening.bell.rung_at is not None:
            self._is_rung = True
            event(logging.INFO, "bell.rung", database=listening.using)

    def _is_looked_for(self) -> bool:
        """Put an idle process's poll off if another one of this host has found nothing since.

        That counts only if both have read the log up to the same offset.
        """
        if self._looks is None or self._tail is None or not self._idle_polls or self._busy_polls:
            return False
        if self._listening is None or self._listening.bell is None:
            return False
        now, look = time.monotonic(), self._looks.last()
        if look is None or look.tail != self._tail or any(group.writer.waits_for_poll() for group in self.groups):
            return False
        pause, age = self._pace.delay(self._idle_polls + 1), now - look.at
        may_wait = now - self._polled_at < OWN_POLL * self.context.settings.lease_renewal_interval
        looking = min(LOOKING, pause)
        if not may_wait or age > pause + looking or (age >= pause and self._looks.begin()):
            return False
        self._next_poll = now + max(pause - age, looking / 10)
        if look.at > self._polled_at:
            self.next_deliver_at = look.next_deliver_at or None
            self._idle_polls += age < pause
        return True

    def _tell_neighbours(self, began: float, *, has_news: bool, is_work: bool) -> None:
        """Ring for the other processes of this host after a poll that has found something, or note that it has not."""
        if self._looks is None:
            return
        if has_news and self._idle_polls:  # Else somebody has rung, or they poll often.
            bell.ring(self.context.using, self.by_topic)
        if not is_work and self._tail is not None and self.context.heartbeat.good():
            self._looks.note(bell.Look(began, self._tail, self.next_deliver_at or 0))

    def _poll(self) -> None:
        """Poll, with at most three queries if nothing happens, regardless of the number of partitions and groups."""
        session = Session(self.context.using)
        began = time.monotonic()
        look = polling.poll(session, [group.ref for group in self.ordered])
        took = time.monotonic() - began
        self.context.progress.answered(took)
        if step := self.context.clock.set(look.now, took):
            event(logging.WARNING, "clock.stepped", seconds=round(step, 3))
            for shared in self.shared:
                shared.mode.extend_now()
            for ordered in self.ordered:
                ordered.mode.reload()
        self.next_deliver_at = look.next_deliver_at
        self.outbox_idle = not look.due
        self._notice_free_leases(free=look.free_leases)
        moved, again, busy = self._sequence() if look.due else (False, False, False)
        if self._tail is None:
            self._tail = log.end_of_log(session)
            self.entered.reset()
            self.maintenance.scan_all()
            self.context.relays.look()
        read, more = self._read_news(session)
        due: dict[GroupRef, int] = {}
        if self.shared:
            # With a subset, this query also walks the rows of other subsets.
            asked = time.monotonic()
            due = polling.next_due(session, {one.ref: one.configuration.subset for one in self.shared})
            for shared in self.shared:
                with self._apart(shared):
                    shared.mode.found_due(due.get(shared.ref))
            took += time.monotonic() - asked
        is_work = look.due or read or look.free_leases or any(moment <= look.now for moment in due.values())
        self._tell_neighbours(began, has_news=bool(moved or read), is_work=is_work)
        self._idle_polls = 0 if moved or read else self._idle_polls + 1
        self._vain_rings = min(self._vain_rings + 1, 30) if self._rung and not is_work else 0
        self._rung = False
        listener = None if self._listening is None else self._listening.bell
        if listener is not None:
            listener.rest = max(bell.TOGETHER, self._pause_after_ring())
        self._polled_at = time.monotonic()
        pause = 0.0 if again or more else max(self._pace.delay(self._idle_polls + 1), LOOK_PAUSE * took)
        self._busy_polls = self._busy_polls + 1 if busy else 0
        if busy and listener is not None:
            # Nobody rings when the process that has the mutex has moved the messages.
            pause = max(LOOK_PAUSE * took, min(pause, self._ring_pause * 2.0 ** min(self._busy_polls - 1, 30)))
        self._spoke_at = time.monotonic()
        self._next_poll = self._spoke_at + pause
        for group in self.groups:
            with self._apart(group):
                group.writer.polled()

    def _notice_free_leases(self, *, free: bool) -> None:
        """Tick now if leases are free, instead of at the next regular tick; less and less often if they stay free."""
        if not free:
            self._free_ticks.clear()
            self._free_pause = 0.0
        elif time.monotonic() >= self._ticked_at + self._free_pause:
            self._next_tick = 0.0
            self._free_pause = self._free_ticks.add()

    def _sequence(self) -> tuple[bool, bool, bool]:
        """Move due messages into the log.

        Returns:
            Whether that changed anything, whether to poll again at once, and whether another process is moving them.
        """
        changed = 0
        for _ in range(SEQUENCER_PASSES):
            done = sequencing.sequence(self.context.using)
            self._blocked.passed(busy=done.busy)
            changed += done.moved + done.replaced
            if done.busy or not done.more:
                self.outbox_idle = not done.busy
                return changed > 0, False, done.busy
        return changed > 0, True, False

    def _read_news(self, session: Session) -> tuple[bool, bool]:
        """Notify the groups of partitions with new messages; return whether there are any, and whether to read more."""
        numbers = Counter[tuple[str, str]]()
        more = True
        for _ in range(NEWS_PASSES):
            batch = polling.read_news(session, self._tail or 0, limit=NEWS_ROWS)
            self._tail = batch.tail
            numbers += batch.numbers
            self.context.relays.found(topic for topic, _ in batch.partitions)
            keys: dict[str, list[str]] = {}
            for topic, key in batch.partitions:
                keys.setdefault(topic, []).append(key)
            for topic, changed in keys.items():
                for group in self.by_topic.get(topic, ()):
                    with self._apart(group):
                        group.notify(changed)
            more = batch.more
            if not more:
                break
        self.entered.add(self.context.clock.now(), numbers)
        return bool(numbers), more

    def check_tail(self, session: Session) -> None:
        """Notice, from time to time, what reading the news misses.

        After a failover, the log may end below the offset that has been read. Messages to be relayed may have been left
        behind by a process that was killed.
        """
        self.context.relays.look()
        if self._tail is not None and log.end_of_log(session) < self._tail:
            event(logging.WARNING, "log.truncated", tail=self._tail)
            self._tail = None

    # -- leases ---------------------------------------------------------------

    def _tick(self) -> None:
        """Check the groups' settings and the leases. Runs once per renewal interval, and when leases are free."""
        self._ticked_at = time.monotonic()
        self._check_bell()
        self._open_gateway()
        session = Session(self.context.using)
        controls = groups.group_controls(session, [group.ref for group in self.groups])
        self.context.ticker.notice(editable=any(one.has_schedules for one in controls.values()))
        for group in self.groups:
            with self._apart(group):
                self._control(group, controls.get(group.ref))
        pace = self._fastest()
        if pace != self._pace:
            self._pace = pace
            self.poll_soon()
        if self.ordered:
            refs = [group.ref for group in self.ordered]
            leases = leasing.read(session, refs, self.context.lease_ms)
            live = heartbeats.live(session, refs, self.context.lease_ms, broken=False)
            for ordered in self.ordered:
                equals = {name for name, subset in live[ordered.ref].items() if subset == self.context.subset}
                equals.add(self.context.subscriber)
                with self._apart(ordered):
                    ordered.mode.rebalance(
                        leases[ordered.ref], sorted(equals), steal=self.context.stealing.is_allowed()
                    )

    def _open_gateway(self) -> None:
        """Listen for other hosts, unless another process of this host does: it may have ended since the last tick."""
        if self.gateway is None:
            return
        try:
            self.gateway.open()
        except bell.Unavailable as error:
            if str(error) != self._gateway_error:
                self._gateway_error = str(error)
                event(logging.WARNING, "bell.unavailable", database=self.context.using, error=error)

    def _control(self, group: AnyGroup, controls: groups.GroupControls | None) -> None:
        """Apply the group's row, and release what the group holds while it is down."""
        configuration = group.configuration
        configuration.recheck_paused()
        group.health.recover()
        self._report(group)
        if group.health.is_down:
            group.release_all()
        if controls is None:
            return
        configuration.check_mode(controls.mode)
        group.override(controls.options)
        if configuration.has_new_revision(controls.revision):
            group.reset()
            self.maintenance.scan_all()

    def _report(self, group: AnyGroup) -> None:
        """Show in the group's heartbeat what this process cannot do for it, for people and other subscribers."""
        using, subscriber = self.context.using, self.context.subscriber
        error = group.health.error
        if error is not self._reported.get(group.ref):
            text = "" if error is None else error_line(error)
            heartbeats.report(using, subscriber, group.ref, text)
            self._reported[group.ref] = error
        tasks = NO_TASKS if group.handler.unknown is None else group.handler.unknown.tasks
        if tasks is not self._unknown.get(group.ref, NO_TASKS):
            heartbeats.report(using, subscriber, group.ref, unknown_tasks.as_text(tasks), name="unknown")
            self._unknown[group.ref] = tasks

    def _verify_leases(self) -> None:
        began = time.monotonic()
        for group in self.ordered:
            with self._apart(group):
                group.mode.verify()
        self.context.heartbeat.verified(began)
