"""``RetryLater``, raised by the handlers of subscribers."""

from __future__ import annotations

import pytest

from django_mysqlqueue import InvalidMessage, Message, RetryLater, publish, publish_many, subscriber
from django_mysqlqueue.models import DeliveryState, QueueMessage
from django_mysqlqueue.testing import deliver_all
from tests.app.models import Effect
from tests.support.handlers import both_modes
from tests.support.harness import Sub, handler, lag, sequence


def raising(*errors):
    """A handler that raises these, one at each call, and the (payload, attempt) of its calls."""
    left, calls = list(errors), []

    def handle(delivery):
        calls.append((delivery.payload, delivery.attempt))
        Effect.objects.create(name="handler", value=len(calls))
        if left:
            raise left.pop(0)

    return handle, calls


@both_modes
@pytest.mark.parametrize("atomic", [False, True])
def test_it_is_a_nack_with_a_delay_and_a_reason(db, clock, mode, atomic):
    handle, calls = raising(RetryLater(30, reason="429"))
    publish("t", 0)
    sub = Sub(handler(function=handle, mode=mode, atomic=atomic, reject_on=(Exception,)))
    sub.settle()
    state = DeliveryState.objects.get()
    assert (state.retry_count, state.last_error.splitlines()[-1].partition(": ")[2]) == (1, "in 30 s: 429")
    assert Effect.objects.count() == (0 if atomic else 1)
    clock.advance(29)
    sub.settle()
    assert len(calls) == 1
    clock.advance(2)
    sub.settle()
    assert calls == [(0, 1), (0, 2)]
    assert lag() == 0


@both_modes
def test_without_counting_it_is_a_snooze(db, clock, mode, caplog):
    caplog.set_level("INFO", "django_mysqlqueue")
    handle, calls = raising(*(RetryLater(30, reason="closed", counts=False) for _ in range(3)))
    publish("t", 0)
    sub = Sub(handler(function=handle, mode=mode, max_attempts=1))
    sub.settle()
    for _ in range(3):
        state = DeliveryState.objects.get()
        assert (state.retry_count, state.last_error) == (0, "")
        clock.advance(31)
        sub.settle()
    assert calls == [(0, 1)] * 4
    assert lag() == 0
    logged = [record.getMessage() for record in caplog.records if record.getMessage().startswith("delivery.")]
    assert [line.partition(" ")[0] for line in logged] == ["delivery.snoozed"] * 3
    assert "seconds=30.0 reason=closed" in logged[0]


@both_modes
def test_the_last_attempt_dead_letters(db, mode):
    handle, calls = raising(RetryLater(30), RetryLater(0))
    publish("t", 0)
    Sub(handler(function=handle, mode=mode, max_attempts=1)).settle()
    sequence()
    assert QueueMessage.objects.get(topic="t_dlq").last_error.endswith("RetryLater: in 30 s\n")
    assert len(calls) == 1


def test_a_batch_waits_as_a_whole(db, clock):
    calls = []

    def handle(deliveries):
        calls.append([(delivery.payload, delivery.attempt) for delivery in deliveries])
        if len(calls) == 1:
            raise RetryLater(30, counts=False)

    publish_many("t", [Message(number, key="a") for number in range(3)])
    sub = Sub(handler(function=handle, batch=True, batch_size=3))
    sub.settle()
    assert len(calls) == 1
    clock.advance(31)
    sub.settle()
    assert sorted(one for of in calls[1:] for one in of) == [(0, 1), (1, 1), (2, 1)]


def test_under_strict_order_it_holds_its_key_back(db, clock):
    handle, calls = raising(RetryLater(30, counts=False))
    publish_many("t", [Message(number, key="a") for number in range(2)])
    sub = Sub(handler(function=handle, on_failure="block"))
    sub.settle()
    assert calls == [(0, 1)]
    clock.advance(31)
    sub.settle()
    assert calls == [(0, 1), (0, 1), (1, 1)]


def test_in_a_group_it_is_not_what_it_is_alone(db):
    """An exception group is an ordinary failure."""
    handle, calls = raising(ExceptionGroup("both", [RetryLater(30, counts=False)]))
    publish("t", 0)
    Sub(handler(function=handle)).settle()
    assert calls == [(0, 1), (0, 2)]


def test_a_subclass_that_sets_nothing_is_retried_at_once(db):
    class Again(RetryLater):
        def __init__(self):
            Exception.__init__(self, "again")

    handle, calls = raising(Again())
    publish("t", 0)
    Sub(handler(function=handle, reject_on=(Exception,))).settle()
    assert calls == [(0, 1), (0, 2)]


@pytest.mark.usefixtures("no_handlers")
def test_deliver_all_raises_it_at_the_last_attempt_alone(db):
    left = [RetryLater(5, counts=False), RetryLater(5), RetryLater(6), RetryLater(7)]

    @subscriber("t", group="g", max_attempts=3)
    def handle(delivery):
        if left:
            raise left.pop(0)

    publish("t", 0)
    (first,) = deliver_all()
    assert first.outcome == "snoozed"
    with pytest.raises(RetryLater, match="in 7 s"):
        deliver_all(advance=6)
    assert deliver_all(advance=600) == []


@pytest.mark.parametrize("delay", [-1, float("inf"), "60", 2_592_001])
def test_its_delay_is_checked_where_it_is_made(delay):
    with pytest.raises(InvalidMessage, match=f"RetryLater: delay {delay!r}: must be a timedelta or seconds"):
        RetryLater(delay)
