"""Runs async handlers on the threads and the event loop of an executor."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque

from django_mysqlqueue import publish_many, subscriber
from django_mysqlqueue.models import OutboxMessage
from tests.support.harness import USING, Sub, lag
from tests.support.internals import Executor, GroupRef, registry, sessions

TIMEOUTS = sessions.Timeouts(idle=60, lock_wait=10, network=10, read=60)


def run(function, messages, *, threads=2, **options):
    """Runs a decorated function on real threads, or a real loop, until everything is settled."""
    subscriber("t", group="g", **options)(function)
    handler = registry.handlers()[GroupRef("g", "t")]
    publish_many("t", messages)
    sub = Sub(handler, threads=threads, concurrency=100)
    executor = Executor(sub.inbox, USING, threads=threads, timeouts=TIMEOUTS, with_loop=handler.is_async)
    executor.start()
    try:
        for _ in range(200):
            sub.step()
            sub.flush()
            if not lag():
                break
            sub.inbox.wait(0.05)
        assert lag() == 0
    finally:
        sub.inbox.close()
        executor.join(10)
    sub.leave()
    return executor


class Gate:
    """Where coroutines wait until the test lets them go on, and what it sees of them meanwhile."""

    def __init__(self):
        self.inside, self.entered = [], []
        self.most = 0
        self._waiting = deque()
        self._loop = None
        self._is_open = False

    async def enter(self, what):
        """Wait to be let go on."""
        self._loop = asyncio.get_running_loop()
        self.inside.append(what)
        self.entered.append(what)
        self.most = max(self.most, len(self.inside))
        future = self._loop.create_future()
        self._waiting.append(future)
        try:
            if self._is_open:
                await asyncio.sleep(0)
            else:
                await future
        finally:
            self.inside.remove(what)

    def let(self, number=1):
        """Let the first ones go on."""
        for _ in range(number):
            self._loop.call_soon_threadsafe(self._let_one)

    def _let_one(self):
        future = next(one for one in self._waiting if not one.done())
        future.set_result(None)

    def open(self):
        """Let all go on, and those that come."""
        self._is_open = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._let_all)

    def _let_all(self):
        for future in self._waiting:
            if not future.done():
                future.set_result(None)


def all_handled(*topics):
    """Return whether everything that was published is settled."""
    return not OutboxMessage.objects.exists() and not any(lag(topic=topic) for topic in topics or ("t",))


@contextlib.contextmanager
def working(*handlers, threads=1, concurrency=100, **options):
    """A subscriber whose threads and loop run; yields it, and what lets its poller go on until something is true."""
    sub = Sub(*handlers, threads=threads, concurrency=concurrency, **options)
    with_loop = any(one.is_async for one in handlers)
    executor = Executor(sub.inbox, USING, threads=threads, timeouts=TIMEOUTS, with_loop=with_loop)
    executor.start()

    def until(is_true):
        deadline = time.monotonic() + 60
        while True:
            sub.step()
            sub.flush()
            if is_true():
                return
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.002)

    try:
        yield sub, until
    finally:
        sub.leave()
        executor.join(60)
