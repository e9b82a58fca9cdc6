"""What a process that ends by itself cuts off is released: it has not failed, and is not suspected."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time

import pytest
from django.db import connections, transaction

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.exceptions import StaleDelivery
from django_mysqlqueue.models import DeliveryEvent, DeliveryState, JobResult, PartitionLease, QueueMessage
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.tasks.attempts import Attempt
from django_mysqlqueue.tasks.framework import task_finished
from django_mysqlqueue.tasks.options import JobOptions
from tests.app import jobs
from tests.app.models import Effect
from tests.support import job_worlds
from tests.support.handlers import Recorder, both_modes
from tests.support.harness import USING, Sub, handler, in_thread, lag, sequence, take_all
from tests.support.internals import Action, Executor, GroupRef, Settlement, registry, releasing, sessions, settling

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


@contextlib.contextmanager
def executing(sub, threads):
    """A subscriber whose threads call their handlers."""
    timeouts = sessions.Timeouts(idle=60, lock_wait=10, network=10, read=60)
    executor = Executor(sub.inbox, USING, threads=threads, timeouts=timeouts)
    executor.start()
    try:
        yield
    finally:
        sub.inbox.close()
        executor.join(30)


class Hanging:
    """A handler function of which one call does not return in time."""

    def __init__(self, number=0):
        self.number = number
        self.begun, self.go = threading.Semaphore(0), threading.Event()

    def __call__(self, delivery):
        self.begun.release()
        assert self.go.wait(30)


def exceed(sub, function, *, threads, slow, then=lambda: None):
    """Call the handlers, of which some exceed their time, and leave as their process does."""
    with executing(sub.step(), threads):
        assert all(function.begun.acquire(timeout=30) for _ in range(threads))
        for held in sub.inbox._running:
            held.started_at -= 6 * slow(held)
        assert (sub.inbox.overrun() is not None) == any(map(slow, sub.inbox._running))
        sub.cut_off()
        then()
        function.go.set()


@pytest.mark.promise("Handlers that hang")
@both_modes
def test_only_the_handler_that_exceeds_its_time_is_charged(db, mode):
    publish_many("t", (Message(n, key=f"k{n}") for n in range(3)))
    for lost in range(1, 4):
        function = Hanging()
        one = handler(mode=mode, max_attempts=3, max_processing_time=5.0, function=function)
        exceed(Sub(one, threads=3), function, threads=3, slow=lambda held: held.body.payload == b"0")
        rest = rows()
        if lost < 3:
            assert rest.pop(0) == (lost, False, False, False)
            assert DeliveryState.objects.get(retry_count=lost).last_error == (
                "django_mysqlqueue.exceptions.ProcessingTimeExceeded: The call ran longer than MAX_PROCESSING_TIME "
                "(5 s), so its process ended. The event handler.hung in the log shows where it was. To allow more "
                "time: @subscriber(max_processing_time=…).\n"
            )
        assert rest == [FREE, FREE]
    got = Recorder()
    Sub(handler(mode=mode, function=got)).settle()
    assert sorted(got.attempts) == [(1, 1), (2, 1)]
    sequence()
    letter = QueueMessage.objects.get(topic="t_dlq")
    assert letter.failure_count == 3
    assert "ran longer than MAX_PROCESSING_TIME (5 s)" in letter.last_error
    assert lag() == 0


@pytest.mark.promise("Handlers that hang")
@both_modes
def test_an_attempt_that_exceeds_its_time_is_retried_as_others_are(db, mode):
    """After the backoff; and reject_on and retry_on count."""
    publish("t", 0, key="k")
    function = Hanging()
    one = handler(mode=mode, max_processing_time=5.0, function=function, backoff=Backoff(initial=100, jitter=0))
    exceed(Sub(one), function, threads=1, slow=lambda held: True)
    assert rows() == [(1, False, False, True)]
    early = Sub(one).step()
    assert early.take() is None
    early.leave()
    DeliveryState.objects.update(invisible_until=1)
    function = Hanging()
    one = dataclasses.replace(one, retry_on=(KeyError,), function=function)
    exceed(Sub(one), function, threads=1, slow=lambda held: True)
    assert rows() == []


@pytest.mark.promise("Handlers that hang")
@both_modes
def test_each_message_of_a_batch_that_exceeds_its_time_has_failed(db, mode):
    publish_many("t", (Message(n, key="k") for n in range(3)))
    function = Hanging()
    one = handler(mode=mode, batch=True, batch_size=3, max_processing_time=5.0, function=function)
    exceed(Sub(one), function, threads=1, slow=lambda held: True)
    assert rows() == [(1, False, False, False)] * 3


@pytest.mark.promise("Handlers that hang")
@both_modes
@pytest.mark.parametrize("ended", ["expired", "superseded"])
def test_a_batch_of_which_a_message_was_settled_without_a_call_has_failed(db, mode, ended):
    """Otherwise no attempt is ever counted, and each process dies of the batch."""
    publish("t", 0, key="k", coalesce="c", expires_in=600)
    publish("t", 1, key="k")
    function = Hanging()
    one = handler(mode=mode, batch=True, batch_size=3, max_processing_time=5.0, function=function)
    sub = Sub(one, prefetch=2).step()
    if ended == "superseded":
        publish("t", 2, key="k", coalesce="c")
        sequence()
    else:
        for lane in sub.inbox._groups[G].lanes.values():
            lane.waiting[0].expires = 0.0
    exceed(sub, function, threads=1, slow=lambda held: True)
    assert rows()[:2] == [FREE, (1, False, False, False)]


@pytest.mark.promise("Handlers that hang")
@both_modes
def test_a_handler_that_has_not_been_called_has_not_failed(db, mode):
    """What hangs is the database, before the call."""
    publish("t", 0, key="k")
    sub, (held,) = working(handler(mode=mode, max_processing_time=5.0))
    held.started_at -= 6
    sub.cut_off()
    assert rows() == [FREE]


@pytest.mark.promise("Jobs")
@pytest.mark.parametrize(
    ("task", "attempts"),
    [("hang", 1), ("hang_twice", 2), pytest.param("hang_atomic", 1, marks=pytest.mark.servers_only)],
)
def test_a_job_that_exceeds_its_time_has_failed_by_its_own_limit(
    db, no_handlers, settings, monkeypatch, task, attempts
):
    """It was started six times, with its side effects, although it is not retried."""
    settings.TASKS = job_worlds.TASKS
    settings.MYSQLQUEUE = {"MAX_PROCESSING_TIME": 5}
    ended, told = [], []

    def receiver(task_result, **_):
        ended.append(task_result.status)

    task_finished.connect(receiver)
    result = getattr(jobs, task).enqueue()
    for number in range(1, attempts + 1):
        function = Hanging()
        monkeypatch.setattr(jobs, "hanging", function)
        DeliveryState.objects.update(invisible_until=0)
        ended.clear()
        sub = Sub(*registry.handlers().values())
        exceed(sub, function, threads=1, slow=lambda held: True, then=lambda: told.extend(ended))
        result.refresh()
        assert (result.status, result.attempts) == ("FAILED" if number == attempts else "READY", number)
    assert [error.exception_class_path for error in result.errors] == [
        "django_mysqlqueue.exceptions.ProcessingTimeExceeded"
    ] * attempts
    assert "ran longer than MAX_PROCESSING_TIME (5 s)" in result.errors[0].traceback
    assert "@job(max_processing_time=…)" in result.errors[0].traceback
    assert told == ["FAILED"]
    assert Effect.objects.count() == (0 if task == "hang_atomic" else attempts)
    assert Sub(*registry.handlers().values()).settle() == 0
    sequence()
    assert QueueMessage.objects.get(topic="jobs.default_dlq").failure_count == attempts


@pytest.mark.promise("Jobs")
def test_a_task_may_have_more_or_less_time_than_its_queue(db, no_handlers, settings, monkeypatch):
    settings.TASKS = job_worlds.TASKS
    settings.MYSQLQUEUE = {"MAX_PROCESSING_TIME": 5}
    for task, longest in ((jobs.hang, 5), (jobs.hang_long, 900), (jobs.hang_briefly, 1)):
        task.enqueue()
        (one,) = registry.handlers().values()
        assert one.longest_time == 900
        function = Hanging()
        monkeypatch.setattr(jobs, "hanging", function)
        sub = Sub(one).step()
        with executing(sub, 1):
            assert function.begun.acquire(timeout=30)
            (held,) = sub.inbox._running
            began = time.monotonic()
            held.started_at = began - longest + 0.9
            assert sub.inbox.overrun() is None
            held.started_at = began - longest - 0.1
            assert sub.inbox.overrun() is held
            function.go.set()
        sub.flush()


@pytest.mark.promise("Jobs")
def test_more_time_than_was_known_at_the_start_is_not_given(db, no_handlers, settings, monkeypatch):
    """The server closes the connections of handlers after the longest time that was known."""
    settings.TASKS = job_worlds.TASKS
    monkeypatch.setattr(job_queues, "time_limits", {})
    (one,) = registry.handlers().values()
    attempt = Attempt(USING, None, 0.0, 0, 0, options=JobOptions(max_processing_time=900.0))
    assert one.time_limit(attempt) == one.longest_time == 600


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
