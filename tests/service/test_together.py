"""Two features at the same time, of which each is tested alone elsewhere."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from django.db import OperationalError, connection, transaction

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, JobResult, Slots
from django_mysqlqueue.options.backoff import Backoff
from tests.app import jobs
from tests.support import job_worlds
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, holding, in_thread, sequence, take_all
from tests.support.internals import pruning, registry, releasing, settling


@pytest.mark.servers_only
def test_a_claim_that_waits_for_a_lock_is_no_step_of_the_clock(db):
    publish("t", 1, key="k")
    sub = Sub(handler())
    sub.settle()
    publish("t", 2, key="k")
    sequence()
    row = ConsumerOffset.objects.select_for_update()
    with holding(lambda: list(row)) as end:
        threading.Timer(1.0, end.set).start()
        sub.step()
    assert not sub.context.clock.is_doubtful(30_000)


@pytest.mark.servers_only
def test_a_slow_flush_of_a_shared_claim_is_no_step(db, monkeypatch):
    publish("t", 1, key="k")
    sub = Sub(handler(mode="shared"))
    sub.settle()
    real = settling.apply

    def slow(*args, **kwargs):
        time.sleep(0.7)
        return real(*args, **kwargs)

    monkeypatch.setattr(settling, "apply", slow)
    publish("t", 2, key="k")
    sub.step()
    assert not sub.context.clock.is_doubtful(60_000)


def insert_slots(n):
    Slots.objects.bulk_create(
        [
            Slots(consumer_group="g", topic="t", limit_key=f"k{n}-{i}", subscriber_name="", full_at=1, held=0)
            for i in range(3)
        ]
    )


@pytest.mark.servers_only
def test_gc_ends_although_keys_come_and_go(db):
    """Each step, a few keys more have got no limit any more: a round of GC ends nevertheless."""
    steps = pruning.prune(USING)
    kinds = []
    for n in range(300):
        insert_slots(n)
        step = next(steps, None)
        if step is None:
            break
        kinds.append(step.kind)
    else:
        raise AssertionError(f"it does not end: {kinds[-3:]}")


@pytest.mark.servers_only
def test_one_group_whose_cut_off_fails_does_not_cost_the_others(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    jobs.plain.enqueue(1)
    publish("t", 1, key="k")
    sub = Sub(*registry.handlers().values(), handler(mode="shared"), threads=2)
    assert len(take_all(sub)) == 2

    def leave():
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
        sub.cut_off()

    with transaction.atomic():
        list(JobResult.objects.select_for_update())  # Somebody cancels the job, and has not committed.
        with contextlib.suppress(OperationalError):
            in_thread(leave)
        found = {
            one.topic: (one.retry_count, one.delivered_by, one.delivery_token) for one in DeliveryState.objects.all()
        }
        transaction.set_rollback(True)
    assert found["t"] == (0, "", 0), found


def test_a_coalesce_key_is_not_handled_twice_at_a_time_when_the_clock_steps(db, clock):
    publish("t", 1, key="k", coalesce="c")
    owner = Sub(handler(mode="shared")).step()
    other = Sub(handler(mode="shared"))
    other.poller._poll()
    first = owner.take()
    assert first is not None  # Its handler runs.
    publish("t", 2, key="k", coalesce="c")
    sequence()
    clock.step(3600)
    other.step(times=2)
    assert other.take() is None


@pytest.mark.parametrize("how", ["nack", "lost"])
def test_an_owner_does_not_wait_for_an_hour_when_the_clock_is_set_back(db, clock, how):
    got = Recorder(lambda d: d.nack(delay=1) if how == "nack" and (d.payload, d.attempt) == (0, 1) else None)
    one = handler(function=got, backoff=Backoff(initial=1, jitter=0))
    publish_many("t", (Message(n, key="k") for n in range(3)))
    if how == "lost":
        for n in range(2):
            sub = Sub(one).step()
            held = sub.take()
            if n:
                assert settling.record_start(USING, held.claimed)
            releasing.release_all(USING, sub.name, sub.handlers, shared=[])
    sub = Sub(one)
    sub.settle()
    assert got.payloads == ([0, 1, 2] if how == "nack" else [])
    clock.step(-3600)
    clock.advance(2)
    sub.beat()
    sub.settle()
    clock.advance(62)
    sub.beat()
    sub.settle()
    assert got.payloads == ([0, 1, 2, 0] if how == "nack" else [0, 1, 2])


def test_a_bug_in_the_release_of_one_group_costs_the_others_nothing(db, monkeypatch):
    publish("t", 1, key="k")
    publish("u", 1, key="k")
    sub = Sub(handler("t", mode="shared"), handler("u", mode="shared"), threads=2)
    assert len(take_all(sub)) == 2
    real, called = releasing.release_unfinished, []

    def breaks(using, ref, *args, **options):
        called.append(ref)
        if len(called) == 1:
            raise RuntimeError("a bug")
        real(using, ref, *args, **options)

    monkeypatch.setattr(releasing, "release_unfinished", breaks)
    with pytest.raises(RuntimeError):
        sub.cut_off()
    assert sorted(map(bool, DeliveryState.objects.values_list("delivered_by", flat=True))) == [False, True]
