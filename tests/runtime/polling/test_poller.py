"""The poller: errors, groups side by side, what it asks again."""

from __future__ import annotations

import time

from django.db import OperationalError, connection

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import DeliveryState, QueueMessage
from django_mysqlqueue.operations import dropping
from tests.support import garbage
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, in_thread, lag
from tests.support.internals import GroupRef, PollingLimits, claiming, settling, watermarks

REF = GroupRef("g", "t")


def test_a_database_error_starts_everything_anew(db, monkeypatch):
    """The poller loses its connection and memory; nothing is lost or handled twice."""
    got = []
    publish_many("t", (Message(number, key="k") for number in range(10)))
    sub = Sub(handler(function=lambda delivery: got.append((delivery.payload, delivery.attempt))), claim_size=4)
    sub.step()
    sub.work(2)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def fail():
        raise OperationalError(2013, "Lost connection")

    assert sub.poller.guarded(fail) is False
    assert sub.poller.guarded(sub.settle) is True
    assert got == [(number, 1) for number in range(10)]
    assert lag() == 0


def test_an_error_while_reading_payloads_gives_the_deliveries_back(db, monkeypatch):
    """Claimed and committed, but the connection broke before the payloads came: order is kept."""
    from django_mysqlqueue.service import payloads

    got = []
    publish_many("t", (Message(number, key="k") for number in range(10)))
    sub = Sub(handler(function=lambda delivery: got.append((delivery.payload, delivery.attempt))), claim_size=4)
    real = payloads.read

    def fail_once(using, offsets):
        monkeypatch.setattr(payloads, "read", real)
        raise OperationalError(2013, "Lost connection")

    monkeypatch.setattr(payloads, "read", fail_once)
    sub.step()
    assert payloads.read is real  # it has failed
    sub.poller.ordered[0].health.rests_until = 0.0
    sub.settle()
    assert got == [(number, 1) for number in range(10)]


def test_a_message_that_is_gone_by_then_is_settled(db):
    publish_many("t", (Message(number, key="k") for number in range(3)))
    got = []
    sub = Sub(handler(function=lambda delivery: got.append(delivery.payload)), claim_size=1, prefetch=1)
    sub.step()
    first = sub.take()
    sub.inbox.put([])  # nothing else
    QueueMessage.objects.filter(payload=b"1").delete()
    sub.run(first)
    sub.settle()
    assert got == [0, 2]
    assert lag() == 0


def test_a_slow_group_does_not_starve_another(db):
    """Its share of the inbox is full; the other group's messages flow."""
    publish_many("t", (Message(number, key=f"k{number % 50}") for number in range(200)))
    got = []
    slow = handler(group="slow")
    fast = handler(group="fast", function=lambda delivery: got.append(delivery.payload))
    sub = Sub(slow, fast, prefetch=20, claim_size=10)
    held = []
    for _ in range(200):
        sub.step(tick=False)
        while (one := sub.take()) is not None:
            if one.claimed.ref.group == "slow":
                held.append(one)  # never finishes
            else:
                sub.run(one)
        sub.flush()
    assert sorted(got) == list(range(200))
    assert len(held) <= 50  # one a partition


def test_a_hot_partition_does_not_starve_the_others(db):
    publish_many("t", (Message(number, key="hot") for number in range(2000)))
    publish_many("t", (Message(number, key=f"cold{number}") for number in range(20)))
    sub = Sub(handler(), claim_size=20, prefetch=40)
    handled = []
    sub.handlers[REF] = sub.handlers[REF]
    for _ in range(8):
        sub.step()
        while (one := sub.take()) is not None:
            handled.append(one.claimed.key)
            sub.run(one)
        sub.flush()
    assert {f"cold{number}" for number in range(20)} <= set(handled)
    assert handled.count("hot") < 500


def test_claims_are_bounded_in_bytes(db):
    publish_many("t", (Message(b"x" * 30_000, key="k") for _ in range(20)))
    publish("t", b"y" * 200_000, key="big")  # above the bound alone: it comes all the same
    sub = Sub(handler(), limits=PollingLimits(waiting_bytes=100_000))
    most = 0
    for _ in range(60):
        sub.step()
        most = max(most, sub.inbox.waiting(REF)[1])
        sub.work()
        sub.flush()
    assert most <= 300_000
    assert lag() == 0


