"""Faults that a review of the running system found, each as it was provoked."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time

import pytest
from django.db import OperationalError, connection, connections, transaction

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import (
    ConsumerGroup,
    ConsumerOffset,
    DeliveryState,
    OutboxMessage,
    PartitionLease,
    QueueMessage,
)
from django_mysqlqueue.operations import dropping
from django_mysqlqueue.operations.limits import Limits
from django_mysqlqueue.runtime.handling import call, executor
from django_mysqlqueue.runtime.handling.lanes import Batch
from django_mysqlqueue.runtime.process.heartbeat import Heart
from django_mysqlqueue.service import claiming, heartbeats, retention, settling, watermarks
from django_mysqlqueue.service.deliveries import Action
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.retention import Checkpoint
from django_mysqlqueue.sql.connection import close_connections
from django_mysqlqueue.sql.session import Session
from tests.support.harness import USING, Going, Sub, handler, in_thread, lag, sequence
from tests.test_conformance import Recorder

REF = GroupRef("g", "t")


def test_many_long_errors_fit_into_statements(db):
    """One flush of them was longer than max_allowed_packet, and was sent again for ever."""
    publish_many("t", (Message(number, key=f"k{number % 50}") for number in range(3000)))
    sub = Sub(
        handler(function=lambda delivery: delivery.nack(delay=99, reason="😀" * 15_999)), batch_size=3000, prefetch=3000
    )
    sub.step(times=3)
    assert sub.work() == 3000
    sub.flush()
    assert DeliveryState.objects.filter(retry_count=1, delivered_by="").count() == 3000
    assert len(DeliveryState.objects.first().last_error) == 15_999


def test_a_group_whose_turn_fails_does_not_keep_the_others_from_theirs(db, monkeypatch):
    got = Recorder()
    publish("t", 1)
    publish("u", 1)
    sub = Sub(handler(), handler(topic="u", group="other", function=got))
    sub.step()
    failing = next(work for work in sub.poller.groups if work.ref == REF)

    def fail():
        raise OperationalError(1, "no")

    monkeypatch.setattr(failing, "turn", fail)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for number in range(6):
        publish("u", number)
        sub.poller.poll_soon()
        assert sub.poller.guarded(sub.poller.step)
        failing.rests_until = 0.0
        sub.work()
        sub.flush()
    assert len(got.deliveries) == 7
    assert failing.failures.count >= 6


@pytest.mark.parametrize("on_failure", ["block", "skip"])
def test_a_suspect_that_turns_out_to_be_anothers_is_forgotten(db, clock, on_failure):
    """It stayed in hand: in strict order its partition stopped for good."""
    publish("t", 1, key="k")
    Sub(handler()).step()
    clock.advance(61)
    frozen = Sub(handler(on_failure=on_failure))
    frozen.step()
    held = frozen.take()
    assert held.claimed.suspect
    clock.advance(61)
    other = Sub(handler(on_failure=on_failure))
    other.settle()
    other.leave()
    frozen.heart.beat()
    frozen.run(held)
    frozen.settle()
    assert not any(partition.in_hand for partition in frozen.poller.ordered[0].partitions.values())
    got = Recorder(lambda delivery: delivery.nack(delay=0) if delivery.attempt == 1 else None)
    work = frozen.poller.ordered[0]
    work.handler = dataclasses.replace(work.handler, function=got)
    publish_many("t", [Message(2, key="k"), Message(3, key="k")])
    frozen.settle()
    assert set(got.payloads) == {2, 3}
    assert lag() == 0


def test_an_error_after_a_claim_loses_no_delivery(db, monkeypatch):
    """Another partition's missing offsets row could not be made: what was claimed was in hand and nowhere else."""
    got = Recorder()
    publish_many("t", [Message(1, key="a"), Message(1, key="b")])
    sub = Sub(handler(function=got))
    sub.settle()
    QueueMessage.objects.filter(partition_key="b").delete()
    retention.collect(USING)
    publish_many("t", [Message(2, key="a"), Message(2, key="b")])
    real = watermarks.create_missing

    def fail_once(*args):
        monkeypatch.setattr(watermarks, "create_missing", real)
        raise OperationalError(2006, "gone")

    monkeypatch.setattr(watermarks, "create_missing", fail_once)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    sub.poller.poll_soon()
    sub.poller.guarded(sub.poller.step)
    assert watermarks.create_missing is real  # it has failed
    sub.poller.ordered[0].rests_until = 0.0
    sub.settle()
    assert sorted(got.payloads) == [1, 1, 2, 2]
    assert lag() == 0


