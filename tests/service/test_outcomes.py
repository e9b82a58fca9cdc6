"""What a handler's outcome does: ack, nack, snooze, extend."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.exceptions import StaleDelivery
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, QueueMessage
from tests.support.handlers import Recorder, both_modes, fail
from tests.support.harness import Sub, handler, in_thread, lag, sequence


def test_shared_delivery_stays_invisible_while_its_holder_extends_it(db, clock):
    """Extensions outlast the original time-out; without them the message comes again."""
    publish("t", 1)
    holder = Sub(handler(mode="shared", visibility_timeout=10.0))
    other_got = Recorder()
    other = Sub(handler(mode="shared", visibility_timeout=10.0, function=other_got))
    holder.step()
    held = holder.take()
    assert held is not None
    for _ in range(5):
        clock.advance(8)
        holder.poller.shared[0].mode.extend()
        other.step()
        assert other.work() == 0
    clock.advance(11)
    other.settle()
    assert other_got.attempts == [(1, 1)]  # the first loss is free
    holder.run(held)
    holder.flush()
    assert other_got.attempts == [(1, 1)]
    assert lag() == 0


@both_modes
def test_nack_waits_for_the_backoff_and_counts(db, clock, mode):
    """Retries without backoff burn the attempts at once."""
    got = Recorder(lambda delivery: delivery.nack(delay=30) if delivery.attempt < 3 else None)
    publish("t", 1)
    sub = Sub(handler(function=got, mode=mode))
    sub.settle()
    assert got.attempts == [(1, 1)]
    clock.advance(29)
    sub.settle()
    assert got.attempts == [(1, 1)]
    clock.advance(2)
    sub.settle()
    assert got.attempts == [(1, 1), (1, 2)]
    clock.advance(31)
    sub.settle()
    assert got.attempts == [(1, 1), (1, 2), (1, 3)]
    assert lag() == 0


@pytest.mark.promise("Dead letters")
@both_modes
def test_backoff_grows_between_attempts(db, clock, mode):
    from django_mysqlqueue import Backoff

    got = Recorder(fail)
    publish("t", 1)
    sub = Sub(handler(function=got, mode=mode, backoff=Backoff(initial=10, factor=2, jitter=0), max_attempts=4))
    sub.settle()
    for wait, attempts in ((10, 2), (20, 3), (40, 4)):
        clock.advance(wait - 1)
        sub.settle()
        assert len(got.attempts) == attempts - 1
        clock.advance(1.1)
        sub.settle()
        assert len(got.attempts) == attempts
    assert lag() == 0  # dead-lettered


@both_modes
def test_snooze_does_not_count(db, clock, mode):
    got = Recorder(lambda delivery: delivery.snooze(30) if len(got.deliveries) < 4 else None)
    publish("t", 1, key="k")
    publish("t", 2, key="k")
    sub = Sub(handler(function=got, mode=mode, max_attempts=1))
    sub.settle()
    assert (2, 1) in got.attempts  # it does not block the other
    for _ in range(4):
        clock.advance(31)
        sub.settle()
    assert set(got.attempts) == {(1, 1), (2, 1)}
    assert lag() == 0
    assert not QueueMessage.objects.filter(topic="t_dlq").exists()


def test_a_raise_wins_over_an_intent(db):
    def ack_then_raise(delivery):
        delivery.ack()
        raise ValueError("after all")

    got = Recorder(ack_then_raise)
    publish("t", 1)
    Sub(handler(function=got, max_attempts=2)).settle()
    assert got.attempts == [(1, 1), (1, 2)]
    sequence()
    assert QueueMessage.objects.get(topic="t_dlq").last_error.endswith("ValueError: after all\n")


@pytest.mark.promise("Order")
def test_what_is_in_flight_does_not_block_what_follows(db):
    """Message 1 is held; 300 behind it flow, far more than a batch."""
    got = Recorder()
    publish_many("t", (Message(number, key="k") for number in range(301)))
    sub = Sub(handler(function=got, mode="shared"), claim_size=10, prefetch=20)
    sub.step()
    head = sub.take()
    sub.settle(rounds=200)
    assert sorted(got.payloads) == list(range(1, 301))
    assert lag() == 1
    sub.run(head)
    sub.settle()
    assert lag() == 0
    assert not DeliveryState.objects.exists()


@pytest.mark.promise("Order")
def test_a_nacked_head_does_not_stall_its_partition(db, clock):
    """A stuck head plus more acked rows than any batch: fetching must not start at the watermark."""
    got = Recorder(lambda delivery: fail(delivery) if delivery.payload == 0 else None)
    publish_many("t", (Message(number, key="k") for number in range(3000)))
    from django_mysqlqueue import Backoff

    sub = Sub(handler(function=got, backoff=Backoff(initial=3600, jitter=0), max_attempts=None), claim_size=100)
    sub.settle(rounds=100)
    assert got.payloads == list(range(3000))
    assert lag() == 1
    got.action = None
    clock.advance(3601)
    sub.settle(rounds=100)
    assert lag() == 0
    assert not DeliveryState.objects.exists()


def test_watermark_is_contiguous(db):
    """Acks of 3, 1, 2, then 5, then 4: the watermark follows the first unsettled one."""
    publish_many("t", (Message(number, key="k") for number in range(1, 6)))
    sub = Sub(handler(mode="shared"))
    sub.step()
    held = {one.claimed.offset: one for one in iter(sub.take, None)}
    offsets = sorted(held)
    acked = lambda: ConsumerOffset.objects.get().offset_acked  # noqa: E731
    expected = []
    for number, watermark in ((3, 0), (1, 1), (2, 3), (5, 3), (4, 5)):
        sub.run(held[offsets[number - 1]])
        sub.flush()
        expected.append(offsets[watermark - 1] if watermark else offsets[0] - 1)
        assert acked() == expected[-1] or (watermark == 0 and acked() <= expected[-1])
    assert not DeliveryState.objects.exists()


def test_a_generator_behind_a_wrapper_fails_instead_of_being_acked(db):
    """Its body never ran: acked, the message would be lost."""

    def generator(delivery):
        yield delivery

    publish("t", 1)
    Sub(handler(function=lambda delivery: generator(delivery), max_attempts=1)).settle()
    sequence()
    assert "returned a generator" in QueueMessage.objects.get(topic="t_dlq").last_error


@pytest.mark.servers_only
def test_extend_sees_through_an_old_snapshot(db):
    """In a handler's own REPEATABLE READ transaction it said "still yours" of what had been handed out again."""
    said = []

    def act(delivery):
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        with transaction.atomic():
            DeliveryState.objects.count()  # the snapshot
            in_thread(lambda: DeliveryState.objects.update(delivery_token=777))  # handed out again
            try:
                delivery.extend(60)
            except StaleDelivery:
                said.append("stale")

    sub = Sub(handler(function=act))
    publish("t", 1, key="k")
    sub.step().work()
    assert said == ["stale"]
