"""How many messages a claim looks for in each partition. It is learned from the claims before."""

from __future__ import annotations

from collections.abc import Sequence

from django_mysqlqueue.service.claims import Claim, Want

MOST = 10_000
"""Maximum number of partitions whose depth is remembered."""
MAX_PARTITIONS = 100
"""Maximum number of partitions that one claim looks at."""
LOOKED_AT = 1000
"""Maximum number of partitions in ``todo`` that one turn goes through."""


class Depths:
    """The number of messages to look for in the partitions of a group.

    A partition costs a claim as much as ten messages do. So if partitions hold many messages, a claim takes from few of
    them, but from enough to keep the threads busy.

    Args:
        threads: number of handler threads.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.common = 1
        """Minimum number of messages to look for in a partition, if there are many partitions."""
        self._own: dict[str, int] = {}
        """By partition that had more messages than were asked for, the number to look for: twice the last one."""

    def forget(self, key: str) -> None:
        """Forget what was learned of a partition."""
        self._own.pop(key, None)

    def look_at(self, key: str, *, room: int, partitions: int) -> int:
        """Return how many messages to look for in a partition."""
        share = room // (min(room, MAX_PARTITIONS, partitions) or 1)
        depth = max(self.common, self._own.get(key, 1))
        return max(1, share, min(depth, room // (2 * self._threads)))

    def expected(self, want: Want) -> int:
        """Return how many messages a claim will probably get from a partition: most give no more than before."""
        if want.due or want.key in self._own:
            return len(want.due) or want.look_at
        return min(want.look_at, self.common)

    def fill_up(self, wants: list[Want], left: int) -> list[Want]:
        """Give the rest of a claim to partitions that had more messages than were taken the last time."""
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
        if not claim.looked_at:
            return
        if not hungry:
            self.common = max(1, self.common // 2)
            self._own.clear()
            return
        if len(self._own) > MOST:
            self._own.clear()
        deep = claim.looked_at - claim.drained - claim.limited.keys()
        for want in wants:
            if want.key in deep:
                self._own[want.key] = min(2 * want.look_at, most)
            else:
                self.forget(want.key)
        if 2 * len(deep) >= len(claim.looked_at):
            self.common = min(2 * self.common, most)
        else:
            self.common = max(1, len(claim.deliveries) // len(claim.looked_at))
