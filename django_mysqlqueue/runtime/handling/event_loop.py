"""The event loop of async handlers: one for the lifetime of a subscriber process.

By itself, ``async_to_sync`` creates a loop for each call. An HTTP client's connection pool would then stay behind on a
closed loop after each message.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading

from asgiref.sync import SyncToAsync

from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.runtime.threads import worker_thread


class Loop:
    """A thread that runs one event loop until it is stopped.

    Args:
        using: alias of the database whose handlers use the loop.
    """

    def __init__(self, using: str) -> None:
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._stopped = False
        self.died = False
        """Whether the loop has ended without ``stop``. The process then cannot run async handlers any more."""
        self._thread = worker_thread(self._run, "loop", using)

    def start(self) -> None:
        """Start the thread, and return when the loop runs.

        Raises:
            RuntimeError: the loop cannot be created.
        """
        self._thread.start()
        self._ready.wait()
        if self._loop is None:
            raise RuntimeError("The event loop of the async handlers cannot be created.")

    def dies(self, *, within: float) -> bool:
        """Wait for the loop to die, and return whether it did. A dying loop first cancels all tasks.

        Args:
            within: seconds to wait.
        """
        if not self._stopped:
            self._thread.join(within)
        return self.died

    def stop(self, timeout: float) -> None:
        """Cancel the tasks that handlers left behind, stop the loop, and wait for its end.

        Args:
            timeout: maximum number of seconds to wait.
        """
        self._stopped = True
        if self._loop is not None and self._end is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(timeout)

    def tasks(self) -> set[asyncio.Task[object]]:
        """Return the tasks that have not ended. Any thread may call this."""
        return set() if self._loop is None else asyncio.all_tasks(self._loop)

    def adopt(self) -> None:
        """Make ``async_to_sync`` in this thread run its coroutines on this loop.

        Sync code that they call through ``sync_to_async`` runs in this thread, with its connections. asgiref sets the
        same attributes in a thread that a loop has started; without them, each call gets a loop of its own.
        """
        SyncToAsync.threadlocal.main_event_loop = self._loop
        SyncToAsync.threadlocal.main_event_loop_pid = os.getpid()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException:  # noqa: BLE001
            # A task that a handler has created and that raises SystemExit or KeyboardInterrupt ends the whole loop.
            event(logging.CRITICAL, "event_loop.died", exc_info=True)
        finally:
            self.died = not self._stopped
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._ready.set()
        await self._end.wait()
