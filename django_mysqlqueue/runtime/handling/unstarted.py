"""The deliveries that a process has claimed and not started, in memory that outlives it.

A supervisor creates the memory, and gives it to a child and to the one that replaces it. What the child has not started
when it dies is released, and not suspected (``releasing.release_unstarted``). A delivery is noted after its claim has
committed, and its note is erased before its handler is called. So a process that dies between any two stores leaves a
note too few, which makes a message suspected, but none too many.
"""

from __future__ import annotations

import mmap
import os
import tempfile

ENTRIES = 16_384
"""Number of deliveries that can be noted, of all databases of a process. Further ones are suspected after a loss."""
ENTRY = 16
"""Bytes of an entry: the offset and the token of a delivery. Each is one aligned store. Offset 0: the entry is free."""


def create() -> int:
    """Return the file descriptor of memory for a child.

    Raises:
        OSError: the system has too many open files, or no memory.
    """
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("mysqlqueue")
    else:
        with tempfile.TemporaryFile() as file:
            memory = os.dup(file.fileno())
    os.truncate(memory, ENTRIES * ENTRY)
    return memory


def read(memory: int) -> list[tuple[int, int]]:
    """Return the offset and token of the deliveries that a process has left without starting them."""
    with mmap.mmap(memory, 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped).cast("q") as view:
        return [(view[place], view[place + 1]) for place in range(0, len(view), 2) if view[place]]


class Unstarted:
    """The notes of one inbox. Its methods need the lock of the inbox.

    Args:
        memory: file descriptor of the memory.
        number: the number of this inbox in its process, from 0.
        inboxes: the number of inboxes, which share the memory.
    """

    def __init__(self, memory: int, number: int = 0, inboxes: int = 1) -> None:
        self._view = memoryview(mmap.mmap(memory, 0)).cast("q")
        most = ENTRIES // inboxes
        # The first ones are used first, and again and again: memory that nobody writes to costs none.
        self._free = list(range(2 * most * (number + 1) - 2, 2 * most * number - 2, -2))

    def note(self, offset: int, token: int) -> int:
        """Note a delivery; return the place of the note, or -1 if there is none."""
        if not self._free:
            return -1
        place = self._free.pop()
        self._view[place + 1] = token
        self._view[place] = offset
        return place

    def erase(self, place: int) -> None:
        """Erase a note, because its delivery starts, or is not this process's any more."""
        if place >= 0:
            self._view[place] = 0
            self._free.append(place)
