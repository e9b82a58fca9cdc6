"""Partitions by priority, and which priority has its turn."""

from __future__ import annotations

from collections.abc import Collection, ItemsView, Iterable, Iterator
from itertools import chain
from typing import Any, TypeVar

from django_mysqlqueue.names.keys import LANE_PREFIXES, priority_of

V = TypeVar("V")


class ByPriority(dict[str, V]):
    """A dict whose keys are partitions, iterated in the order of their priority, the highest first.

    Partitions of one priority are in the order in which they were added; so are ``keys()`` and ``values()``. A lookup
    costs what it costs in a dict, because most groups have one priority and many partitions. Of the methods that change
    a dict, only those that are defined here keep both in step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[int, dict[str, V]] = {}
        """The same by priority; empty if all partitions since this was last empty have the priority 0."""

    def __setitem__(self, key: str, value: V) -> None:
        if self._of:
            self._of.setdefault(priority_of(key), {})[key] = value
        elif key.startswith(LANE_PREFIXES):
            if self:
                self._of[0] = dict(super().items())
            self._of.setdefault(priority_of(key), {})[key] = value
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self.pop(key)

    def pop(self, key: str, *default: Any) -> Any:
        """Remove a partition, and return its value."""
        if self._of and key in self:
            priority = priority_of(key)
            del self._of[priority][key]
            if not self._of[priority]:
                del self._of[priority]
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> V:
        """Return the value of a partition, after adding it if it is missing."""
        if key not in self:
            self[key] = default
        return self[key]

    def to_end(self, keys: Iterable[str]) -> None:
        """Move those of the partitions that are here behind the others of their priority."""
        for key in keys:
            if key in self:
                dict.__setitem__(self, key, dict.pop(self, key))
                if self._of:
                    others = self._of[priority_of(key)]
                    others[key] = others.pop(key)

    def __iter__(self) -> Iterator[str]:
        if not self._of:
            return super().__iter__()
        return chain.from_iterable(self.of(priority) for priority in self.priorities())

    def items(self) -> ItemsView[str, V]:  # type: ignore[override]
        """Return the items, in the order of the partitions."""
        return ItemsView(self)

    def clear(self) -> None:
        """Remove everything."""
        super().clear()
        self._of.clear()

    def priorities(self) -> list[int]:
        """Return the priorities of the partitions, the highest first."""
        return sorted(self._of, reverse=True) if self._of else [0] if self else []

    def of(self, priority: int) -> dict[str, V]:
        """Return the partitions of a priority. The dict must not be changed."""
        return self._of.get(priority, {}) if self._of else {} if priority else self


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
