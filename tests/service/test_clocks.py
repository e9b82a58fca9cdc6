"""Clocks: a subscriber's clock changes nothing, the database's may step back."""

from __future__ import annotations

import pytest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import PartitionLease
from django_mysqlqueue.service import heartbeats, leasing
from django_mysqlqueue.service.refs import GroupRef
from tests.support.handlers import Recorder, stuck
from tests.support.harness import USING, Sub, handler
from tests.support.scenarios import busy_partitions, rebalance

REF = GroupRef("g", "t")


@pytest.mark.promise("Clocks")
@pytest.mark.parametrize("hours", [-1, 1])
def test_moving_a_clients_clock_changes_nothing(db, monkeypatch, hours):
    import time

    busy_partitions(4)
    first = Sub(handler(function=stuck))
    rebalance([first])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + hours * 3600)
    second = Sub(handler(function=stuck))
    second.heart.beat()
    leases = leasing.read(leasing.Session(USING), [REF], 30_000)[REF]
    assert all(lease.good for lease in leases)
    taken = leasing.acquire(USING, REF, second.name, {"k000", "k001"}, lease_ms=30_000)
    assert taken.held == set()
    assert taken.elsewhere == {"k000", "k001"}


def test_a_heartbeat_from_the_future_counts_as_passed(db, clock):
    """The database's clock was an hour ahead and has been mended: its leases do not last an hour longer."""
    clock.advance(3600)
    busy_partitions(1)
    first = Sub(handler(function=stuck))
    rebalance([first])
    clock.advance(-3600)
    second = Sub(handler(function=stuck))
    second.step()
    assert second.owned() == {"k000"}


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_a_backoff_from_the_future_counts_as_passed(db, clock, mode):
    clock.advance(3600)
    got = Recorder(lambda delivery: delivery.nack(delay=60) if delivery.attempt == 1 else None)
    publish("t", 1)
    Sub(handler(function=got, mode=mode)).settle()
    clock.advance(-3600)
    Sub(handler(function=got, mode=mode)).settle()
    assert got.attempts == [(1, 1), (1, 2)]


def test_in_doubt_nothing_starts_until_the_leases_are_read_again(db, clock):
    """A frozen process wakes: it keeps what is still its own and drops what was stolen."""
    busy_partitions(2)
    got = Recorder()
    first = Sub(handler(function=got))
    first.step()
    first.heart.in_doubt = True
    assert first.work() == 0
    PartitionLease.objects.filter(partition_key="k000").update(leased_by="thief:1")
    heartbeats.beat(USING, "thief:1", [REF], {})
    first.heart.beat()
    first.step(tick=False)
    assert first.owned() == {"k001"}
    first.settle()
    assert [delivery.key for delivery in got.deliveries] == ["k001"]


def test_after_a_connection_error_nothing_is_stolen_at_once(db, clock):
    """The first to come back from a stall of the database would take everything."""
    busy_partitions(2)
    dead = Sub(handler(function=stuck))
    rebalance([dead])
    clock.advance(31)
    sub = Sub(handler(function=stuck))
    sub.poller.reset()
    sub.step()
    assert sub.owned() == set()
    sub.heart.beat()
    sub.context.stealing._interval = 0.0
    sub.step(times=2)
    assert sub.owned() == {"k000", "k001"}


def test_strict_order_survives_a_small_step_back_of_the_clock(db, clock):
    got = Recorder(lambda delivery: delivery.nack(delay=1) if (delivery.payload, delivery.attempt) == (1, 1) else None)
    publish_many("t", (Message(number, key="k") for number in (1, 2, 3)))
    sub = Sub(handler(function=got, on_failure="block"))
    sub.settle()
    assert got.payloads == [1]
    clock.advance(1.5)
    sub.poller._poll()
    clock.advance(-1.4)  # between the poll and the claim
    sub.poller._next_poll = sub.poller._next_tick = float("inf")
    sub.poller.step()
    sub.work()
    assert got.payloads == [1]
    clock.advance(2)
    sub.settle()
    assert got.payloads == [1, 1, 2, 3]