def test_a_drop_that_died_leaves_a_paused_group_and_is_run_again(db, monkeypatch):
    """Its state rows met the claims of a group that was registered anew."""
    publish_many("t", (Message(number, key="k") for number in range(4)))
    Sub(handler()).step()
    real = dropping._delete_some
    calls = []

    def dying(session, ref, operation, limits):
        calls.append(ref)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(session, ref, operation, Limits(rows=2))

    monkeypatch.setattr(dropping, "_delete_some", dying)
    with pytest.raises(KeyboardInterrupt):
        dropping.drop(USING, REF)
    assert ConsumerGroup.objects.get().paused
    got = Recorder()
    Sub(handler(function=got)).settle()
    assert got.payloads == []
    assert dropping.drop(USING, REF)
    for model in (ConsumerGroup, DeliveryState, PartitionLease, ConsumerOffset):
        assert not model.objects.exists(), model
    Sub(handler(function=got)).settle()
    assert got.payloads == [0, 1, 2, 3]


def test_a_step_of_gc_is_bounded(db, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    publish_many("t", (Message(number, key=f"k{number % 3}") for number in range(1000)))
    Sub(handler(), batch_size=500, prefetch=1000).settle()
    place, steps = Checkpoint(), 0
    while place is not None:
        done = retention.collect_step(USING, place, limits=retention.Limits(rows=100))
        assert done.messages <= 100
        place, steps = done.place, steps + 1
    assert steps >= 10
    assert not QueueMessage.objects.exists()


def test_waiting_shared_deliveries_that_are_anothers_by_now_are_dropped(db, clock):
    """The process was frozen for longer than the visibility time-out."""
    mine, theirs = Recorder(), Recorder()
    publish_many("t", range(10))
    frozen = Sub(handler(mode="shared", function=mine))
    frozen.step()
    clock.advance(61)
    other = Sub(handler(mode="shared", function=theirs))
    other.settle()
    assert len(theirs.deliveries) == 10
    frozen.poller.shared[0]._extend_at = 0.0  # its own clock has gone on as well
    frozen.step()
    frozen.work()
    assert mine.deliveries == []
    assert frozen.inbox.waiting(REF) == (0, 0)


def test_no_shared_delivery_starts_while_it_may_be_anothers(db):
    publish("t", 1)
    sub = Sub(handler(mode="shared", visibility_timeout=5.0))
    sub.step()
    sub.inbox.keep(REF, time.monotonic() - 1)  # not extended for longer than the time-out
    assert sub.take() is None
    sub.poller.shared[0]._extend()
    assert sub.take() is not None


def test_a_living_process_does_not_claim_what_it_is_running(db, clock):
    """After a stall of the database its own deliveries looked vanished."""
    publish("t", 1, key="k")
    sub = Sub(handler(mode="shared"))
    sub.step()
    assert sub.take() is not None
    clock.advance(61)
    sub.step()
    assert sub.take() is None
    other = Sub(handler(mode="shared"))
    sub.poller.shared[0]._extend_at = 0.0
    sub.step()
    other.step()
    assert other.take() is None


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_no_partition_is_starved_at_batch_size_one(db, mode):
    got = Recorder()
    sub = Sub(handler(mode=mode, function=got), batch_size=1)
    publish_many("t", [Message("hot", key="a") for _ in range(30)] + [Message("cold", key=f"b{n}") for n in range(3)])
    for _ in range(12):
        sub.step(tick=False)
        sub.work()
        sub.flush()
    assert got.payloads.count("cold") == 3


def test_an_exception_that_cannot_be_shown_is_a_failed_attempt(db):
    class Unshowable(Exception):
        def __str__(self):
            return self.args[1]

    def fail(delivery):
        raise Unshowable("x")

    publish("t", 1)
    Sub(handler(function=fail, max_attempts=1)).settle()
    sequence()
    assert "Unshowable" in QueueMessage.objects.get(topic="t_dlq").last_error


def test_a_handler_thread_outlives_whatever_happens(db, monkeypatch):
    publish("t", 1)
    sub = Sub(handler())
    sub.step()
    held = sub.take()

    def explode(*args, **options):
        raise SystemExit

    monkeypatch.setattr(executor, "handle", explode)
    (outcome,) = executor.Executor(sub.inbox, USING, threads=0, timeouts=None)._safely(Batch([], [held]))
    assert outcome.action is Action.NACK
    assert outcome.delivery is held.claimed


@pytest.mark.servers_only
@pytest.mark.parametrize("end", ["return", "raise"])
def test_a_flush_does_not_wait_for_anothers_open_transaction(db, clock, end):
    """A stale outcome, and the row's new holder has acked in a transaction that lasts."""
    ending = Recorder(lambda delivery: 1 / 0 if end == "raise" else None)
    publish("t", 1, key="k")
    first = Sub(handler(mode="shared", function=ending))
    first.step()
    held = first.take()
    clock.advance(61)
    second = Sub(handler(mode="shared"))
    second.step()
    again = second.take()
    go, locked = threading.Event(), threading.Event()

    def hold():
        with transaction.atomic():
            settling.ack_here(USING, again.claimed)
            locked.set()
            go.wait(30)
        connections.close_all()

    thread = threading.Thread(target=hold)
    thread.start()
    assert locked.wait(10)
    try:
        first.run(held)
        began = time.monotonic()
        first.step()
        assert time.monotonic() - began < 5
    finally:
        go.set()
        thread.join()
    first.settle()
    second.run(again)
    second.settle()
    assert lag() == 0
    assert not DeliveryState.objects.exists()


def test_strict_order_survives_a_small_step_back_of_the_clock(db, clock):
    got = Recorder(lambda delivery: delivery.nack(delay=1) if (delivery.payload, delivery.attempt) == (1, 1) else None)
    publish_many("t", (Message(number, key="k") for number in (1, 2, 3)))
    sub = Sub(handler(function=got, on_failure="block"))
    sub.settle()
    assert got.payloads == [1]
    clock.advance(1.5)
    sub.poller._poll()
    clock.advance(-1.4)  # between the poll and the claim
    sub.poller._next_poll = sub.poller._next_tick = float("inf")
    sub.poller.step()
    sub.work()
    assert got.payloads == [1]
    clock.advance(2)
    sub.settle()
    assert got.payloads == [1, 1, 2, 3]


def test_an_empty_payload_does_not_overtake(db):
    publish_many("t", [Message(b"x" * 50, key="k"), Message(b"y" * 80, key="k"), Message(b"", key="k")])
    first = Sub(handler())
    first.step()
    first.leave()
    got = Recorder()
    second = Sub(handler(function=got))
    second.poller.ordered[0].max_bytes = 100
    second.settle()
    assert [len(delivery.body) for delivery in got.deliveries] == [50, 80, 0]


def test_a_slow_beat_that_crosses_the_end_of_the_lease_raises_doubt(db, monkeypatch):
    heart = Heart(USING, "s:1", [REF], interval=0.1, lease=0.5, info={}, progress=Going())
    assert heart._beat()
    first = heart.beat_at
    while time.monotonic() < first + 0.3:
        pass
    real = heartbeats.beat

    def slow(*args):
        real(*args)
        while time.monotonic() < first + 0.55:  # sent in time, answered too late
            pass

    monkeypatch.setattr(heartbeats, "beat", slow)
    assert heart._beat()
    assert heart.must_verify()


def test_a_dropped_partition_is_not_flushed_for_ever(db, monkeypatch):
    publish("t", 1, key="k")
    sub = Sub(handler())
    sub.step()
    held = sub.take()
    dropping.drop(USING, REF)
    sub.run(held)
    sub.step(times=2)
    flushes = []
    monkeypatch.setattr(settling, "flush", lambda *args, **options: flushes.append(args))
    sub.step(times=5)
    assert not flushes


def test_nothing_spins_around_a_scheduled_message(db):
    publish("t", "later", delay=1.0)
    got = Recorder()
    sub = Sub(handler(function=got))
    sub.step()
    sub.poller.maintenance.next_at = float("inf")
    steps = 0
    ends_at = time.monotonic() + 2.5

    def stop():
        nonlocal steps
        steps += 1
        sub.work()
        return bool(got.deliveries) or time.monotonic() > ends_at

    began = time.monotonic()
    sub.poller.run(stop)
    assert got.payloads == ["later"]
    assert time.monotonic() - began < 1.5
    assert steps < 100


def test_extensions_are_part_of_the_sleep(db, monkeypatch):
    """A visibility time-out as short as the poll interval is kept all the same."""
    publish("t", 1, key="k")
    sub = Sub(handler(mode="shared", visibility_timeout=1.0))
    sub.step()
    assert sub.take() is not None
    sub.poller.maintenance.next_at = float("inf")
    times = [time.monotonic()]
    real = settling.extend_all

    def extend(*args, **options):
        times.append(time.monotonic())
        return real(*args, **options)

    monkeypatch.setattr(settling, "extend_all", extend)
    ends_at = time.monotonic() + 2
    sub.poller.run(lambda: time.monotonic() > ends_at)
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) < 0.8
    assert sub.take() is None


