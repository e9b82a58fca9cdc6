"""Shared mode: the poller's memory of, and work for, a group of competing consumers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from django_mysqlqueue.backoff import Failures
from django_mysqlqueue.limits import LOWEST_PRIORITY
from django_mysqlqueue.runtime.polling.context import Context
from django_mysqlqueue.runtime.polling.group import PolledGroup
from django_mysqlqueue.runtime.polling.limited import IN_FLIGHT_PAUSE
from django_mysqlqueue.service import settling
from django_mysqlqueue.service.claims import Claim, Want
from django_mysqlqueue.service.deliveries import Flushed, Settlement
from django_mysqlqueue.subscriptions.handler import Handler

MAX_WINDOW = 10_000
"""Maximum number of due rows that one claim looks at."""
LIMITED_WINDOW = 1000
"""Number of due rows that a claim of a group with limits looks at."""
LOCKED_PAUSE = 0.01
"""Seconds for which a group rests after a claim that found all wanted partitions locked."""


class SharedGroup(PolledGroup):
    """A group of competing consumers: any partition, any message, no leases."""

    def __init__(self, context: Context, handler: Handler) -> None:
        self._next_due: int | None = None
        self._due_rests_until = 0.0
        """Until when (monotonic) redeliveries are not looked for, because none of those that were due had a slot."""
        self._without_slots = Failures(IN_FLIGHT_PAUSE)
        self._expects_clock_step = True
        self._extend_at = 0.0
        self._window = 0
        """Number of due rows to look at. It grows while the rows in front are locked."""
        self._left_suspects = False
        """Whether a claim has left suspected poison messages, because it has taken one."""
        super().__init__(context, handler)
        self.inbox.keep(self.ref, time.monotonic() + handler.visibility_timeout)

    def configure(self, handler: Handler) -> None:
        """Use a handler's options from now on. With another visibility timeout, deliveries are extended first."""
        super().configure(handler)
        # A claim that is shorter than the last one would end before the next extension.
        self._extend_at = self._due_rests_until = 0.0
        # The claim that found the other options has looked for nothing.
        self._expects_clock_step = True

    def _notify(self, key: str) -> None:
        if not self.limited.rests(key):
            self.todo[key] = None

    def next_at(self) -> int | None:
        """Return when the next redelivery is due, in epoch milliseconds, or None."""
        if self._next_due is None:
            return None
        rest = max(0.0, self._due_rests_until - time.monotonic())
        return max(self._next_due, self.context.clock.now() + int(rest * 1000)) if rest else self._next_due

    def found_due(self, due: int | None) -> None:
        """Remember when a poll found the next redelivery to be due, in epoch milliseconds, or None."""
        self._next_due = due

    def expect_clock_step(self) -> None:
        """Make the next claim also look for rows that a clock, since corrected, left far in the future."""
        self._expects_clock_step = True

    def extend_now(self) -> None:
        """Extend deliveries with the next turn."""
        self._extend_at = 0.0

    def wake_at(self) -> float:
        """Return when deliveries have to be extended, or something no longer waits for a slot (monotonic)."""
        return min(self._extend_at, super().wake_at())

    def reset(self) -> None:
        """Forget every hint, and extend deliveries with the next turn."""
        super().reset()
        self.extend_now()

    def turn(self) -> bool:
        """Extend deliveries if it is time, then write and claim as in ordered mode."""
        # Before the claim: after a stall, the claim would otherwise take deliveries that this process still holds.
        if time.monotonic() >= self._extend_at:
            self._extend()
        return super().turn()

    def _extend(self) -> None:
        """Extend all deliveries that this process holds, waiting or running.

        Until the next extension, no delivery starts later than one visibility timeout from now, because other
        subscribers may have it by then. Deliveries that other subscribers have claimed are dropped.
        """
        began = time.monotonic()
        held = self.inbox.held(self.ref)
        if held:
            milliseconds = int(self.handler.visibility_timeout * 1000)
            stepped = self.context.clock.is_doubtful(milliseconds)
            lost = settling.extend_all(self.using, self.ref, held, milliseconds=milliseconds, clock_stepped=stepped)
            self.inbox.drop_stale(self.ref, lost)
        self.inbox.keep(self.ref, began + self.handler.visibility_timeout)
        self._extend_at = began + self.handler.visibility_timeout / 3

    def _want(self, key: str, limit: int) -> Want:
        return Want(key, look_at=limit)

    def _held(self) -> set[tuple[str, int]]:
        return {(delivery.key, delivery.offset) for delivery in self.inbox.held(self.ref)}

    def has_room_for_due(self) -> bool:
        """Return whether redeliveries may be claimed when they come due: their priorities are not known."""
        return self.room(LOWEST_PRIORITY) > 0

    def _max_due(self) -> int:
        return self.room(LOWEST_PRIORITY) if self._is_due() or self._expects_clock_step else 0

    def _is_due(self) -> bool:
        if self._next_due is None or time.monotonic() < self._due_rests_until:
            return False
        return self._next_due <= self.context.clock.now()

    def _due_window(self, max_due: int) -> int:
        # Rows of a key without a slot are made due later, as many as possible at once.
        return max(max_due, self._window, LIMITED_WINDOW if self.handler.limits.limits_keys else 0)

    def _rest_due(self, *, without_slots: bool) -> None:
        """Look for redeliveries less often while none has a slot."""
        if without_slots:
            self._due_rests_until = time.monotonic() + self._without_slots.add()
        else:
            self._without_slots.clear()

    def _resume(self) -> None:
        resumed = self._left_suspects and not self.inbox.has_suspect()
        if resumed or (self.limited.has_due and self._room_for_slots() > 0):
            self._left_suspects = self._left_suspects and not resumed
            self._next_due, self._due_rests_until = self.context.clock.now(), 0.0

    def _after_clock_step(self) -> bool:
        expected, self._expects_clock_step = self._expects_clock_step, False
        return expected

    def _written(self, settlements: Sequence[Settlement], flushed: Flushed) -> None:
        for due in flushed.waiting.values():
            self._next_due = due if self._next_due is None else min(self._next_due, due)

    def _claimed(self, wants: Sequence[Want], max_due: int, claim: Claim) -> bool:
        self._left_suspects = self._left_suspects or bool(claim.held_up)
        redelivered = sum(delivery.attempt > 1 or delivery.suspect for delivery in claim.deliveries)
        poll_soon = False
        if max_due and self.limited:
            self._rest_due(without_slots=not claim.deliveries and bool(claim.later))
        if max_due:
            self._window = min(max(2 * self._window, 2 * self.claim_size), MAX_WINDOW) if claim.locked else 0
        if max_due and self._is_due():
            # Taken, or locked by another transaction: the next poll tells when more is due.
            self._next_due = None
            poll_soon = redelivered > 0 or bool(claim.later)
        for key in claim.drained:
            self.todo.pop(key, None)
        if self.todo and claim.rest is None and not (claim.looked_at or claim.deliveries or claim.missing):
            # All wanted partitions were locked by other subscribers, which will release them in a moment.
            self.rests_until = time.monotonic() + LOCKED_PAUSE
        return poll_soon
