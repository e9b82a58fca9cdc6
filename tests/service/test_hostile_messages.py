"""Unusual messages, from ``publish()`` and plain SQL: each has a stated outcome, and the next message is handled.

``docs/reference/edge-cases.md`` states them. What ``publish()`` refuses is in
``tests/unit/test_messages.py``, names that look alike in ``test_publishing_limits.py``.
"""

from __future__ import annotations

import json

import pytest
from django.db import DatabaseError, connection, transaction
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import InvalidMessage, Message, publish, publish_many
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, OutboxMessage, PartitionLease, QueueMessage
from tests.support import garbage
from tests.support.harness import USING, Sub, handler, in_thread, lag
from tests.support.internals import ERROR_LENGTH, MAX_METADATA_BYTES, PollingLimits, encode, publishing, sequencing

BINARY = len(json.dumps({"content_type": "application/octet-stream"}, separators=(",", ":")))
"""Bytes of metadata of a payload of bytes."""


def through_everything(*, error="x", attempts=2):
    """Handles what is there, failing each time; returns the bodies that the group's and the DLQ's handlers saw."""
    seen, dead = [], []

    def fail(delivery):
        seen.append(delivery.body)
        raise ValueError(error)

    Sub(
        handler(function=fail, max_attempts=attempts),
        handler(topic="t_dlq", group="dead", function=lambda delivery: dead.append(delivery)),
    ).settle()
    assert lag() == lag("dead", "t_dlq") == 0
    assert not DeliveryState.objects.exists()
    return seen, dead


# -- sizes --------------------------------------------------------------------


@pytest.mark.parametrize(("more", "expected"), [(-1, 1), (0, 1), (1, 2)])
def test_a_chunk_of_exactly_its_bytes(db, more, expected):
    first = 700_000
    rest = publishing._weight(encode("t", Message(b"", key="k")))
    second = publishing.CHUNK_BYTES - first - 2 * rest + more
    with CaptureQueriesContext(connection) as captured:
        publish_many("t", [Message(b"a" * first, key="k"), Message(b"b" * second, key="k")])
    inserts = [one for one in captured.captured_queries if one["sql"].startswith("INSERT INTO queue_outbox")]
    assert len(inserts) == expected
    got = []
    Sub(handler(function=lambda delivery: got.append(len(delivery.body)))).settle()
    assert got == [first, second]


@pytest.mark.parametrize(
    ("limit", "passes"), [(1, [1, 1, 1]), (199, [1, 1, 1]), (200, [2, 1]), (299, [2, 1]), (300, [3])]
)
def test_a_pass_of_the_sequencer_of_exactly_its_bytes(db, limit, passes):
    """One that is larger than a pass goes alone."""
    publish_many("t", [Message(b"x" * 100, key="k") for _ in range(3)])
    moved = []
    while done := sequencing.sequence(USING, max_bytes=limit).moved:
        moved.append(done)
    assert moved == passes


@pytest.mark.parametrize("size", [999, 1000, 1001, 5000])
def test_a_message_larger_than_all_that_may_wait(db, size):
    publish_many("t", [Message(b"x" * size, key=f"k{n % 2}") for n in range(6)])
    got = []
    sub = Sub(
        handler(function=lambda delivery: got.append(len(delivery.body))), limits=PollingLimits(waiting_bytes=1000)
    )
    sub.settle()
    assert got == [size] * 6


