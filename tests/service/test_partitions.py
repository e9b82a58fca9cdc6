"""The last offsets of a topic's partitions, whether or not the server jumps along the index from key to key."""

from __future__ import annotations

import pytest
from django.db import connection, models
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue.models import ConsumerOffset, DeliveryState, QueueMessage
from tests.support.harness import USING, Sub, handler
from tests.support.internals import GroupRef, Session, groups, leasing, partitions
from tests.support.recorded_statements import recorded

pytestmark = pytest.mark.usefixtures("db")

REF = GroupRef("g", "t")
COUNTS = {"": 1, "a": 23, "b": 1, "c": 1, "d": 9, "e": 2, "é": 40, "😀": 3}


def log(counts, topic="t"):
    """Insert messages into the log, as the sequencer would."""
    first = QueueMessage.objects.aggregate(last=models.Max("offset"))["last"] or 0
    keys = (key for key, count in counts.items() for _ in range(count))
    with connection.cursor() as cursor:
        # Django takes fifty times as long to make as many objects with the database's defaults.
        cursor.executemany(
            "INSERT INTO queue_messages "
            "(`offset`, topic, partition_key, id, payload, created_at, published_at) "
            "VALUES (%s, %s, %s, %s, %s, 1, 1)",
            [(place, topic, key, f"{place}", b"1") for place, key in enumerate(keys, first + 1)],
        )
    Session(USING).execute("UPDATE queue_sequencer SET last_offset = %s", (first + sum(counts.values()),))


def ends(topic="t"):
    found = QueueMessage.objects.filter(topic=topic).values_list("partition_key").annotate(models.Max("offset"))
    return dict(sorted(found, key=lambda row: row[0].encode()))


@pytest.fixture
def probed(request, monkeypatch):
    """The number of messages that are read first, and of those that are read then; by default, they do not matter."""
    for name, value in zip(("PROBED", "SHORT"), getattr(request, "param", (1, 1)), strict=True):
        monkeypatch.setattr(partitions, name, value)


@pytest.fixture(params=[True, False])
def jumps(request, monkeypatch, probed):
    """Whether the server is taken to jump from key to key."""
    monkeypatch.setattr(partitions, "_jumps", lambda *_: request.param)
    return request.param


@pytest.mark.parametrize("probed", [(1, 1), (2, 4), (9, 1), (70, 1), (100, 1)], indirect=True)
@pytest.mark.parametrize("more", [1, 2, 500])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 100])
def test_each_partition_is_returned_once_with_its_last_offset(jumps, monkeypatch, limit, more):
    monkeypatch.setattr(partitions, "MORE", more)
    log(COUNTS)
    log({"b": 5, "zz": 1}, topic="s")
    log({"a": 5, "zz": 1}, topic="u")
    log({"c": 2, "a": 1})
    session, found, after = Session(USING), {}, None
    for _page in range(20):
        page, whole = partitions.last_offsets(session, "t", limit=limit, after=after)
        assert len(page) <= limit
        assert list(page) == sorted(page, key=str.encode)
        assert not found.keys() & page.keys()
        found |= page
        if whole:
            break
        assert page, "it makes progress"
        after = list(page)[-1]
    assert found == ends()
    assert partitions.last_offsets(session, "none", limit=limit) == ({}, True)


def test_from_a_partition_on(jumps):
    log(COUNTS)
    session, expected = Session(USING), ends()
    assert partitions.last_offsets(session, "t", limit=2, since="d") == ({key: expected[key] for key in "de"}, False)
    assert partitions.last_offsets(session, "t", limit=9, since="f") == ({key: expected[key] for key in "é😀"}, True)


def test_a_read_of_long_partitions_ends_early(monkeypatch, probed):
    monkeypatch.setattr(partitions, "_jumps", lambda *_: False)
    monkeypatch.setattr(partitions, "ROWS", (1, 3))
    monkeypatch.setattr(partitions, "MORE", 1)
    log({"a": 13, "b": 4, "c": 1})
    session, expected = Session(USING), ends()
    assert partitions.last_offsets(session, "t", limit=5) == ({"a": expected["a"]}, False)
    assert partitions.last_offsets(session, "t", limit=5, after="a") == ({key: expected[key] for key in "bc"}, True)
    monkeypatch.setattr(partitions, "ALL", 5)
    assert partitions.last_offsets(session, "t", limit=5) == ({key: expected[key] for key in "ab"}, False)
    assert partitions.last_offsets(session, "t", limit=6) == (expected, True)


def test_a_read_of_short_partitions_continues(monkeypatch, probed):
    monkeypatch.setattr(partitions, "_jumps", lambda *_: False)
    monkeypatch.setattr(partitions, "ROWS", (2, 3))
    monkeypatch.setattr(partitions, "MORE", 1)
    log(dict.fromkeys("abcdefghij", 3))
    session, expected = Session(USING), ends()
    assert partitions.last_offsets(session, "t", limit=10) == (expected, True), "20 messages, then up to 30"
    assert partitions.last_offsets(session, "t", limit=8) == ({key: expected[key] for key in "abcdefgh"}, False)


