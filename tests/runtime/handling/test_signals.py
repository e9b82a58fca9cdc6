"""The signals of a delivery's life: when each is sent, with what, and that receivers break nothing."""

from __future__ import annotations

import contextvars
import dataclasses
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import DEFAULT_DB_ALIAS, connection, transaction
from django.dispatch import Signal
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Delivery, Message, publish, publish_many, subscriber
from django_mysqlqueue.models import DeliveryState, PartitionLease, QueueMessage
from django_mysqlqueue.signals import delivery_handled, delivery_settled, delivery_started
from django_mysqlqueue.testing import deliver_all, delivery
from tests.app.models import Effect
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.internals import GroupRef, Held, Settings, Settled, Subscriber, Teller, observers, sessions, settling
from tests.support.processes import wait_for
from tests.support.still_time import Time

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])
SHORT = dataclasses.replace(Settings(), shutdown_timeout=2.0, poll_interval=0.02)
TIMEOUTS = sessions.Timeouts(idle=60, lock_wait=10, network=10, read=60)


class Ear:
    """What was heard, in order: (signal's name, arguments)."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.connected: list[tuple[Signal, Any]] = []

    def listen(self, name: str, signal: Signal) -> None:
        def hear(sender, **arguments):
            assert arguments.pop("signal") is signal
            assert sender is None
            self.heard.append((name, arguments))

        self.connect(signal, hear)

    def connect(self, signal: Signal, receiver: Any) -> None:
        signal.connect(receiver, weak=False)
        self.connected.append((signal, receiver))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [arguments for heard, arguments in self.heard if heard == name]

    def brief(self) -> list[tuple[str, ...]]:
        """(signal, payload, outcome where there is one)."""
        return [
            (name, one["delivery"].payload, *([one["outcome"]] if "outcome" in one else [])) for name, one in self.heard
        ]


@pytest.fixture
def bare():
    """Receivers that a test connects are disconnected; none is there before."""
    for signal in (delivery_started, delivery_handled, delivery_settled):
        assert not signal.receivers
    ear = Ear()
    yield ear
    for signal, receiver in ear.connected:
        signal.disconnect(receiver)


@pytest.fixture
def ear(bare):
    """Listens to all three."""
    bare.listen("started", delivery_started)
    bare.listen("handled", delivery_handled)
    bare.listen("settled", delivery_settled)
    return bare


# -- what is sent, and when ---------------------------------------------------


@MODES
@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize(
    ("act", "outcome"),
    [
        (lambda one: None, "acked"),
        (lambda one: one.ack(), "acked"),
        (lambda one: one.nack(delay=60, reason="not today"), "failed"),
        (lambda one: one.snooze(60), "snoozed"),
        (lambda one: one.reject("never"), "dead_lettered"),
    ],
)
def test_what_a_handler_says(db, ear, mode, atomic, act, outcome):
    def work(one):
        seen.append(one)
        act(one)

    seen: list[Delivery] = []
    publish("t", "payload")
    sub = Sub(handler(function=work, mode=mode, atomic=atomic))
    sub.step()
    sub.work()
    assert ear.brief() == [("started", "payload"), ("handled", "payload", outcome)], "settled before it is written"
    sub.flush()
    assert ear.brief() == [("started", "payload"), ("handled", "payload", outcome), ("settled", "payload", outcome)]
    assert all(one["delivery"] is seen[0] for _, one in ear.heard)
    handled, settled = ear.of("handled")[0], ear.of("settled")[0]
    assert set(handled) == {"delivery", "task", "job_id", "outcome", "exception", "seconds"}
    assert set(settled) == {"delivery", "task", "job_id", "outcome", "error", "seconds", "latency"}
    assert handled["exception"] is None
    assert settled["error"] == {"failed": "not today", "dead_lettered": "never"}.get(outcome, "")


def test_what_a_handler_raises_and_the_last_attempt(db, ear):
    def work(one):
        one.ack()  # a raise after it wins
        raise ValueError(f"attempt {one.attempt}")

    publish("t", "payload")
    sub = Sub(handler(function=work, max_attempts=2))
    sub.settle()
    assert [one["outcome"] for one in ear.of("settled")] == ["failed", "dead_lettered"]
    assert [one["delivery"].attempt for one in ear.of("settled")] == [1, 2]
    assert [str(one["exception"]) for one in ear.of("handled")] == ["attempt 1", "attempt 2"]
    assert [one["outcome"] for one in ear.of("handled")] == ["failed", "dead_lettered"]
    assert ear.of("settled")[1]["error"].strip().endswith("ValueError: attempt 2")
    assert "Traceback" in ear.of("settled")[1]["error"]


def test_seconds_and_latency(db, ear, clock):
    publish("t", "payload")
    sub = Sub(handler(function=lambda one: time.sleep(0.05)))
    sub.step()
    clock.advance(100)
    sub.step()
    sub.work()
    sub.flush()
    assert 0.05 <= ear.of("handled")[0]["seconds"] <= ear.of("settled")[0]["seconds"] < 5
    assert 100 <= ear.of("settled")[0]["latency"] < 120


ENDS = ("acked", "failed", "dead_lettered")


@MODES
def test_each_of_a_batch(db, ear, mode):
    def work(deliveries):
        deliveries[1].nack(delay=60)
        deliveries[2].reject("never")

    publish_many("t", [Message(n, key="k") for n in range(3)])
    sub = Sub(handler(function=work, mode=mode, batch=True, batch_size=10))
    sub.settle()
    assert ear.brief() == [
        *(("started", n) for n in range(3)),
        *((told, n, outcome) for told in ("handled", "settled") for n, outcome in enumerate(ENDS)),
    ]


@MODES
def test_what_is_lost(db, ear, mode):
    publish("t", "payload")
    sub = Sub(handler(mode=mode))
    sub.step()
    held = sub.take()
    DeliveryState.objects.update(delivery_token=12345)  # handed out again
    sub.run(held)
    sub.flush()
    assert ear.brief() == [("started", "payload"), ("handled", "payload", "acked"), ("settled", "payload", "lost")]


@MODES
def test_what_an_atomic_handler_has_committed_is_not_lost(db, ear, mode):
    publish("t", "payload")
    sub = Sub(handler(mode=mode, atomic=True))
    sub.step()
    sub.run(sub.take())
    DeliveryState.objects.all().delete()  # as a seek does, before the flush
    sub.flush()
    assert [one["outcome"] for one in ear.of("settled")] == ["acked"]


def test_neighbours_of_a_stale_delivery_are_released(db, ear):
    def work(deliveries):
        with transaction.atomic():
            for one in deliveries:
                one.ack()

    publish_many("t", [Message(n, key="k") for n in range(3)])
    sub = Sub(handler(function=work, batch=True, batch_size=10))
    sub.step()
    held = sub.take()
    DeliveryState.objects.filter(message_offset=held.claimed.offset + 1).update(delivery_token=12345)
    sub.run(held)
    sub.flush()
    assert [one["outcome"] for one in ear.of("settled")] == ["released", "lost", "released"]
    assert [one["outcome"] for one in ear.of("handled")] == ["released", "failed", "released"]


def test_nothing_is_said_of_what_never_started(db, ear):
    publish_many("t", [Message(n, key="k") for n in range(5)])
    sub = Sub(handler())
    sub.step()
    sub.work(2)
    sub.leave()
    assert len(ear.of("started")) == 2
    assert [one["outcome"] for one in ear.of("settled")] == ["acked", "acked"]
    assert lag() == 3


def test_a_message_that_is_given_up_without_another_call(db, ear, clock):
    """Its holders vanished, as often as it may be tried."""
    publish("t", "deadly", key="k")
    for number in range(3):
        sub = Sub(handler(max_attempts=1), name=f"s{number}")
        PartitionLease.objects.update(leased_by=sub.name)
        sub.step()
        held = sub.take()
        if held is not None and held.claimed.suspect:
            assert settling.record_start(USING, held.claimed)
        clock.advance(100)  # it is dead
    sequence()
    assert QueueMessage.objects.filter(topic="t_dlq").exists()
    assert ear.brief() == [("settled", "deadly", "dead_lettered")]
    (settled,) = ear.of("settled")
    assert settled["seconds"] == 0
    assert settled["latency"] >= 100
    assert settled["error"]


@pytest.mark.usefixtures("no_handlers")
def test_async_handlers_inline(db, ear):
    """A context variable that a receiver sets reaches the coroutine, and ends there."""
    tenant = contextvars.ContextVar("tenant", default="nobody")
    seen = []
    ear.connect(delivery_started, lambda delivery, **_: tenant.set(delivery.payload))

    @subscriber("t", group="g")
    async def work(one):
        seen.append(tenant.get())
        if one.payload == "b" and one.attempt == 1:
            raise ValueError("broken")

    publish_many("t", [Message("a", key="k"), Message("b", key="k")])
    deliver_all(raise_exceptions=False)
    assert sorted(seen) == ["a", "b", "b"]
    assert tenant.get() == "nobody"
    assert [(one["delivery"].payload, one["outcome"]) for one in ear.of("settled")] == [
        ("a", "acked"),
        ("b", "failed"),
        ("b", "acked"),
    ]
    assert [type(one["exception"]) for one in ear.of("handled")].count(ValueError) == 1


@pytest.mark.usefixtures("no_handlers")
def test_eager(db, ear, settings):
    settings.MYSQLQUEUE = {"EAGER": True}

    @subscriber("t", group="g")
    def work(one):
        pass

    publish("t", "payload")
    assert [name for name, *_ in ear.brief()] == ["started", "handled", "settled"]


# -- who listens pays, others do not ------------------------------------------


def test_nothing_is_kept_where_nobody_listens(db, bare):
    publish_many("t", [1, 2])
    sub = Sub(handler(function=lambda one: one.nack(delay=60) if one.payload == 1 else None))
    sub.step()
    sub.work()
    outcomes = sub.inbox.take_settlements(GroupRef("g", "t"))
    assert len(outcomes) == 2
    assert all(outcome.held is None for outcome in outcomes)
    bare.listen("settled", delivery_settled)
    publish("t", 3)
    sub.step()
    sub.work()
    assert isinstance(sub.inbox.take_settlements(GroupRef("g", "t"))[0].held, Held)


def test_listening_costs_no_statement(db, ear, monkeypatch):
    Time(monkeypatch)  # In a step that takes a second, there is more to read.

    def cost():
        sub = Sub(handler())
        sub.step()  # By what it looks for work at its start depends on the server's statistics (``last_offsets``).
        publish_many("t", [Message(n, key="k") for n in range(20)])
        with CaptureQueriesContext(connection) as captured:
            sub.step()
            assert sub.work() == 20
            sub.flush()
        sub.leave()
        return len(captured)

    cost()
    listening = cost()
    assert ear.heard
    for signal, receiver in ear.connected:
        signal.disconnect(receiver)
    assert cost() == listening


# -- receivers that fail ------------------------------------------------------


@pytest.mark.parametrize("signal", [delivery_started, delivery_handled, delivery_settled])
@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("atomic", [False, True])
def test_a_receiver_that_raises(db, bare, caplog, monkeypatch, signal, error, atomic):
    # Handlers run in threads, where a KeyboardInterrupt is not a Ctrl-C.
    monkeypatch.setattr(observers, "threading", SimpleNamespace(current_thread=object, main_thread=object))

    def broken(**_):
        raise error

    bare.connect(signal, broken)
    heard = []
    bare.connect(delivery_settled, lambda outcome, **_: heard.append(outcome))
    publish("t", 1)
    sub = Sub(handler(function=lambda one: Effect.objects.create(name="done"), atomic=atomic))
    assert sub.settle() == 1
    assert lag() == 0
    assert Effect.objects.count() == 1
    failed = [record.mysqlqueue for record in caplog.records if hasattr(record, "mysqlqueue")]
    assert [(one["event"], one["signal"]) for one in failed] == [
        ("signal_receiver.failed", next(name for name in NAMES if NAMES[name] is signal))
    ]
    assert type(error).__name__ in failed[0]["error"]
    if isinstance(error, ValueError):
        assert heard == ["acked"], "the other receivers are called all the same"
        assert failed[0]["receiver"].endswith("broken")


NAMES = {
    "delivery_started": delivery_started,
    "delivery_handled": delivery_handled,
    "delivery_settled": delivery_settled,
}


def test_what_a_receiver_writes_before_the_handler_is_no_part_of_its_transaction(db, bare):
    def note(**_):
        Effect.objects.create(name="started")

    def fail(one):
        Effect.objects.create(name="handled")
        raise ValueError("broken")

    bare.connect(delivery_started, note)
    publish("t", 1)
    sub = Sub(handler(function=fail, atomic=True, max_attempts=1))
    sub.settle()
    assert list(Effect.objects.values_list("name", flat=True)) == ["started"]


def settled(number):
    one = delivery(number, offset=number)
    return Settled(one, "acked", "", 0.0, 0.0, 1)


@pytest.fixture
def teller(db):
    tellers = []

    def make(**options):
        tellers.append(Teller(DEFAULT_DB_ALIAS, TIMEOUTS, **options))
        return tellers[-1]

    yield make
    for one in tellers:
        one.close(5)


# -- the thread of a real subscriber ------------------------------------------


def test_a_slow_receiver_holds_up_nobody(bare, teller, caplog):
    go, heard = threading.Event(), []

    def slow(delivery, **_):
        go.wait(20)
        heard.append((delivery.payload, threading.current_thread().name))

    bare.connect(delivery_settled, slow)
    one = teller(most=3)
    began = time.monotonic()
    one.put([settled(0)])
    wait_for(lambda: not one._waiting)
    for number in range(1, 7):
        one.put([settled(number)])
    assert time.monotonic() - began < 10
    go.set()
    one.close(10)
    assert heard == [(number, "mysqlqueue-signals") for number in range(4)]
    dropped = [record.mysqlqueue for record in caplog.records if hasattr(record, "mysqlqueue")]
    assert [(line["event"], line["deliveries"]) for line in dropped] == [
        ("signal.dropped", 1),
        ("signal.dropped", 2),
        ("signal.dropped", 3),
    ], "the 1st, the 2nd, and all of them at the end"


def test_a_keyboard_interrupt_of_a_receiver_does_not_end_its_thread(bare, teller):
    heard = []

    def broken(delivery, **_):
        heard.append(delivery.payload)
        raise KeyboardInterrupt

    bare.connect(delivery_settled, broken)
    one = teller()
    for number in range(3):
        one.put([settled(number)])
    one.close(10)
    assert heard == [0, 1, 2]


def test_ctrl_c_while_a_receiver_runs_in_the_main_thread_is_raised(db, bare):
    def broken(**_):
        raise KeyboardInterrupt

    bare.connect(delivery_started, broken)
    with pytest.raises(KeyboardInterrupt):
        observers.tell(delivery_started, delivery=None)


def test_a_receiver_that_hangs_does_not_keep_the_process(bare, teller, caplog):
    go = threading.Event()
    bare.connect(delivery_settled, lambda **_: go.wait(20))
    one = teller()
    one.put([settled(0)])
    wait_for(lambda: not one._waiting)
    one.put([settled(1), settled(2)])
    began = time.monotonic()
    one.close(0.1)
    assert time.monotonic() - began < 5
    assert [record.mysqlqueue["deliveries"] for record in caplog.records] == [2]
    one.put([settled(3)])
    go.set()
    assert caplog.records[-1].mysqlqueue["deliveries"] == 3, "what comes after the end is dropped, and said"


def test_the_thread_has_connections_as_a_handler_has(bare, teller):
    """What a receiver leaves behind (an open transaction) is not there for the next delivery."""

    def store(delivery, **_):
        if delivery.payload == 1:
            connection.set_autocommit(False)
        Effect.objects.create(name=str(delivery.payload))

    bare.connect(delivery_settled, store)
    one = teller()
    one.put([settled(number) for number in range(3)])
    one.close(20)
    assert sorted(Effect.objects.values_list("name", flat=True)) == ["0", "2"]


def test_no_thread_without_a_listener(db, bare):
    publish("t", 1)
    process = Subscriber({USING: {GroupRef("g", "t"): handler()}}, SHORT, drain=True)
    assert process.run() == 0
    assert process.workers[0].teller._thread is None
    assert lag() == 0


@MODES
def test_a_real_subscriber_sends_all_before_it_leaves(db, ear, mode):
    seen = set()

    def work(delivery):
        if delivery.payload % 3 == 0 and delivery.payload not in seen:
            seen.add(delivery.payload)
            delivery.snooze(0)

    publish_many("t", range(30))
    process = Subscriber({USING: {GroupRef("g", "t"): handler(mode=mode, function=work)}}, SHORT, drain=True)
    assert process.run() == 0
    assert sorted(one["outcome"] for one in ear.of("settled")) == ["acked"] * 30 + ["snoozed"] * 10
    assert len(ear.of("started")) == len(ear.of("handled")) == 40
