"""Clocks: a subscriber's clock changes nothing, the database's may step back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import DeliveryState, PartitionLease
from tests.support.handlers import Recorder, stuck
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.internals import GroupRef, Session, clocks, heartbeats, leasing
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


# -- the database's clock steps while subscribers live ---------------------------------


STEPS = pytest.mark.parametrize("seconds", [3600, -3600])


def waiting_beside(mode, got):
    """A subscriber that has claimed a message, and another one, which knows the database's clock."""
    publish("t", 1, key="k")
    owner = Sub(handler(mode=mode, function=got)).step()
    other = Sub(handler(mode=mode, function=got))
    other.poller._poll()
    return owner, other


@pytest.mark.promise("Clocks", "One owner")
@STEPS
@pytest.mark.parametrize("polls", [0, 1])
@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_what_a_live_subscriber_holds_is_not_taken_when_the_clock_steps(db, clock, mode, polls, seconds):
    """Even if the other one acts before its next poll would show it the step."""
    got = Recorder()
    owner, other = waiting_beside(mode, got)
    clock.step(seconds)
    for _ in range(polls):
        other.poller._poll()
    other.poller._next_poll = float("inf")
    if mode == "shared":
        other.poller.groups[0].mode.found_due(1)
        other.poller.groups[0].mode.expect_clock_step()
    other.poller._tick()
    other.poller._turn(other.poller.groups[0])
    assert other.take() is None
    owner.settle()
    assert got.attempts == [(1, 1)]
    assert lag() == 0


@pytest.mark.promise("Clocks", "One owner")
@STEPS
def test_a_lease_is_not_stolen_when_the_clock_steps_while_leases_are_acquired(db, clock, monkeypatch, seconds):
    """After the clocks were compared, and before the owner's heartbeat is read."""
    owner, other = waiting_beside("ordered", Recorder())
    lock = leasing.lock

    def lock_and_step(*args, **options):
        clock.step(seconds)
        return lock(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(leasing, "lock", lock_and_step)
        taken = leasing.acquire(USING, REF, other.name, {"k"}, lease_ms=30_000, clock=other.context.clock)
    assert taken == leasing.Acquired(set(), {"k"})
    assert PartitionLease.objects.get().leased_by == owner.name


@pytest.mark.promise("Clocks", "One owner")
@STEPS
@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_after_a_step_of_the_clock_a_lost_subscriber_is_relieved_later(db, clock, mode, seconds):
    """Once it would have sent a heartbeat, or extended its deliveries."""
    got = Recorder()
    _, other = waiting_beside(mode, got)
    clock.step(seconds)
    other.step()
    clock.advance(20)
    other.beat()
    other.step(times=2)
    assert other.work() == 0
    clock.advance(41)
    other.beat()
    for group in other.poller.shared:
        group.mode.expect_clock_step()  # As the maintenance does.
    other.step(times=2)
    assert other.work() == 1
    assert got.payloads == [1]


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_without_a_step_a_lost_subscriber_is_relieved_as_ever(db, clock, mode):
    got = Recorder()
    _, other = waiting_beside(mode, got)
    clock.advance(31 if mode == "ordered" else 61)
    other.beat()
    other.step(times=2)
    assert other.work() == 1


@STEPS
def test_retries_of_a_shared_group_go_on_after_a_step_of_the_clock(db, clock, seconds):
    """What waits for another attempt is in nobody's hands."""
    got = Recorder()
    owner, other = waiting_beside("shared", got)
    publish("t", 2, key="k")
    failing = Sub(handler(mode="shared", function=lambda delivery: delivery.nack(delay=9)))
    failing.settle()
    failing.leave()
    clock.step(seconds)
    clock.advance(10)
    other.poller._next_tick = float("inf")
    other.settle()
    assert got.payloads == [2]
    owner.settle()
    assert got.payloads == [2, 1]


@STEPS
def test_a_subscriber_extends_its_deliveries_at_once_when_the_clock_steps(db, clock, seconds):
    """So those that start later, and do not know of the step, leave them alone, too."""
    got = Recorder()
    owner, _ = waiting_beside("shared", got)
    clock.step(seconds)
    owner.step()
    clock.advance(40)
    state = DeliveryState.objects.get()
    assert abs(state.delivered_at + 40_000 - Session(USING).now()) < 10_000
    assert abs(state.invisible_until - 20_000 - Session(USING).now()) < 10_000
    later = Sub(handler(mode="shared", function=got)).step()
    assert later.take() is None
    owner.settle()
    assert got.attempts == [(1, 1)]


@pytest.mark.promise("Limits")
@STEPS
def test_the_slots_of_a_live_subscriber_stay_its_own_when_the_clock_steps(db, clock, seconds):
    got = Recorder()
    publish("t", 1, key="a")
    options = {"mode": "shared", "function": got, "max_in_flight": 1}
    owner = Sub(handler(**options)).step()
    held = owner.take()
    publish("t", 2, key="b")
    sequence()
    other = Sub(handler(**options))
    other.poller._poll()
    clock.step(seconds)
    other.poller._next_poll = float("inf")
    for _ in range(3):  # The first claim reads the options of the group, the second one creates the offsets row.
        other.poller.groups[0].notify(["b"])
        other.poller._turn(other.poller.groups[0])
    assert other.take() is None
    owner.run(held)
    owner.flush()
    clock.advance(5)
    other.beat()
    other.settle()
    assert sorted(got.payloads) == [1, 2]


@pytest.mark.any_engine
@pytest.mark.parametrize(
    ("database", "took", "step"),
    [
        (10_000, 0.0, 0.0),
        (10_400, 0.0, 0.0),
        (9_600, 0.0, 0.0),
        (3_610_000, 0.0, 3600.0),
        (-3_590_000, 0.0, -3600.0),
        (11_000, 0.0, 1.0),
        (9_000, 0.0, -1.0),
        (9_000, 2.0, 0.0),
        (5_000, 2.0, -3.0),
        (15_000, 2.0, 5.0),
    ],
)
def test_what_is_a_step_of_the_clock(monkeypatch, database, took, step):
    """The time that a statement took may be the difference; half a second may be slewing."""
    monotonic = [100.0]
    monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic=lambda: monotonic[0]))
    clock = clocks.DatabaseClock()
    assert clock.set(0, 5.0) == 0.0
    assert clock.set(0, 0.0) == 0.0
    monotonic[0] = 110.0
    assert clock.check(database, took) == pytest.approx(step, abs=0.002)
    assert clock.is_doubtful(30_000) == bool(step)
    assert clock.set(database, took) == pytest.approx(step, abs=0.002)
    assert abs(clock.now() - database) <= 1
    monotonic[0] = 139.9
    assert clock.is_doubtful(30_000) == bool(step)
    monotonic[0] = 140.0
    assert not clock.is_doubtful(30_000)
