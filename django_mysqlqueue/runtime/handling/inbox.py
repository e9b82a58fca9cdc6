"""The deliveries that this process has claimed: waiting, running, or finished with an outcome to be written.

This is the only structure that the poller and the handler threads share. Everything in it changes under one lock and
without the database.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from django_mysqlqueue.names.keys import LOWEST_PRIORITY
from django_mysqlqueue.runtime.handling.lanes import Batch, GroupLanes, Held, Lane, holds_back
from django_mysqlqueue.runtime.handling.observers import Watch
from django_mysqlqueue.runtime.handling.starts import KeptThread, Starts
from django_mysqlqueue.runtime.handling.unstarted import Unstarted
from django_mysqlqueue.service import delivery_events
from django_mysqlqueue.service.deliveries import OUTCOMES, UNCALLED, Action, Claimed, Returned, Settlement
from django_mysqlqueue.service.job_results import task_of
from django_mysqlqueue.service.payloads import Body
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.subscriptions.handler import Handler

SLICE = 0.02
"""Seconds that a thread stays with one lane before other groups and partitions have their turn."""
FLUSH_DELAY = 0.02
"""Seconds that a settlement waits for others, so that they are written together."""
WRITTEN_DELAY = 0.25
"""The same for acks that atomic handlers have written, for which only the watermark has to advance. Turns of the poller
for a few of them cost such a process more than its handlers do."""


def _name(claimed: Claimed) -> tuple[str, int, int]:
    return claimed.key, claimed.offset, claimed.token


def _kinds(group: GroupLanes) -> list[bool]:
    """Return where calls of a group run, as far as is known: in threads (False), on the event loop (True), or both."""
    return [True] if group.is_async else [False, True] if group.levels[True] else [False]


class Inbox:
    """Claimed deliveries on their way through the handler threads, and through the event loop.

    Args:
        refs: the groups.
        leases_good: returns whether ordered deliveries may start. While it returns False, they wait.
        threads: number of handler threads.
        concurrency: how many calls the groups without a ``concurrency`` of their own may have on the event loop; 0:
            there is no event loop, and threads run async handlers.
        starts: the limit on the deliveries to start (default: none).
        unstarted: where to note what waits (default: nowhere).
    """

    def __init__(
        self,
        refs: Iterable[GroupRef],
        *,
        leases_good: Callable[[], bool],
        threads: int = 1,
        concurrency: int = 0,
        starts: Starts | None = None,
        unstarted: Unstarted | None = None,
    ) -> None:
        self.starts = starts or Starts()
        self._lock = self.starts.lock()
        self._poller = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)
        self._threads = threads
        self.concurrency = concurrency
        self._calls = 0
        """Number of calls on the event loop of groups without a ``concurrency`` of their own."""
        self.wake_loop: Callable[[], None] = lambda: None
        """Make the event loop call ``take_for_loop``."""
        self._uses_loop = self._loop_is_woken = False
        self._kept = (KeptThread(), KeptThread())
        """For the handler threads, and for the event loop."""
        self._groups = {
            ref: GroupLanes(records_acks=delivery_events.level(ref) == "all", unstarted=unstarted) for ref in refs
        }
        self._leases_good = leases_good
        self._rings = (deque(self._groups), deque(self._groups))
        """The groups in the order of their turns: those of the handler threads, and those of the event loop."""
        self._running: dict[Held, None] = {}
        self._suspect: Claimed | None = None
        self._closed = False
        self._woken = False
        self._hungry = False
        self._idle = 0
        """Number of handler threads that wait for a delivery."""
        self._next_slot = float("inf")
        """When a waiting delivery may start, as far as the last thread that looked for one has found."""
        self.watch = Watch()
        """The observers of settled deliveries. While there are any, settlements refer to their messages."""

    # -- the poller's side ----------------------------------------------------

    def put(self, items: Iterable[Held]) -> None:
        """Add claimed deliveries, which must be in offset order per partition."""
        with self._lock:
            for held in items:
                group = self._groups[held.claimed.ref]
                lane = group.lanes.get(held.claimed.key) if not group.may_be_async else self._lane(group, held)
                if lane is None:
                    lane = group.lane(held.claimed.key, shared=held.handler.shared, on_loop=False)
                if lane.blocked or self._closed:
                    self._release(group, held.claimed)
                    continue
                group.add(lane, held)
                if not lane.busy or not lane.exclusive:
                    self._make_ready(lane)

    def wanted(self, bodies: Mapping[Claimed, Body]) -> Mapping[Claimed, Body]:
        """Return those of some claimed messages that are to be put here. A subclass may keep the others aside."""
        return bodies

    def settle(self, settlement: Settlement, *, ordered: bool) -> None:
        """Add a settlement of a delivery that was never put here, because its message was deleted or not readable."""
        delivery = settlement.delivery
        with self._lock:
            group = self._groups[delivery.ref]
            group.deleted += settlement.action is Action.DELETED
            if ordered and settlement.action is Action.RELEASE:
                # No later message of the partition may start before this one has been redelivered.
                group.lane(delivery.key, shared=False, on_loop=group.is_async).blocked = True
            group.return_slot(delivery)
            self._settle(group, settlement)

    def take_settlements(self, ref: GroupRef) -> list[Settlement]:
        """Remove and return the settlements of a group that are to be written."""
        with self._lock:
            group = self._groups[ref]
            settlements, group.settlements = group.settlements, []
            return settlements

    def take_acked(self, ref: GroupRef) -> list[float]:
        """Return a number for each message that was acked since the last call, from which its latency follows.

        It is the message's time of publication (epoch milliseconds) minus the monotonic time of its ack. Subtracted
        from the difference of the two clocks, it gives the latency.
        """
        with self._lock:
            group = self._groups[ref]
            acked, group.acked = group.acked, []
            return acked

    def cut_off(self, ref: GroupRef) -> tuple[list[Settlement], list[list[Held]]]:
        """Remove and return a group's last settlements, because the process exits although handlers run.

        What runs is released, except what has run for longer than ``max_processing_time``.

        Returns:
            The settlements, and the deliveries of each call that has run for too long.
        """
        with self._lock:
            group = self._groups[ref]
            settlements, group.settlements = group.settlements, []
            exceeded: dict[int, list[Held]] = {}
            for held in self._running:
                if held.claimed.ref == ref and held.is_overrun():
                    exceeded.setdefault(held.batch, []).append(held)
                elif held.claimed.ref == ref:
                    settlements.append(Settlement(held.claimed, Action.RELEASE))
            return settlements, list(exceeded.values())

    def put_back_settlements(self, ref: GroupRef, settlements: list[Settlement]) -> None:
        """Return settlements after a flush that failed. The next flush writes them."""
        with self._lock:
            group = self._groups[ref]
            if settlements and (not group.settlements or group.flushes_late):
                group.flush_at, group.flushes_late = time.monotonic() + FLUSH_DELAY, False
            group.settlements = settlements + group.settlements

    def written(self, settlements: Iterable[Settlement]) -> None:
        """Note that settlements are committed. Only now may the next suspected poison message start.

        Otherwise a message that kills its process would repeatedly lose the unwritten acks of other suspects, until
        they had used up their attempts.
        """
        with self._lock:
            if self._suspect is not None and any(one.delivery is self._suspect for one in settlements):
                self._suspect = None
                self._notify_all()

    def has_suspect(self) -> bool:
        """Return whether a suspected poison message of any group waits, runs, or has an outcome that is not written."""
        with self._lock:
            return self._suspect is not None or any(group.suspects for group in self._groups.values())

    def configure(self, handler: Handler, *, enough: int, priority_share: int) -> None:
        """Use a handler's options from now on, also for the deliveries that wait.

        ``priority_share``: one of every ``priority_share`` starts is of a lower priority; 0: none is.
        """
        with self._lock:
            group = self._groups[handler.ref]
            group.enough = enough
            group.priority_share = priority_share
            group.is_async = handler.is_async and self.concurrency > 0
            group.may_be_async = handler.may_be_async and self.concurrency > 0
            self._calls += group.calls * ((group.concurrency is not None) - (handler.concurrency is not None))
            group.concurrency = handler.concurrency
            for lane in group.lanes.values():
                for held in lane.waiting:
                    held.handler = handler

    def flush_due(self, ref: GroupRef) -> bool:
        """Return whether a group's settlements have waited long enough, are enough, or nothing else is to come."""
        with self._lock:
            return self._flush_due(self._groups[ref])

    def drop(self, ref: GroupRef, key: str) -> list[Claimed]:
        """Forget the waiting deliveries of a partition whose lease was lost. Running handlers end by themselves."""
        with self._lock:
            group = self._groups[ref]
            lane = group.lanes.get(key)
            dropped = [] if lane is None else [held.claimed for held in self._empty(lane)]
            for claimed in dropped:
                group.return_slot(claimed)
            return dropped

    def drop_stale(self, ref: GroupRef, lost: Collection[tuple[str, int, int]]) -> list[Claimed]:
        """Forget waiting deliveries (partition key, offset, token) that this process no longer holds; return them."""
        dropped: list[Claimed] = []
        if not lost:
            return dropped
        with self._lock:
            group = self._groups[ref]
            for lane in list(group.lanes.values()):
                places = [place for place, held in enumerate(lane.waiting) if _name(held.claimed) in lost]
                for place in reversed(places):
                    claimed = group.remove(lane, place).claimed
                    group.end_slot(claimed)
                    group.return_slot(claimed)
                    dropped.append(claimed)
        return dropped

    def keep(self, ref: GroupRef, until: float) -> None:
        """Allow waiting deliveries of a shared group to start until a monotonic time. Then others may have them."""
        with self._lock:
            self._groups[ref].good_until = until
            self._notify_all()

    def release(self, ref: GroupRef, key: str) -> None:
        """Release the waiting deliveries of a partition."""
        with self._lock:
            lane = self._groups[ref].lanes.get(key)
            if lane is not None:
                self._release_all(lane)

    def is_blocked(self, ref: GroupRef, key: str) -> bool:
        """Return whether a partition's deliveries are released until an earlier message is redelivered.

        Without the lock: the poller asks for each partition of a claim, and no other thread unblocks one.
        """
        lane = self._groups[ref].lanes.get(key)
        return lane is not None and lane.blocked

    def unblock(self, ref: GroupRef, key: str) -> None:
        """Accept deliveries of a partition again."""
        with self._lock:
            lane = self._groups[ref].lanes.get(key)
            if lane is not None:
                lane.blocked = False

    def forget_lane(self, ref: GroupRef, key: str) -> None:
        """Remove an empty lane, so that a million keys do not fill the memory."""
        with self._lock:
            group = self._groups[ref]
            lane = group.lanes.get(key)
            if lane is not None and not lane.busy and not lane.waiting:
                del group.lanes[key]

    def held(self, ref: GroupRef, *, unwritten: bool = False) -> list[Claimed]:
        """Return the waiting and running deliveries of a group; with ``unwritten``, also those that have ended."""
        with self._lock:
            group = self._groups[ref]
            waiting = [held.claimed for lane in group.lanes.values() for held in lane.waiting]
            running = [held.claimed for held in self._running if held.claimed.ref == ref]
            return [*waiting, *running, *(one.delivery for one in group.settlements if unwritten)]

    def free_calls(self, ref: GroupRef) -> list[int]:
        """Return how many calls of a group may start now: in threads or on the event loop, or both in this order."""
        with self._lock:
            group = self._groups[ref]
            return [max(0, self._places(group) if on_loop else self._idle_threads()) for on_loop in _kinds(group)]

    def overrun(self) -> Held | None:
        """Return a delivery whose handler has run for longer than ``max_processing_time``, or None."""
        with self._lock:
            return next((held for held in self._running if held.is_overrun()), None)

    def running(self, *, overrun: bool = True) -> int:
        """Return how many deliveries are handled; without ``overrun``, not those beyond ``max_processing_time``."""
        with self._lock:
            return sum(overrun or not held.is_overrun() for held in self._running)

    def running_tasks(self) -> list[str]:
        """Return the paths of the tasks whose jobs are handled."""
        with self._lock:
            running = [held.claimed for held in self._running]
        return sorted({task_of(claimed.ref, claimed.key) for claimed in running} - {""})

    def close(self) -> None:
        """Start nothing more: release waiting deliveries, and make handler threads end after their current call."""
        with self._lock:
            self._closed = True
            for group in self._groups.values():
                for lane in list(group.lanes.values()):
                    self._release_all(lane)
            self._notify_all()
            self._poller.notify_all()

    def wake(self) -> None:
        """Wake the poller, and make it poll at once."""
        with self._lock:
            self._woken = True
            self._poller.notify_all()

    def wait(self, timeout: float) -> bool:
        """Sleep, in the poller's thread, until settlements are to be flushed or deliveries to be claimed.

        Returns:
            Whether ``wake`` ended the sleep.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            while True:
                now = time.monotonic()
                due = any(self._flush_due(group) for group in self._groups.values())
                if self._woken or self._hungry or due or now >= deadline:
                    woken, self._woken, self._hungry = self._woken, False, False
                    return woken
                pending = [group.flush_at for group in self._groups.values() if group.settlements]
                self._poller.wait(max(0.0, min([deadline, *pending]) - now))

    # -- what there is --------------------------------------------------------

    def waiting(self, ref: GroupRef, *, priority: int = LOWEST_PRIORITY) -> tuple[int, int]:
        """Return how many deliveries of a group wait to start, and their payload bytes."""
        with self._lock:
            return self._groups[ref].waiting_from(priority)

    def newcomers(self, ref: GroupRef, keys: Iterable[str], *, priority: int, most: int) -> list[str]:
        """See ``GroupLanes.newcomers``."""
        with self._lock:
            return self._groups[ref].newcomers(keys, priority, most)

    def waiting_counts(self) -> dict[GroupRef, int]:
        """Return for every group how many deliveries wait to start."""
        with self._lock:
            return {ref: group.waiting for ref, group in self._groups.items()}

    def counts(self) -> dict[GroupRef, tuple[int, int]]:
        """Return for every group how many deliveries wait to start, and how many run."""
        with self._lock:
            return {ref: (group.waiting, group.running) for ref, group in self._groups.items()}

    def count_passed(self, ref: GroupRef, passed: Mapping[str, int]) -> None:
        """Count messages that claims have passed, by reason."""
        with self._lock:
            self._groups[ref].passed.update(passed)

    def passed_counts(self, reason: str) -> dict[GroupRef, int]:
        """Return for every group how many messages were settled for a reason without a call since the process started.

        ``reason``: one of ``rollups.PASSED``.
        """
        with self._lock:
            return {ref: group.passed[reason] for ref, group in self._groups.items()}

    def deleted_counts(self) -> dict[GroupRef, int]:
        """Return for every group how many messages were deleted between claim and start since the process started."""
        with self._lock:
            return {ref: group.deleted for ref, group in self._groups.items()}

    def is_idle(self, ref: GroupRef) -> bool:
        """Return whether a group has no waiting or running deliveries, and no settlements to be written."""
        with self._lock:
            group = self._groups[ref]
            return not (group.waiting or group.running or group.settlements)

    def load(self, ref: GroupRef, *, with_slots: bool) -> tuple[int, int]:
        """Return how many deliveries of a group wait, and how many were started since the process began.

        ``with_slots``: whether to count only those with slots.
        """
        with self._lock:
            group = self._groups[ref]
            if with_slots:
                return group.waiting_with_slots, group.started_with_slots
            return group.waiting, group.started

    def started_without_slots(self) -> int:
        """Return how many deliveries of all groups were started without a slot since the process began."""
        with self._lock:
            return sum(group.started - group.started_with_slots for group in self._groups.values())

    def keep_thread(self, ref: GroupRef) -> bool:
        """Keep the next free thread, or place on the event loop, for a delivery with a slot (``KeptThread``).

        Returns:
            False if one is already kept, for this group or for another one.
        """
        with self._lock:
            chosen = [self._kept[on_loop] for on_loop in _kinds(self._groups[ref])]
            if any(kept.wanted is not None for kept in chosen):
                return False
            for kept in chosen:
                kept.wanted, kept.until = ref, 0.0
            return True

    def free_thread(self, ref: GroupRef) -> None:
        """Let what is kept for a group start other deliveries, because the group has none with a slot."""
        with self._lock:
            for kept in self._kept:
                if kept.wanted == ref:
                    kept.wanted = None
                    self._notify_all()

    def slots(self, ref: GroupRef) -> dict[str, int]:
        """Return by limited key how many slots a group's waiting and running deliveries hold."""
        with self._lock:
            return dict(self._groups[ref].slots)

    def take_returned(self, ref: GroupRef) -> dict[str, Returned]:
        """Remove and return the slots of a group that are to be released, by limited key."""
        with self._lock:
            group = self._groups[ref]
            returned, group.returned = group.returned, {}
            return returned

    def put_back_returned(self, ref: GroupRef, returned: Mapping[str, Returned]) -> None:
        """Keep slots to be released for the next transaction, because one that should have released them has failed."""
        with self._lock:
            group = self._groups[ref]
            for key, one in returned.items():
                other = group.returned.get(key, Returned(0, one.since))
                group.returned[key] = Returned(one.number + other.number, min(one.since, other.since))

    def return_waiting(self, ref: GroupRef) -> None:
        """Release all waiting deliveries of a group, because its limits have changed: they have no slots, or others."""
        with self._lock:
            for lane in list(self._groups[ref].lanes.values()):
                self._return_all(lane)

    def return_late(self, ref: GroupRef) -> None:
        """Release the deliveries of a group whose time to start is over."""
        with self._lock:
            for lane in list(self._groups[ref].lanes.values()):
                self._return_late(lane)

    # -- the side of the handler threads and of the event loop ----------------

    def take(self, before: Batch | None, *, wait: bool = True) -> Batch | None:
        """Start the next batch in the calling thread.

        A thread stays with its lane for a time slice, unless another priority has its turn. Then groups take turns, and
        within a group its lanes.

        Returns:
            The batch; None if the inbox is closed or, without ``wait``, if there is nothing to start.
        """
        with self._lock:
            if before is not None:
                lane = before.lanes[0]
                for other in before.lanes[1:]:
                    self._leave(other)
                if not self._closed and self._may_stay(lane):
                    return self._gather(lane)
                self._leave(lane)
            while not self._closed:
                chosen = self._choose(on_loop=False)
                if chosen is not None:
                    return self._gather(chosen)
                if not wait:
                    return None
                # With a timeout, because no notification tells that leases are no longer in doubt.
                self._idle += 1
                self._work.wait(min(0.5, max(0.0, self._next_slot - time.monotonic())))
                self._idle -= 1
            return None

    def leave(self, batch: Batch) -> None:
        """Make the lanes of a batch available to other threads."""
        with self._lock:
            for lane in batch.lanes:
                self._leave(lane)

    def take_for_loop(self) -> tuple[list[Batch], float | None]:
        """Start, on the event loop, as many batches as there is room for.

        Returns:
            The batches, and after how many seconds to look again if nothing wakes the loop before; None: never.
        """
        with self._lock:
            self._loop_is_woken = False
            taken: list[Batch] = []
            while not self._closed and (chosen := self._choose(on_loop=True)) is not None:
                batch = self._gather(chosen)
                taken.append(batch)
                self._count_call(chosen.group, 1)
            levels = (level for group in self._groups.values() for level in group.levels[True].values())
            if self._closed or not any(level.waiting for level in levels):
                return taken, None
            # No notification tells that leases are no longer in doubt.
            return taken, min(0.5, max(0.0, self._next_slot - time.monotonic()))

    def finish(self, batch: Batch, settlements: Sequence[Settlement]) -> None:
        """Add the settlements of a batch, one for each delivery and in their order, after its handler has ended."""
        with self._lock:
            group = self._groups[batch.items[0].claimed.ref]
            watched = self.watch.is_wanted()
            for held, settlement in zip(batch.items, settlements, strict=True):
                group.running -= 1
                if held.claimed.slot is not None:
                    group.end_slot(held.claimed)
                del self._running[held]
                if is_acked := settlement.action is Action.ACK:
                    group.acked.append(held.body.published_at - time.monotonic() * 1000)
                if not is_acked or group.records_acks:
                    # Only for deliveries that may be recorded: for each message, the cost would be noticeable.
                    called = settlement.action not in UNCALLED and settlement.is_started
                    handled_ms = round((time.monotonic() - held.started_at) * 1000) if called else 0
                    settlement = settlement._replace(handled_ms=handled_ms)
                    if not called:
                        group.return_slot(held.claimed)
                    settlement = held.within_expiry(settlement)
                    if settlement.action in UNCALLED:
                        group.passed[OUTCOMES[settlement.action]] += 1
                if watched:
                    if held.messages:
                        held.seconds, held.messages = time.monotonic() - held.started_at, len(batch.items)
                    settlement = settlement._replace(held=held)
                self._settle(group, settlement)
                if not is_acked and not held.handler.shared and holds_back(held.handler, settlement.action):
                    lane = group.lanes[held.claimed.key]
                    lane.blocked = True
                    self._release_all(lane)
            if batch.items[0].on_loop:
                # A thread keeps its lane until it takes the next batch.
                self._count_call(group, -1)
                for lane in batch.lanes:
                    self._leave(lane)
                self._wake_loop()

    # -- under the lock -------------------------------------------------------

    def _lane(self, group: GroupLanes, held: Held) -> Lane | None:
        """Return the lane of a delivery of a group that has coroutines; None if it is one for threads, and is new."""
        handler = held.handler
        if not handler.is_on_loop(held.state):
            return group.lanes.get(held.claimed.key)
        held.on_loop = self._uses_loop = True
        return group.lane(held.claimed.key, shared=handler.shared, on_loop=True, is_mixed=not handler.is_async)

    def _count_call(self, group: GroupLanes, change: int) -> None:
        group.calls += change
        if group.concurrency is None:
            self._calls += change

    def _places(self, group: GroupLanes) -> int:
        """Return how many calls of a group may start on the event loop."""
        if group.concurrency is None:
            return self.concurrency - self._calls
        return group.concurrency - group.calls

    def _idle_threads(self) -> int:
        return self._threads - len({held.batch for held in self._running if not held.on_loop})

    def _leaves_place(self, held: Held, ref: GroupRef) -> bool:
        """Return whether a group still has a place on the event loop if a delivery, of any group, starts there."""
        group, other = self._groups[held.claimed.ref], self._groups[ref]
        is_shared = group is other or group.concurrency is other.concurrency is None
        return not is_shared or self._places(other) > 1

    def _notify_all(self) -> None:
        self._work.notify_all()
        self._wake_loop()

    def _wake_loop(self) -> None:
        if self._uses_loop and not self._loop_is_woken:
            self._loop_is_woken = True
            self.wake_loop()

    def _empty(self, lane: Lane) -> list[Held]:
        """Remove the waiting deliveries of a lane, which then hold no slots."""
        removed = [lane.group.remove(lane) for _ in range(len(lane.waiting))]
        for held in removed:
            lane.group.end_slot(held.claimed)
        return removed

    def _release(self, group: GroupLanes, claimed: Claimed) -> None:
        """Settle a delivery that has not started as released, and its slot."""
        group.return_slot(claimed)
        self._settle(group, Settlement(claimed, Action.RELEASE))

    def _release_all(self, lane: Lane) -> None:
        for held in self._empty(lane):
            self._release(lane.group, held.claimed)

    def _return_all(self, lane: Lane) -> None:
        """Release the waiting deliveries of a lane. In order, no later one starts before they are redelivered."""
        lane.blocked = lane.exclusive and (lane.blocked or bool(lane.waiting))
        self._release_all(lane)

    def _return_late(self, lane: Lane) -> None:
        """Release the deliveries at the head of a lane whose time to start is over; in order, also those behind."""
        if not lane.waiting or lane.waiting[0].claimed.slot is None:
            return
        now = time.monotonic()
        if lane.waiting[0].claimed.slot.before > now:
            return
        if lane.exclusive:
            self._return_all(lane)
            return
        late = [
            place
            for place, held in enumerate(lane.waiting)
            if held.claimed.slot is not None and held.claimed.slot.before <= now
        ]
        for place in reversed(late):
            claimed = lane.group.remove(lane, place).claimed
            lane.group.end_slot(claimed)
            self._release(lane.group, claimed)

    def _settle(self, group: GroupLanes, settlement: Settlement) -> None:
        is_late = settlement.is_written and settlement.action is Action.ACK and settlement.delivery.slot is None
        if not group.settlements or (group.flushes_late and not is_late):
            group.flush_at, group.flushes_late = time.monotonic() + (WRITTEN_DELAY if is_late else FLUSH_DELAY), is_late
            self._poller.notify_all()
        group.settlements.append(settlement)

    def _choose(self, *, on_loop: bool) -> Lane | None:
        self._next_slot = float("inf")
        ring = self._rings[on_loop]
        for _ in range(len(ring)):
            ref = ring[0]
            ring.rotate(-1)
            group = self._groups[ref]
            if on_loop and self._places(group) <= 0:
                continue
            for ready in group.ready(on_loop=on_loop):
                lane = self._choose_lane(ready)
                if lane is not None:
                    return lane
        return None

    def _choose_lane(self, ready: deque[Lane]) -> Lane | None:
        for _ in range(len(ready)):
            lane = ready.popleft()
            lane.queued = False
            if lane.waiting and lane.waiting[0].claimed.slot is not None:
                self._return_late(lane)
            if not lane.waiting or (lane.exclusive and lane.busy):
                continue  # It was emptied meanwhile.
            if self._may_start(lane):
                lane.busy = True
                lane.slice_until = time.monotonic() + SLICE
                return lane
            lane.queued = True
            ready.append(lane)
        return None

    def _may_stay(self, lane: Lane) -> bool:
        """Return whether a thread may start the next delivery of the lane that it has worked on."""
        if not lane.waiting or time.monotonic() >= lane.slice_until or not self._may_start(lane):
            return False
        return len(lane.group.levels[False]) == 1 or lane.group.is_turn_of(lane)

    def _may_start(self, lane: Lane) -> bool:
        place = self._first(lane)
        if place is None or self.starts.left <= 0:
            return False
        held, kept = lane.waiting[place], self._kept[lane.level.on_loop]
        if (held.claimed.slot is not None or kept.wanted is not None) and not self._has_slot(held, kept):
            return False
        if lane.exclusive:
            return self._leases_good()
        return time.monotonic() < lane.group.good_until

    def _has_slot(self, held: Held, kept: KeptThread) -> bool:
        """Return whether the time of a delivery's slot has come. Without limits, it may start at any time."""
        slot = held.claimed.slot
        if slot is None:
            if kept.wanted is None or (held.on_loop and self._leaves_place(held, kept.wanted)):
                return True
            return not self._is_kept(kept)
        now = time.monotonic()
        if now < slot.after:
            self._next_slot = min(self._next_slot, slot.after)
        # Without heartbeats, others do not count the slots of this process.
        return slot.after <= now < slot.before and self._leases_good()

    def _is_kept(self, kept: KeptThread) -> bool:
        if not kept.until:
            self._hungry = True  # The poller should claim for this thread.
            self._poller.notify_all()
        if is_kept := kept.is_this():
            self._next_slot = min(self._next_slot, kept.until)
        return is_kept

    def _first(self, lane: Lane) -> int | None:
        """Return the index of the next delivery that may start: in a partition the first one, in a shared group any."""
        if self._suspect is None:
            return 0 if lane.waiting else None
        for place, held in enumerate(lane.waiting):
            if not held.claimed.suspect:
                return place
            if lane.exclusive:
                break
        return None

    def _gather(self, lane: Lane) -> Batch:
        """Start the deliveries for one call, beginning with the lane's first."""
        group = lane.group
        if len(group.levels[lane.level.on_loop]) > 1:
            group.took(lane)
        first = self._start(lane)
        batch = Batch([lane], [first])
        if first.handler.batch_size == 1 or first.alone:
            return batch
        self._fill(batch, lane, first.handler.batch_size)
        ready = lane.level.ready
        for _ in range(len(ready)):
            if len(batch.items) >= first.handler.batch_size:
                break
            other = ready.popleft()
            other.queued = False
            if not other.waiting or (other.exclusive and other.busy):
                continue  # It was emptied meanwhile.
            if self._may_start(other) and not other.waiting[0].alone:
                other.busy = True
                batch.lanes.append(other)
                self._fill(batch, other, first.handler.batch_size)
            else:
                self._make_ready(other)
        return batch

    def _fill(self, batch: Batch, lane: Lane, most: int) -> None:
        """Start further deliveries of a lane, up to the first to be handled alone; a shared group skips those."""
        place = 0
        while place < len(lane.waiting) and len(batch.items) < most and self.starts.left > 0:
            held = lane.waiting[place]
            if not held.alone and self._has_slot(held, self._kept[held.on_loop]):
                held = self._start(lane, place)
                held.batch = batch.items[0].batch
                batch.items.append(held)
            elif lane.exclusive:
                break
            else:
                place += 1

    def _start(self, lane: Lane, place: int | None = None) -> Held:
        if place is None:
            place = 0 if self._suspect is None else self._first(lane)
        assert place is not None  # noqa: S101  # _may_start has checked it under the same lock.
        self.starts.left -= 1
        group = lane.group
        held = group.remove(lane, place)
        group.running += 1
        group.started += 1
        if held.claimed.slot is not None:
            group.started_with_slots += 1
            kept = self._kept[held.on_loop]
            if kept.wanted is not None:
                kept.wanted = None
                self._notify_all()
        held.started_at, held.place, held.batch = time.monotonic(), threading.get_ident(), id(held)
        self._running[held] = None
        if held.claimed.suspect:
            self._suspect = held.claimed
        if not lane.exclusive and lane.waiting:
            self._make_ready(lane)
        if not lane.level.waiting:
            self._hungry = True  # Nothing of this priority is left to start: the poller should claim.
            self._poller.notify_all()
        return held

    def _leave(self, lane: Lane) -> None:
        lane.busy = False
        if lane.waiting:
            self._make_ready(lane)

    def _make_ready(self, lane: Lane) -> None:
        if not lane.queued:
            lane.queued = True
            lane.level.ready.append(lane)
        elif lane.exclusive:
            return  # A thread has already been woken for it.
        if lane.level.on_loop:
            self._wake_loop()
        elif self._idle:
            # One more if one of them is, or will be, the kept thread: it may not start this delivery.
            self._work.notify(1 if self._kept[False].wanted is None else 2)

    def _flush_due(self, group: GroupLanes) -> bool:
        if not group.settlements:
            return False
        if len(group.settlements) >= group.enough or not (group.waiting or group.running):
            return True
        if self._suspect is not None and any(settlement.delivery is self._suspect for settlement in group.settlements):
            return True
        return time.monotonic() >= group.flush_at