def test_a_failed_extension_is_tried_again_at_once(db, monkeypatch):
    publish("t", 1)
    sub = Sub(handler(mode="shared"))
    sub.step()
    work = sub.poller.shared[0]
    work._extend_at = 0.0

    def fail(*args, **options):
        raise OperationalError(2006, "gone")

    monkeypatch.setattr(settling, "extend_all", fail)
    with pytest.raises(OperationalError):
        work.turn()
    assert work._extend_at == 0.0


def test_an_emptied_log_is_no_failover(db, settings, caplog):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    publish("t", 1)
    sub = Sub(handler())
    sub.settle()
    retention.collect(USING)
    assert not QueueMessage.objects.exists()
    tail = sub.poller._tail
    sub.poller.check_tail(Session(USING))
    assert sub.poller._tail == tail


def test_a_log_that_went_back_is_read_again(db):
    from django_mysqlqueue.models import Sequencer

    publish_many("t", range(3))
    got = Recorder()
    sub = Sub(handler(function=got))
    sub.settle()
    # A replica that had not got everything has become the primary.
    first = QueueMessage.objects.order_by("offset").first().offset
    QueueMessage.objects.filter(offset__gt=first).delete()
    Sequencer.objects.update(last_offset=first)
    sub.poller.check_tail(Session(USING))
    assert sub.poller._tail is None


