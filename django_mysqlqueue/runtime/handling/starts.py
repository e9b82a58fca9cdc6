"""The limit on the deliveries that a process starts (``runsubscriber --max-messages``)."""

from __future__ import annotations

import threading


class Starts:
    """The number of deliveries that a process has started, of all its inboxes, and the most that it may start.

    Args:
        most: the maximum; None: no limit.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self._count = 0
        self._shared = threading.Lock()

    def lock(self) -> threading.Lock:
        """Return the lock for an inbox. With a limit, all inboxes share one, so that no two start the last delivery."""
        return threading.Lock() if self.most is None else self._shared

    def add(self) -> None:
        """Count one more. The caller holds the lock of its inbox."""
        self._count += 1

    def are_used_up(self) -> bool:
        """Return whether no more may be started."""
        return self.most is not None and self._count >= self.most
