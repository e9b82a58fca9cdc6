"""Clients in plain SQL claim messages and settle them."""

from __future__ import annotations

import json
import re
import time

import pytest

from django_mysqlqueue import Message, operations, publish, publish_many
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, OutboxMessage, QueueMessage, Rollup
from tests.support.harness import sequence
from tests.support.internals import GroupRef
from tests.support.paths import ROOT
from tests.support.sql_clients import nothing_is_left, numbers, pass_time, publish_numbers, register

pytestmark = [pytest.mark.servers_only, pytest.mark.promise("Consumers in plain SQL")]

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])


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


# -- the page ------------------------------------------------------------


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
