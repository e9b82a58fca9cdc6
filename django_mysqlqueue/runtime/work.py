"""What the poller remembers and does for one group: what to look at, what to claim."""

from __future__ import annotations

import heapq
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from django.db import Error

from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.runtime.inbox import Held
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.runtime.registry import Handler
from django_mysqlqueue.service import claiming, leasing, settling, watermarks
from django_mysqlqueue.service.claiming import Claim, Claimant, Want
from django_mysqlqueue.service.deliveries import Claimed, Flushed, Kind, Outcome
from django_mysqlqueue.service.leasing import Lease
from django_mysqlqueue.service.transactions import Retry, Session
from django_mysqlqueue.signals import delivery_stale

if TYPE_CHECKING:
    from django_mysqlqueue.runtime.poller import Poller

SHUTDOWN_FLUSHES = 10
"""Flushes of a group at shutdown; watermarks that have further to go are the next owner's."""
MAX_PARTITIONS = 100
"""Partitions that one claim looks at."""
WAITING_BYTES = 64 * 1_048_576
"""Payload bytes that a process keeps waiting, shared out among its groups."""


class GroupWork(ABC):
    """One group's share of the poller's memory. Nothing in it outlives a restart."""

    def __init__(self, poller: Poller, handler: Handler, *, share: int) -> None:
        self.poller = poller
        self.inbox = poller.inbox
        self.using = poller.using
        self.handler = handler
        self.ref = handler.ref
        self.share = share
        """Deliveries of this group that may wait in the inbox."""
        self.max_bytes = WAITING_BYTES // max(1, poller.settings.prefetch // share)
        self.claimant = Claimant(
            handler.ref,
            poller.subscriber,
            handler.max_attempts,
            int(handler.visibility_timeout * 1000) if handler.shared else None,
        )
        self.todo: dict[str, None] = {}
        """Partitions to look at, in turn; one leaves when a claim that held its lock saw nothing more."""
        self.unfinished: set[str] = set()
        """Partitions whose watermark has further to go."""
        self.stopped = False
        """The group is paused or dropped: nothing is claimed."""
        self._announced = False
        self._undo: int | None = None
        """The token of a claim whose COMMIT may have happened or not."""

    # -- what the poller calls ------------------------------------------------

    @abstractmethod
    def news(self, key: str) -> None:
        """A partition has messages above the cursor, or may have."""

    @abstractmethod
    def next_at(self) -> int | None:
        """When the next redelivery is due, epoch milliseconds."""

    @abstractmethod
    def _wants(self, room: int) -> list[Want]: ...

    @abstractmethod
    def _max_due(self, room: int) -> int: ...

    @abstractmethod
    def _written(self, outcomes: Sequence[Outcome], flushed: Flushed) -> None: ...

    @abstractmethod
    def _claimed(self, claim: Claim) -> None: ...

    def start_anew(self) -> None:
        self.todo.clear()
        self.unfinished.clear()

    def room(self) -> int:
        """How many deliveries to claim now: none until there is room for a worthwhile batch."""
        if self.stopped:
            return 0
        waiting, size = self.inbox.waiting(self.ref)
        most = min(self.poller.batch_size, self.share)
        room = min(most, self.share - waiting)
        worthwhile = waiting == 0 or room >= (most + 1) // 2
        return room if worthwhile and size < self.max_bytes else 0

    def wants_turn(self) -> bool:
        """Whether another turn would find something to do at once."""
        return bool(self.unfinished) or self._may_claim(self.room())

    def is_idle(self) -> bool:
        return not self.todo and not self.unfinished and self.inbox.is_idle(self.ref)

    def turn(self) -> None:
        """Writes what is to be written and claims what there is room for, in one transaction."""
        if self._undo is not None:
            claiming.undo(self.using, self.ref, self._undo)
            self._undo = None
        room = self.room()
        may_claim = self._may_claim(room)
        if may_claim or self.inbox.flush_due(self.ref, enough=self.poller.enough):
            outcomes = self.inbox.take_outcomes(self.ref)
        else:
            outcomes = []
        wants = self._wants(room) if may_claim else []
        max_due = self._max_due(room)
        if not (wants or max_due or outcomes or self.unfinished):
            return
        also, self.unfinished = self.unfinished, set()
        try:
            if wants or max_due:
                claim = self._claim(wants, outcomes, also, max_due)
            else:
                claim = None
                flushed = self._flush(outcomes, also)
        except (Error, CommitOutcomeUnknown, Retry):
            self.inbox.put_back_outcomes(self.ref, outcomes)
            self.unfinished |= also
            raise
        self._after_flush(outcomes, claim.flushed if claim is not None else flushed)
        if claim is not None:
            self._after_claim(claim)

    def flush_now(self) -> None:
        """At shutdown: writes every outcome there is, and moves watermarks some way."""
        if self._undo is not None:
            claiming.undo(self.using, self.ref, self._undo)
            self._undo = None
        for _ in range(SHUTDOWN_FLUSHES):
            outcomes = self.inbox.take_outcomes(self.ref)
            if not (outcomes or self.unfinished):
                return
            also, self.unfinished = self.unfinished, set()
            try:
                flushed = self._flush(outcomes, also)
            except (Error, CommitOutcomeUnknown, Retry):
                self.inbox.put_back_outcomes(self.ref, outcomes)
                raise
            self._after_flush(outcomes, flushed)

    def _may_claim(self, room: int) -> bool:
        return room > 0 and (bool(self.todo) or self._max_due(room) > 0)

    # -- writing --------------------------------------------------------------

    def _flush(self, outcomes: Sequence[Outcome], also: Collection[str]) -> Flushed:
        return settling.flush(
            self.using,
            self.ref,
            outcomes,
            max_attempts=self.handler.max_attempts,
            shared=self.handler.shared,
            also=also,
        )

    def _after_flush(self, outcomes: Sequence[Outcome], flushed: Flushed) -> None:
        self.inbox.written(outcomes)
        self.unfinished |= flushed.unfinished
        for outcome in flushed.stale:
            delivery = outcome.delivery
            fields: dict[str, Any] = {
                "group": self.ref.group,
                "topic": self.ref.topic,
                "key": delivery.key,
                "offset": delivery.offset,
                "attempt": delivery.attempt,
                "outcome": outcome.kind.value,
            }
            event(logging.WARNING, "delivery.stale", **fields)
            delivery_stale.send_robust(sender=None, **fields)
        self._log_dead(flushed.dead)
        self._written(outcomes, flushed)

    def _log_dead(self, dead: Iterable[Claimed]) -> None:
        for delivery in dead:
            event(
                logging.ERROR,
                "delivery.dead_lettered",
                group=self.ref.group,
                topic=self.ref.topic,
                key=delivery.key,
                offset=delivery.offset,
                attempt=delivery.attempt,
            )

    # -- claiming -------------------------------------------------------------

    def _claim(self, wants: Sequence[Want], outcomes: Sequence[Outcome], also: Collection[str], max_due: int) -> Claim:
        token = claiming.new_token()
        try:
            return claiming.claim(
                self.using,
                self.claimant,
                wants,
                token=token,
                outcomes=outcomes,
                also=also,
                max_due=max_due,
                max_bytes=self.max_bytes,
                after_clock_step=self._after_clock_step(),
            )
        except CommitOutcomeUnknown:
            self._undo = token
            raise

    def _after_claim(self, claim: Claim) -> None:
        self._log_dead(claim.dead)
        self.unfinished |= {delivery.key for delivery in claim.dead}
        if claim.dropped or claim.paused:
            self._stop(dropped=claim.dropped)
            return
        self._claimed(claim)
        if claim.missing and not watermarks.create_missing(self.using, self.ref, claim.missing):
            self._stop(dropped=True)
        self._hand_out(claim.deliveries)

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

    def ask_again(self) -> None:
        """At a tick: the group may have been resumed."""
        self._announced = self.stopped
        self.stopped = False

    def _hand_out(self, deliveries: Sequence[Claimed]) -> None:
        """Reads the payloads, after the claim has committed, and puts the deliveries into the inbox."""
        if not deliveries:
            return
        try:
            bodies = claiming.bodies(self.using, [delivery.offset for delivery in deliveries])
        except Error:
            for delivery in deliveries:
                self.inbox.settle(Outcome(delivery, Kind.GIVE_BACK))
            raise
        held: list[Held] = []
        for delivery in deliveries:
            body = bodies.get(delivery.offset)
            if body is None:
                # Collected or discarded since it was claimed: there is nothing to handle.
                self.inbox.settle(Outcome(delivery, Kind.ACK))
            else:
                held.append(Held(delivery, body, self.handler))
        self.inbox.put(held)


