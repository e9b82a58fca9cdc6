"""Jobs that ask for their next attempt."""

from __future__ import annotations

import datetime
import threading

import pytest
from asgiref.sync import async_to_sync

from django_mysqlqueue import operations
from django_mysqlqueue.contrib.celery import shared_task
from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.models import DeliveryEvent, DeliveryState, JobResult, QueueMessage, SubscriberHeartbeat
from django_mysqlqueue.tasks import RetryLater, call, cancel_job, enqueue_chain, exceptions, job, progress_of
from django_mysqlqueue.tasks.framework import TaskResultStatus
from django_mysqlqueue.testing import deliver_all
from tests.app.models import Effect
from tests.support import job_worlds
from tests.support.harness import Sub, in_thread, sequence
from tests.support.internals import registry, stopping

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


@task(takes_context=True)
@job(max_attempts=3, backoff={"initial": 0, "maximum": 0})
def with_context(context):
    Effect.objects.create(name="jobs", value=len(seen))
    return act(context)


@task(takes_context=True)
@job(max_attempts=3, atomic=False, backoff={"initial": 0, "maximum": 0})
def plain_with_context(context):
    return act(context)


@task(takes_context=True)
@job(max_attempts=3, backoff={"initial": 0, "maximum": 0})
async def awaited_with_context(context):
    return act(context)


@shared_task(bind=True, max_retries=2)
def with_celerys_retry(self):
    try:
        return act(self)
    except KeyError as error:
        raise self.retry(exc=error) from error


@task(takes_context=True)
@job(max_attempts=None)
def without_end(context):
    return act(context.attempt, context.max_attempts, context.is_last_attempt)


TASKS = {"atomic": atomic, "plain": plain, "awaited": awaited}
WITH_CONTEXT = {"atomic": with_context, "plain": plain_with_context, "awaited": awaited_with_context}


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    script.clear()
    seen.clear()


def sub():
    return Sub(registry.handlers()[job_worlds.JOBS], name="a")


def lose():
    """Lets others take what subscribers hold."""
    SubscriberHeartbeat.objects.all().delete()
    DeliveryState.objects.filter(acked=False).update(invisible_until=0)


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


@pytest.mark.parametrize(
    ("kind", "again"),
    [
        *((TASKS[kind], lambda: RetryLater(30)) for kind in TASKS),
        (with_celerys_retry, lambda: KeyError(1)),
        *((WITH_CONTEXT[kind], lambda: lambda: seen[-1][0].retry(0)) for kind in WITH_CONTEXT),
    ],
)
def test_deliver_all_raises_no_retry_that_is_asked_for(kind, again):
    script[:] = [again(), again()]
    result = kind.enqueue()
    assert [one.outcome for one in deliver_all(advance=1)][-1] == "acked"
    result.refresh()
    assert (result.status, len(seen)) == (SUCCESSFUL, 3)


@pytest.mark.parametrize(
    ("kind", "again", "expected"), [(plain, RetryLater(30), RetryLater), (with_celerys_retry, KeyError(1), KeyError)]
)
def test_deliver_all_raises_when_no_attempt_is_left(kind, again, expected):
    script[:] = [again] * 3
    result = kind.enqueue()
    with pytest.raises(expected):
        deliver_all()
    result.refresh()
    assert (result.status, len(seen)) == (FAILED, 3)


def test_deliver_all_raises_another_exception_although_it_is_retried():
    script[:] = [RetryLater(30), OSError("down")]
    result = awaited.enqueue()
    with pytest.raises(OSError, match="down"):
        deliver_all()
    result.refresh()
    assert result.status == READY


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


# -- the context ------------------------------------------------------------------


def raised(error):
    raise error


def told():
    """Notes what the context of the running task tells of its attempts."""
    (context,) = seen.pop()
    seen.append((context.attempt, context.max_attempts, context.is_last_attempt, context.losses))


@pytest.mark.parametrize("kind", WITH_CONTEXT)
def test_the_context_tells_the_attempt_as_max_attempts_counts_it(kind):
    script[:] = [
        lambda: (told(), raised(KeyError("no"))),
        lambda: (told(), raised(RetryLater(0, counts=False))),
        lambda: (told(), raised(RetryLater(0))),
        told,
    ]
    result = WITH_CONTEXT[kind].enqueue()
    deliver_all(raise_exceptions=False)
    result.refresh()
    assert seen == [(1, 3, False, 0), (2, 3, False, 0), (2, 3, False, 0), (3, 3, True, 0)]
    assert result.status == SUCCESSFUL


def test_losses_are_beside_the_attempts():
    """The first is free; further ones count for themselves."""
    script[:] = [told]
    result = with_context.enqueue()
    sequence()
    for name in "abc":
        Sub(registry.handlers()[job_worlds.JOBS], name=name).step()
        lose()
    attempted(result)
    ((attempt, most, is_last, losses),) = seen
    assert (attempt, most, is_last, losses) == (1, 3, False, 3)
    assert (result.status, result.attempts) == (SUCCESSFUL, 4)


def test_a_redrive_counts_from_one_again():
    script[:] = [lambda: (told(), raised(KeyError("no")))] * 3 + [told]
    with_context.enqueue()
    deliver_all(raise_exceptions=False)
    sequence()
    operations.redrive("jobs.default", actor="test")
    deliver_all()
    assert [attempt for attempt, *_ in seen] == [1, 2, 3, 1]


def test_without_a_limit_no_attempt_is_the_last():
    without_end.enqueue()
    deliver_all()
    assert seen == [(1, None, False)]