def test_a_subscriber_works_where_the_project_has_autocommit_off(db):
    from django_mysqlqueue.runtime import sessions
    from tests.support.harness import in_thread

    def work():
        connection.settings_dict = {**connection.settings_dict, "AUTOCOMMIT": False}
        sessions.adopt(USING, sessions.Timeouts(idle=30, lock_wait=5, network=5, read=20))
        got = Recorder()
        Sub(handler(function=got)).settle()
        close_connections()
        return got.payloads

    publish("t", 1)
    assert in_thread(work) == [1]
    assert not OutboxMessage.objects.exists()
    assert lag() == 0


def test_unknown_outcomes_of_claims_again_and_again(db, monkeypatch):
    """Half of the broken COMMITs had happened; nothing is lost or completed twice, order is kept."""
    import random

    from django_mysqlqueue.exceptions import CommitOutcomeUnknown

    rng = random.Random(5)
    got = Recorder()
    publish_many("t", (Message(number, key=f"k{number % 3}") for number in range(120)))
    sub = Sub(handler(function=got), batch_size=7, prefetch=14)
    real = claiming.claim

    def claim(*args, **options):
        if rng.random() < 0.15:
            raise CommitOutcomeUnknown("before")
        result = real(*args, **options)
        if rng.random() < 0.15:
            raise CommitOutcomeUnknown("after")
        return result

    monkeypatch.setattr(claiming, "claim", claim)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for _ in range(150):
        sub.poller.poll_soon()
        sub.poller.guarded(sub.poller.step)
        sub.context.stealing._from = 0.0
        sub.work()
    monkeypatch.setattr(claiming, "claim", real)
    sub.settle()
    assert sorted(got.payloads) == list(range(120))
    for key in range(3):
        mine = [payload for payload in got.payloads if payload % 3 == key]
        assert mine == sorted(mine)
    assert {delivery.attempt for delivery in got.deliveries} == {1}
    assert lag() == 0


