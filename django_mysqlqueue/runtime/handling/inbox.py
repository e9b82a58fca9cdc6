"""What this process has claimed: waiting, running, and finished but not yet written.

The one structure that the poller and the handler threads share; everything in
it happens under one lock, and none of it talks to the database.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from django_mysqlqueue.runtime.handling.handler import Handler
from django_mysqlqueue.runtime.handling.lanes import Batch, Held, Lane
from django_mysqlqueue.runtime.handling.observers import Watch
from django_mysqlqueue.service import delivery_events
from django_mysqlqueue.service.deliveries import Action, Claimed, Settlement
from django_mysqlqueue.service.refs import GroupRef

SLICE = 0.02
"""Seconds that a thread stays with one lane before other groups and partitions have their turn."""
FLUSH_DELAY = 0.02
"""Seconds that a settlement waits for others, so that they are written together."""


@dataclass(slots=True)
class _Group:
    lanes: dict[str | None, Lane] = field(default_factory=dict)
    ready: deque[Lane] = field(default_factory=deque)
    waiting: int = 0
    running: int = 0
    waiting_bytes: int = 0
    settlements: list[Settlement] = field(default_factory=list)
    first_settlement_at: float = 0.0
    acked: list[float] = field(default_factory=list)
    """See ``take_acked``."""
    deleted: int = 0
    """Deliveries whose message was deleted before it could be handled."""
    records_acks: bool = False
    good_until: float = float("inf")
    """Shared mode: until when what waits is certainly this process's."""


def _name(claimed: Claimed) -> tuple[str, int, int]:
    return claimed.key, claimed.offset, claimed.token


