"""Claimed messages whose payload is not in the answer: deleted ones are settled, others redelivered."""

from __future__ import annotations

import logging
import time

import pytest
from django.db import DatabaseError, connection, connections

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import ConsumerOffset, DeliveryEvent, DeliveryState, QueueMessage
from django_mysqlqueue.options.backoff import Backoff
from tests.support.handlers import Recorder, fail
from tests.support.harness import USING, Sub, handler, in_thread, lag, sequence
from tests.support.internals import GroupRef, Session, payloads, sessions, watermarks

REF = GroupRef("g", "t")
TIMEOUTS = sessions.Timeouts(idle=60, lock_wait=5, network=10, read=30)


@pytest.mark.promise("Missing rows")
@pytest.mark.servers_only
@pytest.mark.parametrize("mode", ["ordered", "shared"])
@pytest.mark.parametrize("limit", [1, 7, 20])
def test_a_limit_of_the_server_on_selects_loses_nothing(db, mode, limit):
    """``sql_select_limit`` cuts every SELECT that has no LIMIT of its own: nothing is settled for being absent."""
    got = []
    publish_many("t", (Message(number, key="k" if mode == "ordered" else f"k{number % 3}") for number in range(60)))
    sequence()

    def work():
        sessions.adopt(USING, TIMEOUTS)
        connection.ensure_connection()
        with connection.cursor() as cursor:
            cursor.execute(f"SET SESSION sql_select_limit = {limit}")
        sub = Sub(handler(function=lambda delivery: got.append((delivery.payload, delivery.attempt)), mode=mode))
        for _ in range(20):
            sub.poller.groups[0].health.rests_until = 0.0
            sub.poller.guarded(sub.step)
            sub.work()
        cut = set(got)
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION sql_select_limit = DEFAULT")
        sub.poller.groups[0].health.rests_until = 0.0
        sub.poller.reset()  # partitions that a cut answer has hidden are found by the next scan
        sub.settle(rounds=500)
        sub.leave()
        return cut

    cut = in_thread(work)
    assert cut < set(got)
    assert sorted(set(got)) == [(number, 1) for number in range(60)]
    if mode == "ordered":
        assert got == sorted(got)
    assert lag() == 0
    assert not DeliveryState.objects.exists()


@pytest.mark.promise("Missing rows")
@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_what_is_not_in_the_answer_comes_again_uncounted_and_in_order(db, monkeypatch, caplog, mode):
    got = []
    publish_many("t", (Message(number, key="k") for number in range(10)))
    real, cut = payloads.read, []

    def read(using, offsets):
        found = real(using, offsets)
        if not cut and len(found) == 10:
            cut.extend(sorted(found)[3:6])
            found = {offset: body for offset, body in found.items() if offset not in cut}
        return found

    monkeypatch.setattr(payloads, "read", read)
    sub = Sub(handler(function=lambda delivery: got.append((delivery.payload, delivery.attempt)), mode=mode))
    with caplog.at_level(logging.WARNING):
        sub.settle()
        (work,) = sub.poller.groups
        assert work.health.rests_until > time.monotonic() - 60
        work.health.rests_until = 0.0
        sub.settle()
    assert len(cut) == 3
    assert sorted(got) == [(number, 1) for number in range(10)]
    if mode == "ordered":
        assert got == sorted(got)
    assert not DeliveryEvent.objects.exists()
    (said,) = [record.mysqlqueue for record in caplog.records if "payloads.not_returned" in record.message]
    assert (said["messages"], said["claimed"], said["group"], said["topic"]) == (3, 10, "g", "t")


