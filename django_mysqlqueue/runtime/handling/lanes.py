"""The contents of the inbox: deliveries, the lanes in which they wait, and batches for one call of a handler."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from django_mysqlqueue.names.keys import priority_of
from django_mysqlqueue.runtime.handling.unstarted import Unstarted
from django_mysqlqueue.runtime.priorities import Turns
from django_mysqlqueue.service.deliveries import Action, Claimed, Returned, Settlement
from django_mysqlqueue.service.payloads import Body
from django_mysqlqueue.subscriptions.handler import Handler

if TYPE_CHECKING:
    from django_mysqlqueue.subscriptions.delivery import Delivery


NEVER = float("inf")
ASYNC = "\udc00"
"""Before the partition key in the name of a lane for the event loop, in a group that has lanes for threads, too. No key
contains it: UTF-8 cannot encode it."""


@dataclass(slots=True, eq=False)
class Held:
    """A delivery that this process has claimed."""

    claimed: Claimed
    body: Body
    handler: Handler
    expires: float = NEVER
    """When its message expires, by the monotonic clock."""
    state: object = None
    """What its handler has noted when it was claimed."""
    started_at: float = 0.0
    """When its handler started, by the monotonic clock; 0 while it waits."""
    on_loop: bool = False
    """Whether its handler is a coroutine of the event loop."""
    place: object = None
    """Identifier of the thread, or the task of the event loop, that handles it."""
    note: int = -1
    """Place of the note that it has not started (``Unstarted``); -1: there is none."""
    batch: int = 0
    """What the deliveries of one batch, which one call handles together, have in common."""
    delivery: Delivery | None = None
    """The object that its handler got; None if the handler was not called."""
    seconds: float = 0.0
    """Duration of the call, measured if there are listeners."""
    messages: int = 1
    """Number of messages of that call; 0 if there was none."""

    @property
    def alone(self) -> bool:
        """Whether it is handled alone, because it failed before or its subscriber was lost.

        In a batch, its neighbors would fail with it.
        """
        return self.claimed.suspect or self.claimed.attempt > 1

    @property
    def starts_before(self) -> float:
        """The monotonic time before which its handler must be called: its message expires, or its slot is over."""
        slot = self.claimed.slot
        return self.expires if slot is None else min(self.expires, slot.before)

    def is_expired(self) -> bool:
        """Return whether its message has expired."""
        return self.expires <= time.monotonic()

    def within_expiry(self, settlement: Settlement) -> Settlement:
        """Return a settlement after which the message does not wait for longer than until it expires."""
        if self.expires == NEVER or not settlement.delay_ms:
            return settlement
        left = max(1, round((self.expires - time.monotonic()) * 1000))
        return settlement._replace(delay_ms=min(settlement.delay_ms, left))

    def is_overrun(self) -> bool:
        """Return whether its handler has run for longer than ``max_processing_time``."""
        return time.monotonic() - self.started_at > self.handler.time_limit(self.state)


@dataclass(slots=True, eq=False)
class Lane:
    """The waiting deliveries of one partition."""

    group: GroupLanes
    level: Level
    key: str
    exclusive: bool
    """Whether only one call at a time may work on it (ordered mode)."""
    waiting: deque[Held] = field(default_factory=deque)
    busy: bool = False
    """Whether a call works on it. An ordered lane admits only one."""
    blocked: bool = False
    """Whether deliveries that arrive are released, because an earlier message has to be delivered first."""
    queued: bool = False
    """Whether it is in its group's queue of lanes with deliveries to start."""
    slice_until: float = 0.0


@dataclass(slots=True)
class Level:
    """The deliveries of a group with one priority, for handler threads or for the event loop."""

    priority: int
    on_loop: bool = False
    ready: deque[Lane] = field(default_factory=deque)
    """Lanes that may be worked on. A lane may have become empty since."""
    lanes: int = 0
    """Number of lanes with waiting deliveries."""
    waiting: int = 0
    waiting_bytes: int = 0


