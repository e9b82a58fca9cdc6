"""Order within a partition, across takeovers and failures."""

from __future__ import annotations

import pytest

from django_mysqlqueue import Message, publish_many
from tests.support.handlers import Recorder
from tests.support.harness import Sub, handler


@pytest.mark.promise("Order")
def test_take_over_goes_back_to_the_first_unsettled(db, clock):
    """First starts are in offset order across a crash."""
    got = Recorder()
    publish_many("t", (Message(number, key="k") for number in range(50)))
    first = Sub(handler(function=got), claim_size=20, prefetch=40)
    first.step()
    first.work(7)
    first.flush()
    first.take()
    clock.advance(31)
    Sub(handler(function=got), claim_size=20, prefetch=40).settle()
    assert got.payloads == list(range(50))


@pytest.mark.parametrize("action", ["nack", "snooze"])
def test_block_withholds_the_next_until_the_head_is_settled(db, clock, action):
    starts = Recorder()

    def head_fails_twice(delivery):
        starts(delivery)
        if delivery.payload == 3 and len([p for p in starts.payloads if p == 3]) < 3:
            delivery.nack(delay=10) if action == "nack" else delivery.snooze(10)

    publish_many("t", (Message(number, key="k") for number in range(10)))
    sub = Sub(handler(function=head_fails_twice, on_failure="block"), claim_size=4)
    sub.settle()
    assert starts.payloads == [0, 1, 2, 3]
    clock.advance(11)
    sub.settle()
    assert starts.payloads == [0, 1, 2, 3, 3]
    clock.advance(11)
    sub.settle()
    assert starts.payloads == [0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 8, 9]
    assert {delivery.attempt for delivery in starts.deliveries if delivery.payload > 3} == {1}


def test_block_holds_across_a_take_over(db, clock):
    starts = Recorder(lambda delivery: delivery.nack(delay=100) if delivery.payload == 1 else None)
    publish_many("t", (Message(number, key="k") for number in range(5)))
    first = Sub(handler(function=starts, on_failure="block"))
    first.settle()
    clock.advance(31)
    second = Sub(handler(function=starts, on_failure="block"))
    second.settle()
    assert starts.payloads == [0, 1]
    clock.advance(70)
    starts.action = None
    second.heart.beat()
    second.settle()
    assert starts.payloads == [0, 1, 1, 2, 3, 4]
