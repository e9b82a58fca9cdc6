"""What a process remembers of the partitions of a group. All of it is a hint."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from django_mysqlqueue.runtime.priorities import ByPriority
from django_mysqlqueue.service.claims import Claim, Seen, Want
from django_mysqlqueue.service.deliveries import Settlement

MOST = 10_000
"""Maximum number of partitions whose depth is remembered."""
MAX_PARTITIONS = 100
"""Maximum number of partitions that one claim looks at."""
LOOKED_AT = 1000
"""Maximum number of partitions in ``todo`` that one turn goes through."""
NOT_LOOKED_AT = (None, Seen.LOST, Seen.MISSING)
"""What a claim says of a partition whose messages above the position it has not looked at."""


class Depths:
    """The number of messages to look for in the partitions of a group, learned from the claims before.

    A partition costs a claim as much as ten messages do. So if partitions hold many messages, a claim takes from few of
    them, but from enough for all the calls that run at a time.
    """

    def __init__(self) -> None:
        self.common = 1
        """Minimum number of messages to look for in a partition, if there are many partitions."""
        self._own: dict[str, int] = {}
        """By partition that had more messages than were asked for, the number to look for: twice the last one."""

    def forget(self, key: str) -> None:
        """Forget what was learned of a partition."""
        self._own.pop(key, None)

    def bounds(self, room: int, partitions: int, calls: int) -> tuple[int, int]:
        """Return how many messages a claim looks for in each partition: at least, and at most if that is more.

        ``calls``: how many calls may run at a time.
        """
        share = room // (min(room, MAX_PARTITIONS, partitions) or 1)
        return max(1, share), room // (2 * calls)

    def look_at(self, key: str, least: int, most: int) -> int:
        """Return how many messages to look for in a partition, within the bounds of the claim."""
        return max(least, min(most, max(self.common, self._own.get(key, 1))))

    def expected(self, want: Want) -> int:
        """Return how many messages a claim will probably get from a partition: most give no more than before."""
        if want.due or want.key in self._own:
            return len(want.due) or want.look_at
        return min(want.look_at, self.common)

    def fill_up(self, wants: list[Want], left: int) -> list[Want]:
        """Give the rest of a claim to partitions that had more messages than were taken the last time."""
        if left <= 0 or not self._own:
            return wants
        filled: list[Want] = []
        for want in wants:
            more = max(0, min(left, self._own.get(want.key, 0) - want.look_at)) if want.look_at else 0
            filled.append(Want(want.key, look_at=want.look_at + more) if more else want)
            left -= more
        return filled

    def learn(self, wants: Sequence[Want], claim: Claim, *, hungry: bool, most: int) -> None:
        """Adapt the numbers to what a claim has found.

        They grow only while handlers are faster than claims: otherwise the other partitions would wait longer for no
        gain. A partition that had fewer messages than asked for says nothing about the others: partitions with a
        backlog must not wait for those that get a message now and then.
        """
        looked_at = [want for want in wants if want.look_at and claim.partitions.get(want.key) not in NOT_LOOKED_AT]
        if not looked_at:
            return
        if not hungry:
            self.common = max(1, self.common // 2)
            self._own.clear()
            return
        if len(self._own) > MOST:
            self._own.clear()
        for want in wants:
            self._own.pop(want.key, None)
        deep = [want for want in looked_at if claim.partitions[want.key] is Seen.MORE]
        for want in deep:
            self._own[want.key] = min(2 * want.look_at, most)
        if 2 * len(deep) >= len(looked_at):
            self.common = min(2 * self.common, most)
        else:
            self.common = max(1, len(claim.deliveries) // len(looked_at))


class Memory:
    """The partitions to look at, how far to look, and what the next flushes have to do besides new outcomes."""

    def __init__(self) -> None:
        self.todo = ByPriority[None]()
        """Partitions to look at, in turn. A partition leaves when a claim that held its lock found nothing more."""
        self.depths = Depths()
        self.unfinished: set[str] = set()
        """Partitions whose watermark can advance further."""
        self.skipped: set[str] = set()
        """Partitions whose offsets row another process had locked: retried with the next poll."""
        self.locked: list[Settlement] = []
        """Outcomes whose row another transaction had locked: written after the next poll."""
        self.taken: list[Settlement] = []
        """Outcomes that were taken out of the inbox for a transaction that has not ended."""

    def has_work(self) -> bool:
        """Return whether there are partitions to look at."""
        return bool(self.todo)

    def is_idle(self) -> bool:
        """Return whether there is nothing to claim or to write."""
        return not (self.todo or self.unfinished or self.skipped or self.locked)

    def take_unfinished(self, most: int) -> set[str]:
        """Take the partitions whose watermarks the next flush advances."""
        taken = set(islice(self.unfinished, most))
        self.unfinished -= taken
        return taken

    def forget(self, key: str) -> None:
        """Forget a partition."""
        self.todo.pop(key, None)
        self.depths.forget(key)
        self.unfinished.discard(key)
        self.skipped.discard(key)

    def reset(self) -> None:
        """Forget every hint, but no outcome."""
        self.todo.clear()
        self.unfinished.clear()
        self.skipped.clear()
