"""What a subscriber does while messages wait for slots: it asks seldom, and notices soon that there are some."""

from __future__ import annotations

import time

import pytest
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import Slots
from django_mysqlqueue.options.delivery_limits import NO_KEY, DeliveryLimits, parse_rate
from tests.support.harness import USING, Sub, handler, take_all
from tests.support.internals import (
    Claim,
    Flushed,
    GroupRef,
    Holding,
    Inbox,
    Limited,
    Reservation,
    Rest,
    Session,
    run,
    slots,
)

pytestmark = pytest.mark.promise("Limits")

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])
REF = GroupRef("g", "t")
LEASE_MS = 30_000


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """On a busy machine a step may take longer than a message has to start."""
    monkeypatch.setattr(slots, "START_WITHIN_US", 10_000_000)


# -- statements -----------------------------------------------------------------


def run_poller(still, sub, until, seconds, work=lambda: None):
    """Runs the poller's loop until a condition holds, or for some seconds at most. Time passes in its sleeps."""
    still.pass_in_sleeps_of(sub)
    ends_at = time.monotonic() + seconds
    while not until() and time.monotonic() < ends_at:
        still.move(1)
        sub.poller.step()
        work()
        sub.poller.sleep()


def statements_per_second(still, sub, seconds):
    """Runs the poller's loop, with its sleeps; nothing is handled."""
    count = 0

    def counted(execute, sql, params, many, context):
        nonlocal count
        count += 1
        return execute(sql, params, many, context)

    with connections[USING].execute_wrapper(counted):
        run_poller(still, sub, lambda: False, seconds)
    return count / seconds


def seldom_asked(sub):
    """As after some minutes without a slot."""
    group = sub.poller.groups[0]
    group.limited._fruitless = 10
    if group.handler.shared:
        group.mode._without_slots.count = 10


@pytest.mark.parametrize(
    ("mode", "limits"),
    [("ordered", {"rate": parse_rate("1/h")}), ("ordered", {"max_in_flight": 1})],
)
def test_waiting_for_slots_costs_no_more_than_twice_as_many_statements_as_idling(still, mode, limits):
    idle, limited = Sub(handler("idle", mode=mode)), Sub(handler(mode=mode, **limits), threads=9)
    publish_many("t", [Message(n, key=f"k{n % 10}") for n in range(500)])
    assert take_all(limited)
    seldom_asked(limited)
    for sub in (idle, limited):
        statements_per_second(still, sub, 1.0)  # until it polls once a second
    seconds = 5.0 if "max_in_flight" in limits else 2.5
    assert statements_per_second(still, limited, seconds) <= 2 * statements_per_second(still, idle, seconds)


@MODES
def test_many_keys_without_slots_cost_no_more_than_twice_as_many_statements_as_idling(still, mode, monkeypatch):
    monkeypatch.setattr(slots, "LONGEST_REST_US", 2_000_000)  # instead of ten seconds
    idle = Sub(handler("idle", mode=mode))
    limited = Sub(handler(mode=mode, rate_per_key=parse_rate("1/h")), threads=9)
    publish_many("t", [Message(n, key=f"k{n % 100}") for n in range(1000)])
    assert limited.settle(rounds=200) == 100
    for sub in (idle, limited):
        statements_per_second(still, sub, 2.0)
    assert len(limited.poller.groups[0].limited) == 100
    assert statements_per_second(still, limited, 5.0) <= 2 * statements_per_second(still, idle, 5.0)


def test_many_parked_messages_cost_no_more_than_twice_as_many_statements_as_idling(still):
    sub = Sub(handler(mode="shared", rate_per_key=parse_rate("1/h"), limit_by="tenant"), threads=9)
    idle = Sub(handler("idle", mode="shared"))
    for n in range(200):
        publish("t", n, key="k", metadata={"tenant": "ab"[n % 2]})
    take_all(sub)
    seldom_asked(sub)
    for one in (sub, idle):
        statements_per_second(still, one, 1.0)
    assert statements_per_second(still, sub, 5.0) <= 2 * statements_per_second(still, idle, 5.0)


# -- asking for slots -------------------------------------------------------------


def waiting(*rests):
    limited = Limited(Inbox([REF], leases_good=lambda: True), REF, "s", lease_ms=30_000)
    limited.claimed(Claim(Flushed(), partitions=dict(rests)), 1000)
    return limited


def never(keys):
    raise AssertionError(f"asked for {keys}")


def test_partitions_of_which_it_is_not_certain_are_asked_for_together():
    asked = []

    def ask(keys):
        asked.append(list(keys))
        return [None if key == ":b" else Rest(13_000, key, in_flight=False) for key in keys]

    limited = waiting(
        ("a", Rest(3000, ":a", in_flight=False)),
        ("b", Rest(4000, ":b", in_flight=True)),
        ("c", Rest(5000, ":c", in_flight=False)),
        ("d", Rest(9000, ":d", in_flight=False, is_certain=True)),
    )
    assert limited.rested(2999, ask) == []
    assert asked == []
    assert limited.rested(3000, ask) == ["b"]
    assert asked == [[":a", ":b", ":c"]]
    assert not limited.rests("b")
    assert [key for key in "acd" if limited.rests(key)] == ["a", "c", "d"]
    assert limited.rested(8999, ask) == []
    assert limited.rested(9000, ask) == ["d"]
    assert limited.next_at() == 13_000
    assert len(asked) == 1


