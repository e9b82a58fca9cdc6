"""Calls of async handlers, each of which is a task of the process's event loop and holds no thread."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Collection
from concurrent.futures import Future
from functools import partial
from typing import Any

from asgiref.sync import SyncToAsync, ThreadSensitiveContext

from django_mysqlqueue.runtime.handling.call import broke_down, handle_async
from django_mysqlqueue.runtime.handling.event_loop import Loop
from django_mysqlqueue.runtime.handling.inbox import Inbox
from django_mysqlqueue.runtime.handling.lanes import Batch
from django_mysqlqueue.runtime.handling.sync_threads import SyncThreads, sync_code
from django_mysqlqueue.service.deliveries import Settlement
from django_mysqlqueue.service.refs import GroupRef


class Coroutines:
    """Take deliveries of async handlers from the inbox, and call the handlers on the event loop.

    All but the constructor runs in the loop's thread.
    """

    def __init__(self, inbox: Inbox, using: str, loop: Loop, threads: SyncThreads) -> None:
        self._inbox = inbox
        self._using = using
        self._loop = loop
        self._threads = threads
        self._tasks: set[asyncio.Task[list[Settlement]]] = set()
        """Those that run. The loop keeps only weak references."""
        self._contexts: dict[GroupRef, contextvars.Context] = {}
        self._timer: asyncio.TimerHandle | None = None
        inbox.wake_loop = lambda: loop.call(self._take)

    def _take(self) -> None:
        """Start what there is room for."""
        batches, again = self._inbox.take_for_loop()
        for batch in batches:
            first = batch.items[0]
            job = first.claimed.job
            where = first.handler.where if job is None else f"{job.task}, job {job.id}"
            name = f"{where}, offset {first.claimed.offset}"
            # Nothing that was set for one message, such as a language, is set for another.
            task = self._loop.create_task(self._run(batch), name, self._context(first.claimed.ref).copy())
            self._tasks.add(task)
            # Not at the end of the coroutine: it is not even entered if a handler cancels all tasks that it finds.
            task.add_done_callback(partial(self._ended, batch))
            for held in batch.items:
                held.place = task
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if again is None else self._loop.call_later(again, self._take)

    async def _run(self, batch: Batch) -> list[Settlement]:
        code: set[Future[Any]] = set()
        sync_code.set(code)
        try:
            return await handle_async(batch.items, self._using)
        finally:
            if code:
                await _wait_for(tuple(code))

    def _ended(self, batch: Batch, task: asyncio.Task[list[Settlement]]) -> None:
        self._tasks.discard(task)
        try:
            settlements = task.result()
        except BaseException:  # noqa: BLE001
            settlements = broke_down(batch.items)
        self._inbox.finish(batch, settlements)

    def _context(self, ref: GroupRef) -> contextvars.Context:
        """Return the context of a group's calls, in which ``sync_to_async`` uses the threads for synchronous code."""
        context = self._contexts.get(ref)
        if context is None:
            context = self._contexts[ref] = contextvars.Context()
            place = ThreadSensitiveContext()
            SyncToAsync.context_to_thread_executor[place] = self._threads.of(ref)
            context.run(SyncToAsync.thread_sensitive_context.set, place)
        return context


async def _wait_for(code: Collection[Future[Any]]) -> None:
    """Wait, even if cancelled, for synchronous code that a call has left running, for example at its ``timeout``.

    A thread cannot be stopped, and neither the next attempt nor the next message of the partition may run beside it.
    """
    ended = asyncio.gather(*map(asyncio.wrap_future, code), return_exceptions=True)
    while not ended.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(ended)
