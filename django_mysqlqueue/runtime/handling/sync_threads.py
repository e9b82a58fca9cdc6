"""Threads for the synchronous code of async handlers: the ORM, and what they call through ``sync_to_async``."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from functools import partial
from typing import Any, ParamSpec, TypeVar

from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.handling.call import run_code
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.runtime.threads import worker_thread
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import close_connections

P = ParamSpec("P")
T = TypeVar("T")

sync_code: ContextVar[set[Future[Any]]] = ContextVar("sync_code")
"""The synchronous code of a call that waits for a thread or runs."""


class SyncThreads:
    """A pool of threads that start when they are needed, with the same care for connections as handler threads.

    A ``ThreadPoolExecutor`` would leave the connections of its threads open at their end.

    Args:
        using: alias of the queue's database.
        most: maximum number of threads.
        timeouts: session timeouts of the threads' connections.
    """

    def __init__(self, using: str, *, most: int, timeouts: sessions.Timeouts) -> None:
        self._using = using
        self._most = most
        self._timeouts = timeouts
        self._work: queue.SimpleQueue[tuple[Future[Any], GroupRef, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        """Counts the threads that wait for work."""
        self._threads: list[threading.Thread] = []

    def of(self, ref: GroupRef) -> Executor:
        """Return an executor for the code of a group's handler."""
        return _OfGroup(self, ref)

    def submit(self, ref: GroupRef, function: Callable[[], T]) -> Future[T]:
        """Run a function of a group in the next free thread. Only the loop's thread calls this."""
        future: Future[T] = Future()
        self._work.put((future, ref, function))
        if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
            thread = worker_thread(self._run, f"sync-{len(self._threads)}", self._using)
            self._threads.append(thread)
            thread.start()
        return future

    def stop(self, timeout: float) -> None:
        """Let each thread end after its function, and wait for it."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(timeout)

    def _run(self) -> None:
        sessions.adopt(self._using, self._timeouts, watch=True)
        began_at = time.monotonic()
        while (work := self._work.get()) is not None:
            future, ref, function = work
            idle = time.monotonic() - began_at > sessions.IDLE
            began_at = time.monotonic()
            if not future.set_running_or_notify_cancel():
                self._idle.release()
                continue
            _recovering(ref, partial(sessions.refresh, idle=idle))
            try:
                settle = partial(future.set_result, run_code(ref, function))
            except BaseException as error:  # noqa: BLE001  # The future raises it.
                settle = partial(future.set_exception, error)
            _recovering(ref, sessions.tidy)
            # Before its caller goes on: what that calls next shall not start another thread, with another connection.
            self._idle.release()
            settle()
            del work, future, function, settle


class _OfGroup(Executor):
    """The pool, for one group."""

    def __init__(self, pool: SyncThreads, ref: GroupRef) -> None:
        self._pool = pool
        self._ref = ref

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run the function, as an ``Executor``."""
        future = self._pool.submit(self._ref, partial(function, *args, **kwargs))
        if (code := sync_code.get(None)) is not None:
            code.add(future)
            future.add_done_callback(code.discard)
        return future


def _recovering(ref: GroupRef, action: Callable[[], None]) -> None:
    """Prepare or clean up this thread's connections; after an error, let the thread continue with new ones."""
    try:
        action()
    except Exception:  # noqa: BLE001
        event(logging.ERROR, "handler_thread.failed", group=ref.group, topic=ref.topic, exc_info=True)
        close_connections()
