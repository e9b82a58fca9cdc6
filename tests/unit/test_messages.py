"""Metadata, partitions, ids and times: encoding and rules."""

from __future__ import annotations

import datetime
import decimal
import math
import types
import uuid
import zoneinfo

import pytest

from django_mysqlqueue.exceptions import InvalidMessage
from tests.support.encoding import metadata_of, stored
from tests.support.internals import (
    LATEST_DELIVERY,
    MAX_METADATA_BYTES,
    Message,
    decode,
    decode_metadata,
    duration_ms,
    encode,
)

pytestmark = pytest.mark.any_engine

AWARE = datetime.datetime(2026, 3, 4, 5, 6, 7, 891_234, tzinfo=datetime.UTC)


# -- metadata -----------------------------------------------------------------


@pytest.mark.parametrize(
    "metadata",
    [{}, {"a": 1}, {"": ""}, {"é😀": {"n": [None, True]}}, types.MappingProxyType({"a": "b"}), {"at": AWARE}],
    ids=repr,
)
def test_metadata_travels(metadata):
    expected = {"at": "2026-03-04T05:06:07.891Z"} if "at" in metadata else dict(metadata)
    assert metadata_of(stored(1, metadata=metadata)) == {**expected, "content_type": "application/json"}


def test_the_callers_metadata_is_left_alone(settings):
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": 2}}}
    mine = {"a": 1}
    stored(1, key="k", metadata=mine)
    assert mine == {"a": 1}


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ([("a", 1)], "must be a mapping with str keys"),
        ("a", "must be a mapping"),
        (1, "must be a mapping"),
        ({1: 2}, "must be a mapping with str keys"),
        ({None: 2}, "must be a mapping with str keys"),
        ({"mysqlqueue.": 1}, "are reserved"),
        ({"mysqlqueue.key": "x"}, "are reserved"),
        ({"a": float("nan")}, "metadata\\['a'\\] of type float cannot be written as JSON"),
        ({"a": object()}, "metadata\\['a'\\] of type object cannot"),
        ({"\ud800": 1}, "metadata of type dict cannot"),
    ],
    ids=repr,
)
def test_metadata_refused(metadata, said):
    with pytest.raises(InvalidMessage, match=said) as raised:
        stored(1, metadata=metadata)
    assert str(raised.value).startswith("metadata")


@pytest.mark.parametrize("character", ["x", "é", "😀"])
def test_metadata_size_is_measured_in_bytes_as_stored(character):
    empty = len(stored(1, metadata={"a": ""}).metadata.encode())
    width = len(character.encode())
    fits, rest = divmod(MAX_METADATA_BYTES - empty, width)
    row = stored(1, metadata={"a": character * fits + "-" * rest})
    assert len(row.metadata.encode()) == MAX_METADATA_BYTES == 65_535
    with pytest.raises(InvalidMessage, match="metadata of 65536 bytes: at most 65535"):
        stored(1, metadata={"a": character * fits + "-" * (rest + 1)})


def test_what_the_queue_adds_to_metadata_counts_too(settings):
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": 2}}}
    empty = len(stored(1, key="😀", metadata={"a": ""}).metadata.encode())
    assert len(stored(1, key="😀", metadata={"a": "x" * (65_535 - empty)}).metadata.encode()) == 65_535
    with pytest.raises(InvalidMessage, match="metadata of 65536 bytes"):
        stored(1, key="😀", metadata={"a": "x" * (65_536 - empty)})


# -- partitions and ids -------------------------------------------------------


def test_a_key_is_its_own_partition():
    row = stored(1, key="A é 😀 ")
    assert row.partition_key == "A é 😀 "
    assert row.publisher_key is None


def test_the_empty_key_is_a_key():
    assert stored(1, key="").partition_key == ""


def test_without_a_key_the_id_says_where(settings):
    settings.MYSQLQUEUE = {"KEYLESS_PARTITIONS": 16}
    row = stored(1, id="123456789")
    assert row.partition_key == f"__p:{0xCBF43926 % 16}"
    assert metadata_of(row) == {"content_type": "application/json"}
    assert len({stored(1).partition_key for _ in range(500)}) == 16
    settings.MYSQLQUEUE = {"KEYLESS_PARTITIONS": 1}
    assert {stored(1).partition_key for _ in range(10)} == {"__p:0"}


