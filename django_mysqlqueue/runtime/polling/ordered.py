"""Ordered mode: leases, and partitions that are handled in the order of the log.

Why the order holds: messages of a partition are claimed under the lock of its lease, only by the lease's owner, in the
order of the log; and the inbox starts one of them at a time. A claim of new messages does not look for unsettled ones
below the position. The owner must know them: ``OwnedPartition.pending`` and ``in_flight`` are read when it acquires the
partition (``_load``), and again whenever they may be incomplete (``_reload``). From them, ``want`` decides whether new
messages may be claimed. A row that another transaction has locked closes its partition for a while (``rests_until``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from django_mysqlqueue.names.keys import priority_of
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.runtime.polling.mode import Mode
from django_mysqlqueue.runtime.polling.parts import Parts
from django_mysqlqueue.runtime.priorities import ByPriority
from django_mysqlqueue.runtime.timers import Timers
from django_mysqlqueue.service import leasing, watermarks
from django_mysqlqueue.service.claims import Claim, Later, Left, Seen, Want
from django_mysqlqueue.service.deliveries import Action, Claimed, Flushed, Settlement
from django_mysqlqueue.service.leasing import MAX_PENDING, Lease, Unsettled
from django_mysqlqueue.service.subsets import EVERYTHING
from django_mysqlqueue.sql.session import Session, pieces

TAKE_OVER = 1000
"""Maximum number of partitions that one transaction acquires: 50,000 at once took 5 s, and blocked everything else."""
AHEAD = 5000
"""Number of partitions of one priority in ``todo`` at which no more are acquired, so that the leases, which each tick
reads, do not grow with the number of keys."""
CHOICE = 5000
"""Number of partitions without an owner to choose from: those that have waited longest."""
OVERDUE = 100
"""Maximum number of partitions to acquire per tick with ``AHEAD`` in ``todo``, of those that no subscriber has
acquired for the duration of a lease."""


@dataclass(slots=True)
class OwnedPartition:
    """A partition that this process owns, or still has deliveries of."""

    key: str
    owned: bool = True
    leaving: bool = False
    """Whether to release it as soon as nothing of it is in flight."""
    fresh: bool = True
    """Whether there may be unclaimed messages above its position."""
    pending: dict[int, Later] = field(default_factory=dict)
    """Unsettled offsets that are not in flight here → until when they wait."""
    in_flight: dict[int, int] = field(default_factory=dict)
    """Offset → token of the deliveries that this process has claimed and whose outcomes are not written yet."""
    rests_until: int = 0
    """Epoch milliseconds until which nothing is claimed, because another transaction had locked a due row. New messages
    must not overtake it."""
    busy_at: float = field(default_factory=time.monotonic)
    """When there was work last, by the monotonic clock."""


class OrderedMode(Mode):
    """Leased partitions: one subscriber at a time handles each, in the order of the log."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.partitions: dict[str, OwnedPartition] = {}
        self.waiting = ByPriority[float]()
        """Partitions with work that this process does not own → since when it knows of them (monotonic)."""
        self._theirs: set[str] = set()
        """Partitions that another live subscriber owned at the last tick."""
        self._shared_out = 0
        """Number of those that are owned by subscribers of the same subset."""
        self._live: list[str] = []
        self._due = Timers[tuple[str, int]]()
        """By partition and offset, when unsettled messages are due that are not in flight here."""
        self._try_now = False
        """Whether to acquire with the next turn, because a partition without an owner has messages."""
        self._left_out: set[int] = set()
        """Priorities of which partitions were left without an owner until ``todo`` has fewer."""
        self._held_up: dict[str, None] = {}
        """Partitions with a suspected poison message that waits for the end of another one, in turn."""
        self._leaving: set[str] = set()
        """Partitions to release as soon as nothing of them is in flight."""
        self._reload: set[str] = set()
        """Partitions whose unsettled rows must be read again."""

    # -- a turn ---------------------------------------------------------------

    def __enter__(self) -> None:
        """Load and acquire partitions, and look at those whose messages need not wait any longer."""
        if self._reload:
            self._verify_and_load()
        if self._wants_partitions():
            self._try_now, self._left_out = False, set()
            self._acquire(steal=self._context.stealing.is_allowed())
        self.resume()
        self._wake_due()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Release the partitions to be released of which nothing is in flight any more."""
        if kind is None and self._leaving:
            released = [key for key in self._leaving if not self.partitions[key].in_flight]
            if released:
                self.release(released)

    def wants_turn(self) -> bool:
        """Return whether there are partitions to acquire, or to look at again."""
        return self._wants_partitions() or self._may_resume()

    def _wake_due(self) -> None:
        """Put partitions with messages whose backoff is over into ``todo``."""
        now = self._context.clock.now()
        self._look_at(self.partitions[key] for key, _ in self._due.pop(lambda due: due <= now))

    def resume(self) -> None:
        """Look again at a partition that waited for the end of a suspected poison message."""
        if self._may_resume():
            # One: a claim of many would lock them all, and take one.
            key = next(iter(self._held_up))
            del self._held_up[key]
            self._look_at([self.partitions[key]])

    def _may_resume(self) -> bool:
        return bool(self._held_up) and not self._inbox.has_suspect()

    # -- news -----------------------------------------------------------------

    def notify(self, keys: Iterable[str]) -> None:
        """Note that partitions of the subset have, or may have, unclaimed messages."""
        owned: list[OwnedPartition] = []
        others: list[str] = []
        for key in keys:
            partition = self.partitions.get(key)
            if partition is not None and partition.owned:
                partition.fresh = True
                owned.append(partition)
            elif key not in self.waiting:
                others.append(key)
        self._wait_for_owner(others)
        self._look_at(owned)

    def _wait_for_owner(self, keys: Collection[str]) -> None:
        now = time.monotonic()
        for key in keys:
            self.waiting[key] = now
        # A live owner finds the same messages. If it was lost since, the next tick notices it.
        for priority in {priority_of(key) for key in keys if key not in self._theirs}:
            if self._is_ahead(priority):
                self._left_out.add(priority)
            else:
                self._try_now = True

    def _look_at(self, partitions: Iterable[OwnedPartition]) -> None:
        now, todo = time.monotonic(), self._memory.todo
        for partition in partitions:
            partition.busy_at = now
            key = partition.key
            if not (key in todo or partition.leaving or self._waits(key)):
                todo[key] = None

    def _waits(self, key: str) -> bool:
        """Return whether a partition waits for a slot, or for the end of a suspected poison message."""
        return key in self._held_up or self._limited.rests(key)

    def next_at(self) -> int | None:
        """Return when the next redelivery is due, in epoch milliseconds, or None."""
        return self._due.first()

    def is_idle(self) -> bool:
        """Return whether no partition waits for an owner, and no message is in backoff."""
        return not self.waiting and not any(partition.pending for partition in self.partitions.values())

    def reset(self) -> None:
        """Forget every hint, and load all owned partitions again."""
        self.waiting.clear()
        self._held_up.clear()
        self._due.clear()
        self.reload()

    def reload(self) -> None:
        """Load all owned partitions again with the next turn: after a step of the clock, their times are others."""
        self._reload = set(self.owned())

    def restore(self, owned: Collection[str], held: Sequence[Claimed]) -> None:
        """Begin anew: the leases stay, to be verified, and what is in flight is what the inbox has."""
        for delivery in held:
            partition = self.partitions.setdefault(delivery.key, OwnedPartition(delivery.key, owned=False))
            partition.in_flight[delivery.offset] = delivery.token
        for key in owned:
            self.partitions.setdefault(key, OwnedPartition(key)).owned = True
        self._reload = set(owned)

    # -- leases ---------------------------------------------------------------

    def owned(self) -> list[str]:
        """Return the partitions that this process owns, as far as it knows."""
        return [key for key, partition in self.partitions.items() if partition.owned]

    def rebalance(self, leases: Sequence[Lease], live: list[str], *, steal: bool) -> None:
        """Compare memory with the lease rows, then release partitions above the fair share or acquire up to it."""
        me = self._context.subscriber
        if self._context.subset != EVERYTHING:
            leases = [lease for lease in leases if lease.key in self._context.subset]
        self._live = live
        self._theirs = {lease.key for lease in leases if lease.good and lease.owner != me}
        equals = set(live)
        # Partitions that a subscriber of another, overlapping subset owns are not among those that are divided.
        self._shared_out = sum(lease.good and lease.owner != me and lease.owner in equals for lease in leases)
        rows = {lease.key: lease.owner for lease in leases}
        for key in self.owned():
            if rows.get(key) != me:
                self._lose(key, "no longer the owner")
        now, owned = time.monotonic(), set(self.owned())
        for lease in leases:
            if lease.key not in self._theirs and lease.key not in owned:
                self.waiting.setdefault(lease.key, now)
        # A live owner is responsible for its partitions until it has drained or released them.
        for key in self._theirs & self.waiting.keys():
            del self.waiting[key]
        self._drop_drained()
        if self._configuration.refused:
            self.release_free()  # Subscribers of the release that has registered the filter may take them over.
        elif steal:
            self._release_excess()
        self._acquire(steal=steal)

    def _cap(self) -> int | None:
        """Return this subscriber's fair share, or None, meaning no limit, if it cannot be computed."""
        if self._context.takes_all:
            return None
        total = self._shared_out + len(self.owned()) + len(self.waiting) - len(self._theirs & self.waiting.keys())
        return leasing.fair_shares(total, self._live, self.ref).get(self._context.subscriber)

    def _release_excess(self) -> None:
        cap = self._cap()
        if cap is None or len(self._live) < 2:
            return
        staying = sorted(key for key in self.owned() if not self.partitions[key].leaving)
        for key in staying[cap:]:
            partition = self.partitions[key]
            partition.leaving = True
            self._leaving.add(key)
            self._memory.todo.pop(key, None)
            self._inbox.release(self.ref, key)

    def _acquire(self, *, steal: bool) -> None:
        """Acquire partitions that have work and no owner: up to the fair share, and overdue ones beyond it."""
        if not self.waiting or self._configuration.stopped or self._health.is_down or not self.heart_good():
            return
        ahead = [priority for priority in self.waiting.priorities() if self._is_ahead(priority)]
        self._left_out = set(ahead)
        waiting = self._first_waiting([priority for priority in self.waiting.priorities() if priority not in ahead])
        cap = self._cap()
        overdue = time.monotonic() - self._context.settings.lease_duration
        wanted = waiting
        if cap is not None and len(self._live) > 1:
            # Each subscriber starts at another place, so that not all try to acquire the same partitions.
            start = self._live.index(self._context.subscriber) * len(waiting) // len(self._live)
            rotated = sorted(waiting[start:] + waiting[:start], key=priority_of, reverse=True)
            below_share = rotated[: max(0, cap - len(self.owned()))]
            wanted = below_share + [key for key in rotated[len(below_share) :] if self.waiting[key] <= overdue]
        # Partitions ahead may never be drained. So those that have waited for too long are acquired a few at a time.
        wanted += [key for key in self._first_waiting(ahead) if self.waiting[key] <= overdue][:OVERDUE]
        if not wanted:
            return
        more, wanted = len(wanted) > TAKE_OVER or len(waiting) == CHOICE, wanted[:TAKE_OVER]
        taken = leasing.acquire(
            self._context.using,
            self.ref,
            self._context.subscriber,
            wanted,
            lease_ms=self._context.lease_ms,
            steal=steal,
            clock=self._context.clock,
        )
        if taken.other_mode:
            self._configuration.check_mode(taken.other_mode)
            return
        if taken.paused or taken.dropped:
            # Otherwise the group would never be idle, and a drain would never end. Nothing is claimed from it either.
            self._configuration.stop(dropped=taken.dropped)
            return
        # Short transactions, with turns of other groups in between. Locked partitions wait for the next tick.
        self._try_now = more and bool(taken.held or taken.elsewhere)
        for key in taken.elsewhere:
            self._theirs.add(key)
            del self.waiting[key]
        if taken.held:
            watermarks.create_missing(self._context.using, self.ref, taken.held)
            self._take_over(taken.held)

    def _wants_partitions(self) -> bool:
        return self._try_now or not all(map(self._is_ahead, self._left_out))

    def _is_ahead(self, priority: int) -> bool:
        """Return whether ``todo`` has enough partitions of a priority, so that no more of them are acquired."""
        return len(self._memory.todo.of(priority)) + len(self._limited) >= AHEAD

    def _first_waiting(self, priorities: Sequence[int]) -> list[str]:
        """Return the partitions of some priorities that have waited longest for an owner, sorted within a priority."""
        # Only the first ones in the order in which they became known: do not sort a million keys for a thousand.
        keys = (key for priority in priorities for key in self.waiting.of(priority) if key not in self._theirs)
        return sorted(sorted(islice(keys, CHOICE)), key=priority_of, reverse=True)

    def held_elsewhere(self) -> int:
        """Return the number of partitions that other live subscribers owned at the last tick."""
        return len(self._theirs)

    def heart_good(self) -> bool:
        """Return whether this process certainly still owns its leases."""
        return self._context.heartbeat.good()

    def _take_over(self, keys: Collection[str]) -> None:
        for key in keys:
            del self.waiting[key]
            partition = self.partitions.setdefault(key, OwnedPartition(key))
            partition.owned, partition.leaving, partition.fresh = True, False, True
            self._reload.add(key)
        self._load(keys)
        event(logging.DEBUG, "leases.acquired", group=self.ref.group, topic=self.ref.topic, partitions=len(keys))

    def _verify_and_load(self) -> None:
        self.verify()
        keys = [key for key in self._reload if self._owns(key)]
        for piece in pieces(keys, TAKE_OVER):
            self._load(piece)
            self._context.progress.made()

    def verify(self) -> None:
        """Read the leases again under lock. Drop partitions that were lost, with their waiting deliveries."""
        for chunk in pieces(self.owned(), TAKE_OVER):
            held = leasing.verify_owned(self._context.using, self.ref, self._context.subscriber, chunk)
            for key in chunk:
                if key not in held:
                    self._lose(key, "lost while in doubt")
            self._context.progress.made()

    def _load(self, keys: Collection[str]) -> None:
        """Read the unsettled rows of partitions into memory, without those that this process holds.

        A waiting delivery without such a row was revoked by an operator's seek: it does not start.
        """
        pending: dict[str, list[Unsettled]] = {key: [] for key in keys}
        gone = {(key, offset, token) for key in keys for offset, token in self.partitions[key].in_flight.items()}
        for row in leasing.load(Session(self._context.using), self.ref, keys):
            if self.partitions[row.key].in_flight.get(row.offset) != row.token:
                pending[row.key].append(row)
            else:
                gone.discard((row.key, row.offset, row.token))
        for delivery in self._inbox.drop_stale(self.ref, gone):
            self.partitions[delivery.key].in_flight.pop(delivery.offset, None)
        for key, rows in pending.items():
            partition = self.partitions[key]
            self._wait_for_none(partition)
            partition.rests_until = 0
            partition.fresh = True
            for row in rows:
                self._wait_for(partition, row.offset, Later(row.due, row.is_lost))
            self._reload.discard(key)
        self._look_at(self.partitions[key] for key in pending)
        self._memory.unfinished |= set(keys)

    def _wait_for(self, partition: OwnedPartition, offset: int, later: Later) -> None:
        if not partition.owned:
            return  # Its new owner waits.
        partition.pending[offset] = later
        self._due.set((partition.key, offset), later.until)

    def _no_longer_waits(self, partition: OwnedPartition, offset: int) -> None:
        partition.pending.pop(offset, None)
        self._due.discard((partition.key, offset))

    def _wait_for_none(self, partition: OwnedPartition) -> None:
        for offset in list(partition.pending):
            self._no_longer_waits(partition, offset)

    def _lose(self, key: str, reason: str) -> None:
        partition = self.partitions[key]
        event(logging.WARNING, "lease.lost", group=self.ref.group, topic=self.ref.topic, partition=key, reason=reason)
        for delivery in self._inbox.drop(self.ref, key):
            partition.in_flight.pop(delivery.offset, None)
        self._disown(partition)

    def _disown(self, partition: OwnedPartition) -> None:
        """Forget a partition that this process no longer owns. Handlers that still run here end by themselves."""
        key = partition.key
        partition.owned = partition.leaving = False
        self._wait_for_none(partition)
        self._held_up.pop(key, None)
        self._limited.forget(key)
        self._memory.forget(key)
        self._reload.discard(key)
        self._leaving.discard(key)
        self._forget_if_done(partition)

    def _forget_if_done(self, partition: OwnedPartition) -> None:
        if not partition.owned and not partition.in_flight:
            del self.partitions[partition.key]
            self._inbox.forget_lane(self.ref, partition.key)

    def release_free(self) -> None:
        """Release all partitions of which nothing is in flight."""
        free = [key for key, partition in self.partitions.items() if partition.owned and not partition.in_flight]
        if free:
            self.release(free)

    def release(self, keys: Collection[str]) -> None:
        """Release partitions. The leases of drained ones are deleted, the others have no owner afterwards."""
        drained = leasing.drop_drained(self._context.using, self.ref, self._context.subscriber, keys)
        leasing.release(self._context.using, self.ref, self._context.subscriber, set(keys) - drained)
        for key in keys:
            self._disown(self.partitions[key])

    def _drop_drained(self) -> None:
        """Delete the leases of partitions that have had no work for a renewal interval."""
        idle_since = time.monotonic() - self._context.settings.lease_renewal_interval
        idle = [
            partition.key
            for partition in self.partitions.values()
            if partition.owned
            and not (partition.pending or partition.in_flight or partition.leaving)
            and partition.key not in self._memory.todo
            and partition.key not in self._memory.unfinished
            and not self._waits(partition.key)
            and partition.busy_at <= idle_since
        ]
        for chunk in pieces(idle, 1000):
            for key in leasing.drop_drained(self._context.using, self.ref, self._context.subscriber, chunk):
                self._disown(self.partitions[key])
            self._reload.update(key for key in chunk if key in self.partitions)
            self._context.progress.made()

    # -- what to claim --------------------------------------------------------

    def is_free(self, key: str) -> bool:
        """Return whether nothing of a partition is in flight here."""
        return not self.partitions[key].in_flight

    def want(self, key: str, limit: int) -> Want | None:
        """Return what to take from a partition now. If there is nothing, remove it from ``todo`` and return None."""
        partition = self.partitions[key]
        if self._inbox.is_blocked(self.ref, key):
            if partition.in_flight:
                del self._memory.todo[key]  # Until the outcomes of its deliveries are written.
                return None
            self._inbox.unblock(self.ref, key)
        due, closed = self._due_of(partition) if partition.pending else ([], False)
        if due:
            return Want(key, due=tuple(due[:limit]))
        if partition.fresh and not closed:
            return Want(key, look_at=limit)
        del self._memory.todo[key]  # Until something wakes it: news, an outcome that is written, or a time.
        return None

    def _due_of(self, partition: OwnedPartition) -> tuple[list[int], bool]:
        """Return the unsettled offsets of a partition that are due, and whether nothing may be claimed behind them."""
        now, pending = self._context.clock.now(), partition.pending
        strict = self._configuration.handler.on_failure == "block"
        if now < partition.rests_until or (strict and partition.in_flight):
            return [], True
        due: list[int] = []
        for offset in sorted(pending):
            if pending[offset].until <= now:
                due.append(offset)
            elif strict or pending[offset].is_lost:
                return due, True
        return due, len(pending) >= MAX_PENDING

    # -- what has come of it --------------------------------------------------

    def settled(self, settlements: Sequence[Settlement], flushed: Flushed) -> None:
        """Remember what a flush has written."""
        touched: dict[str, OwnedPartition] = {}
        for settlement in settlements:
            delivery = settlement.delivery
            partition = self.partitions.get(delivery.key)
            if partition is None:
                continue
            if partition.in_flight.get(delivery.offset) == delivery.token:
                del partition.in_flight[delivery.offset]
            if settlement.action is Action.STALE and partition.owned:
                self._reload.add(delivery.key)
            if flushed.waiting and (due := flushed.waiting.get((delivery.key, delivery.offset))) is not None:
                self._wait_for(partition, delivery.offset, Later(due))
            touched[delivery.key] = partition
        owned: list[OwnedPartition] = []
        for partition in touched.values():
            if partition.owned:
                owned.append(partition)
            else:
                self._forget_if_done(partition)
        self._look_at(owned)
        for settlement in flushed.stale:
            if self._owns(settlement.delivery.key):
                self._reload.add(settlement.delivery.key)
        # Not those of partitions that were lost meanwhile: their new owner advances their watermarks.
        partitions, unfinished = self.partitions, self._memory.unfinished
        self._memory.unfinished = {key for key in unfinished if key in partitions and partitions[key].owned}

    def _owns(self, key: str) -> bool:
        partition = self.partitions.get(key)
        return partition is not None and partition.owned

    def claimed(self, claim: Claim, wants: Sequence[Want], max_due: int) -> bool:
        """Remember what a claim found."""
        self._note_partitions(claim)
        self._note_left(claim)
        busy_at = time.monotonic()
        for delivery in claim.deliveries:
            partition = self.partitions[delivery.key]
            if delivery.offset in partition.pending:
                self._no_longer_waits(partition, delivery.offset)
            partition.in_flight[delivery.offset] = delivery.token
            partition.busy_at = busy_at
        return False

    def _note_partitions(self, claim: Claim) -> None:
        for key, seen in claim.partitions.items():
            if seen is Seen.DRAINED:
                self.partitions[key].fresh = False
            elif seen is Seen.LOST and self._owns(key):
                self._lose(key, "no longer the owner")

    def _note_left(self, claim: Claim) -> None:
        """Remember which redeliveries a claim did not take, and why."""
        locked: set[str] = set()
        held_up: set[str] = set()
        for (key, offset), left in claim.left.items():
            if isinstance(left, Later):
                self._wait_for(self.partitions[key], offset, left)
            elif left is Left.SETTLED:
                self._no_longer_waits(self.partitions[key], offset)
            else:
                (locked if left is Left.LOCKED else held_up).add(key)
        for delivery, _ in claim.dead:
            self._no_longer_waits(self.partitions[delivery.key], delivery.offset)
        now = self._context.clock.now()
        for key in locked:
            # An atomic handler of a lost owner may keep its row locked for a while: try again a little later.
            partition = self.partitions[key]
            self._memory.todo.pop(key, None)
            partition.rests_until = now + self._context.limits.locked_pause_ms
            for offset in [offset for offset, later in partition.pending.items() if later.until <= now]:
                self._wait_for(partition, offset, Later(partition.rests_until))
        for key in sorted(held_up):
            self._memory.todo.pop(key, None)
            self._held_up[key] = None
