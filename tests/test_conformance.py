"""Scenarios that every engine must pass, driven by hand: no threads, no sleeping."""

from __future__ import annotations

import random
import threading
import time

import pytest
from django.db import connection, connections, transaction

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import (
    ConsumerOffset,
    DeliveryState,
    OutboxMessage,
    PartitionLease,
    QueueMessage,
)
from django_mysqlqueue.service import retention, sequencing, settling
from tests.support.harness import USING, Sub, handler, in_thread, lag, payloads, problems_found, sequence


class Recorder:
    """A handler function that remembers its deliveries and does what the test says."""

    def __init__(self, action=None):
        self.deliveries = []
        self.action = action

    def __call__(self, delivery):
        self.deliveries.append(delivery)
        if self.action is not None:
            return self.action(delivery)
        return None

    @property
    def payloads(self):
        return payloads(self.deliveries)

    @property
    def attempts(self):
        return [(delivery.payload, delivery.attempt) for delivery in self.deliveries]


def fail(delivery):
    raise ValueError(f"no {delivery.payload}")


def both_modes(test):
    return pytest.mark.parametrize("mode", ["ordered", "shared"])(test)


# -- publishing and delivery --------------------------------------------------

JSON_VALUES = [None, True, False, 0, -1, 2**53, 1.5, "", "text", "😀 é \x00", [], [1, [2]], {}, {"a": {"b": None}}]


@both_modes
def test_payload_and_metadata_come_back(db, mode):
    got = Recorder()
    for value in JSON_VALUES:
        publish("t", value, key="k", metadata={"trace": "😀", "n": 1})
    publish("t", b"\x00\xff raw", key="k")
    sub = Sub(handler(function=got, mode=mode))
    sub.settle()
    assert sorted(map(repr, got.payloads)) == sorted(map(repr, [*JSON_VALUES, b"\x00\xff raw"]))
    first = got.deliveries[0]
    assert first.metadata == {"trace": "😀", "n": 1, "content_type": "application/json"}
    assert first.group == "g"
    assert first.topic == "t"
    assert first.key == "k"
    assert first.published_at.tzinfo is not None
    assert lag() == 0


def test_keys_that_differ_by_case_padding_or_accent_are_different_partitions(db):
    got = Recorder()
    keys = ["a", "A", "a ", " a", "á", "a\x00", "😀", ""]
    for key in keys:
        publish("t", key, key=key, id="same")
    Sub(handler(function=got)).settle()
    assert sorted(got.payloads) == sorted(keys)
    assert all(delivery.key == delivery.payload for delivery in got.deliveries)


def test_a_partition_that_is_not_acked_does_not_hold_up_another(db):
    """One of 1,000 partitions is stuck; the others flow."""
    got = Recorder(lambda delivery: fail(delivery) if delivery.key == "k7" else None)
    publish_many("t", (Message(number, key=f"k{number % 1000}") for number in range(2000)))
    sub = Sub(handler(function=got, max_attempts=None, on_failure="block"), batch_size=500, prefetch=1000)
    for _ in range(12):
        sub.step()
        sub.work()
    flowing = {payload for payload in got.payloads if payload % 1000 != 7}
    assert flowing == {number for number in range(2000) if number % 1000 != 7}
    sub.flush()
    assert lag() == 2


@pytest.mark.parametrize("count", [5, 10, 300])
def test_order_within_a_partition(db, count):
    got = Recorder()
    publish_many("t", (Message(number, key="k") for number in range(count)))
    Sub(handler(function=got), batch_size=7).settle(rounds=200)
    assert got.payloads == list(range(count))


@both_modes
def test_batch_size_one(db, mode):
    got = Recorder()
    publish_many("t", (Message(number, key="k") for number in range(5)))
    Sub(handler(function=got, mode=mode), batch_size=1, prefetch=1).settle(rounds=100)
    assert got.payloads == list(range(5))


def test_a_message_published_while_idle_arrives(db):
    got = Recorder()
    sub = Sub(handler(function=got))
    assert sub.settle() == 0
    publish("t", "late")
    sub.settle()
    assert got.payloads == ["late"]


