"""What a process may start: the limit of ``runsubscriber --max-messages``, and threads that are kept free."""

from __future__ import annotations

import threading
import time

from django_mysqlqueue.service.refs import GroupRef

KEPT = 0.1
"""Seconds for which a free thread waits at most for a delivery with a slot."""


class Starts:
    """How many deliveries all inboxes of a process may still start.

    Args:
        most: the maximum; infinite: no limit.
    """

    def __init__(self, most: float = float("inf")) -> None:
        self.left = most
        self._shared = threading.Lock()

    def lock(self) -> threading.Lock:
        """Return the lock for an inbox. With a limit, all inboxes share one, so that no two start the last delivery."""
        return threading.Lock() if self.left == float("inf") else self._shared


class KeptThread:
    """A thread that is kept free for a delivery with a slot. Its methods need the lock of the inbox.

    The poller wants one for a group if it could claim such deliveries, but no thread is free. The first thread that
    becomes free then starts only a delivery with a slot, of any group, for at most ``KEPT`` seconds, in which the
    poller claims.
    """

    def __init__(self) -> None:
        self.wanted: GroupRef | None = None
        """The group for which one is wanted."""
        self.until = 0.0
        """Until when (monotonic) the thread waits at most; 0: none was free yet."""
        self._thread = 0

    def is_this(self) -> bool:
        """Return whether the calling thread, which is free, is kept."""
        now, thread = time.monotonic(), threading.get_ident()
        if not self.until:
            self.until, self._thread = now + KEPT, thread
        if now >= self.until:
            self.wanted = None
        return self.wanted is not None and thread == self._thread
