"""Payloads and content types: encoding, decoding, rules."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import json
import uuid

import pytest
from django.db import models
from django.utils.translation import gettext_lazy

from django_mysqlqueue.exceptions import InvalidMessage
from tests.support.encoding import metadata_of, round_trip, stored

pytestmark = pytest.mark.any_engine


class Colour(models.TextChoices):
    RED = "r"


class Size(enum.IntEnum):
    BIG = 3


AWARE = datetime.datetime(2026, 3, 4, 5, 6, 7, 891_234, tzinfo=datetime.UTC)


# -- payloads as JSON ---------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "body", "comes_back"),
    [
        (None, b"null", None),
        (True, b"true", True),
        (False, b"false", False),
        (0, b"0", 0),
        (-1, b"-1", -1),
        (2**70, b"1180591620717411303424", 2**70),
        (1.5, b"1.5", 1.5),
        (1e-300, b"1e-300", 1e-300),
        ("", b'""', ""),
        ("é😀", '"é😀"'.encode(), "é😀"),
        ('\x00\n"\\\x7f', b'"\\u0000\\n\\"\\\\\x7f"', '\x00\n"\\\x7f'),
        ("\u2028", '"\u2028"'.encode(), "\u2028"),
        ([], b"[]", []),
        ({}, b"{}", {}),
        ([1, [2, {"a": None}]], b'[1,[2,{"a":null}]]', [1, [2, {"a": None}]]),
        ((1, 2), b"[1,2]", [1, 2]),
        ({2: "a", None: "b", True: "c"}, b'{"2":"a","null":"b","true":"c"}', {"2": "a", "null": "b", "true": "c"}),
        (collections.OrderedDict(b=1, a=2), b'{"b":1,"a":2}', {"b": 1, "a": 2}),
        (AWARE, b'"2026-03-04T05:06:07.891Z"', "2026-03-04T05:06:07.891Z"),
        (AWARE.replace(tzinfo=None), b'"2026-03-04T05:06:07.891"', "2026-03-04T05:06:07.891"),
        (AWARE.date(), b'"2026-03-04"', "2026-03-04"),
        (datetime.time(1, 2, 3), b'"01:02:03"', "01:02:03"),
        (datetime.timedelta(days=1, seconds=2), b'"P1DT00H00M02S"', "P1DT00H00M02S"),
        (decimal.Decimal("1.10"), b'"1.10"', "1.10"),
        (decimal.Decimal("NaN"), b'"NaN"', "NaN"),
        (uuid.UUID(int=7), b'"00000000-0000-0000-0000-000000000007"', str(uuid.UUID(int=7))),
        (gettext_lazy("message"), b'"message"', "message"),
        (Colour.RED, b'"r"', "r"),
        (Size.BIG, b"3", 3),
        ({"at": AWARE, "n": [decimal.Decimal(1)]}, b'{"at":"2026-03-04T05:06:07.891Z","n":["1"]}', None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_everything_that_djangos_encoder_writes(payload, body, comes_back):
    row = stored(payload)
    assert row.payload == body
    assert metadata_of(row) == {"content_type": "application/json"}
    assert round_trip(row) == (json.loads(body) if comes_back is None else comes_back)
    assert type(round_trip(row)) is type(json.loads(body))


def recursive():
    value = []
    value.append(value)
    return value


def deep(levels):
    value = None
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "payload",
    [
        float("nan"),
        float("inf"),
        float("-inf"),
        {"a": [float("nan")]},
        "\ud800",
        {"\udfff": 1},
        ["a\udc80b"],
        {1, 2},
        object(),
        {(1, 2): 3},
        {b"a": 1},
        [b"bytes inside"],
        1j,
        datetime.time(1, tzinfo=datetime.UTC),
        10**5000,
        pytest.param(recursive(), id="recursive"),
        pytest.param(deep(100_000), id="deep"),
        (number for number in range(3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_cannot_hold_is_refused(payload):
    with pytest.raises(InvalidMessage, match=r"^payload(\[.*\])? of type \w+ cannot be written as JSON: ") as raised:
        stored(payload)
    str(raised.value).encode()


RAW = b"\x00\xff'\\ raw \xf0\x9f"


# -- payloads as bytes --------------------------------------------------------


@pytest.mark.parametrize(
    "payload",
    [RAW, bytearray(RAW), memoryview(RAW), memoryview(RAW + RAW)[: len(RAW)], memoryview(bytes(reversed(RAW)))[::-1]],
    ids=["bytes", "bytearray", "memoryview", "slice", "strided"],
)
def test_bytes_are_stored_as_they_are(payload):
    row = stored(payload)
    assert row.payload == RAW
    assert type(row.payload) is bytes
    assert metadata_of(row) == {"content_type": "application/octet-stream"}
    assert round_trip(row) == RAW


def test_a_buffer_that_changes_later_does_not_change_the_message():
    buffer = bytearray(b"before")
    row = stored(buffer)
    buffer[:] = b"after!"
    assert row.payload == b"before"


def test_empty_bytes_are_a_message():
    assert round_trip(stored(b"")) == b""


# -- content types ------------------------------------------------------------


def test_bytes_may_name_their_content_type():
    row = stored(b"a,b", metadata={"content_type": "text/csv"})
    assert metadata_of(row) == {"content_type": "text/csv"}
    assert round_trip(row) == b"a,b"


def test_json_that_comes_as_bytes_is_decoded():
    assert round_trip(stored(b'{"a": 1}', metadata={"content_type": "application/json"})) == {"a": 1}


@pytest.mark.parametrize("body", [b"{", b"\xff", b""])
def test_bytes_that_lie_about_being_json_are_refused_on_reading(body):
    row = stored(body, metadata={"content_type": "application/json"})
    with pytest.raises(InvalidMessage, match="its content type is application/json"):
        round_trip(row)


def test_an_object_cannot_have_another_content_type():
    with pytest.raises(InvalidMessage, match="content_type='text/csv'"):
        stored("a,b", metadata={"content_type": "text/csv"})
    assert stored("a", metadata={"content_type": "application/json"}).payload == b'"a"'


@pytest.mark.parametrize("content_type", [None, 1, b"text/csv", ["text/csv"]], ids=repr)
def test_content_type_must_be_a_str(content_type):
    with pytest.raises(InvalidMessage, match=r"content_type=.*must be a str"):
        stored(b"", metadata={"content_type": content_type})


# -- sizes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at_limit", "beyond"),
    [
        (b"x" * 1000, b"x" * 1001),
        ("x" * 998, "x" * 999),
        ("é" * 499, "é" * 499 + "x"),
        ("\x00" * 166 + "xx", "\x00" * 166 + "xxx"),
        (bytearray(1000), memoryview(bytes(1001))),
    ],
    ids=["bytes", "ascii", "two bytes", "escapes", "buffers"],
)
def test_payload_size_is_measured_in_bytes_as_stored(settings, at_limit, beyond):
    settings.MYSQLQUEUE = {"MAX_PAYLOAD_BYTES": 1000}
    assert len(stored(at_limit).payload) == 1000
    with pytest.raises(InvalidMessage, match="payload of 1001 bytes: MAX_PAYLOAD_BYTES allows 1000"):
        stored(beyond)
