"""What several viewers of the dashboard see: read once for all requests of a process within two seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

T = TypeVar("T")


@dataclass(slots=True)
class _Entry:
    value: Future[Any] = field(default_factory=Future)
    read_at: float = 0.0
    """When reading ended, by ``time.monotonic``; 0 while it has not."""


class SharedReads:
    """Values that were read lately. Requests for a value that is being read wait for it instead of reading it again.

    A value is the same for all viewers: what a user may not view has to be left out afterwards.
    """

    SECONDS: ClassVar[float] = 2.0
    """How long a value is used. Pages refresh every four seconds."""
    MOST: ClassVar[int] = 100
    """Maximum number of values."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Hashable, _Entry] = {}

    def get(self, key: Hashable, read: Callable[[], T]) -> T:
        """Return a value that this request or another one reads: what fails, fails for all that wait for it."""
        with self._lock:
            entry = self._entries.get(key)
            is_mine = entry is None or self._is_old(entry)
            if is_mine:
                self._entries = {name: one for name, one in self._entries.items() if not self._is_old(one)}
                entry = _Entry()
                if len(self._entries) < self.MOST:
                    self._entries[key] = entry
        assert entry is not None  # noqa: S101  # for the type checker
        if is_mine:
            self._read(key, entry, read)
        return cast("T", entry.value.result())

    def clear(self) -> None:
        """Forget all values: an operation has changed the queue."""
        with self._lock:
            self._entries.clear()

    def _is_old(self, entry: _Entry) -> bool:
        return bool(entry.read_at) and time.monotonic() - entry.read_at >= self.SECONDS

    def _read(self, key: Hashable, entry: _Entry, read: Callable[[], T]) -> None:
        try:
            value = read()
        except BaseException as error:  # noqa: BLE001  # raised where the result is taken
            with self._lock:
                if self._entries.get(key) is entry:
                    del self._entries[key]
            entry.value.set_exception(error)
        else:
            entry.read_at = time.monotonic()
            entry.value.set_result(value)


shared = SharedReads()
