"""Shared mode: competing consumers, whose deliveries are extended while they wait and run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from django_mysqlqueue.options.backoff import Failures
from django_mysqlqueue.runtime.polling.limited import IN_FLIGHT_PAUSE
from django_mysqlqueue.runtime.polling.mode import Mode
from django_mysqlqueue.runtime.polling.parts import Parts
from django_mysqlqueue.service import settling
from django_mysqlqueue.service.claims import Claim, Due, Later, Left, Seen, Want
from django_mysqlqueue.service.deliveries import Flushed, Settlement

MAX_WINDOW = 10_000
"""Maximum number of due rows that one claim looks at."""
LIMITED_WINDOW = 1000
"""Number of due rows that a claim of a group with limits looks at."""
LOCKED_PAUSE = 0.01
"""Seconds for which a group rests after a claim that found all wanted partitions locked."""


class SharedMode(Mode):
    """Competing consumers: any partition, any message, no leases."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
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
        self._inbox.keep(self.ref, time.monotonic() + self._configuration.handler.visibility_timeout)

    def __enter__(self) -> None:
        """Extend deliveries if it is time."""
        # Before the claim: after a stall, the claim would otherwise take deliveries that this process still holds.
        if time.monotonic() >= self._extend_at:
            self.extend()

    def configured(self) -> None:
        """Extend deliveries with the next turn: after a longer visibility timeout, their claims end too early."""
        # A claim that is shorter than the last one would end before the next extension.
        self._extend_at = self._due_rests_until = 0.0
        # The claim that found the other options has looked for nothing.
        self._expects_clock_step = True

    def notify(self, keys: Iterable[str]) -> None:
        """Note that partitions of the subset have, or may have, unclaimed messages."""
        todo = self._memory.todo
        for key in keys:
            if not (key in todo or self._limited.rests(key)):
                todo[key] = None

    def next_at(self) -> int | None:
        """Return when the next redelivery is due, in epoch milliseconds, or None."""
        if self._next_due is None:
            return None
        rest = max(0.0, self._due_rests_until - time.monotonic())
        return max(self._next_due, self._context.clock.now() + int(rest * 1000)) if rest else self._next_due

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
        """Return when deliveries have to be extended, by the monotonic clock."""
        return self._extend_at

    def reset(self) -> None:
        """Extend deliveries with the next turn."""
        self.extend_now()

    def extend(self) -> None:
        """Extend all deliveries that this process holds, waiting or running.

        Until the next extension, no delivery starts later than one visibility timeout from now, because other
        subscribers may have it by then. Deliveries that other subscribers have claimed are dropped.
        """
        began = time.monotonic()
        held = self._inbox.held(self.ref)
        if held:
            milliseconds = int(self._configuration.handler.visibility_timeout * 1000)
            stepped = self._context.clock.is_doubtful(milliseconds)
            lost = settling.extend_all(
                self._context.using, self.ref, held, milliseconds=milliseconds, clock_stepped=stepped
            )
            self._inbox.drop_stale(self.ref, lost)
        self._inbox.keep(self.ref, began + self._configuration.handler.visibility_timeout)
        self._extend_at = began + self._configuration.handler.visibility_timeout / 3

    # -- what to claim --------------------------------------------------------

    def want(self, key: str, limit: int) -> Want:
        """Return a request for messages above the position of a partition."""
        return Want(key, look_at=limit)

    def looks_for_due(self) -> bool:
        """Return whether claims look for redeliveries now."""
        return self._is_due() or self._expects_clock_step

    def _is_due(self) -> bool:
        if self._next_due is None or time.monotonic() < self._due_rests_until:
            return False
        return self._next_due <= self._context.clock.now()

    def redeliveries(self, most: int, with_slots: int) -> Due | None:
        """Return how a claim looks for redeliveries. Only the first one looks for what a clock has left behind."""
        held = {(delivery.key, delivery.offset) for delivery in self._inbox.held(self.ref)}
        expected, self._expects_clock_step = self._expects_clock_step, False
        # Rows of a key without a slot are made due later, as many as possible at once.
        limited_window = LIMITED_WINDOW if self._configuration.handler.limits.limits_keys else 0
        return Due(
            most, max(most, self._window, limited_window), held, expected, with_slots, self._configuration.subset
        )

    def resume(self) -> None:
        """Look for redeliveries again that waited for the end of a suspected poison message, or for a slot."""
        resumed = self._left_suspects and not self._inbox.has_suspect()
        if resumed or (self._limited.has_due and self._limited.room()):
            self._left_suspects = self._left_suspects and not resumed
            self._next_due, self._due_rests_until = self._context.clock.now(), 0.0

    # -- what has come of it --------------------------------------------------

    def settled(self, settlements: Sequence[Settlement], flushed: Flushed) -> None:
        """Remember when what a flush has written is due."""
        for due in flushed.waiting.values():
            self._next_due = due if self._next_due is None else min(self._next_due, due)

    def claimed(self, claim: Claim, wants: Sequence[Want], max_due: int) -> bool:
        """Remember what a claim found, and return whether to poll soon, because more redeliveries may be due."""
        todo = self._memory.todo
        left = claim.left.values()
        self._left_suspects = self._left_suspects or Left.SUSPECT in left
        poll_soon = False
        if max_due:
            waits = any(isinstance(reason, Later) for reason in left)
            if self._limited:
                self._rest_due(without_slots=waits and not claim.deliveries)
            most = 2 * self._configuration.claim_size
            self._window = min(max(2 * self._window, most), MAX_WINDOW) if Left.LOCKED in left else 0
            if self._is_due():
                # Taken, or locked by another transaction: the next poll tells when more is due.
                self._next_due = None
                redelivered = any(delivery.attempt > 1 or delivery.suspect for delivery in claim.deliveries)
                poll_soon = redelivered or waits
        for key, seen in claim.partitions.items():
            if seen is Seen.DRAINED:
                todo.pop(key, None)
        if wants and claim.rest is None and not (claim.partitions or claim.deliveries):
            # All wanted partitions were locked by other subscribers, which will release them in a moment.
            self._health.rest(LOCKED_PAUSE)
        return poll_soon

    def _rest_due(self, *, without_slots: bool) -> None:
        """Look for redeliveries less often while none has a slot."""
        if without_slots:
            self._due_rests_until = time.monotonic() + self._without_slots.add()
        else:
            self._without_slots.clear()
