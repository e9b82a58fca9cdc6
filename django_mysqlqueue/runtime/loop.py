"""The event loop of async handlers: one for the whole life of a subscriber process.

A loop for each message, as ``async_to_sync`` makes one on its own, would leave
an HTTP client's pool behind on a closed loop every time.
"""

from __future__ import annotations

import asyncio
import os
import threading

from asgiref.sync import SyncToAsync


class Loop:
    """A thread that runs one event loop until it is stopped."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="mysqlqueue-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    def stop(self, timeout: float) -> None:
        """Cancels the tasks that handlers left behind, ends the loop, and waits for that (seconds)."""
        if self._loop is not None and self._end is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(timeout)

    def adopt(self) -> None:
        """Makes ``async_to_sync`` in this thread run its coroutines on the loop.

        Sync code that these call by ``sync_to_async`` comes back to this thread
        and its connections. It is what asgiref itself sets in a thread that a
        loop has started; without it every call gets a loop of its own.
        """
        SyncToAsync.threadlocal.main_event_loop = self._loop
        SyncToAsync.threadlocal.main_event_loop_pid = os.getpid()

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._ready.set()
        await self._end.wait()
