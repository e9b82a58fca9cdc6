"""The poller's work for one group: which partitions to look at, what to claim and to write. It imports no poller."""

from __future__ import annotations

import contextlib
import logging
import time
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import islice

from django.db import Error

from django_mysqlqueue.backoff import Failures
from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.runtime.handling.lanes import Held
from django_mysqlqueue.runtime.handling.observers import flushed_ends
from django_mysqlqueue.runtime.log import dead_lettered, delivery_fields, event
from django_mysqlqueue.runtime.polling.context import Context
from django_mysqlqueue.runtime.polling.delivering import REST
from django_mysqlqueue.runtime.polling.limited import LONGEST_REST_MS
from django_mysqlqueue.runtime.polling.wanting import WantingGroup
from django_mysqlqueue.service import claiming, rollups, routing, settling, slots, watermarks
from django_mysqlqueue.service.claims import Claim, ClaimRequest, Due, Want
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.deliveries import OUTCOMES, UNCALLED, Action, Flushed, Holding, Settlement
from django_mysqlqueue.sql.session import Retry, Session
from django_mysqlqueue.subscriptions.handler import Handler

SHUTDOWN_FLUSHES = 10
"""Maximum number of flushes of a group at shutdown. The next owner advances the watermarks that are left behind."""
RECOVERED = 60.0
"""Seconds after a breakdown without another one, after which a group counts as recovered."""
FAILED = (Action.NACK, Action.REJECT)


