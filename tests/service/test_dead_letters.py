"""Messages that a group has given up are moved to the topic's DLQ."""

from __future__ import annotations

import pytest
from django.db import connection

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import DeliveryState, OutboxMessage, QueueMessage
from tests.support.handlers import Recorder, both_modes, fail
from tests.support.harness import Sub, handler, lag, problems_found, sequence


@both_modes
def test_dead_letter_says_whose_it_is_and_why(db, mode):
    publish("t", {"a": 1}, key="k", id="x", metadata={"m": 1})
    got = Recorder(fail)
    Sub(handler(function=got, mode=mode, max_attempts=2)).settle()
    sequence()
    original = QueueMessage.objects.get(topic="t")
    dead = QueueMessage.objects.get(topic="t_dlq")
    assert got.attempts == [({"a": 1}, 1), ({"a": 1}, 2)]
    assert (dead.partition_key, dead.original_id, dead.original_topic) == ("k", "x", "t")
    assert (dead.original_offset, dead.failed_group, dead.failure_count) == (original.offset, "g", 2)
    assert dead.message_id != "x"
    assert "ValueError: no {'a': 1}" in dead.last_error
    assert bytes(dead.payload) == bytes(original.payload)
    assert dead.metadata == original.metadata
    assert lag() == 0
    assert not DeliveryState.objects.exists()


@pytest.mark.promise("Independent groups", "Dead letters")
def test_two_groups_dead_letter_the_same_message(db):
    """Each has its own dead letter; the log row stays for the third."""
    publish("t", 1, key="k", id="x")
    third = Recorder()
    Sub(
        handler(group="a", function=fail, max_attempts=1),
        handler(group="b", function=fail, max_attempts=1),
    ).settle()
    sequence()
    assert sorted(QueueMessage.objects.filter(topic="t_dlq").values_list("failed_group", "original_id")) == [
        ("a", "x"),
        ("b", "x"),
    ]
    Sub(handler(group="c", function=third)).settle()
    assert third.payloads == [1]


@pytest.mark.promise("Independent groups")
def test_error_longer_than_any_column_is_cut(db):
    def explode(delivery):
        raise ValueError("😀\ud800" + "x" * 2_000_000 + "the end")

    publish("t", 1, key="k")
    publish("t", 2, key="k")
    Sub(handler(function=explode, max_attempts=1)).settle()
    sequence()
    dead = list(QueueMessage.objects.filter(topic="t_dlq"))
    assert len(dead) == 2
    assert all(one.last_error.endswith("the end\n") and len(one.last_error) <= 16_000 for one in dead)


def test_reject_dead_letters_at_once(db):
    got = Recorder(lambda delivery: delivery.reject("not mine"))
    publish("t", 1)
    Sub(handler(function=got)).settle()
    sequence()
    assert len(got.deliveries) == 1
    assert QueueMessage.objects.get(topic="t_dlq").last_error == "not mine"
    assert lag() == 0


def test_no_limit_of_attempts(db):
    got = Recorder(fail)
    publish("t", 1)
    sub = Sub(handler(function=got, max_attempts=None))
    sub.settle(rounds=30)
    assert len(got.deliveries) >= 20
    assert lag() == 1


def test_dlq_with_a_handler_of_its_own_drains(db, clock):
    """It shows the original id; its own failures do not dead-letter again, and a problem says so."""
    publish("t", 1, id="x")
    dead = Recorder(lambda delivery: fail(delivery) if len(dead.deliveries) < 10 else None)
    sub = Sub(handler(function=fail, max_attempts=1), handler(topic="t_dlq", group="d", function=dead, max_attempts=2))
    sub.settle(rounds=4)
    clock.advance(61)
    sub.heart.beat()
    assert ["a DLQ topic has no DLQ" in one.advice for one in problems_found() if one.kind == "stuck"] == [True]
    sub.settle()
    assert len(dead.deliveries) == 10
    assert dead.deliveries[0].id == "x"
    assert lag("d", "t_dlq") == 0
    assert not QueueMessage.objects.filter(topic="t_dlq_dlq").exists()
    assert not OutboxMessage.objects.exists()


def test_crash_after_a_reject(db, clock):
    """Ack A, reject B, hold C, vanish: C comes again, B is in the DLQ."""
    publish_many("t", (Message(name, key="k") for name in "ABC"))
    first = Sub(handler(function=lambda d: d.reject("bad") if d.payload == "B" else None))
    first.step()
    first.work(2)
    first.flush()
    assert first.take() is not None
    clock.advance(31)
    again = Recorder()
    Sub(handler(function=again)).settle()
    assert again.payloads == ["C"]
    assert QueueMessage.objects.get(topic="t_dlq").payload == b'"B"'
    assert lag() == 0


def test_many_long_errors_fit_into_statements(db):
    """One flush of them was longer than max_allowed_packet, and was sent again for ever."""
    reason = "😀" * 15_999
    count = 300
    if connection.vendor == "mysql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT @@max_allowed_packet")
            count = 3 * cursor.fetchone()[0] // (2 * len(reason.encode())) // 50 * 50
    publish_many("t", (Message(number, key=f"k{number % 50}") for number in range(count)))
    sub = Sub(
        handler(function=lambda delivery: delivery.nack(delay=99, reason=reason)), claim_size=count, prefetch=count
    )
    sub.step(times=3)
    assert sub.work() == count
    sub.flush()
    assert DeliveryState.objects.filter(retry_count=1, delivered_by="").count() == count
    assert len(DeliveryState.objects.first().last_error) == 15_999
