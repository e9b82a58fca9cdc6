"""Failures of clients in plain SQL, and what is lost with them."""

from __future__ import annotations

import json
import time

import pytest
from django.db.models import F

from django_mysqlqueue import operations, publish
from django_mysqlqueue.models import DeliveryEvent, DeliveryState, OutboxMessage, PartitionLease, SubscriberHeartbeat
from django_mysqlqueue.options.backoff import Backoff
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, installing
from tests.support.sql_clients import nothing_is_left, numbers, pass_time, publish_numbers, register

pytestmark = [pytest.mark.servers_only, pytest.mark.promise("Consumers in plain SQL")]

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])


@MODES
def test_a_failed_message_comes_again_after_the_backoff(client, mode):
    register(mode)
    publish_numbers(1)
    (row,) = client.claim()
    assert client.nack(row["handle"], "boom") == "failed"
    state = DeliveryState.objects.get()
    assert (state.retry_count, state.last_error, state.delivery_token) == (1, "boom", 0)
    assert 500 <= state.invisible_until - time.time() * 1000 <= 1500
    assert client.claim() == []
    pass_time(2)
    (again,) = client.claim()
    assert again["attempt"] == 2
    assert client.ack(again["handle"]) == "acked"
    assert nothing_is_left()
    assert list(DeliveryEvent.objects.values_list("outcome", "attempt", "error")) == [("failed", 1, "boom")]


@pytest.mark.parametrize("attempts", [1, 2, 3, 4, 5, 8, 12, 13, 100])
def test_the_backoff_is_that_of_subscribers(client, attempts):
    for backoff in (Backoff(jitter=0.0), Backoff(initial=0.25, factor=3.5, maximum=90.5, jitter=0.0)):
        options = {name: getattr(backoff, name) for name in ("initial", "factor", "maximum", "jitter")}
        client.run("CALL queue__backoff(%s, %s, @wait)", attempts, json.dumps(options))
        (row,) = client.run("SELECT @wait AS wait")
        assert row["wait"] == pytest.approx(1000 * backoff.delay(attempts))


@MODES
def test_the_wait_can_be_chosen(client, mode):
    register(mode)
    publish_numbers(1)
    (row,) = client.claim()
    assert client.nack(row["handle"], delay=0) == "failed"
    (again,) = client.claim()
    assert client.nack(again["handle"], delay=3600) == "failed"
    assert DeliveryState.objects.get().invisible_until > (time.time() + 3500) * 1000


@MODES
def test_the_last_attempt_is_dead_lettered(client, mode):
    register(mode)
    publish("t", {"n": 1}, key="a", id="x")
    sequence()
    for attempt in range(1, 6):
        (row,) = client.claim()
        assert row["attempt"] == attempt
        result = client.nack(row["handle"], f"boom {attempt}", delay=0)
    assert result == "dead_lettered"
    assert nothing_is_left()
    dead = OutboxMessage.objects.get()
    assert (dead.topic, dead.original_id, dead.failed_group) == ("t_dlq", "x", "g")
    assert (dead.failure_count, dead.last_error, bytes(dead.payload)) == (5, "boom 5", b'{"n":1}')
    sequence()
    assert operations.redrive("t", actor="tests").changed == 1
    sequence()
    (row,) = client.claim()
    assert row["attempt"] == 1
    assert client.ack(row["handle"]) == "acked"


@MODES
def test_an_override_of_max_attempts_counts(client, mode):
    register(mode)
    publish_numbers(1)
    operations.settings("g", "t", {"max_attempts": 1}, actor="tests")
    (row,) = client.claim()
    assert client.nack(row["handle"], delay=0) == "dead_lettered"


@MODES
def test_without_a_maximum_nothing_is_dead_lettered(client, mode):
    register(mode)
    publish_numbers(1)
    operations.settings("g", "t", {"max_attempts": None}, actor="tests")
    for _ in range(7):
        (row,) = client.claim()
        assert client.nack(row["handle"], delay=0) == "failed"
    assert row["attempt"] == 7


