"""Waiting for jobs, cancelling them, and their progress."""

from __future__ import annotations

import asyncio
import datetime
import json
import time
from decimal import Decimal

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import SynchronousOnlyOperation
from django.db import transaction
from django.utils import timezone

from django_mysqlqueue.exceptions import TransactionMismatch
from django_mysqlqueue.models import DeliveryState, JobResult, OutboxMessage, QueueMessage, SubscriberHeartbeat
from django_mysqlqueue.tasks import (
    Progress,
    acancel_job,
    async_wait,
    cancel_job,
    control,
    exceptions,
    monitor,
    progress_of,
    wait,
)
from django_mysqlqueue.tasks.framework import BaseTaskBackend, InvalidTask, TaskResultDoesNotExist
from django_mysqlqueue.tasks.monitor import JobMonitor
from django_mysqlqueue.testing import deliver_all
from tests.app import jobs
from tests.support import job_worlds
from tests.support.harness import USING, Sub, sequence
from tests.support.internals import PROGRESS_LENGTH, job_progress, job_rows, registry, run

IMMEDIATE = f"{BaseTaskBackend.__module__.removesuffix('base')}immediate.ImmediateBackend"


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    jobs.log.clear()


# -- cancelling ---------------------------------------------------------------


def test_a_job_that_waits_is_cancelled():
    result = jobs.add.enqueue(1)
    sequence()
    cancel_job(result)
    assert (result.status, [error.exception_class for error in result.errors]) == ("FAILED", [exceptions.JobCancelled])
    deliver_all()
    result.refresh()
    assert (result.status, result.attempts, jobs.log) == ("FAILED", 0, [])
    assert not QueueMessage.objects.filter(topic="jobs.default_dlq").exists()


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda result: jobs.add.enqueue(1), "aenqueue"),
        (lambda result: cancel_job(result), "acancel_job"),
        (lambda result: wait(result, timeout=1), "async_wait"),
    ],
)
def test_a_call_from_async_code_names_the_function_to_await(call, instead):
    result = jobs.add.enqueue(1)

    async def coroutine():
        call(result)

    with pytest.raises(SynchronousOnlyOperation, match=rf"use “await {instead}\(…\)”\.$"):
        asyncio.run(coroutine())


def test_a_scheduled_job_leaves_no_message():
    result = jobs.add.using(run_after=timezone.now() + datetime.timedelta(days=1)).enqueue(1)
    async_to_sync(acancel_job)(result)
    assert result.status == "FAILED"
    assert not OutboxMessage.objects.exists()


def test_a_job_that_has_ended_stays_as_it_is():
    result = jobs.add.enqueue(1)
    deliver_all()
    cancel_job(result)
    assert (result.status, result.return_value, result.errors) == ("SUCCESSFUL", 2, [])


def test_a_cancel_that_rolls_back():
    result = jobs.add.enqueue(1)
    with transaction.atomic():
        cancel_job(result)
        transaction.set_rollback(True)
    deliver_all()
    result.refresh()
    assert result.status == "SUCCESSFUL"


def test_a_job_without_a_result():
    result = jobs.add.enqueue(1)
    JobResult.objects.all().delete()
    with pytest.raises(TaskResultDoesNotExist):
        cancel_job(result)
    with pytest.raises(TaskResultDoesNotExist):
        wait(result)
    with pytest.raises(TaskResultDoesNotExist):
        progress_of(result)


def claimed(result):
    """A subscriber that has claimed a job."""
    sequence()
    worker = Sub(registry.handlers()[job_worlds.JOBS], name="a")
    worker.step()
    result.refresh()
    assert result.status == "RUNNING"
    return worker


def test_a_running_job_is_asked_to_stop():
    result = jobs.count_to.enqueue(5)
    worker = claimed(result)
    cancel_job(result)
    assert result.status == "RUNNING"
    asked_at = JobResult.objects.get().cancel_requested_at
    assert abs(asked_at / 1000 - time.time()) < 60
    cancel_job(result)
    assert JobResult.objects.get().cancel_requested_at == asked_at
    worker.work()
    worker.flush()
    result.refresh()
    assert (result.status, result.attempts) == ("FAILED", 1)
    assert result.errors[-1].exception_class is exceptions.JobCancelled
    assert "after 0" in result.errors[-1].traceback


def test_a_task_that_does_not_look_runs_to_its_end():
    result = jobs.add.enqueue(1)
    worker = claimed(result)
    cancel_job(result)
    worker.work()
    worker.flush()
    result.refresh()
    assert (result.status, result.return_value) == ("SUCCESSFUL", 2)


