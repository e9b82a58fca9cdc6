"""The event loop of async handlers: one for the lifetime of a subscriber process.

A client at module level, such as an HTTP client, keeps its connections from message to message.

A task or callback that raises SystemExit or KeyboardInterrupt makes asyncio leave the loop, after it has stored the
error in the task as any other one. So the loop is entered again: what awaits the task fails with the error, and no
other handler notices it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asgiref.sync import SyncToAsync

from django_mysqlqueue.runtime.handling import stacks
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.runtime.threads import worker_thread

T = TypeVar("T")
BLOCKED_CHECKS = 5
"""Checks in a row that find the loop blocked, after which the log says so. They are counted, because a process that is
frozen makes none."""
_lent = threading.local()


def adopt_lent() -> None:
    """Let ``async_to_sync`` in this thread use the process's loop, which starts if necessary, if it was lent to it."""
    loop: Loop | None = getattr(_lent, "loop", None)
    if loop is not None:
        loop.start()
        loop.adopt()


def _refuse_nested_runs(loop: asyncio.BaseEventLoop) -> None:
    """Refuse to run a loop that runs. Python 3.13.0 refuses it, too, but then forgets that the loop runs."""
    run = loop.run_forever

    def run_forever() -> None:
        if loop.is_running():
            raise RuntimeError("This event loop is already running")
        run()

    vars(loop)["run_forever"] = run_forever


class Loop:
    """A thread that runs one event loop until it is stopped. Its methods may be called in any thread.

    Args:
        using: alias of the database whose handlers use the loop.
    """

    def __init__(self, using: str) -> None:
        self._ready = threading.Event()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._first: list[Callable[[], object]] = []
        """What the loop calls when it begins."""
        self._is_begun = self._stopped = False
        self.died = False
        """Whether the loop itself has failed. The process then cannot run async handlers any more, and those that run
        do not end."""
        self._is_answered = True
        """Whether the loop has answered the latest check."""
        self._checks = 0
        """Number of checks since then."""
        self._asked_at = 0.0
        self._thread = worker_thread(self._run, "loop", using)

    def start(self) -> None:
        """Start the thread, and return when the loop runs.

        Raises:
            RuntimeError: the loop cannot be created.
        """
        self.call(self._ready.set)
        self._ready.wait()
        if self._loop is None:
            raise RuntimeError("The event loop of the async handlers cannot be created.")

    def call(self, function: Callable[[], object]) -> None:
        """Let the loop call a function soon, and start it if it does not run."""
        with self._lock:
            if self._loop is None:
                self._first.append(function)
                if not self._is_begun:
                    self._is_begun = True
                    self._thread.start()
                return
        if threading.get_ident() == self._thread.ident:
            self._loop.call_soon(function)
            return
        with contextlib.suppress(RuntimeError):  # It is closed: the process ends.
            self._loop.call_soon_threadsafe(function)

    def call_later(self, seconds: float, function: Callable[[], object]) -> asyncio.TimerHandle:
        """Let the loop, in whose thread this is called, call a function after some time."""
        return self._running().call_later(seconds, function)

    def create_task(
        self, coroutine: Coroutine[Any, Any, T], name: str, context: contextvars.Context
    ) -> asyncio.Task[T]:
        """Return a task of the loop, in whose thread this is called."""
        return self._running().create_task(coroutine, name=name, context=context)

    def stop(self, timeout: float) -> None:
        """Cancel the tasks that handlers left behind, stop the loop, and wait for its end."""
        self._stopped = True
        if self._loop is not None and self._thread.is_alive():
            self.call(self._loop.stop)
            self._thread.join(timeout)

    def tasks(self) -> set[asyncio.Task[object]]:
        """Return the tasks that have not ended."""
        return set() if self._loop is None else asyncio.all_tasks(self._loop)

    def lend(self) -> None:
        """Let this thread call ``adopt_lent``."""
        _lent.loop = self

    def adopt(self) -> None:
        """Make ``async_to_sync`` in this thread run its coroutines on this loop.

        Sync code that they call through ``sync_to_async`` runs in this thread, with its connections. asgiref sets the
        same attributes in a thread that a loop has started; without them, each call gets a loop of its own.
        """
        SyncToAsync.threadlocal.main_event_loop = self._loop
        SyncToAsync.threadlocal.main_event_loop_pid = os.getpid()

    def check(self) -> None:
        """Log, about a second after a coroutine has begun to block the loop, what it does. Call it five times a second.

        All others wait for it.
        """
        if self._loop is None or self._stopped or self.died:
            return
        if self._is_answered:
            self._is_answered, self._checks, self._asked_at = False, 0, time.monotonic()
            self.call(self._answer)
            return
        self._checks += 1
        if self._checks == BLOCKED_CHECKS:
            task = asyncio.current_task(self._loop)
            event(
                logging.WARNING,
                "event_loop.blocked",
                stacks=stacks.of_thread(self._thread),
                task="a callback" if task is None else task.get_name(),
                seconds=round(time.monotonic() - self._asked_at, 1),
            )

    def _answer(self) -> None:
        self._is_answered = True

    def _running(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None  # noqa: S101
        return self._loop

    def _run(self) -> None:
        try:
            runner = asyncio.Runner()
            loop = runner.get_loop()
            if isinstance(loop, asyncio.BaseEventLoop):
                _refuse_nested_runs(loop)
            with self._lock:
                self._loop = loop
                for function in self._first:
                    loop.call_soon(function)
            while not self._stopped:
                self._interruptible(loop.run_forever)
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