@MODES
def test_a_rejected_message_is_dead_lettered_at_once(client, mode):
    register(mode)
    publish_numbers(1)
    (row,) = client.claim()
    assert client.reject(row["handle"], "not for me") == "dead_lettered"
    assert OutboxMessage.objects.get().last_error == "not for me"
    assert nothing_is_left()


@MODES
def test_on_a_dlq_nothing_is_dead_lettered(connect, mode):
    ref = GroupRef("g", "t_dlq")
    register(mode, ref)
    client = connect(ref)
    client.run("INSERT INTO queue_outbox (topic, payload) VALUES ('t_dlq', 'x')")
    sequence()
    for _ in range(6):
        (row,) = client.claim()
        assert client.nack(row["handle"], delay=0) == "failed"
    (row,) = client.claim()
    assert client.reject(row["handle"]) == "failed"


@MODES
def test_a_snoozed_message_comes_again_without_an_attempt(client, mode):
    register(mode)
    publish_numbers(1)
    (row,) = client.claim()
    assert client.snooze(row["handle"], 60) == "snoozed"
    assert client.claim() == []
    pass_time(61)
    (again,) = client.claim()
    assert again["attempt"] == 1


@MODES
def test_a_long_error_keeps_its_end(client, mode):
    register(mode)
    publish_numbers(1)
    (row,) = client.claim()
    client.nack(row["handle"], "x" * 20_000 + "the end 🎉")
    error = DeliveryState.objects.get().last_error
    assert len(error) == 16_000
    assert error.endswith("the end 🎉")


# -- what is lost ------------------------------------------------------------


@MODES
def test_what_is_not_settled_in_time_comes_again_alone(connect, mode):
    """The message that kills its consumer must not use up the attempts of the others."""
    register(mode)
    publish_numbers(3)
    lost, client = connect(), connect()
    assert len(lost.claim()) == 3
    lost.close()
    assert client.claim() == []
    pass_time(61)
    for _ in range(3):
        (row,) = client.claim()
        assert row["attempt"] == 1, "the first loss does not count"
        assert client.ack(row["handle"]) == "acked"
    assert client.claim() == []
    assert nothing_is_left()


@MODES
def test_a_message_that_is_always_lost_is_dead_lettered(connect, mode):
    register(mode)
    publish_numbers(1)
    attempts = []
    for _ in range(14):
        client = connect()
        rows = client.claim()
        attempts += [row["attempt"] for row in rows]
        client.close()
        pass_time(3600)
    assert attempts == [1, 1, 2, 3, 4, 5]
    assert nothing_is_left()
    dead = OutboxMessage.objects.get()
    assert dead.failure_count == 5
    assert "was lost while it handled attempt 5" in dead.last_error


@pytest.mark.promise("Order")
def test_nothing_of_its_partition_overtakes_a_message_that_was_lost_twice(connect):
    register("ordered")
    publish_numbers(3, keys=1)
    assert numbers(connect().claim(2)) == [0, 1]
    pass_time(61)
    assert numbers(connect().claim()) == [0]
    pass_time(61)
    DeliveryState.objects.filter(suspect=True).update(retry_count=3)  # its wait grows
    client, other = connect(), connect()
    assert client.claim() == []
    publish("t", {"n": 3}, key="k0")
    publish("t", {"n": 4}, key="k1")
    sequence()
    (row,) = other.claim()
    assert numbers([row]) == [4]
    assert other.ack(row["handle"]) == "acked"
    assert client.claim() == other.claim() == []
    pass_time(30)
    taken = []
    while rows := client.claim():
        taken += numbers(rows)
        assert {client.ack(row["handle"]) for row in rows} == {"acked"}
    assert taken == [0, 1, 2, 3]


