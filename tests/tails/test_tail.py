"""``tail`` without ``follow``: what it reads, in which order, and what it says of messages that are gone."""

from __future__ import annotations

import datetime

import pytest
from django.db import DatabaseError, connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_mysqlqueue import InvalidMessage, Message, publish, publish_many
from django_mysqlqueue.models import CollectedTopic, QueueMessage
from django_mysqlqueue.tails import Gap, ReceivedMessage, reading, tail
from tests.support import garbage
from tests.support.harness import USING, sequence
from tests.support.internals import Session, log_places

MORNING = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def fill(number=30, topic="t", keys=3, **options):
    publish_many(topic, (Message(each, key=f"k{each % keys}", **options) for each in range(number)))
    sequence()


def payloads(events):
    return [one.payload if isinstance(one, ReceivedMessage) else one for one in events]


def collect(settings):
    settings.MYSQLQUEUE = {"RETENTION": 0, "ORPHAN_RETENTION": 0}
    garbage.collect(USING)


@pytest.fixture(params=["index", "walk"])
def ways(request, monkeypatch):
    """Along the index of partitions, and along the log; in small pages."""
    limits = reading.PageLimits(messages=4, partitions=50 if request.param == "index" else 0, walked=7)
    for function in (reading.read_topic, reading.read_newest):
        monkeypatch.setattr(function, "__defaults__", (limits,))
    return request.param


def test_without_a_start_it_returns_the_newest_messages_oldest_first(db, ways):
    fill()
    publish("other", "x")
    sequence()
    assert payloads(tail("t")) == list(range(20, 30))
    assert payloads(tail("t", limit=2)) == [28, 29]
    assert payloads(tail("t", limit=100)) == list(range(30))
    assert payloads(tail("nothing")) == []


def test_it_reads_from_an_offset_to_the_end_in_the_order_of_the_log(db, ways):
    fill(10)
    fill(10, topic="other")
    fill(10)
    offsets = list(QueueMessage.objects.filter(topic="t").order_by("offset").values_list("offset", flat=True))
    read = list(tail("t", offset=0))
    assert [one.offset for one in read] == offsets
    assert [one.offset for one in tail("t", offset=offsets[15])] == offsets[15:]
    assert payloads(tail("t", offset=0, limit=3)) == [0, 1, 2]
    assert payloads(tail("t", offset=offsets[-1] + 1)) == []


def test_it_selects_a_key_with_all_its_priorities(db, ways):
    fill(6)
    publish("t", "soon", key="k1", priority=10)
    publish("t", "late", key="k1", priority=-100)
    publish("t", "other", key="k11")
    sequence()
    assert sorted(payloads(tail("t", offset=0, key="k1")), key=str) == [1, 4, "late", "soon"]
    assert len(payloads(tail("t", key="k1"))) == 4
    assert payloads(tail("t", offset=0, key="unknown")) == []