def test_a_group_whose_turn_failed_finds_its_work_again(db, monkeypatch):
    got = Recorder()
    publish_many("t", range(5))
    sub = Sub(handler(mode="shared", function=got))
    real = claiming.claim

    def fail_once(*args, **options):
        monkeypatch.setattr(claiming, "claim", real)
        raise OperationalError(1205, "lock wait timeout")

    monkeypatch.setattr(claiming, "claim", fail_once)
    sub.step()
    assert claiming.claim is real
    sub.poller.shared[0].rests_until = 0.0
    sub.settle()
    assert sorted(got.payloads) == list(range(5))


def test_a_turn_that_cannot_connect_is_an_error_like_any_other(db, monkeypatch):
    """There is no connection to ask then; asking all the same ended the poller."""
    from tests.support.harness import in_thread

    def check():
        sub = Sub(handler())
        sub.step()

        def fail():
            connection.close()
            raise OperationalError(2002, "Can't connect to server")

        monkeypatch.setattr(sub.poller.groups[0], "turn", fail)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        return sub.poller.guarded(sub.poller.step)

    assert in_thread(check) is False


@pytest.mark.servers_only
@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_a_connection_that_was_ended_costs_an_atomic_handler_no_attempt(db, mode):
    """It is noticed when the transaction begins, before the handler was called."""
    got = []
    publish_many("t", [Message(n, key="k") for n in range(3)])
    sub = Sub(
        handler(mode=mode, atomic=True, max_attempts=1, function=lambda one: got.append((one.payload, one.attempt)))
    )
    sub.step()

    def work():
        connection.ensure_connection()
        for held in iter(sub.take, None):
            kill(connection)
            sub.run(held)

    in_thread(work)
    sub.flush()
    assert got == [(0, 1), (1, 1), (2, 1)]
    assert lag() == 0
    assert not QueueMessage.objects.filter(topic="t_dlq").exists()


def kill(wrapper):
    """Ends a connection from outside, as an administrator does."""
    number = wrapper.connection.thread_id()

    def end():
        with connection.cursor() as cursor:
            cursor.execute(f"KILL {number}")

    in_thread(end)


def test_a_transaction_that_cannot_be_opened_gives_back_uncounted_and_in_order(db, monkeypatch, caplog):
    got = []
    publish_many("t", [Message(n, key="k") for n in range(3)])
    sub = Sub(handler(atomic=True, max_attempts=1, function=lambda delivery: got.append(delivery.payload)))
    sub.step()
    real = transaction.atomic
    refusals = iter([True, True])

    def atomic(using=None, *args, **kwargs):
        if next(refusals, False):
            raise OperationalError(2002, "Can't connect")
        return real(using, *args, **kwargs)

    held = sub.take()
    with monkeypatch.context() as patch:
        patch.setattr(call.transaction, "atomic", atomic)
        sub.run(held)
    assert "delivery.not_started" in caplog.text
    sub.settle()
    assert got == [0, 1, 2]
    assert lag() == 0
