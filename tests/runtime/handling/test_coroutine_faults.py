"""Faults that calls on the event loop could have: places that leak, and code that outlives its call."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import sys
import threading

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, transaction

from django_mysqlqueue import Message, publish, subscriber
from django_mysqlqueue.inspection.subscribers import SubscriberStatus, read_busy
from django_mysqlqueue.models import DeliveryState
from tests.app import jobs
from tests.support import job_worlds
from tests.support.async_handlers import TIMEOUTS, run
from tests.support.harness import USING, in_thread
from tests.support.inbox import SHARED, Queue
from tests.support.internals import (
    Action,
    GroupRef,
    Handler,
    Session,
    Settings,
    Settlement,
    Subscriber,
    call,
    lane,
    priority_of,
    registry,
    sessions,
)
from tests.support.processes import wait_for

pytestmark = pytest.mark.usefixtures("no_handlers")

SHORT = dataclasses.replace(Settings(), shutdown_timeout=0.2, poll_interval=0.02)


def test_a_handler_that_cancels_the_tasks_of_others_leaves_no_call_behind(db):
    """Some of them have not begun: asyncio then never enters their coroutines."""
    got = []

    async def handle(delivery):
        got.append(delivery.attempt)
        if len(got) == 1:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    run(handle, [Message(n, key=str(n)) for n in range(5)], backoff={"initial": 0})
    assert got.count(2) == 4


@pytest.mark.any_engine
def test_a_call_lasts_until_its_sync_code_has_ended(db):
    """Otherwise the next attempt, or the next message of the partition, would run beside it."""
    begun, go, beside = threading.Event(), threading.Event(), []

    def block():
        begun.set()
        go.wait(60)
        begun.clear()

    async def handle(delivery):
        beside.append(begun.is_set())
        if delivery.attempt == 1 and delivery.payload == 0:
            asyncio.get_running_loop().call_later(1, go.set)
            await sync_to_async(block)()

    run(handle, [Message(n, key="k") for n in range(3)], timeout=0.1, backoff={"initial": 0}, threads=2)
    assert beside == [False] * 4


def test_a_call_that_the_process_cuts_off_has_not_failed(db, caplog):
    """It is neither cancelled nor counted, as with threads; the process ends with it."""
    begun, leave = threading.Event(), threading.Event()

    async def handle(delivery):
        begun.set()
        while not leave.is_set():
            await asyncio.sleep(0.01)

    subscriber("t", group="g")(handle)
    publish("t", 0)
    process = Subscriber({USING: registry.handlers()}, SHORT, threads={USING: 1})
    (worker,) = process.workers
    with contextlib.ExitStack() as stack:
        stack.callback(leave.set)
        status = in_background(stack, process.run)
        assert begun.wait(60)
        process.stop()
        assert status() == 1
        assert worker.inbox.running() == 1
        in_thread(lambda: worker.release_all(TIMEOUTS))
    assert not DeliveryState.objects.exclude(retry_count=0).exists()
    assert not [record for record in caplog.records if record.mysqlqueue["event"] == "delivery.failed"]


def in_background(stack, function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()

    def join():
        thread.join(60)
        return result[0]

    stack.callback(join)
    return join


def test_calls_that_cannot_connect_pause_together(db, monkeypatch):
    """A pause counts once, however many calls it has: otherwise they would not insist on their connections for long.

    They pause on the loop: those in the threads for sync code would hold up each other, and all others.
    """
    asked, paused_in = [], set()

    def connect(handler, *, insist):
        asked.append(insist)
        if len(asked) <= 60:
            raise OperationalError("no answer")

    async def handle(delivery):
        pass

    monkeypatch.setattr(sessions, "connect", connect)
    monkeypatch.setattr(sessions, "are_used", lambda handler: True)
    monkeypatch.setattr(call.time, "sleep", lambda seconds: paused_in.add(threading.current_thread().name))
    run(handle, [Message(n, key=str(n)) for n in range(20)])
    assert len(asked) == 80
    assert all(asked)
    assert not {name for name in paused_in if name.startswith("mysqlqueue-sync")}


def test_a_call_that_connects_ends_the_count_of_those_that_could_not(db, monkeypatch):
    """Or the attempts of the next outage would count from its first moment on."""
    asked = []

    def connect(handler, *, insist):
        asked.append(insist)
        if len(asked) % 2:
            raise OperationalError("no answer")

    async def handle(delivery):
        pass

    monkeypatch.setattr(sessions, "connect", connect)
    monkeypatch.setattr(sessions, "are_used", lambda handler: True)
    run(handle, [Message(n, key="k") for n in range(12)], threads=1)
    assert asked == [True] * 24


def test_code_that_waits_for_its_result_needs_one_thread(db):
    """Each further one would have a connection of its own."""
    places = []

    async def handle(delivery):
        places.extend([await sync_to_async(threading.get_ident)() for _ in range(50)])

    run(handle, range(1), threads=4)
    assert len(places) == 50
    assert len(set(places)) == 1


def test_an_error_while_connections_are_cleaned_up_fails_no_call(db, monkeypatch, caplog):
    """Its code has run, and may have committed."""
    tidy, failures, got = sessions.tidy, [RuntimeError("broken")], []

    def tidy_or_fail():
        if failures and threading.current_thread().name.startswith("mysqlqueue-sync"):
            raise failures.pop()
        tidy()

    async def handle(delivery):
        got.append(await sync_to_async(lambda: delivery.attempt)())

    monkeypatch.setattr(sessions, "tidy", tidy_or_fail)
    run(handle, range(1))
    assert got == [1]
    assert not failures
    assert [record.mysqlqueue["event"] for record in caplog.records] == ["handler_thread.failed"]


def test_all_calls_of_an_async_task_have_one_loop(db, settings, tmp_path, monkeypatch):
    """Even the first one, which imports it in a thread: what a client at module level keeps belongs to that loop."""
    settings.TASKS = job_worlds.TASKS
    monkeypatch.syspath_prepend(tmp_path)
    tmp_path.joinpath("late_tasks.py").write_text(
        "import asyncio\nfrom tests.app.jobs import log, task\n"
        "@task\nasync def note(number):\n    log.append((number, asyncio.get_running_loop()))\n"
    )
    jobs.log.clear()
    process = Subscriber({USING: registry.handlers()}, SHORT, threads={USING: 1})
    with contextlib.ExitStack() as stack:
        stack.callback(sys.modules.pop, "late_tasks", None)
        status = in_background(stack, process.run)
        stack.callback(process.stop)
        for number in range(3):
            with transaction.atomic(USING):
                importlib.import_module("late_tasks").note.enqueue(number)
                if not number:
                    del sys.modules["late_tasks"]
            wait_for(lambda number=number: len(jobs.log) > number)
        process.stop()
        assert status() == 0
    assert [number for number, _ in jobs.log] == [0, 1, 2]
    assert len({loop for _, loop in jobs.log}) == 1


# -- turns ----------------------------------------------------------------------


def an_inbox(monkeypatch, **groups):
    """One with an event loop that nothing runs."""
    queue = Queue(monkeypatch, **groups)
    queue.inbox.concurrency = 100
    for one in queue.handlers.values():
        queue.inbox.configure(one, enough=1, priority_share=4)
    return queue


def test_groups_of_threads_take_turns_whatever_the_loop_takes(monkeypatch):
    """Each start on the loop would otherwise move the turn of the threads, always to the same group."""
    queue = an_inbox(monkeypatch, first=SHARED, second=SHARED, loop={**SHARED, "is_async": True})
    for group in ("first", "second"):
        queue.put(group, *map(str, range(8)))
    started = []
    for number in range(8):
        queue.put("loop", str(number))
        assert len(queue.inbox.take_for_loop()[0]) == 1
        started.append(queue.take()[1].claimed.ref.group)
    assert started.count("first") == started.count("second") == 4


class Mixed(Handler):
    """Some calls are coroutines."""

    may_be_async = True

    def is_on_loop(self, state):
        return state == "loop"


def mixed(queue):
    """Let some deliveries of the group be for the loop."""
    fields = {one.name: getattr(queue.handlers["g"], one.name) for one in dataclasses.fields(Handler)}
    queue.handlers["g"] = Mixed(**fields)
    queue.inbox.configure(queue.handlers["g"], enough=1, priority_share=4)


def put(queue, state, key):
    held = queue.held("g", key)
    held.state = state
    queue.inbox.put([held])


def test_lower_priorities_have_their_turn_on_the_loop_and_in_threads(monkeypatch):
    """If both counted their starts together, the turns of one kind could all be those of the other."""
    queue = an_inbox(monkeypatch, g=SHARED)
    mixed(queue)
    for state in ("loop", "thread"):
        for key in (lane("", 5), lane("", 0)):
            for _ in range(16):
                put(queue, state, key)
    queue.inbox.configure(dataclasses.replace(queue.handlers["g"], concurrency=1), enough=1, priority_share=4)
    started = {"loop": [], "thread": []}
    for _ in range(8):
        ((batch,), _) = queue.inbox.take_for_loop()
        started["loop"].append(priority_of(batch.items[0].claimed.key))
        queue.inbox.finish(batch, [Settlement(held.claimed, Action.ACK) for held in batch.items])
        started["thread"].append(priority_of(queue.take()[1].claimed.key))
    assert started["loop"].count(0) == started["thread"].count(0) == 2


def test_no_key_is_mistaken_for_the_loops_lane_of_another_one(monkeypatch):
    """A call in a thread for the loop's delivery would block the loop, or free a place that it never had."""
    queue = an_inbox(monkeypatch, g=SHARED)
    mixed(queue)
    for state, key in (("loop", "a"), *(("thread", f"{chr(code)}a") for code in range(128))):
        put(queue, state, key)
    assert len(queue.inbox.take_for_loop()[0]) == 1
    assert len(queue.take_all()) == 128


