"""What a process that ends by itself cuts off is released: it has not failed, and is not suspected."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from django.db import connections, transaction

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.exceptions import StaleDelivery
from django_mysqlqueue.models import DeliveryEvent, DeliveryState, JobResult, PartitionLease, QueueMessage
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.handling.executor import Executor
from django_mysqlqueue.service import releasing, settling
from django_mysqlqueue.service.deliveries import Action, Settlement
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.subscriptions import registry
from tests.app import jobs
from tests.app.models import Effect
from tests.support import job_worlds
from tests.support.handlers import Recorder, both_modes
from tests.support.harness import USING, Sub, handler, in_thread, lag, sequence, take_all

pytestmark = pytest.mark.promise("Shutdown")

G = GroupRef("g", "t")


def working(one, count=1):
    """A subscriber whose handlers run."""
    sub = Sub(one, threads=count)
    held = take_all(sub)
    for item in held:
        if item.claimed.suspect:
            assert settling.record_start(USING, item.claimed)
    assert len(held) == count
    return sub, held


def rows():
    """Attempts that are counted, whether it is suspected, whether somebody holds it, and whether it waits."""
    return [
        (one.retry_count, bool(one.delivered_by), bool(one.delivery_token), bool(one.invisible_until))
        for one in DeliveryState.objects.filter(acked=False).order_by("message_offset")
    ]


FREE, SUSPECT = (0, False, False, False), (0, True, False, False)


def die(one):
    """Lose the message with a subscriber that is killed, and replaced."""
    sub, (held,) = working(one)
    releasing.release_all(USING, sub.name, sub.handlers, shared=[G] if one.shared else [])
    return held


@both_modes
def test_what_runs_is_released_at_once(db, mode):
    publish_many("t", (Message(n, key=f"k{n}") for n in range(4)))
    sub, _ = working(handler(mode=mode), 4)
    sub.cut_off()
    assert rows() == [FREE] * 4
    _, held = working(handler(mode=mode), 4)  # all at once
    assert {(item.claimed.attempt, item.claimed.suspect) for item in held} == {(1, False)}


@both_modes
def test_no_number_of_deployments_counts_an_attempt(db, mode):
    publish("t", 0, key="k")
    for _ in range(5):
        sub, (held,) = working(handler(mode=mode, max_attempts=3))
        assert (held.claimed.attempt, held.claimed.suspect) == (1, False)
        sub.cut_off()
    got = Recorder()
    Sub(handler(mode=mode, function=got)).settle()
    assert got.attempts == [(0, 1)]
    assert lag() == 0


@both_modes
def test_failed_attempts_stay_counted(db, mode):
    publish("t", 0, key="k")
    before = Sub(handler(mode=mode, function=lambda delivery: delivery.nack(delay=0, reason="no"))).step()
    before.work(1)
    before.leave()
    DeliveryState.objects.update(retry_count=2)
    sub, (held,) = working(handler(mode=mode))
    assert held.claimed.attempt == 3
    sub.cut_off()
    assert rows() == [(2, False, False, False)]


@pytest.mark.promise("Poison messages")
@both_modes
def test_a_suspect_stays_one_and_its_attempt_is_taken_back(db, mode):
    publish("t", 0, key="k")
    one = handler(mode=mode, max_attempts=3)
    die(one)
    for _ in range(5):
        sub, (held,) = working(one)
        assert (held.claimed.attempt, held.claimed.suspect) == (1, True)
        assert rows()[0][0] == 1
        sub.cut_off()
        assert rows() == [SUSPECT]


@pytest.mark.promise("Poison messages")
@both_modes
def test_deployments_do_not_save_a_poison_message(db, mode):
    publish("t", 0, key="k")
    one = handler(mode=mode, max_attempts=3)
    for attempt in (1, 1, 2, 3):
        sub, _ = working(one)
        sub.cut_off()
        assert die(one).claimed.attempt == attempt
    Sub(one).settle()
    assert lag() == 0
    sequence()
    assert QueueMessage.objects.get(topic="t_dlq").failure_count == 3


@pytest.mark.promise("Handlers that hang")
@both_modes
def test_only_the_handler_that_exceeds_its_time_is_charged(db, mode):
    publish_many("t", (Message(n, key=f"k{n}") for n in range(3)))
    one = handler(mode=mode, max_attempts=3, max_processing_time=5.0)
    for lost in range(4):
        sub = Sub(one, threads=3)
        held = {int(item.body.payload): item for item in take_all(sub)}
        if lost:  # It comes alone, and its start is recorded.
            assert held[0].claimed.suspect
            assert settling.record_start(USING, held[0].claimed)
        assert set(held) == {0, 1, 2}
        held[0].started_at -= 6
        sub.cut_off()
        (first, *others) = rows()
        assert others == [FREE, FREE]
        assert first[:2] == (lost, True)
    got = Recorder()
    Sub(one, threads=3).settle()
    sub = Sub(handler(mode=mode, function=got))
    sub.settle()
    sequence()
    assert QueueMessage.objects.get(topic="t_dlq").failure_count == 3
    assert lag() == 0


@both_modes
def test_a_batch_is_released_as_a_whole(db, mode):
    publish_many("t", (Message(n, key="k") for n in range(5)))
    sub = Sub(handler(mode=mode, batch=True, batch_size=5)).step()
    assert sub.take() is not None
    sub.cut_off()
    assert rows() == [FREE] * 5
    sub = Sub(handler(mode=mode, batch=True, batch_size=5)).step()
    assert len(sub.inbox.take(None, wait=False).items) == 5


@pytest.mark.promise("Order")
def test_later_messages_of_the_key_stay_behind(db):
    publish_many("t", (Message(n, key="k") for n in range(5)))
    sub, (held,) = working(handler())
    heir = Sub(handler())
    sub.inbox.close()
    sub.flush()
    sub.poller.release_leases()
    sub.poller.cut_off(60)
    # Its handler runs still: the lease is released last.
    assert heir.step().take() is None
    assert PartitionLease.objects.get().leased_by == sub.name
    releasing.release_all(USING, sub.name, sub.handlers, shared=[])
    assert heir.step().take().claimed.offset == held.claimed.offset
    assert heir.take() is None


@both_modes
def test_what_a_handler_still_reports_changes_nothing(db, mode):
    publish_many("t", (Message(n, key=f"k{n}") for n in range(3)))
    sub, held = working(handler(mode=mode), 3)
    sub.cut_off()
    ack, nack, atomic = (item.claimed for item in held)
    late = [Settlement(ack, Action.ACK), Settlement(nack, Action.NACK, 1000, "no")]
    assert len(settling.flush(USING, G, late, max_attempts=3, shared=mode == "shared").stale) == 2
    with pytest.raises(StaleDelivery), transaction.atomic():
        settling.ack_here(USING, atomic)
    assert not settling.record_start(USING, atomic)
    assert rows() == [FREE] * 3


@both_modes
def test_outcomes_that_are_not_written_are_written_and_what_waits_is_released(db, mode):
    """The poller hangs, or has died: nobody else does it."""
    publish_many("t", (Message(n, key=f"k{n}") for n in range(5)))

    def some(delivery):
        if delivery.payload == 1:
            delivery.nack(delay=600, reason="no")
        if delivery.payload == 2:
            delivery.reject("no")

    sub = Sub(handler(mode=mode, function=some)).step()
    sub.work(3)
    assert sub.take() is not None  # and another one waits
    sub.poller.cut_off(60)
    found = {one.message_offset: one for one in DeliveryState.objects.filter(acked=False)}
    waits, *others = (found[offset] for offset in sorted(found))
    assert (waits.retry_count, waits.last_error, waits.delivery_token) == (1, "no", 0)
    assert waits.invisible_until > 0
    assert rows()[1:] == [FREE] * len(others)
    assert len(others) == 2
    releasing.release_all(USING, sub.name, sub.handlers, shared=[G] if mode == "shared" else [])
    got = Recorder()
    Sub(handler(mode=mode, function=got)).settle()
    assert sorted(got.attempts) == [(3, 1), (4, 1)]
    assert lag() == 1


@both_modes
def test_what_has_ended_meanwhile_stays_so(db, mode):
    """A handler that acked in a transaction of its own, and runs on."""
    publish("t", 0, key="k")
    sub, (held,) = working(handler(mode=mode))
    with transaction.atomic():
        settling.ack_here(USING, held.claimed)
    sub.cut_off()
    assert rows() == []
    Sub(handler(mode=mode)).settle()
    assert lag() == 0


def hold_ack(claimed, *, for_seconds, commit):
    """An atomic handler has acked, and its transaction is open for a while."""
    has = threading.Event()

    def hold():
        try:
            with transaction.atomic():
                settling.ack_here(USING, claimed)
                has.set()
                time.sleep(for_seconds)
                transaction.set_rollback(not commit)
        finally:
            connections.close_all()

    thread = threading.Thread(target=hold)
    thread.start()
    assert has.wait(30)
    return thread


@pytest.mark.servers_only
@pytest.mark.parametrize("commit", [True, False])
@both_modes
def test_an_ack_that_is_being_committed_has_a_moment(db, mode, commit, monkeypatch):
    monkeypatch.setattr(releasing, "RECHECKS", 1000)
    publish_many("t", (Message(n, key=f"k{n}") for n in range(3)))
    sub, held = working(handler(mode=mode), 3)
    thread = hold_ack(held[1].claimed, for_seconds=0.3, commit=commit)
    sub.poller.cut_off(60)
    thread.join(30)
    assert rows() == [FREE] * (2 if commit else 3)


@pytest.mark.servers_only
@both_modes
def test_a_transaction_that_stays_open_is_not_waited_for_long(db, mode, monkeypatch):
    """Its message is lost with the process, as after a kill."""
    monkeypatch.setattr(releasing, "RECHECK", 0.001)
    publish_many("t", (Message(n, key=f"k{n}") for n in range(3)))
    sub, held = working(handler(mode=mode), 3)
    with transaction.atomic():
        settling.ack_here(USING, held[1].claimed)
        in_thread(sub.cut_off)
        transaction.set_rollback(True)
    assert [row[1] for row in rows()] == [False, True, False]


@pytest.mark.parametrize("is_async", [False, True])
@both_modes
def test_threads_whose_handlers_run_on(db, mode, is_async):
    """From the last statements to the exit, handlers still run, and may end: nothing comes of it."""
    begun, go = threading.Semaphore(0), threading.Event()

    def waits(delivery):
        begun.release()
        assert go.wait(30)

    async def awaits(delivery):
        begun.release()
        while not go.is_set():
            await asyncio.sleep(0.01)

    publish_many("t", (Message(n, key=f"k{n}") for n in range(3)))
    function = awaits if is_async else waits
    sub = Sub(handler(mode=mode, function=function, is_async=is_async), threads=3).step()
    timeouts = sessions.Timeouts(idle=60, lock_wait=10, network=10, read=60)
    executor = Executor(sub.inbox, USING, threads=3, timeouts=timeouts, with_loop=is_async)
    executor.start()
    try:
        assert all(begun.acquire(timeout=30) for _ in range(3))
        sub.cut_off()
    finally:
        go.set()
        sub.inbox.close()
        executor.join(30)
    assert sub.inbox.running() == 0
    assert rows() == [FREE] * 3
    sub.flush()
    assert rows() == [FREE] * 3


@pytest.mark.promise("Limits")
@both_modes
def test_slots_are_free_at_once(db, mode):
    publish_many("t", (Message(n, key=f"k{n}") for n in range(4)))
    one = handler(mode=mode, max_in_flight=2)
    sub, _ = working(one, 2)
    heir = Sub(one, threads=2)
    assert take_all(heir) == []
    sub.cut_off()
    for group in heir.poller.groups:
        group.configure(group.handler)
    assert len(take_all(heir)) == 2


@both_modes
def test_it_leaves_no_event(db, mode, settings):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "all"}
    publish("t", 0, key="k")
    sub, _ = working(handler(mode=mode))
    sub.cut_off()
    Sub(handler(mode=mode)).settle()
    assert list(DeliveryEvent.objects.values_list("outcome", "attempt")) == [("acked", 1)]


@pytest.mark.promise("Jobs")
def test_a_job_is_ready_again(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    result = jobs.plain.enqueue(1)
    for _ in range(5):
        sub = Sub(*registry.handlers().values()).step()
        assert sub.take() is not None
        result.refresh()
        assert (result.status, len(result.worker_ids)) == ("RUNNING", 1)
        sub.cut_off()
        row = JobResult.objects.get()
        assert (row.status, row.worker_ids, row.errors, row.last_attempted_at) == ("READY", "", "", 0)
    Sub(*registry.handlers().values()).settle()
    result.refresh()
    assert (result.status, result.errors, len(result.worker_ids)) == ("SUCCESSFUL", [], 1)
    assert Effect.objects.count() == 1