def test_a_topic_with_partitions_hashes_its_keys(settings):
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": 7}}}
    row = stored(1, key="123456789")
    assert row.partition_key == f"__p:{0xCBF43926 % 7}"
    assert row.publisher_key == "123456789"
    assert stored(2, key="123456789").partition_key == row.partition_key
    keyless = stored(1, id="123456789")
    assert keyless.partition_key == row.partition_key
    assert keyless.publisher_key is None
    assert encode("another", Message(1, key="123456789")).partition_key == "123456789"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"id": ""}, "id '': must not be empty"),
        ({"id": 7}, "id 7: must be a str"),
        ({"id": "x" * 191}, "191 characters"),
        ({"id": "\ud800"}, "lone surrogate"),
        ({"key": 7}, "key 7: must be a str"),
        ({"key": "x" * 191}, "191 characters"),
        ({"key": "\ud800"}, "lone surrogate"),
        ({"key": "__p:3"}, "are reserved"),
    ],
    ids=lambda value: ascii(value)[:30],
)
@pytest.mark.parametrize("partitions", [None, 3])
def test_bad_ids_and_keys_are_refused_also_where_keys_are_hashed(settings, partitions, fields, said):
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": partitions}}} if partitions else {}
    with pytest.raises(InvalidMessage, match=said):
        stored(1, **fields)


def test_ids():
    assert stored(1, id="mine ").message_id == "mine "
    assert uuid.UUID(stored(1).message_id).version == 7
    assert stored(1).message_id != stored(1).message_id


HUNDRED_YEARS = 100 * 366 * 86400


# -- when ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delay", "milliseconds"),
    [
        (0, 0),
        (1, 1000),
        (0.25, 250),
        (0.0004, 0),
        (0.0006, 1),
        (datetime.timedelta(minutes=2, milliseconds=3), 120_003),
        (datetime.timedelta(0), 0),
        (HUNDRED_YEARS, HUNDRED_YEARS * 1000),
        (float(HUNDRED_YEARS), HUNDRED_YEARS * 1000),
    ],
)
def test_delay(delay, milliseconds):
    row = stored(1, delay=delay)
    assert (row.delay_ms, row.deliver_at) == (milliseconds, 0)


@pytest.mark.parametrize(
    "delay",
    [
        -1,
        -0.001,
        HUNDRED_YEARS + 1,
        10**400,
        math.nan,
        math.inf,
        "5",
        True,
        False,
        [],
        decimal.Decimal(5),
        datetime.timedelta(microseconds=-1),
        datetime.timedelta.max,
    ],
    ids=lambda value: repr(value)[:30],
)
def test_delay_refused(delay):
    with pytest.raises(InvalidMessage, match=r"^delay .*must be a timedelta or seconds, from 0 to"):
        stored(1, delay=delay)


def test_durations_name_what_they_are_for():
    assert duration_ms("seconds", 2, longest=2) == 2000
    with pytest.raises(InvalidMessage, match=r"seconds 2\.5: .* from 0 to 2$"):
        duration_ms("seconds", 2.5, longest=2)


EAST = datetime.timezone(datetime.timedelta(hours=14))
WEST = datetime.timezone(datetime.timedelta(hours=-12))


@pytest.mark.parametrize("use_tz", [True, False])
@pytest.mark.parametrize(
    ("moment", "milliseconds"),
    [
        (datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC), 1_893_456_000_000),
        (datetime.datetime(2030, 1, 1, 14, tzinfo=EAST), 1_893_456_000_000),
        (datetime.datetime(2030, 1, 1, 0, 0, 0, 250_900, tzinfo=datetime.UTC), 1_893_456_000_250),
        (datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC), 1),
        (datetime.datetime(1901, 1, 1, tzinfo=datetime.UTC), 1),
        (datetime.datetime.min.replace(tzinfo=EAST), 1),
        (datetime.datetime.max.replace(tzinfo=datetime.UTC), LATEST_DELIVERY),
        (datetime.datetime.max.replace(tzinfo=WEST), LATEST_DELIVERY),
    ],
)
def test_deliver_at(settings, use_tz, moment, milliseconds):
    """0 would mean "at once" and pass what was published before."""
    settings.USE_TZ = use_tz
    row = stored(1, deliver_at=moment)
    assert (row.delay_ms, row.deliver_at) == (None, milliseconds)


