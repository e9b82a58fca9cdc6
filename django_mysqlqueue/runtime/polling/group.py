"""One group of a subscriber: which partitions to look at, what to claim and to write. It knows no poller."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from django.db import Error

from django_mysqlqueue.backoff import Backoff, Failures
from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.runtime.handling.delivery import Delivery
from django_mysqlqueue.runtime.handling.handler import Handler
from django_mysqlqueue.runtime.handling.lanes import Held
from django_mysqlqueue.runtime.handling.observers import Settled, flushed_ends, latency
from django_mysqlqueue.runtime.log import delivery_fields, event, is_worth_a_line
from django_mysqlqueue.runtime.polling.context import Context
from django_mysqlqueue.service import claiming, payloads, rollups, settling, watermarks
from django_mysqlqueue.service.claiming import Claim, Claimant, ClaimRequest, Want
from django_mysqlqueue.service.deliveries import OUTCOMES, Action, Claimed, Flushed, Settlement
from django_mysqlqueue.sql.session import Retry

SHUTDOWN_FLUSHES = 10
"""Flushes of a group at shutdown; watermarks that have further to go are the next owner's."""
FAILED = (Action.NACK, Action.REJECT)
MAX_DEPTHS = 10_000
"""Partitions of which it is remembered how deep they are."""
MAX_PARTITIONS = 100
"""Partitions that one claim looks at."""
REST = Backoff(initial=0.1, maximum=5.0, jitter=0.0)
"""After a failed turn the other groups go first for so long."""


