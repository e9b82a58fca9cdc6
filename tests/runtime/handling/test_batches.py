"""Handlers that get a list of deliveries: outcomes for each, one transaction, and bad neighbours."""

from __future__ import annotations

import collections
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, StaleDelivery, publish, publish_many
from django_mysqlqueue.models import DeliveryState, QueueMessage
from django_mysqlqueue.options.backoff import Backoff
from tests.app.models import Effect
from tests.support.harness import Sub, handler, in_thread, lag, payloads
from tests.support.internals import Action, Batch, Session

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])


class Batches:
    """A batch handler that remembers what it got and does what the test says."""

    def __init__(self, action=None):
        self.got: list[list[Any]] = []
        self.attempts: list[list[int]] = []
        self.deliveries = []
        self.action = action

    def __call__(self, deliveries):
        assert isinstance(deliveries, list)
        self.got.append(payloads(deliveries))
        self.attempts.append([delivery.attempt for delivery in deliveries])
        self.deliveries += deliveries
        if self.action is not None:
            self.action(deliveries)


def batched(function, **options):
    return handler(function=function, batch=True, **{"batch_size": 100, **options})


def dead():
    return sorted(QueueMessage.objects.filter(topic="t_dlq").values_list("original_offset", "failure_count"))


@MODES
def test_a_batch_is_what_waits_up_to_its_size(db, mode):
    publish_many("t", [Message(n, key="k") for n in range(25)])
    got = Batches()
    sub = Sub(batched(got, mode=mode, batch_size=10))
    assert sub.settle() == 25
    assert got.got == [list(range(10)), list(range(10, 20)), list(range(20, 25))]
    assert lag() == 0
    assert not DeliveryState.objects.exists()


def test_a_batch_spans_partitions_and_keeps_their_order(db):
    publish_many("t", [Message((key, n), key=key) for n in range(20) for key in "abcde"])
    got = Batches()
    sub = Sub(batched(got))
    sub.settle()
    assert [len(batch) for batch in got.got] == [100]
    for key in "abcde":
        assert [n for one, n in got.got[0] if one == key] == list(range(20))


def test_a_claim_takes_as_much_as_a_batch(db):
    publish_many("t", [Message(n, key="k") for n in range(500)])
    got = Batches()
    sub = Sub(batched(got, batch_size=500), claim_size=100, prefetch=200)
    sub.step()
    sub.work()
    assert len(got.got[0]) == 500


@MODES
@pytest.mark.parametrize("atomic", [False, True])
def test_an_outcome_for_each(db, mode, atomic):
    def judge(deliveries):
        for delivery in deliveries:
            match delivery.payload, delivery.attempt:
                case 1, 1:
                    delivery.nack()
                case 2, _:
                    delivery.reject("bad")
                case 3, _ if len(deliveries) > 1:
                    delivery.snooze(0)
                case 4, _:
                    delivery.ack()

    publish_many("t", [Message(n, key="k") for n in range(6)])
    got = Batches(judge)
    sub = Sub(batched(got, mode=mode, atomic=atomic))
    sub.settle()
    assert got.got[0] == [0, 1, 2, 3, 4, 5]
    again = sorted((payload, attempt) for batch, numbers in zip(got.got[1:], got.attempts[1:], strict=True)
                   for payload, attempt in zip(batch, numbers, strict=True))  # fmt: skip
    assert again == [(1, 2), (3, 1)]
    assert [count for _, count in dead()] == [1]
    assert lag() == 0


@pytest.mark.promise("Batches")
@MODES
def test_a_raise_nacks_all_and_they_come_again_alone(db, mode):
    """So a bad message costs its neighbours one attempt, and alone goes to the DLQ."""

    def refuse_seven(deliveries):
        if any(delivery.payload == 7 for delivery in deliveries):
            raise ValueError("seven")

    publish_many("t", [Message(n, key="k") for n in range(10)])
    got = Batches(refuse_seven)
    sub = Sub(batched(got, mode=mode, max_attempts=3))
    sub.settle()
    assert got.got[0] == list(range(10))
    assert all(len(batch) == 1 for batch in got.got[1:])
    tries = collections.Counter(n for batch in got.got for n in batch)
    assert tries == {**dict.fromkeys(range(10), 2), 7: 3}
    ((_, count),) = dead()
    assert count == 3
    assert lag() == 0


def test_what_failed_before_does_not_hold_up_a_batch_of_the_fresh(db):
    """A retried message comes alone; what is fresh in other partitions still comes together."""
    fail_first = Batches(lambda deliveries: 1 / 0 if deliveries[0].attempt == 1 and len(deliveries) == 1 else None)
    publish("t", "bad", key="bad")
    sub = Sub(batched(fail_first))
    sub.step()
    sub.work()
    sub.flush()
    publish_many("t", [Message(n, key=key) for n, key in enumerate("abc")])
    sub.settle()
    assert sorted(map(len, fail_first.got)) == [1, 1, 3]


