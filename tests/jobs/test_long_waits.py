"""Jobs that wait for long, behind whose messages the watermark passes."""

from __future__ import annotations

import datetime
import time
from functools import partial

import pytest
from django.db import connection
from django.utils import timezone

from django_mysqlqueue import cancel, operations, reschedule
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import error_kinds, list_errors
from django_mysqlqueue.inspection.bounds import Bounds
from django_mysqlqueue.models import (
    ConsumerOffset,
    DeliveryState,
    JobResult,
    JobStage,
    Operation,
    OutboxMessage,
    QueueMessage,
    SubscriberHeartbeat,
)
from django_mysqlqueue.operations.limits import OperationLimits
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.tasks import RetryLater, call, cancel_job, enqueue_chain, enqueue_many, exceptions, job
from django_mysqlqueue.tasks.framework import TaskResultStatus
from django_mysqlqueue.testing import deliver_all
from tests.app import jobs
from tests.app.models import Effect
from tests.support import job_invariants, job_worlds
from tests.support.harness import USING, Sub, sequence
from tests.support.internals import Session, job_messages, job_rows, registry, retention, retrying, watermarks
from tests.support.tables import Tables

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

READY, FAILED, SUCCESSFUL = TaskResultStatus.READY, TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL
TOPIC = job_worlds.JOBS.topic
HOUR, DAY = 3600, 86_400
delays = []
"""What the next calls ask for."""
seen = []


@task
@job(max_attempts=9)
def patient(counts):
    seen.append(counts)
    if delays:
        raise RetryLater(delays.pop(0), reason="closed", counts=counts)
    return "done"


@task(takes_context=True)
def continued(context):
    Effect.objects.create(name="jobs", value=len(seen))
    seen.append(context.attempt)
    if delays:
        context.retry(delays.pop(0))


@task(takes_context=True)
@job(max_attempts=9, backoff={"initial": 3 * HOUR, "maximum": 3 * HOUR, "jitter": 0})
def failing(context, fails=True):
    seen.append((context.attempt, context.losses))
    if fails:
        raise KeyError


@task
@job(rate="1000/s")
def rated(number):
    if delays:
        raise RetryLater(delays.pop(0), counts=False)


@task(takes_context=True)
@job(atomic=False, max_attempts=9)
def asked(context, counts):
    cancel_job(asked.get_result(context.task_result.id))
    raise RetryLater(2 * HOUR, counts=counts)


@task(takes_context=True)
def asked_and_continued(context):
    cancel_job(asked_and_continued.get_result(context.task_result.id))
    context.retry(2 * HOUR)


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    jobs.log.clear()
    delays.clear()
    seen.clear()


def sub(name="a"):
    return Sub(registry.handlers()[job_worlds.JOBS], name=name, claim_size=500, prefetch=1000)


def worked(worker):
    sequence()
    worker.settle()
    return worker


def copies():
    return OutboxMessage.objects.filter(topic=TOPIC, deliver_at__gt=0)


def stored(result):
    return JobResult.objects.get(id=result.id)


def is_left():
    """Whether a message of the log is not settled."""
    place = ConsumerOffset.objects.get(topic=TOPIC)
    last = QueueMessage.objects.filter(topic=TOPIC).latest("offset")
    return place.offset_claimed < last.offset or DeliveryState.objects.filter(acked=False).exists()


def is_sound():
    """Nothing contradicts the results, and GC finds no job whose message is gone."""
    rows = JobResult.objects.exclude(status__in=["FAILED", "SUCCESSFUL"])
    assert not list(job_invariants.contradictions(Tables.read(USING), rows, JobStage.objects.all()))
    assert job_messages.end_some(USING).rows == 0
    assert job_messages.end_some(USING, after=job_messages.ResultPosition("RUNNING")).rows == 0


# -- the bound --------------------------------------------------------------------


