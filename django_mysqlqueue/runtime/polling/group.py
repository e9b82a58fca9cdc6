"""The work of a process for one group: its turn, and the parts that a turn goes through. It imports no poller."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Generic, TypeVar

from django.db import Error

from django_mysqlqueue.runtime.handling.lanes import Held
from django_mysqlqueue.runtime.polling.configured import Configuration
from django_mysqlqueue.runtime.polling.context import Context
from django_mysqlqueue.runtime.polling.hand_out import HandOut
from django_mysqlqueue.runtime.polling.health import Health
from django_mysqlqueue.runtime.polling.limited import LONGEST_REST_MS, Limited
from django_mysqlqueue.runtime.polling.memory import Memory
from django_mysqlqueue.runtime.polling.mode import Mode
from django_mysqlqueue.runtime.polling.parts import Parts
from django_mysqlqueue.runtime.polling.planner import Plan, Planner
from django_mysqlqueue.runtime.polling.writing import Counts, Unwritten, Writer
from django_mysqlqueue.service import claiming, watermarks
from django_mysqlqueue.service.claims import Budget, Claim, ClaimRequest, Seen
from django_mysqlqueue.service.deliveries import Settlement
from django_mysqlqueue.service.groups import OptionColumns
from django_mysqlqueue.service.subsets import EVERYTHING
from django_mysqlqueue.sql.session import Retry
from django_mysqlqueue.subscriptions.handler import Handler

SHUTDOWN_FLUSHES = 10
"""Maximum number of flushes of a group at shutdown. The next owner advances the watermarks that are left behind."""

M = TypeVar("M", bound=Mode)


class Group(Generic[M]):
    """This process's memory of, and work for, one group. Nothing in it survives a restart.

    ``turn`` does the work that there is; ``wake_at``, ``wants_turn`` and the mode's ``next_at`` tell when there will be
    more.
    """

    def __init__(self, context: Context, handler: Handler, mode: type[M]) -> None:
        self.context = context
        self.ref = handler.ref
        self._declared = handler
        self._mode = mode
        self.health = Health()
        self.counts = Counts(context, handler.ref)
        self.passes = True
        """Whether claims may pass messages that have expired or are superseded."""
        self._undo: int | None = None
        """The token of a claim of which it is not known that its deliveries are in the inbox."""
        self._build()

    def _build(self) -> None:
        """Make the parts, with an empty memory."""
        context, handler = self.context, self._declared
        self.configuration = Configuration(context, handler)
        self.memory = Memory()
        self.limited = Limited(context.inbox, handler.ref, context.subscriber, lease_ms=context.lease_ms)
        parts = Parts(context, self.configuration, self.memory, self.limited, self.health)
        self.mode = self._mode(parts)
        self.planner = Planner(parts, self.mode)
        self.writer = Writer(parts, self.mode, self.counts)
        self.hand_out = HandOut(parts)
        self._apply()

    # -- options --------------------------------------------------------------

    @property
    def handler(self) -> Handler:
        """The handler with the options that apply now."""
        return self.configuration.handler

    def configure(self, handler: Handler) -> None:
        """Use a handler's options from now on, also for the deliveries that wait."""
        self.configuration.use(handler)
        self._apply()

    def override(self, columns: OptionColumns) -> bool:
        """Use the registered options and the overrides of the group row, and return whether an option has changed."""
        changed = self.configuration.override(columns)
        if changed is not None:
            self._apply()
        return bool(changed)

    def _apply(self) -> None:
        """Let the parts, and the rest of the process, know the options."""
        configuration, context = self.configuration, self.context
        handler = configuration.handler
        if handler.prefetch is None:
            context.prefetch.join(self.ref, self.memory.has_work)
        else:
            context.prefetch.leave(self.ref)
        if rested := self.limited.configure(handler.limits, per_call=handler.batch_size):
            self.notify(rested)
        enough = max(1, configuration.claim_size // 2)
        context.inbox.configure(handler, enough=enough, priority_share=configuration.priority_share)
        for key in [key for key in self.memory.todo if key not in configuration.subset]:
            self.memory.todo.pop(key)
        self.mode.configured()

    # -- what the poller asks and tells ---------------------------------------

    def notify(self, keys: Collection[str]) -> None:
        """Note that partitions have, or may have, unclaimed messages. Those outside the subset are ignored."""
        subset = self.configuration.subset
        self.mode.notify(keys if subset == EVERYTHING else [key for key in keys if key in subset])

    def wake_at(self) -> float:
        """Return when this group needs a turn even if nothing happens, by the monotonic clock."""
        until = self.limited.next_at()
        if until is None:
            return self.mode.wake_at()
        rest = min(max(0, until - self.context.clock.now()), LONGEST_REST_MS) / 1000
        return min(self.mode.wake_at(), time.monotonic() + rest)

    def wants_turn(self) -> bool:
        """Return whether another turn would find work at once."""
        return self.mode.wants_turn() or bool(self.memory.unfinished) or self.planner.has_claim()

    def is_idle(self) -> bool:
        """Return whether no work is known for this group, and no message waits for a slot or is in backoff."""
        if not self.memory.is_idle() or self.limited.next_at() is not None:
            return False
        return self.context.inbox.is_idle(self.ref) and self.mode.is_idle()

    def reset(self) -> None:
        """Forget every hint. Leases and claimed deliveries stay."""
        self.limited.reset()
        self.memory.reset()
        self.mode.reset()

    def failed(self) -> int:
        """Note that a turn failed, pause the group for a while, and return how many in a row have failed."""
        self.reset()
        self.health.failed()
        return self.health.failures.count

    def start_over(self, error: Exception) -> int:
        """Begin with an empty memory, after a pause, because the work for this group broke down.

        What raised the error may have left anything in memory. What the inbox holds is kept: handlers run on, and what
        has not started is released.

        Returns:
            The number of breakdowns since the group worked well.
        """
        inbox = self.context.inbox
        inbox.return_waiting(self.ref)
        inbox.put_back_settlements(self.ref, [*self.memory.taken, *self.memory.locked])
        owned = self.mode.owned()
        self.passes = True
        self._build()
        self.mode.restore(owned, inbox.held(self.ref, unwritten=True))
        self.health.broke_down(error)
        return self.health.breakdowns.count

    # -- a turn ---------------------------------------------------------------

    def turn(self) -> bool:
        """Write outcomes and claim as much as there is room for, in one transaction, and hand out what was claimed.

        Returns:
            Whether to poll soon, because redeliveries were due and more may be, or the options have changed.
        """
        # To enter the mode extends deliveries, and reads partitions in doubt again under locks of their leases. So a
        # claim with an unknown outcome is over before it is undone.
        with self.mode:
            self._undo_unknown()
            plan = self.planner.plan()
            if plan is None:
                return False
            claim = self._write(plan)
            if claim is None:
                return False
            if claim.refused:
                return self._obey(claim)
            poll_soon = self.planner.claimed(plan, claim)
            # First: from here on, every claimed delivery reaches the inbox or is released, even after an error.
            self._undo = None
            self.hand_out.deliver(claim)
            missing = [key for key, seen in claim.partitions.items() if seen is Seen.MISSING]
            if missing and not watermarks.create_missing(self.context.using, self.ref, missing):
                self.configuration.stop(dropped=True)
            return poll_soon

    def _undo_unknown(self) -> None:
        if self._undo is not None:
            claiming.undo(self.context.using, self.ref, self._undo)
            self._undo = None

    def _write(self, plan: Plan) -> Claim | None:
        """Write what is to be written, with a claim if there is something to claim, and return the claim."""
        try:
            claim = self._claim(plan) if plan.claims else None
            written = self.writer.flush(plan.unwritten) if claim is None else claim.flushed
        except Exception as error:
            self.writer.not_written(plan.unwritten, error)
            raise
        if claim is not None:
            self.planner.took(plan, claim)
        self.writer.written(plan.unwritten.settlements, written, claim)
        return claim

    def _claim(self, plan: Plan) -> Claim:
        request = self._request(plan)
        self._undo = request.token
        try:
            claim = claiming.claim(self.context.using, request)
        except (Error, Retry):
            self._undo = None  # It was rolled back.
            raise
        if not claim.deliveries:
            self._undo = None
        self.limited.written(claim.flushed.held)
        if self.limited:
            self.limited.looked(request, claim)
            for key in self.limited.claimed(claim, self.context.clock.now()):
                self.memory.todo.pop(key, None)
        return claim

    def _request(self, plan: Plan) -> ClaimRequest:
        due = None
        if plan.max_due:
            with_slots = self.limited.room() if self.limited.is_partial else 2**62
            due = self.mode.redeliveries(plan.max_due, with_slots)
        return ClaimRequest(
            self.configuration.claimant,
            plan.wants,
            claiming.new_token(),
            plan.unwritten.settlements,
            plan.unwritten.also,
            due=due,
            budget=Budget(plan.room, self.configuration.max_bytes, suspects=int(not self.context.inbox.has_suspect())),
            passes=self.passes,
            holding=plan.unwritten.holding,
        )

    def _obey(self, claim: Claim) -> bool:
        """Do what the group's row says, for which a claim has taken nothing, and return whether to poll soon."""
        if claim.fence is None or claim.refused == "paused":
            self.configuration.stop(dropped=claim.fence is None)
        elif claim.refused == "mode":
            self.configuration.check_mode(claim.fence.mode)
        else:
            self.override(claim.fence.options)
            return True
        return False

    # -- the end --------------------------------------------------------------

    def release_all(self) -> None:
        """Write what has ended, and release what this process holds, for other subscribers."""
        self.mode.release_free()  # First: writing may be what breaks.
        self.flush_now()
        self.mode.release_free()

    def flush_now(self) -> None:
        """Write all settlements, at shutdown, and advance watermarks in up to ``SHUTDOWN_FLUSHES`` flushes."""
        self._undo_unknown()
        self.writer.retry_locked()
        for _ in range(SHUTDOWN_FLUSHES):
            settlements = self.memory.taken = self.context.inbox.take_settlements(self.ref)
            if not (settlements or self.memory.unfinished):
                return
            also = self.memory.take_unfinished(self.context.limits.flushed)
            self._write(Plan(Unwritten(settlements, also, self.limited.news())))

    def cut_off(self) -> tuple[list[Settlement], list[list[Held]]]:
        """See ``Inbox.cut_off``."""
        self.writer.retry_locked()
        return self.context.inbox.cut_off(self.ref)