def test_a_job_that_was_asked_to_stop_is_not_retried():
    result = jobs.fail_thrice.enqueue()
    worker = claimed(result)
    cancel_job(result)
    worker.work()
    worker.flush()
    deliver_all(raise_exceptions=False, advance=1)
    result.refresh()
    assert (result.status, result.attempts, jobs.log) == ("FAILED", 1, ["fail_thrice"])
    assert [error.exception_class for error in result.errors] == [KeyError, exceptions.JobCancelled]


def test_a_job_that_was_asked_to_stop_and_whose_subscriber_was_lost():
    result = jobs.add.enqueue(1)
    claimed(result)
    cancel_job(result)
    SubscriberHeartbeat.objects.all().delete()
    DeliveryState.objects.update(invisible_until=0)
    deliver_all(raise_exceptions=False)
    result.refresh()
    assert (result.status, jobs.log) == ("FAILED", [])
    assert [error.exception_class for error in result.errors] == [exceptions.WorkerLost, exceptions.JobCancelled]


# -- progress -----------------------------------------------------------------


def test_progress_is_stored_with_the_outcome():
    result = jobs.report.enqueue(3, 12, "x" * 300)
    assert progress_of(result) is None
    deliver_all()
    found = progress_of(result)
    assert found == Progress(3, 12, "x" * 200, found.at)
    assert (found.fraction, Progress(3, None, "", found.at).fraction) == (0.25, None)
    assert abs(found.at - timezone.now()) < datetime.timedelta(seconds=60)


@pytest.mark.parametrize(
    ("text", "stored"), [("\x01" * 300, "\x01" * 200), ("\N{GRINNING FACE}" * 198 + "\udc80", None)]
)
def test_the_longest_progress_fits(text, stored):
    """It would be an error at each flush."""
    column = job_progress.encode(1e300 / 3, 10**300, text, 10**13)
    assert len(column) <= PROGRESS_LENGTH
    assert job_progress.decode(column).message == (stored or text[:-1] + "?")


def test_numbers_that_json_has_not():
    column = job_progress.encode(Decimal("1.5"), True, "", 1)
    assert json.loads(column) == {"done": 1.5, "total": 1, "message": "", "at": 1}
    assert '"total": 1,' in column
    with pytest.raises(TypeError):
        job_progress.encode(None, None, "", 1)
    with pytest.raises(ValueError, match="total=much: must be a finite number above 0, or None"):
        job_progress.encode(1, "much", "", 1)
    with pytest.raises(ValueError, match=r"done=1000+: must be a finite number, at least 0"):
        job_progress.encode(10**400, None, "", 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((-1,), "done=-1: must be a finite number, at least 0"),
        ((1, 0), "total=0: must be a finite number above 0, or None"),
        ((1, -5), "total=-5: must be"),
    ],
)
def test_invalid_progress(arguments, text):
    result = jobs.report.enqueue(*arguments)
    deliver_all(raise_exceptions=False)
    result.refresh()
    assert result.status == "FAILED"
    assert text in result.errors[0].traceback


def test_a_new_attempt_begins_without_progress():
    result = jobs.count_to.enqueue(1)
    claimed(result)
    JobResult.objects.update(progress='{"done": 1, "total": 2, "message": "", "at": 1}')
    SubscriberHeartbeat.objects.all().delete()
    DeliveryState.objects.update(invisible_until=0)
    claimed(result)
    assert progress_of(result) is None


@pytest.mark.django_db(transaction=True)
def test_the_monitor(in_thread, django_assert_num_queries, monkeypatch):
    """It stores the start and the progress of jobs that run for longer, and tells them that they are to stop."""
    monkeypatch.setattr(monitor, "_monitored", {USING})
    result = jobs.count_to.enqueue(600)
    worker = claimed(result)
    assert result.last_attempted_at == result.started_at
    one = JobMonitor(USING)
    thread = in_thread(worker.work)
    deadline = time.monotonic() + 10
    while not any(attempt.progress for attempt in list(monitor._running.values())) and time.monotonic() < deadline:
        time.sleep(0.01)
    with django_assert_num_queries(0):
        assert not one.turn(), "it may end at once"
    assert one.turn()
    result.refresh()
    assert (result.status, result.started_at) == ("RUNNING", result.last_attempted_at)
    first = progress_of(result)
    assert first.total == 600
    assert f"{first.done} of 600" == first.message
    deadline = time.monotonic() + 10
    while progress_of(result).done <= first.done and time.monotonic() < deadline:
        time.sleep(0.2)
        one.turn()
    assert progress_of(result).done > first.done
    cancel_job(result)
    one.turn()
    thread.join(5)
    assert not thread.is_alive()
    worker.flush()
    result.refresh()
    assert result.status == "FAILED"
    assert not monitor._running
    with django_assert_num_queries(0):
        assert not one.turn()