@dataclass(slots=True)
class GroupLanes:
    """The lanes of a group, and the outcomes of its deliveries that are to be written."""

    lanes: dict[str, Lane] = field(default_factory=dict)
    """By partition; in a shared group only those with waiting deliveries."""
    levels: tuple[dict[int, Level], dict[int, Level]] = field(default_factory=lambda: ({}, {}))
    """By priority: those for handler threads, and those for the event loop."""
    waiting: int = 0
    """Number of deliveries that wait to start."""
    is_async: bool = False
    """Whether all its deliveries are for the event loop."""
    may_be_async: bool = False
    """Whether some are."""
    concurrency: int | None = None
    """How many calls of coroutines the group may have at a time; None: it shares those of the process."""
    calls: int = 0
    """Number of its calls that run on the event loop."""
    turns: tuple[Turns, Turns] = field(default_factory=lambda: (Turns(), Turns()))
    """Of the priorities, for handler threads and for the event loop."""
    priority_share: int = 0
    running: int = 0
    suspects: int = 0
    """Number of suspected poison messages that wait to start."""
    settlements: list[Settlement] = field(default_factory=list)
    enough: int = 1
    """Number of settlements that are flushed at once, before their delay is over."""
    flush_at: float = 0.0
    """When the settlements are flushed, by the monotonic clock."""
    flushes_late: bool = False
    """Whether all settlements are acks that are already written."""
    acked: list[float] = field(default_factory=list)
    """See ``Inbox.take_acked``."""
    deleted: int = 0
    """Number of deliveries whose message was deleted before it could be handled."""
    passed: Counter[str] = field(default_factory=Counter)
    """Number of messages that were settled without a call, by reason (``rollups.PASSED``)."""
    records_acks: bool = False
    started: int = 0
    """Number of deliveries that were started since the process began."""
    waiting_with_slots: int = 0
    started_with_slots: int = 0
    slots: dict[str, int] = field(default_factory=dict)
    """By limited key, the number of slots of deliveries that wait or run."""
    returned: dict[str, Returned] = field(default_factory=dict)
    """By limited key, the slots of deliveries that have left without a start, to be released."""
    unstarted: Unstarted | None = None
    """The memory for what has not started, if a supervisor has given one to the process."""
    good_until: float = float("inf")
    """Shared mode: until when (monotonic) this process certainly holds the waiting deliveries."""

    def waiting_from(self, priority: int) -> tuple[int, int]:
        """Return how many deliveries with a priority or a higher one wait to start, and their payload bytes."""
        levels = self._levels_from(priority)
        return sum(level.waiting for level in levels), sum(level.waiting_bytes for level in levels)

    def _levels_from(self, priority: int) -> list[Level]:
        return [level for levels in self.levels for one, level in levels.items() if one >= priority]

    def newcomers(self, keys: Iterable[str], priority: int, most: int) -> list[str]:
        """Return partitions of which no delivery waits: as many as can be added until ``most`` partitions have some.

        ``priority``: their priority. Partitions with lower ones do not count.
        """
        left = most - sum(level.lanes for level in self._levels_from(priority))
        if left <= 0:
            return []
        return list(islice((key for key in keys if not self._waits(key)), left))

    def lane(self, key: str, *, shared: bool, on_loop: bool, is_mixed: bool = False) -> Lane:
        """Return the lane of a partition's deliveries.

        ``is_mixed``: whether the group has deliveries for threads, too, which have other lanes.
        """
        name = ASYNC + key if on_loop and is_mixed else key
        lane = self.lanes.get(name)
        if lane is None:
            priority = priority_of(key)
            levels = self.levels[on_loop]
            level = levels.get(priority)
            if level is None:
                level = levels[priority] = Level(priority, on_loop)
            lane = self.lanes[name] = Lane(self, level, name, not shared)
        return lane

    def _waits(self, key: str) -> bool:
        """Return whether a delivery of a partition waits."""
        lane = self.lanes.get(key)
        if (lane is None or not lane.waiting) and self.levels[True]:
            lane = self.lanes.get(ASYNC + key, lane)
        return lane is not None and bool(lane.waiting)

    def add(self, lane: Lane, held: Held) -> None:
        """Add a delivery to those that wait in a lane."""
        if held.claimed.slot is not None:
            self.waiting_with_slots += 1
            for key in held.claimed.slot.keys:
                self.slots[key] = self.slots.get(key, 0) + 1
        level = lane.level
        self.waiting += 1
        level.lanes += not lane.waiting
        level.waiting += 1
        level.waiting_bytes += held.claimed.size
        self.suspects += held.claimed.suspect
        if self.unstarted is not None:
            held.note = self.unstarted.note(held.claimed.offset, held.claimed.token)
        lane.waiting.append(held)

    def remove(self, lane: Lane, place: int = 0) -> Held:
        """Remove a delivery from those that wait in a lane, and return it."""
        held = lane.waiting[place]
        del lane.waiting[place]
        level = lane.level
        self.waiting_with_slots -= held.claimed.slot is not None
        self.waiting -= 1
        level.waiting -= 1
        level.waiting_bytes -= held.claimed.size
        self.suspects -= held.claimed.suspect
        if self.unstarted is not None:
            self.unstarted.erase(held.note)
        if not lane.waiting:
            level.lanes -= 1
            if not lane.exclusive:
                del self.lanes[lane.key]
        return held

    def end_slot(self, claimed: Claimed) -> None:
        """Note that a delivery with a slot neither waits nor runs any more."""
        if claimed.slot is not None:
            for key in claimed.slot.keys:
                self.slots[key] -= 1
                if not self.slots[key]:
                    del self.slots[key]

    def return_slot(self, claimed: Claimed) -> None:
        """Note that a delivery has left without a start: its slot is to be released."""
        if claimed.slot is not None:
            for key in claimed.slot.keys:
                before = self.returned.get(key, Returned(0, claimed.delivered_at))
                self.returned[key] = Returned(before.number + 1, min(before.since, claimed.delivered_at))

    def ready(self, *, on_loop: bool) -> list[deque[Lane]]:
        """Return the queues of lanes that nothing works on, in the order in which they have their turn."""
        levels = self.levels[on_loop]
        if len(levels) == 1:
            (level,) = levels.values()
            return [level.ready] if level.ready else []
        if not levels:
            return []
        order = self.turns[on_loop].order(self._priorities(on_loop=on_loop), self.priority_share)
        return [levels[priority].ready for priority in order]

    def is_turn_of(self, lane: Lane) -> bool:
        """Return whether a lane that is worked on has a priority whose turn it is."""
        order = self.turns[lane.level.on_loop].order(self._among(lane), self.priority_share)
        return order[0] == lane.level.priority

    def took(self, lane: Lane) -> None:
        """Note that a delivery of a lane starts."""
        self.turns[lane.level.on_loop].took(lane.level.priority, self._among(lane))

    def _among(self, lane: Lane) -> set[int]:
        return {lane.level.priority, *self._priorities(on_loop=lane.level.on_loop)}

    def _priorities(self, *, on_loop: bool) -> list[int]:
        return [priority for priority, level in self.levels[on_loop].items() if level.ready]


@dataclass(slots=True, eq=False)
class Batch:
    """The deliveries for one call of a handler, and their lanes: one delivery, or several with ``batch=True``."""

    lanes: list[Lane]
    items: list[Held]


def holds_back(handler: Handler, action: Action) -> bool:
    """Return whether later messages of a partition must not start before one has been redelivered."""
    if action is Action.RELEASE:
        return True  # It never started, so no later message may start.
    return handler.on_failure == "block" and action in (Action.NACK, Action.SNOOZE)