def test_subscriber_that_comes_late_gets_what_was_published_before(db):
    publish_many("t", range(5))
    sequence()
    got = Recorder()
    Sub(handler(function=got)).settle()
    assert sorted(got.payloads) == list(range(5))


def test_keyless_messages_spread_over_partitions(db):
    publish_many("t", range(200))
    sequence()
    keys = set(QueueMessage.objects.values_list("partition_key", flat=True))
    assert keys == {f"__p:{number}" for number in range(16)}


def test_hashed_topic_keeps_the_publishers_key(db, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": 3}}}
    got = Recorder()
    publish_many("t", (Message(number, key=f"user-{number}") for number in range(20)))
    Sub(handler(function=got)).settle()
    assert {delivery.key for delivery in got.deliveries} == {f"user-{number}" for number in range(20)}
    assert set(QueueMessage.objects.values_list("partition_key", flat=True)) == {"__p:0", "__p:1", "__p:2"}
    assert "mysqlqueue.key" not in got.deliveries[0].metadata


# -- idempotence --------------------------------------------------------------


def test_same_id_twice_is_delivered_once(db):
    got = Recorder()
    publish("t", 1, key="k", id="x")
    publish("t", 2, key="k", id="x")
    with transaction.atomic():
        publish("t", 3, key="k", id="y")
        publish("t", 4, key="k", id="y")
    sub = Sub(handler(function=got))
    sub.settle()
    assert got.payloads == [1, 3]
    # It outlives consumption: the first is in the log until the retention is over.
    publish("t", 5, key="k", id="x")
    sub.settle()
    assert got.payloads == [1, 3]
    # The same id under another key or topic is another message.
    publish("t", 6, key="other", id="x")
    sub.settle()
    assert got.payloads == [1, 3, 6]


def test_an_id_is_dropped_while_the_first_is_in_the_log_handled_or_not(db, settings):
    """``publish`` cannot know: it returns the id all the same."""
    settings.MYSQLQUEUE = {"RETENTION": 0}
    got = Recorder()
    sub = Sub(handler(function=got))
    for payload in ("first", "dropped"):
        assert publish("t", payload, key="a", id="refresh") == "refresh"
        sub.settle()
    assert got.payloads == ["first"]
    assert not OutboxMessage.objects.exists()
    retention.collect(USING)
    assert publish("t", "after GC", key="a", id="refresh") == "refresh"
    sub.settle()
    assert got.payloads == ["first", "after GC"]


@pytest.mark.servers_only
def test_same_id_in_two_concurrent_transactions(db):
    with transaction.atomic():
        publish("t", 1, key="k", id="x")
        in_thread(lambda: publish("t", 2, key="k", id="x"))
    got = Recorder()
    Sub(handler(function=got)).settle()
    assert len(got.payloads) == 1


# -- the commit-order gap (defect 1) ------------------------------------------


@pytest.mark.servers_only
@pytest.mark.defect(1)
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


@pytest.mark.servers_only
@pytest.mark.defect(1)
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


# -- groups -------------------------------------------------------------------


@both_modes
def test_every_group_gets_every_message(db, mode):
    got = [Recorder() for _ in range(3)]
    publish_many("t", range(3))
    first = [Sub(handler(group=f"g{number}", function=got[number], mode=mode)) for number in range(2)]
    for sub in first:
        sub.settle()
    publish("t", 3)
    sequence()
    earliest = Recorder()
    latest = Recorder()
    late = Sub(
        handler(group="early", function=earliest, mode=mode),
        handler(group="late", function=latest, mode=mode, start="latest"),
    )
    publish("t", 4)
    for sub in (*first, late):
        sub.settle()
    assert sorted(got[0].payloads) == sorted(got[1].payloads) == [0, 1, 2, 3, 4]
    assert sorted(earliest.payloads) == [0, 1, 2, 3, 4]
    assert latest.payloads == [4]


@both_modes
def test_what_one_group_does_is_invisible_to_another(db, mode):
    nacks = Recorder(lambda delivery: delivery.nack() if delivery.attempt == 1 else None)
    acks = Recorder()
    publish("t", 1)
    sub = Sub(handler(group="a", function=nacks, mode=mode), handler(group="b", function=acks, mode=mode))
    sub.settle()
    assert nacks.attempts == [(1, 1), (1, 2)]
    assert acks.attempts == [(1, 1)]


@both_modes
def test_two_subscribers_of_a_group_share_its_work(db, mode):
    """3 subscribers, 5 partitions, 15 messages: all handled, none twice."""
    got = [Recorder() for _ in range(3)]
    publish_many("t", (Message(number, key=f"k{number % 5}") for number in range(15)))
    sequence()
    subs = [Sub(handler(function=recorder, mode=mode), batch_size=2, prefetch=4) for recorder in got]
    for _ in range(30):
        for sub in subs:
            sub.step()
            sub.work(1)
    for sub in subs:
        sub.settle()
    handled = [payload for recorder in got for payload in recorder.payloads]
    assert sorted(handled) == list(range(15))
    assert lag() == 0


# -- visibility, nack, snooze, reject -----------------------------------------


def test_shared_delivery_stays_invisible_while_its_holder_extends_it(db, clock):
    """Extensions outlast the original time-out; without them the message comes again."""
    publish("t", 1)
    holder = Sub(handler(mode="shared", visibility_timeout=10.0))
    other_got = Recorder()
    other = Sub(handler(mode="shared", visibility_timeout=10.0, function=other_got))
    holder.step()
    held = holder.take()
    assert held is not None
    for _ in range(5):
        clock.advance(8)
        holder.poller.shared[0]._extend()
        other.step()
        assert other.work() == 0
    clock.advance(11)
    other.settle()
    assert other_got.attempts == [(1, 1)]  # the first loss is free
    holder.run(held)
    holder.flush()
    assert other_got.attempts == [(1, 1)]
    assert lag() == 0


@both_modes
def test_nack_waits_for_the_backoff_and_counts(db, clock, mode):
    """Retries without backoff burn the attempts at once."""
    got = Recorder(lambda delivery: delivery.nack(delay=30) if delivery.attempt < 3 else None)
    publish("t", 1)
    sub = Sub(handler(function=got, mode=mode))
    sub.settle()
    assert got.attempts == [(1, 1)]
    clock.advance(29)
    sub.settle()
    assert got.attempts == [(1, 1)]
    clock.advance(2)
    sub.settle()
    assert got.attempts == [(1, 1), (1, 2)]
    clock.advance(31)
    sub.settle()
    assert got.attempts == [(1, 1), (1, 2), (1, 3)]
    assert lag() == 0


@both_modes
@pytest.mark.defect(12)
def test_backoff_grows_between_attempts(db, clock, mode):
    from django_mysqlqueue import Backoff

    got = Recorder(fail)
    publish("t", 1)
    sub = Sub(handler(function=got, mode=mode, backoff=Backoff(initial=10, factor=2, jitter=0), max_attempts=4))
    sub.settle()
    for wait, attempts in ((10, 2), (20, 3), (40, 4)):
        clock.advance(wait - 1)
        sub.settle()
        assert len(got.attempts) == attempts - 1
        clock.advance(1.1)
        sub.settle()
        assert len(got.attempts) == attempts
    assert lag() == 0  # dead-lettered


@both_modes
def test_snooze_does_not_count(db, clock, mode):
    got = Recorder(lambda delivery: delivery.snooze(30) if len(got.deliveries) < 4 else None)
    publish("t", 1, key="k")
    publish("t", 2, key="k")
    sub = Sub(handler(function=got, mode=mode, max_attempts=1))
    sub.settle()
    assert (2, 1) in got.attempts  # it does not block the other
    for _ in range(4):
        clock.advance(31)
        sub.settle()
    assert set(got.attempts) == {(1, 1), (2, 1)}
    assert lag() == 0
    assert not QueueMessage.objects.filter(topic="t_dlq").exists()


def test_a_raise_wins_over_an_intent(db):
    def ack_then_raise(delivery):
        delivery.ack()
        raise ValueError("after all")

    got = Recorder(ack_then_raise)
    publish("t", 1)
    Sub(handler(function=got, max_attempts=2)).settle()
    assert got.attempts == [(1, 1), (1, 2)]
    sequence()
    assert QueueMessage.objects.get(topic="t_dlq").last_error.endswith("ValueError: after all\n")


@pytest.mark.defect(9)
def test_what_is_in_flight_does_not_block_what_follows(db):
    """Message 1 is held; 300 behind it flow, far more than a batch."""
    got = Recorder()
    publish_many("t", (Message(number, key="k") for number in range(301)))
    sub = Sub(handler(function=got, mode="shared"), batch_size=10, prefetch=20)
    sub.step()
    head = sub.take()
    sub.settle(rounds=200)
    assert sorted(got.payloads) == list(range(1, 301))
    assert lag() == 1
    sub.run(head)
    sub.settle()
    assert lag() == 0
    assert not DeliveryState.objects.exists()


@pytest.mark.defect(9)
def test_a_nacked_head_does_not_stall_its_partition(db, clock):
    """A stuck head plus more acked rows than any batch: fetching must not start at the watermark."""
    got = Recorder(lambda delivery: fail(delivery) if delivery.payload == 0 else None)
    publish_many("t", (Message(number, key="k") for number in range(3000)))
    from django_mysqlqueue import Backoff

    sub = Sub(handler(function=got, backoff=Backoff(initial=3600, jitter=0), max_attempts=None), batch_size=100)
    sub.settle(rounds=100)
    assert got.payloads == list(range(3000))
    assert lag() == 1
    got.action = None
    clock.advance(3601)
    sub.settle(rounds=100)
    assert lag() == 0
    assert not DeliveryState.objects.exists()


def test_watermark_is_contiguous(db):
    """Acks of 3, 1, 2, then 5, then 4: the watermark follows the first unsettled one."""
    publish_many("t", (Message(number, key="k") for number in range(1, 6)))
    sub = Sub(handler(mode="shared"))
    sub.step()
    held = {one.claimed.offset: one for one in iter(sub.take, None)}
    offsets = sorted(held)
    acked = lambda: ConsumerOffset.objects.get().offset_acked  # noqa: E731
    expected = []
    for number, watermark in ((3, 0), (1, 1), (2, 3), (5, 3), (4, 5)):
        sub.run(held[offsets[number - 1]])
        sub.flush()
        expected.append(offsets[watermark - 1] if watermark else offsets[0] - 1)
        assert acked() == expected[-1] or (watermark == 0 and acked() <= expected[-1])
    assert not DeliveryState.objects.exists()


# -- dead letters -------------------------------------------------------------


@both_modes
def test_dead_letter_says_whose_it_is_and_why(db, mode):
    publish("t", {"a": 1}, key="k", id="x", metadata={"m": 1})
    got = Recorder(fail)
    Sub(handler(function=got, mode=mode, max_attempts=2)).settle()
    sequence()
    original = QueueMessage.objects.get(topic="t")
    dead = QueueMessage.objects.get(topic="t_dlq")
    assert got.attempts == [({"a": 1}, 1), ({"a": 1}, 2)]
    assert (dead.partition_key, dead.original_id, dead.original_topic) == ("k", "x", "t")
    assert (dead.original_offset, dead.failed_group, dead.failure_count) == (original.offset, "g", 2)
    assert dead.message_id != "x"
    assert "ValueError: no {'a': 1}" in dead.last_error
    assert bytes(dead.payload) == bytes(original.payload)
    assert dead.metadata == original.metadata
    assert lag() == 0
    assert not DeliveryState.objects.exists()


@pytest.mark.defect(2)
@pytest.mark.defect(7)
def test_two_groups_dead_letter_the_same_message(db):
    """Each has its own dead letter; the log row stays for the third."""
    publish("t", 1, key="k", id="x")
    third = Recorder()
    Sub(
        handler(group="a", function=fail, max_attempts=1),
        handler(group="b", function=fail, max_attempts=1),
    ).settle()
    sequence()
    assert sorted(QueueMessage.objects.filter(topic="t_dlq").values_list("failed_group", "original_id")) == [
        ("a", "x"),
        ("b", "x"),
    ]
    Sub(handler(group="c", function=third)).settle()
    assert third.payloads == [1]


@pytest.mark.defect(7)
def test_error_longer_than_any_column_is_cut(db):
    def explode(delivery):
        raise ValueError("😀\ud800" + "x" * 2_000_000 + "the end")

    publish("t", 1, key="k")
    publish("t", 2, key="k")
    Sub(handler(function=explode, max_attempts=1)).settle()
    sequence()
    dead = list(QueueMessage.objects.filter(topic="t_dlq"))
    assert len(dead) == 2
    assert all(one.last_error.endswith("the end\n") and len(one.last_error) <= 16_000 for one in dead)


def test_reject_dead_letters_at_once(db):
    got = Recorder(lambda delivery: delivery.reject("not mine"))
    publish("t", 1)
    Sub(handler(function=got)).settle()
    sequence()
    assert len(got.deliveries) == 1
    assert QueueMessage.objects.get(topic="t_dlq").last_error == "not mine"
    assert lag() == 0


def test_no_limit_of_attempts(db):
    got = Recorder(fail)
    publish("t", 1)
    sub = Sub(handler(function=got, max_attempts=None))
    sub.settle(rounds=30)
    assert len(got.deliveries) >= 20
    assert lag() == 1


def test_dlq_with_a_handler_of_its_own_drains(db, clock):
    """It shows the original id; its own failures do not dead-letter again, and a problem says so."""
    publish("t", 1, id="x")
    dead = Recorder(lambda delivery: fail(delivery) if len(dead.deliveries) < 10 else None)
    sub = Sub(handler(function=fail, max_attempts=1), handler(topic="t_dlq", group="d", function=dead, max_attempts=2))
    sub.settle(rounds=4)
    clock.advance(61)
    sub.heart.beat()
    assert ["A DLQ topic has no DLQ" in one.text for one in problems_found() if one.kind == "stuck"] == [True]
    sub.settle()
    assert len(dead.deliveries) == 10
    assert dead.deliveries[0].id == "x"
    assert lag("d", "t_dlq") == 0
    assert not QueueMessage.objects.filter(topic="t_dlq_dlq").exists()
    assert not OutboxMessage.objects.exists()


def test_crash_after_a_reject(db, clock):
    """Ack A, reject B, hold C, vanish: C comes again, B is in the DLQ."""
    publish_many("t", (Message(name, key="k") for name in "ABC"))
    first = Sub(handler(function=lambda d: d.reject("bad") if d.payload == "B" else None))
    first.step()
    first.work(2)
    first.flush()
    assert first.take() is not None
    clock.advance(31)
    again = Recorder()
    Sub(handler(function=again)).settle()
    assert again.payloads == ["C"]
    assert QueueMessage.objects.get(topic="t_dlq").payload == b'"B"'
    assert lag() == 0


# -- attempts and losses ------------------------------------------------------


@both_modes
@pytest.mark.defect(10)
def test_losses_count_only_what_had_started_on_record(db, clock, mode):
    """A handler that kills its process every time is dead-lettered; its neighbours lose nothing."""
    publish_many("t", (Message(number, key="k") for number in range(5)))
    starts = 0
    calm = Recorder()

    def deadly(delivery):
        nonlocal starts
        if delivery.payload == 2:
            starts += 1
            raise SystemError("killed")
        calm(delivery)

    for _ in range(12):
        sub = Sub(handler(function=deadly, mode=mode, max_attempts=3))
        sub.step()
        while (held := sub.take()) is not None:
            if held.body.payload == b"2":
                if held.claimed.suspect:
                    assert settling.record_start(USING, held.claimed)
                starts += 1
                break  # the process dies here: no outcome, no flush, no deregistration
            sub.run(held)
            if held.claimed.suspect:
                sub.flush()  # as the poller does at once: before that no other suspect may start
        else:
            sub.flush()
        clock.advance(61)
    Sub(handler(function=deadly, mode=mode, max_attempts=3)).settle()
    sequence()
    dead = QueueMessage.objects.get(topic="t_dlq")
    assert dead.payload == b"2"
    assert starts == 1 + 3  # the first loss is free, then max_attempts starts on record
    assert dead.failure_count == 3
    assert "vanished" in dead.last_error
    assert {delivery.attempt for delivery in calm.deliveries if delivery.payload > 2} == {1}
    assert set(calm.payloads) == {0, 1, 3, 4}
    assert lag() == 0


def test_claimed_and_given_back_does_not_count(db):
    publish_many("t", (Message(number, key="k") for number in range(5)))
    for _ in range(10):
        sub = Sub(handler(max_attempts=1))
        sub.step()
        sub.leave()
    got = Recorder()
    Sub(handler(function=got, max_attempts=1)).settle()
    assert got.attempts == [(number, 1) for number in range(5)]


def test_a_suspect_that_never_started_stays_one(db, clock):
    publish("t", 1, key="k")
    Sub(handler()).step()  # claims and vanishes
    clock.advance(31)
    second = Sub(handler())
    second.step()
    second.leave()  # given back unstarted
    third = Sub(handler())
    third.step()
    held = third.take()
    assert held.claimed.suspect
    assert held.claimed.attempt == 1


# -- order --------------------------------------------------------------------


def test_take_over_goes_back_to_the_first_unsettled(db, clock):
    """First starts are in offset order across a crash."""
    got = Recorder()
    publish_many("t", (Message(number, key="k") for number in range(50)))
    first = Sub(handler(function=got), batch_size=20, prefetch=40)
    first.step()
    first.work(7)
    first.flush()
    first.take()
    clock.advance(31)
    Sub(handler(function=got), batch_size=20, prefetch=40).settle()
    assert got.payloads == list(range(50))


@pytest.mark.parametrize("action", ["nack", "snooze"])
def test_block_withholds_the_next_until_the_head_is_settled(db, clock, action):
    starts = Recorder()

    def head_fails_twice(delivery):
        starts(delivery)
        if delivery.payload == 3 and len([p for p in starts.payloads if p == 3]) < 3:
            delivery.nack(delay=10) if action == "nack" else delivery.snooze(10)

    publish_many("t", (Message(number, key="k") for number in range(10)))
    sub = Sub(handler(function=head_fails_twice, on_failure="block"), batch_size=4)
    sub.settle()
    assert starts.payloads == [0, 1, 2, 3]
    clock.advance(11)
    sub.settle()
    assert starts.payloads == [0, 1, 2, 3, 3]
    clock.advance(11)
    sub.settle()
    assert starts.payloads == [0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 8, 9]
    assert {delivery.attempt for delivery in starts.deliveries if delivery.payload > 3} == {1}


def test_block_holds_across_a_take_over(db, clock):
    starts = Recorder(lambda delivery: delivery.nack(delay=100) if delivery.payload == 1 else None)
    publish_many("t", (Message(number, key="k") for number in range(5)))
    first = Sub(handler(function=starts, on_failure="block"))
    first.settle()
    clock.advance(31)
    second = Sub(handler(function=starts, on_failure="block"))
    second.settle()
    assert starts.payloads == [0, 1]
    clock.advance(70)
    starts.action = None
    second.heart.beat()
    second.settle()
    assert starts.payloads == [0, 1, 1, 2, 3, 4]


# -- target group, scheduled --------------------------------------------------


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


# -- idle release -------------------------------------------------------------


@pytest.mark.defect(5)
@pytest.mark.defect(13)
def test_drained_partition_leaves_nothing_behind_and_comes_back(db, settings):
    """Lease and offsets rows go with the last message, also under a subscriber that still holds it."""
    settings.MYSQLQUEUE = {"RETENTION": 0}
    got = Recorder()
    sub = Sub(handler(function=got), lease_renewal_interval=0.0)
    for number in range(3):
        publish("t", number, key="k")
        sub.settle()
        assert got.payloads == list(range(number + 1))
        assert not DeliveryState.objects.exists()
        collected = retention.collect(USING)
        assert collected.messages == 1
        assert not ConsumerOffset.objects.exists()
    sub.step(times=2)
    assert not PartitionLease.objects.exists()


def test_offsets_row_removed_under_a_lease_is_made_again(db, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    got = Recorder()
    sub = Sub(handler(function=got))
    publish("t", 1, key="k")
    sub.settle()
    retention.collect(USING)
    assert sub.owned() == {"k"}
    publish("t", 2, key="k")
    sub.settle()
    assert got.payloads == [1, 2]


def test_no_second_suspect_starts_before_the_first_one_is_written(db, clock):
    """Else a suspect that kills its process takes the unwritten acks of its neighbours with it."""
    publish_many("t", (Message(number, key=f"k{number}") for number in range(3)))
    Sub(handler()).step()  # claims all and vanishes
    clock.advance(31)
    sub = Sub(handler())
    sub.step()
    first = sub.take()
    assert first.claimed.suspect
    assert sub.take() is None
    sub.run(first)
    assert sub.take() is None
    sub.flush()
    second = sub.take()
    assert second.claimed.suspect


def test_a_generator_behind_a_wrapper_fails_instead_of_being_acked(db):
    """Its body never ran: acked, the message would be lost."""

    def generator(delivery):
        yield delivery

    publish("t", 1)
    Sub(handler(function=lambda delivery: generator(delivery), max_attempts=1)).settle()
    sequence()
    assert "returned a generator" in QueueMessage.objects.get(topic="t_dlq").last_error


@pytest.mark.servers_only
def test_partitions_that_another_has_locked_do_not_hold_up_a_shared_group(db):
    """A claim that is frozen holds as many offsets rows as the next one would ask for."""
    publish_many("t", (Message(number, key=f"k{number % 40:02}") for number in range(40 * 300)))
    sequence()
    sub = Sub(handler(mode="shared"), batch_size=100, threads=4)
    sub.settle(rounds=2)
    locked, done = threading.Event(), threading.Event()
    keys = list(sub.poller.groups[0].todo)[:8]

    def frozen():
        with transaction.atomic():
            for key in keys:  # each by its whole primary key: at REPEATABLE READ a scan would lock all of them
                rows = ConsumerOffset.objects.filter(consumer_group="g", topic="t", partition_key=key)
                assert list(rows.select_for_update().values_list("partition_key"))
            locked.set()
            assert done.wait(60)
        connection.close()

    thread = threading.Thread(target=frozen)
    thread.start()
    try:
        assert locked.wait(10)
        for _ in range(5):
            handled = 0
            for _ in range(3):  # those in a row that ask for locked ones only
                time.sleep(0.02)
                sub.poller.groups[0]._depth = 100  # as it is learned with quick handlers: much of few partitions
                sub.step()
                handled += sub.work()
                sub.flush()
            assert handled
    finally:
        done.set()
        thread.join()


@pytest.mark.servers_only
def test_a_shared_group_that_finds_everything_locked_rests_a_moment(db):
    """It would ask thousands of times a second."""
    publish("t", 1, key="k")
    first = Sub(handler(mode="shared"))
    first.settle()
    publish("t", 2, key="k")
    sequence()
    claims = []
    with transaction.atomic():
        assert list(ConsumerOffset.objects.select_for_update().values_list("partition_key"))

        def ask():
            work = first.poller.groups[0]
            first.step()
            claims.append(work.rests_until > time.monotonic() - 1)
            return first.work()

        assert in_thread(ask) == 0
    assert claims == [True]
    time.sleep(0.02)
    assert first.settle() == 1
