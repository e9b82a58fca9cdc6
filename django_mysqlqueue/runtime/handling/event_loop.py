"""The event loop of async handlers: one for the whole life of a subscriber process.

A loop for each message, as ``async_to_sync`` makes one on its own, would leave
an HTTP client's pool behind on a closed loop every time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading

from asgiref.sync import SyncToAsync

from django_mysqlqueue.runtime.log import event


class Loop:
    """A thread that runs one event loop until it is stopped."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._stopped = False
        self.died = False
        """It has ended although nobody stopped it: the process is of no more use."""
        self._thread = threading.Thread(target=self._run, name="mysqlqueue-loop", daemon=True)

    def start(self) -> None:
        """Returns when the loop runs.

        Raises:
            RuntimeError: it cannot be made.
        """
        self._thread.start()
        self._ready.wait()
        if self._loop is None:
            raise RuntimeError("The event loop of the async handlers cannot be made.")

    def dies(self, *, within: float) -> bool:
        """Whether the loop ends unasked in the next seconds; it cancels everything first."""
        if not self._stopped:
            self._thread.join(within)
        return self.died

    def stop(self, timeout: float) -> None:
        """Cancels the tasks that handlers left behind, ends the loop, and waits for that (seconds)."""
        self._stopped = True
        if self._loop is not None and self._end is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(timeout)

    def tasks(self) -> set[asyncio.Task[object]]:
        """The tasks that have not ended. For any thread."""
        return set() if self._loop is None else asyncio.all_tasks(self._loop)

    def adopt(self) -> None:
        """Makes ``async_to_sync`` in this thread run its coroutines on the loop.

        Sync code that these call by ``sync_to_async`` comes back to this thread
        and its connections. It is what asgiref itself sets in a thread that a
        loop has started; without it every call gets a loop of its own.
        """
        SyncToAsync.threadlocal.main_event_loop = self._loop
        SyncToAsync.threadlocal.main_event_loop_pid = os.getpid()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException:  # noqa: BLE001
            # A task of a handler's own that raises SystemExit or KeyboardInterrupt ends the whole loop.
            event(logging.CRITICAL, "loop.died", exc_info=True)
        finally:
            self.died = not self._stopped
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._ready.set()
        await self._end.wait()
