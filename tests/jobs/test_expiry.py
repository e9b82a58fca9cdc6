"""Jobs that expire: they fail if no attempt has started in time."""

from __future__ import annotations

import datetime

import pytest

from django_mysqlqueue import operations
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.models import JobResult, OutboxMessage, QueueMessage
from django_mysqlqueue.tasks import call, enqueue_chain, job
from django_mysqlqueue.tasks.exceptions import EarlierJobFailed, JobExpired
from django_mysqlqueue.testing import deliver_all
from tests.app import jobs
from tests.support import job_worlds, schedule_worlds
from tests.support.harness import USING, Sub, expire, sequence
from tests.support.internals import registry, schedules


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    jobs.log.clear()


def outcome(result):
    result.refresh()
    return result.status, [error.exception_class for error in result.errors]


def worker():
    return Sub(registry.handlers()[job_worlds.JOBS], name="a")


@pytest.mark.parametrize("claimed", [False, True])
def test_a_job_that_does_not_start_in_time_fails(clock, claimed):
    """Before a subscriber claims it, or while it waits in a process."""
    result = jobs.perishable.enqueue()
    sub = worker()
    if claimed:
        sub.step()
        expire(sub)
    else:
        clock.advance(61)
    sub.settle()
    assert outcome(result) == ("FAILED", [JobExpired])
    assert jobs.log == []


def test_a_job_that_starts_in_time_does_not_expire(clock):
    result = jobs.perishable.enqueue(5)
    assert deliver_all(advance=59)
    assert outcome(result) == ("SUCCESSFUL", [])


def test_the_time_counts_from_run_after(clock):
    later = jobs.perishable.using(run_after=datetime.timedelta(hours=1))
    in_time = later.enqueue(1)
    assert len(deliver_all(advance=3630)) == 1
    too_late = later.enqueue(2)
    clock.advance(3700)
    worker().settle()
    assert outcome(in_time) == ("SUCCESSFUL", [])
    assert outcome(too_late) == ("FAILED", [JobExpired])


def test_the_time_of_a_later_stage_counts_from_the_end_of_the_one_before(clock):
    (first,), (second,), (third,) = enqueue_chain(call(jobs.add, 1), call(jobs.perishable, 2), call(jobs.add, 3))
    assert deliver_all(advance=100)
    assert [outcome(one)[0] for one in (first, second, third)] == ["SUCCESSFUL"] * 3
    (first,), (second,), (third,) = enqueue_chain(call(jobs.add, 1), call(jobs.perishable, 2), call(jobs.add, 3))
    sub = worker()
    sub.step()
    sub.work()
    sub.flush()
    clock.advance(61)
    sub.settle()
    assert outcome(first) == ("SUCCESSFUL", [])
    assert outcome(second) == ("FAILED", [JobExpired])
    assert outcome(third) == ("FAILED", [EarlierJobFailed])


def test_a_retry_waits_no_longer_than_the_job(clock):
    """Its backoff is 45 seconds, then 90."""
    result = jobs.perishable.enqueue(-1)
    sub = worker()
    sub.settle()
    assert outcome(result) == ("READY", [KeyError])
    clock.advance(46)
    sub.settle()
    assert outcome(result) == ("READY", [KeyError] * 2)
    clock.advance(15)
    sub.settle()
    assert outcome(result) == ("FAILED", [KeyError, KeyError, JobExpired])
    assert jobs.log == [-1, -1]


def test_a_redriven_job_does_not_expire(clock):
    result = jobs.fail.enqueue()
    JobResult.objects.update(expires_in=60_000)
    deliver_all(raise_exceptions=False)
    operations.redrive("jobs.default", ids=[result.id], actor="ada")
    sequence()
    assert QueueMessage.objects.get(topic="jobs.default", original_id=result.id).expires_at is None


def test_the_option_of_a_queue(settings):
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "OPTIONS": {"EXPIRES_IN": 5}}}
    for task, milliseconds in ((jobs.add, 5000), (jobs.perishable, 60_000)):
        result = task.enqueue(1)
        assert JobResult.objects.get(id=result.id).expires_in == milliseconds
    assert OutboxMessage.objects.filter(expires_at=None).count() == 0


def test_the_job_of_a_schedule_expires(settings, clock):
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "OPTIONS": {"EXPIRES_IN": 5}}}
    schedule_worlds.registered(schedule_worlds.of_task(), age=70)
    (name,) = schedules.tick(USING, schedule_worlds.NAME).published
    clock.advance(6)
    worker().settle()
    assert "JobExpired" in JobResult.objects.get(id=name).errors


def test_without_the_option_nothing_is_stored():
    jobs.add.enqueue(1)
    assert JobResult.objects.get().expires_in == 0
    assert OutboxMessage.objects.get().expires_at is None


@pytest.mark.parametrize("value", [0, -1, "60", True, 1e10])
def test_invalid_values(value):
    with pytest.raises(SubscriberError, match=r"expires_in=.*: must be"):
        job(expires_in=value)(lambda: None)
