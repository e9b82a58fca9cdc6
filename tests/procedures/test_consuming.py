"""Clients in plain SQL claim messages and settle them."""

from __future__ import annotations

import contextlib
import json
import re
import time

import MySQLdb
import pytest
from django.db.models import F

from django_mysqlqueue import Message, operations, publish, publish_many
from django_mysqlqueue.models import (
    ConsumerGroup,
    ConsumerOffset,
    DeliveryEvent,
    DeliveryState,
    OutboxMessage,
    PartitionLease,
    QueueMessage,
    Rollup,
    SubscriberHeartbeat,
)
from django_mysqlqueue.procedures import definitions, installing
from django_mysqlqueue.service.refs import GroupRef
from tests.support.harness import USING, lag, sequence
from tests.support.paths import ROOT
from tests.support.sql_clients import REF, pass_time, register

pytestmark = [pytest.mark.servers_only, pytest.mark.promise("Consumers in plain SQL")]

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])


def publish_numbers(count, keys=3, **options):
    publish_many("t", [Message({"n": n}, key=f"k{n % keys}", **options) for n in range(count)])
    sequence()


def numbers(rows):
    return [json.loads(row["payload"])["n"] for row in rows]


def nothing_is_left():
    return not (DeliveryState.objects.exists() or PartitionLease.objects.exists() or lag())


@MODES
def test_what_was_published_is_claimed_and_acked(client, mode):
    register(mode)
    publish("t", {"n": 1}, key="a", id="x", metadata={"tenant": "eu"})
    sequence()
    (row,) = client.claim()
    assert json.loads(row["payload"]) == {"n": 1}
    assert (row["id"], row["key"], row["priority"], row["attempt"]) == ("x", "a", 0, 1)
    assert json.loads(row["metadata"]) == {"tenant": "eu", "content_type": "application/json"}
    assert row["offset"] == QueueMessage.objects.get().offset
    assert client.claim() == []
    assert client.ack(row["handle"]) == "acked"
    assert nothing_is_left()
    assert client.claim() == []


@MODES
def test_plain_sql_does_everything(client, mode):
    """From the INSERT to the ack; only the sequencer runs in Python."""
    register(mode)
    client.run("INSERT INTO queue_outbox (topic, partition_key, payload) VALUES ('t', 'a', '{\"n\": 1}')")
    sequence()
    (row,) = client.claim()
    assert client.ack(row["handle"]) == "acked"
    assert nothing_is_left()


@MODES
def test_an_ack_moves_the_watermark(client, mode):
    register(mode)
    publish_numbers(6, keys=1)
    offsets = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    rows = client.claim()
    assert [row["offset"] for row in rows] == offsets
    client.ack(rows[1]["handle"])
    assert ConsumerOffset.objects.get().offset_acked < offsets[0]
    client.ack(rows[0]["handle"])
    assert ConsumerOffset.objects.get().offset_acked == offsets[1]
    for row in rows[2:]:
        client.ack(row["handle"])
    assert nothing_is_left()


@MODES
def test_messages_of_a_key_are_in_order(client, mode):
    register(mode)
    publish_numbers(30)
    rows = client.claim()
    assert len(rows) == 30
    for key in ("k0", "k1", "k2"):
        mine = numbers([row for row in rows if row["key"] == key])
        assert mine == sorted(mine)


@MODES
def test_a_claim_takes_no_more_than_asked(client, mode):
    register(mode)
    publish_numbers(10)
    found = 0
    for _ in range(10):
        rows = client.claim(3)
        assert len(rows) <= 3
        found += len(rows)
        for row in rows:
            assert client.ack(row["handle"]) == "acked"
    assert found == 10
    assert nothing_is_left()


@MODES
def test_a_second_ack_changes_nothing(client, mode):
    register(mode)
    publish_numbers(2, keys=1)
    first, second = client.claim()
    assert client.ack(second["handle"]) == "acked"
    assert client.ack(second["handle"]) == "acked", "the row is there: it waits for the first"
    assert client.ack(first["handle"]) == "acked"
    assert client.ack(first["handle"]) == "stale"
    assert nothing_is_left()
    assert sum(Rollup.objects.filter(grain=60).values_list("acked", flat=True)) == 2