@pytest.mark.promise("Jobs")
@pytest.mark.parametrize("priority", [0, 7])
@pytest.mark.parametrize(
    ("task", "first", "behind"),
    [(patient, [False], [False]), (failing, [], [False]), (continued, [], []), (rated, [0], [1])],
    ids=["snooze", "failure", "continued", "rated"],
)
def test_a_job_that_waits_for_a_day_keeps_no_rows_of_those_behind_it(clock, task, first, behind, priority):
    """Thousands of acks in its partition, whatever its lane: the watermark passes them all."""
    delays[:] = [DAY]
    task = task.using(priority=priority)
    enqueue_many([call(task, *first)])
    worker = worked(sub())
    for _ in range(4):
        enqueue_many(call(task, *behind) for _ in range(500))
        worked(worker)
        deadline = time.monotonic() + 60
        while is_left():  # The rate lets some start later, on a slow machine.
            assert time.monotonic() < deadline, "waited in vain"
            worked(worker)
        assert DeliveryState.objects.count() <= watermarks.LOOK_AHEAD
    keys = set(QueueMessage.objects.filter(topic=TOPIC).values_list("partition_key", flat=True))
    assert len(keys) == 1
    last = QueueMessage.objects.filter(topic=TOPIC).order_by("-offset").first()
    place = ConsumerOffset.objects.get(topic=TOPIC)
    assert place.offset_acked == place.offset_claimed == last.offset
    assert copies().count() == 1
    assert QueueMessage.objects.filter(topic=TOPIC).count() == 2001
    is_sound()


def test_a_short_wait_stays_where_it_is(clock):
    """Its row, and those of what is settled behind it, are there for a minute at most."""
    delays[:] = [60]
    patient.enqueue(False)
    worker = worked(sub())
    enqueue_many(call(patient, False) for _ in range(20))
    worked(worker)
    assert DeliveryState.objects.count() == 21
    assert not copies().exists()
    clock.advance(61)
    worked(worker)
    assert not DeliveryState.objects.exists()


# -- one job and one result -------------------------------------------------------


@pytest.mark.parametrize("counts", [True, False])
def test_it_runs_when_its_time_comes_with_its_attempts(clock, counts):
    delays[:] = [2 * HOUR, 30, 3 * HOUR]
    result = patient.enqueue(counts)
    worker = worked(sub())
    (copy,) = copies()
    original = QueueMessage.objects.get(topic=TOPIC)
    assert (copy.original_id, copy.original_offset, copy.target_group) == (result.id, original.offset, "jobs")
    assert (copy.failure_count, copy.partition_key) == (int(counts), original.partition_key)
    row = stored(result)
    assert (row.redriven_id, row.retry_reason) == (copy.message_id, "closed")
    assert abs(row.retry_at - copy.deliver_at) < 1000
    for passed, calls in ((HOUR, 1), (HOUR + 5, 2), (35, 3), (3 * HOUR - 60, 3), (70, 4)):
        is_sound()
        clock.advance(passed)
        worked(worker)
        assert len(seen) == calls
    result.refresh()
    assert (result.status, result.return_value, len(result.errors)) == (SUCCESSFUL, "done", 3 * counts)
    assert result.attempts == 1 + 3 * counts
    assert JobResult.objects.count() == 1
    assert not OutboxMessage.objects.exists()
    assert not DeliveryState.objects.exists()
    # One more for each long wait.
    assert QueueMessage.objects.filter(topic=TOPIC).count() == 3


def test_failures_and_losses_are_counted_across_copies(clock):
    result = failing.enqueue()
    worker = worked(sub())
    clock.advance(3 * HOUR + 1)
    sequence()
    sub("b").step()
    SubscriberHeartbeat.objects.all().delete()
    DeliveryState.objects.filter(acked=False).update(invisible_until=0)
    worked(worker)
    assert seen == [(1, 0), (2, 1)]
    assert copies().get().failure_count == 2
    clock.advance(3 * HOUR + 1)
    worked(worker)
    assert seen[-1] == (3, 1)
    result.refresh()
    assert (result.status, result.attempts) == (READY, 4)


def test_its_last_failure_is_dead_lettered_with_all_attempts(clock):
    """And a redrive of the dead letter begins from 1, as of any other."""
    delays[:] = [2 * HOUR] * 9
    result = patient.enqueue(True)
    worker = worked(sub())
    for _ in range(8):
        assert not QueueMessage.objects.filter(topic=f"{TOPIC}_dlq").exists()
        clock.advance(2 * HOUR + 1)
        worked(worker)
    sequence()
    letter = QueueMessage.objects.get(topic=f"{TOPIC}_dlq")
    assert (letter.failure_count, letter.original_id) == (9, result.id)
    result.refresh()
    assert (result.status, len(result.errors)) == (FAILED, 9)
    operations.redrive(TOPIC, actor="test")
    worked(worker)
    result.refresh()
    assert (result.status, result.attempts) == (SUCCESSFUL, 10)


def test_a_task_that_goes_on_much_later_keeps_its_writes(clock):
    delays[:] = [2 * HOUR, 2 * HOUR]
    result = continued.enqueue()
    worker = worked(sub())
    for number in (1, 2):
        assert Effect.objects.count() == number
        (copy,) = copies()
        assert (copy.failure_count, stored(result).redriven_id) == (0, copy.message_id)
        is_sound()
        clock.advance(2 * HOUR + 1)
        worked(worker)
    result.refresh()
    assert (result.status, seen, Effect.objects.count()) == (SUCCESSFUL, [1, 1, 1], 3)
    assert not DeliveryState.objects.exists()


