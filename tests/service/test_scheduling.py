"""Cancelling and rescheduling by the published id, in the caller's transaction."""

from __future__ import annotations

import datetime

import pytest
from django.db import transaction
from django.utils import timezone

from django_mysqlqueue import (
    InvalidMessage,
    Message,
    TransactionMismatch,
    acancel,
    areschedule,
    cancel,
    publish,
    publish_many,
    reschedule,
)
from django_mysqlqueue.models import Operation, OutboxMessage
from tests.support.harness import USING, in_thread, sequence
from tests.support.internals import Session, wakeups
from tests.support.scheduled import due, in_log, waiting

CHANGES = {
    "cancel": lambda: cancel("x", topic="t"),
    "reschedule": lambda: reschedule("x", topic="t", delay=3600),
}


def test_cancel_deletes_what_has_not_come_due(db):
    found = publish("t", 1, delay=1000)
    assert cancel(found, topic="t") == 1
    assert cancel(found, topic="t") == 0
    assert not OutboxMessage.objects.exists()
    publish("t", 1, id="at once")
    publish("t", 1, id="due", delay=1000)
    due("due")
    assert cancel("at once", topic="t") == cancel("due", topic="t") == cancel("never", topic="t") == 0
    sequence()
    assert cancel("due", topic="t") == 0
    assert in_log() == ["at once", "due"]
    assert not Operation.objects.exists()


def test_cancel_takes_every_scheduled_message_with_the_id_or_those_of_a_key(db, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"hashed": {"PARTITIONS": 1}}}
    for topic in ("t", "hashed"):
        for key in ("a", "b", None):
            publish(topic, key, key=key, id="x", delay=1000)
        publish(topic, "a", key="a", id="y", delay=1000)
    publish("other", 1, id="x", delay=1000)
    for topic in ("t", "hashed"):
        assert cancel("x", topic=topic, key="c") == 0
        assert reschedule("x", topic=topic, key="a", delay=50) == 1
        assert cancel("x", topic=topic, key="a") == 1
        assert cancel("x", topic=topic, key="a") == 0
        assert cancel("x", topic=topic) == 2
    assert waiting() == ["x", "y", "y"]


def test_ids_compare_byte_by_byte(db):
    publish("t", 1, id="Tea", delay=1000)
    assert cancel("tea", topic="t") == cancel("Tea ", topic="t") == cancel("Tea", topic="T") == 0
    assert cancel("Tea", topic="t") == 1


def test_reschedule_gives_another_time(db):
    publish("t", 1, id="x", delay=1000)
    now = Session(USING).now()

    def at():
        return OutboxMessage.objects.get().deliver_at

    assert reschedule("x", topic="t", delay=datetime.timedelta(hours=1)) == 1
    assert 0 <= at() - now - 3_600_000 < 30_000
    moment = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)
    assert reschedule("x", topic="t", deliver_at=moment) == 1
    assert at() == moment.timestamp() * 1000
    assert reschedule("x", topic="t", deliver_at=timezone.now() - datetime.timedelta(days=9)) == 1
    assert reschedule("x", topic="t", delay=1000) == 0  # it has come due
    publish("t", 1, id="y", delay=1000)
    assert reschedule("y", topic="t", delay=0) == 1
    sequence()
    assert in_log() == ["x", "y"]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: cancel("x", topic="no topic"), "topic 'no topic'"),
        (lambda: cancel("x", topic="t_dlq"), "reserved for dead letters"),
        (lambda: cancel("", topic="t"), "id '': must not be empty"),
        (lambda: cancel(7, topic="t"), "id 7: must be a str"),
        (lambda: cancel("x" * 191, topic="t"), "191 characters"),
        (lambda: cancel("x", topic="t", key="__p:1"), "key '__p:1'"),
        (lambda: cancel("x", topic="t", using="nowhere"), "there is no such database"),
        (lambda: reschedule("x", topic="t"), "delay, deliver_at: pass one of them"),
        (lambda: reschedule("x", topic="t", delay=1, deliver_at=timezone.now()), "both given"),
        (lambda: reschedule("x", topic="t", delay=-1), "delay -1"),
        (lambda: reschedule("x", topic="t", deliver_at="soon"), "deliver_at 'soon'"),
    ],
)
def test_bad_input_names_the_value(db, call, error):
    publish("t", 1, id="x", delay=1000)
    with pytest.raises(InvalidMessage, match=error):
        call()
    assert waiting() == ["x"]


@pytest.mark.promise("Cancelling")
def test_they_commit_and_roll_back_with_the_callers_transaction(db):
    publish_many("t", [Message(1, id=name, delay=1000) for name in "abcd"])
    before = dict(OutboxMessage.objects.values_list("message_id", "deliver_at"))
    with transaction.atomic():
        assert cancel("a", topic="t") == reschedule("b", topic="t", delay=5) == 1
        publish("t", 1, id="e", delay=1000)
        assert cancel("e", topic="t") == 1
        transaction.set_rollback(True)
    assert dict(OutboxMessage.objects.values_list("message_id", "deliver_at")) == before
    with transaction.atomic():
        assert cancel("a", topic="t") == 1
        with transaction.atomic():
            assert cancel("b", topic="t") == 1
            transaction.set_rollback(True)
    assert waiting() == ["b", "c", "d"]


def test_without_autocommit_the_caller_commits(db):
    publish_many("t", [Message(1, id=name, delay=1000) for name in "ab"])

    def work():
        transaction.set_autocommit(False)
        try:
            assert cancel("a", topic="t") == 1
            transaction.rollback()
            assert cancel("b", topic="t") == 1
            transaction.commit()
        finally:
            transaction.rollback()
            transaction.set_autocommit(True)
        return waiting()

    assert in_thread(work) == ["a"]


@pytest.mark.parametrize("change", ["cancel", "reschedule"])
def test_a_transaction_on_another_database_alone_is_refused(queue_db, settings, change):
    settings.MYSQLQUEUE = {"DATABASE": "queue"}
    call, done = CHANGES[change], []
    publish("t", 1, id="x", delay=1000)
    with transaction.atomic("default"):
        with pytest.raises(TransactionMismatch, match=r"'queue', which has no open transaction, but 'default' has one"):
            call()
        transaction.on_commit(lambda: done.append(call()), using="default")
    assert done == [1]
    publish("t", 1, id="x", delay=1000)
    with transaction.atomic("default"), transaction.atomic("queue"):
        assert call() >= 1


def test_from_async_code(db):
    import asyncio

    publish_many("t", [Message(1, id=name, delay=1000) for name in "ab"])

    async def work():
        return await acancel("a", topic="t"), await areschedule("b", topic="t", delay=0), await acancel("b", topic="t")

    assert in_thread(lambda: asyncio.run(work())) == (1, 1, 0)
    sequence()
    assert in_log() == ["b"]


def test_a_message_that_is_brought_forward_wakes_this_process(db):
    publish("t", 1, id="x", delay=1000)
    woken = []
    stop = wakeups.Listening(USING, ["t"], lambda: woken.append(1)).stop
    try:
        with transaction.atomic():
            reschedule("x", topic="t", delay=0)
            assert not woken
        assert woken
    finally:
        stop()
