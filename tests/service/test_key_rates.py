"""Rates that differ by key: ``rate_per_key`` as a mapping. Keys without a rate cost nothing."""

from __future__ import annotations

import time

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, operations, publish, publish_many
from django_mysqlqueue.models import ConsumerGroup, DeliveryState, Slots
from django_mysqlqueue.options.delivery_limits import parse_key_rates
from tests.support.harness import Sub, handler, take_all
from tests.support.internals import GroupRef, slots

pytestmark = pytest.mark.promise("Limits")

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """On a busy machine a step may take longer than a message has to start."""
    monkeypatch.setattr(slots, "START_WITHIN_US", 10_000_000)


def rates(**by_key):
    return parse_key_rates(by_key)


def keys(started):
    return sorted(held.claimed.key for held in started)


def held_by(sub):
    return [(claimed.key, claimed.offset) for claimed in sub.inbox.held(GroupRef("g", "t"))]


def none_started_lately(sub):
    """A process claims as many messages with slots as it has started lately, although its threads are busy."""
    limited = sub.poller.shared[0].limited
    limited._sampled_at, limited._recent = time.monotonic() + 60, 0


def slot_keys():
    return sorted(Slots.objects.values_list("limit_key", flat=True))


@MODES
def test_each_key_has_its_own_rate(db, mode):
    sub = Sub(
        handler(mode=mode, rate_per_key=parse_key_rates({"a": "3/m", "b": "1/m", "*": "2/m"}), burst=1), threads=9
    )
    # Ordered groups take one message of a key at a time.
    publish_many("t", [Message(n, key=key) for n in range(9) for key in "abcd"])
    started = []
    for _ in range(9):
        started += keys(take_all(sub))
        for held in list(sub._batches.values()):
            sub.run(held.items[0])
        sub.flush()
    assert sorted(started) == list("abcd"), "each rate has an interval of more than these steps"
    accounts = dict(Slots.objects.exclude(limit_key="").values_list("limit_key", "full_at"))
    assert accounts[":a"] < accounts[":c"] < accounts[":b"]
    assert abs(accounts[":c"] - accounts[":d"]) < 10_000_000


@MODES
def test_keys_without_a_rate_are_not_limited_and_have_no_account(db, mode):
    got = []
    one = handler(mode=mode, rate_per_key=rates(a="1/h"), function=lambda delivery: got.append(delivery.payload))
    sub = Sub(one, threads=4)
    publish_many("t", [Message(f"{key}{n}", key=key) for n in range(20) for key in ("a", "b", "c", None)])
    sub.settle()
    assert [one for one in got if one[0] == "a"] == ["a0"]
    assert len(got) == 61
    assert slot_keys() == ["", ":a"]


@MODES
def test_keys_without_a_rate_need_no_statement_on_the_accounts(db, mode):
    def fail_once(delivery):
        if delivery.attempt == 1:
            raise ValueError

    sub = Sub(handler(mode=mode, rate_per_key=rates(a="1/h"), function=fail_once), threads=4)
    sub.settle()
    publish_many("t", [Message(n, key=key) for n in range(5) for key in ("b", None)])
    publish("t", 9, key="b", priority=5)
    with CaptureQueriesContext(connection) as queries:
        assert sub.settle() == 22, "each was retried once"
    assert not [one["sql"] for one in queries if slots.SLOTS in one["sql"]]
    assert not Slots.objects.exists()


def test_keys_without_a_rate_need_as_many_statements_as_without_limits(db):
    def statements(topic, **limits):
        sub = Sub(handler(topic=topic, mode="shared", **limits), threads=2)
        sub.settle()
        with CaptureQueriesContext(connection) as queries:
            for place in range(3):
                for key in ("b", "c", None):
                    publish_many(topic, [Message(n, key=key, id=f"{place}-{n}") for n in range(40)])
                assert sum(sub.settle() for _ in range(20)) == 120
        return len(queries)

    without = statements("t")
    assert statements("u", rate_per_key=rates(a="1/h")) <= without
    assert statements("v", rate_per_key=parse_key_rates("10000/s")) > 1.5 * without