@MODES
def test_atomic_effects_commit_with_the_acks(db, mode):
    def store(deliveries):
        Effect.objects.bulk_create(Effect(name="batch", value=delivery.payload) for delivery in deliveries)
        if deliveries[0].attempt == 1 and len(deliveries) > 1:
            raise ValueError("the first time")

    publish_many("t", range(30))
    got = Batches(store)
    Sub(batched(got, mode=mode, atomic=True)).settle()
    assert sorted(Effect.objects.values_list("value", flat=True)) == list(range(30))
    assert len(got.got) == 31
    assert lag() == 0


def test_an_atomic_batch_in_which_nothing_is_settled_rolls_back(db):
    def put_off(deliveries):
        Effect.objects.create(name="written")
        for delivery in deliveries:
            delivery.nack(60)

    publish_many("t", range(3))
    sub = Sub(batched(Batches(put_off), atomic=True))
    sub.step()
    sub.work()
    assert not Effect.objects.exists()


@pytest.mark.promise("Batches")
@MODES
def test_a_stale_delivery_rolls_the_whole_atomic_batch_back(db, mode):
    """Its neighbours come again, and no attempt of theirs is counted."""

    def store(deliveries):
        Effect.objects.bulk_create(Effect(name=str(delivery.payload)) for delivery in deliveries)

    publish_many("t", [Message(n, key="k") for n in range(3)])
    sub = Sub(batched(store, mode=mode, atomic=True))
    sub.step()
    held = sub.take()
    second = DeliveryState.objects.filter(message_offset=held.claimed.offset + 1)
    second.update(delivery_token=12345)  # handed out again
    sub.run(held)
    assert not Effect.objects.exists()
    sub.flush()
    assert list(DeliveryState.objects.values_list("retry_count", flat=True)) == [0, 0, 0]
    stolen = DeliveryState.objects.get(message_offset=held.claimed.offset + 1)
    assert stolen.delivery_token == 12345, "what is another's is left alone"
    assert stolen.delivered_by
    sub.settle()
    assert set(Effect.objects.values_list("name", flat=True)) >= {"0", "2"}


def test_an_ack_inside_atomic_of_a_plain_batch_handler_is_checked(db):
    seen = []

    def work(deliveries):
        DeliveryState.objects.filter(message_offset=deliveries[1].offset).update(delivery_token=12345)
        for delivery in deliveries:
            try:
                with transaction.atomic():
                    Effect.objects.create(name=str(delivery.payload))
                    delivery.ack()
            except StaleDelivery:
                seen.append(delivery.payload)

    publish_many("t", [Message(n, key="k") for n in range(3)])
    sub = Sub(batched(Batches(work)))
    sub.step()
    sub.work()
    assert seen == [1]
    assert sorted(Effect.objects.values_list("name", flat=True)) == ["0", "2"]


@MODES
def test_suspects_come_alone(db, clock, mode):
    publish_many("t", [Message(n, key="k") for n in range(5)])
    lost = Sub(batched(Batches(), mode=mode))
    lost.step()
    assert lost.take() is not None  # and never says another word
    clock.advance(61)
    got = Batches()
    sub = Sub(batched(got, mode=mode))
    sub.settle()
    assert got.got == [[0], [1], [2], [3], [4]]
    assert lag() == 0


def test_strict_order_a_batch_stands_or_falls(db):
    """What was settled behind a message that was put off has overtaken it: an error, and all come again."""

    def nack_the_second(deliveries):
        Effect.objects.bulk_create(Effect(name=str(one.payload)) for one in deliveries)
        if len(deliveries) > 1:
            deliveries[1].nack(0)

    publish_many("t", [Message(n, key="k") for n in range(4)])
    got = Batches(nack_the_second)
    Sub(batched(got, atomic=True, on_failure="block")).settle()
    assert got.got == [[0, 1, 2, 3], [0], [1], [2], [3]]
    assert sorted(Effect.objects.values_list("name", flat=True)) == ["0", "1", "2", "3"]


def test_strict_order_nothing_passes_a_message_that_fails(db):
    def refuse_two(deliveries):
        if any(delivery.payload == 2 for delivery in deliveries):
            raise ValueError("two")

    publish_many("t", [Message(n, key="k") for n in range(6)])
    got = Batches(refuse_two)
    Sub(batched(got, on_failure="block", max_attempts=3, batch_size=4)).settle()
    assert got.got[:5] == [[0, 1, 2, 3], [0], [1], [2], [2]]
    assert got.got[5:] == [[3], [4, 5]]


