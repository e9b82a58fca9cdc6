"""Rules for names, keys and sizes."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from django_mysqlqueue import InvalidMessage, Message, publish, publish_many
from django_mysqlqueue.models import OutboxMessage, QueueMessage
from tests.support.harness import Sub, handler, sequence
from tests.support.internals import dialect_of
from tests.support.publishing import committed, one_or_many


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


@one_or_many
@pytest.mark.parametrize("topic", ["", "a b", "x" * 101, "t_dlq", "é", None])
def test_bad_topics_are_refused_before_anything_is_written(db, send, topic):
    with pytest.raises(InvalidMessage, match="topic"):
        send(topic, 1)
    assert committed() == []


LOOKALIKES = ["a", "A", "a ", " a", "a\t", "á", "a\u0301", "a\x00", "\x00", "😀", "😁", "ß", "ss", "ﬁ", "fi", "\ufeffa"]


def test_keys_that_look_alike_stay_different(db):
    """By case, padding, accents, NUL, four-byte characters, ligatures."""
    publish_many("t", [Message(key, key=key, id="same") for key in LOOKALIKES])
    assert sorted(OutboxMessage.objects.values_list("partition_key", flat=True)) == sorted(LOOKALIKES)
    for key in LOOKALIKES:
        assert OutboxMessage.objects.filter(partition_key=key).count() == 1
    sequence()
    assert sorted(QueueMessage.objects.values_list("partition_key", flat=True)) == sorted(LOOKALIKES)


def test_ids_that_look_alike_stay_different_and_equal_ones_do_not(db):
    publish_many("t", [Message(number, key="k", id=one) for number in (1, 2) for one in LOOKALIKES])
    sequence()
    assert sorted(QueueMessage.objects.values_list("message_id", flat=True)) == sorted(LOOKALIKES)
    assert {bytes(payload) for payload in QueueMessage.objects.values_list("payload", flat=True)} == {b"1"}


@pytest.mark.parametrize("character", ["x", "😀", "\x00"], ids=ascii)
def test_the_longest_names_go_all_the_way(db, character):
    got = []
    topic, group = "t" * 100, "g" * 100
    sub = Sub(
        handler(topic=topic, group=group, function=lambda delivery: (got.append(delivery), delivery.reject("no")))
    )
    key, message_id = character * 190, character * 190
    assert publish(topic, 1, key=key, id=message_id) == message_id
    sub.settle()
    sequence()
    assert [(one.key, one.id, one.topic, one.group) for one in got] == [(key, message_id, topic, group)]
    dead = QueueMessage.objects.get(topic=topic + "_dlq")
    assert (dead.partition_key, dead.original_id, dead.failed_group) == (key, message_id, group)


@pytest.mark.parametrize("byte", [b"x", b"'", b"\\", b"\x00", b"\xff", b"%"], ids=repr)
@pytest.mark.parametrize("many", [False, True])
def test_a_payload_of_exactly_the_limit(db, byte, many):
    """Bytes that the driver escapes double on the wire."""
    payload = byte * 1_048_576
    if many:
        publish_many("t", [payload, payload])
    else:
        publish("t", payload)
    got = []
    Sub(handler(function=lambda delivery: got.append(delivery.body))).settle()
    assert got == [payload] * (2 if many else 1)


@one_or_many
def test_a_payload_beyond_the_limit(db, send):
    with pytest.raises(InvalidMessage, match="payload of 1048577 bytes: MAX_PAYLOAD_BYTES allows 1048576"):
        send("t", bytes(1_048_577))
    assert committed() == []


@pytest.mark.servers_only
@one_or_many
def test_a_payload_that_the_server_would_not_take_is_refused_before_it_is_sent(db, settings, send):
    """The server would close the connection, and the caller's transaction with it."""
    settings.MYSQLQUEUE = {"MAX_PAYLOAD_BYTES": 2**30}
    limit = dialect_of(connection).max_statement_bytes(connection)
    with transaction.atomic():
        send("t", 1)
        with pytest.raises(InvalidMessage, match=f"max_allowed_packet of {limit} bytes allows at most half of that"):
            send("t", bytes(limit // 2 + 1))
        send("t", 2)
    assert committed() == ["1", "2"]


@pytest.mark.servers_only
def test_the_largest_payload_that_is_not_refused_fits(db, settings):
    """Every byte of it doubled by escaping, in one statement."""
    settings.MYSQLQUEUE = {"MAX_PAYLOAD_BYTES": 2**30}
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@max_allowed_packet")
        (limit,) = cursor.fetchone()
    body = b"'" * min(limit // 2 - 3000, 8_000_000)
    publish("t", body)
    assert list(OutboxMessage.objects.values_list("size", flat=True)) == [len(body)]


@pytest.mark.parametrize(
    "metadata",
    [
        {"text": "é😀\x00'\\%"},
        {"n": [1, -(2**63), 2**64 - 1, 0.5, 1e300, True, None], "o": {"": {}}},
        {"a ": 1, "A": 2, "a": 3},
        {"deep": nested(28)},
    ],
    ids=["text", "values", "names", "deep"],
)
def test_metadata_comes_back(db, metadata):
    publish("t", 1, metadata=metadata)
    got = []
    Sub(handler(function=lambda delivery: got.append(delivery.metadata))).settle()
    assert got == [{**metadata, "content_type": "application/json"}]
    assert repr(got[0]["n"] if "n" in metadata else 0) == repr(metadata.get("n", 0))


@one_or_many
@pytest.mark.parametrize(
    "value",
    [
        pytest.param(2**64, id="2**64"),
        pytest.param([-(2**63) - 1], id="-2**63-1"),
        pytest.param(10**400, id="10**400"),
        *(pytest.param(nested(levels), id=f"{levels} deep") for levels in (29, 40, 110, 950, 5000, 30_000)),
    ],
)
def test_metadata_that_some_engine_cannot_hold_is_refused_on_all(db, send, value):
    """Not by the server, with an error of its own, in the middle of the caller's transaction; and not rounded."""
    with pytest.raises(InvalidMessage, match="metadata"):
        send("t", 1, metadata={"a": value})
    assert committed() == []


@pytest.mark.servers_only
def test_small_messages_fit_into_the_smallest_packet(db, monkeypatch):
    """At max_allowed_packet=1M a chunk of 500 tiny rows was refused: each counted 2,000 bytes, twice."""
    from django_mysqlqueue.sql.mysql import MySQL

    monkeypatch.setattr(MySQL, "max_statement_bytes", lambda self, connection: 1_048_576)
    assert publish_many("t", [Message(n, key="k") for n in range(500)]) == 500


@pytest.mark.servers_only
def test_metadata_of_many_bytes_to_a_character_fit_too(db, monkeypatch):
    from django_mysqlqueue.sql.mysql import MySQL

    monkeypatch.setattr(MySQL, "max_statement_bytes", lambda self, connection: 4 * 1_048_576)
    messages = [Message(n, key="k", metadata={"mood": "😀" * 10_000}) for n in range(100)]
    assert publish_many("t", messages) == 100
