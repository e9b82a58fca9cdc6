"""Async handlers on the process's one event loop."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import re
import threading

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import transaction
from django.utils import translation

from django_mysqlqueue import Message, publish_many, subscriber
from django_mysqlqueue.conf import Settings
from django_mysqlqueue.models import OutboxMessage, QueueMessage
from django_mysqlqueue.runtime.handling import stacks
from django_mysqlqueue.runtime.handling.event_loop import Loop
from django_mysqlqueue.runtime.process.subscriber import Subscriber
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.subscriptions import registry
from tests.app.models import Effect
from tests.support.async_handlers import run
from tests.support.harness import USING, in_thread, lag

pytestmark = pytest.mark.usefixtures("no_handlers")

SHORT = dataclasses.replace(Settings(), shutdown_timeout=2.0, poll_interval=0.02)


# -- handlers -----------------------------------------------------------------


def test_one_loop_for_all_messages_and_threads(db):
    loops, threads = set(), set()

    async def handle(delivery):
        loops.add(asyncio.get_running_loop())
        threads.add(threading.current_thread().name)
        await asyncio.sleep(0)

    run(handle, range(20))
    assert len(loops) == 1
    assert threads == {"mysqlqueue-loop"}
    assert all(loop.is_closed() for loop in loops)


@pytest.mark.servers_only  # one thread a process there
def test_handlers_of_several_threads_await_side_by_side(db):
    here, together = set(), []

    async def handle(delivery):
        here.add(delivery.payload)
        for _ in range(500):
            if len(here) == 3:
                together.append(delivery.payload)
                return
            await asyncio.sleep(0.01)

    run(handle, [Message(n, key=str(n)) for n in range(3)], threads=3)
    assert sorted(together) == [0, 1, 2]


def test_sync_code_runs_on_the_handlers_thread_and_connection(db):
    """So an async handler uses no more database connections than a sync one."""
    places = set()

    async def handle(delivery):
        await Effect.objects.acreate(name="async", value=delivery.payload)
        places.add(await sync_to_async(lambda: threading.current_thread().name)())
        assert await Effect.objects.filter(value=delivery.payload).acount() == 1

    run(handle, range(10), threads=1)
    assert places == {"mysqlqueue-handler-0"}
    assert Effect.objects.filter(name="async").count() == 10


def test_an_ack_in_a_sync_transaction_of_an_async_handler(db):
    @sync_to_async
    def store(delivery):
        with transaction.atomic():
            Effect.objects.create(name="async", value=delivery.payload)
            delivery.ack()

    async def handle(delivery):
        await store(delivery)

    run(handle, range(5))
    assert sorted(Effect.objects.values_list("value", flat=True)) == list(range(5))


# -- what handlers raise ------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError, KeyboardInterrupt])
def test_what_a_handler_raises_ends_the_attempt_and_not_the_loop(db, error):
    got = []

    async def handle(delivery):
        got.append(delivery.attempt)
        if delivery.attempt == 1:
            raise error

    run(handle, range(3), backoff={"initial": 0})
    assert sorted(got) == [1, 1, 1, 2, 2, 2]


def test_what_a_handler_leaves_running_is_cancelled_at_the_end(db):
    ended = []

    async def forever():
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    tasks = []

    async def handle(delivery):
        tasks.append(asyncio.ensure_future(forever()))
        await asyncio.sleep(0)

    run(handle, range(1))
    assert ended == ["cancelled"]


def test_async_batches(db):
    got = []

    async def handle(deliveries):
        await asyncio.sleep(0)
        got.append([delivery.payload for delivery in deliveries])

    run(handle, [Message(n, key="k") for n in range(7)], batch=True)
    assert [n for batch in got for n in batch] == list(range(7))


@pytest.mark.parametrize("options", [{}, {"timeout": 20, "reject_on": Exception, "retry_on": KeyError}])
def test_a_task_that_ends_the_loop_ends_the_process_and_costs_no_attempt(db, options):
    """asyncio lets SystemExit of a task through: every other async handler is cancelled with it."""
    got = []

    async def handle(delivery):
        got.append((delivery.payload, delivery.attempt))
        if delivery.payload == "exit":
            while ("wait", 1) not in got:  # one that is only about to begin would be a coroutine that nobody awaits
                await asyncio.sleep(0.01)

            async def leave():
                raise SystemExit(3)

            await asyncio.gather(leave())
        await asyncio.sleep(30)

    subscriber("t", group="g", max_attempts=1, **options)(handle)
    handlers = registry.handlers()
    publish_many("t", [Message("wait", key="a"), Message("exit", key="b")])
    process = Subscriber({USING: {GroupRef("g", "t"): handlers[GroupRef("g", "t")]}}, SHORT, threads={USING: 2})
    assert in_thread(process.run) == 1
    assert ("exit", 1) in got
    assert not QueueMessage.objects.filter(topic="t_dlq").exists()
    assert not OutboxMessage.objects.filter(topic="t_dlq").exists()
    assert lag() == 2


def test_a_loop_that_cannot_be_made_is_an_error(monkeypatch):
    def fails(main):
        main.close()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio, "run", fails)
    with pytest.raises(RuntimeError, match="cannot be created"):
        Loop("default").start()


TENANT = contextvars.ContextVar("TENANT", default="nobody")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_context_variables_of_one_message_do_not_reach_the_next(db, kind):
    seen = []

    def work(delivery):
        seen.append((TENANT.get(), translation.get_language()))
        TENANT.set("ada")
        translation.activate("de")

    async def later(delivery):
        work(delivery)

    run(work if kind == "sync" else later, range(4), threads=1)
    assert seen == [("nobody", "en-us")] * 4


def test_the_stacks_show_what_a_task_waits_for():
    """A thread's stack shows only that it waits for the loop, and the loop's that it waits for anything."""
    loop, go = Loop("default"), threading.Event()
    waits = threading.Event()

    async def inner(end):
        await end.wait()

    async def handle():
        end = asyncio.Event()
        asyncio.get_running_loop().create_task(look(end), name="look")
        await inner(end)

    async def look(end):
        waits.set()  # the other task has begun before, so it waits by now
        while not go.is_set():
            await asyncio.sleep(0.01)
        end.set()

    def run():
        loop.adopt()
        async_to_sync(handle)()

    loop.start()
    thread = threading.Thread(target=run, name="a handler's thread")
    thread.start()
    try:
        assert waits.wait(10)
        text = stacks.show(loop.tasks(), first=thread.ident)
    finally:
        go.set()
        thread.join(10)
        loop.stop(10)
    assert text.startswith("Thread a handler's thread:\n")
    assert {"Thread MainThread:", "Thread mysqlqueue-loop:", "Task look:"} <= set(text.splitlines())
    (task,) = [block for block in text.split("\nTask ")[1:] if ", in handle\n" in block]
    calls = re.findall(r"^  File .*, in (\w+)\n    (.*)$", task, re.MULTILINE)
    assert ("handle", "await inner(end)") in calls
    assert ("inner", "await end.wait()") in calls


def test_a_stack_is_shown_to_a_bounded_depth():
    deep, go = threading.Event(), threading.Event()

    def dive(depth):
        if depth:
            return dive(depth - 1) + 1
        deep.set()
        return go.wait(10) or 0

    thread = threading.Thread(target=dive, args=(500,))
    thread.start()
    try:
        assert deep.wait(10)
        text = stacks.show(first=thread.ident)
    finally:
        go.set()
        thread.join(10)
    own = text.split("\nThread ")[0]
    assert "go.wait(10)" in own, "the innermost calls are what counts"
    assert len(own.splitlines()) < 3 * stacks.DEPTH