def test_deliver_all_brings_it_nearer():
    delays[:] = [2 * HOUR]
    result = patient.enqueue(False)
    assert [one.outcome for one in deliver_all()] == ["snoozed"]
    assert deliver_all() == []
    (delivered,) = deliver_all(advance=2 * HOUR + 1)
    assert (delivered.id, delivered.attempt, delivered.outcome) == (result.id, 1, "acked")


def test_the_log_may_forget_the_message_that_waits(clock, settings):
    """GC deletes the original; the copy has all that it had."""
    settings.MYSQLQUEUE = {"TOPICS": {TOPIC: {"PARTITIONS": 1, "RETENTION": 1}}}
    delays[:] = [20 * HOUR]
    result = patient.enqueue(False)
    worker = worked(sub())
    clock.advance(10 * HOUR)
    list(retention.steps(USING))
    assert not QueueMessage.objects.filter(topic=TOPIC).exists()
    is_sound()
    clock.advance(10 * HOUR + 1)
    worked(worker)
    result.refresh()
    assert (result.status, result.return_value) == (SUCCESSFUL, "done")


def test_a_job_of_a_chain_may_wait_for_long(clock):
    delays[:] = [2 * HOUR]
    (first,), (second,) = enqueue_chain(call(patient, False), call(jobs.add, 1))
    worker = worked(sub())
    is_sound()
    clock.advance(2 * HOUR + 1)
    worked(worker)
    worked(worker)
    first.refresh()
    second.refresh()
    assert (first.status, second.status) == (SUCCESSFUL, SUCCESSFUL)


# -- what does not move -----------------------------------------------------------


def test_a_message_with_a_coalesce_key_stays(clock):
    """A copy would not be superseded any more."""
    delays[:] = [2 * HOUR]
    patient.enqueue(False)
    OutboxMessage.objects.update(coalesce_key="k:c")
    worker = worked(sub())
    assert DeliveryState.objects.get(acked=False).invisible_until
    assert not copies().exists()
    assert stored(JobResult.objects.get()).redriven_id == ""
    clock.advance(2 * HOUR + 1)
    worked(worker)
    assert JobResult.objects.get().status == "SUCCESSFUL"


def test_a_message_that_was_deleted_stays_a_row(clock):
    """Its job ends as that of any deleted message."""
    delays[:] = [2 * HOUR]
    patient.enqueue(False)
    sequence()
    worker = sub().step()
    QueueMessage.objects.all().delete()
    worker.work()
    worker.flush()
    assert not OutboxMessage.objects.exists()
    assert DeliveryState.objects.get(acked=False).invisible_until


# -- cancelling, seeking and dropping ---------------------------------------------


def cancelled_by_caller(result):
    cancel_job(result)


def cancelled_by_operator(result):
    operations.cancel(TOPIC, [result.id], actor="test")


def cancelled_as_a_message(result):
    assert cancel(result.id, topic=TOPIC) == 1


@pytest.mark.parametrize("how", [cancelled_by_caller, cancelled_by_operator, cancelled_as_a_message])
def test_cancelling_it_deletes_its_copy(clock, how):
    """Otherwise it would run when its result has been deleted."""
    delays[:] = [2 * HOUR]
    result = patient.enqueue(False)
    worker = worked(sub())
    how(result)
    result.refresh()
    assert (result.status, result.errors[-1].exception_class) == (FAILED, exceptions.JobCancelled)
    assert not OutboxMessage.objects.exists()
    JobResult.objects.all().delete()
    clock.advance(2 * HOUR + 1)
    worked(worker)
    assert len(seen) == 1
    with pytest.raises(OperationRefused):
        operations.cancel(TOPIC, [result.id], actor="test")


@pytest.mark.parametrize("counts", [True, False])
def test_a_job_that_is_asked_to_stop_while_its_wait_is_written_does_not_wait_for_long(clock, monkeypatch, counts):
    found, reads = job_rows.cancel_requested, []

    def read(*args, **options):
        reads.append(found(*args, **options))
        return reads[-1] if len(reads) > 1 else set()  # As before the cancel has committed.

    [result] = enqueue_many([call(asked, counts)])
    monkeypatch.setattr(job_rows, "cancel_requested", read)
    worker = worked(sub())
    assert reads == [{result.id}] * 3, "before, after, and again"
    worked(worker)
    result.refresh()
    assert (result.status, result.errors[-1].exception_class) == (FAILED, exceptions.JobCancelled)


