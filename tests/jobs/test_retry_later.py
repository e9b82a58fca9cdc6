"""Jobs that ask for their next attempt."""

from __future__ import annotations

import datetime

import pytest
from asgiref.sync import async_to_sync

from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.models import DeliveryEvent, DeliveryState, JobResult, QueueMessage
from django_mysqlqueue.tasks import RetryLater, cancel_job, exceptions, job
from django_mysqlqueue.tasks.framework import TaskResultStatus
from django_mysqlqueue.testing import deliver_all
from tests.app.models import Effect
from tests.support import job_worlds
from tests.support.harness import Sub, sequence
from tests.support.internals import registry

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

READY, RUNNING = TaskResultStatus.READY, TaskResultStatus.RUNNING
FAILED, SUCCESSFUL = TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL
script = []
"""What the next attempts do: raise it, if it is an exception, or call it."""
seen = []
DAY = 86_400


def act(*given):
    seen.append(given)
    if script:
        action = script.pop(0)
        if isinstance(action, BaseException):
            raise action
        action()
    return "done"


@task
@job(max_attempts=3, retry_on=KeyError)
def atomic(*given):
    Effect.objects.create(name="jobs", value=len(seen))
    return act(*given)


@task
@job(max_attempts=3, reject_on=Exception, atomic=False)
def plain(*given):
    return act(*given)


@task
@job(max_attempts=3)
async def awaited(*given):
    return act(*given)


@task
def once(*given):
    return act(*given)


TASKS = {"atomic": atomic, "plain": plain, "awaited": awaited}


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    script.clear()
    seen.clear()


def sub():
    return Sub(registry.handlers()[job_worlds.JOBS], name="a")


def stored(result):
    return JobResult.objects.get(id=result.id)


def attempted(result, worker=None):
    """Runs what is due, and returns the result."""
    sequence()
    (worker or sub()).settle()
    result.refresh()
    return result


@pytest.mark.parametrize("kind", TASKS)
def test_it_counts_as_a_failed_attempt(kind, clock):
    """One message and one result, whatever ``retry_on`` and ``reject_on`` say of other exceptions."""
    script[:] = [RetryLater(30, reason="429 from the API"), RetryLater(datetime.timedelta(seconds=20))]
    worker = sub()
    result = attempted(TASKS[kind].enqueue(1), worker)
    assert (result.status, len(result.errors), result.attempts) == (READY, 1, 1)
    assert result.errors[0].exception_class is RetryLater
    assert "RetryLater: in 30 s: 429 from the API" in result.errors[0].traceback
    assert not Effect.objects.exists()
    row = stored(result)
    state = DeliveryState.objects.get()
    assert abs(row.retry_at - state.invisible_until) < 1000
    assert (state.retry_count, row.retry_reason, row.retry_since) == (1, "429 from the API", 0)
    for passed, attempts in ((29, 1), (3, 2), (17, 2), (5, 3)):
        clock.advance(passed)
        assert attempted(result, worker).attempts == attempts
    assert (result.status, result.return_value, len(seen), len(result.errors)) == (SUCCESSFUL, "done", 3, 2)
    assert QueueMessage.objects.count() == JobResult.objects.count() == 1
    assert Effect.objects.count() == (kind == "atomic")


@pytest.mark.parametrize("kind", TASKS)
def test_the_last_attempt_fails(kind):
    script[:] = [RetryLater(30), RetryLater(30), RetryLater(30, reason="still")]
    result = TASKS[kind].enqueue(1)
    assert [one.outcome for one in deliver_all(raise_exceptions=False)] == ["failed", "failed", "dead_lettered"]
    result.refresh()
    assert (result.status, len(result.errors)) == (FAILED, 3)
    assert result.errors[-1].traceback.endswith("RetryLater: in 30 s: still\n")


def test_without_attempts_left_a_task_fails_at_once():
    """The default of ``max_attempts`` is 1."""
    script[:] = [RetryLater(30)]
    result = once.enqueue()
    deliver_all(raise_exceptions=False)
    result.refresh()
    assert (result.status, len(seen)) == (FAILED, 1)


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"delay": -1}, "RetryLater: delay -1: must be a timedelta or seconds, from 0 to 2592000 (30 days)"),
        ({"delay": float("nan")}, "RetryLater: delay nan: must be"),
        ({"delay": "soon"}, "RetryLater: delay 'soon': must be"),
        ({"delay": None}, "RetryLater: delay None: must be"),
        ({"delay": True}, "RetryLater: delay True: must be"),
        ({"delay": 31 * DAY}, "RetryLater: delay 2678400: must be a timedelta or seconds, from 0 to 2592000 (30 days)"),
        ({"delay": 1, "counts": 0}, "RetryLater: counts 0: must be True or False"),
        ({"delay": 1, "reason": 429}, "RetryLater: reason 429: must be a str"),
    ],
    ids=str,
)
def test_a_wrong_argument_fails_the_attempt(kind, arguments, text):
    """As any exception of the task: nothing is lost."""
    script[:] = [lambda: RetryLater(**arguments)]
    result = TASKS[kind].enqueue()
    outcomes = [one.outcome for one in deliver_all(raise_exceptions=False)]
    result.refresh()
    assert result.errors[0].exception_class is InvalidMessage
    assert text in result.errors[0].traceback
    if kind == "awaited":  # The others do not retry it.
        assert (outcomes, result.status) == (["failed", "acked"], SUCCESSFUL)
    else:
        assert (outcomes, result.status) == (["dead_lettered"], FAILED)


