"""Topics with messages and no consumer group: GC keeps them longer and says what it deletes; people are told."""

from __future__ import annotations

import io
import json
import logging

import pytest
from django.core.management import call_command

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.inspection import PAGES, Bounds, Problem, check_health, find_problems, groupless, scheduled
from django_mysqlqueue.models import OutboxMessage, QueueMessage
from django_mysqlqueue.operations import dropping
from django_mysqlqueue.service import groups, retention
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.retention import Orphans
from django_mysqlqueue.sql.session import Session
from tests.support.harness import USING, Sub, handler, sequence
from tests.test_conformance import Recorder

pytestmark = pytest.mark.usefixtures("db")
DAY = 86_400
TYPO = "orders.plced"


def send(count: int = 1, topic: str = TYPO) -> None:
    publish_many(topic, (Message(number, key=f"k{number}") for number in range(count)))
    sequence()


def register(topic: str = TYPO) -> None:
    groups.register(USING, GroupRef("g", topic), mode="ordered", start="earliest")


def in_log(topic: str = TYPO) -> int:
    return QueueMessage.objects.filter(topic=topic).count()


# -- GC -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ({"RETENTION": 60}, 7 * DAY),
        ({"RETENTION": 60, "ORPHAN_RETENTION": 600}, 600),
        ({"RETENTION": 600, "ORPHAN_RETENTION": 60}, 600),
        ({"RETENTION": 60, "TOPICS": {TYPO: {"RETENTION": 30}}}, 30),
        ({"RETENTION": 60, "TOPICS": {TYPO: {"GROUPLESS": True}}}, 60),
    ],
)
def test_a_topic_without_groups_is_kept_for_the_longer_retention(clock, settings, value, kept):
    settings.MYSQLQUEUE = value
    send()
    clock.advance(kept - 20)
    assert retention.collect(USING).messages == 0
    clock.advance(40)
    assert retention.collect(USING).messages == 1


@pytest.mark.parametrize("value", [{"RETENTION": 0, "ORPHAN_RETENTION": None}, {"RETENTION": None}])
def test_a_topic_without_groups_may_be_kept_for_ever(clock, settings, value):
    settings.MYSQLQUEUE = value
    send()
    clock.advance(10**8)
    assert retention.collect(USING).messages == 0