@pytest.mark.promise("Missing rows")
@pytest.mark.parametrize("level", ["none", "failures", "all"])
def test_a_deleted_message_is_settled_logged_counted_and_recorded(db, settings, caplog, level):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": level}
    got = []
    publish_many("t", (Message(number, key="k") for number in range(3)))
    sequence()
    sub = Sub(handler(function=lambda delivery: got.append(delivery.payload)))
    offsets = sorted(QueueMessage.objects.values_list("offset", flat=True))
    real = payloads.read

    def delete_first(using, wanted):
        QueueMessage.objects.filter(offset=offsets[1]).delete()
        payloads.read = real
        return real(using, wanted)

    payloads.read = delete_first
    try:
        with caplog.at_level(logging.WARNING):
            sub.settle()
    finally:
        payloads.read = real
    assert got == [0, 2]
    assert lag() == 0
    (said,) = [record.mysqlqueue for record in caplog.records if "delivery.deleted" in record.message]
    assert (said["offset"], said["partition"], said["attempt"]) == (offsets[1], "k", 1)
    assert sub.inbox.deleted_counts() == {REF: 1}
    recorded = list(DeliveryEvent.objects.filter(outcome="deleted").values_list("message_offset", "settled_by"))
    assert recorded == ([] if level == "none" else [(offsets[1], sub.name)])
    assert DeliveryEvent.objects.filter(outcome="acked").count() == (2 if level == "all" else 0)


def test_only_the_databases_own_word_says_that_a_message_is_deleted(db):
    publish_many("t", (Message(number, key="k") for number in range(3)))
    sequence()
    first, second, third = sorted(QueueMessage.objects.values_list("offset", flat=True))
    QueueMessage.objects.filter(offset=second).delete()
    assert payloads.deleted(USING, [first, second, third, third + 1]) == {second, third + 1}
    if connection.vendor == "mysql":

        def cut():
            with connections[USING].cursor() as cursor:
                cursor.execute("SET SESSION sql_select_limit = 1")
            return payloads.deleted(USING, [first, second, third])

        assert in_thread(cut) <= {second}


@pytest.mark.parametrize("partitions", [30, 60])
def test_no_watermark_moves_by_an_answer_that_was_cut(db, monkeypatch, partitions):
    """On both ways to read the first rows of partitions: one SELECT for each, and one join of many."""
    sub = Sub(handler(function=fail, backoff=Backoff(initial=3000, jitter=0)))
    publish_many("t", (Message(number, key=f"k{number:03}") for number in range(partitions)))
    sub.step(times=3)
    sub.work(partitions)
    sub.flush()
    keys = list(ConsumerOffset.objects.values_list("partition_key", flat=True))
    real = Session.rows

    def cut(self, statement, parameters=()):
        rows = real(self, statement, parameters)
        return rows[:20] if "delivery_state" in statement and "FOR UPDATE" not in statement else rows

    monkeypatch.setattr(Session, "rows", cut)
    with pytest.raises(DatabaseError, match="something truncates results"):
        watermarks.sweep(USING, REF, keys)
    monkeypatch.undo()
    marks = dict(ConsumerOffset.objects.values_list("partition_key", "offset_acked"))
    unsettled = DeliveryState.objects.filter(acked=False).values_list("partition_key", "message_offset")
    assert len(keys) == len(unsettled) == partitions
    assert not [(key, offset) for key, offset in unsettled if offset <= marks[key]]
    sub.leave()


def test_missing_payloads_are_asked_for_more_and_more_slowly(db, monkeypatch, caplog):
    monkeypatch.setattr(payloads, "read", lambda using, offsets: {})
    sub = Sub(handler())
    publish_many("t", (Message(number, key="k") for number in range(5)))
    with caplog.at_level(logging.ERROR):
        for _ in range(200):
            sub.step()
            sub.flush()
    (work,) = sub.poller.groups
    assert work.health.rests_until > time.monotonic()
    assert 1 <= sum("payloads.not_returned" in record.message for record in caplog.records) <= 8


def test_an_empty_payload_does_not_overtake(db):
    publish_many("t", [Message(b"x" * 50, key="k"), Message(b"y" * 80, key="k"), Message(b"", key="k")])
    first = Sub(handler())
    first.step()
    first.leave()
    got = Recorder()
    second = Sub(handler(function=got))
    second.poller.ordered[0].configuration.max_bytes = 100
    second.settle()
    assert [len(delivery.body) for delivery in got.deliveries] == [50, 80, 0]