@MODES
def test_what_is_stale_says_so_and_changes_nothing(connect, mode):
    register(mode)
    publish_numbers(1)
    first, second = connect(), connect()
    (old,) = first.claim()
    pass_time(100)
    (new,) = second.claim()
    assert new["handle"] != old["handle"]
    before = list(DeliveryState.objects.values()), list(ConsumerOffset.objects.values())
    outcomes = [
        first.ack(old["handle"]),
        first.nack(old["handle"]),
        first.reject(old["handle"]),
        first.snooze(old["handle"]),
        first.extend(old["handle"]),
    ]
    assert outcomes == ["stale"] * 5
    assert (list(DeliveryState.objects.values()), list(ConsumerOffset.objects.values())) == before
    assert not OutboxMessage.objects.exists()
    assert second.ack(new["handle"]) == "acked"


@MODES
def test_after_a_claim_without_messages_new_ones_are_found(connect, mode):
    """A session remembers up to where it has found nothing."""
    register(mode)
    publish_numbers(3)
    client, other = connect(), connect()
    for row in client.claim():
        client.ack(row["handle"])
    assert client.claim() == client.claim() == []
    publish_many("elsewhere", [Message(n) for n in range(600)])
    sequence()
    assert client.claim() == client.claim() == []
    publish_numbers(1)
    held = other.claim()
    assert numbers(held) == [0]
    assert client.claim() == []
    other.nack(held[0]["handle"], delay=0)
    assert numbers(client.claim()) == [0]


def test_retries_do_not_hide_new_messages(client):
    register("ordered")
    publish_many("t", [Message({"n": n}, key=f"k{n}") for n in range(12)])
    sequence()
    for row in client.claim():
        client.nack(row["handle"], delay=0)
    publish("t", {"n": 12}, key="zzz")
    sequence()
    found = []
    for _ in range(13):
        (row,) = client.claim(1)
        found.append(json.loads(row["payload"])["n"])
        client.ack(row["handle"])
    assert sorted(found) == list(range(13))


@MODES
def test_after_a_claim_without_messages_a_seek_is_noticed(client, mode):
    register(mode)
    publish_numbers(2)
    for row in client.claim():
        client.ack(row["handle"])
    assert client.claim() == client.claim() == []
    operations.seek("g", "t", "earliest", actor="tests")
    assert sorted(numbers(client.claim())) == [0, 1]


@MODES
def test_after_a_claim_without_messages_a_group_may_be_registered_again(client, mode):
    register(mode)
    publish_numbers(2)
    for row in client.claim():
        client.ack(row["handle"])
    assert client.claim() == client.claim() == []
    operations.drop_group("g", "t", actor="tests")
    register(mode)
    assert sorted(numbers(client.claim())) == [0, 1]


@MODES
def test_a_session_may_serve_several_groups(connect, mode):
    client = connect()
    refs = [GroupRef(group, topic) for group in ("g", "h") for topic in ("t", "u")]
    for ref in refs:
        register(mode, ref)
    for round_ in range(3):
        for topic in ("t", "u"):
            publish(topic, {"n": round_}, key="a")
        sequence()
        for ref in refs:
            client.ref = ref
            (row,) = client.claim()
            assert client.ack(row["handle"]) == "acked"
            assert client.claim() == []


# -- failures -------------------------------------------------------------------


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


# -- what is lost -----------------------------------------------------------------


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


# -- transactions of the client -----------------------------------------------------


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


@contextlib.contextmanager
def holding(client, statement, *parameters):
    """A client has a transaction open, and does not end it."""
    client.run("START TRANSACTION")
    client.run(statement, *parameters)
    yield
    client.run("ROLLBACK")


