"""Async handlers on the process's one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import re
import sys
import threading

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, transaction
from django.utils import translation

from django_mysqlqueue import Message, publish_many, subscriber
from django_mysqlqueue.models import QueueMessage
from tests.app.models import Effect
from tests.support.async_handlers import run
from tests.support.harness import USING, in_thread, lag, sequence
from tests.support.internals import GroupRef, Loop, Settings, Subscriber, registry, stacks

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


def test_sync_code_runs_on_few_threads_and_their_connections(db):
    """So a hundred async handlers use no more database connections than THREADS sync ones."""
    places, used = set(), set()

    @sync_to_async
    def look():
        places.add(threading.current_thread().name)
        used.add(id(connection.connection))

    async def handle(delivery):
        await Effect.objects.acreate(name="async", value=delivery.payload)
        await look()
        assert await Effect.objects.filter(value=delivery.payload).acount() == 1

    run(handle, [Message(n, key=str(n)) for n in range(10)], threads=1)
    assert places == {"mysqlqueue-sync-0"}
    assert len(used) == 1
    assert Effect.objects.filter(name="async").count() == 10


def test_async_code_of_sync_code_of_an_async_handler_has_its_connection(db):
    """What it calls through ``async_to_sync`` takes part in its transaction, and in no other thread."""
    seen = []

    async def count():
        here = await sync_to_async(lambda: (threading.current_thread(), connection.in_atomic_block))()
        return await Effect.objects.acount(), *here

    @sync_to_async
    def write(delivery):
        with transaction.atomic():
            Effect.objects.create(name="async", value=delivery.payload)
            seen.append((*async_to_sync(count)(), threading.current_thread()))
            transaction.set_rollback(True)

    async def handle(delivery):
        await write(delivery)

    run(handle, range(5), threads=2)
    assert [(number, in_block) for number, _, in_block, _ in seen] == [(1, True)] * 5
    assert all(inner is outer for _, inner, _, outer in seen)
    assert not Effect.objects.exists()


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


async def fail(error):
    raise error


async def gathers(error):
    await asyncio.gather(asyncio.sleep(30), fail(error))


async def awaits_a_task(error):
    await asyncio.create_task(fail(error))


async def waits_for_a_task(error):
    done, _ = await asyncio.wait([asyncio.create_task(fail(error))])
    done.pop().result()


async def has_a_task_group(error):
    async with asyncio.TaskGroup() as group:
        group.create_task(fail(error))


async def is_told_by_a_callback(error):
    future = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(fail(error))
    task.add_done_callback(lambda task: future.set_exception(task.exception()))
    await future


async def runs_sync_code(error):
    def code():
        raise error

    await asyncio.gather(sync_to_async(code)())


class Odd(BaseException):
    """Neither an Exception nor one that asyncio knows."""


AWAITED = [
    *((gathers, error) for error in (KeyboardInterrupt, Odd, GeneratorExit, asyncio.CancelledError)),
    *((awaits, SystemExit) for awaits in (gathers, awaits_a_task, waits_for_a_task, is_told_by_a_callback)),
    *((runs_sync_code, error) for error in (SystemExit, KeyboardInterrupt)),
    *((has_a_task_group, error) for error in (SystemExit, KeyboardInterrupt)),
]


def healthy_and(poison, **options):
    """Runs ``poison`` among healthy messages, which all wait for each other's loop; returns the attempts of each."""
    got, loops = [], set()

    async def handle(delivery):
        got.append((delivery.payload, delivery.attempt))
        loops.add(asyncio.get_running_loop())
        if delivery.payload == "poison":
            await poison()
        await asyncio.sleep(0.01)

    messages = [Message("poison" if n == 3 else n, key=str(n)) for n in range(12)]
    executor = run(handle, messages, backoff={"initial": 0}, threads=4, **options)
    assert not executor.is_broken()
    assert len(loops) == 1
    assert sorted(one for one in got if one[0] != "poison") == [(n, 1) for n in range(12) if n != 3]
    return [attempt for payload, attempt in got if payload == "poison"]


def dead_letters():
    sequence()
    return QueueMessage.objects.filter(topic="t_dlq").count()


@pytest.mark.promise("Poison messages")
@pytest.mark.parametrize(("awaits", "error"), AWAITED)
def test_what_a_task_raises_is_an_attempt_of_the_message_that_awaits_it(db, awaits, error):
    """asyncio leaves the loop for SystemExit and KeyboardInterrupt; others are not to notice it."""
    assert healthy_and(lambda: awaits(error), max_attempts=3) == [1, 2, 3]
    assert dead_letters() == 1


@pytest.mark.parametrize("options", [{"timeout": 20}, {"reject_on": Exception, "retry_on": KeyError}])
def test_options_of_the_handler_change_nothing_of_that(db, options):
    assert healthy_and(lambda: gathers(SystemExit), max_attempts=2, **options) == [1, 2]
    assert dead_letters() == 1


