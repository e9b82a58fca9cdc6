"""What is refused, and operations on groups with clients in plain SQL."""

from __future__ import annotations

import MySQLdb
import pytest

from django_mysqlqueue import operations, publish
from django_mysqlqueue.models import (
    ConsumerGroup,
    ConsumerOffset,
    DeliveryState,
    OutboxMessage,
    QueueMessage,
    SubscriberHeartbeat,
)
from tests.support.harness import sequence
from tests.support.sql_clients import REF, numbers, publish_numbers, refused, register

pytestmark = [pytest.mark.servers_only, pytest.mark.promise("Consumers in plain SQL")]

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])


@MODES
def test_groups_with_rules_that_only_python_applies_are_refused(client, mode):
    register(mode)
    publish_numbers(1)
    operations.settings("g", "t", {"filter": {"region": ["eu"]}}, actor="tests")
    assert refused(client, *REF, 1) == "g on t has a filter, which only subscribers in Python apply"
    operations.settings("g", "t", {"filter": None, "rate": "5/s", "max_in_flight": 3}, actor="tests")
    assert "g on t has limits" in refused(client, *REF, 1)
    assert "rate, max_in_flight" in refused(client, *REF, 1)
    operations.settings("g", "t", unset=["filter", "rate", "max_in_flight"], actor="tests")
    assert len(client.claim()) == 1


@MODES
def test_registered_filters_and_limits_count(client, mode):
    register(mode, limits={"rate_per_key": "1/s"}, filter={"region": ["eu"]})
    assert "has a filter" in refused(client, *REF, 1)
    operations.settings("g", "t", {"filter": None}, actor="tests")
    assert "has limits" in refused(client, *REF, 1)
    operations.settings("g", "t", {"rate_per_key": None}, actor="tests")
    assert client.claim() == []


@MODES
def test_messages_with_coalesce_keys_are_refused(client, mode):
    register(mode)
    publish("t", {"n": 0}, key="a", coalesce="c")
    sequence()
    assert refused(client, *REF, 1) == "A message has a coalesce key, which only subscribers in Python apply"
    assert not DeliveryState.objects.exists()
    assert ConsumerOffset.objects.get().offset_claimed == 0


@MODES
def test_messages_with_coalesce_keys_that_were_claimed_before_are_refused(client, mode):
    register(mode)
    publish_numbers(1)
    (row,) = client.claim()
    assert client.snooze(row["handle"]) == "snoozed"
    QueueMessage.objects.update(coalesce_key="c")
    before = list(DeliveryState.objects.values())
    assert refused(client, *REF, 1) == "A message has a coalesce key, which only subscribers in Python apply"
    assert list(DeliveryState.objects.values()) == before


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nobody", "t", 1), "There is no consumer group nobody on t"),
        ((None, "t", 1), "There is no consumer group NULL on t"),
        (("g", "t", 0), "limit 0: must be 1 to 1000"),
        (("g", "t", 1001), "limit 1001: must be 1 to 1000"),
        (("g", "t", None), "limit NULL: must be 1 to 1000"),
    ],
)
def test_wrong_arguments_of_claims_are_refused(client, arguments, text):
    register("shared")
    assert refused(client, *arguments) == text


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("CALL queue_ack('g', 't', 'x')", "handle 'x': must be one that queue_claim has returned"),
        ("CALL queue_ack('g', 't', NULL)", "handle NULL: must be one that queue_claim has returned"),
        ("CALL queue_ack('g', 't', '1')", "handle '1': must be one that queue_claim has returned"),
        ("CALL queue_ack('g', 't', '01:2')", "handle '01:2': must be one that queue_claim has returned"),
        (
            "CALL queue_ack('g', 't', '1:9999999999999999999')",
            "handle '1:9999999999999999999': must be one that queue_claim has returned",
        ),
        ("CALL queue_nack('g', 't', '1:2', 'e', -1)", "delay -1: must be 0 to 2592000 seconds"),
        ("CALL queue_snooze('g', 't', '1:2', NULL)", "delay NULL: must be a number of seconds"),
        ("CALL queue_extend('g', 't', '1:2', 1e9)", "seconds 1000000000: must be 0 to 2592000 seconds"),
    ],
)
def test_wrong_arguments_of_outcomes_are_refused(client, statement, text):
    register("shared")
    assert refused(client, statement=statement) == text


@MODES
@pytest.mark.parametrize("action", ["ack", "nack", "reject", "snooze", "extend"])
def test_nobody_settles_what_nobody_holds(client, mode, action):
    """A row that waits for its next attempt has the token 0."""
    register(mode)
    publish_numbers(1)
    (row,) = client.claim()
    client.nack(row["handle"], delay=60)
    before = list(DeliveryState.objects.values())
    for token in (0, -1):
        with pytest.raises(MySQLdb.Error, match="must be one that queue_claim has returned"):
            getattr(client, action)(f"{row['offset']}:{token}")
    assert list(DeliveryState.objects.values()) == before


@pytest.mark.parametrize("handle", ["1:2", "999999999999999999:9223372036854775807"])
def test_handles_of_nothing_are_stale(client, handle):
    register("shared")
    assert client.ack(handle) == "stale"


def test_claims_want_autocommit(client):
    register("shared")
    client.run("SET autocommit = 0")
    assert "autocommit is off in this session" in refused(client, *REF, 1)
    client.run("SET autocommit = 1")
    assert client.claim() == []


def test_claims_and_extensions_do_not_belong_in_a_transaction(client):
    register("shared")
    publish_numbers(1)
    (row,) = client.claim()
    with client.transaction():
        client.run("INSERT INTO queue_outbox (topic, payload) VALUES ('other', 'x')")
        assert "a transaction is open" in refused(client, *REF, 1)
        assert "a transaction is open" in refused(
            client, *REF, row["handle"], statement="CALL queue_extend(%s, %s, %s, 1)"
        )
    assert OutboxMessage.objects.count() == 1, "the refusals did not end it"


@MODES
def test_a_paused_group_gets_nothing(client, mode):
    register(mode)
    publish_numbers(1)
    operations.pause("g", "t", actor="tests")
    assert client.claim() == []
    operations.resume("g", "t", actor="tests")
    assert len(client.claim()) == 1


@MODES
def test_after_a_seek_old_deliveries_are_stale(client, mode):
    register(mode)
    publish_numbers(2, keys=1)
    rows = client.claim()
    operations.seek("g", "t", "earliest", actor="tests")
    assert [client.ack(row["handle"]) for row in rows] == ["stale", "stale"]
    assert numbers(client.claim()) == [0, 1]


@MODES
def test_after_the_group_was_dropped_outcomes_are_stale(client, mode):
    register(mode)
    publish_numbers(1)
    (row,) = client.claim()
    operations.drop_group("g", "t", actor="tests")
    assert client.ack(row["handle"]) == "stale"
    assert not ConsumerGroup.objects.exists()


@MODES
def test_consumers_are_subscribers_of_the_group(client, mode):
    register(mode)
    publish_numbers(1)
    client.claim()
    beat = SubscriberHeartbeat.objects.get()
    assert beat.subscriber_name == client.name
    assert beat.info["client"] == "sql"
    assert isinstance(beat.info["started_at"], int), "MariaDB writes a variable as a string"
    assert beat.heartbeat_at - 60_000 < beat.info["started_at"] <= beat.heartbeat_at
    at = beat.heartbeat_at
    client.claim()
    beat.refresh_from_db()
    assert beat.heartbeat_at == at, "once in five seconds"