def test_it_selects_a_key_that_is_hashed_to_a_partition(db, ways, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": 2}}}
    fill(9)
    assert payloads(tail("t", offset=0, key="k1")) == [1, 4, 7]
    assert payloads(tail("t", key="k2", limit=2)) == [5, 8]


def test_it_selects_by_a_filter(db, ways):
    publish_many("t", (Message(each, metadata={"region": ("eu", "us")[each % 2]}) for each in range(20)))
    sequence()
    assert payloads(tail("t", offset=0, where={"region": ["eu"]})) == list(range(0, 20, 2))
    assert payloads(tail("t", where={"region": ["us"]}, limit=3)) == [15, 17, 19]
    assert payloads(tail("t", offset=0, where={"region": ["us"]}, limit=3)) == [1, 3, 5]


def test_the_newest_that_match_are_searched_in_a_bounded_number_of_messages(db, monkeypatch):
    monkeypatch.setattr("django_mysqlqueue.tails.api.SEARCHED", 8)
    monkeypatch.setattr(reading.read_newest, "__defaults__", (reading.PageLimits(messages=4),))
    publish_many("t", (Message(each, metadata={"n": each}) for each in range(20)))
    sequence()
    assert payloads(tail("t", where={"n": [13]})) == [13]
    assert payloads(tail("t", where={"n": [3]})) == []


def test_since_counts_the_time_at_which_messages_entered_the_log(db, ways):
    fill(10)
    times = [MORNING + datetime.timedelta(minutes=each) for each in range(10)]
    for row, moment in zip(QueueMessage.objects.order_by("offset"), times, strict=True):
        QueueMessage.objects.filter(pk=row.pk).update(published_at=int(moment.timestamp() * 1000))
    assert payloads(tail("t", since=times[6])) == [6, 7, 8, 9]
    ago = timezone.now() - times[6]
    assert payloads(tail("t", since=ago + datetime.timedelta(seconds=30))) == [6, 7, 8, 9]
    assert payloads(tail("t", since=(ago - datetime.timedelta(seconds=30)).total_seconds())) == [7, 8, 9]
    assert payloads(tail("t", since=0)) == []


def test_it_has_the_attributes_of_a_delivery(db):
    publish("t", b"\x00", key="k", id="i", metadata={"a": 1}, priority=7, expires_in=60)
    sequence()
    (one,) = tail("t")
    assert (one.topic, one.key, one.id, one.metadata["a"], one.priority) == ("t", "k", "i", 1, 7)
    assert (one.payload, one.body, one.target_group, one.failed_group) == (b"\x00", b"\x00", "", "")
    assert one.expires_at - one.created_at == datetime.timedelta(seconds=60)
    assert abs(one.published_at - timezone.now()) < datetime.timedelta(minutes=5)
    assert repr(one) == f"<ReceivedMessage t[{one.offset}], id 'i'>"


# -- gaps ------------------------------------------------------------------------


@pytest.mark.promise("Tails")
def test_messages_that_gc_has_deleted_are_a_gap(db, ways, settings):
    fill(10)
    first, last = QueueMessage.objects.order_by("offset")[0].offset, QueueMessage.objects.order_by("-offset")[0].offset
    collect(settings)
    publish("t", "later")
    sequence()
    assert payloads(tail("t", offset=first)) == [Gap("t", first - 1, last), "later"]
    assert payloads(tail("t", offset=last)) == [Gap("t", last - 1, last), "later"]
    assert payloads(tail("t", offset=last + 1)) == ["later"]
    assert payloads(tail("t")) == ["later"], "nobody asked for those before"


def test_what_is_left_in_a_gap_follows_it(db, ways):
    fill(6)
    offsets = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    QueueMessage.objects.filter(offset__in=[offsets[1], offsets[4]]).delete()
    CollectedTopic.objects.create(topic="t", collected_offset=offsets[4], published_at=1)
    assert payloads(tail("t", offset=offsets[0])) == [Gap("t", offsets[0] - 1, offsets[4]), 0, 2, 3, 5]


def test_a_gap_of_another_topic_is_none(db, ways, settings):
    fill(5, topic="other")
    collect(settings)
    fill(5)
    assert payloads(tail("t", offset=0)) == list(range(5))


def test_since_begins_with_a_gap_if_gc_has_deleted_messages_from_that_time_on(db, ways, settings):
    fill(5)
    last = QueueMessage.objects.order_by("-offset")[0].offset
    collect(settings)
    publish("t", "later")
    sequence()
    assert payloads(tail("t", since=3600)) == [Gap("t", last - 1, last), "later"]
    CollectedTopic.objects.update(published_at=1)  # in 1970
    assert payloads(tail("t", since=3600)) == ["later"]


def test_a_gap_is_reported_once(db, ways):
    """Though there are many pages up to its end."""
    fill(30)
    offsets = list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))
    QueueMessage.objects.filter(offset=offsets[28]).delete()
    CollectedTopic.objects.create(topic="t", collected_offset=offsets[28], published_at=1)
    begin, *rest = tail("t", offset=0)
    assert begin == Gap("t", 0, offsets[28])
    assert payloads(rest) == [*range(28), 29]


def test_it_returns_nothing_above_the_end_that_the_log_had(db, ways):
    fill(5)
    reader = tail("t", offset=0)
    fill(3)
    assert payloads(reader) == list(range(5))


@pytest.mark.promise("Tails")
def test_gc_does_not_wait_for_a_reader(db, ways, settings):
    fill(30)
    with tail("t", offset=0, follow=True) as follower:
        reader = tail("t", offset=0)
        assert (next(reader).payload, next(follower).payload) == (0, 0)
        settings.MYSQLQUEUE = {"RETENTION": 0, "ORPHAN_RETENTION": 0}
        assert garbage.collect(USING).messages == 30


def test_a_message_that_is_deleted_while_it_is_read_is_a_gap(db, ways, settings, monkeypatch):
    """Between the search for offsets and the read of the contents."""
    fill(3)
    last = QueueMessage.objects.order_by("-offset")[0].offset
    real = reading._messages

    def collected_first(*args):
        collect(settings)
        return real(*args)

    monkeypatch.setattr(reading, "_messages", collected_first)
    assert payloads(tail("t", offset=1)) == [Gap("t", 0, last)]


