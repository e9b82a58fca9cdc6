"""Jobs of async tasks, which hold no thread, beside those of sync ones."""

from __future__ import annotations

import importlib
import sys
import threading

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_mysqlqueue.models import JobResult, QueueMessage
from django_mysqlqueue.tasks import call, cancel_job, enqueue_chain, exceptions, monitor, progress_of
from django_mysqlqueue.tasks.framework import task_backends, task_finished, task_started
from django_mysqlqueue.tasks.monitor import JobMonitor
from tests.app import jobs
from tests.app.models import Effect
from tests.support import job_worlds
from tests.support.async_handlers import Gate, working
from tests.support.harness import USING, in_thread
from tests.support.internals import registry
from tests.support.job_worlds import JOBS

pytestmark = pytest.mark.promise("Jobs")


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    jobs.log.clear()


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    monkeypatch.setattr(jobs, "awaiting", gate.enter)
    yield gate
    gate.open()


def subscriber(**options):
    return working(registry.handlers()[JOBS], **options)


def enqueued(task, numbers):
    return task_backends["default"].enqueue_many([(task, [number], {}) for number in numbers])


def ended(number):
    return lambda: JobResult.objects.filter(finished_at__gt=0).count() == number


def refreshed(results):
    for result in results:
        result.refresh()
    return results


# -- results ------------------------------------------------------------------


def test_many_at_once_hold_no_thread_and_store_their_results(gate):
    results = enqueued(jobs.attend, range(100))
    with subscriber(concurrency=100) as (_, until):
        until(lambda: gate.inside)
        before = set(threading.enumerate())
        until(lambda: len(gate.inside) == 100)
        assert set(threading.enumerate()) <= before
        assert set(JobResult.objects.values_list("status", flat=True)) == {"RUNNING"}
        gate.open()
        until(ended(100))
    assert [(one.status, one.return_value, one.attempts) for one in refreshed(results)] == [
        ("SUCCESSFUL", number, 1) for number in range(100)
    ]
    assert sorted(jobs.log) == list(range(100))


def test_errors_and_retries(gate):
    """Each job has its own attempts, although all run at once."""
    results = enqueued(jobs.attend_thrice, range(20))
    with subscriber() as (_, until):
        until(lambda: len(gate.inside) == 20)
        gate.open()
        until(ended(20))
    for number, one in enumerate(refreshed(results)):
        assert (one.status, one.attempts) == ("FAILED", 3)
        assert [error.exception_class for error in one.errors] == [ValueError] * 3
        assert all(f"no {number}" in error.traceback for error in one.errors)
    assert sorted(gate.entered) == sorted([*range(20)] * 3)


def test_time_limits(gate):
    results = enqueued(jobs.attend_briefly, range(20))
    with subscriber() as (_, until):
        until(ended(20))
    for one in refreshed(results):
        assert (one.status, [error.exception_class for error in one.errors]) == ("FAILED", [TimeoutError])
        assert "did not finish within 0.3 s" in one.errors[0].traceback


def test_the_context_its_progress_and_its_end(gate, monkeypatch):
    """The monitor stores the progress of each, and tells only the one that is cancelled that it is to stop."""
    monkeypatch.setattr(monitor, "_monitored", {USING})
    watch = JobMonitor(USING)
    results = enqueued(jobs.follow, [3] * 10)
    with subscriber() as (_, until):
        until(lambda: gate.inside == [0] * 10)
        gate.let(10)
        until(lambda: gate.inside == [1] * 10)
        in_thread(lambda: [watch.turn() for _ in range(2)])
        assert {(one.done, one.total) for one in map(progress_of, results)} == {(1, 3)}
        cancel_job(results[4])
        in_thread(watch.turn)
        gate.open()
        until(ended(10))
    stopped = refreshed(results).pop(4)
    assert (stopped.status, stopped.attempts) == ("FAILED", 1)
    assert [error.exception_class for error in stopped.errors] == [exceptions.JobCancelled]
    assert "after 1" in stopped.errors[0].traceback
    assert [(one.status, one.return_value) for one in results] == [
        ("SUCCESSFUL", {"attempt": 1, "id": one.id}) for one in results
    ]
    assert {(one.done, one.total) for one in map(progress_of, results)} == {(2, 3)}
    assert not monitor._running


def test_stages_of_a_chain():
    """An async task reads the results of the stage before, and writes, in a thread for synchronous code."""
    stages = enqueue_chain([call(jobs.attend, number) for number in range(5)], call(jobs.gather_async))
    with subscriber() as (_, until):
        until(ended(6))
    (last,) = refreshed(stages[-1])
    assert (last.status, sorted(last.return_value)) == ("SUCCESSFUL", list(range(5)))
    assert Effect.objects.get().value == 5


