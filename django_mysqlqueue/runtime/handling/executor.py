"""What runs user code: handler threads, each one call at a time, and the event loop."""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Sequence

from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.handling import stacks
from django_mysqlqueue.runtime.handling.call import REST, broke_down, handle
from django_mysqlqueue.runtime.handling.coroutines import Coroutines
from django_mysqlqueue.runtime.handling.event_loop import Loop
from django_mysqlqueue.runtime.handling.inbox import Inbox
from django_mysqlqueue.runtime.handling.lanes import Batch
from django_mysqlqueue.runtime.handling.sync_threads import SyncThreads
from django_mysqlqueue.runtime.log import delivery_fields, event
from django_mysqlqueue.runtime.threads import worker_thread
from django_mysqlqueue.service.deliveries import Settlement
from django_mysqlqueue.sql.connection import close_connections


class Executor:
    """A pool of handler threads, and an event loop, that take deliveries from the inbox until it closes.

    Args:
        inbox: the inbox to take deliveries from.
        using: alias of the queue's database.
        threads: number of threads for sync handlers, and as many, at most, for sync code of async ones.
        timeouts: session timeouts of the threads' connections.
        with_loop: whether to start the event loop at once. Otherwise, the first delivery for it does.
        rest: the pause of a thread after it could not connect.
    """

    def __init__(
        self,
        inbox: Inbox,
        using: str,
        *,
        threads: int,
        timeouts: sessions.Timeouts,
        with_loop: bool = False,
        rest: Backoff = REST,
    ) -> None:
        self._inbox = inbox
        self._rest = rest
        self._using = using
        self._timeouts = timeouts
        self._with_loop = with_loop
        self._loop = Loop(using)
        self._sync_threads = SyncThreads(using, most=max(1, threads), timeouts=timeouts)
        self._coroutines = Coroutines(inbox, using, self._loop, self._sync_threads)
        self._threads = [worker_thread(self._run, f"handler-{number}", using) for number in range(threads)]

    def start(self) -> None:
        """Start the threads, and the event loop if it is known to be needed."""
        if self._with_loop:
            self._loop.start()
        for thread in self._threads:
            thread.start()

    def is_broken(self) -> bool:
        """Return whether async handlers can no longer run, because the event loop has died."""
        return self._loop.died

    def check_loop(self) -> None:
        """Log what blocks the event loop, if something does. See ``Loop.check``."""
        self._loop.check()

    def stacks(self, first: object = None) -> str:
        """Return the stacks of all threads of the process and of the tasks of async handlers.

        ``first``: identifier of the thread, or the task, that comes first.
        """
        return stacks.show(self._loop.tasks(), first=first)

    def join(self, timeout: float) -> None:
        """Wait, after the inbox was closed, for each thread and the event loop to end."""
        for thread in self._threads:
            thread.join(timeout)
        self._loop.stop(timeout)
        self._sync_threads.stop(timeout)

    def _run(self) -> None:
        sessions.adopt(self._using, self._timeouts, watch=True)
        self._loop.lend()
        if self._with_loop:
            self._loop.adopt()
        batch: Batch | None = None
        began_at = time.monotonic()
        while (batch := self._inbox.take(batch)) is not None:
            # Measured from the start of the previous call: during a slow handler, connections are idle too.
            idle = time.monotonic() - began_at > sessions.IDLE
            began_at = time.monotonic()
            self._inbox.finish(batch, self._safely(batch, idle=idle))

    def _safely(self, batch: Batch, *, idle: bool = False) -> Sequence[Settlement]:
        """Handle a batch. Even after an error every delivery gets a settlement, and the thread continues."""
        try:
            sessions.refresh(idle=idle)
        except Exception:  # noqa: BLE001
            self._recover(batch)
        try:
            # A language or a tenant that is set for one message must not be set for the next one.
            context = contextvars.copy_context()
            settlements = context.run(handle, batch.items, self._using, rest=self._rest)
        except BaseException:  # noqa: BLE001
            close_connections()
            return broke_down(batch.items)
        try:
            sessions.tidy()
        except Exception:  # noqa: BLE001
            self._recover(batch)
        return settlements

    def _recover(self, batch: Batch) -> None:
        """Log the error that is being handled, and let the thread continue with new connections."""
        event(logging.ERROR, "handler_thread.failed", **delivery_fields(batch.items[0].claimed), exc_info=True)
        close_connections()