class SharedWork(GroupWork):
    """Competing subscribers: any partition, any message, no leases."""

    def __init__(self, poller: Poller, handler: Handler, *, share: int) -> None:
        super().__init__(poller, handler, share=share)
        self.next_due: int | None = None
        self.look_after_clock_step = True
        self._extend_at = 0.0

    def news(self, key: str) -> None:
        self.todo[key] = None

    def next_at(self) -> int | None:
        return self.next_due

    def turn(self) -> None:
        super().turn()
        if time.monotonic() >= self._extend_at:
            self._extend()

    def _extend(self) -> None:
        """A living process keeps all deliveries that it holds, waiting or running."""
        self._extend_at = time.monotonic() + self.handler.visibility_timeout / 3
        held = self.inbox.held(self.ref)
        if held:
            milliseconds = int(self.handler.visibility_timeout * 1000)
            settling.extend_all(self.using, self.ref, held, milliseconds=milliseconds)

    def extend_at(self) -> float:
        return self._extend_at

    def _wants(self, room: int) -> list[Want]:
        keys = list(self.todo)[: min(room, MAX_PARTITIONS)]
        return [Want(key, look_at=max(1, room // len(keys))) for key in keys]

    def _max_due(self, room: int) -> int:
        if room <= 0 or self.stopped:
            return 0
        is_due = self.next_due is not None and self.next_due <= self.poller.clock.now()
        return room if is_due or self.look_after_clock_step else 0

    def _after_clock_step(self) -> bool:
        look, self.look_after_clock_step = self.look_after_clock_step, False
        return look

    def _written(self, outcomes: Sequence[Outcome], flushed: Flushed) -> None:
        for due in flushed.waiting.values():
            self.next_due = due if self.next_due is None else min(self.next_due, due)

    def _claimed(self, claim: Claim) -> None:
        redelivered = sum(delivery.attempt > 1 or delivery.suspect for delivery in claim.deliveries)
        if self.next_due is not None and self.next_due <= self.poller.clock.now():
            # Taken, or seen to be locked by another: the next poll tells when more is due.
            self.next_due = None
            if redelivered:
                self.poller.poll_soon()
        for key in claim.drained:
            self.todo.pop(key, None)
        for key in [key for key in self.todo if key not in claim.drained][:MAX_PARTITIONS]:
            self.todo[key] = self.todo.pop(key)  # to the end: others have their turn


@dataclass(slots=True)
class Partition:
    """A partition that this process holds, or still has deliveries of."""

    key: str
    owned: bool = True
    leaving: bool = False
    """To be given back as soon as nothing of it is in hand."""
    fresh: bool = True
    """There may be rows above the cursor."""
    pending: dict[int, int] = field(default_factory=dict)
    """Unsettled offsets that are not in hand → when they are due, epoch milliseconds."""
    in_hand: dict[int, int] = field(default_factory=dict)
    """Offset → token of what this process has claimed and not yet written the end of."""
    busy_at: float = field(default_factory=time.monotonic)
    """When there was last something to do."""


class OrderedWork(GroupWork):
    """Leased partitions, each worked on in offset order by one subscriber at a time."""

    def __init__(self, poller: Poller, handler: Handler, *, share: int) -> None:
        super().__init__(poller, handler, share=share)
        self.partitions: dict[str, Partition] = {}
        self.waiting: dict[str, float] = {}
        """Partitions with work that this process does not own → since when it knows."""
        self._theirs: set[str] = set()
        """Partitions that a live subscriber owned at the last tick."""
        self._live: list[str] = []
        self._due: list[tuple[int, str, int]] = []
        """A heap of (due, key, offset); entries may be out of date."""
        self._try_now = False
        """There is news of an unowned partition."""
        self._reload: set[str] = set()
        """Partitions whose unsettled rows must be read again."""

    # -- news -----------------------------------------------------------------

    def news(self, key: str) -> None:
        partition = self.partitions.get(key)
        if partition is not None and partition.owned:
            partition.fresh = True
            self._look_at(partition)
        elif key not in self.waiting:
            self.waiting[key] = time.monotonic()
            # A live owner gets the same news; if it has gone since, the next tick shows it.
            self._try_now = self._try_now or key not in self._theirs

    def _look_at(self, partition: Partition) -> None:
        partition.busy_at = time.monotonic()
        if not partition.leaving:
            self.todo.setdefault(partition.key)

    def next_at(self) -> int | None:
        while self._due:
            due, key, offset = self._due[0]
            partition = self.partitions.get(key)
            if partition is not None and partition.pending.get(offset) == due:
                return due
            heapq.heappop(self._due)
        return None

    def start_anew(self) -> None:
        super().start_anew()
        self.waiting.clear()
        self._reload = {key for key, partition in self.partitions.items() if partition.owned}

    def is_idle(self) -> bool:
        return super().is_idle() and not self.waiting and not any(p.pending for p in self.partitions.values())

    def turn(self) -> None:
        if self._reload:
            self._verify_and_load()
        if self._try_now:
            self._try_now = False
            self._acquire(steal=self.poller.may_steal())
        self._wake_due()
        super().turn()
        self._leave()

    def _wake_due(self) -> None:
        """Puts partitions whose backoffs are over on the to-look list."""
        now = self.poller.clock.now()
        while (due := self.next_at()) is not None and due <= now:
            _, key, _ = heapq.heappop(self._due)
            self._look_at(self.partitions[key])

    # -- leases ---------------------------------------------------------------

    def owned(self) -> list[str]:
        return [key for key, partition in self.partitions.items() if partition.owned]

    def rebalance(self, leases: Sequence[Lease], live: list[str], *, steal: bool) -> None:
        """Compares memory with the lease rows, gives back what is above the share, takes what is below it."""
        me = self.poller.subscriber
        self._live = live
        self._theirs = {lease.key for lease in leases if lease.good and lease.owner != me}
        rows = {lease.key: lease.owner for lease in leases}
        for key in self.owned():
            if rows.get(key) != me:
                self._lose(key, "taken")
        now = time.monotonic()
        for lease in leases:
            known = self.partitions.get(lease.key)
            if lease.key not in self._theirs and not (known is not None and known.owned):
                self.waiting.setdefault(lease.key, now)
        # A live owner answers for its partitions until it has drained them or let them go.
        for key in self._theirs & self.waiting.keys():
            del self.waiting[key]
        self._drop_drained()
        if steal:
            self._give_back_excess()
        self._acquire(steal=steal)

    def _cap(self) -> int | None:
        """This subscriber's fair share; None if it cannot be computed: then there is no cap."""
        total = len(self._theirs) + len(self.owned()) + len(self.waiting.keys() - self._theirs)
        return leasing.caps(total, self._live, self.ref).get(self.poller.subscriber)

    def _give_back_excess(self) -> None:
        cap = self._cap()
        if cap is None or len(self._live) < 2:
            return
        staying = sorted(key for key in self.owned() if not self.partitions[key].leaving)
        for key in staying[cap:]:
            partition = self.partitions[key]
            partition.leaving = True
            self.todo.pop(key, None)
            self.inbox.give_back(self.ref, key)

    def _acquire(self, *, steal: bool) -> None:
        """Takes unowned partitions with work up to the share, and overdue ones whatever the share."""
        if not self.waiting or self.stopped or not self.heart_good():
            return
        waiting = sorted(self.waiting.keys() - self._theirs)
        cap = self._cap()
        wanted = waiting
        if cap is not None and len(self._live) > 1:
            # Everybody begins at another place, so that not all reach for the same partition.
            start = self._live.index(self.poller.subscriber) * len(waiting) // len(self._live)
            rotated = waiting[start:] + waiting[:start]
            overdue = time.monotonic() - self.poller.settings.lease_duration
            below_share = rotated[: max(0, cap - len(self.owned()))]
            wanted = below_share + [key for key in rotated[len(below_share) :] if self.waiting[key] <= overdue]
        if not wanted:
            return
        watermarks.create_missing(self.using, self.ref, wanted)
        taken = leasing.acquire(
            self.using, self.ref, self.poller.subscriber, wanted, lease_ms=self.poller.lease_ms, steal=steal
        )
        for key in taken.elsewhere:
            self._theirs.add(key)
            del self.waiting[key]
        if taken.held:
            self._take_over(taken.held)

    def heart_good(self) -> bool:
        return self.poller.heart.good()

    def _take_over(self, keys: Collection[str]) -> None:
        for key in keys:
            del self.waiting[key]
            partition = self.partitions.setdefault(key, Partition(key))
            partition.owned, partition.leaving, partition.fresh = True, False, True
            self._reload.add(key)
        self._load(keys)
        event(logging.DEBUG, "leases.taken", group=self.ref.group, topic=self.ref.topic, partitions=len(keys))

    def _verify_and_load(self) -> None:
        self.verify()
        self._load([key for key in self._reload if key in self.partitions and self.partitions[key].owned])

    def verify(self) -> None:
        """Reads the leases again under lock; drops those lost, with what waits of them."""
        owned = self.owned()
        held = leasing.mine(self.using, self.ref, self.poller.subscriber, owned) if owned else set()
        for key in owned:
            if key not in held:
                self._lose(key, "in doubt")

    def _load(self, keys: Collection[str]) -> None:
        """Reads the unsettled rows of partitions into memory; what this process holds is left out."""
        pending: dict[str, dict[int, int]] = {key: {} for key in keys}
        for row in leasing.load(Session(self.using), self.ref, keys):
            if self.partitions[row.key].in_hand.get(row.offset) != row.token:
                pending[row.key][row.offset] = row.due
        for key, offsets in pending.items():
            partition = self.partitions[key]
            partition.pending = {}
            partition.fresh = True
            for offset, due in offsets.items():
                self._wait_for(partition, offset, due)
            self._look_at(partition)
            self._reload.discard(key)
        self.unfinished |= set(keys)

    def _wait_for(self, partition: Partition, offset: int, due: int) -> None:
        partition.pending[offset] = due
        heapq.heappush(self._due, (due, partition.key, offset))

    def _lose(self, key: str, why: str) -> None:
        partition = self.partitions[key]
        event(logging.WARNING, "lease.lost", group=self.ref.group, topic=self.ref.topic, key=key, why=why)
        for delivery in self.inbox.drop(self.ref, key):
            partition.in_hand.pop(delivery.offset, None)
        partition.owned = False
        partition.pending.clear()
        self.todo.pop(key, None)
        self.unfinished.discard(key)
        self._reload.discard(key)
        self._forget_if_done(partition)

    def _forget_if_done(self, partition: Partition) -> None:
        if not partition.owned and not partition.in_hand:
            del self.partitions[partition.key]
            self.inbox.forget_lane(self.ref, partition.key)

    def _leave(self) -> None:
        """Releases what is to be given back and is no longer in hand."""
        done = [
            partition.key
            for partition in self.partitions.values()
            if partition.owned and partition.leaving and not partition.in_hand
        ]
        if done:
            self.release(done)

    def release(self, keys: Collection[str]) -> None:
        drained = leasing.drop_drained(self.using, self.ref, self.poller.subscriber, keys)
        leasing.release(self.using, self.ref, self.poller.subscriber, set(keys) - drained)
        for key in keys:
            partition = self.partitions[key]
            partition.owned = False
            partition.pending.clear()
            self.todo.pop(key, None)
            self.unfinished.discard(key)
            self._forget_if_done(partition)

    def _drop_drained(self) -> None:
        """Deletes the leases of partitions that have had nothing to do for a while."""
        idle_since = time.monotonic() - self.poller.settings.lease_renewal_interval
        idle = [
            partition.key
            for partition in self.partitions.values()
            if partition.owned
            and not (partition.pending or partition.in_hand or partition.leaving)
            and partition.key not in self.todo
            and partition.key not in self.unfinished
            and partition.busy_at <= idle_since
        ]
        for start in range(0, len(idle), 1000):
            chunk = idle[start : start + 1000]
            for key in leasing.drop_drained(self.using, self.ref, self.poller.subscriber, chunk):
                self.partitions[key].owned = False
                self._forget_if_done(self.partitions[key])
            self._reload.update(key for key in chunk if key in self.partitions)

    # -- claiming -------------------------------------------------------------

    def _wants(self, room: int) -> list[Want]:
        wants: list[Want] = []
        left = room
        limit = min(room, MAX_PARTITIONS)
        each = max(1, room // max(1, min(len(self.todo), limit)))
        for key in list(self.todo):
            if left <= 0 or len(wants) >= limit:
                break
            want = self._want(self.partitions[key], min(each, left))
            if want is None:
                continue
            wants.append(want)
            left -= len(want.due) or want.look_at
            self.todo[key] = self.todo.pop(key)  # to the end: others have their turn
        return wants

    def _want(self, partition: Partition, limit: int) -> Want | None:
        """What to take from a partition now; None, and off the list, while there is nothing to take."""
        key = partition.key
        if self.inbox.is_blocked(self.ref, key):
            if partition.in_hand:
                del self.todo[key]  # until what it holds is written
                return None
            self.inbox.unblock(self.ref, key)
        now = self.poller.clock.now()
        offsets = sorted(partition.pending)
        if self.handler.on_failure == "block" and offsets:
            if partition.in_hand:
                del self.todo[key]
                return None
            ready: list[int] = []
            for offset in offsets:
                if partition.pending[offset] > now or len(ready) == limit:
                    break
                ready.append(offset)
            if not ready:
                del self.todo[key]
                return None
            return Want(key, due=tuple(ready))
        due = [offset for offset in offsets if partition.pending[offset] <= now]
        if due:
            return Want(key, due=tuple(due[:limit]))
        if partition.fresh:
            return Want(key, look_at=limit)
        del self.todo[key]
        return None

    def _max_due(self, room: int) -> int:
        return 0

    def _written(self, outcomes: Sequence[Outcome], flushed: Flushed) -> None:
        for outcome in outcomes:
            delivery = outcome.delivery
            partition = self.partitions.get(delivery.key)
            if partition is None:
                continue
            if partition.in_hand.get(delivery.offset) == delivery.token:
                del partition.in_hand[delivery.offset]
            due = flushed.waiting.get((delivery.key, delivery.offset))
            if due is not None and partition.owned:
                self._wait_for(partition, delivery.offset, due)
            if partition.owned:
                self._look_at(partition)
            self._forget_if_done(partition)
        for outcome in flushed.stale:
            known = self.partitions.get(outcome.delivery.key)
            if known is not None and known.owned:
                self._reload.add(outcome.delivery.key)
        self.unfinished &= {key for key, partition in self.partitions.items() if partition.owned}

    def _claimed(self, claim: Claim) -> None:
        for key in claim.lost:
            if key in self.partitions and self.partitions[key].owned:
                self._lose(key, "taken")
        for key, offset in claim.settled:
            self.partitions[key].pending.pop(offset, None)
        for (key, offset), due in claim.later.items():
            self._wait_for(self.partitions[key], offset, due)
        for delivery in claim.dead:
            self.partitions[delivery.key].pending.pop(delivery.offset, None)
        for delivery in claim.deliveries:
            partition = self.partitions[delivery.key]
            partition.pending.pop(delivery.offset, None)
            partition.in_hand[delivery.offset] = delivery.token
            partition.busy_at = time.monotonic()
        for key in claim.drained:
            self.partitions[key].fresh = False