def test_a_group_that_is_registered_late_reads_what_is_there(clock, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    send(3)
    clock.advance(6 * DAY)
    assert retention.collect(USING).messages == 0
    got = Recorder()
    register()
    assert retention.collect(USING).messages == 0
    Sub(handler(topic=TYPO, function=got)).settle()
    assert sorted(got.payloads) == [0, 1, 2]
    assert retention.collect(USING).messages == 3


def test_a_topic_whose_last_group_was_dropped_has_no_group(clock, settings):
    settings.MYSQLQUEUE = {"RETENTION": 60}
    send()
    register()
    groups.register(USING, GroupRef("other", TYPO), mode="ordered", start="earliest")
    dropping.drop(USING, GroupRef("g", TYPO))
    clock.advance(61)
    assert found() == []
    dropping.drop(USING, GroupRef("other", TYPO))
    assert [one.topic for one in found()] == [TYPO]
    assert retention.collect(USING).messages == 0
    clock.advance(7 * DAY)
    assert retention.collect(USING).messages == 1


def test_gc_by_chunks_says_what_it_deletes_that_nobody_read(clock, settings, caplog):
    settings.MYSQLQUEUE = {
        "RETENTION": 0,
        "ORPHAN_RETENTION": 60,
        "DLQ_RETENTION": 0,
        "TOPICS": {"archived": {"GROUPLESS": True}, "own": {"RETENTION": 5}},
    }
    limits = retention.Limits(rows=2, partitions=1)
    first = Session(USING).now()
    for topic in ("archived", "own", "read"):
        send(3, topic)
    publish("dead", 1)
    Sub(handler("read"), handler("dead", function=lambda delivery: delivery.reject("no"))).settle()
    sequence()
    publish_many(TYPO, (Message(number, key="k") for number in range(5)))
    sequence()
    clock.advance(100)
    last = Session(USING).now()
    send(1)
    told: list[Orphans] = []
    dry = retention.collect(USING, dry_run=True, limits=limits)
    assert (dry.messages, in_log()) == (3 + 3 + 3 + 2 + 5, 6)
    done = retention.collect(USING, tell=told.append, limits=limits)
    assert (done.messages, in_log()) == (dry.messages, 1)
    assert done.orphans == dry.orphans
    assert [(one.topic, one.messages) for one in done.orphans] == [(TYPO, 5), ("own", 3)]
    assert [one.messages for one in told if one.topic == TYPO] == [2, 2, 1]
    for one in (*done.orphans, *told):
        assert first <= one.oldest_at <= one.newest_at < last - 90_000
    assert not QueueMessage.objects.filter(topic__in=("archived", "read", "dead_dlq")).exists()


def events(caplog) -> list[dict[str, object]]:
    found = [record.mysqlqueue for record in caplog.records if hasattr(record, "mysqlqueue")]
    return [one for one in found if one["event"] == "gc.orphans_deleted"]


def test_subscribers_log_what_they_delete_that_nobody_read(settings, caplog):
    settings.MYSQLQUEUE = {"RETENTION": 0, "ORPHAN_RETENTION": 0}
    caplog.set_level(logging.INFO, "django_mysqlqueue")
    send(2)
    send(2, "t")
    QueueMessage.objects.filter(topic=TYPO, partition_key="k0").update(published_at=1_800_000_000_999)
    QueueMessage.objects.filter(topic=TYPO, partition_key="k1").update(published_at=1_700_000_000_000)
    sub = Sub(handler())
    sub.settle()
    for _ in sub.poller.maintenance.round():
        pass
    assert not QueueMessage.objects.filter(topic="t").exists()
    young = Session(USING).now() < 1_800_000_000_999
    newest = "2023-11-14T22:13:20+00:00" if young else "2027-01-15T08:00:00+00:00"
    assert events(caplog) == [
        {
            "event": "gc.orphans_deleted",
            "topic": TYPO,
            "messages": 1 if young else 2,
            "oldest": "2023-11-14T22:13:20+00:00",
            "newest": newest,
        }
    ]
    (record,) = [record for record in caplog.records if record.getMessage().startswith("gc.")]
    assert record.levelname == "WARNING"


def test_queuegc_says_what_nobody_read(settings, caplog):
    settings.MYSQLQUEUE = {"RETENTION": 0, "ORPHAN_RETENTION": 0}
    send(2)
    QueueMessage.objects.filter(partition_key="k0").update(published_at=1_700_000_000_000)
    QueueMessage.objects.filter(partition_key="k1").update(published_at=1_700_000_060_000)
    line = (
        "Of these, 2 in the topic 'orders.plced', which has no consumer group: "
        "from 2023-11-14T22:13:20+00:00 to 2023-11-14T22:14:20+00:00.\n"
    )
    assert command("queuegc", "--dry-run") == f"Would delete 2 messages.\n{line}"
    assert events(caplog) == []
    assert command("queuegc") == f"Deleted 2 messages, 0 offsets rows, 0 heartbeats.\n{line}"
    assert [(one["topic"], one["messages"]) for one in events(caplog)] == [(TYPO, 2)]
    assert command("queuegc") == "Deleted 0 messages, 0 offsets rows, 0 heartbeats.\n"


def command(name: str, *arguments: str) -> str:
    output = io.StringIO()
    call_command(name, *arguments, stdout=output, no_color=True)
    return output.getvalue()


# -- who is told --------------------------------------------------------------


def found(bounds: Bounds = PAGES) -> list[Problem]:
    everything = find_problems(using=USING, bounds=bounds)
    return [one for one in everything if one.kind == "groupless"]


def texts(bounds: Bounds = PAGES) -> list[str]:
    return [one.text for one in found(bounds)]


def test_a_topic_that_nobody_reads_is_a_problem(clock):
    assert texts() == []
    send()
    alone = "Topic 'orders.plced' has 1 message but no consumer group. GC deletes each 7 d after it entered the log, "
    assert texts() == [alone + "the first in 7 d."]
    clock.advance(2 * DAY)
    send(2)
    (problem,) = found()
    assert problem.text.endswith(" has 3 messages but no consumer group. GC deletes each 7 d after it entered the log, "
                                 "the first in 5 d.")  # fmt: skip
    assert (problem.severity, problem.topic, problem.ref) == (1, TYPO, None)
    clock.advance(9 * DAY)
    assert texts()[0].endswith("the first in 0 s.")
    register()
    assert texts() == []


def test_the_oldest_is_found_in_whatever_partition_it_is(clock):
    publish(TYPO, 1, key="z")
    sequence()
    clock.advance(3 * DAY)
    publish(TYPO, 1, key="a")
    sequence()
    assert texts()[0].endswith("the first in 4 d.")


def test_what_waits_in_the_outbox_counts():
    """Where no subscriber runs nothing comes into the log, and what is scheduled may be called off in time."""
    publish(TYPO, 1)
    publish(TYPO, 2, delay=3600)
    expected = (
        "Topic 'orders.plced' has 2 messages but no consumer group. GC deletes each 7 d after it entered the log."
    )
    assert texts() == [expected]
    sequence()
    assert texts() == [expected[:-1] + ", the first in 7 d."]
    OutboxMessage.objects.update(deliver_at=-5)  # plain SQL may
    assert " has 2 messages " in texts()[0]


def test_it_counts_no_further_than_a_bound():
    publish_many("a", range(2))
    publish_many(TYPO, range(5))
    assert [text.partition(" but")[0] for text in texts(Bounds(scheduled=3))] == [
        "Topic 'a' has 2+ messages",
        "Topic 'orders.plced' has 2+ messages",
    ]
    sequence()
    assert [text.partition(" but")[0] for text in texts(Bounds(count=3))] == [
        "Topic 'a' has 2 messages",
        "Topic 'orders.plced' has 3+ messages",
    ]


def test_of_very_many_partitions_the_oldest_is_not_looked_for():
    send(4)
    assert texts(Bounds(groupless_partitions=4))[0].endswith(" 7 d after it entered the log, the first in 7 d.")
    assert texts(Bounds(groupless_partitions=3))[0].endswith(" 7 d after it entered the log.")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"ORPHAN_RETENTION": None}, "GC never deletes them."),
        ({"RETENTION": 30 * DAY}, "GC deletes each 30 d after it entered the log, the first in 30 d."),
        ({"TOPICS": {TYPO: {"RETENTION": 7200}}}, "GC deletes each 2 h after it entered the log, the first in 2 h."),
    ],
)
def test_it_says_what_becomes_of_them(settings, value, says):
    settings.MYSQLQUEUE = value
    send()
    assert [text.partition("group. ")[2] for text in texts()] == [says]