def test_a_thread_is_kept_for_a_queue_that_has_places_on_the_loop(monkeypatch):
    """Its sync tasks with a rate need one of the threads, which the tasks of others have all."""
    queue = an_inbox(monkeypatch, g=SHARED, other=SHARED)
    mixed(queue)
    put(queue, "loop", "a")
    assert len(queue.inbox.take_for_loop()[0]) == 1
    queue.put("other", *"bcd")
    queue.take()
    ref = queue.ref("g")
    assert queue.inbox.free_calls(ref) == [0, 99]
    assert queue.inbox.keep_thread(ref)
    assert queue.take() is None
    put(queue, "loop", "a")
    assert len(queue.inbox.take_for_loop()[0]) == 1, "enough places are left"


def test_a_kept_place_holds_up_no_group_with_places_of_its_own(monkeypatch):
    own = {**SHARED, "is_async": True, "concurrency": 1}
    queue = an_inbox(monkeypatch, first=own, second=own)
    assert queue.inbox.keep_thread(queue.ref("first"))
    queue.put("first", "a")
    queue.put("second", "a")
    ((batch,), _) = queue.inbox.take_for_loop()
    assert batch.items[0].claimed.ref.group == "second"


# -- what people see ------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_calls_on_the_loop_occupy_no_handler_threads(db, is_async):
    """The dashboard would say that they occupy all of them, and hold up what waits."""

    async def coroutine(delivery):
        pass

    subscriber("t", group="g")(coroutine if is_async else lambda delivery: None)
    status = SubscriberStatus(GroupRef("g", "t"), "s", 0, 0, {"threads": 2}, live=True)
    assert (read_busy(Session(USING), status.ref, [status]) is None) == is_async
