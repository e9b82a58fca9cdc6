"""What messages ask for: priorities, times, targets, expiry, keys."""

from __future__ import annotations

import time

import pytest
from django.db.models import F

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, OutboxMessage, QueueMessage, Rollup
from tests.support.harness import USING, sequence
from tests.support.internals import LATEST_DELIVERY, GroupRef, definitions, installing
from tests.support.sql_clients import holding, nothing_is_left, numbers, publish_numbers, register

pytestmark = [pytest.mark.servers_only, pytest.mark.promise("Consumers in plain SQL")]

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])


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
    time.sleep(0.01)
    sequence()
    assert numbers(client.claim()) == [1]
    assert sum(Rollup.objects.filter(grain=60).values_list("expired", flat=True)) == 1


EXPIRED = {"1970": 1, "past": 1_000_000_000_000}
VALID = {"never": None, "year 9999": LATEST_DELIVERY, "future": 9_000_000_000_000}


def publish_expiring(client, times):
    for n, at in enumerate(times):
        client.run("INSERT INTO queue_outbox (topic, payload, expires_at) VALUES ('t', %s, %s)", f'{{"n": {n}}}', at)
    sequence()


@MODES
def test_the_time_of_expiry_may_be_any_that_plain_sql_stores(client, mode):
    register(mode)
    publish_expiring(client, [*EXPIRED.values(), *VALID.values()])
    assert numbers(client.claim()) == [2, 3, 4]
    assert sum(Rollup.objects.filter(grain=60).values_list("expired", flat=True)) == len(EXPIRED)


@MODES
def test_any_time_of_expiry_is_named_in_a_dead_letter(client, mode, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "GROUPS": {"g": {"SQL_TOPICS": ["t"], "ON_EXPIRY": "dead_letter"}}}
    installing.install(USING)
    register(mode)
    publish_expiring(client, EXPIRED.values())
    assert client.claim() == []
    times = [error.split(" at ")[1][:19] for error in OutboxMessage.objects.values_list("last_error", flat=True)]
    assert times == ["1970-01-01 00:00:00", "2001-09-09 01:46:40"]


@MODES
def test_expired_messages_are_dead_lettered_if_the_group_wants_that(client, mode, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "GROUPS": {"g": {"SQL_TOPICS": ["t"], "ON_EXPIRY": "dead_letter"}}}
    installing.install(USING)
    register(mode)
    publish("t", {"n": 0}, key="a", expires_in=3600)
    sequence()
    (row,) = client.claim()
    client.snooze(row["handle"])
    QueueMessage.objects.update(expires_at=1)
    assert client.claim() == []
    dead = OutboxMessage.objects.get()
    assert dead.failure_count == 0
    assert dead.last_error.endswith("UTC, before attempt 1 had started.")
    assert dead.expires_at is None
    assert nothing_is_left()


@MODES
def test_hashed_keys_are_shown_as_published(client, mode, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "TOPICS": {"t": {"PARTITIONS": 2}}}
    register(mode)
    publish("t", {"n": 0}, key="ada")
    publish("t", {"n": 1}, key="bob", priority=7)
    publish("t", {"n": 2})
    sequence()
    rows = client.claim()
    assert {(row["key"], row["priority"]) for row in rows} == {("ada", 0), ("bob", 7), (None, 0)}
    assert {client.reject(row["handle"]) for row in rows} == {"dead_lettered"}
    sequence()
    register(mode, GroupRef("g", "t_dlq"))
    dead = client.run("CALL queue_claim('g', 't_dlq', 100)")
    assert {(row["key"], row["priority"]) for row in dead} == {("ada", 0), ("bob", 7), (None, 0)}


@MODES
@pytest.mark.parametrize(
    ("partition", "stored", "key", "priority"),
    [
        ("a", None, "a", 0),
        ("__p:3", None, None, 0),
        ("__p:3", "", "", 0),
        ("__p:3", "ada", "ada", 0),
        ("__p:-005:a", None, "a", -5),
        ("__p:+010:", None, "", 10),
        ("__p:+010:__p:3", None, None, 10),
        ("__p:+010:__p:3", "__p:x", "__p:x", 10),
    ],
)
def test_the_key_is_that_of_the_column_or_of_the_partition(client, mode, partition, stored, key, priority):
    register(mode)
    client.run(
        "INSERT INTO queue_outbox (topic, partition_key, publisher_key, payload) VALUES ('t', %s, %s, '')",
        partition,
        stored,
    )
    sequence()
    (row,) = client.claim()
    assert (row["key"], row["priority"]) == (key, priority)
    message = QueueMessage.objects.get()
    assert (message.partition_key, message.priority) == (partition, priority)


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
