"""The sequencer: messages enter the log after their commit, in its order."""

from __future__ import annotations

import random
import threading
import time

import pytest
from django.db import connections, transaction

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import ConsumerOffset, LogMark, OutboxMessage, QueueMessage, Sequencer
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, in_thread, lag, sequence
from tests.support.internals import Session, sequencing


@pytest.mark.promise("Delivery", "Order")
@pytest.mark.servers_only
def test_a_late_commit_is_not_lost(db):
    """A takes its place first and commits last: a reader that follows ids would skip it."""
    got = Recorder()
    sub = Sub(handler(function=got))
    with transaction.atomic():
        publish("t", "A", key="k")
        in_thread(lambda: publish("t", "B", key="k"))
        in_thread(sub.settle)
        assert got.payloads == ["B"]
        assert lag() == 0
    sub.settle()
    assert got.payloads == ["B", "A"]


@pytest.mark.promise("Delivery", "Order")
@pytest.mark.servers_only
def test_concurrent_publishers_with_late_commits_and_rollbacks(db):
    """32 publishers into one partition, one in four rolls back; a reader runs all the time."""
    got = Recorder()
    sub = Sub(handler(function=got))
    expected: set[str] = set()
    publishers = 32
    barrier = threading.Barrier(publishers)

    def publisher(number):
        rng = random.Random(number)
        barrier.wait(30)
        for turn in range(3):
            names = [f"{number}-{turn}-{place}" for place in range(3)]
            try:
                with transaction.atomic():
                    for name in names:
                        publish("t", name, key="k")
                        time.sleep(rng.random() * 0.02)  # others commit in between
                    if rng.random() < 0.25:
                        raise ZeroDivisionError
                expected.update(names)
            except ZeroDivisionError:
                pass
        connections.close_all()

    threads = [threading.Thread(target=publisher, args=(number,)) for number in range(publishers)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        sub.step()
        sub.work()
    sub.settle()
    assert sorted(got.payloads) == sorted(expected)
    per_transaction: dict[str, list[int]] = {}
    for name in got.payloads:
        stem, place = name.rsplit("-", 1)
        per_transaction.setdefault(stem, []).append(int(place))
    assert all(places == [0, 1, 2] for places in per_transaction.values())


def test_message_for_one_group_is_passed_over_by_the_others(db):
    publish("t", 1, key="k")
    publish("t", 2, key="k")
    OutboxMessage.objects.filter(payload=b"2").update(target_group="a")
    got = {name: Recorder() for name in "ab"}
    sub = Sub(*(handler(group=name, function=got[name]) for name in "ab"))
    sub.settle()
    assert got["a"].payloads == [1, 2]
    assert got["b"].payloads == [1]
    assert lag("b") == 0
    assert set(ConsumerOffset.objects.values_list("offset_acked", flat=True)) == {QueueMessage.objects.last().offset}


def test_scheduled_message_waits_for_its_time(db, clock):
    got = Recorder()
    publish("t", "later", key="k", delay=60)
    publish("t", "sooner", key="k", delay=30)
    publish("t", "now", key="k")
    sub = Sub(handler(function=got))
    sub.settle()
    assert got.payloads == ["now"]
    assert sub.poller.next_deliver_at is not None
    clock.advance(31)
    sub.settle()
    clock.advance(30)
    sub.settle()
    assert got.payloads == ["now", "sooner", "later"]


def test_immediate_and_scheduled_share_a_batch(db, clock):
    publish_many("t", [Message(f"s{n}", key="k", delay=1) for n in range(20)])
    publish_many("t", [Message(f"i{n}", key="k") for n in range(20)])
    clock.advance(2)
    done = sequencing.sequence(USING, max_rows=10)
    assert done.more
    names = [bytes(payload).decode()[1] for payload in QueueMessage.objects.values_list("payload", flat=True)]
    assert (names.count("s"), names.count("i")) == (5, 5)
    sequence()
    in_order = [
        bytes(p).decode().strip('"') for p in QueueMessage.objects.order_by("offset").values_list("payload", flat=True)
    ]
    assert [name for name in in_order if name[0] == "i"] == [f"i{n}" for n in range(20)]
    assert [name for name in in_order if name[0] == "s"] == [f"s{n}" for n in range(20)]


@pytest.mark.parametrize(("scheduled", "urgent"), [(1, 0), (0, 1), (1, 1), (2, 3)])
def test_few_messages_of_another_kind_leave_their_share_to_the_others(db, clock, scheduled, urgent):
    publish_many("t", [Message(n, delay=1) for n in range(scheduled)])
    publish_many("t", [Message(n, priority=5) for n in range(urgent)])
    publish_many("t", range(20))
    clock.advance(2)
    assert sequencing.sequence(USING, max_rows=10).moved == 10
    assert OutboxMessage.objects.count() == 20 - (10 - scheduled - urgent)


def test_a_flushed_database_gets_its_mutex_back(db):
    publish("t", 1)
    sequence()
    Sequencer.objects.all().delete()
    publish("t", 2)
    sequence()
    assert QueueMessage.objects.count() == 2


def marks():
    return list(LogMark.objects.order_by("marked_offset").values_list("marked_offset", "mark"))


def published(*payloads):
    publish_many("t", payloads)
    sequence()
    return QueueMessage.objects.latest("offset").offset


def test_a_mark_is_noted_at_the_end_of_the_log_at_most_once_a_minute(db, clock):
    published(1)
    assert marks() == []
    clock.stop()
    Sequencer.objects.update(marked_at=Session(USING).now())
    clock.advance(60)
    published(2)
    assert marks() == [], "a minute is not over before its end"
    clock.advance(0.001)
    ends = [published(3, 4)]
    published(5)
    assert [offset for offset, _ in marks()] == ends
    clock.advance(90)
    sequence()
    assert [offset for offset, _ in marks()] == ends, "nothing has entered the log"
    ends.append(published(6))
    assert [offset for offset, _ in marks()] == ends
    assert len({mark for _, mark in marks()}) == 2


def test_a_step_of_the_clock_delays_no_mark(db, clock):
    published(1)
    clock.step(7200)
    ends = [published(2)]
    clock.step(-3600)
    ends.append(published(3))
    assert [offset for offset, _ in marks()] == ends


def test_a_mark_stays_if_only_duplicates_come(db, clock):
    sequence()
    clock.advance(61)
    publish("t", 1, key="k", id="a")
    sequence()
    noted = marks()
    assert noted
    publish("t", 1, key="k", id="a")
    clock.advance(61)
    sequence()
    assert marks() == noted