def impatient(client):
    client.run("SET SESSION innodb_lock_wait_timeout = 1")


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
    locked = "SELECT 1 FROM queue_delivery_state WHERE message_offset = %s FOR UPDATE"
    other.run("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    with holding(other, locked, rows[1]["offset"]):
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


# -- options of messages --------------------------------------------------------------


@MODES
def test_higher_priorities_come_first(client, mode, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "PRIORITY_SHARE": 0}
    installing.install(USING)
    register(mode)
    for n, priority in enumerate([0, -5, 20, 100, 3, -100]):
        publish("t", {"n": n}, key=f"k{n}", priority=priority)
    sequence()
    found = []
    while rows := client.claim(1):
        found.append((rows[0]["priority"], rows[0]["key"]))
        client.ack(rows[0]["handle"])
    assert found == [(100, "k3"), (20, "k2"), (3, "k4"), (0, "k0"), (-5, "k1"), (-100, "k5")]


@MODES
def test_a_share_of_the_claims_begins_with_low_priorities(client, mode, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "PRIORITY_SHARE": 2}
    installing.install(USING)
    register(mode)
    publish("t", {"n": 0}, key="a", priority=5)
    publish("t", {"n": 1}, key="a", priority=-5)
    sequence()
    first = set()
    until = time.monotonic() + 20
    while len(first) < 2 and time.monotonic() < until:
        (row,) = client.claim(1)
        first.add(row["priority"])
        client.snooze(row["handle"])
        DeliveryState.objects.all().delete()
        ConsumerOffset.objects.update(offset_acked=0, offset_claimed=0)
    assert first == {5, -5}


@MODES
def test_scheduled_messages_wait(client, mode):
    register(mode)
    publish("t", {"n": 0}, key="a", delay=3600)
    client.run(
        "INSERT INTO queue_outbox (topic, payload, deliver_at) "
        "VALUES ('t', '{\"n\": 1}', (UNIX_TIMESTAMP() + 60) * 1000)"
    )
    sequence()
    assert client.claim() == []
    OutboxMessage.objects.update(deliver_at=1)
    sequence()
    assert sorted(numbers(client.claim())) == [0, 1]


@MODES
def test_messages_for_another_group_are_passed(client, mode):
    register(mode)
    for target in ("other", "g", "other"):
        client.run("INSERT INTO queue_outbox (topic, payload, target_group) VALUES ('t', %s, %s)", '{"n": 1}', target)
    sequence()
    (row,) = client.claim()
    assert client.ack(row["handle"]) == "acked"
    assert nothing_is_left()


@MODES
def test_claims_look_behind_messages_of_other_groups(client, mode):
    register(mode)
    rows = [OutboxMessage(topic="t", payload=b"{}", target_group="other") for _ in range(2500)]
    OutboxMessage.objects.bulk_create(rows)
    publish("t", {"n": 1}, key="")
    sequence()
    assert len(client.claim(1)) == 1


@MODES
def test_one_claim_has_the_order_of_priorities(client, mode):
    register(mode)
    for n, priority in enumerate([10, 50, -10, 90, 0, -90]):
        publish("t", {"n": n}, key=f"k{n}", priority=priority)
    sequence()
    assert [row["priority"] for row in client.claim()] == [90, 50, 10, 0, -10, -90]


@MODES
@pytest.mark.parametrize(
    "key", ["", " ", "a ", "A", "\U0010ffff" * 190, "😀'\"\\%_;--", "\x00\n\t", "[]", "null", "__q:+010:x"]
)
def test_odd_keys(client, mode, key):
    register(mode)
    publish_many("t", [Message({"n": 0}, key=key), Message({"n": 1}, key="other")])
    sequence()
    rows = {row["key"]: row for row in client.claim()}
    assert rows.keys() == {key, "other"}
    for row in rows.values():
        assert client.ack(row["handle"]) == "acked"
    assert nothing_is_left()


@MODES
def test_no_partition_is_always_the_last(client, mode):
    register(mode)
    publish_many("t", [Message({"n": n}, key=f"k{n:03d}") for n in range(150)])
    sequence()
    first = set()
    for _ in range(40):
        (row,) = client.claim(1)
        first.add(row["key"])
        client.ack(row["handle"])
        ConsumerOffset.objects.all().delete()
    assert len(first) > 20
    assert max(first) > "k100"


@MODES
def test_expired_messages_are_passed(client, mode):
    register(mode)
    publish("t", {"n": 0}, key="a", expires_in=0.001)
    publish("t", {"n": 1}, key="a", expires_in=3600)
    for value in ('"soon"', "-1", "1.5", "null", "99999999999999999999"):
        client.run(
            "INSERT INTO queue_outbox (topic, payload, metadata) VALUES ('t', '{\"n\": 2}', %s)",
            f'{{"mysqlqueue.expires_at": {value}}}',
        )
    time.sleep(0.01)
    sequence()
    assert sorted(numbers(client.claim())) == [1, 2, 2, 2, 2, 2]
    assert sum(Rollup.objects.filter(grain=60).values_list("expired", flat=True)) == 1


@MODES
def test_expired_messages_are_dead_lettered_if_the_group_wants_that(client, mode, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "GROUPS": {"g": {"SQL_TOPICS": ["t"], "ON_EXPIRY": "dead_letter"}}}
    installing.install(USING)
    register(mode)
    publish("t", {"n": 0}, key="a", expires_in=3600)
    sequence()
    (row,) = client.claim()
    client.snooze(row["handle"])
    QueueMessage.objects.update(created_at=1)
    assert client.claim() == []
    dead = OutboxMessage.objects.get()
    assert dead.failure_count == 0
    assert dead.last_error.endswith("UTC, before attempt 1 had started.")
    assert nothing_is_left()


@MODES
def test_hashed_keys_are_shown_as_published(client, mode, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "TOPICS": {"t": {"PARTITIONS": 2}}}
    register(mode)
    publish("t", {"n": 0}, key="ada")
    publish("t", {"n": 1}, key="bob", priority=7)
    publish("t", {"n": 2})
    sequence()
    found = {(row["key"], row["priority"]) for row in client.claim()}
    assert found == {("ada", 0), ("bob", 7), (None, 0)}


@MODES
def test_a_message_that_was_deleted_is_settled(client, mode):
    register(mode)
    publish_numbers(2, keys=1)
    first, second = client.claim()
    client.nack(first["handle"], delay=0)
    QueueMessage.objects.all().delete()
    assert client.ack(second["handle"]) == "acked"
    assert client.claim() == []
    assert not DeliveryState.objects.filter(acked=False).exists()


@MODES
def test_a_clock_that_was_corrected_hides_nothing(client, mode, monkeypatch):
    monkeypatch.setattr(definitions, "LOOKS_AHEAD", 1.0)
    installing.install(USING)
    register(mode)
    publish_numbers(1)
    (row,) = client.claim()
    client.nack(row["handle"], delay=60)
    in_an_hour = int(time.time() * 1000) + 3_600_000
    DeliveryState.objects.update(invisible_until=in_an_hour + 60_000, delivered_at=in_an_hour)
    (again,) = client.claim()
    assert again["attempt"] == 2


def test_watermarks_do_not_stick_behind_many_acks(client, monkeypatch):
    monkeypatch.setattr(definitions, "PAGE", 20)
    installing.install(USING)
    register("shared")
    publish_many("t", [Message({"n": n}, key="a") for n in range(60)])
    publish_many("t", [Message({"n": n}, key="b") for n in range(3)])
    sequence()
    first, *rows = sorted(client.claim(), key=lambda row: row["offset"])
    client.nack(first["handle"], delay=3600)
    with client.transaction():
        for row in rows:
            client.ack(row["handle"])
    of_b = DeliveryState.objects.filter(partition_key="b")
    of_b.update(invisible_until=F("invisible_until") + 10)
    for _ in range(300):
        client.claim()
        if not of_b.exists():
            break
    assert not of_b.exists()


def test_in_strict_order_partitions_that_wait_do_not_hold_up_others(client, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "GROUPS": {"g": {"SQL_TOPICS": ["t"], "ON_FAILURE": "block"}}}
    installing.install(USING)
    register("ordered")
    publish_many("t", [Message({"n": n}, key=f"k{n % 40}") for n in range(120)])
    sequence()
    for row in client.claim(40):
        assert client.nack(row["handle"], delay=3600) == "failed"
    # As a subscriber leaves what it had claimed behind them.
    offsets = {one.partition_key: one.offset_claimed for one in ConsumerOffset.objects.all()}
    for message in QueueMessage.objects.all():
        if message.offset > offsets[message.partition_key]:
            DeliveryState.objects.create(
                consumer_group="g", topic="t", partition_key=message.partition_key, message_offset=message.offset
            )
    ConsumerOffset.objects.update(offset_claimed=QueueMessage.objects.latest("offset").offset)
    publish("t", {"n": 999}, key="zz")
    sequence()
    assert numbers(client.claim(1)) == [999]


@pytest.mark.parametrize("level", ["READ UNCOMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_the_isolation_level_of_the_session_has_no_influence(connect, level):
    register("shared")
    publish_numbers(1)
    client, other = connect(), connect()
    client.run(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")
    (row,) = other.claim()
    other.snooze(row["handle"])
    DeliveryState.objects.all().delete()
    ConsumerOffset.objects.update(offset_claimed=0, offset_acked=0)
    with holding(other, "UPDATE queue_offsets SET offset_claimed = 1000000000000"):
        client.claim()
    assert len(client.claim()) == 1


# -- what is refused -------------------------------------------------------------------


def refused(client, *arguments, statement="CALL queue_claim(%s, %s, %s)"):
    with pytest.raises(MySQLdb.Error) as caught:
        client.run(statement, *arguments)
    assert caught.value.args[0] == 1644
    return caught.value.args[1]


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
    with pytest.raises(MySQLdb.Error, match="must be one that queue_claim has returned"):
        getattr(client, action)(f"{row['offset']}:0")
    assert list(DeliveryState.objects.values()) == before


@pytest.mark.parametrize("handle", ["1:2", "999999999999999999:9223372036854775807", "1:-2"])
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
    at = beat.heartbeat_at
    client.claim()
    beat.refresh_from_db()
    assert beat.heartbeat_at == at, "once in five seconds"


# -- the page -----------------------------------------------------------------------------


def printed(heading):
    """The statements of a section of docs/howto/sql.md."""
    text = (ROOT / "docs" / "howto" / "sql.md").read_text()
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```sql\n(.*?)```", section, re.DOTALL)
    return [statement for statement in block.split(";\n") if statement.strip()]


@MODES
def test_the_statements_of_the_page(connect, mode):
    ref = GroupRef("mail", "orders")
    register(mode, ref)
    client = connect(ref)
    for statement in printed("Publish"):
        client.run(statement)
    sequence()
    backlog, deliveries, dead = printed("Look")
    assert client.run(backlog)[0]["messages"] == 3
    rows = client.claim()
    assert [(json.loads(row["payload"])["id"], row["priority"], row["key"]) for row in rows] == [
        (10, 10, "ada@example.com"),
        (7, 0, ""),
        (8, 0, "ada@example.com"),
    ]
    assert client.ack(rows[0]["handle"]) == "acked"
    assert client.nack(rows[1]["handle"], "boom") == "failed"
    assert client.reject(rows[2]["handle"], "no") == "dead_lettered"
    sequence()
    assert client.run(backlog)[0]["messages"] == 1
    (waiting,) = client.run(deliveries)
    assert (waiting["retry_count"], waiting["last_error"]) == (1, "boom")
    (letter,) = client.run(dead)
    assert (letter["original_id"], letter["failed_group"], letter["last_error"]) == ("order-8", "mail", "no")
    (scheduled,) = OutboxMessage.objects.all()
    assert scheduled.deliver_at > time.time() * 1000