async def stops_the_loop():
    asyncio.get_running_loop().stop()


async def has_a_callback_that_exits():
    asyncio.get_running_loop().call_soon(sys.exit, 1)
    asyncio.get_running_loop().call_soon(fail_now, KeyboardInterrupt)


async def leaves_a_task_that_exits():
    asyncio.create_task(fail(SystemExit(3)))  # noqa: RUF006


async def has_an_error_handler_that_exits():
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: sys.exit(3))
    loop.call_soon(fail_now, ValueError)


def fail_now(error):
    raise error


@pytest.mark.parametrize(
    "poison", [stops_the_loop, has_a_callback_that_exits, leaves_a_task_that_exits, has_an_error_handler_that_exits]
)
def test_what_nothing_awaits_is_no_failure(db, poison):
    """As with any other error of such a task or callback."""
    assert healthy_and(poison, max_attempts=2) == [1]
    assert not dead_letters()


async def closes_the_loop():
    asyncio.get_running_loop().close()


async def runs_the_loop():
    asyncio.get_running_loop().run_forever()


@pytest.mark.parametrize("poison", [closes_the_loop, runs_the_loop])
def test_what_asyncio_refuses_is_an_attempt(db, poison):
    assert healthy_and(poison, max_attempts=2) == [1, 2]
    assert dead_letters() == 1


def test_a_batch_that_gathers_a_keyboard_interrupt(db):
    """Its neighbours have an attempt with it, as with any error in a batch, and are then handled alone."""
    got = []

    async def handle(deliveries):
        got.append([delivery.payload for delivery in deliveries])
        if 3 in got[-1]:
            await gathers(KeyboardInterrupt)

    run(handle, [Message(n, key="k") for n in range(7)], batch=True, max_attempts=3, backoff={"initial": 0})
    assert [batch for batch in got if 3 in batch and len(batch) == 1] == [[3], [3]]
    assert {n for batch in got for n in batch} == set(range(7))
    assert dead_letters() == 1


def test_a_task_that_exits_when_it_is_cancelled_at_the_end(db, caplog):
    async def forever():
        try:
            await asyncio.sleep(3600)
        finally:
            sys.exit(3)

    async def handle(delivery):
        tasks.append(asyncio.create_task(forever()))
        await asyncio.sleep(0)

    tasks = []
    executor = run(handle, range(1))
    assert "event_loop.interrupted" in caplog.text
    assert not executor.is_broken()


@pytest.mark.promise("Poison messages")
def test_a_process_whose_message_exits_goes_on(db):
    """It did not: it ended, no attempt was counted, and the message came again, for ever."""
    got = []

    async def handle(delivery):
        got.append((delivery.payload, delivery.attempt))
        if delivery.payload == "exit":
            await gathers(SystemExit(1))
        await asyncio.sleep(0)

    subscriber("t", group="g", max_attempts=3, backoff={"initial": 0})(handle)
    chosen = {GroupRef("g", "t"): registry.handlers()[GroupRef("g", "t")]}
    publish_many("t", [Message("exit" if n == 5 else n, key=str(n)) for n in range(30)])
    process = Subscriber({USING: chosen}, SHORT, threads={USING: 2}, drain=True)
    assert in_thread(process.run) == 0
    assert sorted(one for one in got if one[0] != "exit") == [(n, 1) for n in range(30) if n != 5]
    assert [attempt for payload, attempt in got if payload == "exit"] == [1, 2, 3]
    assert dead_letters() == 1
    assert lag() == 0


def test_a_loop_that_fails_itself_ends_the_process_and_costs_no_attempt(db, monkeypatch):
    """What runs on it does not end, so it is left to others, as if the handler hung."""
    got = []

    async def handle(delivery):
        got.append(delivery.attempt)
        if len(got) == 2:
            monkeypatch.setattr(type(asyncio.get_running_loop()), "_run_once", fails_once)
        await asyncio.sleep(30)

    def fails_once(loop):
        monkeypatch.undo()
        raise OSError(9, "Bad file descriptor")

    subscriber("t", group="g", max_attempts=1)(handle)
    chosen = {GroupRef("g", "t"): registry.handlers()[GroupRef("g", "t")]}
    publish_many("t", [Message(n, key=str(n)) for n in range(2)])
    process = Subscriber({USING: chosen}, SHORT, threads={USING: 2})
    assert in_thread(process.run) == 1
    assert got == [1, 1]
    assert not dead_letters()
    assert lag() == 2
    with contextlib.closing(process.workers[0].executor._loop._loop) as loop:  # so that the threads end
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.1))


def test_a_loop_that_cannot_be_made_is_an_error(monkeypatch):
    def fails():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio, "new_event_loop", fails)
    monkeypatch.setattr(asyncio.events, "new_event_loop", fails)
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
