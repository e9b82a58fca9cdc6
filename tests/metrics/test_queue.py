"""Prometheus metrics of the queue, from its tables."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext
from prometheus_client import CollectorRegistry, generate_latest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.inspection import get_overview
from django_mysqlqueue.inspection.bounds import Bounds
from django_mysqlqueue.management.commands.queuestatus import read_status
from django_mysqlqueue.metrics import queue
from django_mysqlqueue.metrics.queue import QueueCollector
from django_mysqlqueue.models import ConsumerGroup, QueueMessage, Reader
from django_mysqlqueue.operations import pausing
from tests.support import oracle
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, Session, groups, relay
from tests.support.metrics import Samples, parsed

REF = GroupRef("g", "t")


def collected(collector=None):
    registry = CollectorRegistry()
    registry.register(collector or QueueCollector())
    return Samples(parsed(generate_latest(registry).decode()))


def test_an_empty_queue(db):
    found = collected()
    labels = (("database", "default"),)
    assert found == {
        ("mysqlqueue_database_up", labels): 1,
        ("mysqlqueue_outbox_waiting", labels): 0,
        ("mysqlqueue_outbox_oldest_age_seconds", labels): 0,
        ("mysqlqueue_outbox_scheduled", labels): 0,
        ("mysqlqueue_debounced_total", labels): found.value("debounced_total"),
        ("mysqlqueue_last_offset", labels): found.value("last_offset"),
        ("mysqlqueue_log_bytes", labels): found.value("log_bytes"),
        ("mysqlqueue_more_groups", labels): 0,
    }


def test_how_far_readers_are(db):
    publish_many("t", range(5))
    sequence()
    first = QueueMessage.objects.order_by("offset")[0].offset
    Reader.objects.create(name="archive", read_offset=first, moved_at=1)
    found = collected()
    labels = {"reader": "archive"}
    assert found.value("reader_unread_offsets", **labels) == 4
    assert found.value("reader_age_seconds", **labels) > 1_000_000_000


def busy():
    """Acked, failed, in hand, dead, new, due and scheduled messages of two groups."""

    def work(delivery):
        if delivery.payload % 10 == 3:
            delivery.nack(delay=3600)
        elif delivery.payload % 10 == 4:
            delivery.reject("never")

    publish_many("t", [Message(n, key=f"key-{n % 7}") for n in range(50)])
    sub = Sub(handler(function=work), handler(group="idle"), claim_size=200)
    sub.step()
    for _ in range(20):
        held = sub.take()
        if held is not None and held.claimed.ref == REF:
            sub.run(held)
    sub.flush()
    publish_many("t", range(30))
    sequence()
    publish_many("t", range(4))
    publish("t", 1, delay=3600)
    pausing.set_paused(USING, GroupRef("idle", "t"), actor="tests", paused=True)
    return sub


def test_beside_exact_counts(db, clock):
    sub = busy()
    clock.advance(100)
    sub.heart.beat()  # of a group without subscribers no lag is exact
    found = collected()
    exact = read_status(USING)
    assert len(exact.queue.groups) == 2
    for group in exact.queue.groups:
        labels = {"topic": group.ref.topic, "group": group.ref.group}
        assert found.value("lag", **labels) == group.lag.value == oracle.unsettled(Session(USING), group.ref)[0] > 0
        assert found.value("in_flight", **labels) == group.in_flight.value
        assert found.value("retrying", **labels) == group.retrying.value
        assert found.value("dead_letters", **labels) == group.dead_letters.value
        assert found.value("subscribers", **labels) == len(group.live) == 1
        assert found.value("paused", **labels) == (group.ref.group == "idle")
        age = (exact.queue.now - group.oldest_at) / 1000
        assert found.value("oldest_unacked_age_seconds", **labels) == pytest.approx(age, abs=20)
        assert age >= 100
        for count in ("lag", "in_flight", "retrying", "dead_letters"):
            assert found.value("count_exact", count=count, **labels) == 1
    working = next(group for group in exact.queue.groups if group.ref.group == "g")
    assert working.in_flight
    assert working.retrying
    (topic,) = (topic for topic in exact.topics if topic.topic == "t")
    # Dead letters on their way are in the outbox too.
    assert found.value("outbox_waiting") == sum(topic.waiting for topic in exact.topics) >= topic.waiting == 4
    assert found.value("outbox_scheduled") == topic.scheduled == 1
    assert found.value("outbox_oldest_age_seconds") >= 100
    assert found.value("last_offset") == exact.queue.last_offset


def test_live_subscribers(db):
    Sub(handler())
    Sub(handler(), handler(group="other"))
    found = collected()
    assert found.value("subscribers", topic="t", group="g") == 2
    assert found.value("subscribers", topic="t", group="other") == 1


def test_a_count_that_stops_says_so(db, monkeypatch):
    monkeypatch.setattr(QueueCollector, "bounds", Bounds(count=5))
    publish_many("t", [Message(n, key="k") for n in range(8)])
    sequence()
    groups.register(USING, REF, mode="ordered", start="earliest")
    Sub(handler()).step()
    found = collected()
    assert found.value("lag", topic="t", group="g") == 5
    assert found.value("count_exact", topic="t", group="g", count="lag") == 0
    assert found.value("count_exact", topic="t", group="g", count="dead_letters") == 1


def test_no_label_names_a_key_or_a_message(db):
    """Nor does any value of a label: one series for each key would fill the memory of Prometheus."""
    busy()
    found = collected()
    assert {name for _, labels in found for name, _ in labels} == {"database", "topic", "group", "count"}
    values = {value for _, labels in found for _, value in labels}
    assert values == {"default", "t", "g", "idle", "lag", "in_flight", "retrying", "dead_letters"}


def test_names_of_plain_sql_are_escaped(db):
    topic = 'a"b\\c\nd{}'
    ConsumerGroup.objects.create(consumer_group='g"\n', topic=topic, mode="ordered")
    assert collected().value("lag", topic=topic, group='g"\n') == 0


def test_more_groups_than_are_shown(db, monkeypatch):
    monkeypatch.setattr(QueueCollector, "bounds", Bounds(groups=2))
    for number in range(3):
        groups.register(USING, GroupRef(f"g{number}", "t"), mode="ordered", start="earliest")
    found = collected()
    assert found.value("more_groups") == 1
    assert len([name for name, _ in found if name == "mysqlqueue_lag"]) == 2


def test_registering_asks_no_database(db):
    with CaptureQueriesContext(connection) as captured:
        registry = CollectorRegistry(auto_describe=True)
        registry.register(QueueCollector())
    assert not captured.captured_queries
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(QueueCollector())
    described = {family.name for family in QueueCollector().describe()}
    assert described == {family.name for family in QueueCollector().collect()}


def test_a_scrape_changes_nothing(db):
    busy()
    with CaptureQueriesContext(connection) as captured:
        collected()
    reads = ("SELECT", "(SELECT", "EXPLAIN SELECT", "SET SESSION information_schema_stats_expiry")
    assert all(query["sql"].startswith(reads) for query in captured), captured.captured_queries


def test_a_scrape_waits_if_there_is_nothing_to_show(db, settings, monkeypatch):
    """It answers with the error, or, if it was only late, with what has been read."""
    settings.MYSQLQUEUE = {"TOPICS": {"orders": {"DATABASE": "queue"}}}
    monkeypatch.setattr(QueueCollector, "patience", 0.05)

    def late(value):
        answers = {alias: Future() for alias in (USING, "queue")}
        threading.Timer(0.3, answers[USING].set_result, [value]).start()
        monkeypatch.setattr(queue, "start_each", lambda aliases, read: answers)

    late(queue._State(get_overview(), {}))
    found = collected()
    assert [found.value("database_up", database=alias) for alias in (USING, "queue")] == [1, 0]
    late(OperationalError(2013, "no answer"))
    with pytest.raises(OperationalError, match="no answer"):
        list(QueueCollector().collect())


def test_messages_that_wait_to_be_relayed(queue_db, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"orders": {"DATABASE": "queue"}}}
    publish_many("orders", range(2), via=USING)
    sequence()
    QueueMessage.objects.update(published_at=1)
    found = collected()
    assert found.value("relay_waiting", target="queue") == 2
    assert found.value("relay_oldest_age_seconds", target="queue") > 10**6
    assert relay(USING, "queue").messages == 2
    assert collected().value("relay_oldest_age_seconds", target="queue") == 0
