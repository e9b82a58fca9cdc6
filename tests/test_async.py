"""Async publishing, and async handlers on the process's one event loop."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
import re
import threading
import time

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import connection, transaction
from django.utils import translation

from django_mysqlqueue import InvalidMessage, Message, apublish, apublish_many, publish, publish_many, subscriber
from django_mysqlqueue.conf import Settings
from django_mysqlqueue.models import DeliveryEvent, OutboxMessage, QueueMessage
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.handling import registry, stacks
from django_mysqlqueue.runtime.handling.event_loop import Loop
from django_mysqlqueue.runtime.handling.executor import Executor
from django_mysqlqueue.runtime.process.subscriber import Subscriber
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.testing import deliver_all
from tests.app.models import Effect
from tests.support.harness import USING, Sub, in_thread, lag

pytestmark = pytest.mark.usefixtures("no_handlers")

SHORT = dataclasses.replace(Settings(), shutdown_timeout=2.0, poll_interval=0.02)
TIMEOUTS = sessions.Timeouts(idle=60, lock_wait=10, network=10, read=60)


def parameters_of(function):
    return inspect.signature(function).parameters


def stored():
    return sorted(OutboxMessage.objects.values_list("topic", "partition_key", "message_id"))


# -- publishing ---------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), [(publish, apublish), (publish_many, apublish_many)])
def test_the_same_arguments(one, other):
    assert parameters_of(one).keys() == parameters_of(other).keys()
    for name, parameter in parameters_of(one).items():
        assert parameter.default == parameters_of(other)[name].default
    assert inspect.iscoroutinefunction(other)


def test_apublish(db):
    assert async_to_sync(apublish)("t", {"n": 1}, key="k", id="one") == "one"
    assert async_to_sync(apublish_many)("t", [Message(1, key="k", id="two"), Message(2, key="k", id="three")]) == 2
    assert stored() == [("t", "k", "one"), ("t", "k", "three"), ("t", "k", "two")]


def test_apublish_many_takes_an_async_iterable(db):
    async def messages():
        for number in range(3):
            await asyncio.sleep(0)
            yield Message(number, key="k", id=str(number))

    assert async_to_sync(apublish_many)("t", messages()) == 3
    assert [message_id for _, _, message_id in stored()] == ["0", "1", "2"]


def test_apublish_refuses_what_publish_refuses(db):
    with pytest.raises(InvalidMessage, match="topic 'a b'"):
        async_to_sync(apublish)("a b", 1)
    with pytest.raises(InvalidMessage, match="message 1"):
        async_to_sync(apublish_many)("t", [1, object()])
    assert stored() == []


def test_it_joins_no_transaction_of_async_code(db):
    """Each commits by itself: what fails after it does not take it back."""

    async def work():
        await apublish("t", 1, key="k", id="kept")
        raise ValueError("after it")

    def run():  # as a server does: the loop is outermost
        with pytest.raises(ValueError, match="after it"):
            asyncio.run(work())
        asyncio.run(sync_to_async(lambda: connection.close())())  # that of asgiref's thread

    in_thread(run)
    assert stored() == [("t", "k", "kept")]


def test_one_sync_function_publishes_with_its_data(db):
    @sync_to_async
    def place():
        with transaction.atomic():
            Effect.objects.create(name="order")
            publish("t", 1)
            raise ValueError("both or neither")

    with pytest.raises(ValueError, match="both or neither"):
        async_to_sync(place)()
    assert stored() == []
    assert not Effect.objects.exists()


# -- handlers -----------------------------------------------------------------


def run(function, messages, *, threads=2, **options):
    """Runs a decorated function on real handler threads until everything is settled."""
    subscriber("t", group="g", **options)(function)
    handler = registry.handlers()[GroupRef("g", "t")]
    publish_many("t", messages)
    sub = Sub(handler)
    executor = Executor(sub.inbox, USING, threads=threads, timeouts=TIMEOUTS, with_loop=handler.is_async)
    executor.start()
    try:
        for _ in range(200):
            sub.step()
            sub.flush()
            if not lag():
                break
            sub.inbox.wait(0.05, enough=1)
        assert lag() == 0
    finally:
        sub.inbox.close()
        executor.join(10)
    sub.leave()
    return executor


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


# -- timeout ------------------------------------------------------------------


def errors_of_attempts():
    """Of each failed attempt the last line of its error."""
    events = DeliveryEvent.objects.exclude(outcome="acked").order_by("id")
    return [event.error.strip().rsplit("\n", 1)[-1] for event in events]


ENDS = ("lets it through", "cleans up", "returns", "raises", "raises a TimeoutError", "rejects", "acks")


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_a_timeout_ends_the_attempt_and_nothing_else(db, end, batch):
    """However it ends after the cancellation: what it was called for is not done."""
    loops, got, ended = set(), [], []

    async def handle(argument):
        delivery = argument[0] if batch else argument
        loops.add(asyncio.get_running_loop())
        got.append((delivery.payload, delivery.attempt))
        if delivery.payload or delivery.attempt > 1:
            return
        if end == "acks":
            delivery.ack()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append(end)
            match end:
                case "returns":
                    return
                case "raises":
                    raise ValueError("while cleaning up") from None
                case "raises a TimeoutError":
                    raise TimeoutError("mine") from None
                case "rejects":
                    delivery.reject("too slow")
                    return
                case "cleans up":
                    await asyncio.sleep(0.05)
            raise

    options = {"batch": True, "batch_size": 1} if batch else {}
    run(handle, [0, 1], timeout=0.2, backoff={"initial": 0}, **options)
    assert sorted(got) == [(0, 1), (0, 2), (1, 1)]
    assert len(ended) == 1
    (error,) = errors_of_attempts()
    assert error.endswith(f".{handle.__qualname__} did not finish within 0.2 s (timeout)")
    assert error.startswith("TimeoutError: tests.test_async.")
    assert len(loops) == 1


def test_a_timeout_error_of_the_handlers_own_is_left_as_it_is(db):
    async def handle(delivery):
        if delivery.attempt == 1:
            raise TimeoutError("the shop did not answer")
        if delivery.attempt == 2:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)

    run(handle, [0], timeout=30, backoff={"initial": 0})
    assert errors_of_attempts() == ["TimeoutError: the shop did not answer", "TimeoutError"]


def test_the_dead_letter_of_a_timeout_says_where_the_handler_was(db):
    async def wait_for_the_shop():
        await asyncio.sleep(60)

    async def handle(delivery):
        await wait_for_the_shop()

    run(handle, [0], timeout=0.1, reject_on=TimeoutError)
    (letter,) = OutboxMessage.objects.filter(topic="t_dlq")
    assert letter.failure_count == 1
    assert "in wait_for_the_shop" in letter.last_error
    assert letter.last_error.rstrip().endswith("did not finish within 0.1 s (timeout)")


def test_retry_on_decides_about_a_timeout_too(db):
    got = []

    async def handle(delivery):
        got.append(delivery.attempt)
        await asyncio.sleep(60)

    run(handle, [0], timeout=0.1, retry_on=ValueError)
    assert got == [1]
    assert OutboxMessage.objects.filter(topic="t_dlq").count() == 1


def test_sync_code_of_an_async_handler_is_waited_for(db):
    """A thread cannot be ended: the attempt fails when the call returns, and the connection is of use."""
    times = []

    async def handle(delivery):
        began = time.monotonic()
        try:
            if delivery.attempt == 1:
                await sync_to_async(time.sleep)(0.5)
        finally:
            times.append(time.monotonic() - began)
        await Effect.objects.acreate(name="async", value=delivery.attempt)

    began = time.monotonic()
    run(handle, [0], timeout=0.1, backoff={"initial": 0}, threads=1)
    assert time.monotonic() - began >= 0.5
    assert len(times) == 2
    assert list(Effect.objects.values_list("value", flat=True)) == [2]
    assert len(errors_of_attempts()) == 1


def test_a_process_outlives_handlers_that_hang_until_their_timeout(db):
    """Beside a healthy one of another group, which they do not hold up for longer."""
    done = []

    async def hang(delivery):
        await asyncio.sleep(3600)

    async def work(delivery):
        done.append(delivery.payload)

    subscriber("t", group="hangs", timeout=0.2, max_attempts=1, max_processing_time=30)(hang)
    subscriber("t", group="works")(work)
    publish_many("t", [Message(n, key=str(n)) for n in range(6)])
    process = Subscriber(USING, registry.handlers(), SHORT, threads=2, drain=True)
    assert in_thread(process.run) == 0
    assert sorted(done) == list(range(6))
    assert OutboxMessage.objects.filter(topic="t_dlq").count() + QueueMessage.objects.filter(topic="t_dlq").count() == 6


def test_a_handler_that_goes_on_after_its_timeout_ends_its_process(db):
    """As any other that hangs, at max_processing_time."""
    caught, leave = threading.Event(), threading.Event()

    async def stay(delivery):
        while not leave.is_set():
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                caught.set()

    subscriber("t", group="g", timeout=0.2, max_processing_time=1)(stay)
    publish("t", 0)
    process = Subscriber(USING, registry.handlers(), SHORT, threads=1)
    assert in_thread(process.run) == 1
    assert caught.is_set()
    assert lag() == 1
    leave.set()


def test_a_timeout_where_there_is_no_loop(db, settings):
    """deliver_all and EAGER make one for each call."""

    async def handle(delivery):
        await asyncio.sleep(60)

    subscriber("t", group="g", timeout=0.1, max_attempts=1)(handle)
    publish("t", 0)
    with pytest.raises(TimeoutError, match=r"did not finish within 0\.1 s \(timeout\)"):
        deliver_all()
    settings.MYSQLQUEUE = {"EAGER": True}
    with pytest.raises(TimeoutError, match=r"did not finish within 0\.1 s \(timeout\)"):
        publish("t", 1)
    assert lag() == 0


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
    process = Subscriber(USING, {GroupRef("g", "t"): handlers[GroupRef("g", "t")]}, SHORT, threads=2)
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
    with pytest.raises(RuntimeError, match="cannot be made"):
        Loop().start()


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
    loop, go = Loop(), threading.Event()
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
