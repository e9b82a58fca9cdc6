"""Timeouts of async handlers."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time

import pytest
from asgiref.sync import sync_to_async

from django_mysqlqueue import Message, publish, publish_many, subscriber
from django_mysqlqueue.models import DeliveryEvent, OutboxMessage, QueueMessage
from django_mysqlqueue.testing import deliver_all
from tests.app.models import Effect
from tests.support.async_handlers import run
from tests.support.harness import USING, in_thread, lag
from tests.support.internals import Settings, Subscriber, registry

pytestmark = pytest.mark.usefixtures("no_handlers")

SHORT = dataclasses.replace(Settings(), shutdown_timeout=2.0, poll_interval=0.02)


def errors_of_attempts():
    """Of each failed attempt the last line of its error."""
    events = DeliveryEvent.objects.exclude(outcome="acked").order_by("id")
    return [event.error.strip().rsplit("\n", 1)[-1] for event in events]


ENDS = ("lets it through", "cleans up", "returns", "raises", "raises a TimeoutError", "rejects", "acks")


@pytest.mark.promise("Handlers that hang")
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
    assert error.startswith("TimeoutError: tests.runtime.handling.test_timeouts.")
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
                await sync_to_async(time.sleep)(4.0)
        finally:
            times.append(time.monotonic() - began)
        await Effect.objects.acreate(name="async", value=delivery.attempt)

    began = time.monotonic()
    # The second attempt writes, which may take a while.
    run(handle, [0], timeout=3, backoff={"initial": 0}, threads=1)
    assert time.monotonic() - began >= 4.0
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
    process = Subscriber({USING: registry.handlers()}, SHORT, threads={USING: 2}, drain=True)
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
    process = Subscriber({USING: registry.handlers()}, SHORT, threads={USING: 1})
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
