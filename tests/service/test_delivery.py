"""Every message reaches every group, as it was published. Driven by hand: no threads, no sleeping."""

from __future__ import annotations

import pytest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import QueueMessage
from tests.support.handlers import Recorder, both_modes, fail
from tests.support.harness import Sub, handler, lag, sequence

JSON_VALUES = [None, True, False, 0, -1, 2**53, 1.5, "", "text", "😀 é \x00", [], [1, [2]], {}, {"a": {"b": None}}]


@both_modes
def test_payload_and_metadata_come_back(db, mode):
    got = Recorder()
    for value in JSON_VALUES:
        publish("t", value, key="k", metadata={"trace": "😀", "n": 1})
    publish("t", b"\x00\xff raw", key="k")
    sub = Sub(handler(function=got, mode=mode))
    sub.settle()
    assert sorted(map(repr, got.payloads)) == sorted(map(repr, [*JSON_VALUES, b"\x00\xff raw"]))
    first = got.deliveries[0]
    assert first.metadata == {"trace": "😀", "n": 1, "content_type": "application/json"}
    assert first.group == "g"
    assert first.topic == "t"
    assert first.key == "k"
    assert first.published_at.tzinfo is not None
    assert lag() == 0


def test_keys_that_differ_by_case_padding_or_accent_are_different_partitions(db):
    got = Recorder()
    keys = ["a", "A", "a ", " a", "á", "a\x00", "😀", ""]
    for key in keys:
        publish("t", key, key=key, id="same")
    Sub(handler(function=got)).settle()
    assert sorted(got.payloads) == sorted(keys)
    assert all(delivery.key == delivery.payload for delivery in got.deliveries)


def test_a_partition_that_is_not_acked_does_not_hold_up_another(db):
    """One of 1,000 partitions is stuck; the others flow."""
    got = Recorder(lambda delivery: fail(delivery) if delivery.key == "k7" else None)
    publish_many("t", (Message(number, key=f"k{number % 1000}") for number in range(2000)))
    sub = Sub(handler(function=got, max_attempts=None, on_failure="block"), claim_size=500, prefetch=1000)
    for _ in range(12):
        sub.step()
        sub.work()
    flowing = {payload for payload in got.payloads if payload % 1000 != 7}
    assert flowing == {number for number in range(2000) if number % 1000 != 7}
    sub.flush()
    assert lag() == 2


@pytest.mark.promise("Order")
@pytest.mark.parametrize("count", [5, 10, 300])
def test_order_within_a_partition(db, count):
    got = Recorder()
    publish_many("t", (Message(number, key="k") for number in range(count)))
    Sub(handler(function=got), claim_size=7).settle(rounds=200)
    assert got.payloads == list(range(count))


@both_modes
def test_batch_size_one(db, mode):
    got = Recorder()
    publish_many("t", (Message(number, key="k") for number in range(5)))
    Sub(handler(function=got, mode=mode), claim_size=1, prefetch=1).settle(rounds=100)
    assert got.payloads == list(range(5))


def test_a_message_published_while_idle_arrives(db):
    got = Recorder()
    sub = Sub(handler(function=got))
    assert sub.settle() == 0
    publish("t", "late")
    sub.settle()
    assert got.payloads == ["late"]


def test_subscriber_that_comes_late_gets_what_was_published_before(db):
    publish_many("t", range(5))
    sequence()
    got = Recorder()
    Sub(handler(function=got)).settle()
    assert sorted(got.payloads) == list(range(5))


def test_keyless_messages_spread_over_partitions(db):
    publish_many("t", range(200))
    sequence()
    keys = set(QueueMessage.objects.values_list("partition_key", flat=True))
    assert keys == {f"__p:{number}" for number in range(16)}


def test_hashed_topic_keeps_the_publishers_key(db, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": 3}}}
    got = Recorder()
    publish_many("t", (Message(number, key=f"user-{number}") for number in range(20)))
    Sub(handler(function=got)).settle()
    assert {delivery.key for delivery in got.deliveries} == {f"user-{number}" for number in range(20)}
    assert set(QueueMessage.objects.values_list("partition_key", flat=True)) == {"__p:0", "__p:1", "__p:2"}
    assert "mysqlqueue.key" not in got.deliveries[0].metadata
