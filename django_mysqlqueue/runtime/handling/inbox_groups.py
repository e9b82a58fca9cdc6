"""The groups of an inbox: what waits, runs and holds slots, and what leaves without a start."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping

from django_mysqlqueue.names.keys import LOWEST_PRIORITY
from django_mysqlqueue.runtime.handling.lanes import GroupLanes, Held, Lane
from django_mysqlqueue.runtime.handling.starts import KeptThread
from django_mysqlqueue.service import delivery_events
from django_mysqlqueue.service.deliveries import Action, Claimed, Returned, Settlement
from django_mysqlqueue.service.refs import GroupRef


class InboxGroups:
    """The lanes of each group, under one lock.

    Args:
        refs: the groups.
        lock: the lock.
    """

    def __init__(self, refs: Iterable[GroupRef], lock: threading.Lock) -> None:
        self._lock = lock
        self._poller = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)
        self._kept = KeptThread()
        self._groups = {ref: GroupLanes(records_acks=delivery_events.level(ref) == "all") for ref in refs}

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
        """Keep the next free thread for a delivery with a slot (``KeptThread``).

        Returns:
            False if one is already kept, for this group or for another one.
        """
        with self._lock:
            if self._kept.wanted is not None:
                return False
            self._kept.wanted, self._kept.until = ref, 0.0
            return True

    def free_thread(self, ref: GroupRef) -> None:
        """Let the thread that is kept for a group start other deliveries, because the group has none with a slot."""
        with self._lock:
            if self._kept.wanted == ref:
                self._kept.wanted = None
                self._work.notify_all()

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
            group = self._groups[ref]
            for lane in list(group.lanes.values()):
                self._return_all(group, lane)

    def return_late(self, ref: GroupRef) -> None:
        """Release the deliveries of a group whose time to start is over."""
        with self._lock:
            group = self._groups[ref]
            for lane in list(group.lanes.values()):
                self._return_late(group, lane)

    # -- under the lock -------------------------------------------------------

    def _empty(self, group: GroupLanes, key: str) -> list[Held]:
        """Remove the waiting deliveries of a partition, which then hold no slots."""
        lane = group.lanes.get(key)
        removed = [] if lane is None else [group.remove(lane) for _ in range(len(lane.waiting))]
        for held in removed:
            group.end_slot(held.claimed)
        return removed

    def _release(self, group: GroupLanes, claimed: Claimed) -> None:
        """Settle a delivery that has not started as released, and its slot."""
        group.return_slot(claimed)
        self._settle(group, Settlement(claimed, Action.RELEASE))

    def _return_all(self, group: GroupLanes, lane: Lane) -> None:
        """Release the waiting deliveries of a lane. In order, no later one starts before they are redelivered."""
        lane.blocked = lane.exclusive and (lane.blocked or bool(lane.waiting))
        for held in self._empty(group, lane.key):
            self._release(group, held.claimed)

    def _return_late(self, group: GroupLanes, lane: Lane) -> None:
        """Release the deliveries at the head of a lane whose time to start is over; in order, also those behind."""
        if not lane.waiting or lane.waiting[0].claimed.slot is None:
            return
        now = time.monotonic()
        if lane.waiting[0].claimed.slot.before > now:
            return
        if lane.exclusive:
            self._return_all(group, lane)
            return
        late = [
            place
            for place, held in enumerate(lane.waiting)
            if held.claimed.slot is not None and held.claimed.slot.before <= now
        ]
        for place in reversed(late):
            claimed = group.remove(lane, place).claimed
            group.end_slot(claimed)
            self._release(group, claimed)

    def _settle(self, group: GroupLanes, settlement: Settlement) -> None:
        if not group.settlements:
            group.first_settlement_at = time.monotonic()
            self._poller.notify_all()
        group.settlements.append(settlement)