def test_a_batch_costs_as_many_statements_as_one_of_two(db):
    def statements(count):
        publish_many("t", [Message(n, key=str(n % 3)) for n in range(count)])
        sub = Sub(batched(Batches(), atomic=True, batch_size=500), claim_size=500, prefetch=1000)
        sub.step()
        with CaptureQueriesContext(connection) as queries:
            assert sub.work() == count
        sub.settle()
        sub.leave()
        return len(queries)

    assert statements(2) == statements(400)


def test_overrun_counts_for_the_call(db):
    publish_many("t", [Message(n, key="k") for n in range(3)])
    sub = Sub(batched(Batches(), max_processing_time=1))
    sub.step()
    held = sub.take()
    assert len(sub._batches[id(held)].items) == 3
    assert sub.inbox.overrun() is None
    for one in sub._batches[id(held)].items:
        one.started_at -= 2
    assert sub.inbox.overrun() is not None
    assert sub.inbox.running() == 3


def test_a_handler_thread_gives_every_delivery_an_outcome(db, monkeypatch):
    from django_mysqlqueue.runtime.handling import executor

    publish_many("t", [Message(n, key="k") for n in range(3)])
    sub = Sub(batched(Batches(), backoff=Backoff(initial=1, jitter=0)))
    sub.step()
    batch: Batch = sub._batches[id(sub.take())]
    monkeypatch.setattr(executor, "handle", lambda *args, **options: 1 / 0)
    outcomes = executor.Executor(sub.inbox, "default", threads=0, timeouts=None)._safely(batch)
    assert [(one.delivery, one.action, one.delay_ms) for one in outcomes] == [
        (held.claimed, Action.NACK, 1000) for held in batch.items
    ]


def test_a_limit_of_messages_cuts_the_last_batch(db):
    """--max-messages counts messages, not calls."""
    publish_many("t", [Message(n, key=str(n % 2)) for n in range(10)])
    got = Batches()
    sub = Sub(batched(got, batch_size=3))
    sub.inbox.starts.left = 5
    sub.step()
    sub.work()
    assert [len(batch) for batch in got.got] == [3, 2]
    assert sub.inbox.starts.left == 0


def test_a_stale_delivery_that_the_handler_meets_costs_its_neighbours_nothing(db):
    """Acking all in one transaction of its own, one turns out to be another's."""

    def work(deliveries):
        with transaction.atomic():
            for delivery in deliveries:
                delivery.ack()

    publish_many("t", [Message(n, key="k") for n in range(3)])
    sub = Sub(batched(work, max_attempts=1))
    sub.step()
    held = sub.take()
    DeliveryState.objects.filter(message_offset=held.claimed.offset + 1).update(delivery_token=12345)
    sub.run(held)
    sub.flush()
    assert list(DeliveryState.objects.values_list("retry_count", flat=True)) == [0, 0, 0]
    sub.settle()
    assert not QueueMessage.objects.filter(topic="t_dlq").exists()


def test_every_thread_has_a_batch_of_its_own(db):
    """As many batches wait as there are threads, and one to follow: else the first thread would take all there is."""
    publish_many("t", [Message(n, key=f"k{n % 20}") for n in range(500)])
    sub = Sub(batched(Batches(), batch_size=50), claim_size=50, threads=4)
    sub.step(times=8)
    batches = [sub._batches[id(held)] for held in iter(sub.take, None)]
    assert len(batches) >= 3
    assert all(len(batch.items) == 50 for batch in batches[:3])
    lanes = [lane.key for batch in batches for lane in batch.lanes]
    assert len(lanes) == len(set(lanes))


@pytest.mark.servers_only
def test_nobody_takes_a_delivery_between_the_look_at_its_token_and_the_ack(db, monkeypatch):
    """Else a batch would ack what has been handed to somebody else in between."""
    publish_many("t", [Message(n, key="k") for n in range(3)])
    sub = Sub(batched(Batches(), atomic=True))
    sub.step()
    held = sub.take()
    execute = Session.execute
    tried = []

    def steal():
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
        with pytest.raises(OperationalError, match="Lock wait timeout"):
            DeliveryState.objects.filter(message_offset=held.claimed.offset).update(delivery_token=12345)

    def execute_after_a_thief(self, sql, parameters=()):
        if sql.startswith("UPDATE") and not tried:
            tried.append(sql)
            in_thread(steal)
        return execute(self, sql, parameters)

    monkeypatch.setattr(Session, "execute", execute_after_a_thief)
    sub.run(held)
    assert tried
    sub.flush()
    assert lag() == 0