def test_other_keys_are_claimed_while_no_thread_has_use_for_slots(db):
    by_key = {f"a{n}": "1/h" for n in range(150)}
    sub = Sub(handler(mode="shared", rate_per_key=parse_key_rates(by_key)), threads=2)
    publish_many("t", [Message(n, key="b") for n in range(2)])
    sub.step()
    running = [sub.take(), sub.take()]
    none_started_lately(sub)
    publish_many("t", [Message(n, key=key) for n in range(5) for key in by_key])
    publish_many("t", [Message(n, key="b") for n in range(50)])
    sub.step(times=20)
    assert sub.inbox.waiting(GroupRef("g", "t"))[0] == 50
    assert not Slots.objects.exists(), "a slot would be lost: it is for a fifth of a second"
    for held in running:
        sub.run(held)
    assert sum(sub.settle() for _ in range(20)) == 50 + len(by_key)
    assert not DeliveryState.objects.exists()
    assert set(slot_keys()) == {"", *(f":{key}" for key in by_key)}


def test_retries_of_limited_keys_wait_while_no_thread_has_use_for_slots(db):
    def fail_once(delivery):
        if delivery.attempt == 1:
            raise ValueError

    sub = Sub(handler(mode="shared", rate_per_key=rates(a="1/h"), function=fail_once), threads=2)
    publish_many("t", [Message(n, key=key) for n in range(2) for key in "abc"])
    started = take_all(sub)
    (limited,) = [held for held in started if held.claimed.key == "a"]
    other, *running = [held for held in started if held is not limited]
    Slots.objects.update(full_at=0)
    for held in (limited, other):
        sub.run(held)
    none_started_lately(sub)
    sub.flush()
    sub.step(times=3)
    assert (other.claimed.key, other.claimed.offset) in held_by(sub)
    assert "a" not in {key for key, _ in held_by(sub)}
    for held in running:
        sub.run(held)
    sub.flush()
    sub.step(times=3)
    assert [key for key, _ in held_by(sub)].count("a") == 1


@MODES
def test_retries_take_slots_of_their_keys(db, mode):
    got = []

    def fail(delivery):
        got.append(delivery.key)
        raise ValueError

    sub = Sub(handler(mode=mode, rate_per_key=rates(a="1/h"), function=fail, max_attempts=4), threads=4)
    publish_many("t", [Message(1, key="a"), Message(1, key="b")])
    for _ in range(9):
        sub.settle()
    assert (got.count("a"), got.count("b")) == (1, 4)


@MODES
def test_an_override_replaces_the_mapping(db, mode):
    one = handler(mode=mode, rate_per_key=rates(a="1/h"))
    sub = Sub(one, threads=9)
    publish_many("t", [Message(n, key=key) for n in range(9) for key in "ab"])
    assert sub.settle() == 10
    operations.settings("g", "t", {"rate_per_key": {"b": "1/h", "a": None}}, actor="tests")
    assert ConsumerGroup.objects.get().overrides["rate_per_key"]["value"] == {"a": None, "b": "1/h"}
    sub.step()
    publish_many("t", [Message(n, key="b") for n in range(3)])
    assert sub.settle() == 9, "eight of a, and one of b"
    operations.settings("g", "t", {"rate_per_key": None}, actor="tests")
    sub.step()
    assert sub.settle() == 2


def test_an_earlier_mapping_is_ignored_if_it_is_invalid(db, caplog):
    sub = Sub(handler(rate_per_key=rates(a="1/h")))
    ConsumerGroup.objects.update(limits={"rate_per_key": {"a": 5}})
    publish_many("t", [Message(n, key="a") for n in range(3)])
    assert sub.settle() == 3
    assert "has 5 for 'a': a rate must be a number and a unit" in caplog.text


def test_by_a_field_of_the_metadata(db):
    sub = Sub(handler(mode="shared", rate_per_key=parse_key_rates({"7": "1/h"}), limit_by="tenant"), threads=9)
    publish_many("t", [Message(n, key="k", metadata={"tenant": tenant}) for n in range(3) for tenant in (7, "7", 8)])
    assert sub.settle() == 4, "all of 8, and one of 7"
    assert slot_keys() == ["", ":7"]