@pytest.mark.parametrize(
    "make", [lambda: call(asked, True), lambda: call(asked, False), lambda: call(asked_and_continued)]
)
def test_a_job_that_was_asked_to_stop_does_not_wait_for_long(clock, make):
    """Nobody has told its task: it has not asked."""
    [result] = enqueue_many([make()])
    worker = worked(sub())
    worked(worker)
    result.refresh()
    assert (result.status, result.errors[-1].exception_class) == (FAILED, exceptions.JobCancelled)
    assert not OutboxMessage.objects.exists()
    is_sound()


def test_an_operator_lets_it_run_now(clock):
    delays[:] = [2 * HOUR]
    result = patient.enqueue(False)
    worker = worked(sub())
    operations.reschedule(TOPIC, [result.id], None, actor="test")
    worked(worker)
    result.refresh()
    assert (result.status, len(seen)) == (SUCCESSFUL, 2)


def test_a_seek_to_the_end_does_not_skip_it(clock):
    """It is not in the log yet, as a scheduled message."""
    delays[:] = [2 * HOUR]
    result = patient.enqueue(False)
    worker = worked(sub())
    operations.seek("jobs", TOPIC, "latest", actor="test")
    is_sound()
    clock.advance(2 * HOUR + 1)
    worked(worker)
    result.refresh()
    assert result.status == SUCCESSFUL


@pytest.mark.parametrize("again", [False, True])
def test_a_seek_back_does_not_run_it_twice(clock, again):
    """The message of the attempt before is delivered again: only the one that waits runs the job."""
    delays[:] = [2 * HOUR, 2 * HOUR]
    result = patient.enqueue(True)
    worker = worked(sub())
    if again:
        clock.advance(2 * HOUR + 1)
        worker.beat()
        worked(worker)
    calls = len(seen)
    delays.clear()
    operations.seek("jobs", TOPIC, "earliest", actor="test")
    clock.advance(2 * HOUR - 1)
    worker.beat()
    worker.step()  # It has claimed the earlier message when the other one comes due.
    clock.advance(2)
    other = sub("b")
    worked(other)
    worker.beat()
    worker.settle()
    result.refresh()
    assert (result.status, len(seen), len(result.errors)) == (SUCCESSFUL, calls + 1, calls)
    assert not copies().exists()
    assert not is_left()
    is_sound()


def test_a_seek_back_leaves_it_waiting(clock):
    delays[:] = [2 * HOUR] * 2
    result = patient.enqueue(True)
    worker = worked(sub())
    operations.seek("jobs", TOPIC, "earliest", actor="test")
    worked(worker)
    assert (stored(result).status, copies().count(), len(seen)) == ("READY", 1, 1)
    assert not is_left()
    is_sound()


@pytest.mark.servers_only
def test_a_million_results_are_not_searched_for_it(clock):
    """While its time has not come, nothing but its result is read."""
    delays[:] = [2 * HOUR]
    patient.enqueue(False)
    worked(sub())
    QueueMessage.objects.all().delete()
    with connection.execute_wrapper(_no_outbox):
        assert job_messages.end_some(USING).rows == 0


def _no_outbox(execute, sql, params, many, context):
    assert "queue_outbox" not in sql
    return execute(sql, params, many, context)


# -- an operator retries them -----------------------------------------------------


def waiting(*waits):
    """A subscriber whose jobs wait for some seconds, and the jobs."""
    delays[:] = waits
    made = [patient.enqueue(True) for _ in waits]
    return worked(sub()), made


@pytest.mark.parametrize("named", [{}, {"ids": 0}, {"offsets": 0}])
def test_retry_makes_them_due(clock, named):
    worker, made = waiting(2 * HOUR, 3 * HOUR)
    if named:
        offset = copies().get(original_id=made[0].id).original_offset
        named = {"ids": [made[0].id]} if "ids" in named else {"offsets": [offset]}
    number = 1 if named else 2
    planned = operations.retry("jobs", TOPIC, **named, actor="test", dry_run=True)
    assert (planned.planned, copies().filter(deliver_at__gt=1).count()) == (number, 2)
    assert operations.retry("jobs", TOPIC, **named, actor="test").changed == number
    assert {stored(one).retry_at for one in made[:number]} == {1}
    worked(worker)
    assert [stored(one).status for one in made] == [SUCCESSFUL, SUCCESSFUL if number == 2 else READY]
    assert len(seen) == 2 + number
    record = Operation.objects.get()
    assert (record.action, record.changed, record.total) == ("retry", number, number if named else 0)


