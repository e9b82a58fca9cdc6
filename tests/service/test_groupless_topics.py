"""GC of topics without a consumer group."""

from __future__ import annotations

import logging

import pytest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.operations import dropping
from tests.support import garbage
from tests.support.groupless import TYPO, command, found, in_log, register, send
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, Session, groups, retention

pytestmark = [pytest.mark.usefixtures("db"), pytest.mark.promise("Retention")]

DAY = 86_400


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
    assert garbage.collect(USING).messages == 0
    clock.advance(40)
    assert garbage.collect(USING).messages == 1


@pytest.mark.parametrize("value", [{"RETENTION": 0, "ORPHAN_RETENTION": None}, {"RETENTION": None}])
def test_a_topic_without_groups_may_be_kept_for_ever(clock, settings, value):
    settings.MYSQLQUEUE = value
    send()
    clock.advance(10**8)
    assert garbage.collect(USING).messages == 0


def test_a_group_that_is_registered_late_reads_what_is_there(clock, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    send(3)
    clock.advance(6 * DAY)
    assert garbage.collect(USING).messages == 0
    got = Recorder()
    register()
    assert garbage.collect(USING).messages == 0
    Sub(handler(topic=TYPO, function=got)).settle()
    assert sorted(got.payloads) == [0, 1, 2]
    assert garbage.collect(USING).messages == 3


def test_a_topic_whose_last_group_was_dropped_has_no_group(clock, settings):
    settings.MYSQLQUEUE = {"RETENTION": 60}
    send()
    register()
    groups.register(USING, GroupRef("other", TYPO), mode="ordered", start="earliest")
    dropping.drop(USING, GroupRef("g", TYPO), actor="test")
    clock.advance(61)
    assert found() == []
    dropping.drop(USING, GroupRef("other", TYPO), actor="test")
    assert [one.topic for one in found()] == [TYPO]
    assert garbage.collect(USING).messages == 0
    clock.advance(7 * DAY)
    assert garbage.collect(USING).messages == 1


def test_gc_by_chunks_says_what_it_deletes_that_nobody_read(clock, settings, caplog):
    settings.MYSQLQUEUE = {
        "RETENTION": 0,
        "ORPHAN_RETENTION": 60,
        "DLQ_RETENTION": 0,
        "TOPICS": {"archived": {"GROUPLESS": True}, "own": {"RETENTION": 5}},
    }
    limits = retention.StepLimits(rows=2, partitions=1)
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
    dry = garbage.collect(USING, dry_run=True, limits=limits)
    assert (dry.messages, in_log()) == (3 + 3 + 3 + 2 + 5, 6)
    steps = list(retention.steps(USING, limits=limits))
    told = [orphans for step in steps for orphans in step.orphans]
    orphans = retention.by_topic(told)
    assert (sum(step.messages for step in steps), in_log()) == (dry.messages, 1)
    assert orphans == dry.orphans
    assert [(one.topic, one.messages) for one in orphans] == [(TYPO, 5), ("own", 3)]
    assert [one.messages for one in told if one.topic == TYPO] == [2, 2, 1]
    for one in (*orphans, *told):
        assert first <= one.oldest_at <= one.newest_at < last - 90_000
    assert not QueueMessage.objects.filter(topic__in=("archived", "read", "dead_dlq")).exists()


def events(caplog) -> list[dict[str, object]]:
    found = [record.mysqlqueue for record in caplog.records if hasattr(record, "mysqlqueue")]
    return [one for one in found if one["event"] == "orphans.deleted"]


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
            "event": "orphans.deleted",
            "topic": TYPO,
            "messages": 1 if young else 2,
            "oldest": "2023-11-14T22:13:20+00:00",
            "newest": newest,
        }
    ]
    (record,) = [record for record in caplog.records if record.getMessage().startswith("orphans.")]
    assert record.levelname == "WARNING"


def test_queuegc_says_what_nobody_read(settings, caplog):
    settings.MYSQLQUEUE = {"RETENTION": 0, "ORPHAN_RETENTION": 0}
    send(2)
    QueueMessage.objects.filter(partition_key="k0").update(published_at=1_700_000_000_000)
    QueueMessage.objects.filter(partition_key="k1").update(published_at=1_700_000_060_000)
    line = (
        "2 messages of topic 'orders.plced', which has no consumer group, "
        "logged from 2023-11-14T22:13:20+00:00 to 2023-11-14T22:14:20+00:00.\n"
    )
    assert command("queuegc", "--dry-run") == f"Would delete 2 messages.\n{line}"
    assert events(caplog) == []
    assert command("queuegc") == f"Deleted 2 messages.\n{line}"
    assert [(one["topic"], one["messages"]) for one in events(caplog)] == [(TYPO, 2)]
    assert command("queuegc") == "Deleted 0 messages.\n"