def test_a_read_continues_after_partitions_that_are_collected_meanwhile(monkeypatch, probed):
    monkeypatch.setattr(partitions, "_jumps", lambda *_: False)
    monkeypatch.setattr(partitions, "ROWS", (1, 1))
    monkeypatch.setattr(partitions, "MORE", 1)
    log({"a": 9, "b": 1, "c": 1})
    expected, read = ends(), partitions.ends

    def collected(*asked):
        QueueMessage.objects.filter(partition_key="a").delete()
        return read(*asked)

    monkeypatch.setattr(partitions, "ends", collected)
    session = Session(USING)
    assert partitions.last_offsets(session, "t", limit=1) == ({"b": expected["b"]}, False)
    assert partitions.last_offsets(session, "t", limit=2) == ({key: expected[key] for key in "bc"}, True)


@pytest.mark.promise("Cost")
@pytest.mark.parametrize("probed", [(4, 100)], indirect=True)
@pytest.mark.parametrize(("limit", "reads"), [(3, 1), (6, 2), (20, 2)])
def test_short_partitions_are_read_along_the_index(monkeypatch, probed, limit, reads):
    monkeypatch.setattr(partitions, "_jumps", lambda *_: pytest.fail("the server need not be asked"))
    log(dict.fromkeys("abcdefghijkl", 1))
    expected = list(ends().items())
    with CaptureQueriesContext(connection) as captured:
        found, whole = partitions.last_offsets(Session(USING), "t", limit=limit)
    assert (list(found.items()), whole) == (expected[:limit], limit == 20)
    assert len(captured) == reads


def test_all_partitions_or_none(jumps):
    log(COUNTS)
    session = Session(USING)
    assert partitions.all_in_log(session, "t", most=len(COUNTS)) == list(ends())
    assert partitions.all_in_log(session, "t", most=len(COUNTS) - 1) is None
    assert partitions.all_in_log(session, "none", most=5) == []


def analyze():
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE TABLE queue_messages")
        cursor.fetchall()


@pytest.mark.promise("Cost")
@pytest.mark.servers_only
@pytest.mark.parametrize("is_beside_short_ones", [False, True])
def test_it_reads_few_messages_of_long_partitions(is_beside_short_ones):
    """By statistics, that are those of the whole log, the servers decide whether they jump."""
    log(dict.fromkeys("abcdef", 4000))
    if is_beside_short_ones:
        log({f"k{number}": 1 for number in range(30_000)}, topic="devices")
    analyze()
    session = Session(USING)
    sql, parameters = partitions._grouped(session, "t", "", (), 21)
    assert partitions._jumps(session.rows(f"EXPLAIN {sql}", parameters)) is not is_beside_short_ones, (
        "else this tests nothing"
    )
    for limit in (3, 20, 400):
        with recorded() as recorder:
            found, whole = partitions.last_offsets(session, "t", limit=limit)
        assert (len(found), whole) == (min(limit, 6), limit >= 6)
        assert recorder.reads() <= 2 * sum(partitions.ROWS) * limit + 200
    with recorded() as recorder:
        found, whole = partitions.last_offsets(session, "t", limit=400, after="c")
    assert (list(found), whole) == (["d", "e", "f"], True)
    assert recorder.reads() <= 2 * sum(partitions.ROWS) * 400 + 200


# -- the search for work --------------------------------------------------------


def found_work(limit):
    found, after = [], None
    for _page in range(50):
        keys, after = leasing.find_work(Session(USING), REF, after=after, limit=limit)
        found += keys
        if after is None:
            return found
    raise AssertionError("it does not end")


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_the_search_for_work_finds_the_same_as_a_search_by_key(jumps, limit):
    """Partitions with new messages, with watermarks below positions, with state rows, and without anything."""
    groups.register(USING, REF, mode="ordered", start="latest")
    log(COUNTS)
    last = ends()
    for key, acked, claimed in (
        ("a", last["a"], last["a"]),
        ("b", 0, last["b"]),
        ("d", last["d"] - 1, last["d"] - 1),
        ("gone", 5, 5),
        ("é", last["é"], last["é"]),
    ):
        ConsumerOffset.objects.create(
            consumer_group="g", topic="t", partition_key=key, offset_acked=acked, offset_claimed=claimed
        )
    for key in ("a", "discarded", "zz"):
        DeliveryState.objects.create(consumer_group="g", topic="t", partition_key=key, message_offset=5)
    every = {*last, "gone", "discarded", "zz"}
    expected = leasing.with_work(Session(USING), REF, every)
    assert {"a", "b", "d", "discarded", "zz"} <= expected
    assert not {"é", "gone"} & expected
    assert sorted(found_work(limit)) == sorted(expected)


def test_the_search_for_work_continues_while_there_are_state_rows(jumps):
    for key in "abcde":
        DeliveryState.objects.create(consumer_group="g", topic="t", partition_key=key, message_offset=5)
    log({"b": 1})
    for limit in (1, 2, 3, 100):
        assert found_work(limit) == list("abcde")


def test_the_search_for_work_begins_at_the_start_of_a_group(jumps):
    sub = Sub(handler())
    log(COUNTS)
    assert sorted(found_work(3)) == sorted(COUNTS)
    sub.settle()
    assert found_work(3) == []


def test_a_group_that_was_dropped_has_no_new_messages(jumps):
    log(COUNTS)
    assert found_work(3) == []