def test_retry_at_another_time_and_from_the_first_attempt(clock):
    worker, (result,) = waiting(2 * HOUR)
    at = copies().get().deliver_at + HOUR * 1000
    moment = datetime.datetime.fromtimestamp(at / 1000, datetime.UTC)
    done = operations.retry("jobs", TOPIC, at=moment, reset_attempts=True, actor="test")
    assert done.changed == 1
    copy = copies().get()
    assert (copy.deliver_at, copy.failure_count, stored(result).retry_at) == (at, 0, at)
    assert operations.retry("jobs", TOPIC, at=moment, actor="test", dry_run=True).planned == 0
    clock.advance(2 * HOUR + 60)
    worked(worker)
    assert seen == [True]
    clock.advance(HOUR)
    worked(worker)
    assert seen == [True, True]


def test_retry_by_the_last_error(clock):
    worker, (result,) = waiting(2 * HOUR)
    with pytest.raises(OperationRefused, match="are not waiting"):
        operations.retry("jobs", TOPIC, ids=["none"], actor="test")
    for text, number in (("none has it", 0), ("closed", 1)):
        assert operations.retry("jobs", TOPIC, error=text, actor="test", dry_run=True).planned == number
        assert operations.retry("jobs", TOPIC, error=text, actor="test").changed == number
    worked(worker)
    assert stored(result).status == SUCCESSFUL


def test_retry_in_small_transactions(db):
    waiting(*[2 * HOUR] * 5)
    assert retrying.make_due(USING, job_worlds.JOBS, actor="test", limits=OperationLimits(jobs=2)) == 5
    assert set(copies().values_list("deliver_at", flat=True)) == {1}


def test_retry_leaves_scheduled_jobs(db):
    sub()
    patient.using(run_after=timezone.now() + datetime.timedelta(hours=1)).enqueue(True)
    assert operations.retry("jobs", TOPIC, actor="test", dry_run=True).planned == 0
    assert retrying.make_due(USING, job_worlds.JOBS, actor="test") == 0


def test_a_retry_in_place_and_a_reschedule_change_the_time_of_the_result(clock):
    _, (short, long) = waiting(50, 2 * HOUR)
    clock.stop()
    assert operations.retry("jobs", TOPIC, ids=[short.id], actor="test").changed == 1
    assert stored(short).retry_at == 1
    assert reschedule(long.id, topic=TOPIC, delay=HOUR) == 1
    assert stored(long).retry_at == copies().get().deliver_at == Session(USING).now() + HOUR * 1000
    at = datetime.datetime.fromtimestamp(copies().get().deliver_at / 1000 + 60, datetime.UTC)
    operations.reschedule(TOPIC, [long.id], at, actor="test")
    assert stored(long).retry_at == copies().get().deliver_at


@pytest.mark.parametrize("recorded", ["all", "failures", "none"])
def test_errors_by_kind_have_them(clock, settings, recorded):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "RECORD_DELIVERIES": recorded}
    worker, made = waiting(2 * HOUR, 3 * HOUR, 50)
    (kind,) = list_errors(group="jobs").kinds
    assert kind.text.endswith(" s: closed")
    assert (kind.retrying, kind.attempts.value, kind.states) == (Count(3), 3, ("retrying",))
    assert kind.tasks == ("tests.jobs.test_long_waits.patient",)
    assert kind.first_at <= kind.last_at <= Session(USING).now()
    assert list_errors(group="another").kinds == ()
    (kind,) = list_errors(bounds=Bounds(scheduled=1)).kinds
    assert str(kind.retrying) == "2+"
    offsets = sorted([*copies().values_list("original_offset", flat=True), held_at()])
    of_kind = partial(error_kinds.retrying_of_kind, Session(USING), job_worlds.JOBS, shown=error_kinds.whole_line)
    assert of_kind(kind.text) == (offsets, True)
    assert of_kind(kind.text, moved=False) == ([held_at()], True)
    assert of_kind("another") == ([], True)
    assert of_kind(kind.text, bounds=Bounds(scheduled=1))[1] is False
    assert operations.retry("jobs", TOPIC, offsets=offsets, missing_ok=True, actor="test").changed == 3
    worked(worker)
    assert {stored(one).status for one in made} == {SUCCESSFUL}


def held_at():
    return DeliveryState.objects.get(acked=False).message_offset


def test_errors_by_kind_leave_jobs_that_have_not_failed(clock):
    delays[:] = [2 * HOUR]
    continued.enqueue()
    worked(sub())
    assert copies().exists()
    assert list_errors().kinds == ()
