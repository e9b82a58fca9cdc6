"""What is told of topics: their messages, size, age and rates, and what keeps GC from deleting messages."""

from __future__ import annotations

import dataclasses

import pytest
from django.db import connection
from django.db.models import Avg, F
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.inspection import PAGES, find_causes, get_overview, topics
from django_mysqlqueue.inspection.topics import summarize_topics
from django_mysqlqueue.models import ConsumerGroup, QueueMessage, Reader, Rollup
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, Session, log_places
from tests.support.scenarios import log

pytestmark = pytest.mark.usefixtures("db")

G = GroupRef("g", "t")
MINUTE = 60_000


def summaries(*names, bounds=PAGES):
    overview = get_overview(using=USING)
    names = names or overview.topics or ()
    found = summarize_topics(Session(USING), names, overview.groups, overview.readers, overview.now, bounds=bounds)
    return {one.topic: one for one in found}


def disk(size):
    return (size + log_places.ROW) * log_places.PAGES


def aged(milliseconds):
    """Let all that is stored be older."""
    QueueMessage.objects.update(published_at=F("published_at") - milliseconds)
    ConsumerGroup.objects.update(registered_at=F("registered_at") - milliseconds)


def test_messages_size_and_age_are_those_of_the_log(settings):
    settings.MYSQLQUEUE = {"RETENTION": 600}
    sub = Sub(handler("t", "g"), handler("t", "h"))
    log(7)
    log(3, topic="u")
    sub.settle()
    found = summaries()
    assert set(found) == {"t", "u"}
    for topic, one in found.items():
        rows = QueueMessage.objects.filter(topic=topic)
        assert (one.messages.value, one.messages.exact, one.number) == (rows.count(), True, f"{rows.count()}")
        assert one.bytes == pytest.approx(disk(rows.aggregate(mean=Avg("size"))["mean"]) * rows.count(), abs=1)
        assert one.oldest_at == rows.order_by("offset").values_list("published_at", flat=True)[0]
    assert found["t"].retention == 600
    assert found["u"].retention == 604_800, "that of topics without a group"
    assert found["t"].groups == (G, GroupRef("h", "t"))
    assert found["u"].groups == ()
    assert found["t"].size.startswith("≈ ")


def test_rates_are_those_of_its_groups():
    sub = Sub(handler("t", "g"), handler("t", "h"))
    log(60)
    sub.settle()
    sub.poller.write_rollups()
    now = get_overview(using=USING).now
    minute = now // MINUTE * MINUTE
    aged(10 * MINUTE)
    Rollup.objects.filter(grain=60).update(bucket_at=minute - MINUTE, entered=60, entered_minutes=1)
    (one,) = summaries("t").values()
    assert one.entered == 1.0, "what enters the topic does so once, however many groups read it"
    assert 0.3 < one.settled < 0.5, "60 messages of each of two groups, in five minutes and a part of one"


def test_a_count_that_stops_is_replaced_by_the_servers_statistics():
    log(400)
    bounds = dataclasses.replace(PAGES, count=10)
    (one,) = summaries("t", bounds=bounds).values()
    mean = QueueMessage.objects.aggregate(mean=Avg("size"))["mean"]
    assert one.bytes == pytest.approx(disk(mean) * one.messages.value, rel=0.05)
    assert one.is_estimate is (connection.vendor == "mysql")
    if one.is_estimate:
        assert 100 < one.messages.value < 1600
        assert one.number.startswith("≈ ")
    else:
        assert one.number == "10+"
        assert one.size.endswith("or more")


MORE = 4 * 2**20
"""Bytes by which tests make the log larger."""


