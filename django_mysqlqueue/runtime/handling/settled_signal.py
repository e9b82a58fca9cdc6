"""The thread that sends ``delivery_settled``, so that slow receivers delay only each other."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.handling.observers import Settled, send_settled
from django_mysqlqueue.runtime.log import event, is_worth_a_line
from django_mysqlqueue.runtime.threads import worker_thread
from django_mysqlqueue.sql.connection import close_connections

MOST = 10_000
"""Maximum number of settled deliveries that wait to be sent. Further ones are dropped, so that they neither delay the
queue nor fill the memory."""


class Teller:
    """Send ``delivery_settled`` in order, one at a time, in a thread that starts with the first delivery.

    The database connections of receivers are set up as those of handlers.

    Args:
        using: alias of the queue's database.
        timeouts: session timeouts of the thread's connections.
        most: maximum number of settled deliveries that wait.
    """

    def __init__(self, using: str, timeouts: sessions.Timeouts, *, most: int = MOST) -> None:
        self._using = using
        self._timeouts = timeouts
        self._most = most
        self._waiting: deque[Settled] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._sent_at = 0.0
        self._refusals = 0
        self._dropped = 0

    def put(self, ends: Sequence[Settled]) -> None:
        """Queue settled deliveries to be sent, and return at once."""
        with self._changed:
            taken = 0 if self._closed else max(0, min(len(ends), self._most - len(self._waiting)))
            self._waiting.extend(ends[:taken])
            if self._thread is None and taken:
                self._thread = worker_thread(self._run, "signals", self._using)
                self._thread.start()
            self._changed.notify_all()
        if taken < len(ends):
            self._refusals += 1
            self._dropped += len(ends) - taken
            if is_worth_a_line(self._refusals):
                self._log_dropped()

    def close(self, timeout: float) -> None:
        """Wait for the queued deliveries to be sent, then drop the rest."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is None:
            return
        self._thread.join(timeout)
        with self._changed:
            self._dropped += len(self._waiting)
            self._waiting.clear()
        if self._dropped:
            self._log_dropped()

    def _log_dropped(self) -> None:
        event(logging.ERROR, "signal.dropped", signal="delivery_settled", deliveries=self._dropped)

    def _run(self) -> None:
        sessions.adopt(self._using, self._timeouts, watch=True)
        while (end := self._next()) is not None:
            self._send(end)

    def _next(self) -> Settled | None:
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            return self._waiting.popleft()

    def _send(self, end: Settled) -> None:
        try:
            sessions.refresh(idle=time.monotonic() - self._sent_at > sessions.IDLE)
            self._sent_at = time.monotonic()
            # A language or a tenant that a receiver sets for one delivery must not be set for the next one.
            contextvars.copy_context().run(send_settled, (end,))
            sessions.tidy()
        except Exception:  # noqa: BLE001
            event(logging.ERROR, "signal_thread.failed", exc_info=True)
            close_connections()
