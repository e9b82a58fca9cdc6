"""Slots of groups with limits: when they are of use, when they are released, and who holds up whom."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.filter_policies import parse
from django_mysqlqueue.models import DeliveryState, Slots, SubscriberHeartbeat
from django_mysqlqueue.operations import dropping
from django_mysqlqueue.options.delivery_limits import NO_KEY, DeliveryLimits, parse_rate
from tests.support.harness import USING, Sub, handler, holding, take_all
from tests.support.internals import GroupRef, Session, groups, sessions, slots

pytestmark = pytest.mark.promise("Limits")

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])
REF = GroupRef("g", "t")


@pytest.fixture
def patience(monkeypatch):
    """On a busy machine a step may take longer than a message has to start."""
    monkeypatch.setattr(slots, "START_WITHIN_US", 10_000_000)


# -- the lock -------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("limits", [{"max_in_flight": 1}, {"max_in_flight_per_key": 1}])
def test_a_claim_that_takes_nothing_neither_locks_nor_reads_the_limits(db, mode, limits):
    sub = Sub(handler(mode=mode, filter=parse({"region": ["eu"]}), **limits), threads=4)
    publish("t", 1, key="k", metadata={"region": "eu"})
    sub.settle()
    publish_many("t", [Message(n, key="k", metadata={"region": "us"}) for n in range(3)])
    with CaptureQueriesContext(connection) as queries:
        sub.settle()
    assert sub.inbox.passed_counts("filtered") == {REF: 3}
    assert not [one["sql"] for one in queries if slots.SLOTS in one["sql"]]


@pytest.mark.servers_only
@MODES
def test_slots_are_of_use_after_a_long_wait_for_the_lock(db, monkeypatch, mode):
    """The time of the locking statement is that at which it began to wait."""
    sub = Sub(handler(mode=mode, rate=parse_rate("10/s")), threads=4)
    publish("t", 1, key="k")
    sub.settle()
    publish("t", 2, key="k")
    taken = []
    take = slots.Reservation.take
    monkeypatch.setattr(slots.Reservation, "take", lambda *given: taken.append(take(*given)) or taken[-1])
    with holding(lambda: slots.lock(Session(USING), REF)) as end:
        threading.Timer(0.5, end.set).start()
        sub.step()
    assert taken[0].before - taken[0].after > 0.1


# -- what is late ---------------------------------------------------------------


@MODES
@pytest.mark.parametrize("atomic", [False, True])
def test_a_message_whose_slot_ends_before_the_call_is_returned(still, monkeypatch, mode, atomic):
    """Opening a connection may take long."""
    got = []
    sub = Sub(
        handler(
            mode=mode, atomic=atomic, rate=parse_rate("1/h"), function=lambda delivery: got.append(delivery.payload)
        )
    )
    publish("t", 1, key="k")
    sub.step()
    held = sub.take()
    connect = sessions.connect

    def slow(*arguments, **options):
        still.move(300)
        connect(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(sessions, "connect", slow)
        sub.run(held)
    sub.flush()
    assert got == []
    assert set(DeliveryState.objects.values_list("delivery_token", "retry_count")) == {(0, 0)}
    # The slot is released, less what the rate may have regained since.
    for _ in range(50):
        sub.settle()
        if got:
            break
        still.move(100)
    assert got == [1]


# -- changes --------------------------------------------------------------------


def test_slots_of_another_rate_are_not_released(db, patience):
    """What was claimed without a rate would make room for ten messages of 1/m, in each process that notices it."""
    one = handler(mode="shared", max_in_flight=100)
    subs = [Sub(one, threads=10) for _ in range(4)]
    publish_many("t", [Message(n, key=f"k{n}") for n in range(50)])
    for sub in subs:
        sub.step(times=8)  # It looks into the partitions of the others first.
        assert sub.inbox.waiting(REF)[0] == 10
    groups.register_options(USING, REF, "limits", {"rate": "1/m", "burst": 1}, actor="migrate")
    started = sum(len(take_all(sub)) for _ in range(3) for sub in subs)
    assert started <= 2, "a minute has one, and the burst"


def test_slots_of_the_same_rate_are_released(db, patience):
    sub = Sub(handler(mode="shared", rate=parse_rate("1/h"), burst=10), threads=10)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(10)])
    sub.step()
    assert sub.inbox.waiting(REF)[0] == 10
    limits = {"rate": "1/h", "burst": 10, "max_in_flight": 5}
    groups.register_options(USING, REF, "limits", limits, actor="migrate")
    assert sum(len(take_all(sub)) for _ in range(3)) == 5


@pytest.mark.parametrize(
    ("before", "after", "key", "same"),
    [
        ({"rate": "1/s"}, {"rate": "1/s", "max_in_flight": 3}, NO_KEY, True),
        ({"rate": "1/s"}, {"rate": "2/s"}, NO_KEY, False),
        ({"max_in_flight": 3}, {"rate": "2/s"}, NO_KEY, False),
        ({"rate_per_key": "1/s"}, {"rate_per_key": "1/s", "rate": "1/s"}, ":a", True),
        ({"rate_per_key": "1/s"}, {"rate_per_key": "1/s", "limit_by": "tenant"}, ":a", False),
    ],
)
def test_which_slots_take_as_long(before, after, key, same):
    one, other = (
        DeliveryLimits(**{name: parse_rate(value) if "rate" in name else value for name, value in given.items()})
        for given in (before, after)
    )
    assert one.has_interval_of(other, key) is same


@MODES
def test_slots_are_written_again_after_the_group_was_registered_again(db, mode):
    one = handler(mode=mode, max_in_flight=3)
    sub = Sub(one, threads=2)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(2)])
    assert len(take_all(sub)) == 2
    dropping.drop(USING, REF, actor="test")
    groups.register(USING, REF, mode=mode, start="earliest", options={"limits": {"max_in_flight": 3}})
    sub.step()
    sub.flush()
    assert Slots.objects.get(limit_key=NO_KEY, subscriber_name=sub.name).held >= 2


# -- who holds up whom ----------------------------------------------------------


def test_in_shared_mode_the_oldest_retry_gets_the_next_slot(db, patience):
    """Not that of the first key."""
    one = handler(mode="shared", max_in_flight=1, function=lambda delivery: delivery.nack(60))
    first = Sub(one)
    publish_many("t", [Message(key, key=key) for key in "zam"])
    first.settle()
    first.leave()
    for number, key in enumerate("zam", start=1):
        assert DeliveryState.objects.filter(partition_key=key, retry_count=1).update(invisible_until=number) == 1
    started = take_all(Sub(one, threads=4))
    assert [held.claimed.key for held in started] == ["z"]


def heir_of_suspects(one):
    """Another subscriber of a group, after one was lost with eight messages that it had started."""
    lost = Sub(one, threads=8)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(8)])
    held = []
    while len(held) < 8:
        held += take_all(lost)
    SubscriberHeartbeat.objects.filter(subscriber_name=lost.name).update(heartbeat_at=1)
    time.sleep(0.2)
    return Sub(one, threads=4)


@MODES
@pytest.mark.parametrize("limits", [{"max_in_flight": 8}, {"rate": parse_rate("1000/s")}])
def test_suspects_do_not_hold_up_healthy_messages(db, patience, mode, limits):
    """They start one after another, and each that waits in a process would hold a slot and a place."""
    one = handler(mode=mode, visibility_timeout=0.1, **limits)
    other = heir_of_suspects(one)
    publish_many("t", [Message(n, key=f"z{n}") for n in range(8)])
    until = time.monotonic() + 10
    started = []
    while time.monotonic() < until and len({held.claimed.key for held in started if held.claimed.key[0] == "z"}) < 3:
        started += take_all(other)
        other.flush()
        other.beat()
        time.sleep(0.02)
    assert sum(held.claimed.suspect for held in started) <= 1
    assert {held.claimed.key[0] for held in started} >= {"z"}
    assert len(started) >= 3


@MODES
@pytest.mark.parametrize("limits", [{"max_in_flight": 8}, {"rate": parse_rate("1000/s")}])
def test_suspects_follow_one_another_at_once(db, patience, mode, limits):
    done = []
    one = handler(mode=mode, visibility_timeout=0.1, function=lambda delivery: done.append(delivery.key), **limits)
    other = heir_of_suspects(one)
    for _ in range(200):
        other.step()
        other.work()
        if len(done) == 8:
            break
        assert other.poller.groups[0].limited.next_at() in (None, 0), "it waits for no time"
        other.beat()
        time.sleep(0.01)
    assert sorted(done) == [f"k{n}" for n in range(8)]
