"""What counts as an attempt: failures, and losses that had started."""

from __future__ import annotations

import dataclasses

import pytest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import QueueMessage
from tests.support.handlers import Recorder, both_modes
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.internals import settling


@pytest.mark.promise("Poison messages")
@both_modes
def test_losses_count_only_what_had_started_on_record(db, clock, mode):
    """A handler that kills its process every time is dead-lettered; its neighbours lose nothing."""
    publish_many("t", (Message(number, key="k") for number in range(5)))
    starts = 0
    calm = Recorder()

    def deadly(delivery):
        nonlocal starts
        if delivery.payload == 2:
            starts += 1
            raise SystemError("killed")
        calm(delivery)

    for _ in range(12):
        sub = Sub(handler(function=deadly, mode=mode, max_attempts=3))
        sub.step()
        while (held := sub.take()) is not None:
            if held.body.payload == b"2":
                if held.claimed.suspect:
                    assert settling.record_start(USING, held.claimed)
                starts += 1
                break  # the process dies here: no outcome, no flush, no deregistration
            sub.run(held)
            if held.claimed.suspect:
                sub.flush()  # as the poller does at once: before that no other suspect may start
        else:
            sub.flush()
        clock.advance(61)
    Sub(handler(function=deadly, mode=mode, max_attempts=3)).settle()
    sequence()
    dead = QueueMessage.objects.get(topic="t_dlq")
    assert dead.payload == b"2"
    assert starts == 1 + 3  # the first loss is free, then max_attempts starts on record
    assert dead.failure_count == 3
    assert "was lost while" in dead.last_error
    assert {delivery.attempt for delivery in calm.deliveries if delivery.payload > 2} == {1}
    assert set(calm.payloads) == {0, 1, 3, 4}
    assert lag() == 0


def test_claimed_and_given_back_does_not_count(db):
    publish_many("t", (Message(number, key="k") for number in range(5)))
    for _ in range(10):
        sub = Sub(handler(max_attempts=1))
        sub.step()
        sub.leave()
    got = Recorder()
    Sub(handler(function=got, max_attempts=1)).settle()
    assert got.attempts == [(number, 1) for number in range(5)]


def test_a_suspect_that_never_started_stays_one(db, clock):
    publish("t", 1, key="k")
    Sub(handler()).step()  # claims and vanishes
    clock.advance(31)
    second = Sub(handler())
    second.step()
    second.leave()  # given back unstarted
    third = Sub(handler())
    third.step()
    held = third.take()
    assert held.claimed.suspect
    assert held.claimed.attempt == 1


def test_no_second_suspect_starts_before_the_first_one_is_written(db, clock):
    """Else a suspect that kills its process takes the unwritten acks of its neighbours with it."""
    publish_many("t", (Message(number, key=f"k{number}") for number in range(3)))
    Sub(handler()).step()  # claims all and vanishes
    clock.advance(31)
    sub = Sub(handler())
    sub.step()
    first = sub.take()
    assert first.claimed.suspect
    assert sub.take() is None
    sub.run(first)
    assert sub.take() is None
    sub.flush()
    second = sub.step().take()
    assert second.claimed.suspect


@pytest.mark.parametrize("on_failure", ["block", "skip"])
def test_a_suspect_that_turns_out_to_be_anothers_is_forgotten(db, clock, on_failure):
    """It stayed in hand: in strict order its partition stopped for good."""
    publish("t", 1, key="k")
    Sub(handler()).step()
    clock.advance(61)
    frozen = Sub(handler(on_failure=on_failure))
    frozen.step()
    held = frozen.take()
    assert held.claimed.suspect
    clock.advance(61)
    other = Sub(handler(on_failure=on_failure))
    other.settle()
    other.leave()
    frozen.heart.beat()
    frozen.run(held)
    frozen.settle()
    assert not any(partition.in_flight for partition in frozen.poller.ordered[0].mode.partitions.values())
    got = Recorder(lambda delivery: delivery.nack(delay=0) if delivery.attempt == 1 else None)
    work = frozen.poller.ordered[0]
    work.configuration.handler = dataclasses.replace(work.handler, function=got)
    publish_many("t", [Message(2, key="k"), Message(3, key="k")])
    frozen.settle()
    assert set(got.payloads) == {2, 3}
    assert lag() == 0