def test_when_a_slot_is_certain_nothing_is_asked_for():
    limited = waiting(("a", Rest(3000, ":a", in_flight=False, is_certain=True)))
    assert limited.rested(3000, never) == ["a"]
    assert limited.next_at() is None


def test_it_is_asked_less_often_the_longer_there_are_no_slots():
    limited = waiting(("a", Rest(1100, ":a", in_flight=True)))
    at, pauses = 1000, []
    for _ in range(8):
        now = limited.next_at()
        pauses.append(now - at)
        at = now
        assert limited.rested(now, lambda keys: [Rest(1100, key, in_flight=True) for key in keys]) == []
    assert pauses[0] < 1000
    assert min(pauses[-3:]) >= 3000


def reserve(limits, held, keys, *, store=False):
    def write(session):
        reservation = Reservation(session, REF, Holding("s", limits, LEASE_MS, held))
        reservation.read(keys)
        found = [reservation.take(key) for key in keys]
        if store:
            reservation.store()
        return [one if isinstance(one, Rest) else None for one in found]

    return run(USING, write)


@pytest.mark.parametrize(
    "limits",
    [
        DeliveryLimits(rate_per_key=parse_rate("2/h"), burst=0),
        DeliveryLimits(rate_per_key=parse_rate("2/h"), burst=2),
        DeliveryLimits(max_in_flight_per_key=2),
        DeliveryLimits(rate_per_key=parse_rate("5/h"), max_in_flight_per_key=3),
    ],
)
def test_a_query_finds_the_slots_that_a_claim_finds(db, limits):
    reserve(limits, {}, [":a", ":a", ":b"], store=True)
    keys = [":a", ":a", ":b", ":b", ":b", ":c"]
    held = {":a": 2, ":b": 1}
    before = list(Slots.objects.order_by("pk").values())
    with CaptureQueriesContext(connection) as captured:
        asked = Reservation(Session(USING), REF, Holding("s", limits, LEASE_MS, held)).ask(keys)
    assert len(captured) == 2
    assert not [query for query in captured if "FOR UPDATE" in query["sql"]]
    assert list(Slots.objects.order_by("pk").values()) == before
    claimed = reserve(limits, held, keys)
    assert [one and (one.key, one.in_flight) for one in asked] == [one and (one.key, one.in_flight) for one in claimed]
    assert asked[-1] is None
    assert any(asked)


def test_a_query_does_not_ask_for_the_limits_of_the_group(db):
    limits = DeliveryLimits(rate=parse_rate("1/h"), burst=0, rate_per_key=parse_rate("1/h"))
    assert reserve(limits, {}, [":a"], store=True) == [None]
    a, b = Reservation(Session(USING), REF, Holding("s", limits, LEASE_MS)).ask([":a", ":b"])
    assert a is not None
    assert b is None, "a claim finds that the group has none"
    assert [one.key for one in reserve(limits, {}, [":b"])] == [NO_KEY]


def test_a_slot_that_another_subscriber_releases_is_found(still, monkeypatch):
    monkeypatch.setattr(slots, "LONGEST_REST_US", 1_000_000)
    limits = {"rate_per_key": parse_rate("1/h"), "burst": 0, "limit_by": "tenant"}
    done = []
    sub = Sub(handler(function=lambda delivery: done.append(delivery.payload), **limits))
    publish("t", 0, key="p", metadata={"tenant": "x"})
    publish("t", 1, key="q", metadata={"tenant": "x"})
    sub.settle()
    assert len(done) == 1
    assert len(sub.poller.groups[0].limited) == 1
    Slots.objects.filter(limit_key=":x").update(full_at=0)
    run_poller(still, sub, lambda: len(done) == 2, 10, sub.work)
    assert sorted(done) == [0, 1]


def test_rests_end_when_the_clock_has_been_corrected():
    limited = waiting()
    claim = Claim(Flushed(), partitions={"a": Rest(3_600_000, ":a", in_flight=False, is_certain=True)})
    claim.rest = Rest(3_600_000, NO_KEY, in_flight=False)
    limited.claimed(claim, 3_599_000)
    assert limited.rested(3_599_500, never) == []
    assert limited.room() == 0
    assert limited.rested(1000, never) == ["a"]
    assert limited.room() == 1
    assert limited.next_at() is None


def test_parked_messages_are_handled_as_soon_as_their_key_is_free(still):
    done = []
    one = handler(
        mode="shared", max_in_flight_per_key=1, limit_by="tenant", function=lambda delivery: done.append(delivery.key)
    )
    sub = Sub(one, threads=4)
    for n in range(60):
        publish("t", n, key="k", metadata={"tenant": "ab"[n % 2]})
    began = time.monotonic()
    run_poller(still, sub, lambda: len(done) == 60, 20, sub.work)
    assert len(done) == 60
    assert time.monotonic() < began + 8, "not one a second"