class PolledGroup(ABC):
    """What this process remembers and does for one group. Nothing in it outlives a restart.

    ``turn`` does what there is to do and says whether to poll soon; ``wake_at``,
    ``next_at`` and ``wants_turn`` say when there will be something.
    """

    def __init__(self, context: Context, handler: Handler) -> None:
        self.context = context
        self.inbox = context.inbox
        self.using = context.using
        self.handler = handler
        self.ref = handler.ref
        self.batch_size = max(context.batch_size, handler.batch_size)
        """Messages that one claim takes."""
        batches = (context.threads + 1) * handler.batch_size if handler.batch else 1
        self.least = max(batches, context.settings.prefetch // context.groups)
        """Deliveries of this group that may wait in the inbox, however full the others have made it. Where they
        are handed over in batches: one for each thread and one to follow, else the first would take all that is
        there, and the other threads would wait for its partitions."""
        self.max_bytes = context.limits.waiting_bytes // context.groups
        self.claimant = Claimant(
            handler.ref,
            context.subscriber,
            handler.max_attempts,
            int(handler.visibility_timeout * 1000) if handler.shared else None,
            strict=handler.on_failure == "block" and not handler.shared,
            subset=context.subset,
        )
        self.todo: dict[str, None] = {}
        """Partitions to look at, in turn; one leaves when a claim that held its lock saw nothing more."""
        self._depth = 1
        """How many messages to look for in a partition at least, where there are more partitions than that leaves."""
        self._depths: dict[str, int] = {}
        """The same for partitions that had more than was asked for the last time: twice that."""
        self.unfinished: set[str] = set()
        """Partitions whose watermark has further to go."""
        self._skipped: set[str] = set()
        """Partitions whose offsets row another process had locked: tried again with the next poll."""
        self._locked: list[Settlement] = []
        """Outcomes whose row another transaction had locked: written after the next poll."""
        self.stopped = False
        """The group is paused or dropped, or of the other mode: nothing is claimed."""
        self.other_mode = ""
        """The group's mode, if it is not the handler's any more: the process stops."""
        self._announced = False
        self._revision: int | None = None
        """What operators had last changed of the group, as of the last tick."""
        self.failures = Failures(REST)
        """Failed turns in a row."""
        self.rests_until = 0.0
        """After a failed turn: until when (monotonic) the others go first."""
        self._unanswered = Failures(REST)
        """Claims in a row whose payloads did not all come."""
        self._undo: int | None = None
        """The token of a claim whose COMMIT may have happened or not."""
        self.tally = rollups.Tally()
        """What this process has counted since it last wrote the rollups."""
        context.prefetch.join(self.ref, lambda: bool(self.todo))

    # -- what the poller calls ------------------------------------------------

    def notify(self, key: str) -> None:
        """A partition has messages above the cursor, or may have; others' partitions are passed over here."""
        if key in self.context.subset:
            self._notify(key)

    @abstractmethod
    def _notify(self, key: str) -> None: ...

    @abstractmethod
    def next_at(self) -> int | None:
        """When the next redelivery is due, epoch milliseconds."""

    def wake_at(self) -> float:
        """When this group wants a turn whatever happens, by the monotonic clock."""
        return float("inf")

    def _held(self) -> set[tuple[str, int]]:
        """(partition key, offset) of what this process holds and must not claim again."""
        return set()

    @abstractmethod
    def _wants(self, room: int) -> list[Want]: ...

    @abstractmethod
    def _max_due(self, room: int) -> int: ...

    @abstractmethod
    def _written(self, settlements: Sequence[Settlement], flushed: Flushed) -> None: ...

    @abstractmethod
    def _claimed(self, claim: Claim) -> bool:
        """Remembers what a claim found; whether to poll soon."""

    def reset(self) -> None:
        """Forgets every hint; leases and what is claimed stay."""
        self.todo.clear()
        self.unfinished.clear()
        self._skipped.clear()

    def room(self) -> int:
        """How many deliveries to claim now: none until there is room for a worthwhile batch."""
        if self.stopped:
            return 0
        return self.context.prefetch.room(
            self.ref, least=self.least, batch_size=self.batch_size, max_bytes=self.max_bytes
        )

    def wants_turn(self) -> bool:
        """Whether another turn would find something to do at once."""
        return bool(self.unfinished) or self._may_claim(self.room())

    def is_idle(self) -> bool:
        return not (self.todo or self.unfinished or self._skipped or self._locked) and self.inbox.is_idle(self.ref)

    def turn(self) -> bool:
        """Writes what is to be written and claims what there is room for, in one transaction.

        Returns:
            Whether to poll soon: redeliveries were due, and more may be.
        """
        self._undo_unknown()
        room = self.room()
        may_claim = self._may_claim(room)
        if may_claim or self.inbox.flush_due(self.ref, enough=self.context.enough):
            settlements = self.inbox.take_settlements(self.ref)
        else:
            settlements = []
        wants = self._wants(room) if may_claim else []
        max_due = self._max_due(room)
        if not (wants or max_due or settlements or self.unfinished):
            return False
        also = self._take_unfinished()
        hungry = self.inbox.waiting(self.ref)[0] == 0
        try:
            if wants or max_due:
                claim = self._claim(wants, settlements, also, max_due, room)
            else:
                claim = None
                flushed = self._flush(settlements, also)
        except (Error, CommitOutcomeUnknown, Retry):
            self.inbox.put_back_settlements(self.ref, settlements)
            self.unfinished |= also
            raise
        self._after_flush(settlements, claim.flushed if claim is not None else flushed)
        return claim is not None and self._after_claim(wants, claim, hungry=hungry)

    def failed(self) -> int:
        """A turn ended with an error: the others go first for a while.

        Returns:
            How many turns in a row have failed.
        """
        self.reset()
        self.rests_until = time.monotonic() + self.failures.add()
        return self.failures.count

    def succeeded(self) -> None:
        """A turn ended without one."""
        self.failures.clear()

    def counted(self) -> rollups.Tally:
        """What was counted since ``start_tally``."""
        for published_before in self.inbox.take_acked(self.ref):
            self.tally.acked(round(self.context.clock.offset_ms - published_before))
        return self.tally

    def start_tally(self) -> None:
        """What was counted is stored."""
        self.tally = rollups.Tally()

    def flush_now(self) -> None:
        """At shutdown: writes every settlement there is, and moves watermarks some way."""
        self._undo_unknown()
        self._write_locked()
        for _ in range(SHUTDOWN_FLUSHES):
            settlements = self.inbox.take_settlements(self.ref)
            if not (settlements or self.unfinished):
                return
            also = self._take_unfinished()
            try:
                flushed = self._flush(settlements, also)
            except (Error, CommitOutcomeUnknown, Retry):
                self.inbox.put_back_settlements(self.ref, settlements)
                raise
            self._after_flush(settlements, flushed)

    def _take_unfinished(self) -> set[str]:
        """Partitions whose watermarks the next flush moves on; no more than a short transaction can take."""
        taken = set(islice(self.unfinished, self.context.limits.flushed))
        self.unfinished -= taken
        return taken

    def _undo_unknown(self) -> None:
        if self._undo is not None:
            claiming.undo(self.using, self.ref, self._undo)
            self._undo = None

    def _may_claim(self, room: int) -> bool:
        return room > 0 and (bool(self.todo) or self._max_due(room) > 0)

    def _each(self, room: int, key: str) -> int:
        """How many messages to look for in a partition.

        A partition costs a claim as much as ten messages do, so where partitions
        hold many, few are taken from at a time; but enough to keep the threads busy.
        """
        share = room // (min(room, MAX_PARTITIONS, len(self.todo)) or 1)
        depth = max(self._depth, self._depths.get(key, 1))
        return max(1, share, min(depth, room // (2 * self.context.threads)))

    def _expected(self, want: Want) -> int:
        """How many messages a claim is likely to get of a partition: most give no more than they gave before."""
        if want.due or want.key in self._depths:
            return len(want.due) or want.look_at
        return min(want.look_at, self._depth)

    def _fill_up(self, wants: list[Want], left: int) -> list[Want]:
        """Gives what others leave of a batch to partitions that had more than was taken the last time."""
        filled: list[Want] = []
        for want in wants:
            more = max(0, min(left, self._depths.get(want.key, 0) - want.look_at)) if want.look_at else 0
            filled.append(Want(want.key, look_at=want.look_at + more) if more else want)
            left -= more
        return filled

    def _learn_depth(self, wants: Sequence[Want], claim: Claim, *, hungry: bool) -> None:
        """Deeper only while handlers are faster than claims: else a partition's turn would come late for nothing.

        One that gives all that it has says nothing of the others: those with a
        backlog must not wait for those that get a message now and then.
        """
        if not claim.looked_at:
            return
        if not hungry:
            self._depth = max(1, self._depth // 2)
            self._depths.clear()
            return
        if len(self._depths) > MAX_DEPTHS:
            self._depths.clear()
        deep = claim.looked_at - claim.drained
        for want in wants:
            if want.key in deep:
                self._depths[want.key] = min(2 * want.look_at, self.batch_size)
            else:
                self._depths.pop(want.key, None)
        if 2 * len(deep) >= len(claim.looked_at):
            self._depth = min(2 * self._depth, self.batch_size)
        else:
            self._depth = max(1, len(claim.deliveries) // len(claim.looked_at))

    # -- writing --------------------------------------------------------------

    def _flush(self, settlements: Sequence[Settlement], also: Collection[str]) -> Flushed:
        return settling.flush(
            self.using,
            self.ref,
            settlements,
            max_attempts=self.handler.max_attempts,
            shared=self.handler.shared,
            also=also,
        )

    def _after_flush(self, settlements: Sequence[Settlement], flushed: Flushed) -> None:
        if flushed.locked:
            self._locked += flushed.locked
            settlements = [settlement for settlement in settlements if settlement not in flushed.locked]
        self.inbox.written(settlements)
        self.unfinished |= flushed.unfinished
        self._skipped |= flushed.skipped
        for settlement in flushed.stale:
            delivery = settlement.delivery
            event(logging.WARNING, "delivery.lost", **delivery_fields(delivery), outcome=OUTCOMES[settlement.action])
        self._log_dead(flushed.dead)
        self._count_failures(settlements, flushed)
        if self.context.watch.is_wanted():
            self.context.watch.tell(flushed_ends(settlements, flushed, self.context.clock.now()))
        self._written(settlements, flushed)

    def _count_failures(self, settlements: Sequence[Settlement], flushed: Flushed) -> None:
        """What the charts show of this flush; acks are counted when the rollups are written."""
        tally = self.tally
        stale = {id(settlement) for settlement in flushed.stale}
        for settlement in settlements:
            if settlement.action is not Action.ACK and id(settlement) not in stale:
                tally.failed += settlement.action in FAILED
                tally.dead_lettered += settlement.is_written
        tally.dead_lettered += len(flushed.dead)

    def _log_dead(self, dead: Iterable[tuple[Claimed, str]]) -> None:
        for delivery, error in dead:
            # Of a traceback the line that names the exception; all of it is in the dead letter.
            event(
                logging.ERROR,
                "delivery.dead_lettered",
                **delivery_fields(delivery),
                error=error.strip().rsplit("\n", 1)[-1],
            )

    # -- claiming -------------------------------------------------------------

    def _claim(
        self, wants: Sequence[Want], settlements: Sequence[Settlement], also: Collection[str], max_due: int, room: int
    ) -> Claim:
        token = claiming.new_token()
        try:
            return claiming.claim(
                self.using,
                ClaimRequest(
                    self.claimant,
                    wants,
                    token,
                    settlements,
                    also,
                    max_due=max_due,
                    due_window=self._due_window(max_due),
                    exclude=self._held() if max_due else (),
                    max_rows=room,
                    max_bytes=self.max_bytes,
                    after_clock_step=self._after_clock_step(),
                ),
            )
        except CommitOutcomeUnknown:
            self._undo = token
            raise

    def _after_claim(self, wants: Sequence[Want], claim: Claim, *, hungry: bool) -> bool:
        self._log_dead(claim.dead)
        self.unfinished |= {delivery.key for delivery, _ in claim.dead}
        if claim.other_mode:
            self.check_mode(claim.other_mode)
            return False
        if claim.dropped or claim.paused:
            self._stop(dropped=claim.dropped)
            return False
        poll_soon = self._claimed(claim)
        self._learn_depth(wants, claim, hungry=hungry)
        # First of all: what is claimed must be in the inbox, or given back, whatever fails from here on.
        self._hand_out(claim.deliveries)
        if claim.dead and self.context.watch.is_wanted():
            self._tell_dead(claim.dead)
        if claim.missing and not watermarks.create_missing(self.using, self.ref, claim.missing):
            self._stop(dropped=True)
        return poll_soon

    def _tell_dead(self, dead: Sequence[tuple[Claimed, str]]) -> None:
        """Of messages that were given up without another call."""
        found = payloads.read(self.using, [delivery.offset for delivery, _ in dead])
        now = self.context.clock.now()
        self.context.watch.tell(
            [
                Settled(
                    Delivery(self.handler, claimed, body, self.using),
                    Outcome.DEAD_LETTERED,
                    error,
                    0.0,
                    latency(body, now),
                    0,
                )
                for claimed, error in dead
                if (body := found.get(claimed.offset)) is not None
            ]
        )

    def _due_window(self, max_due: int) -> int:
        """How many due rows to look at for so many."""
        return max_due

    def _after_clock_step(self) -> bool:
        return False

    def _stop(self, *, dropped: bool) -> None:
        """Claims nothing until the next tick asks again."""
        self.stopped = True
        if not self._announced:
            self._announced = True
            event(
                logging.ERROR if dropped else logging.INFO,
                "group.dropped" if dropped else "group.paused",
                group=self.ref.group,
                topic=self.ref.topic,
            )

    def polled(self) -> None:
        """After each poll: what was locked by another may be free by now."""
        self.unfinished |= self._skipped
        self._skipped.clear()
        self._write_locked()

    def _write_locked(self) -> None:
        if self._locked:
            self.inbox.put_back_settlements(self.ref, self._locked)
            self._locked = []

    def recheck_paused(self) -> None:
        """At a tick: the group may have been resumed."""
        self._announced = self.stopped
        self.stopped = False

    def check_mode(self, registered: str) -> None:
        """What the group's mode is by now. Nothing is claimed in another mode than the handler's."""
        if registered != self.handler.mode:
            self.other_mode = registered
            self.stopped = True

    def has_new_revision(self, revision: int) -> bool:
        """Whether an operator has changed what this process remembers of the group (a seek, a retry)."""
        revised = self._revision is not None and revision != self._revision
        self._revision = revision
        if revised:
            event(logging.INFO, "group.revised", group=self.ref.group, topic=self.ref.topic)
        return revised

    def _hand_out(self, deliveries: Sequence[Claimed]) -> None:
        """Reads the payloads, after the claim has committed, and puts the deliveries into the inbox."""
        if not deliveries:
            return
        try:
            found = payloads.read(self.using, [delivery.offset for delivery in deliveries])
            missing = [delivery.offset for delivery in deliveries if delivery.offset not in found]
            deleted = payloads.deleted(self.using, missing) if missing else set()
        except Error:
            for delivery in deliveries:
                self.inbox.settle(Settlement(delivery, Action.RELEASE), ordered=not self.handler.shared)
            raise
        if not missing:
            self._unanswered.clear()
            self.inbox.put(Held(delivery, found[delivery.offset], self.handler) for delivery in deliveries)
            return
        # One by one: of a partition, what is in front of a missing message is handled, and what is behind it waits.
        for delivery in deliveries:
            if delivery.offset in found:
                self.inbox.put([Held(delivery, found[delivery.offset], self.handler)])
            elif delivery.offset in deleted:
                event(logging.WARNING, "delivery.deleted", **delivery_fields(delivery))
                self.inbox.settle(Settlement(delivery, Action.DELETED), ordered=not self.handler.shared)
            else:
                self.inbox.settle(Settlement(delivery, Action.RELEASE), ordered=not self.handler.shared)
        if len(deleted) < len(missing):
            self._rest_without_payloads(len(missing) - len(deleted), len(deliveries))

    def _rest_without_payloads(self, missing: int, claimed: int) -> None:
        """Claimed at once again, they would be missing again."""
        self.rests_until = time.monotonic() + self._unanswered.add()
        if is_worth_a_line(self._unanswered.count):
            event(
                logging.ERROR,
                "payloads.missing",
                group=self.ref.group,
                topic=self.ref.topic,
                messages=missing,
                claimed=claimed,
                failures=self._unanswered.count,
            )