def test_idle_groups_leave_their_part_of_prefetch_to_a_busy_one(db):
    """And have it back as soon as they have something to do: at most twice PREFETCH waits."""
    publish_many("t", (Message(number, key=f"k{number % 20}") for number in range(500)))
    sub = Sub(handler(), *(handler(topic=f"u{number}") for number in range(4)), prefetch=100, claim_size=50)
    sub.step(times=3)
    busy = sub.inbox.waiting(REF)[0]
    assert 75 <= busy <= 100  # a fixed part would be 20
    for number in range(4):
        publish_many(f"u{number}", (Message(n, key=f"k{n}") for n in range(50)))
    sub.step(times=3)
    counts = {ref.topic: count for ref, count in sub.inbox.waiting_counts().items()}
    assert counts == {"t": busy, "u0": 20, "u1": 20, "u2": 20, "u3": 20}
    assert sub.settle(rounds=100) == 700


def test_a_stale_delivery_that_a_handler_notices_is_no_attempt_of_the_new_holder(db, caplog):
    def work(delivery):
        DeliveryState.objects.update(delivery_token=12345)  # handed out again
        delivery.extend(5)

    publish("t", 1)
    sub = Sub(handler(function=work))
    sub.step()
    sub.work()
    sub.flush()
    assert "delivery.lost" in caplog.text
    row = DeliveryState.objects.get()
    assert (row.delivery_token, row.retry_count) == (12345, 0)


def test_a_suspect_whose_start_cannot_be_put_on_record_is_given_back(db, clock, monkeypatch, caplog):
    publish("t", 1)
    lost = Sub(handler())
    lost.step()
    lost.take()
    clock.advance(31)
    got = []
    sub = Sub(handler(function=lambda delivery: got.append(delivery.attempt)))
    sub.step()

    def fails(*args):
        raise OperationalError(2013, "Lost connection")

    with monkeypatch.context() as patch:
        patch.setattr(settling, "record_start", fails)
        sub.work()
        sub.flush()
    assert "delivery.not_started" in caplog.text
    assert got == []
    assert DeliveryState.objects.get().retry_count == 0
    sub.settle()
    assert got == [1]
    assert lag() == 0


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
        failing.health.rests_until = 0.0
        sub.work()
        sub.flush()
    assert len(got.deliveries) == 7
    assert failing.health.failures.count >= 6


def test_an_error_after_a_claim_loses_no_delivery(db, monkeypatch):
    """Another partition's missing offsets row could not be made: what was claimed was in hand and nowhere else."""
    got = Recorder()
    publish_many("t", [Message(1, key="a"), Message(1, key="b")])
    sub = Sub(handler(function=got))
    sub.settle()
    QueueMessage.objects.filter(partition_key="b").delete()
    garbage.collect(USING)
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
    sub.poller.ordered[0].health.rests_until = 0.0
    sub.settle()
    assert sorted(got.payloads) == [1, 1, 2, 2]
    assert lag() == 0


def test_a_dropped_partition_is_not_flushed_for_ever(db, monkeypatch):
    publish("t", 1, key="k")
    sub = Sub(handler())
    sub.step()
    held = sub.take()
    dropping.drop(USING, REF, actor="test")
    sub.run(held)
    sub.step(times=2)
    flushes = []
    monkeypatch.setattr(settling, "flush", lambda *args, **options: flushes.append(args))
    sub.step(times=5)
    assert not flushes


def test_unknown_outcomes_of_claims_again_and_again(db, monkeypatch):
    """Half of the broken COMMITs had happened; nothing is lost or completed twice, order is kept."""
    import random

    from django_mysqlqueue.exceptions import CommitOutcomeUnknown

    rng = random.Random(5)
    got = Recorder()
    publish_many("t", (Message(number, key=f"k{number % 3}") for number in range(120)))
    sub = Sub(handler(function=got), claim_size=7, prefetch=14)
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
    sub.poller.shared[0].health.rests_until = 0.0
    sub.settle()
    assert sorted(got.payloads) == list(range(5))


def test_a_turn_that_cannot_connect_is_an_error_like_any_other(db, monkeypatch):
    """There is no connection to ask then; asking all the same ended the poller."""

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
