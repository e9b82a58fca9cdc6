"""What the next turn of a group writes and claims: how many messages, of which priority, from which partitions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from django_mysqlqueue.names.keys import LOWEST_PRIORITY
from django_mysqlqueue.runtime.polling.memory import LOOKED_AT, MAX_PARTITIONS
from django_mysqlqueue.runtime.polling.mode import Mode
from django_mysqlqueue.runtime.polling.parts import Parts
from django_mysqlqueue.runtime.polling.writing import Unwritten
from django_mysqlqueue.runtime.priorities import Turns
from django_mysqlqueue.service import slots
from django_mysqlqueue.service.claims import Claim, Seen, Want
from django_mysqlqueue.sql.session import Session


class Plan(NamedTuple):
    """What one turn writes, and claims in the same transaction."""

    unwritten: Unwritten
    wants: Sequence[Want] = ()
    max_due: int = 0
    """Maximum number of redeliveries from any partition (shared mode)."""
    room: int = 0
    """Maximum number of messages."""
    priority: int = 0
    """The priority of the messages."""
    among: Collection[int] = ()
    """The priorities with work among which it was chosen; none if there was no room."""
    hungry: bool = False
    """Whether none of them waits in this process."""

    @property
    def claims(self) -> bool:
        """Whether anything is to be claimed."""
        return bool(self.wants or self.max_due)


class Planner:
    """Decides what a group looks at next, from what it remembers, the room in the inbox, and the slots."""

    def __init__(self, parts: Parts, mode: Mode) -> None:
        self._context, self._configuration, self._memory, self._limited, _ = parts
        self._inbox = parts.context.inbox
        self._ref = parts.configuration.ref
        self._mode = mode
        self._turns = Turns()

    def plan(self) -> Plan | None:
        """Return what the next turn writes and claims, or None if there is nothing.

        It takes the outcomes out of the inbox.
        """
        memory, limited = self._memory, self._limited
        if limited:
            self._ask_for_slots()
        among: Collection[int] = self._priorities()
        priority, room = self._next_claim(among)
        flushes = room > 0 or self._inbox.flush_due(self._ref)
        # Before the wants: nothing behind a failure that is written now may be claimed. They stay in the memory until
        # the transaction has ended, so that a bug in between does not lose them.
        memory.taken = self._inbox.take_settlements(self._ref) if flushes else []
        if room:
            wants = self.wants(priority, room)
            max_due = min(room, self._max_due()) if priority == 0 else 0
        else:
            priority, wants, max_due = self._newcomers(among)
            room, among = len(wants) + max_due, ()
        holding = limited.holding() if limited and (wants or max_due) else limited.news()
        if not (wants or max_due or memory.taken or memory.unfinished or holding):
            return None
        return Plan(
            Unwritten(memory.taken, memory.take_unfinished(self._context.limits.flushed), holding),
            wants,
            max_due,
            room,
            priority=priority,
            among=among,
            hungry=self._inbox.waiting(self._ref, priority=priority)[0] == 0,
        )

    def claimed(self, plan: Plan, claim: Claim) -> bool:
        """Remember what a claim found, and return whether to poll soon."""
        # To the end, even if it is locked: the others have their turn. If it had no offsets row, it has one now.
        seen = claim.partitions
        self._memory.todo.to_end([want.key for want in plan.wants if seen.get(want.key) is not Seen.MISSING])
        poll_soon = self._mode.claimed(claim, plan.wants, plan.max_due)
        self._memory.depths.learn(plan.wants, claim, hungry=plan.hungry, most=self._configuration.claim_size)
        return poll_soon

    def took(self, plan: Plan, claim: Claim) -> None:
        """Note which priority had its turn. A claim that finds no offsets row is repeated when the row is there."""
        if claim.deliveries or Seen.MISSING not in claim.partitions.values():
            self._turns.took(plan.priority, plan.among)

    def has_claim(self) -> bool:
        """Return whether there are messages to claim, and room for them."""
        return self._next_claim(self._priorities())[1] > 0

    def has_room_for_due(self) -> bool:
        """Return whether redeliveries may be claimed when they come due.

        In shared mode their priorities are not known before, so there must be room for the lowest.
        """
        return self.room(LOWEST_PRIORITY if self._configuration.handler.shared else None) > 0

    def room(self, priority: int | None = None) -> int:
        """Return how many deliveries to claim now: 0 until there is room for a worthwhile batch.

        ``priority``: the priority of their messages (default: the highest that has work). However many messages with
        lower priorities wait, there is room for it.
        """
        configuration = self._configuration
        if configuration.stopped:
            return 0
        if priority is None:
            priority = max(self._priorities(), default=0)
        room = self._context.prefetch.room(
            self._ref,
            priority=priority,
            least=configuration.least,
            claim_size=configuration.claim_size,
            max_bytes=configuration.max_bytes,
        )
        if room and self._limited and not self._claims_without_slots(priority):
            room = min(room, self._limited.room())
        return room

    def wants(self, priority: int, room: int) -> list[Want]:
        """Return what to claim with room: if only some messages need slots, half of it at most is for those.

        They come first, no more than can start soon. The others, of which there may be many, would take all the room.
        """
        depths, want_of, calls = self._memory.depths, self._mode.want, self._configuration.calls
        partitions = self._memory.todo.of(priority)
        share, deepest = depths.bounds(room, len(partitions), calls)
        # Only as many as are looked at: the list may be long, and this runs in each turn.
        keys = list(islice(partitions, LOOKED_AT))
        wants: list[Want] = []
        if self._limited.is_partial:
            most_slots = min(room, self._limited.room())
            needing, keys = self._limited.split(keys, most_slots)
            most = min(most_slots, (room + 1) // 2) if keys else most_slots
            needing = needing[: min(most, MAX_PARTITIONS)]
            limited = (want_of(key, most // len(needing)) for key in needing)
            wants += [want for want in limited if want is not None]
        first = len(wants)
        left = room - sum(map(depths.expected, wants))
        for key in keys:
            if left <= 0 or len(wants) >= MAX_PARTITIONS:
                break
            want = want_of(key, min(left, depths.look_at(key, share, deepest)))
            if want is None:
                share, _ = depths.bounds(room, len(partitions), calls)  # It has left them.
            else:
                wants.append(want)
                left -= depths.expected(want)
        return [*wants[:first], *depths.fill_up(wants[first:], left)]

    def _ask_for_slots(self) -> None:
        """Note who has a slot by now, and keep a thread for it."""
        context, limited, mode = self._context, self._limited, self._mode
        if limited.is_unsure:
            limited.note_stored(slots.keys_held(Session(context.using), self._ref, context.subscriber))
        self._inbox.return_late(self._ref)
        ask = partial(limited.ask, context.using)
        mode.notify(limited.rested(context.clock.now(), ask))
        mode.resume()
        if self._may_claim():
            limited.keep_thread(self._memory.todo, mode.is_free)

    def _claims_without_slots(self, priority: int) -> bool:
        """Return whether a claim may take messages that need no slots."""
        partitions = self._memory.todo.of(priority)
        if not self._limited.is_partial or not partitions:  # Redeliveries of a shared group may be of any partition.
            return self._limited.is_partial
        return any(map(self._limited.spares, islice(partitions, LOOKED_AT)))

    def _priorities(self) -> list[int]:
        """Return the priorities with work. Redeliveries of a shared group, whose priorities are unknown, count as 0."""
        priorities = self._memory.todo.priorities()
        return [*priorities, 0] if 0 not in priorities and self._max_due() else priorities

    def _next_claim(self, priorities: Collection[int]) -> tuple[int, int]:
        """Return the priority of the next claim's messages, and their maximum number: 0 if nothing is to be claimed."""
        for priority in self._turns.order(priorities, self._configuration.priority_share):
            if room := self.room(priority):
                return priority, room
        return 0, 0

    def _max_due(self) -> int:
        """Return how many redeliveries a claim may take, from any partition (shared mode).

        Their priorities are not known before. So there is room for them only if there is room for the lowest.
        """
        return self.room(LOWEST_PRIORITY) if self._mode.looks_for_due() else 0

    def _may_claim(self) -> bool:
        """Return whether anything may be claimed, even one message."""
        configuration = self._configuration
        return not configuration.stopped and self._inbox.waiting(self._ref)[1] < configuration.max_bytes

    def _newcomers(self, priorities: Collection[int]) -> tuple[int, list[Want], int]:
        """Return what to claim without room: the priority, the wants, and how many redeliveries.

        That is one message of each partition of which none waits in this process: otherwise it would wait until half a
        claim of the partitions that use all the room is handled. It is also what needs slots, if it can start soon.
        """
        limited, configuration = self._limited, self._configuration
        if (limited and not limited.is_partial) or not self._may_claim():
            return 0, [], 0
        most = min(configuration.claim_size, configuration.least) // 2
        most_slots = self._limited.room() if limited else 0
        due = most_slots if limited.has_due else 0
        for priority in self._turns.order(priorities, configuration.priority_share):
            keys = islice(self._memory.todo.of(priority), LOOKED_AT)
            needing, others = limited.split(keys, min(most_slots, configuration.claim_size))
            newcomers = self._inbox.newcomers(self._ref, others, priority=priority, most=most)
            free = (key for key in (*needing, *newcomers) if self._mode.is_free(key))
            if wants := [want for want in (self._mode.want(key, 1) for key in free) if want is not None]:
                return priority, wants, due
        return 0, [], due