@pytest.mark.parametrize(
    "start",
    [
        datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
        datetime.datetime(2038, 6, 1, tzinfo=datetime.UTC),
    ],
    ids=str,
)
def test_deliver_at_is_exact_to_the_millisecond(start):
    moments = [start + datetime.timedelta(milliseconds=number) for number in range(1000)]
    first = round(start.timestamp()) * 1000
    assert [stored(1, deliver_at=moment).deliver_at - first for moment in moments] == list(range(1000))


def test_naive_deliver_at_is_refused_with_use_tz(settings):
    settings.USE_TZ = True
    with pytest.raises(InvalidMessage, match="must be aware because USE_TZ is True"):
        stored(1, deliver_at=datetime.datetime(2030, 1, 1))  # noqa: DTZ001


def test_naive_deliver_at_is_local_time_without_use_tz(settings):
    settings.USE_TZ = False
    settings.TIME_ZONE = "Asia/Tokyo"
    local = datetime.datetime(2030, 1, 1, 9)  # noqa: DTZ001
    assert stored(1, deliver_at=local).deliver_at == 1_893_456_000_000


def test_naive_deliver_at_in_a_summer_time_gap_is_some_moment(settings):
    settings.USE_TZ = False
    settings.TIME_ZONE = "Europe/Berlin"
    at_two, at_three = (
        datetime.datetime(2030, 3, 31, hour, tzinfo=zoneinfo.ZoneInfo("Etc/GMT-1")).timestamp() * 1000
        for hour in (1, 3)
    )
    missing = datetime.datetime(2030, 3, 31, 2, 30)  # noqa: DTZ001
    assert at_two <= stored(1, deliver_at=missing).deliver_at <= at_three


@pytest.mark.parametrize("moment", [datetime.date(2030, 1, 1), 1_893_456_000, "2030-01-01T00:00:00Z", True, 0])
def test_deliver_at_must_be_a_datetime(moment):
    with pytest.raises(InvalidMessage, match=r"^deliver_at .*must be a datetime"):
        stored(1, deliver_at=moment)


@pytest.mark.parametrize("delay", [0, 5])
def test_delay_and_deliver_at_exclude_each_other(delay):
    with pytest.raises(InvalidMessage, match="delay and deliver_at were both given"):
        stored(1, delay=delay, deliver_at=AWARE)


def test_at_once():
    row = stored(1)
    assert (row.delay_ms, row.deliver_at) == (None, 0)


# -- rows that plain SQL enqueued ---------------------------------------------


@pytest.mark.parametrize(
    ("body", "payload"),
    [
        (b'{"a": 1}', {"a": 1}),
        (b" [1, 2]\n", [1, 2]),
        (b"1", 1),
        (b"null", None),
        ('"é😀"'.encode(), "é😀"),
        (b"plain text", b"plain text"),
        (b"", b""),
        (b"\xff\x00", b"\xff\x00"),
        (b"{'a': 1}", b"{'a': 1}"),
        (b"1" * 5000, b"1" * 5000),
        (b"NaN", b"NaN"),
        (b"-Infinity", b"-Infinity"),
        (b"7\x00", b"7\x00"),  # no number in UTF-16
        (b'"\xed\xa0\x80"', b'"\xed\xa0\x80"'),  # a surrogate, which is no UTF-8
    ],
    ids=lambda value: repr(value)[:20],
)
def test_without_a_content_type_it_is_json_if_it_parses(body, payload):
    found = decode(body, {})
    assert found == payload
    assert type(found) is type(payload)


def test_a_body_too_deep_to_parse_is_bytes():
    body = b"[" * 100_000 + b"]" * 100_000
    assert decode(body, {}) == body


@pytest.mark.parametrize(
    ("text", "metadata"),
    [
        ("{}", {}),
        ('{"a": "é"}', {"a": "é"}),
        (b'{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("5", {}),
        ("null", {}),
        ("[1]", {}),
        ('{"a": ' + "1" * 5000 + "}", {}),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", {}),
    ],
)
def test_metadata_that_python_cannot_decode_counts_as_empty(text, metadata):
    assert decode_metadata(text) == metadata