def test_topics_that_are_meant_to_have_no_group_are_no_problem(settings):
    publish("t", 1)
    Sub(handler(function=lambda delivery: delivery.reject("no"))).settle()
    sequence()
    assert in_log("t_dlq") == 1
    send()
    publish(TYPO, 1, delay=3600)
    settings.MYSQLQUEUE = {"TOPICS": {TYPO: {"GROUPLESS": True}}}
    assert texts() == []
    settings.MYSQLQUEUE = {"TOPICS": {TYPO: {"GROUPLESS": False}}}
    assert len(texts()) == 1


@pytest.mark.parametrize(("topic", "shown"), [("", "''"), ("a b", "'a b'"), ("t\n", "'t\\n'")])
def test_topics_of_plain_sql_are_named_too(topic, shown):
    OutboxMessage.objects.create(topic=topic, payload=b"1")
    sequence()
    assert [text.partition(" has")[0] for text in texts()] == [f"Topic {shown}"]


def test_a_group_that_is_registered_meanwhile_is_seen(monkeypatch):
    """Its topic's first message may come right after that: groups are read last."""
    send()
    real = scheduled.topics

    def topics(*arguments, **options):
        register()
        return real(*arguments, **options)

    monkeypatch.setattr(scheduled, "topics", topics)
    assert groupless.find(Session(USING), [TYPO]) == []


def health_of(*arguments: str) -> tuple[int, str]:
    output = io.StringIO()
    try:
        call_command("queuehealth", *arguments, stdout=output, no_color=True)
    except SystemExit as end:
        return int(str(end.code)), output.getvalue()
    return 0, output.getvalue()


def test_queuehealth_fails(settings):
    send(2)
    text = (
        "Topic 'orders.plced' has 2 messages but no consumer group. GC deletes each 7 d after it entered the log, "
        "the first in 7 d."
    )
    assert health_of() == (1, f"PROBLEM  {text}\n")
    code, output = health_of("--format", "json")
    assert code == 1
    assert json.loads(output)["problems"] == [
        {"kind": "groupless", "text": text, "group": None, "topic": TYPO, "partition": None}
    ]
    settings.MYSQLQUEUE = {"TOPICS": {TYPO: {"GROUPLESS": True}}}
    assert health_of()[0] == 0


def test_queuehealth_of_one_group_is_not_about_other_topics():
    register("t")
    send()
    for arguments in (("--group", "g"), ("--topic", "t")):
        assert health_of(*arguments)[0] == 0
    assert health_of()[0] == 1
    assert [one.kind for one in check_health(using=USING).findings] == ["groupless"]


def test_queuestatus_says_the_same():
    publish(TYPO, 1, delay=3600)
    output = command("queuestatus")
    assert f"Problems\n  {texts()[0]}\n" in output
    send(2)
    output = command("queuestatus")
    assert texts()[0] in output
    assert " has 3 messages but no consumer group." in output
    register()
    assert "no consumer group" not in command("queuestatus")
