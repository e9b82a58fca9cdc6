"""Several subscribers of a shared group, and messages with few coalesce keys."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import defaultdict

import pytest
from django.db import connection, connections, transaction

from django_mysqlqueue import publish
from django_mysqlqueue.filter_policies import parse
from django_mysqlqueue.models import DeliveryState, QueueMessage
from tests.support import garbage
from tests.support.harness import USING, Sub, handler, holding, in_thread, lag, sequence
from tests.support.internals import Delivery, GroupRef, claiming, groups, redelivering, superseding

pytestmark = [pytest.mark.promise("Coalescing"), pytest.mark.servers_only]

REF = GroupRef("g", "t")
KEYS = 3
SECONDS = 3.0


def sql(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)


LOCK_OFFSETS = "SELECT 1 FROM queue_offsets WHERE partition_key = 'k' FOR UPDATE"


def test_a_delivery_of_another_subscriber_keeps_its_visibility(db, monkeypatch):
    """It was claimed between the two reads of a claim, and a third transaction has locked the offsets row."""
    one, other = (Sub(handler(mode="shared", function=lambda delivery: delivery.nack(0)), name=name) for name in "ab")
    publish("t", 1, key="k", coalesce="c")
    one.step()
    one.work()
    one.flush()
    lock_due = redelivering._lock_due
    with contextlib.ExitStack() as stack:

        def claimed_in_between(session, ref, due):
            monkeypatch.undo()
            in_thread(one.step)
            assert DeliveryState.objects.get().delivered_by == one.name
            stack.enter_context(holding(lambda: sql(LOCK_OFFSETS)))
            return lock_due(session, ref, due)

        monkeypatch.setattr(redelivering, "_lock_due", claimed_in_between)
        other.step()
    row = DeliveryState.objects.get()
    assert row.delivered_by == one.name
    assert row.invisible_until > row.delivered_at + 50_000


def meanwhile(monkeypatch, work):
    """When the next claim has read what is known about coalesce keys, something happens on another connection."""
    read = superseding.Coalescing.read

    def read_first(*args, **options):
        found = read(*args, **options)
        monkeypatch.undo()
        in_thread(work)
        return found

    monkeypatch.setattr(superseding.Coalescing, "read", read_first)


def test_a_claim_of_a_retry_hides_no_later_message_in_flight(db, monkeypatch):
    """Both claims note what they take. Only the lock of the offsets row orders the notes."""
    one, other, third = (Sub(handler(mode="shared", function=lambda one: one.nack(0)), name=name) for name in "abc")
    publish("t", 1, key="k", coalesce="c")
    one.step()
    one.work()
    one.flush()

    def take_a_later_one():
        publish("t", 2, key="k", coalesce="c")
        sequence()
        other.step()

    meanwhile(monkeypatch, take_a_later_one)
    one.step()
    assert other.take() is None
    one.work()
    one.flush()
    running = 0
    for number in (3, 4):
        publish("t", number, key="k", coalesce="c")
        sequence()
        third.step()
        running += third.take() is not None
    assert running == 1


def test_a_retry_that_is_given_up_loses_no_later_message_to_a_filter(db, monkeypatch):
    """It is given up for the second message, which a claim with the offsets row gives up for the third meanwhile."""
    both, eu = parse({"region": ["eu", "us"]}), parse({"region": ["eu"]})
    got = []

    def fails_once(delivery):
        got.append(delivery.payload)
        if got == [1]:
            delivery.nack(0)

    subs = [Sub(handler(mode="shared", function=fails_once, filter=both), name=name, prefetch=1) for name in "ab"]
    one, other = subs
    publish("t", 1, key="k", coalesce="c", metadata={"region": "eu"})
    one.step()
    one.work()
    one.flush()
    publish("t", 2, key="k", coalesce="c", metadata={"region": "eu"})
    sequence()
    redeliver, has_read, is_noted = claiming.redeliver, threading.Event(), threading.Event()
    threads = []

    def publish_more():
        publish("t", "other", key="k", metadata={"region": "eu"})
        publish("t", 3, key="k", coalesce="c", metadata={"region": "us"})
        sequence()

    def then_wait():
        has_read.set()
        assert is_noted.wait(30)

    def behind_another(taking):
        if "k" not in taking.offsets:
            return []
        monkeypatch.undo()
        meanwhile(monkeypatch, then_wait)
        threads.append(threading.Thread(target=in_thread, args=[one.step]))
        threads[0].start()
        assert has_read.wait(30)
        in_thread(publish_more)
        return redeliver(taking)

    monkeypatch.setattr(claiming, "redeliver", behind_another)
    other.step()
    is_noted.set()
    threads[0].join(30)
    groups.register_options(USING, REF, "filter", eu.as_json(), actor="migrate")
    for _ in range(5):
        time.sleep(0.15)
        for sub in subs:
            sub.settle()
    assert sorted(got, key=str) == [1, 3, "other"]
    assert lag() == 0


@pytest.mark.parametrize("is_committed", [False, True])
def test_gc_of_the_key_does_not_hide_the_message_in_flight(db, settings, monkeypatch, is_committed):
    """GC deletes the row of the group, whose message has left the log, while a claim takes the next one."""
    settings.MYSQLQUEUE = {"RETENTION": 0}
    one, other = (Sub(handler(mode="shared"), name=name) for name in "ab")
    publish("t", 1, key="k", coalesce="c")
    one.settle()
    garbage.collect(USING)
    assert not QueueMessage.objects.exists()
    publish("t", 2, key="k", coalesce="c")
    sequence()
    store = superseding.Coalescing.store

    def collected_in_between(coalescing_keys):
        statement = "DELETE FROM queue_coalesce_keys WHERE consumer_group = 'g'"
        with holding(lambda: sql(statement)) as end:
            if is_committed:
                end.set()
                time.sleep(0.2)
            else:
                threading.Timer(0.3, end.set).start()
            store(coalescing_keys)

    with monkeypatch.context() as patched:
        patched.setattr(superseding.Coalescing, "store", collected_in_between)
        one.step()
    assert one.inbox.waiting(REF)[0] == 1
    publish("t", 3, key="k", coalesce="c")
    sequence()
    other.step()
    assert other.inbox.waiting(REF)[0] == 0


def test_a_handler_that_has_acked_in_a_long_transaction_is_in_flight(db):
    """It has locked the row, so that the message becomes visible: nobody can extend it."""
    one, other = (Sub(handler(mode="shared", visibility_timeout=1), name=name) for name in "ab")
    publish("t", 1, key="k", coalesce="c")
    one.step()
    held = one.take()
    publish("t", 2, key="k", coalesce="c")
    sequence()

    def meanwhile():
        time.sleep(1.2)
        for sub in (one, other):
            sub.step()
        return one.inbox.waiting(REF)[0] + other.inbox.waiting(REF)[0]

    with transaction.atomic():
        Delivery(held.handler, held.claimed, held.body, USING).ack()
        waiting = in_thread(meanwhile)
    assert waiting == 0


def test_the_latest_is_handled_and_never_two_at_a_time(db):
    """Handlers fail at times, so that retries meet newer messages and claims of others."""
    lock, running, last, overlaps = threading.Lock(), defaultdict(int), {}, []
    calls = 0

    def slow(delivery):
        nonlocal calls
        key, number = delivery.payload
        with lock:
            running[key] += 1
            calls += 1
            if running[key] > 1:
                overlaps.append(key)
        time.sleep(random.uniform(0.0, 0.03))
        with lock:
            running[key] -= 1
        if random.random() < 0.2:
            delivery.nack(delay=random.choice([0, 0.05]))
            return
        with lock:
            last[key] = max(last.get(key, -1), number)

    published: dict[int, int] = {}
    ended = threading.Event()
    errors: list[BaseException] = []

    def subscribe() -> None:
        try:
            sub = Sub(handler(function=slow, mode="shared", max_attempts=None), claim_size=5)
            while not ended.is_set():
                sub.step()
                sub.work(2)
            sub.work()
            sub.flush()
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=subscribe) for _ in range(4)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    number = 0
    while time.monotonic() < began + SECONDS or (calls <= 2 * KEYS and time.monotonic() < began + 60):
        key = random.randrange(KEYS)
        publish("t", [key, number], key="k" if key else None, coalesce=f"c{key}")
        published[key] = number
        number += 1
        time.sleep(0.002)
    time.sleep(1.0)
    for _ in range(100):
        if lag() == 0:
            break
        time.sleep(0.1)
    ended.set()
    for thread in threads:
        thread.join()
    connections[USING].close()
    assert not errors
    assert lag() == 0
    assert calls > 2 * KEYS
    assert not overlaps
    assert last == published
