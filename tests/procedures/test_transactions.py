"""Outcomes in transactions of clients, and other transactions that are open meanwhile."""

from __future__ import annotations

import pytest

from django_mysqlqueue.models import DeliveryState, OutboxMessage
from tests.support.sql_clients import (
    REF,
    holding,
    impatient,
    nothing_is_left,
    numbers,
    pass_time,
    publish_numbers,
    register,
)

pytestmark = [pytest.mark.servers_only, pytest.mark.promise("Consumers in plain SQL")]

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])


@MODES
def test_an_ack_commits_with_the_clients_own_changes(client, mode):
    register(mode)
    publish_numbers(2, keys=1)
    first, second = client.claim()
    with client.transaction():
        client.run("INSERT INTO queue_outbox (topic, payload) VALUES ('other', 'effect')")
        assert client.ack(first["handle"]) == "acked"
    assert OutboxMessage.objects.count() == 1
    assert DeliveryState.objects.filter(acked=True).count() == 1
    client.run("START TRANSACTION")
    assert client.ack(second["handle"]) == "acked"
    client.run("ROLLBACK")
    assert DeliveryState.objects.filter(acked=True).count() == 1
    with client.transaction():
        assert client.ack(second["handle"]) == "acked"
    assert client.claim() == [], "it moves the watermark"
    assert nothing_is_left()


@pytest.mark.parametrize("outcome", ["ack", "nack", "snooze"])
def test_with_a_pool_of_connections_a_partition_is_free_at_once(connect, outcome):
    """A claim, the transaction and the next claim may come from three connections."""
    register("ordered")
    publish_numbers(3, keys=1)
    first, second, third = connect(), connect(), connect()
    (row,) = first.claim(1)
    with second.transaction():
        getattr(second, outcome)(row["handle"])
    assert numbers(third.claim(1)) == [0 if outcome == "snooze" else 1]


@MODES
def test_a_stale_ack_leaves_the_transaction_to_the_client(connect, mode):
    register(mode)
    publish_numbers(1)
    first, second = connect(), connect()
    (old,) = first.claim()
    pass_time(61)
    (new,) = second.claim()
    with first.transaction():
        assert first.ack(old["handle"]) == "stale"
        first.run("INSERT INTO queue_outbox (topic, payload) VALUES ('other', 'x')")
    assert OutboxMessage.objects.count() == 1
    assert second.ack(new["handle"]) == "acked"


@MODES
@pytest.mark.parametrize("action", ["nack", "reject", "snooze"])
def test_other_outcomes_belong_to_the_transaction_too(client, mode, action):
    register(mode)
    publish_numbers(1)
    (row,) = client.claim()
    client.run("START TRANSACTION")
    assert getattr(client, action)(row["handle"]) in ("failed", "dead_lettered", "snoozed")
    client.run("ROLLBACK")
    assert not OutboxMessage.objects.exists()
    assert client.ack(row["handle"]) == "acked"


@MODES
def test_a_transaction_that_is_repeated_has_no_effect(client, mode):
    """Its COMMIT has arrived, but not the answer."""
    register(mode)
    publish_numbers(1)
    (row,) = client.claim()
    with client.transaction():
        assert client.ack(row["handle"]) == "acked"
    with client.transaction():
        assert client.ack(row["handle"]) == "stale"


@MODES
def test_a_stale_handle_does_not_wait_for_the_transaction_of_another_consumer(connect, mode):
    register(mode)
    publish_numbers(2, keys=1)
    late, other = connect(), connect()
    (old,) = late.claim(1)
    pass_time(61)
    (new,) = other.claim(1)
    impatient(late)
    with holding(other, "CALL queue_ack(%s, %s, %s)", *REF, new["handle"]):
        assert late.ack(old["handle"]) == "stale"
        assert late.extend(old["handle"]) == "stale"


@MODES
def test_a_row_that_is_locked_after_its_ack_does_not_hold_up_others(connect, mode):
    register(mode)
    publish_numbers(3, keys=1)
    client, other = connect(), connect()
    rows = client.claim()
    assert client.ack(rows[1]["handle"]) == "acked"
    impatient(client)
    # By the primary key: a scan of another index would keep locks of rows that do not match.
    locked = (
        "SELECT 1 FROM queue_delivery_state FORCE INDEX (PRIMARY) WHERE consumer_group = %s AND topic = %s "
        "AND partition_key = %s AND message_offset = %s FOR UPDATE"
    )
    offset = rows[1]["offset"]
    (key,) = DeliveryState.objects.filter(message_offset=offset).values_list("partition_key", flat=True)
    other.run("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    with holding(other, locked, *REF, key, offset):
        assert client.ack(rows[0]["handle"]) == "acked"
    assert client.ack(rows[2]["handle"]) == "acked"
    assert client.claim() == []
    assert nothing_is_left()


@MODES
def test_a_delivery_can_be_extended_after_an_early_ack(connect, mode):
    """The ack is in a transaction, which is still open. The extension comes from another connection."""
    register(mode)
    publish_numbers(1)
    client, other = connect(), connect()
    (row,) = client.claim()
    impatient(other)
    with holding(client, "CALL queue_ack(%s, %s, %s)", *REF, row["handle"]):
        assert other.extend(row["handle"], 60) == "extended"
    assert client.ack(row["handle"]) == "acked"
