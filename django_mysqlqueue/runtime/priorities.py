"""Partitions by priority, and which priority has its turn."""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableMapping
from itertools import chain
from typing import TypeVar

from django_mysqlqueue.limits import priority_of

V = TypeVar("V")


class ByPriority(MutableMapping[str, V]):
    """A dict whose keys are partitions, in the order of their priority, the highest first.

    Partitions of one priority are in the order in which they were added.
    """

    def __init__(self) -> None:
        self._of: dict[int, dict[str, V]] = {}

    def __getitem__(self, key: str) -> V:
        return self._of[priority_of(key)][key]

    def __setitem__(self, key: str, value: V) -> None:
        self._of.setdefault(priority_of(key), {})[key] = value

    def __delitem__(self, key: str) -> None:
        priority = priority_of(key)
        partitions = self._of[priority]
        del partitions[key]
        if not partitions:
            del self._of[priority]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key in self.of(priority_of(key))

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._of[priority] for priority in self.priorities())

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __bool__(self) -> bool:
        return bool(self._of)

    def clear(self) -> None:
        """Remove everything."""
        self._of.clear()

    def priorities(self) -> list[int]:
        """Return the priorities of the partitions, the highest first."""
        return sorted(self._of, reverse=True)

    def of(self, priority: int) -> dict[str, V]:
        """Return the partitions of a priority. The dict must not be changed."""
        return self._of.get(priority, {})


class Turns:
    """Decide which priority has its turn: the highest one, and now and then a lower one."""

    def __init__(self) -> None:
        self._since = 0
        """Number of turns of the highest priority since the last one of a lower priority."""
        self._lower = 0
        """Number of turns of lower priorities: they take turns with each other."""

    def order(self, priorities: Collection[int], share: int) -> list[int]:
        """Return priorities in the order in which they may start now.

        ``share``: one of every ``share`` turns is of a lower priority; 0: none is.
        """
        ordered = sorted(priorities, reverse=True)
        if share and len(ordered) > 1 and self._since >= share - 1:
            ordered.insert(0, ordered.pop(1 + self._lower % (len(ordered) - 1)))
        return ordered

    def took(self, priority: int, among: Collection[int]) -> None:
        """Note whose turn it was.

        ``among``: the priorities with work. A turn without a choice does not count.
        """
        if len(among) < 2:
            return
        if priority == max(among):
            self._since += 1
        else:
            self._since = 0
            self._lower += 1
