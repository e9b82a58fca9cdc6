"""What a process remembers of a group with limits: its slots, and what waits for one. All of it is a hint."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import islice

from django.db import Error

from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.names.keys import lane_of
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.delivery_limits import AHEAD_US, NO_LIMITS, DeliveryLimits, as_limit_key
from django_mysqlqueue.runtime.handling.inbox import Inbox
from django_mysqlqueue.runtime.polling.memory import LOOKED_AT
from django_mysqlqueue.runtime.priorities import ByPriority
from django_mysqlqueue.runtime.timers import Timers
from django_mysqlqueue.service.claims import Claim, ClaimRequest, Left
from django_mysqlqueue.service.deliveries import Holding
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.slots import LONGEST_REST_US, Reservation, Rest
from django_mysqlqueue.sql.session import Retry, Session

AHEAD = AHEAD_US / 1_000_000
LONGEST_REST_MS = LONGEST_REST_US // 1000 + 5000
"""Longest wait for a slot, with a pause, in milliseconds."""
RATE_PAUSE = Backoff(initial=0.025, maximum=0.5, jitter=1.0)
"""The pause after a claim that got no slot because of a rate: others wait for the same slot, and only one gets it."""
IN_FLIGHT_PAUSE = Backoff(initial=0.75, maximum=4.0, jitter=1 / 4)
"""The pause after a claim that got no slot because too many messages are in flight, at other subscribers."""


def _is_over(until: int, now: int) -> bool:
    """Return whether a wait is over; one that would be too long began before the clock was corrected."""
    return until <= now or until > now + LONGEST_REST_MS


class Limited:
    """The slots of a process for one group, and the partitions that wait for one."""

    def __init__(self, inbox: Inbox, ref: GroupRef, subscriber: str, *, lease_ms: int) -> None:
        self._inbox = inbox
        self._ref = ref
        self._subscriber = subscriber
        self._lease_ms = lease_ms
        self._limits = NO_LIMITS
        self._per_call = 1
        self.is_partial = False
        """Whether only the messages of some partitions need slots."""
        self._stored: dict[str, int] = {}
        """By limited key, the slots that the rows of this subscriber say it holds."""
        self.is_unsure = True
        """Whether the rows may be others than this process has written, for example after a failover."""
        self._doubtful: set[str] = set()
        """Keys whose rows may say something else, because the outcome of a COMMIT is unknown."""
        self._rest: Rest | None = None
        """Until when the whole group rests."""
        self._resting: dict[str, Rest] = {}
        """By partition, until when it rests."""
        self._until = Timers[str]()
        """By partition that rests, when to look at it again, in epoch milliseconds."""
        self._fruitless = 0
        """Claims and queries in a row that have found no slot."""
        self._sampled_at = time.monotonic()
        self._sampled = 0
        self._recent = 0
        """Number of deliveries that were started in ``AHEAD`` seconds."""
        self.has_due = False
        """Whether redeliveries are due for which no thread was free (``Due.with_slots``)."""
        self._kept_at = 0.0
        self._others = -1
        """Number of deliveries without slots that had been started when a thread was kept."""

    def configure(self, limits: DeliveryLimits, *, per_call: int = 1) -> list[str]:
        """Use limits from now on, and return the partitions that waited for a slot, to be asked for again.

        ``per_call``: the number of messages that one call of the handler gets.

        If they differ from those before, all waiting deliveries are returned. Slots of another rate are not released:
        they are used up, as after a crash. Otherwise, ten slots of 100/s would make room for ten of 1/h.
        """
        if limits != self._limits:
            self._inbox.return_waiting(self._ref)
            returned = self._inbox.take_returned(self._ref)
            kept = {key: slots for key, slots in returned.items() if limits.has_interval_of(self._limits, key)}
            self._inbox.put_back_returned(self._ref, kept)
        self._limits, self._per_call = limits, per_call
        self.is_partial = limits.limits_some_keys and limits.limit_by is None
        rested = list(self._resting)
        self.reset()
        return rested

    def reset(self) -> None:
        """Forget what waits for a slot, and that the rows of this subscriber are known."""
        self.is_unsure = True
        self._rest, self._fruitless = None, 0
        self._resting.clear()
        self._until.clear()
        self.has_due = False

    def __bool__(self) -> bool:
        """Whether the group has limits."""
        return bool(self._limits)

    def spares(self, key: str) -> bool:
        """Return whether messages of a partition need no slots; those of hashed keys count as such, although some may.

        So claims of them need not be small, and take as long as without limits.
        """
        if not self._limits:
            return True
        return self.is_partial and self._limits.rate_of(as_limit_key(lane_of(key).partition)) is None

    def split(self, keys: Iterable[str], slots: int) -> tuple[list[str], list[str]]:
        """Return the partitions whose messages need slots, at most ``slots``, and those whose messages need none."""
        if not self._limits:
            return [], list(keys)
        looked_at = [(key, self.spares(key)) for key in keys]
        needing = islice((key for key, is_spared in looked_at if not is_spared), slots)
        return list(needing), [key for key, is_spared in looked_at if is_spared]

    def keep_thread(self, todo: ByPriority[None], is_free: Callable[[str], bool]) -> None:
        """Keep the next free handler thread for a message with a slot, if such messages may wait in the log.

        The thread waits for a claim. Otherwise, messages without slots, which wait in this process already, could take
        all threads all the time: a slot would be too old when a thread is free. They take turns.
        """
        now = time.monotonic()
        if self._rest is not None or now < self._kept_at + AHEAD or all(self._inbox.free_calls(self._ref)):
            return
        for priority in todo.priorities():
            if any(is_free(key) and not self.spares(key) for key in islice(todo.of(priority), LOOKED_AT)):
                wanted = self._inbox.waiting(self._ref, priority=priority + 1)[0] == 0
                break
        else:
            wanted = self.has_due
        others = self._inbox.started_without_slots()
        if wanted and others != self._others and self._inbox.keep_thread(self._ref):
            self._kept_at, self._others = now, others

    def rests(self, key: str) -> bool:
        """Return whether a partition waits for a slot."""
        return key in self._resting

    def __len__(self) -> int:
        """The number of partitions that wait for a slot."""
        return len(self._resting)

    def room(self) -> int:
        """Return how many deliveries this process can start soon: more slots would be of no use to it."""
        if self._rest is not None:
            return 0
        waiting, started = self._inbox.load(self._ref, with_slots=self.is_partial)
        elapsed = time.monotonic() - self._sampled_at
        if elapsed >= AHEAD:
            self._recent = round((started - self._sampled) * AHEAD / elapsed)
            self._sampled_at, self._sampled = time.monotonic(), started
        return max(0, sum(self._inbox.free_calls(self._ref)) * self._per_call + self._recent - waiting)

    # -- slots ----------------------------------------------------------------

    def held(self) -> Holding:
        """Return what this process holds now."""
        held = self._limits.counted(self._inbox.slots(self._ref))
        return Holding(self._subscriber, self._limits, self._lease_ms, held, self._stored, frozenset(self._doubtful))

    def holding(self) -> Holding:
        """Return what this process holds now, with the slots to be released, which are taken out of the inbox."""
        return replace(self.held(), returned=self._inbox.take_returned(self._ref))

    def news(self) -> Holding | None:
        """Return what this process holds, as ``holding``, if the rows say something else."""
        if not (self._limits or self._stored or self._doubtful):
            returned = self._inbox.take_returned(self._ref)
            return replace(self.held(), returned=returned) if returned else None
        holding = self.holding()
        return holding if holding.returned or holding.doubtful or holding.held != holding.stored else None

    def written(self, held: dict[str, int] | None) -> None:
        """Note what the rows of this subscriber say since a COMMIT."""
        if held is not None:
            self._stored = held
            self._doubtful.clear()

    def note_stored(self, keys: Collection[str]) -> None:
        """Note of which keys the rows say that this subscriber holds slots. They are written again."""
        self.is_unsure = False
        self._doubtful |= {*keys, *self._stored}

    def not_written(self, holding: Holding, error: Exception) -> None:
        """Keep the account right after a transaction that should have written it has failed.

        If the outcome of the COMMIT is unknown, slots are not released: that could happen twice.
        """
        if isinstance(error, CommitOutcomeUnknown):
            self._doubtful |= {*holding.held, *holding.stored, *holding.written}
        elif isinstance(error, Error | Retry):
            self._inbox.put_back_returned(self._ref, holding.returned)

    # -- what waits for a slot ------------------------------------------------

    def looked(self, request: ClaimRequest, claim: Claim) -> None:
        """Note whether a claim has left out redeliveries, and free the kept thread if it has found nothing for it."""
        could = bool(self.has_due and request.due is not None and request.due.with_slots)
        could = could or not all(self.spares(want.key) for want in request.wants)
        if request.due is not None:
            self.has_due = Left.NEEDS_SLOT in claim.left.values()
        if could and not any(delivery.slot for delivery in claim.deliveries):
            self._inbox.free_thread(self._ref)

    def claimed(self, claim: Claim, now: int) -> Collection[str]:
        """Remember what a claim has found to wait for a slot, and return its partitions."""
        rests = {key: seen for key, seen in claim.partitions.items() if isinstance(seen, Rest)}
        if claim.rest is None and not rests:
            self._fruitless = 0
            return ()
        self._fruitless = 0 if claim.deliveries else self._fruitless + 1
        if claim.rest is not None:
            self._rest = self._paused(claim.rest, now)
        for key, rest in rests.items():
            self._wait(key, rest, now)
        return rests.keys()

    def _wait(self, key: str, rest: Rest, now: int) -> None:
        self._resting[key] = self._paused(rest, now)
        self._until.set(key, self._resting[key].until)

    def _paused(self, rest: Rest, now: int) -> Rest:
        """Return a rest that is as long as the pause after this claim or query, if it has found no slot."""
        if not self._fruitless:
            return rest
        pause = (IN_FLIGHT_PAUSE if rest.in_flight else RATE_PAUSE).delay(self._fruitless)
        return rest._replace(until=max(rest.until, now + int(pause * 1000)))

    def finished(self, keys: Collection[str]) -> list[str]:
        """Return the partitions that need not wait any longer, because messages of their keys have ended here."""
        if not self._limits.counts_in_flight:
            return []
        if self._rest is not None and self._rest.in_flight:
            self._rest = None
        freed = [key for key, rest in self._resting.items() if rest.in_flight and rest.key in keys]
        for key in freed:
            self._end_rest(key)
        return freed

    def rested(self, now: int, ask: Callable[[Sequence[str]], Sequence[Rest | None]]) -> list[str]:
        """Return the partitions that probably have a slot now, and forget that they waited.

        If it is not certain of one whose wait is over, it is asked for all of which it is not certain: one query for
        many partitions, which then wait until about the same time.

        ``ask``: returns why messages of limited keys get no slot (``ask``).
        """
        if self._rest is not None and _is_over(self._rest.until, now):
            self._rest = None
        due = self._until.pop(lambda until: _is_over(until, now))
        over = [key for key in due if self._resting[key].is_certain]
        if len(over) < len(due):
            over += self._ask(now, ask)
        for key in over:
            self._end_rest(key)
        return over

    def ask(self, using: str, keys: Sequence[str]) -> list[Rest | None]:
        """Return, for each limited key, why its next message would get no slot."""
        return Reservation(Session(using), self._ref, self.held()).ask(keys)

    def _ask(self, now: int, ask: Callable[[Sequence[str]], Sequence[Rest | None]]) -> list[str]:
        """Ask for all partitions of which it is not certain when they have a slot; return those that have one."""
        asked = [(key, rest.key) for key, rest in self._resting.items() if not rest.is_certain]
        rests = dict(zip((key for key, _ in asked), ask([limited for _, limited in asked]), strict=True))
        self._fruitless += all(rests.values())
        for key, rest in rests.items():
            if rest is not None:
                self._wait(key, rest, now)
        return [key for key, rest in rests.items() if rest is None]

    def next_at(self) -> int | None:
        """Return when the first wait is over, in epoch milliseconds, or None if nothing waits for a time."""
        times = (self._until.first(), None if self._rest is None else self._rest.until)
        return min((time for time in times if time is not None), default=None)

    def forget(self, key: str) -> None:
        """Forget a partition."""
        self._end_rest(key)

    def _end_rest(self, key: str) -> None:
        self._resting.pop(key, None)
        self._until.discard(key)