class Inbox:
    """Claimed deliveries on their way through the handler threads.

    ``leases_good`` says whether ordered deliveries may start; while it says no,
    they wait. After ``limit`` starts nothing starts any more.
    """

    def __init__(self, refs: Iterable[GroupRef], *, leases_good: Callable[[], bool], limit: int | None = None) -> None:
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._poller = threading.Condition(self._lock)
        self._leases_good = leases_good
        self._groups = {ref: _Group(records_acks=delivery_events.level(ref) == "all") for ref in refs}
        self._ring = deque(self._groups)
        self._running: dict[int, Held] = {}
        self._suspect: Claimed | None = None
        self._closed = False
        self._woken = False
        self._hungry = False
        self._limit = limit
        self._started = 0
        self.watch = Watch()
        """Who hears of the ends of deliveries: while somebody does, settlements keep what was handled."""

    # -- the poller's side ----------------------------------------------------

    def put(self, items: Iterable[Held]) -> None:
        """Adds claimed deliveries, in offset order per partition."""
        with self._lock:
            for held in items:
                group = self._groups[held.claimed.ref]
                key = None if held.handler.shared else held.claimed.key
                lane = group.lanes.get(key)
                if lane is None:
                    lane = group.lanes[key] = Lane(held.claimed.ref, key)
                if lane.blocked or self._closed:
                    self._settle(group, Settlement(held.claimed, Action.RELEASE))
                    continue
                lane.waiting.append(held)
                group.waiting += 1
                group.waiting_bytes += held.claimed.size
                if not lane.busy or not lane.exclusive:
                    self._make_ready(group, lane)

    def settle(self, settlement: Settlement, *, ordered: bool) -> None:
        """Adds a settlement of a delivery that never came in here: its message was deleted, or could not be read."""
        delivery = settlement.delivery
        with self._lock:
            group = self._groups[delivery.ref]
            group.deleted += settlement.action is Action.DELETED
            if ordered and settlement.action is Action.RELEASE:
                # Nothing behind it may start before it has come again.
                group.lanes.setdefault(delivery.key, Lane(delivery.ref, delivery.key)).blocked = True
            self._settle(group, settlement)

    def take_settlements(self, ref: GroupRef) -> list[Settlement]:
        with self._lock:
            group = self._groups[ref]
            settlements, group.settlements = group.settlements, []
            return settlements

    def take_acked(self, ref: GroupRef) -> list[float]:
        """Of each message that was acked since the last call: its time of publication (epoch milliseconds) less the
        monotonic clock's at its ack. What is missing to the latency is how far the two clocks are apart."""
        with self._lock:
            group = self._groups[ref]
            acked, group.acked = group.acked, []
            return acked

    def put_back_settlements(self, ref: GroupRef, settlements: list[Settlement]) -> None:
        """After a flush that failed: they are written by the next one."""
        with self._lock:
            group = self._groups[ref]
            if not group.settlements:
                group.first_settlement_at = time.monotonic()
            group.settlements = settlements + group.settlements

    def written(self, settlements: Iterable[Settlement]) -> None:
        """These settlements are committed. Only now may the next suspect start.

        Otherwise one that kills its process would take with it the unwritten
        acks of suspects before it, time after time, until they had used up their attempts.
        """
        with self._lock:
            for settlement in settlements:
                self._release_suspect(settlement.delivery)

    def flush_due(self, ref: GroupRef, *, enough: int) -> bool:
        """Whether the group's settlements have waited long enough, are many, or nothing else is to come."""
        with self._lock:
            return self._flush_due(self._groups[ref], enough)

    def waiting(self, ref: GroupRef) -> tuple[int, int]:
        """How many deliveries of a group wait to start, and their payload bytes."""
        return self.waiting_counts()[ref]

    def waiting_counts(self) -> dict[GroupRef, tuple[int, int]]:
        """``waiting`` of every group."""
        with self._lock:
            return {ref: (group.waiting, group.waiting_bytes) for ref, group in self._groups.items()}

    def counts(self) -> dict[GroupRef, tuple[int, int]]:
        """Of every group how many deliveries wait to start, and how many run."""
        with self._lock:
            return {ref: (group.waiting, group.running) for ref, group in self._groups.items()}

    def deleted_counts(self) -> dict[GroupRef, int]:
        """Of every group how many deliveries had no message left since the process began."""
        with self._lock:
            return {ref: group.deleted for ref, group in self._groups.items()}

    def is_idle(self, ref: GroupRef) -> bool:
        with self._lock:
            group = self._groups[ref]
            return not (group.waiting or group.running or group.settlements)

    def drop(self, ref: GroupRef, key: str) -> list[Claimed]:
        """Forgets what waits in a partition whose lease was lost; what runs there ends by itself."""
        with self._lock:
            return [held.claimed for held in self._empty(self._groups[ref], key)]

    def drop_stale(self, ref: GroupRef, lost: Collection[tuple[str, int, int]]) -> list[Claimed]:
        """Forgets waiting deliveries (partition key, offset, token) that are not this process's any more."""
        dropped: list[Claimed] = []
        if not lost:
            return dropped
        with self._lock:
            group = self._groups[ref]
            for lane in group.lanes.values():
                for held in [held for held in lane.waiting if _name(held.claimed) in lost]:
                    lane.waiting.remove(held)
                    group.waiting -= 1
                    group.waiting_bytes -= held.claimed.size
                    dropped.append(held.claimed)
        return dropped

    def keep(self, ref: GroupRef, until: float) -> None:
        """Shared mode: what waits may start until then (monotonic); afterwards others may have it."""
        with self._lock:
            self._groups[ref].good_until = until
            self._work.notify_all()

    def release(self, ref: GroupRef, key: str) -> None:
        """Turns what waits in a partition into settlements, uncounted."""
        with self._lock:
            group = self._groups[ref]
            for held in self._empty(group, key):
                self._settle(group, Settlement(held.claimed, Action.RELEASE))

    def is_blocked(self, ref: GroupRef, key: str) -> bool:
        with self._lock:
            lane = self._groups[ref].lanes.get(key)
            return lane is not None and lane.blocked

    def unblock(self, ref: GroupRef, key: str) -> None:
        with self._lock:
            lane = self._groups[ref].lanes.get(key)
            if lane is not None:
                lane.blocked = False

    def forget_lane(self, ref: GroupRef, key: str) -> None:
        """Removes an empty lane, so that a million keys do not fill the memory."""
        with self._lock:
            group = self._groups[ref]
            lane = group.lanes.get(key)
            if lane is not None and not lane.busy and not lane.waiting:
                del group.lanes[key]

    def held(self, ref: GroupRef) -> list[Claimed]:
        """All deliveries of a group that wait or run."""
        with self._lock:
            group = self._groups[ref]
            waiting = [held.claimed for lane in group.lanes.values() for held in lane.waiting]
            return waiting + [held.claimed for held in self._running.values() if held.claimed.ref == ref]

    def overrun(self) -> Held | None:
        """A delivery whose handler has passed its ``max_processing_time``."""
        with self._lock:
            return next((held for held in self._running.values() if held.is_overrun()), None)

    def running(self, *, overrun: bool = True) -> int:
        """How many handlers run; without ``overrun`` only those that may be waited for."""
        with self._lock:
            return sum(overrun or not held.is_overrun() for held in self._running.values())

    def exhausted(self) -> bool:
        """As many deliveries have been started as the limit admits."""
        return self._limit is not None and self._started >= self._limit

    def close(self) -> None:
        """Nothing starts any more: what waits is given back, handler threads end after what they run."""
        with self._lock:
            self._closed = True
            for group in self._groups.values():
                for key in list(group.lanes):
                    for held in self._empty(group, key):
                        self._settle(group, Settlement(held.claimed, Action.RELEASE))
            self._work.notify_all()
            self._poller.notify_all()

    def wake(self) -> None:
        """Makes the poller look at once."""
        with self._lock:
            self._woken = True
            self._poller.notify_all()

    def wait(self, timeout: float, *, enough: int) -> bool:
        """The poller's sleep: until settlements are to be flushed, ``wake``, or the time is up.

        Returns whether it was woken by ``wake``.
        """
        deadline = time.monotonic() + timeout
        with self._lock:
            while True:
                now = time.monotonic()
                due = any(self._flush_due(group, enough) for group in self._groups.values())
                if self._woken or self._hungry or due or now >= deadline:
                    woken, self._woken, self._hungry = self._woken, False, False
                    return woken
                pending = [
                    group.first_settlement_at + FLUSH_DELAY for group in self._groups.values() if group.settlements
                ]
                self._poller.wait(max(0.0, min([deadline, *pending]) - now))

    # -- the handler threads' side --------------------------------------------

    def take(self, before: Batch | None, *, wait: bool = True) -> Batch | None:
        """What a thread that comes from ``before`` starts next; None when the inbox is closed.

        Without ``wait``: None also when there is nothing to start.

        A thread stays with its lane for a time slice; then groups have their
        turn round-robin, and within a group its lanes.
        """
        with self._lock:
            if before is not None:
                lane = before.lanes[0]
                for other in before.lanes[1:]:
                    self._leave(other)
                if not self._closed and time.monotonic() < lane.slice_until and self._may_start(lane):
                    return self._gather(lane)
                self._leave(lane)
            while not self._closed:
                chosen = self._choose()
                if chosen is not None:
                    return self._gather(chosen)
                if not wait:
                    return None
                # Doubt about leases ends by itself, without a notify.
                self._work.wait(0.5)
            return None

    def leave(self, batch: Batch) -> None:
        """The thread that had taken the batch goes elsewhere: its lanes are free for others."""
        with self._lock:
            for lane in batch.lanes:
                self._leave(lane)

    def finish(self, batch: Batch, settlements: Sequence[Settlement]) -> None:
        """The handler has returned, or the deliveries turned out not to be this process's any more.

        ``settlements``: one for each of the batch's items, in their order.
        """
        with self._lock:
            group = self._groups[batch.items[0].claimed.ref]
            watched = self.watch.is_wanted()
            for held, settlement in zip(batch.items, settlements, strict=True):
                group.running -= 1
                del self._running[id(held)]
                if settlement.action is Action.ACK:
                    group.acked.append(held.body.published_at - time.monotonic() * 1000)
                if settlement.action is not Action.ACK or group.records_acks:
                    # Only for what may be recorded: each message would feel it.
                    handled_ms = round((time.monotonic() - held.started_at) * 1000)
                    settlement = settlement._replace(handled_ms=handled_ms)
                if watched:
                    held.seconds, held.messages = time.monotonic() - held.started_at, len(batch.items)
                    settlement = settlement._replace(held=held)
                self._settle(group, settlement)
                if not held.handler.shared and self._holds_back(held.handler, settlement.action):
                    group.lanes[held.claimed.key].blocked = True
                    for behind in self._empty(group, held.claimed.key):
                        self._settle(group, Settlement(behind.claimed, Action.RELEASE))

    # -- under the lock -------------------------------------------------------

    @staticmethod
    def _holds_back(handler: Handler, action: Action) -> bool:
        """Whether what was claimed behind a delivery must not start before it has come again."""
        if action is Action.RELEASE:
            return True  # it never started, so nothing behind it may
        return handler.on_failure == "block" and action in (Action.NACK, Action.SNOOZE)

    def _release_suspect(self, claimed: Claimed) -> None:
        if claimed is self._suspect:
            self._suspect = None
            self._work.notify_all()

    def _choose(self) -> Lane | None:
        for _ in range(len(self._ring)):
            ref = self._ring[0]
            self._ring.rotate(-1)
            group = self._groups[ref]
            for _ in range(len(group.ready)):
                lane = group.ready.popleft()
                lane.queued = False
                if not lane.waiting or (lane.exclusive and lane.busy):
                    continue  # emptied meanwhile
                if self._may_start(lane):
                    lane.busy = True
                    lane.slice_until = time.monotonic() + SLICE
                    return lane
                lane.queued = True
                group.ready.append(lane)
        return None

    def _may_start(self, lane: Lane) -> bool:
        if self.exhausted() or self._first(lane) is None:
            return False
        if lane.exclusive:
            return self._leases_good()
        return time.monotonic() < self._groups[lane.ref].good_until

    def _first(self, lane: Lane) -> int | None:
        """The place of the next delivery that may start: in a partition the head, in a shared group any."""
        if self._suspect is None:
            return 0 if lane.waiting else None
        for place, held in enumerate(lane.waiting):
            if not held.claimed.suspect:
                return place
            if lane.exclusive:
                break
        return None

    def _gather(self, lane: Lane) -> Batch:
        """Starts what one call gets, beginning with the lane's first."""
        first = self._start(lane)
        batch = Batch([lane], [first])
        if first.handler.batch_size == 1 or first.alone:
            return batch
        self._fill(batch, lane, first.handler.batch_size)
        group = self._groups[lane.ref]
        # A shared group has the one lane.
        for _ in range(len(group.ready) if lane.exclusive else 0):
            if len(batch.items) >= first.handler.batch_size:
                break
            other = group.ready.popleft()
            other.queued = False
            if not other.waiting or other.busy:
                continue  # emptied meanwhile
            if self._may_start(other) and not other.waiting[0].alone:
                other.busy = True
                batch.lanes.append(other)
                self._fill(batch, other, first.handler.batch_size)
            else:
                self._make_ready(group, other)
        return batch

    def _fill(self, batch: Batch, lane: Lane, most: int) -> None:
        """Starts what follows in a lane, up to the first that must come alone; in a shared group around those."""
        place = 0
        while place < len(lane.waiting) and len(batch.items) < most and not self.exhausted():
            if not lane.waiting[place].alone:
                batch.items.append(self._start(lane, place))
            elif lane.exclusive:
                break
            else:
                place += 1

    def _start(self, lane: Lane, place: int | None = None) -> Held:
        if place is None:
            place = self._first(lane)
        assert place is not None  # noqa: S101  # _may_start said so under the same lock
        held = lane.waiting[place]
        del lane.waiting[place]
        self._started += 1
        group = self._groups[lane.ref]
        group.waiting -= 1
        group.waiting_bytes -= held.claimed.size
        group.running += 1
        held.started_at, held.thread = time.monotonic(), threading.get_ident()
        self._running[id(held)] = held
        if held.claimed.suspect:
            self._suspect = held.claimed
        if not lane.exclusive and lane.waiting:
            self._make_ready(group, lane)
        if not group.waiting:
            self._hungry = True  # nothing is left to hand out: time to claim
            self._poller.notify_all()
        return held

    def _leave(self, lane: Lane) -> None:
        lane.busy = False
        if lane.waiting:
            self._make_ready(self._groups[lane.ref], lane)

    def _make_ready(self, group: _Group, lane: Lane) -> None:
        if not lane.queued:
            lane.queued = True
            group.ready.append(lane)
        elif lane.exclusive:
            return  # one thread is woken for it already
        self._work.notify()

    def _empty(self, group: _Group, key: str | None) -> list[Held]:
        lane = group.lanes.get(key)
        if lane is None:
            return []
        taken = list(lane.waiting)
        lane.waiting.clear()
        group.waiting -= len(taken)
        group.waiting_bytes -= sum(held.claimed.size for held in taken)
        return taken

    def _settle(self, group: _Group, settlement: Settlement) -> None:
        if not group.settlements:
            group.first_settlement_at = time.monotonic()
            self._poller.notify_all()
        group.settlements.append(settlement)

    def _flush_due(self, group: _Group, enough: int) -> bool:
        if not group.settlements:
            return False
        if len(group.settlements) >= enough or not (group.waiting or group.running):
            return True
        if self._suspect is not None and any(settlement.delivery is self._suspect for settlement in group.settlements):
            return True
        return time.monotonic() >= group.first_settlement_at + FLUSH_DELAY
