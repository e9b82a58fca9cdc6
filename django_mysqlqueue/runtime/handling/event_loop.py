"""The event loop of async handlers: one for the lifetime of a subscriber process.

By itself, ``async_to_sync`` creates a loop for each call. An HTTP client's connection pool would then stay behind on a
closed loop after each message.

A task or callback that raises SystemExit or KeyboardInterrupt makes asyncio leave the loop, after it has stored the
error in the task as any other one. So the loop is entered again: what awaits the task fails with the error, and no
other handler notices it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable

from asgiref.sync import SyncToAsync

from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.runtime.threads import worker_thread


def _refuse_nested_runs(loop: asyncio.BaseEventLoop) -> None:
    """Refuse to run a loop that runs. Python 3.13.0 refuses it, too, but then forgets that the loop runs."""
    run = loop.run_forever

    def run_forever() -> None:
        if loop.is_running():
            raise RuntimeError("This event loop is already running")
        run()

    vars(loop)["run_forever"] = run_forever


class Loop:
    """A thread that runs one event loop until it is stopped.

    Args:
        using: alias of the database whose handlers use the loop.
    """

    def __init__(self, using: str) -> None:
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self.died = False
        """Whether the loop itself has failed. The process then cannot run async handlers any more, and those that run
        do not end."""
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

    def stop(self, timeout: float) -> None:
        """Cancel the tasks that handlers left behind, stop the loop, and wait for its end."""
        self._stopped = True
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
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
            runner = asyncio.Runner()
            self._loop = runner.get_loop()
            if isinstance(self._loop, asyncio.BaseEventLoop):
                _refuse_nested_runs(self._loop)
            self._loop.call_soon(self._ready.set)
            while not self._stopped:
                self._interruptible(self._loop.run_forever)
            self._interruptible(runner.close)
        except BaseException:  # noqa: BLE001
            event(logging.CRITICAL, "event_loop.died", exc_info=True)
            self.died = True
        finally:
            self._ready.set()

    def _interruptible(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (SystemExit, KeyboardInterrupt):
            event(logging.WARNING, "event_loop.interrupted", exc_info=True)