@pytest.fixture
def packet(db):
    """A server that takes statements of 2 MB, for connections that are opened from now on."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@GLOBAL.max_allowed_packet")
        (before,) = cursor.fetchone()
        cursor.execute("SET GLOBAL max_allowed_packet = 2097152")
        yield 2097152
        cursor.execute(f"SET GLOBAL max_allowed_packet = {before}")


@pytest.mark.servers_only
@pytest.mark.parametrize("byte", [b"x", b"'", b"\\", b"\x00"], ids=repr)
def test_the_greatest_message_that_is_not_refused_goes_everywhere(packet, settings, byte):
    """Claimed, nacked with the longest error, given up, handled as a dead letter, which is longer than it was."""
    settings.MYSQLQUEUE = {"MAX_PAYLOAD_BYTES": 2**30}
    greatest = packet // 2 - 2000 - BINARY

    def run():
        publish("t", byte * greatest)
        with transaction.atomic():
            publish("u", 1)
            for size in (greatest + 1, packet // 2, packet // 2 + 1, packet, packet * 2):
                with pytest.raises(InvalidMessage, match="max_allowed_packet"):
                    publish("t", byte * size)
        seen, dead = through_everything(error="😀" * ERROR_LENGTH)
        assert [len(body) for body in seen] == [greatest] * 2
        (letter,) = dead
        assert letter.body == byte * greatest
        assert len(letter.last_error) == ERROR_LENGTH

    in_thread(run)
    assert QueueMessage.objects.filter(topic="u").exists()


@pytest.mark.parametrize("character", ["x", "é", "😀"], ids=ascii)
def test_the_longest_metadata_goes_everywhere(db, character):
    """65,535 bytes, not characters."""
    width = len(character.encode())
    room = MAX_METADATA_BYTES - len(json.dumps({"a": "", "content_type": "application/json"}, separators=(",", ":")))
    text = character * (room // width) + "x" * (room % width)
    publish("t", 1, key="k", metadata={"a": text})
    with pytest.raises(InvalidMessage, match="metadata of 65536 bytes"):
        publish("t", 1, key="k", metadata={"a": text + "x"})
    _, (letter,) = through_everything()
    assert letter.metadata == {"a": text, "content_type": "application/json"}


@pytest.mark.parametrize("how", ["nack", "reject", "raise"])
@pytest.mark.parametrize(
    "text",
    ["a\x00b", "😀" * 20_000, "\x00" * 20_000, "\\'\"" * 20_000, "\udc80", "x" * 5_000_000, "", "%s %(a)s {}"],
    ids=["NUL", "4 bytes", "NULs", "quotes", "surrogate", "5 MB", "empty", "formats"],
)
def test_any_text_may_be_a_reason(db, how, text):
    publish("t", 1, key="k")
    dead = []

    def fail(delivery):
        if how == "raise":
            raise ValueError(text)
        getattr(delivery, how)(reason=text)

    Sub(handler(function=fail, max_attempts=1), handler(topic="t_dlq", group="dead", function=dead.append)).settle()
    (letter,) = dead
    kept = text.encode(errors="backslashreplace").decode()
    assert kept[-1000:] in letter.last_error
    assert len(letter.last_error) <= ERROR_LENGTH


def insert(**columns):
    columns = {"topic": "t", "payload": b"1", **columns}
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO queue_outbox ({', '.join(columns)}) VALUES ({', '.join(['%s'] * len(columns))})",
            list(columns.values()),
        )


def nested_text(levels):
    return '{"a":' + "[" * levels + "]" * levels + "}"


REFUSED = {
    **{
        f"no {column}": {column: None}
        for column in (
            "topic",
            "payload",
            "partition_key",
            "id",
            "metadata",
            "deliver_at",
            "target_group",
            "created_at",
        )
    },
    "metadata is no JSON": {"metadata": "{"},
    "metadata is empty": {"metadata": ""},
    "metadata is Python": {"metadata": "{'a': None}"},
    "metadata with a tail": {"metadata": "{} {}"},
}
REFUSED_BY_SERVERS = {
    "topic": {"topic": "t" * 121},
    "key": {"partition_key": "😀" * 191},
    "id": {"id": "x" * 191},
    "target_group": {"target_group": "g" * 101},
    "deliver_at": {"deliver_at": 2**63},
    "deliver_at is text": {"deliver_at": "tomorrow"},
    "failure_count": {"failure_count": -1},
    "no UTF-8": {"partition_key": b"\xff"},
}


# -- plain SQL ----------------------------------------------------------------


@pytest.mark.parametrize("what", REFUSED)
def test_plain_sql_that_every_database_refuses(db, what):
    with pytest.raises(DatabaseError):
        insert(**REFUSED[what])
    assert not OutboxMessage.objects.exists()


@pytest.mark.servers_only
@pytest.mark.parametrize("what", REFUSED_BY_SERVERS)
def test_plain_sql_that_servers_refuse(db, what):
    with pytest.raises(DatabaseError):
        insert(**REFUSED_BY_SERVERS[what])
    assert not OutboxMessage.objects.exists()


JSON = '{"content_type": "application/json"}'
HANDLED = {
    "seconds for milliseconds": ({"deliver_at": 1_700_000_000}, 1),
    "a hashed partition that is none": ({"partition_key": "__p:nonsense"}, 1),
    "a hashed partition's key is a number": (
        {"partition_key": "__p:1", "metadata": '{"mysqlqueue.key": 7, "mysqlqueue.other": 1}'},
        1,
    ),
    "a type that is no text": ({"metadata": '{"content_type": ["application/json"]}'}, b"1"),
    "another type": ({"metadata": '{"content_type": "text/csv"}'}, b"1"),
    "deep metadata": ({"metadata": nested_text(28)}, 1),
    "deep JSON": ({"payload": b"[" * 200_000 + b"]" * 200_000}, b"[" * 200_000 + b"]" * 200_000),
    "half JSON": ({"payload": b'{"a": '}, b'{"a": '),
    "NaN": ({"payload": b"NaN"}, b"NaN"),
    "a byte order mark": ({"payload": b"\xef\xbb\xbf1"}, b"\xef\xbb\xbf1"),
    "one name twice": ({"payload": b'{"a": 1, "a": 2}'}, {"a": 2}),
    "a long number": ({"payload": b"1" * 5000}, b"1" * 5000),
    "nothing": ({"payload": b""}, b""),
    "forged dead letter": (
        {"original_id": "o", "original_topic": "x" * 120, "failed_group": "f", "failure_count": 4294967295},
        1,
    ),
    "an epoch of 0": ({"created_at": 0}, 1),
}


def look(delivery):
    """Reads all that a delivery has."""
    for name in dir(delivery):
        if not name.startswith("_"):
            getattr(delivery, name)
    repr(delivery)
    return delivery.payload


@pytest.mark.parametrize("what", HANDLED)
def test_plain_sql_that_is_handled(db, what):
    columns, expected = HANDLED[what]
    insert(**columns)
    insert(payload=b'"next"', partition_key=columns.get("partition_key", ""))
    got = []
    Sub(handler(function=lambda delivery: got.append(look(delivery)))).settle()
    assert sorted(map(repr, got)) == sorted([repr(expected), "'next'"])
    assert not OutboxMessage.objects.exists()


DEAD = {
    "says JSON, is none": {"payload": b"{", "metadata": JSON},
    "says JSON, is empty": {"payload": b"", "metadata": JSON},
    "says JSON, is NaN": {"payload": b"[NaN]", "metadata": JSON},
    "says JSON, is no UTF-8": {"payload": b'"\xff"', "metadata": JSON},
    "says JSON, is too deep": {"payload": b"[" * 200_000 + b"]" * 200_000, "metadata": JSON},
}


@pytest.mark.parametrize("what", DEAD)
def test_plain_sql_that_a_handler_cannot_read(db, what):
    """A failed attempt, and in the end a dead letter with the bytes as they came; the next one is handled."""
    columns = DEAD[what]
    insert(**columns)
    insert(payload=b'"next"')
    got, dead = [], []
    Sub(
        handler(function=lambda delivery: got.append(look(delivery)), max_attempts=2),
        handler(topic="t_dlq", group="dead", function=lambda delivery: dead.append(delivery.body)),
    ).settle()
    assert got == ["next"]
    assert dead == [columns.get("payload", b"1")]


@pytest.mark.parametrize(
    "columns",
    [{"topic": "a b"}, {"topic": "t" * 120}, {"topic": "t\x00"}, {"topic": "😀"}, {"target_group": "x"}],
    ids=ascii,
)
def test_plain_sql_for_nobody_is_passed_over_and_collected(db, clock, settings, columns):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    insert(**columns)
    insert(payload=b'"next"')
    got = []
    Sub(handler(function=lambda delivery: got.append(delivery.payload))).settle()
    assert got == ["next"]
    assert lag() == 0
    garbage.collect(USING)
    garbage.collect(USING)
    assert QueueMessage.objects.exists() is ("topic" in columns), "a topic without a group is kept for longer"
    clock.advance(7 * 86_400 + 1)
    garbage.collect(USING)
    assert not QueueMessage.objects.exists()


@pytest.mark.parametrize("value", [7, 1.5, 10**12, "text", "é"])
def test_a_payload_that_is_no_bytes(db, value):
    """SQLite stores what it is given, servers make text of it."""
    insert(payload=value)
    got = []
    Sub(handler(function=lambda delivery: got.append(delivery.body))).settle()
    assert got == [str(value).encode()]


# -- many keys ----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_thousands_of_keys_leave_nothing_behind(db, settings, mode):
    """Neither in the process nor, once they are collected, in the tables. (A million: benchmarks/many_keys.py)"""
    settings.MYSQLQUEUE = {"RETENTION": 0}
    count = 1500
    publish_many("t", (Message(n, key=f"k{n}") for n in range(count)))
    got = set()
    sub = Sub(
        handler(mode=mode, function=lambda delivery: got.add(delivery.payload)),
        lease_renewal_interval=0.0,
        claim_size=1000,
        prefetch=2000,
    )
    sub.settle(rounds=500)
    sub.step(times=2)
    assert got == set(range(count))
    for one in sub.poller.ordered:
        assert not one.mode.partitions
        assert not one.mode.waiting
    for one in sub.poller.groups:
        assert not one.memory.todo
        assert not one.memory.unfinished
    assert all(not [key for key in group.lanes if isinstance(key, str)] for group in sub.inbox._groups.values())
    garbage.collect(USING)
    garbage.collect(USING)
    for model in (PartitionLease, DeliveryState, ConsumerOffset, QueueMessage, OutboxMessage):
        assert not model.objects.exists(), model
