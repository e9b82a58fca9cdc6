"""Delays and times of delivery, by the database's clock."""

from __future__ import annotations

import datetime
import time

import pytest
from django.db import connection

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import OutboxMessage, QueueMessage
from tests.support.harness import USING, sequence
from tests.support.internals import Session
from tests.support.publishing import one_or_many


@one_or_many
@pytest.mark.parametrize("skew", [-3600, 3600])
def test_a_delay_counts_from_the_databases_clock(db, clock, monkeypatch, send, skew):
    """The client's clock is an hour off."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + skew)
    monkeypatch.setattr(time, "time_ns", lambda: int((real() + skew) * 1e9))
    clock.advance(-skew)
    before = Session(USING).now()
    send("t", 1, delay=60)
    after = Session(USING).now()
    assert before + 60_000 <= OutboxMessage.objects.get().deliver_at <= after + 60_000


@one_or_many
def test_created_at_is_the_databases_too(db, monkeypatch, send):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    before = Session(USING).now()
    send("t", 1)
    assert before <= OutboxMessage.objects.get().created_at <= Session(USING).now()


def test_the_databases_clock_is_utc(db):
    """Whatever the time zones of server, session and client."""
    with connection.cursor() as cursor:
        if connection.vendor == "mysql":
            cursor.execute("SET time_zone = '+11:00'")
        try:
            assert abs(Session(USING).now() - time.time() * 1000) < 60_000
            publish("t", 1)
        finally:
            if connection.vendor == "mysql":
                cursor.execute("SET time_zone = '+00:00'")
    assert abs(OutboxMessage.objects.get().created_at - time.time() * 1000) < 60_000


def test_deliver_at_is_stored_to_the_millisecond(db):
    moment = datetime.datetime(2031, 2, 3, 4, 5, 6, 789_000, tzinfo=datetime.timezone(datetime.timedelta(hours=5)))
    publish("t", 1, deliver_at=moment)
    deliver_at = OutboxMessage.objects.get().deliver_at
    assert datetime.datetime.fromtimestamp(deliver_at / 1000, datetime.UTC) == moment


def test_a_batch_may_mix_all_kinds_of_times(db):
    """Placeholders of rows with and without a delay must not shift."""
    when = datetime.datetime(2031, 1, 1, tzinfo=datetime.UTC)
    publish_many(
        "t", [Message(0, delay=100), Message(1), Message(2, deliver_at=when), Message(3, delay=200), Message(4)]
    )
    now = Session(USING).now()
    found = dict(OutboxMessage.objects.values_list("payload", "deliver_at"))
    found = {bytes(payload): deliver_at for payload, deliver_at in found.items()}
    assert (found[b"1"], found[b"2"], found[b"4"]) == (0, 1_924_992_000_000, 0)
    assert now + 90_000 < found[b"0"] <= now + 100_000
    assert now + 190_000 < found[b"3"] <= now + 200_000


def test_a_moment_that_has_passed_is_due(db):
    publish("t", 1, deliver_at=datetime.datetime(1960, 1, 1, tzinfo=datetime.UTC))
    publish("t", 2, delay=0)
    sequence()
    assert QueueMessage.objects.count() == 2
