"""publish_many(): streaming, in order, all or nothing."""

from __future__ import annotations

import datetime

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import InvalidMessage, Message, publish, publish_many
from django_mysqlqueue.models import OutboxMessage
from tests.support.internals import publishing
from tests.support.publishing import Undo, committed


@pytest.mark.parametrize("count", [0, 1, 2, 499, 500, 501, 1203])
def test_publish_many_returns_how_many_and_keeps_their_order(db, count):
    assert publish_many("t", range(count)) == count
    assert committed() == [str(number) for number in range(count)]


def test_messages_and_payloads_may_be_mixed(db):
    when = datetime.datetime(2031, 1, 1, tzinfo=datetime.UTC)
    publish_many("t", [1, Message(2, key="k", id="i", metadata={"m": 1}, deliver_at=when), None])
    rows = list(
        OutboxMessage.objects.order_by("pk").values_list("payload", "partition_key", "message_id", "deliver_at")
    )
    assert [bytes(row[0]) for row in rows] == [b"1", b"2", b"null"]
    assert rows[1][1:] == ("k", "i", 1_924_992_000_000)
    assert rows[0][1].startswith("__p:")
    assert rows[0][3] == 0
    assert OutboxMessage.objects.get(message_id="i").metadata == {"m": 1, "content_type": "application/json"}


def failing_at(place, count=1500):
    for number in range(count):
        yield float("nan") if number == place else number


@pytest.mark.parametrize("place", [0, 1, 499, 500, 750, 1499])
def test_a_bad_message_anywhere_leaves_none(db, place):
    with pytest.raises(InvalidMessage, match=f"^message {place}: payload of type float"):
        publish_many("t", failing_at(place))
    assert committed() == []


def test_all_or_nothing_also_for_a_caller_who_goes_on(db):
    """The error is caught inside the caller's own transaction, which then commits."""
    with transaction.atomic():
        publish("t", "before")
        with pytest.raises(InvalidMessage):
            publish_many("t", failing_at(1200))
        publish("t", "after")
    assert committed() == ['"before"', '"after"']


def test_all_or_nothing_with_autocommit_off(autocommit_off):
    publish("t", "before")
    with pytest.raises(InvalidMessage):
        publish_many("t", failing_at(1200))
    publish("t", "after")
    connection.commit()
    assert committed() == ['"before"', '"after"']


def test_an_error_of_the_callers_generator_leaves_none(db):
    def broken():
        yield from range(1200)
        raise Undo

    with pytest.raises(Undo):
        publish_many("t", broken())
    assert committed() == []


def test_publish_many_streams(db):
    """What is read but not yet sent never exceeds a chunk; the generator sees the rows of its predecessors."""
    unsent = []

    def messages():
        for number in range(5000):
            if number % 100 == 0:
                unsent.append(number - OutboxMessage.objects.count())
            yield number

    assert publish_many("t", messages()) == 5000
    assert max(unsent) <= publishing.CHUNK_ROWS
    assert OutboxMessage.objects.count() == 5000


def test_publish_many_streams_large_messages_by_their_bytes(db):
    unsent = []

    def messages():
        for number in range(20):
            unsent.append(number - OutboxMessage.objects.count())
            yield bytes(300_000)

    assert publish_many("t", messages()) == 20
    assert max(unsent) * 300_000 <= publishing.CHUNK_BYTES + 300_000


def test_publish_many_needs_one_statement_a_chunk(db):
    """And the transaction's own."""
    publish_many("t", range(2))
    with CaptureQueriesContext(connection) as queries:
        publish_many("t", range(1500))
    assert [query["sql"][:6] for query in queries].count("INSERT") == 3
    assert len(queries) <= 5


@pytest.mark.parametrize(
    "messages",
    ["text", b"bytes", bytearray(b"ab"), memoryview(b"ab"), {"a": 1}, Message(1), 7, None],
    ids=lambda value: type(value).__name__,
)
def test_one_payload_is_not_many(db, messages):
    with pytest.raises(InvalidMessage, match="messages: must be an iterable of messages, not a single"):
        publish_many("t", messages)
    assert committed() == []