@pytest.mark.promise("Health")
@pytest.mark.servers_only
@pytest.mark.django_db(transaction=True)
def test_the_size_of_the_log_grows_with_it():
    publish_many("t", [Message("x" * 65_536) for _number in range(MORE // 65_536)])
    sequence()
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE TABLE queue_messages")  # The server does this, too, soon after a tenth has changed.
        cursor.fetchall()
    assert get_overview(using=USING).log_bytes >= MORE
    assert get_overview(using=USING, topic="t").log_bytes is None


@pytest.mark.servers_only
@pytest.mark.django_db(transaction=True)
def test_the_size_of_the_log_is_not_the_one_that_mysql_remembers(engine):
    """For a day, unless the table is analyzed."""
    if engine != "mysql":
        pytest.skip("MySQL's own")
    before = get_overview(using=USING).log_bytes
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE mysql.innodb_table_stats SET clustered_index_size = clustered_index_size + %s "
            "WHERE database_name = DATABASE() AND table_name = 'queue_messages'",
            [MORE // 16_384],
        )
        cursor.execute("FLUSH TABLES queue_messages")
        assert get_overview(using=USING).log_bytes == before + MORE
        cursor.execute("ANALYZE TABLE queue_messages")
        cursor.fetchall()


@pytest.mark.parametrize(
    ("options", "says", "advice"),
    [
        ({}, "GC deletes its messages 10 min after they entered the log.", "Set a shorter RETENTION"),
        ({"TOPICS": {"t": {"RETENTION": None}}}, "GC never deletes its messages.", "Set a shorter RETENTION"),
        ({"slow": True}, "GC waits for slow/t.", "Start a subscriber of the group, or drop it."),
        ({"ARCHIVE_REQUIRED": True}, "GC waits for the archive.", "Archive the log"),
    ],
)
def test_a_log_above_its_limit_is_a_problem_of_its_largest_topic(settings, options, says, advice):
    settings.MYSQLQUEUE = {"RETENTION": 600} | {name: value for name, value in options.items() if name.isupper()}
    sub = Sub(handler("t", "g"))
    if "slow" in options:
        Sub(handler("t", "slow"))
    log(9)
    log(3, topic="u")
    sub.settle()
    aged(15 * MINUTE)
    overview = dataclasses.replace(get_overview(using=USING), log_bytes=3 * 2**20)
    for most in (None, 3 * 2**20):
        assert list(topics.disk(Session(USING), overview, most)) == []
    (cause,) = find_causes(overview, list(topics.disk(Session(USING), overview, 2**20)))
    assert (cause.kind, cause.severity, cause.problems[0].topic) == ("disk", 1, "t")
    text = "The log takes about 3.0\xa0MB of disk (limit 1.0\xa0MB); 75% of it is topic 't'."
    assert cause.text == f"{text} {says}"
    assert cause.advice.startswith(advice)
    assert "oldest message since" in cause.facts(overview.now)


@pytest.mark.promise("Cost")
def test_more_partitions_and_messages_are_no_more_statements():
    def cost():
        with CaptureQueriesContext(connection) as captured:
            summarize_topics(Session(USING), ["t"], (), (), 0)
        return len(captured)

    log(300, keys=[f"{number:04}" for number in range(300)])
    few = cost()
    log(3000, keys=[f"{number:04}" for number in range(1500)])
    assert cost() <= few + 4, "SQLite and servers whose statistics are old read some more partitions one by one"


@pytest.mark.promise("Cost")
@pytest.mark.parametrize("number", [3, 40])
def test_partitions_that_the_overview_has_read_are_not_read_again(number):
    bounds = dataclasses.replace(PAGES, groupless_partitions=20)
    Sub(handler("t", "g"))
    log(40, keys=[f"{place % number:04}" for place in range(40)])
    overview = get_overview(using=USING, bounds=bounds)
    found = []
    for groups in (overview.groups, ()):
        with CaptureQueriesContext(connection) as captured:
            found += summarize_topics(Session(USING), ["t"], groups, (), overview.now, bounds=bounds)
        reads = [one["sql"] for one in captured if "SELECT partition_key" in one["sql"]]
        assert bool(reads) is not bool(groups), reads
    assert (found[0].bytes, found[0].oldest_at) == (found[1].bytes, found[1].oldest_at)
    assert (found[0].oldest_at is None) is (number > 20), "more partitions than it is searched for in"


def test_what_is_not_read_in_time_is_left_out_but_for_the_first_topics(monkeypatch):
    sub = Sub(handler("t", "g"))
    log(2)
    sub.settle()
    out_of_time = dataclasses.replace(PAGES, seconds=-1.0)
    assert [one.number for one in summaries("s", "t", bounds=out_of_time).values()] == ["0", "2"]
    monkeypatch.setattr(topics, "FIRST", 1)
    first, one = summaries("s", "t", bounds=out_of_time).values()
    assert first.number == "0"
    assert (one.number, one.size, one.oldest_at, one.groups) == ("", "", None, (G,))


def test_the_group_that_keeps_gc_from_deleting_and_since_when(settings):
    settings.MYSQLQUEUE = {"RETENTION": 600}
    fast, slow = Sub(handler("t", "g")), Sub(handler("t", "slow"))
    log(2)
    fast.settle()
    (one,) = summaries("t").values()
    assert (one.held_by, one.held_since) == (None, None), "GC would keep the messages anyway"
    aged(15 * MINUTE)
    (one,) = summaries("t").values()
    assert one.held_by == GroupRef("slow", "t")
    first = QueueMessage.objects.order_by("offset").values_list("published_at", flat=True)[0]
    assert one.held_since == first + 600_000
    slow.settle()
    (one,) = summaries("t").values()
    assert (one.held_by, one.held_since) == (None, None)
    settings.MYSQLQUEUE = {"RETENTION": None}
    assert summaries("t")["t"].retention is None


def test_the_archive_that_keeps_gc_from_deleting(settings):
    settings.MYSQLQUEUE = {"RETENTION": 600, "ARCHIVE_REQUIRED": True}
    sub = Sub(handler("t", "g"))
    offsets = log(2)
    sub.settle()
    aged(15 * MINUTE)
    (one,) = summaries("t").values()
    assert (one.held_by, one.held_since) == (None, one.oldest_at + 600_000)
    Reader.objects.create(name="archive", read_offset=offsets[-1])
    assert summaries("t")["t"].held_since is None


@pytest.mark.parametrize(("topic", "holds"), [("", True), ("t", True), ("u", False)])
def test_a_registered_reader_that_keeps_gc_from_deleting(settings, topic, holds):
    settings.MYSQLQUEUE = {"RETENTION": 600}
    sub = Sub(handler("t", "g"))
    offsets = log(2)
    sub.settle()
    aged(15 * MINUTE)
    Reader.objects.create(name="lake", topic=topic, read_offset=offsets[0] - 1)
    one = summaries("t")["t"]
    assert (one.held_since, one.reader) == ((one.oldest_at + 600_000, "lake") if holds else (None, ""))
    assert one.reader_text == "the reader lake" or not holds
    Reader.objects.update(read_offset=offsets[-1])
    assert summaries("t")["t"].held_since is None