class PolledGroup(WantingGroup):
    """This process's memory of, and work for, one group. Nothing in it survives a restart.

    ``turn`` does the work that there is; ``wake_at``, ``next_at`` and ``wants_turn`` tell when there will be more.
    """

    def __init__(self, context: Context, handler: Handler) -> None:
        super().__init__(context, handler)
        self.unfinished: set[str] = set()
        """Partitions whose watermark can advance further."""
        self._skipped: set[str] = set()
        """Partitions whose offsets row another process had locked: retried with the next poll."""
        self._locked: list[Settlement] = []
        """Outcomes whose row another transaction had locked: written after the next poll."""
        self.other_mode = ""
        """The group's mode, if it is no longer the handler's: the process stops."""
        self._announced = False
        self._revision: tuple[int, int] | None = None
        """The id of the group's registration, and its revision, at the last tick. Operators' changes increase it."""
        self.failures = Failures(REST)
        """Turns in a row that the database has made fail."""
        self.breakdowns = Failures(REST)
        """Times that the work for this group broke down, each less than ``RECOVERED`` seconds after the one before."""
        self.error: Exception | None = None
        """What it broke down with last, until it counts as recovered."""
        self.broke_at = 0.0
        """When that was, by the monotonic clock."""
        self._undo: int | None = None
        """The token of a claim of which it is not known that its deliveries are in the inbox."""
        self.tally = rollups.Tally()
        """The counts of this process since it last wrote the rollups."""
        self.passes = True
        """Whether claims may pass messages that have expired or are superseded."""
        self.configure(handler)

    # -- what the poller calls ------------------------------------------------

    def notify(self, key: str) -> None:
        """Note that a partition has, or may have, unclaimed messages. Partitions outside the subset are ignored."""
        if key in self.context.subset:
            self._notify(key)

    @abstractmethod
    def _notify(self, key: str) -> None: ...

    @abstractmethod
    def next_at(self) -> int | None:
        """Return when the next redelivery is due, in epoch milliseconds, or None."""

    def wake_at(self) -> float:
        """Return when this group needs a turn even if nothing happens, by the monotonic clock."""
        until = self.limited.next_at()
        if until is None:
            return float("inf")
        return time.monotonic() + min(max(0, until - self.context.clock.now()), LONGEST_REST_MS) / 1000

    def _held(self) -> set[tuple[str, int]]:
        """Return the (partition key, offset) pairs that this process holds and must not claim again."""
        return set()

    @abstractmethod
    def _written(self, settlements: Sequence[Settlement], flushed: Flushed) -> None: ...

    @abstractmethod
    def _claimed(self, wants: Sequence[Want], max_due: int, claim: Claim) -> bool:
        """Remember what a claim found, and return whether to poll soon."""

    def reset(self) -> None:
        """Forget every hint. Leases and claimed deliveries stay."""
        self.limited.reset()
        self.todo.clear()
        self.unfinished.clear()
        self._skipped.clear()

    def wants_turn(self) -> bool:
        """Return whether another turn would find work at once."""
        return bool(self.unfinished) or self._next_claim(self._priorities())[1] > 0

    def is_idle(self) -> bool:
        """Return whether no work is known for this group."""
        if self.todo or self.unfinished or self._skipped or self._locked or self.limited.next_at() is not None:
            return False
        return self.inbox.is_idle(self.ref)

    def turn(self) -> bool:
        """Write outcomes and claim as much as there is room for, in one transaction.

        Returns:
            Whether to poll soon, because redeliveries were due and more may be.
        """
        self._undo_unknown()
        if self.limited:
            if self.limited.is_unsure:
                self.limited.found(slots.keys_held(Session(self.using), self.ref, self.context.subscriber))
            self.inbox.return_late(self.ref)
            ask = partial(self.limited.ask, self.using)
            for key in self.limited.rested(self.context.clock.now(), ask):
                self.notify(key)
            self._resume()
            if self._may_claim():
                self.limited.keep_thread(self.todo, self._is_free)
        priorities = self._priorities()
        priority, room = self._next_claim(priorities)
        flushes = room > 0 or self.inbox.flush_due(self.ref)
        settlements = self.inbox.take_settlements(self.ref) if flushes else []
        wants = self._wants(priority, room) if room else []
        max_due = min(room, self._max_due()) if priority == 0 else 0
        if not room:
            priority, wants, max_due = self._newcomers(priorities)
            room, priorities = len(wants) + max_due, []
        claims = bool(wants or max_due)
        holding = self.limited.holding() if claims and self.limited else self.limited.news()
        if not (claims or settlements or self.unfinished or holding):
            return False
        also = self._take_unfinished()
        hungry = self.inbox.waiting(self.ref, priority=priority)[0] == 0
        try:
            if claims:
                claim = self._claim(wants, settlements, also, max_due, room, holding)
            else:
                claim = None
                flushed = self._flush(settlements, also, holding)
        except Exception:
            # Tokens fence what has been written all the same.
            self.inbox.put_back_settlements(self.ref, settlements)
            self.unfinished |= also
            raise
        # A claim that finds no offsets row is repeated when the row is there.
        if claim is not None and (claim.deliveries or not claim.missing):
            self._turns.took(priority, priorities)
        self._after_flush(settlements, claim.flushed if claim is not None else flushed)
        return claim is not None and self._after_claim(wants, max_due, claim, hungry=hungry)

    def failed(self) -> int:
        """Note that a turn failed, and pause the group for a while.

        Returns:
            The number of turns in a row that failed.
        """
        self.reset()
        self.rests_until = time.monotonic() + self.failures.add()
        return self.failures.count

    def succeeded(self) -> None:
        """Note that a turn succeeded."""
        self.failures.clear()

    def start_over(self, error: Exception) -> int:
        """Begin with an empty memory, after a pause, because the work for this group broke down.

        What raised the error may have left anything in memory. What the inbox holds is kept: handlers run on, and what
        has not started is released.

        Returns:
            The number of breakdowns since the group worked well.
        """
        self.inbox.return_waiting(self.ref)
        self.inbox.put_back_settlements(self.ref, self._locked)
        kept = self.failures, self.breakdowns, self._undo, self.tally
        # The same object, because the lists of the poller and of the maintenance refer to it.
        self.__init__(self.context, self._declared)  # type: ignore[misc]
        self.failures, self.breakdowns, self._undo, self.tally = kept
        self.error, self.broke_at = error, time.monotonic()
        self.rests_until = self.broke_at + self.breakdowns.add()
        return self.breakdowns.count

    @property
    def is_down(self) -> bool:
        """Whether the group pauses after a breakdown."""
        return self.error is not None and time.monotonic() < self.rests_until

    def release_all(self) -> None:
        """Write what has ended, and release what this process holds, for other subscribers."""
        self.flush_now()

    def recover(self) -> None:
        """Forget the last breakdown if the group has worked well since."""
        if self.error is not None and time.monotonic() > self.broke_at + RECOVERED:
            self.error = None
            self.breakdowns.clear()

    def counted(self) -> rollups.Tally:
        """Return the counts since ``start_tally``."""
        for published_before in self.inbox.take_acked(self.ref):
            self.tally.acked(round(self.context.clock.offset_ms - published_before))
        return self.tally

    def start_tally(self) -> None:
        """Start counting from 0, because the counts have been stored."""
        self.tally = rollups.Tally()

    def flush_now(self) -> None:
        """Write all settlements, at shutdown, and advance watermarks in up to ``SHUTDOWN_FLUSHES`` flushes."""
        self._undo_unknown()
        self._write_locked()
        for _ in range(SHUTDOWN_FLUSHES):
            settlements = self.inbox.take_settlements(self.ref)
            if not (settlements or self.unfinished):
                return
            also = self._take_unfinished()
            try:
                flushed = self._flush(settlements, also, self.limited.news())
            except Exception:
                self.inbox.put_back_settlements(self.ref, settlements)
                raise
            self._after_flush(settlements, flushed)

    def cut_off(self) -> tuple[list[Settlement], list[list[Held]]]:
        """See ``Inbox.cut_off``."""
        self._write_locked()
        return self.inbox.cut_off(self.ref)

    def _take_unfinished(self) -> set[str]:
        """Take the partitions whose watermarks the next flush advances: no more than fit a short transaction."""
        taken = set(islice(self.unfinished, self.context.limits.flushed))
        self.unfinished -= taken
        return taken

    def _undo_unknown(self) -> None:
        if self._undo is not None:
            claiming.undo(self.using, self.ref, self._undo)
            self._undo = None

    # -- writing --------------------------------------------------------------

    def _flush(self, settlements: Sequence[Settlement], also: Collection[str], holding: Holding | None) -> Flushed:
        with self._accounted(holding):
            flushed = settling.flush(
                self.using,
                self.ref,
                settlements,
                max_attempts=self.handler.max_attempts,
                shared=self.handler.shared,
                also=also,
                holding=holding,
            )
        self.limited.written(flushed.held)
        return flushed

    @contextlib.contextmanager
    def _accounted(self, holding: Holding | None) -> Iterator[None]:
        """Keep the account of this process's slots right if the transaction that writes it fails."""
        try:
            yield
        except CommitOutcomeUnknown:
            if holding is not None:
                self.limited.doubt(holding)
            raise
        except (Error, Retry):
            if holding is not None:
                self.limited.failed(holding)
            raise

    def _after_flush(self, settlements: Sequence[Settlement], flushed: Flushed) -> None:
        ended = {one.delivery.slot.key for one in settlements if one.delivery.slot is not None}
        if flushed.locked:
            self._locked += flushed.locked
            settlements = [settlement for settlement in settlements if settlement not in flushed.locked]
        self.inbox.written(settlements)
        if self.limited and ended:
            for key in self.limited.finished(ended):
                self.notify(key)
        self._resume()
        self.unfinished |= flushed.unfinished
        self._skipped |= flushed.skipped
        for settlement in flushed.stale:
            delivery = settlement.delivery
            event(logging.WARNING, "delivery.lost", **delivery_fields(delivery), outcome=OUTCOMES[settlement.action])
        dead_lettered(flushed.dead)
        self._count_failures(settlements, flushed)
        if self.context.watch.is_wanted():
            self.context.watch.tell(flushed_ends(settlements, flushed, self.context.clock.now()))
        self._written(settlements, flushed)

    @abstractmethod
    def _resume(self) -> None:
        """Ask again for what waited for the end of a suspected poison message, or for a slot."""

    def _count_failures(self, settlements: Sequence[Settlement], flushed: Flushed) -> None:
        """Count the outcomes of a flush for the charts. Acks are counted when the rollups are written."""
        tally = self.tally
        stale = {id(settlement) for settlement in flushed.stale}
        for settlement in settlements:
            if settlement.action is not Action.ACK and id(settlement) not in stale:
                tally.failed += settlement.action in FAILED and settlement.is_started
                tally.dead_lettered += settlement.is_written
                if settlement.action in UNCALLED:
                    tally.passed[OUTCOMES[settlement.action]] += 1
        tally.dead_lettered += len(flushed.dead)

    def _count_passed(self, claim: Claim) -> None:
        if claim.passed:
            self.tally.passed.update(claim.passed)
            self.inbox.count_passed(self.ref, claim.passed)

    # -- claiming -------------------------------------------------------------

    def _claim(
        self,
        wants: Sequence[Want],
        settlements: Sequence[Settlement],
        also: Collection[str],
        max_due: int,
        room: int,
        holding: Holding | None,
    ) -> Claim:
        due = None
        if max_due:
            with_slots = self._room_for_slots() if self.limited.is_partial else 2**62
            due = Due(max_due, self._due_window(max_due), self._held(), self._after_clock_step(), with_slots)
        request = ClaimRequest(
            self.claimant,
            wants,
            claiming.new_token(),
            settlements,
            also,
            due=due,
            max_rows=room,
            max_bytes=self.max_bytes,
            max_suspects=int(not self.inbox.has_suspect()),
            passes=self.passes,
            holding=holding,
        )
        self._undo = request.token
        try:
            with self._accounted(holding):
                claim = claiming.claim(self.using, request)
        except (Error, Retry):
            self._undo = None  # It was rolled back.
            raise
        if not claim.deliveries:
            self._undo = None
        self.limited.written(claim.flushed.held)
        if self.limited:
            self.limited.looked(request, claim)
            self.limited.claimed(claim, self.context.clock.now())
            for key in claim.limited:
                self.todo.pop(key, None)
        return claim

    def _after_claim(self, wants: Sequence[Want], max_due: int, claim: Claim, *, hungry: bool) -> bool:
        dead_lettered(claim.dead)
        self.unfinished |= {delivery.key for delivery, _ in claim.dead}
        if claim.refused:
            return self._follow(claim)
        self._count_passed(claim)
        for want in wants:
            # To the end, even if it is locked: the others have their turn. If it had no offsets row, it has one now.
            if want.key in self.todo and want.key not in claim.missing:
                self.todo[want.key] = self.todo.pop(want.key)
        poll_soon = self._claimed(wants, max_due, claim)
        self.depths.learn(wants, claim, hungry=hungry, most=self.claim_size)
        # First: from here on, every claimed delivery reaches the inbox or is released, even after an error.
        self._undo = None
        self._hand_out(claim)
        if claim.dead and self.context.watch.is_wanted():
            self._tell_dead(claim.dead)
        if claim.missing and not watermarks.create_missing(self.using, self.ref, claim.missing):
            self._stop(dropped=True)
        return poll_soon

    def _follow(self, claim: Claim) -> bool:
        """Apply the group row that has refused a claim, and return whether to claim again at once."""
        if claim.fence is None or claim.refused == "paused":
            self._stop(dropped=claim.fence is None)
        elif claim.refused == "mode":
            self.check_mode(claim.fence.mode)
        else:
            self.override(claim.fence.options)
            return True
        return False

    def _due_window(self, max_due: int) -> int:
        """Return how many due rows to look at to claim ``max_due``."""
        return max_due

    def _after_clock_step(self) -> bool:
        return False

    def _stop(self, *, dropped: bool) -> None:
        """Claim nothing until the next tick has checked the group again."""
        self.stopped = True
        if not self._announced:
            self._announce_stop(dropped=dropped)
            self._announced = True

    def _announce_stop(self, *, dropped: bool) -> None:
        group, topic = self.ref
        if not dropped:
            event(logging.INFO, "group.paused", group=group, topic=topic)
        elif target := routing.moved_to(Session(self.using), topic):
            # With settings that name the target, the process works for the group there.
            level = logging.ERROR if queue_alias(topic=topic) == self.using else logging.INFO
            event(level, "group.moved", group=group, topic=topic, database=self.using, target=target)
        else:
            event(logging.ERROR, "group.dropped", group=group, topic=topic)

    def polled(self) -> None:
        """Retry, after each poll, rows that another transaction had locked."""
        self.unfinished |= self._skipped
        self._skipped.clear()
        self._write_locked()

    def _write_locked(self) -> None:
        if self._locked:
            self.inbox.put_back_settlements(self.ref, self._locked)
            self._locked = []

    def recheck_paused(self) -> None:
        """Claim again after a tick, because the group may have been resumed."""
        self._announced = self.stopped and not self.refused
        self.stopped = bool(self.refused)

    def check_mode(self, registered: str) -> None:
        """Stop claiming if the group's registered mode is no longer the handler's."""
        if registered != self.handler.mode:
            self.other_mode = registered
            self.stopped = True

    def has_new_revision(self, revision: tuple[int, int]) -> bool:
        """Return whether an operator has changed the group since the last tick, or it was registered again."""
        revised = self._revision is not None and revision != self._revision
        self._revision = revision
        if revised:
            event(logging.INFO, "group.reloaded", group=self.ref.group, topic=self.ref.topic)
        return revised
