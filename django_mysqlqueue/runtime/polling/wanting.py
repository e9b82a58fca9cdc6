"""What the next claim of a group asks for: how many messages, of which priority, from which partitions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import islice

from django_mysqlqueue.runtime.polling.context import Context
from django_mysqlqueue.runtime.polling.delivering import DeliveringGroup
from django_mysqlqueue.runtime.polling.depths import LOOKED_AT, MAX_PARTITIONS, Depths
from django_mysqlqueue.runtime.priorities import ByPriority, Turns
from django_mysqlqueue.service.claims import Want
from django_mysqlqueue.subscriptions.handler import Handler


class WantingGroup(DeliveringGroup):
    """A group that knows which of its partitions may have messages, and how many messages it has room for."""

    def __init__(self, context: Context, handler: Handler) -> None:
        super().__init__(context, handler)
        self.todo = ByPriority[None]()
        """Partitions to look at, in turn. A partition leaves when a claim that held its lock found nothing more."""
        self._turns = Turns()
        self.depths = Depths(context.threads)
        self.stopped = False
        """Whether nothing is claimed: the group is paused, dropped, of the other mode, or its filter is unknown."""

    def room(self, priority: int | None = None) -> int:
        """Return how many deliveries to claim now: 0 until there is room for a worthwhile batch.

        ``priority``: the priority of their messages (default: the highest that has work). However many messages with
        lower priorities wait, there is room for it.
        """
        if self.stopped:
            return 0
        if priority is None:
            priority = max(self._priorities(), default=0)
        room = self.context.prefetch.room(
            self.ref, priority=priority, least=self.least, claim_size=self.claim_size, max_bytes=self.max_bytes
        )
        if room and self.limited and not self._claims_without_slots(priority):
            room = min(room, self._room_for_slots())
        return room

    def _claims_without_slots(self, priority: int) -> bool:
        """Return whether a claim may take messages that need no slots."""
        partitions = self.todo.of(priority)
        if not self.limited.is_partial or not partitions:  # Redeliveries of a shared group may be of any partition.
            return self.limited.is_partial
        return any(map(self.limited.spares, islice(partitions, LOOKED_AT)))

    def _room_for_slots(self) -> int:
        """Return how many messages that need slots this process can start soon."""
        return self.limited.room(self.handler.batch_size)

    def has_room_for_due(self) -> bool:
        """Return whether redeliveries may be claimed when they come due."""
        return self.room() > 0

    def _priorities(self) -> list[int]:
        """Return the priorities with work. Redeliveries of a shared group, whose priorities are unknown, count as 0."""
        found = self.todo.priorities()
        return [*found, 0] if 0 not in found and self._max_due() else found

    def _next_claim(self, priorities: Sequence[int]) -> tuple[int, int]:
        """Return the priority of the next claim's messages, and their maximum number: 0 if nothing is to be claimed."""
        for priority in self._turns.order(priorities, self.priority_share):
            if room := self.room(priority):
                return priority, room
        return 0, 0

    def _may_claim(self) -> bool:
        """Return whether anything may be claimed, even one message."""
        return not self.stopped and self.inbox.waiting(self.ref)[1] < self.max_bytes

    def _newcomers(self, priorities: Sequence[int]) -> tuple[int, list[Want], int]:
        """Return what to claim without room: the priority, the wants, and how many redeliveries.

        That is one message of each partition of which none waits in this process: otherwise it would wait until half a
        claim of the partitions that use all the room is handled. It is also what needs slots, if it can start soon.
        """
        if (self.limited and not self.limited.is_partial) or not self._may_claim():
            return 0, [], 0
        most, slots = min(self.claim_size, self.least) // 2, self._room_for_slots() if self.limited else 0
        due = slots if self.limited.has_due else 0
        for priority in self._turns.order(priorities, self.priority_share):
            keys = islice(self.todo.of(priority), LOOKED_AT)
            needing, others = self.limited.split(keys, min(slots, self.claim_size))
            found = [*needing, *self.inbox.newcomers(self.ref, others, priority=priority, most=most)]
            if wants := [want for want in map(self._want_one, found) if want is not None]:
                return priority, wants, due
        return 0, [], due

    def _wants(self, priority: int, room: int) -> list[Want]:
        """Return what to claim with room: if only some messages need slots, half of it at most is for those.

        They come first, no more than can start soon. The others, of which there may be many, would take all the room.
        """
        partitions = self.todo.of(priority)
        # Only as many as are looked at: the list may be long, and this runs in each turn.
        keys = list(islice(partitions, LOOKED_AT))
        wants: list[Want] = []
        if self.limited.is_partial:
            slots = min(room, self._room_for_slots())
            needing, keys = self.limited.split(keys, slots)
            most = min(slots, (room + 1) // 2) if keys else slots
            needing = needing[: min(most, MAX_PARTITIONS)]
            found = (self._want(key, most // len(needing)) for key in needing)
            wants += [want for want in found if want is not None]
        first = len(wants)
        left = room - sum(map(self.depths.expected, wants))
        for key in keys:
            if left <= 0 or len(wants) >= MAX_PARTITIONS:
                break
            want = self._want(key, min(left, self.depths.look_at(key, room=room, partitions=len(partitions))))
            if want is not None:
                wants.append(want)
                left -= self.depths.expected(want)
        return [*wants[:first], *self.depths.fill_up(wants[first:], left)]

    @abstractmethod
    def _want(self, key: str, limit: int) -> Want | None:
        """Return what to take from a partition now. If there is nothing, remove it from ``todo`` and return None."""

    def _want_one(self, key: str) -> Want | None:
        """Return a request for one message of a partition that could start soon, or None."""
        return self._want(key, 1) if self._is_free(key) else None

    def _is_free(self, key: str) -> bool:
        """Return whether a message of a partition could start soon: in ordered mode, if none is in flight here."""
        return True

    def _max_due(self) -> int:
        """Return how many redeliveries a claim may take, from any partition (shared mode).

        Their priorities are not known before. So there is room for them only if there is room for the lowest.
        """
        return 0