# -- without an attempt ---------------------------------------------------------


@pytest.mark.parametrize("kind", TASKS)
def test_an_attempt_that_does_not_count_leaves_no_trace(kind, clock):
    """No attempt and no error, however often; the writes of an atomic task are rolled back."""
    script[:] = [RetryLater(30, counts=False, reason="429 from the API") for _ in range(5)]
    worker = sub()
    result = TASKS[kind].enqueue(1)
    first = None
    for number in range(5):
        attempted(result, worker)
        assert (result.status, result.errors, result.attempts, len(seen)) == (READY, [], 0, number + 1)
        assert result.last_attempted_at is None
        row, state = stored(result), DeliveryState.objects.get()
        first = first or row.retry_since
        assert (state.retry_count, row.retry_reason, row.retry_since) == (0, "429 from the API", first)
        assert abs(row.retry_at - state.invisible_until) < 1000
        clock.advance(31)
    attempted(result, worker)
    assert (result.status, result.attempts, result.return_value) == (SUCCESSFUL, 1, "done")
    assert not Effect.objects.exclude(value=5).exists()
    assert QueueMessage.objects.count() == JobResult.objects.count() == 1


def test_it_keeps_the_attempts_that_count(clock):
    script[:] = [KeyError("no"), RetryLater(0, counts=False), RetryLater(0, counts=False), KeyError("no")]
    result = atomic.enqueue()
    deliver_all(raise_exceptions=False)
    result.refresh()
    assert [one.exception_class for one in result.errors] == [KeyError, KeyError]
    assert (result.status, result.attempts, len(seen)) == (SUCCESSFUL, 3, 5)


def test_the_outcomes_of_deliveries(settings):
    """It is a snooze, and recorded as one, with its reason."""
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "all"}
    script[:] = [RetryLater(5, counts=False, reason="closed")]
    atomic.enqueue()
    (first,) = deliver_all()
    assert (first.outcome, first.error, first.attempt) == ("snoozed", "closed", 1)
    (second,) = deliver_all(advance=6)
    assert (second.outcome, second.attempt) == ("acked", 1)
    assert list(DeliveryEvent.objects.order_by("pk").values_list("outcome", "error", "attempt")) == [
        ("snoozed", "closed", 1),
        ("acked", "", 1),
    ]


@pytest.mark.parametrize("kind", TASKS)
def test_a_job_waits_for_a_day_in_all(kind, settings):
    """The attempt at which it would be longer fails, with an error that says so; the next day begins after it."""
    settings.MYSQLQUEUE = {"BACKOFF": {"initial": 0}}
    script[:] = [RetryLater(DAY / part, counts=False, reason="closed") for part in (2, 2, 4, 4)]
    result = TASKS[kind].enqueue()
    assert [one.outcome for one in deliver_all()] == ["snoozed"]
    since = stored(result).retry_since
    outcomes = [one.outcome for one in deliver_all(advance=DAY / 2 + 60, raise_exceptions=False)]
    # The others do not retry it.
    assert outcomes == (["failed", "snoozed"] if kind == "awaited" else ["dead_lettered"])
    result.refresh()
    (error,) = result.errors
    assert error.exception_class is exceptions.RetriedTooLong
    assert "delay=43200: the job has asked since " in error.traceback
    assert "and may wait for 86400 s (a day) in all so." in error.traceback
    if kind == "awaited":
        assert stored(result).retry_since >= since
        assert [one.outcome for one in deliver_all(advance=DAY / 4, raise_exceptions=False)] == ["snoozed"]


def test_a_wait_of_more_than_a_day_fails_at_once():
    script[:] = [RetryLater(DAY + 1, counts=False)]
    result = once.enqueue()
    deliver_all(raise_exceptions=False)
    result.refresh()
    assert (result.status, result.errors[0].exception_class) == (FAILED, exceptions.RetriedTooLong)


def test_a_job_that_was_asked_to_stop_is_not_retried():
    result = plain.enqueue()
    script[:] = [lambda: cancel_job(plain.get_result(result.id))]
    worker = sub()
    script.append(RetryLater(30, counts=False))

    def stop():
        cancel_job(plain.get_result(result.id))
        raise RetryLater(0, counts=False)

    script[:] = [stop]
    attempted(result, worker)
    assert (result.status, result.errors[-1].exception_class) == (FAILED, exceptions.JobCancelled)


def test_async_code_waits_too():
    """The event loop is the test's own."""
    script[:] = [RetryLater(0, counts=False)]
    result = async_to_sync(awaited.aenqueue)()
    deliver_all()
    result.refresh()
    assert (result.status, len(seen)) == (SUCCESSFUL, 2)


def test_a_reason_is_cut_and_stored_as_it_can_be():
    script[:] = [RetryLater(5, counts=False, reason="é\udc80" + "x" * 500)]
    result = plain.enqueue()
    deliver_all()
    assert stored(result).retry_reason == "é\\udc80" + "x" * 193