@pytest.mark.parametrize("size", [100, 4])
def test_a_message_in_a_new_partition_is_not_passed_over(db, monkeypatch, size):
    """It is appended after the list of partitions was read, and one of a known partition after it."""
    fill(3, keys=1)
    limits = reading.PageLimits(messages=size)
    real = reading.partitions_of

    def appended_then(*args):
        found = real(*args)
        publish("t", "new", key="new")
        publish("t", "known", key="k0")
        sequence()
        return found

    monkeypatch.setattr(reading, "partitions_of", appended_then)
    page = reading.read_topic(Session(USING), "t", None, 0, limits)
    monkeypatch.undo()
    assert payloads(page.messages) == [0, 1, 2]
    rest = reading.read_topic(Session(USING), "t", None, page.position, limits)
    assert payloads(rest.messages) == ["new", "known"]


def test_a_result_that_was_cut_off_is_an_error(db, ways, monkeypatch):
    fill(3)
    real = reading.payloads.read
    monkeypatch.setattr(reading.payloads, "read", lambda using, offsets: dict(list(real(using, offsets).items())[:-1]))
    with pytest.raises(DatabaseError, match="truncates results"):
        list(tail("t", offset=0))


# -- cost ------------------------------------------------------------------------


def test_a_page_of_large_payloads_ends_early(db, ways):
    publish_many("t", (Message("x" * 100_000, key=f"k{each % 2}") for each in range(5)))
    sequence()
    limits = reading.PageLimits(size=250_000, partitions=50 if ways == "index" else 0)
    position, sizes = 0, []
    while True:
        page = reading.read_topic(Session(USING), "t", None, position, limits)
        if page.position == position:
            break
        position = page.position
        sizes.append(len(page.messages))
    assert [size for size in sizes if size] == [2, 2, 1]


def test_the_newest_with_large_payloads_are_all_read(db, ways, monkeypatch):
    publish_many("t", (Message([n, "x" * 100_000], key=f"k{n % 2}") for n in range(6)))
    sequence()
    limits = reading.PageLimits(size=250_000, partitions=50 if ways == "index" else 0)
    monkeypatch.setattr(reading.read_newest, "__defaults__", (limits,))
    assert [one.payload[0] for one in tail("t", limit=5)] == [1, 2, 3, 4, 5]


def test_the_newest_of_a_topic_with_few_messages_and_many_partitions_are_searched_in_a_part_of_the_log(db, monkeypatch):
    monkeypatch.setattr("django_mysqlqueue.tails.api.SEARCHED_PAGES", 3)
    monkeypatch.setattr(reading.read_newest, "__defaults__", (reading.PageLimits(partitions=0, walked=5),))
    fill(1)
    fill(30, topic="other")
    assert payloads(tail("t")) == []
    fill(1)
    assert payloads(tail("t")) == [0]


@pytest.mark.promise("Cost")
def test_a_page_needs_a_bounded_number_of_statements(db):
    fill(400, keys=20)
    with CaptureQueriesContext(connection) as captured:
        assert len(list(tail("t", offset=0))) == 400
    assert len(captured) <= 12, [query["sql"] for query in captured]
    assert log_places.LOG == "queue_messages"


# -- arguments -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"topic": "a b"}, "topic 'a b'"),
        ({"since": 60, "offset": 1}, "since and offset were both given"),
        ({"offset": -1}, "offset -1: must be an integer from 0"),
        ({"offset": True}, "offset True"),
        ({"since": -5}, r"since -5: must be an aware datetime, or seconds or a timedelta, from 0 to 10\*\*10 s"),
        ({"since": datetime.datetime(2026, 1, 1)}, "must be an aware datetime"),  # noqa: DTZ001
        ({"since": "10m"}, "since '10m'"),
        ({"since": float("nan")}, "since nan"),
        ({"limit": 0}, "limit 0: must be an integer of at least 1"),
        ({"key": 5}, "key 5"),
        ({"where": {"a": "b"}}, "where: filter\\['a'\\]"),
        ({"using": "nowhere"}, "using 'nowhere'"),
    ],
)
def test_invalid_arguments_are_named_with_the_rule(db, arguments, text):
    with pytest.raises(InvalidMessage, match=text):
        tail(**{"topic": "t", **arguments})