def test_a_subscriber_beside_the_client_holds_its_partition_too(connect):
    register("ordered")
    publish_numbers(1)
    for _ in range(2):
        assert numbers(connect().claim()) == [0]
        pass_time(61)
    DeliveryState.objects.update(retry_count=3)
    assert connect().claim() == []
    publish("t", {"n": 1}, key="k0")
    got = Recorder()
    sub = Sub(handler(function=got))
    sub.settle()
    assert got.payloads == []
    pass_time(30)
    sub.poller.reset()
    sub.beat()
    sub.settle()
    assert [one["n"] for one in got.payloads] == [0, 1]


@MODES
def test_an_extended_delivery_is_not_taken(connect, mode):
    register(mode)
    publish_numbers(1)
    first, second = connect(), connect()
    (row,) = first.claim()
    for _ in range(5):
        pass_time(20)
        assert first.extend(row["handle"], 60) == "extended"
        assert second.claim() == []
    assert first.ack(row["handle"]) == "acked"


def test_a_partition_comes_back_with_the_heartbeat(connect):
    register("ordered")
    publish_numbers(2, keys=1)
    first, second = connect(), connect()
    rows = first.claim(1)
    assert second.claim() == []
    pass_time(31)
    (again,) = second.claim()
    assert again["offset"] == rows[0]["offset"]
    assert first.extend(rows[0]["handle"]) == "stale"
    assert first.ack(rows[0]["handle"]) == "stale"


def test_a_partition_has_one_owner(connect):
    register("ordered")
    publish_numbers(4, keys=1)
    first, second = connect(), connect()
    rows = first.claim(2)
    assert numbers(rows) == [0, 1]
    assert second.claim() == []
    assert first.claim() == [], "what is in flight here is not overtaken, either"
    first.ack(rows[0]["handle"])
    assert second.claim() == []
    first.ack(rows[1]["handle"])
    assert numbers(second.claim()) == [2, 3]


def test_in_strict_order_nothing_overtakes_a_failure(client, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "GROUPS": {"g": {"SQL_TOPICS": ["t"], "ON_FAILURE": "block"}}}
    installing.install(USING)
    register("ordered")
    publish_numbers(3, keys=1)
    assert numbers(rows := client.claim()) == [0]
    assert client.nack(rows[0]["handle"], delay=60) == "failed"
    assert client.claim() == []
    pass_time(61)
    for n in range(3):
        assert numbers(rows := client.claim()) == [n]
        assert client.ack(rows[0]["handle"]) == "acked"
    assert nothing_is_left()


def test_otherwise_later_messages_do_not_wait(client):
    register("ordered")
    publish_numbers(3, keys=1)
    rows = client.claim(1)
    assert client.nack(rows[0]["handle"], delay=60) == "failed"
    assert numbers(client.claim()) == [1, 2]


def test_a_consumer_is_the_owner_as_long_as_it_was_told(client):
    register("ordered")
    client.claim()
    SubscriberHeartbeat.objects.update(heartbeat_at=F("heartbeat_at") - 4000)  # so recent that none is due
    publish_numbers(1)
    (row,) = client.claim()
    assert SubscriberHeartbeat.objects.get().heartbeat_at + 30_000 >= row["invisible_until"]
    SubscriberHeartbeat.objects.update(heartbeat_at=F("heartbeat_at") - 4000)
    assert client.extend(row["handle"], 1) == "extended"
    until = DeliveryState.objects.get().invisible_until
    assert SubscriberHeartbeat.objects.get().heartbeat_at + 30_000 >= until - 5


def test_what_a_claim_leaves_has_no_owner(connect):
    """A lost message is not returned with others. Until it is, anybody may take its partition."""
    register("ordered")
    publish_numbers(2, keys=2)
    lost, client = connect(), connect()
    rows = {row["key"]: row for row in lost.claim()}
    lost.close()
    pass_time(61)
    DeliveryState.objects.filter(partition_key="k0").update(delivery_token=0, delivered_by="", invisible_until=0)
    (taken,) = client.claim()
    assert taken["key"] == "k0"
    assert PartitionLease.objects.get(partition_key="k1").leased_by == ""
    assert connect().claim()[0]["offset"] == rows["k1"]["offset"]