@pytest.mark.django_db(transaction=True)
def test_a_locked_result_does_not_stop_the_monitor(in_thread, monkeypatch):
    """For example by a transaction that cancels the job, and stays open."""
    monkeypatch.setattr(monitor, "_monitored", {USING})
    locked, other = jobs.count_to.enqueue(600), jobs.count_to.enqueue(600)
    sequence()
    worker = Sub(registry.handlers()[job_worlds.JOBS], name="a")
    worker.step()
    threads = [in_thread(lambda: worker.work(1)) for _ in range(2)]
    deadline = time.monotonic() + 20
    while len(monitor._running) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    one, turned = JobMonitor(USING), []
    one.turn()
    with transaction.atomic():
        cancel_job(locked)

        def turn():
            cancel_job(other)
            time.sleep(0.1)
            turned.append(one.turn())

        in_thread(turn).join(10)
        assert turned == [True]
    one.turn()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    worker.flush()
    for result in (locked, other):
        result.refresh()
        assert (result.status, progress_of(result) is None) == ("FAILED", False)


def test_an_old_attempt_does_not_overwrite_a_later_one(db):
    jobs.add.enqueue(1)
    (job,) = JobResult.objects.values_list("id", flat=True)
    JobResult.objects.update(status="RUNNING", last_attempted_at=100)

    def store(at, progress):
        run(USING, lambda session: job_rows.store_started(session, [job_rows.StartedJob(job, 0, at, progress)]))
        return JobResult.objects.values_list("last_attempted_at", "progress").get()

    assert store(99, "old") == (100, "")
    assert store(100, "same") == (100, "same")
    JobResult.objects.update(status="READY")
    assert store(101, "new") == (100, "same")


# -- waiting ------------------------------------------------------------------


def test_waiting_for_a_job_that_has_ended(django_assert_num_queries):
    results = [jobs.add.enqueue(number) for number in range(3)]
    deliver_all()
    wait(*results, timeout=0)
    assert [result.return_value for result in results] == [1, 2, 3]


def test_results_of_other_backends(settings):
    """As in tests of a project, with Django's ImmediateBackend."""
    ours = jobs.add.enqueue(1)
    settings.TASKS = {"default": {"BACKEND": IMMEDIATE}}
    result = jobs.add.enqueue(1)
    wait(result, timeout=0)
    cancel_job(result)
    assert (result.status, result.return_value, progress_of(result)) == ("SUCCESSFUL", 2, None)
    with pytest.raises(InvalidTask, match="The backend 'default' of TASKS is not a MySQLQueueBackend"):
        wait(ours)


def test_waiting_for_too_long(django_assert_max_num_queries):
    results = [jobs.add.enqueue(1), jobs.add.enqueue(2)]
    began = time.monotonic()
    with django_assert_max_num_queries(25), pytest.raises(TimeoutError, match=r"and 1 others did not end within 0.3 s"):
        wait(*results, timeout=0.3)
    assert 0.3 <= time.monotonic() - began < 5


@pytest.mark.django_db(transaction=True)
def test_waiting_in_a_transaction():
    result = jobs.add.enqueue(1)
    with transaction.atomic(), pytest.raises(TransactionMismatch, match="Wait after the transaction"):
        wait(result)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_waiting_while_another_thread_runs_the_job(in_thread, kind):
    result = jobs.add.enqueue(1)

    def later():
        time.sleep(0.2)
        deliver_all()

    in_thread(later)
    if kind == "sync":
        wait(result, timeout=20)
    else:
        async_to_sync(async_wait)(result, timeout=20)
    assert result.return_value == 2


def test_a_pause_is_not_longer_than_what_is_left(monkeypatch):
    monkeypatch.setattr(control, "SHORTEST_PAUSE", 5)
    result = jobs.add.enqueue(1)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        wait(result, timeout=0.1)
    assert time.monotonic() - began < 4


def test_a_job_that_knows_that_it_was_asked_to_stop_has_failed_at_once():
    """Whatever it raises: there are no further attempts."""
    result = jobs.stop_slowly.enqueue()
    worker = claimed(result)
    cancel_job(result)
    worker.work()
    worker.flush()
    result.refresh()
    assert (result.status, [error.exception_class for error in result.errors]) == ("FAILED", [KeyError])