def test_the_context_tells_that_the_process_stops(monkeypatch):
    event = threading.Event()
    monkeypatch.setattr(stopping, "_event", event)
    script[:] = [lambda: seen.append(seen[0][0].stopping)] * 2
    with_context.enqueue()
    deliver_all()
    event.set()
    with_context.enqueue()
    deliver_all()
    assert [one for one in seen if isinstance(one, bool)] == [False, True]


# -- context.retry ----------------------------------------------------------------


def again(*arguments, **options):
    (context,) = seen[-1]
    context.progress(len(seen), 5)
    context.retry(*arguments, **options)


@pytest.mark.parametrize("kind", WITH_CONTEXT)
def test_a_task_that_asks_to_go_on_keeps_its_writes(kind, clock, settings):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "all"}
    script[:] = [lambda: again(30, reason="the next page"), lambda: again(datetime.timedelta(seconds=20))]
    worker = sub()
    result = WITH_CONTEXT[kind].enqueue()
    for passed, written in ((0, 1), (31, 2)):
        clock.advance(passed)
        attempted(result, worker)
        assert (result.status, result.errors, result.attempts) == (READY, [], 0)
        row, state = stored(result), DeliveryState.objects.get()
        assert abs(row.retry_at - state.invisible_until) < 1000
        assert (state.delivery_token, state.delivered_by, state.retry_count, state.acked) == (0, "", 0, False)
        assert row.retry_reason == ("the next page" if written == 1 else "")
        assert progress_of(result).done == written
        assert Effect.objects.count() == (written if kind == "atomic" else 0)
    clock.advance(21)
    attempted(result, worker)
    assert (result.status, result.return_value, result.attempts) == (SUCCESSFUL, "done", 1)
    assert Effect.objects.count() == (3 if kind == "atomic" else 0)
    assert QueueMessage.objects.count() == JobResult.objects.count() == 1
    assert list(DeliveryEvent.objects.order_by("pk").values_list("outcome", "error")) == [
        ("snoozed", "the next page"),
        ("snoozed", ""),
        ("acked", ""),
    ]


def test_what_the_task_does_after_it_counts():
    script[:] = [lambda: (again(), raised(KeyError("no"))), lambda: (again(60), again())]
    result = with_context.enqueue()
    assert [one.outcome for one in deliver_all(raise_exceptions=False)] == ["failed", "snoozed", "acked"]
    result.refresh()
    assert [one.exception_class for one in result.errors] == [KeyError]
    assert sorted(Effect.objects.values_list("value", flat=True)) == [1, 2]


@pytest.mark.servers_only
@pytest.mark.parametrize("kind", WITH_CONTEXT)
def test_a_stale_delivery_keeps_neither_the_writes_nor_the_wait(kind):
    """It was claimed again while the task ran, and the other subscriber has ended it."""
    result = WITH_CONTEXT[kind].enqueue()
    sequence()

    def other():
        lose()
        Sub(registry.handlers()[job_worlds.JOBS], name="b").settle()

    def overtaken():
        context = seen[0]
        in_thread(other)
        seen.append(context)
        again(30)

    script[:] = [overtaken]
    attempted(result)
    assert (result.status, result.return_value, result.attempts) == (SUCCESSFUL, "done", 2)
    assert stored(result).retry_at == 0
    assert Effect.objects.count() == (1 if kind == "atomic" else 0)


@pytest.mark.servers_only
def test_a_job_that_has_ended_meanwhile_is_not_called_again():
    """Its writes are rolled back, and its message is settled without a call."""
    result = with_context.enqueue()

    def ended():
        in_thread(lambda: JobResult.objects.filter(id=result.id).update(status="FAILED", finished_at=5))
        again(0)

    script[:] = [ended]
    attempted(result)
    lose()
    attempted(result)
    assert (result.status, Effect.objects.count(), len(seen)) == (FAILED, 0, 1)
    assert not DeliveryState.objects.filter(acked=False).exists()


@pytest.mark.parametrize("kind", WITH_CONTEXT)
def test_going_on_has_an_end_too(kind):
    """In the task, so that it can decide what to do then."""
    script[:] = [lambda: again(DAY / 2), lambda: again(DAY / 2)]
    result = WITH_CONTEXT[kind].enqueue()
    deliver_all()
    assert [one.outcome for one in deliver_all(advance=DAY / 2 + 60, raise_exceptions=False)] == ["failed", "acked"]
    result.refresh()
    (error,) = result.errors
    assert error.exception_class is exceptions.RetriedTooLong


@pytest.mark.parametrize("delay", [-1, float("nan"), "soon", 31 * DAY])
def test_a_wrong_delay_is_an_exception_in_the_task(delay):
    script[:] = [lambda: again(delay)]
    result = with_context.enqueue()
    assert [one.outcome for one in deliver_all(raise_exceptions=False)] == ["failed", "acked"]
    result.refresh()
    assert f"delay {delay!r}: must be a timedelta or seconds" in result.errors[0].traceback


def test_a_job_that_was_asked_to_stop_ends_where_it_would_go_on():
    result = with_context.enqueue()
    script[:] = [lambda: (cancel_job(with_context.get_result(result.id)), again(0))]
    attempted(result)
    attempted(result)
    assert (result.status, result.errors[-1].exception_class, len(seen)) == (FAILED, exceptions.JobCancelled, 1)


def test_a_job_of_a_chain_goes_on_before_the_next_stage():
    script[:] = [lambda: again(0)]
    (first,), (second,) = enqueue_chain(call(with_context), call(plain))
    deliver_all()
    first.refresh()
    second.refresh()
    assert (first.status, second.status, len(seen)) == (SUCCESSFUL, SUCCESSFUL, 3)