def test_receivers_of_the_signals_of_tasks_use_the_orm(gate):
    threads = set()

    def started(task_result, **arguments):
        threads.add(threading.current_thread().name)
        Effect.objects.create(name="started", value=task_result.args[0])

    def finished(task_result, **arguments):
        threads.add(threading.current_thread().name)
        Effect.objects.create(name=f"finished {task_result.status}", value=task_result.args[0])

    task_started.connect(started)
    task_finished.connect(finished)
    try:
        enqueued(jobs.attend, range(10))
        enqueued(jobs.attend_thrice, [10])
        gate.open()
        with subscriber() as (_, until):
            until(ended(11))
    finally:
        task_started.disconnect(started)
        task_finished.disconnect(finished)
    assert threads == {"mysqlqueue-sync-0"}
    found = sorted(Effect.objects.values_list("name", "value"))
    assert found == sorted(
        [(name, number) for name in ("started", "finished SUCCESSFUL") for number in range(10)]
        + [("started", 10)] * 3
        + [("finished FAILED", 10)]
    )


# -- beside sync ones ---------------------------------------------------------


def test_sync_jobs_do_not_wait_for_async_ones(gate):
    """Although many of those wait for a place, and came first."""
    enqueued(jobs.attend, range(100))
    sync = enqueued(jobs.plain, range(10))
    with subscriber(concurrency=5) as (_, until):
        until(lambda: len(gate.inside) == 5)
        until(ended(10))
        assert {one.status for one in refreshed(sync)} == {"SUCCESSFUL"}
        gate.open()
        until(ended(110))
    assert gate.most == 5


def test_async_jobs_do_not_wait_for_sync_ones(gate, monkeypatch):
    """Although those occupy all threads, and more wait for one."""
    go, busy = threading.Event(), threading.Event()

    def hang(_):
        busy.set()
        assert go.wait(60)

    monkeypatch.setattr(jobs, "hanging", hang)
    task_backends["default"].enqueue_many([(jobs.hang, [], {})] * 10)
    results = enqueued(jobs.attend, range(50))
    gate.open()
    with subscriber(threads=1) as (_, until):
        until(busy.is_set)
        until(ended(50))
        assert {one.status for one in refreshed(results)} == {"SUCCESSFUL"}
        go.set()
        until(ended(60))


@pytest.fixture
def unimported(tmp_path, monkeypatch):
    """The name of a module that can be imported, and has not been."""
    name = "tests_unimported"
    (tmp_path / f"{name}.py").write_text(
        "import asyncio\nfrom tests.app.jobs import task\n\n"
        "@task\nasync def who(number):\n    await asyncio.sleep(0)\n    return asyncio.current_task().get_name()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield name
    sys.modules.pop(name, None)


def test_the_first_job_of_a_task_that_is_not_imported_runs_in_a_thread_and_imports_it(unimported):
    """The next one runs on the loop, whose tasks have the names of their messages."""
    path = f"{unimported}.who"
    with subscriber() as (_, until):
        for number in (1, 2):
            result = jobs.add.enqueue(1)
            JobResult.objects.filter(id=result.id).update(task_path=path)
            assert (unimported in sys.modules) == (number > 1)
            until(ended(number))
            row = JobResult.objects.get(id=result.id)
            assert row.status == "SUCCESSFUL", row.errors
            assert ("offset" in row.return_value) == (number > 1)
    assert not QueueMessage.objects.filter(topic="jobs.default_dlq").exists()


# -- the option of a queue ----------------------------------------------------


def with_queue(**options):
    return {"default": job_worlds.TASKS["default"] | {"OPTIONS": {"QUEUES": {"default": options}}}}


def test_the_concurrency_of_a_queue(gate, settings):
    """It is apart from that of the process, and sync jobs do not count."""
    settings.TASKS = with_queue(CONCURRENCY=3)
    handler = registry.handlers()[JOBS]
    assert handler.concurrency == 3
    enqueued(jobs.attend, range(10))
    enqueued(jobs.plain, range(5))
    with working(handler, concurrency=1) as (_, until):
        until(lambda: len(gate.inside) == 3)
        until(ended(5))
        assert len(gate.inside) == 3
        gate.open()
        until(ended(15))
    assert gate.most == 3


@pytest.mark.parametrize("value", [0, -1, 10_001, 1.5, "5", True])
def test_a_concurrency_of_a_queue_that_is_no_number_of_calls(settings, value):
    settings.TASKS = with_queue(CONCURRENCY=value)
    with pytest.raises(
        ImproperlyConfigured, match=r"\['OPTIONS'\]: concurrency=.*must be (from 1 to 10000|an integer)"
    ):
        registry.handlers()
