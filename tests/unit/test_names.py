"""The rules for topics, groups, keys and ids."""

import time
import uuid

import pytest

from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.names.ids import new_message_id
from django_mysqlqueue.names.keys import check_key, hashed_partition
from django_mysqlqueue.names.rules import TOPIC_COLUMN_LENGTH, check_name, check_text
from django_mysqlqueue.options.topics import check_topic, dlq_topic, is_dlq
from tests.support.internals import public_coalesce_key, scoped_coalesce_key

pytestmark = pytest.mark.any_engine

# -- topics and groups --------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "A", "0", "-", ".", "_", "a.b-c_D9", "x" * 100, "orders"])
def test_names_taken(name):
    assert check_name("group", name) == name
    assert check_topic(name) == name


@pytest.mark.parametrize(
    "name",
    ["", "x" * 101, "a b", " a", "a\n", "a\x00", "é", "٣", "a/b", "a:b", "a*", "😀", "\ud800", None, 1, b"a", ["a"]],
    ids=repr,
)
@pytest.mark.parametrize("kind", ["topic", "group"])
def test_names_refused(kind, name):
    with pytest.raises(InvalidMessage, match=f"^{kind} ") as raised:
        check_name(kind, name)
    assert repr(name) in str(raised.value)
    assert "1 to 100" in str(raised.value)


def test_topics_ending_in_the_dlq_suffix_are_kept(settings):
    with pytest.raises(InvalidMessage, match="'_dlq' are reserved for dead letters"):
        check_topic("t_dlq")
    with pytest.raises(InvalidMessage):
        check_topic("_dlq")
    assert check_topic("t_dlq2") == "t_dlq2"
    assert check_topic("t_DLQ") == "t_DLQ"
    assert check_name("group", "g_dlq") == "g_dlq"
    settings.MYSQLQUEUE = {"DLQ_SUFFIX": ".dead"}
    assert check_topic("t_dlq") == "t_dlq"
    with pytest.raises(InvalidMessage, match=r"\.dead"):
        check_topic("t.dead")


def test_dlq_topic(settings):
    assert dlq_topic("t") == "t_dlq"
    assert dlq_topic("t_dlq") == "t_dlq"
    assert is_dlq("t_dlq")
    assert not is_dlq("t")
    settings.MYSQLQUEUE = {"DLQ_SUFFIX": "-dead"}
    assert dlq_topic("t_dlq") == "t_dlq-dead"
    assert not is_dlq("t_dlq")


def test_the_longest_topic_and_suffix_fit_the_column(settings):
    settings.MYSQLQUEUE = {"DLQ_SUFFIX": "s" * 20}
    assert len(dlq_topic(check_topic("t" * 100))) <= TOPIC_COLUMN_LENGTH


# -- keys and ids -------------------------------------------------------------

TEXTS = ["", "a", "A", " a ", "a\x00b", "\x00", "é", "e\u0301", "😀", "\n\t", "\x7f", "\ufffe", "p:1", "__p", "a__p:1"]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_texts_taken_as_they_are(text):
    assert check_text("id", text) == text
    assert check_key(text) == text


@pytest.mark.parametrize("character", ["a", "é", "😀", "\x00"], ids=ascii)
def test_the_limit_counts_characters(character):
    assert check_key(character * 190) == character * 190
    with pytest.raises(InvalidMessage, match=r"key .*: 191 characters, but at most 190"):
        check_key(character * 191)


def test_the_error_for_a_long_text_is_short():
    with pytest.raises(InvalidMessage) as raised:
        check_text("id", "x" * 10_000_000)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"], ids=ascii)
def test_lone_surrogates_refused(text):
    with pytest.raises(InvalidMessage, match="lone surrogate") as raised:
        check_text("id", text)
    str(raised.value).encode()  # the error can be printed


@pytest.mark.parametrize("value", [None, 1, b"a", 1.5, uuid.UUID(int=1), ["a"]], ids=repr)
def test_only_str(value):
    with pytest.raises(InvalidMessage, match=f"must be a str, not {type(value).__name__}"):
        check_key(value)


@pytest.mark.parametrize("key", ["__p:", "__p:0", "__p:x", "__p:😀"], ids=ascii)
def test_keys_with_the_prefix_of_hashed_partitions_refused(key):
    with pytest.raises(InvalidMessage, match="'__p:' are reserved"):
        check_key(key)
    assert check_text("id", key) == key


# -- hashing ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "crc"),
    [("", 0), ("a", 3904355907), ("123456789", 0xCBF43926), ("é", 235179326), ("😀", 88978756), ("日本語", 2819314405)],
    ids=ascii,
)
@pytest.mark.parametrize("partitions", [1, 2, 16, 97, 100_000])
def test_hash_is_fixed_for_all_time(value, crc, partitions):
    """Another hash in another version would send a key's messages to two partitions."""
    assert hashed_partition(value, partitions) == f"__p:{crc % partitions}"


def test_hash_reaches_every_partition():
    counts = {}
    for _ in range(16_000):
        partition = hashed_partition(new_message_id(), 16)
        counts[partition] = counts.get(partition, 0) + 1
    assert set(counts) == {f"__p:{number}" for number in range(16)}
    assert min(counts.values()) > 800
    assert max(counts.values()) < 1200


@pytest.mark.parametrize(
    ("partition", "shown"),
    [("a", "1:b:c"), ("__p:+010:a", "1:b:c"), ("__p:3", "c"), ("__p:+010:__p:3", "c")],
)
def test_a_coalesce_key_is_stored_with_the_key_in_a_hashed_partition(partition, shown):
    assert public_coalesce_key(partition, scoped_coalesce_key("b", "c")) == shown


# -- ids ----------------------------------------------------------------------


def test_ids_are_version_7_and_unique():
    ids = [new_message_id() for _ in range(20_000)]
    assert len(set(ids)) == len(ids)
    for text in ids[:100]:
        parsed = uuid.UUID(text)
        assert str(parsed) == text
        assert parsed.version == 7
        assert parsed.variant == uuid.RFC_4122


def test_ids_begin_with_the_clock(monkeypatch):
    now = 1_700_000_000_123
    monkeypatch.setattr(time, "time_ns", lambda: now * 1_000_000 + 999_999)
    assert uuid.UUID(new_message_id()).int >> 80 == now


def test_ids_sort_by_time(monkeypatch):
    ids = []
    for now in (0, 1, 1_700_000_000_000, 1_700_000_000_001, 2**48 - 1):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now * 1_000_000)
        ids.append(new_message_id())
    assert ids == sorted(ids)


@pytest.mark.parametrize("now", [-1, 2**48])
def test_a_clock_beyond_the_format_still_makes_an_id(monkeypatch, now):
    monkeypatch.setattr(time, "time_ns", lambda: now * 1_000_000)
    assert uuid.UUID(new_message_id()).version == 7


def test_ids_made_within_one_millisecond_differ(monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_000_000_000)
    ids = {new_message_id() for _ in range(5000)}
    assert len(ids) == 5000
