"""When keys are due: a heap that a key can leave, or change its time in, before it is due."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Any)

SPARE = 64
"""Number of outdated entries of the heap, beyond as many as there are keys, at which it is built again."""


class Timers(Generic[K]):
    """Keys, each with one time, in the order of their times.

    The dict alone says what is due. An entry of the heap counts if it is what the dict says at the moment at which it
    is looked at, and the key leaves both at once: so an entry that is there twice counts once.
    """

    def __init__(self) -> None:
        self._times: dict[K, int] = {}
        self._heap: list[tuple[int, K]] = []

    def set(self, key: K, time: int) -> None:
        """Set the time of a key, whether or not it has one."""
        if self._times.get(key) == time:
            return
        self._times[key] = time
        heapq.heappush(self._heap, (time, key))
        # Otherwise, keys that leave long before they are due would fill the memory.
        if len(self._heap) > 2 * len(self._times) + SPARE:
            self._heap = [(one, other) for other, one in self._times.items()]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        """Remove a key, if it has a time."""
        self._times.pop(key, None)

    def first(self) -> int | None:
        """Return the earliest time, or None if no key has one."""
        while self._heap:
            time, key = self._heap[0]
            if self._times.get(key) == time:
                return time
            heapq.heappop(self._heap)
        return None

    def pop(self, is_due: Callable[[int], bool]) -> list[K]:
        """Remove and return the keys that are due, in the order of their times, up to the first that is not."""
        found: list[K] = []
        while (time := self.first()) is not None and is_due(time):
            key = heapq.heappop(self._heap)[1]
            del self._times[key]
            found.append(key)
        return found

    def clear(self) -> None:
        """Remove all keys."""
        self._times.clear()
        self._heap.clear()
