"""Unique jobs: while one waits, no other is enqueued."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import connection, transaction

from django_mysqlqueue import operations
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.models import JobResult, OutboxMessage
from django_mysqlqueue.tasks import call, cancel_job, enqueue_many, job
from django_mysqlqueue.tasks.framework import task_enqueued
from django_mysqlqueue.testing import deliver_all
from tests.app import jobs
from tests.app.models import Effect
from tests.support import job_worlds
from tests.support.harness import Sub, sequence
from tests.support.internals import registry


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    jobs.log.clear()


def test_a_job_that_waits_is_kept():
    received = []
    task_enqueued.connect(lambda task_result, **kwargs: received.append(task_result.id), weak=False, dispatch_uid="x")
    try:
        first = jobs.alone.enqueue(1, a=1, b=2)
        second = jobs.alone.enqueue(1, b=2, a=1)
    finally:
        task_enqueued.disconnect(dispatch_uid="x")
    assert first == second
    assert received == [first.id]
    other = jobs.alone.enqueue(2)
    assert len({first.id, other.id, jobs.alone_too.enqueue(2).id}) == 3
    assert OutboxMessage.objects.count() == JobResult.objects.count() == 3
    deliver_all()
    assert sorted(jobs.log) == [1, 2]
    third = jobs.alone.enqueue(1, a=1, b=2)
    assert third.id != first.id


def test_a_job_that_has_been_claimed_does_not_wait():
    first = jobs.alone.enqueue(1)
    sequence()
    Sub(registry.handlers()[job_worlds.JOBS], name="a").step()
    assert jobs.alone.enqueue(1).id != first.id


def test_a_job_that_waits_for_its_next_attempt_does_not_count():
    """It has started."""
    first = jobs.alone_by_parity.enqueue(1)
    sequence()
    worker = Sub(registry.handlers()[job_worlds.JOBS], name="a")
    worker.step()
    worker.work()
    worker.flush()
    first.refresh()
    assert first.status == "READY"
    assert jobs.alone_by_parity.enqueue(3).id != first.id


def test_a_part_of_the_arguments():
    first = jobs.alone_by_parity.enqueue(1, a=1)
    assert jobs.alone_by_parity.enqueue(3).id == first.id
    assert jobs.alone_by_parity.enqueue(2).id != first.id


def test_after_a_cancel_another_one_can_wait():
    first = jobs.alone.enqueue(1)
    cancel_job(first)
    second = jobs.alone.enqueue(1)
    assert second.id != first.id
    deliver_all()
    second.refresh()
    assert (second.status, jobs.log) == ("SUCCESSFUL", [1])


@pytest.mark.parametrize("how", ["seek", "drop"])
def test_jobs_that_were_skipped_do_not_count(how):
    """They never start, so no other one could ever be enqueued."""
    skipped = jobs.alone.enqueue(1)
    sequence()
    Sub(registry.handlers()[job_worlds.JOBS], name="a").leave()
    if how == "seek":
        operations.seek("jobs", "jobs.default", "latest", actor="ops")
    else:
        operations.drop_group("jobs", "jobs.default", actor="ops")
    again = jobs.alone.enqueue(1)
    assert again.id != skipped.id
    assert jobs.alone.enqueue(1).id == again.id


def test_many_at_once():
    waiting = jobs.alone.enqueue(0)
    results = enqueue_many([*(call(jobs.alone, number % 3) for number in range(9)), call(jobs.add, 1)])
    assert len({result.id for result in results[:9]}) == 3
    assert {result.id for result in results[:9:3]} == {waiting.id}
    assert [result.args for result in results[:3]] == [[0], [1], [2]]
    deliver_all()
    assert sorted(jobs.log, key=str) == [(1, 1), 0, 1, 2]


@pytest.mark.parametrize("option", [True, False])
def test_for_a_queue(settings, option):
    backend = job_worlds.BACKEND
    settings.TASKS = {"default": {"BACKEND": backend, "OPTIONS": {"UNIQUE": option}}}
    assert (jobs.add.enqueue(1).id == jobs.add.enqueue(1).id) is option


def test_invalid_values():
    with pytest.raises(SubscriberError, match="unique='yes': must be True, False, or a function that returns a string"):
        job(unique="yes")(lambda: None)
    job(unique=lambda number: number)(jobs.echo)
    try:
        with pytest.raises(SubscriberError, match="unique returned 1: it must return a string"):
            jobs.echo.enqueue(1)
    finally:
        del jobs.echo.func._mysqlqueue_job
    assert not JobResult.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_the_job_that_waits_sees_what_the_caller_writes(in_thread):
    """It does not start before the caller's transaction has ended, and holds up no other job."""
    first, other = jobs.alone.enqueue(1), jobs.add.enqueue(1)
    sequence()
    seen = {}

    def turn():
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
        worker = Sub(registry.handlers()[job_worlds.JOBS], name="a")
        worker.step()
        worker.work()
        worker.flush()
        worker.leave()
        seen.update(JobResult.objects.values_list("id", "status"))

    with transaction.atomic():
        Effect.objects.create(name="jobs", value=100)
        assert jobs.alone.enqueue(1).id == first.id
        in_thread(turn).join(30)
    assert seen == {first.id: "READY", other.id: "SUCCESSFUL"}
    deliver_all(advance=1)
    first.refresh()
    assert (first.status, first.attempts) == ("SUCCESSFUL", 1)
    assert Effect.objects.count() == 2


@pytest.mark.django_db(transaction=True)
def test_a_job_that_is_found_all_the_time_starts(in_thread):
    """Its result is locked nearly always."""
    first = jobs.alone.enqueue(1)
    sequence()
    is_over = threading.Event()

    def find():
        while not is_over.is_set():
            with transaction.atomic():
                jobs.alone.enqueue(1)
                time.sleep(0.02)

    threads = [in_thread(find) for _ in range(3)]
    try:
        time.sleep(0.2)
        worker = Sub(registry.handlers()[job_worlds.JOBS], name="a")
        worker.step()
        worker.work()
        worker.flush()
    finally:
        is_over.set()
        for thread in threads:
            thread.join(30)
    first.refresh()
    assert (first.status, first.attempts) == ("SUCCESSFUL", 1)
