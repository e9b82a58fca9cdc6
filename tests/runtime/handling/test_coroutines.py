"""Calls of async handlers, each of which is a task of the event loop and holds no thread."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import threading
from collections import Counter

import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection, connections
from django.db.models import F

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import ConsumerGroup, DeliveryEvent, DeliveryState, QueueMessage
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.delivery_limits import parse_rate
from django_mysqlqueue.signals import delivery_handled, delivery_settled, delivery_started
from tests.app.models import Effect
from tests.support.async_handlers import TIMEOUTS, Gate, all_handled, working
from tests.support.handlers import both_modes
from tests.support.harness import USING, Sub, expire, handler, in_thread, lag, sequence
from tests.support.internals import GroupRef, Settings, Subscriber, call, releasing, sessions
from tests.support.processes import wait_for

G = GroupRef("g", "t")
SHORT = dataclasses.replace(Settings(), poll_interval=0.02, lease_duration=300.0, visibility_timeout=300.0)


def coroutines(function, **options):
    return handler(function=function, is_async=True, **options)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open()


def passing(gate, **options):
    """A handler that passes a gate."""

    async def enter(delivery):
        await gate.enter(delivery.payload)

    return coroutines(enter, **options)


def batches_passing(gate, **options):
    async def enter(deliveries):
        await gate.enter([delivery.payload for delivery in deliveries])

    return coroutines(enter, batch=True, **options)


def publish_keys(number, topic="t"):
    publish_many(topic, [Message(n, key=f"k{n}") for n in range(number)])


# -- many at once -------------------------------------------------------------


@both_modes
def test_many_at_once_hold_no_thread(db, gate, mode):
    sessions.forget_uses()  # a handler of another test, whose connections would be opened before each call
    publish_keys(200)
    with working(passing(gate, mode=mode), concurrency=200) as (_, until):
        before = set(threading.enumerate())
        until(lambda: len(gate.inside) == 200)
        assert set(threading.enumerate()) <= before
        gate.open()
        until(all_handled)
    assert sorted(gate.entered) == list(range(200))


def looked_again(sub, until):
    """The poller has had turns, and the loop has looked for something to start."""
    seen = []
    take = sub.inbox.take_for_loop

    def look():
        found = take()
        seen.append(found)
        return found

    sub.inbox.take_for_loop = look
    sub.step(times=3)
    sub.inbox.wake_loop()
    until(lambda: seen)
    del sub.inbox.take_for_loop


@both_modes
def test_groups_share_the_concurrency_of_the_process(db, mode):
    """And one with its own has that besides."""
    one, two, own = Gate(), Gate(), Gate()
    for topic in ("one", "two", "own"):
        publish_keys(30, topic)
    handlers = [passing(gate, topic=topic, mode=mode) for gate, topic in ((one, "one"), (two, "two"))]
    with working(*handlers, passing(own, topic="own", mode=mode, concurrency=3), concurrency=5) as (sub, until):
        until(lambda: len(one.inside) + len(two.inside) == 5 and len(own.inside) == 3)
        until(lambda: all(sub.inbox.waiting(one.ref)[0] for one in handlers))
        for _ in range(10):
            looked_again(sub, until)
            assert len(one.inside) + len(two.inside) == 5
            assert len(own.inside) == 3
            count = len(one.entered) + len(two.entered)
            (one if one.inside else two).let()
            until(lambda count=count: len(one.entered) + len(two.entered) == count + 1)
            until(lambda: len(one.inside) + len(two.inside) == 5)
        assert min(len(one.entered), len(two.entered)) >= 4, "one group had more turns than the other"
        for gate in (one, two, own):
            gate.open()
        until(lambda: all_handled("one", "two", "own"))
    assert own.most == 3
    assert one.most <= 5
    assert two.most <= 5
    assert [sorted(gate.entered) for gate in (one, two, own)] == [list(range(30))] * 3


def test_a_group_that_waits_does_not_hold_up_one_with_a_concurrency_of_its_own(db, gate):
    other = Gate()
    publish_keys(10)
    publish_keys(10, "u")
    with working(passing(gate), passing(other, topic="u", concurrency=1), concurrency=2) as (_, until):
        until(lambda: len(gate.inside) == 2)
        other.open()
        until(lambda: all_handled("u"))
        assert len(gate.inside) == 2


def test_a_batch_is_one_call(db, gate):
    publish_keys(30)
    with working(batches_passing(gate, batch_size=10, mode="shared"), concurrency=2) as (sub, until):
        until(lambda: len(gate.inside) == 2 and sub.inbox.waiting(G)[0] == 10)
        looked_again(sub, until)
        assert [len(batch) for batch in gate.inside] == [10, 10]
        gate.open()
        until(all_handled)
    assert gate.most == 2


def test_a_changed_concurrency_applies_to_what_waits(db, gate):
    publish_keys(30)
    with working(passing(gate, concurrency=2), concurrency=5) as (sub, until):
        until(lambda: len(gate.inside) == 2)
        ConsumerGroup.objects.update(overrides={"concurrency": {"value": 7, "at": 1, "by": "ops"}})
        until(lambda: len(gate.inside) == 7)
        ConsumerGroup.objects.update(overrides={})
        until(lambda: sub.poller.groups[0].handler.concurrency == 2)
        gate.let(5)
        until(lambda: len(gate.inside) == 2)
        looked_again(sub, until)
        assert len(gate.inside) == 2
        gate.open()
        until(all_handled)
    assert gate.most == 7


@pytest.mark.promise("Order")
def test_one_message_of_a_partition_at_a_time_and_many_partitions_at_once(db):
    gate, running, got = Gate(), Counter(), []

    async def handle(delivery):
        key, number = delivery.payload
        running[key] += 1
        assert running[key] == 1
        got.append((key, number))
        if not number:
            await gate.enter(key)
        await asyncio.sleep(0)
        running[key] -= 1

    publish_many("t", [Message((key, number), key=key) for number in range(6) for key in "abcde"])
    with working(coroutines(handle)) as (sub, until):
        until(lambda: len(gate.inside) == 5)
        looked_again(sub, until)
        assert len(got) == 5
        gate.open()
        until(all_handled)
    assert not DeliveryEvent.objects.exists()
    for key in "abcde":
        assert [number for one, number in got if one == key] == list(range(6))


def test_threads_and_the_loop_work_side_by_side(db, gate):
    """A sync group does not wait for coroutines, and they do not wait for its thread."""
    busy, go = threading.Event(), threading.Event()

    def block(delivery):
        busy.set()
        assert go.wait(60)

    publish_keys(10)
    publish_keys(3, "u")
    with working(passing(gate), handler(topic="u", function=block)) as (_, until):
        until(lambda: busy.is_set() and len(gate.inside) == 10)
        gate.open()
        until(all_handled)
        assert lag(topic="u") == 3
        go.set()
        until(lambda: all_handled("u"))


# -- limits, expiry, coalescing, suspects -------------------------------------


@both_modes
def test_messages_in_flight_are_limited(db, gate, mode):
    publish_keys(12)
    with working(passing(gate, mode=mode, max_in_flight=3)) as (sub, until):
        until(lambda: len(gate.inside) == 3)
        looked_again(sub, until)
        assert len(gate.inside) == 3
        gate.open()
        until(all_handled)
    assert gate.most <= 3
    assert sorted(gate.entered) == list(range(12))


@both_modes
def test_starts_are_limited_by_a_rate(db, gate, mode):
    publish_keys(12)
    gate.open()
    with working(passing(gate, mode=mode, rate=parse_rate("1/h"), burst=3)) as (sub, until):
        until(lambda: len(gate.entered) == 3 and not sub.inbox.held(G))
        looked_again(sub, until)
    assert len(gate.entered) == 3
    assert lag() == 9


def test_a_limited_group_gets_a_place_beside_a_busy_one(db):
    """The place on the loop that is free next is kept for it."""
    busy, limited = Gate(), Gate()
    publish_many("t", [Message(n) for n in range(100)])
    publish_keys(3, "u")
    handlers = [passing(busy, mode="shared"), passing(limited, topic="u", mode="shared", max_in_flight=1)]
    with working(*handlers, concurrency=2) as (_, until):
        busy.open()
        until(lambda: limited.inside)
        limited.open()
        until(lambda: all_handled("u"))
    assert limited.most == 1


@both_modes
def test_what_expires_while_it_waits_is_not_called(db, gate, mode):
    publish("t", "first", key="a")
    with working(passing(gate, mode=mode), concurrency=1) as (sub, until):
        until(lambda: gate.inside)
        publish("t", "expired", key="b", expires_in=3600)
        publish("t", "last", key="c", expires_in=3600)
        until(lambda: sub.inbox.waiting(G)[0] == 2)
        expire(sub)
        publish("t", "later", key="d", expires_in=3600)
        until(lambda: sub.inbox.waiting(G)[0] == 3)
        gate.open()
        until(all_handled)
        assert sub.inbox.passed_counts("expired") == {G: 2}
    assert gate.entered == ["first", "later"]


@both_modes
def test_only_the_latest_of_a_coalesce_key_is_called(db, gate, mode):
    """Right before the call: the message that supersedes the other came while that one waited for a place."""
    publish("t", "first", key="a")
    with working(passing(gate, mode=mode), concurrency=1) as (sub, until):
        until(lambda: gate.inside)
        publish("t", "old", key="b", coalesce="c")
        until(lambda: sub.inbox.waiting(G)[0] == 1)
        publish("t", "new", key="b", coalesce="c")
        sequence()
        gate.open()
        until(all_handled)
        assert sub.inbox.passed_counts("superseded") == {G: 1}
    assert gate.entered == ["first", "new"]


def test_the_others_of_a_batch_are_called_without_what_has_expired(db, gate):
    publish("t", "first", key="a")
    with working(batches_passing(gate, batch_size=10, mode="shared"), concurrency=1) as (sub, until):
        until(lambda: gate.inside)
        publish("t", "expired", expires_in=3600)
        until(lambda: sub.inbox.waiting(G)[0] == 1)
        expire(sub)
        publish_many("t", ["b", "c"])
        until(lambda: sub.inbox.waiting(G)[0] == 3)
        gate.open()
        until(all_handled)
    assert sorted(map(sorted, gate.entered)) == [["b", "c"], ["first"]]


def lose(one, number):
    """Publish messages, and lose the subscriber that has started them."""
    publish_keys(number)
    sub = Sub(one, threads=number).step()
    assert [sub.take() is not None for _ in range(number)] == [True] * number
    releasing.release_all(USING, sub.name, sub.handlers, shared=[one.ref] if one.shared else [])


@pytest.mark.promise("Poison messages")
@both_modes
def test_suspects_are_called_one_at_a_time_after_their_start_is_stored(db, mode):
    """However many calls may run at a time. Messages that are not suspected run beside them."""
    suspects, gate, starts = Gate(), Gate(), []

    async def handle(delivery):
        if delivery.key.startswith("new"):
            await gate.enter(delivery.payload)
            return
        state = await DeliveryState.objects.aget(partition_key=delivery.key)
        starts.append((state.suspect, state.retry_count))
        await suspects.enter(delivery.payload)

    one = coroutines(handle, mode=mode)
    lose(one, 6)
    publish_many("t", [Message(n, key=f"new{n}") for n in range(4)])
    with working(one) as (sub, until):
        until(lambda: len(suspects.inside) == 1 and len(gate.inside) == 4)
        looked_again(sub, until)
        assert len(suspects.inside) == 1
        suspects.open()
        gate.open()
        until(all_handled)
    assert suspects.most == 1
    assert sorted(suspects.entered) == list(range(6))
    assert starts == [(True, 1)] * 6


@pytest.mark.promise("Poison messages")
def test_a_suspect_whose_start_cannot_be_stored_is_not_called(db, gate, caplog):
    """Another process has claimed it meanwhile."""
    busy = Gate()
    one = passing(gate)
    publish_keys(1, "u")
    with working(one, passing(busy, topic="u"), concurrency=1) as (sub, until):
        until(lambda: busy.inside)
        lose(one, 1)
        until(sub.inbox.has_suspect)
        DeliveryState.objects.filter(topic="t").update(delivery_token=F("delivery_token") + 1)
        busy.open()
        until(lambda: gate.inside)  # now claimed by this process again
        gate.open()
        until(lambda: all_handled("t", "u"))
    assert gate.entered == [0]
    assert [one.mysqlqueue["event"] for one in caplog.records] == ["delivery.lost"]


# -- synchronous code ---------------------------------------------------------


def session_settings():
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("PRAGMA foreign_keys")
        else:
            cursor.execute("SELECT @@wait_timeout, @@innodb_lock_wait_timeout")
        return cursor.fetchone()


def test_sync_code_uses_connections_of_the_subscriber_which_end_with_it(db):
    """As many threads as THREADS, whatever the number of coroutines; with the time limits of handlers."""
    wrappers, found, threads = {}, set(), set()

    @sync_to_async
    def look():
        threads.add(threading.current_thread().name)
        found.add(session_settings())
        wrappers[id(connection.connection)] = connections[USING]

    async def handle(delivery):
        await look()
        assert await Effect.objects.acount() == 0
        await look()

    publish_keys(50)
    with working(coroutines(handle), threads=2) as (_, until):
        until(all_handled)
    assert threads <= {"mysqlqueue-sync-0", "mysqlqueue-sync-1"}
    assert 1 <= len(wrappers) <= 2
    assert all(wrapper.connection is None for wrapper in wrappers.values())
    if connection.vendor != "sqlite":
        assert found == {(TIMEOUTS.idle, TIMEOUTS.lock_wait)}
    assert not DeliveryEvent.objects.exists()


@pytest.mark.servers_only
def test_sync_code_of_several_calls_runs_in_several_threads(db):
    """What waits for each other does not wait for ever."""
    both = threading.Barrier(2)

    async def handle(delivery):
        await sync_to_async(both.wait)(60)

    publish_keys(2)
    with working(coroutines(handle), threads=2) as (_, until):
        until(all_handled)
    assert not DeliveryEvent.objects.exists()


def test_sync_code_waits_for_a_free_thread(db):
    running, most = Counter(), []

    @sync_to_async
    def work(number):
        running["now"] += 1
        most.append(running["now"])
        Effect.objects.create(name="sync", value=number)
        running["now"] -= 1

    async def handle(delivery):
        await work(delivery.payload)

    publish_keys(60)
    with working(coroutines(handle), threads=1) as (_, until):
        until(all_handled)
    assert most == [1] * 60
    assert sorted(Effect.objects.values_list("value", flat=True)) == list(range(60))


def test_a_transaction_that_sync_code_leaves_open_fails_the_attempt_and_reaches_no_other(db):
    seen = []

    @sync_to_async
    def leave_open(number):
        connection.set_autocommit(False)
        Effect.objects.create(name="left open", value=number)

    @sync_to_async
    def look():
        seen.append((connection.get_autocommit(), Effect.objects.count()))

    async def handle(delivery):
        await look()
        if delivery.attempt == 1:
            await leave_open(delivery.payload)

    publish_keys(5)
    one = coroutines(handle, backoff=Backoff(initial=0, jitter=0))
    with working(one, threads=1) as (_, until):
        until(all_handled)
    assert seen == [(True, 0)] * 10
    assert not Effect.objects.exists()
    assert DeliveryEvent.objects.count() == 5


def test_connections_that_cannot_be_had_cost_no_attempt_and_are_not_given_up_too_soon(db, monkeypatch, caplog):
    """After each success, the next failures count from the first again."""
    insists, attempts, failures = [], [], Counter()
    connect = sessions.connect

    def fails_twice(ref, *, insist):
        insists.append(insist)
        failures["in a row"] += 1
        if failures["in a row"] < 3:
            raise OperationalError(2003, "Can't connect")
        failures["in a row"] = 0
        connect(ref, insist=insist)

    async def handle(delivery):
        await Effect.objects.acount()
        attempts.append(delivery.attempt)

    monkeypatch.setattr(call, "REST", Backoff(initial=0, jitter=0))
    sessions.forget_uses()
    with working(coroutines(handle), threads=1) as (_, until):
        publish("t", 0, key="k")
        until(all_handled)
        monkeypatch.setattr(call.sessions, "connect", fails_twice)
        for number in range(1, 7):
            publish("t", number, key="k")
            until(all_handled)
    assert attempts == [1] * 7
    assert insists == [True] * 18
    lines = [one.mysqlqueue["failures"] for one in caplog.records if one.mysqlqueue["event"] == "delivery.not_started"]
    assert lines == [1, 2] * 6


# -- context variables and signals --------------------------------------------

TENANT = contextvars.ContextVar("TENANT", default="nobody")


def test_calls_at_the_same_time_have_contexts_of_their_own(db, gate):
    seen = []

    async def handle(delivery):
        before = TENANT.get()
        TENANT.set(delivery.payload)
        await gate.enter(delivery.payload)
        in_thread = await sync_to_async(TENANT.get)()
        await sync_to_async(TENANT.set)(f"{delivery.payload}, later")
        seen.append((delivery.payload, before, in_thread, TENANT.get()))

    publish_keys(20)
    with working(coroutines(handle), threads=1) as (_, until):
        until(lambda: len(gate.inside) == 20)
        gate.open()
        until(all_handled)
    assert sorted(seen) == [(n, "nobody", n, f"{n}, later") for n in range(20)]


def test_receivers_of_signals_use_the_orm_and_the_handlers_context(db, gate):
    """In a thread for synchronous code: a coroutine could not use the database."""
    threads, tenants, heard = set(), [], []

    def started(delivery, **arguments):
        threads.add(threading.current_thread().name)
        Effect.objects.create(name="started", value=delivery.payload)
        TENANT.set(f"tenant {delivery.payload}")

    def handled(delivery, outcome, exception, **arguments):
        threads.add(threading.current_thread().name)
        heard.append((delivery.payload, outcome, type(exception), TENANT.get()))
        Effect.objects.create(name="handled", value=delivery.payload)

    async def handle(delivery):
        tenants.append((delivery.payload, TENANT.get()))
        await gate.enter(delivery.payload)
        if delivery.payload == 7 and delivery.attempt == 1:
            raise ValueError("no")

    delivery_started.connect(started)
    delivery_handled.connect(handled)
    try:
        publish_keys(10)
        with working(coroutines(handle, backoff=Backoff(initial=0, jitter=0)), threads=1) as (_, until):
            until(lambda: len(gate.inside) == 10)
            gate.open()
            until(all_handled)
    finally:
        delivery_started.disconnect(started)
        delivery_handled.disconnect(handled)
    every = Counter(dict.fromkeys(range(10), 1) | {7: 2})
    assert threads == {"mysqlqueue-sync-0"}
    for name in ("started", "handled"):
        assert Counter(Effect.objects.filter(name=name).values_list("value", flat=True)) == every
    assert sorted(tenants) == sorted((n, f"tenant {n}") for n in every.elements())
    expected = [(n, "acked", type(None), f"tenant {n}") for n in range(10)] + [(7, "failed", ValueError, "tenant 7")]
    assert sorted(heard, key=str) == sorted(expected, key=str)


# -- ends ---------------------------------------------------------------------


def test_what_raises_is_retried_and_the_others_are_not(db, gate):
    attempts = []

    async def handle(delivery):
        attempts.append((delivery.payload, delivery.attempt))
        await gate.enter(delivery.payload)
        if not delivery.payload % 3 and delivery.attempt < 3:
            raise ValueError(f"no {delivery.payload}")

    publish_keys(90)
    with working(coroutines(handle, backoff=Backoff(initial=0, jitter=0))) as (_, until):
        until(lambda: len(gate.inside) == 90)
        gate.open()
        until(all_handled)
    assert Counter(attempts) == Counter((n, attempt) for n in range(90) for attempt in (1, 2, 3)[: 1 if n % 3 else 3])
    errors = DeliveryEvent.objects.values_list("outcome", "error")
    assert len(errors) == 60
    assert all(outcome == "failed" and "ValueError: no" in error for outcome, error in errors)


def test_each_outcome_of_a_call(db):
    async def handle(delivery):
        await asyncio.sleep(0)
        match delivery.payload:
            case "nack":
                delivery.nack(delay=3600, reason="not today")
            case "snooze":
                delivery.snooze(3600)
            case "reject":
                delivery.reject("never")

    publish_many("t", [Message(what, key=what) for what in ("ack", "nack", "snooze", "reject")])
    with working(coroutines(handle)) as (sub, until):
        until(lambda: sub.inbox.is_idle(G) and lag() == 2)
    sequence()
    states = {one.partition_key: one.retry_count for one in DeliveryState.objects.filter(acked=False)}
    assert states == {"nack": 1, "snooze": 0}
    assert QueueMessage.objects.get(topic="t_dlq").partition_key == "reject"


def test_a_hundred_time_limits_pass_at_once(db):
    """Each call has its own, and those that are not done are cancelled."""
    cancelled = []

    async def handle(delivery):
        if delivery.attempt > 1:
            return
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(delivery.payload)
            raise

    publish_keys(100)
    one = coroutines(handle, timeout=0.3, backoff=Backoff(initial=0, jitter=0))
    with working(one) as (_, until):
        until(all_handled)
    assert sorted(cancelled) == list(range(100))
    assert DeliveryEvent.objects.filter(error__contains="did not finish within 0.3 s (timeout)").count() == 100


@pytest.mark.promise("Order")
def test_nothing_starts_while_leases_are_in_doubt(db, gate):
    """And it starts when they are good again, although nothing says so."""
    publish_keys(3)
    with working(passing(gate), concurrency=1) as (sub, until):
        until(lambda: gate.inside and sub.inbox.waiting(G)[0] == 2)
        sub.heart.is_good = False
        gate.open()
        until(lambda: not gate.inside)
        looked_again(sub, until)
        assert len(gate.entered) == 1
        sub.heart.is_good = True
        wait_for(lambda: len(gate.entered) == 3, timeout=60)
        until(all_handled)


@pytest.mark.promise("Order")
def test_a_partition_that_is_lost_while_coroutines_run(db, clock, gate):
    """What waits is dropped. What runs ends as it likes, and its outcome is stale."""
    outcomes, got = [], []

    def settled(delivery, outcome, **arguments):
        outcomes.append((delivery.payload, outcome))

    publish_many("t", [Message(n, key="k") for n in range(3)])
    with working(passing(gate)) as (sub, until):
        until(lambda: gate.inside == [0] and sub.inbox.waiting(G)[0] == 2)
        clock.advance(61)
        heir = Sub(handler(function=lambda delivery: got.append(delivery.payload)))
        held = in_thread(lambda: heir.step().take())
        sub.step()
        delivery_settled.connect(settled)
        try:
            gate.open()
            until(lambda: outcomes)
        finally:
            delivery_settled.disconnect(settled)
        assert outcomes == [(0, "lost")]
        in_thread(lambda: (heir.run(held), heir.settle()))
        until(lambda: sub.inbox.is_idle(G))
    assert gate.entered == [0]
    assert got == [0, 1, 2]
    assert lag() == 0


# -- the shutdown -------------------------------------------------------------


def begun(one, **options):
    """A process that runs in a thread; returns it, its thread, and a list that gets its exit status."""
    settings = dataclasses.replace(SHORT, **options)
    process, status = Subscriber({USING: {one.ref: one}}, settings, threads={USING: 1}), []
    thread = threading.Thread(target=lambda: status.append(process.run()))
    thread.start()
    return process, thread, status


def cut_off(process):
    """What a process does last, and what ends its coroutines."""
    (worker,) = process.workers
    in_thread(lambda: worker.release_all(sessions.Timeouts(idle=60, lock_wait=10, network=10, read=60)))
    worker.executor.join(60)


@pytest.mark.promise("Shutdown")
@both_modes
def test_a_shutdown_waits_for_what_runs_and_returns_what_does_not(db, gate, mode):
    publish_keys(20)
    process, thread, status = begun(passing(gate, mode=mode, concurrency=5), shutdown_timeout=60.0)
    (worker,) = process.workers
    wait_for(lambda: len(gate.inside) == 5, timeout=60)
    process.stop()
    wait_for(lambda: worker.inbox.counts()[G] == (0, 5) and worker.inbox._closed, timeout=60)
    assert thread.is_alive()
    gate.open()
    thread.join(60)
    assert status == [0]
    assert len(gate.entered) == 5
    assert lag() == 15
    assert not DeliveryState.objects.filter(acked=False).exclude(delivered_by="", retry_count=0).exists()
    got = []
    in_thread(lambda: Sub(handler(mode=mode, function=lambda delivery: got.append(delivery.attempt))).settle())
    assert got == [1] * 15


@pytest.mark.promise("Shutdown")
@both_modes
def test_a_shutdown_does_not_wait_for_ever_for_coroutines(db, gate, mode):
    """They have not failed, and are not suspected."""
    publish_keys(8)
    process, thread, status = begun(passing(gate, mode=mode, concurrency=5), shutdown_timeout=0.5)
    wait_for(lambda: len(gate.inside) == 5, timeout=60)
    process.stop()
    thread.join(60)
    assert status == [1]
    assert len(gate.inside) == 5
    cut_off(process)
    assert lag() == 8
    got = []
    in_thread(lambda: Sub(handler(mode=mode, function=lambda one: got.append(one.attempt))).settle())
    assert got == [1] * 8


@pytest.mark.promise("Handlers that hang")
def test_a_coroutine_that_hangs_ends_its_process_and_only_its_attempt_has_failed(db, gate, caplog):
    """The log shows where it was, and beside it hundreds of others that have not failed."""

    async def hang(delivery):
        await asyncio.sleep(3600)

    async def handle(delivery):
        if delivery.payload == 0:
            await hang(delivery)
        await gate.enter(delivery.payload)

    publish_keys(1)
    one = coroutines(handle, max_processing_time=2.0, max_attempts=2, mode="shared")
    process, thread, status = begun(one, shutdown_timeout=0.2)
    (worker,) = process.workers
    wait_for(lambda: worker.inbox.running() == 1, timeout=60)
    thread.join(60)
    assert status == [1]
    cut_off(process)
    (line,) = [one for one in caplog.records if one.mysqlqueue["event"] == "handler.hung"]
    assert line.stack_info.startswith(f"Task {one.where}, offset {line.mysqlqueue['offset']}:\n")
    assert "in hang\n    await asyncio.sleep(3600)" in line.stack_info.split("\nThread ")[0]
    assert DeliveryState.objects.get().retry_count == 1
    assert "ProcessingTimeExceeded" in DeliveryEvent.objects.get().error
