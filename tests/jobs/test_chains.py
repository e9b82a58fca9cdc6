"""Chains of jobs: each stage starts once, when all jobs of the one before have succeeded."""

from __future__ import annotations

import datetime

import pytest
from django.db import transaction
from django.utils import timezone

from django_mysqlqueue import operations
from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.models import JobResult, JobStage, OutboxMessage, QueueMessage
from django_mysqlqueue.tasks import backend, call, cancel_job, enqueue_chain, enqueue_many, exceptions
from django_mysqlqueue.tasks.framework import InvalidTask, TaskResultDoesNotExist, TaskResultStatus, task_enqueued
from django_mysqlqueue.testing import deliver_all
from tests.app import jobs
from tests.support import job_worlds
from tests.support.harness import USING, Sub, sequence
from tests.support.internals import JobEnd, JobEnds, job_results, job_stages, registry, run

READY, FAILED, SUCCESSFUL = TaskResultStatus.READY, TaskResultStatus.FAILED, TaskResultStatus.SUCCESSFUL


def configure(settings, **options):
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["default", "mail"], "OPTIONS": options}}


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    configure(settings)
    jobs.log.clear()


def statuses(stages):
    for stage in stages:
        for result in stage:
            result.refresh()
    return [[str(result.status) for result in stage] for stage in stages]


def turn():
    """Runs each job that is in the log, once."""
    sequence()
    worker = Sub(registry.handlers()[job_worlds.JOBS], name="a")
    worker.step()
    worker.work()
    worker.flush()
    worker.leave()


def test_stages_run_one_after_another():
    stages = enqueue_chain([call(jobs.add, number) for number in range(3)], call(jobs.add, 10), call(jobs.add, 20, b=2))
    assert statuses(stages) == [["READY"] * 3, ["READY"], ["READY"]]
    assert OutboxMessage.objects.count() == 3
    deliver_all()
    assert statuses(stages) == [["SUCCESSFUL"] * 3, ["SUCCESSFUL"], ["SUCCESSFUL"]]
    assert sorted(jobs.log[:3]) == [(0, 1), (1, 1), (2, 1)]
    assert jobs.log[3:] == [(10, 1), (20, 2)]
    assert set(JobStage.objects.values_list("remaining", flat=True)) == {0}


def test_a_task_reads_the_results_of_the_stage_before():
    stages = enqueue_chain([call(jobs.add, number) for number in (5, 3, 9)], call(jobs.gather), call(jobs.gather))
    deliver_all()
    assert statuses(stages)[1:] == [["SUCCESSFUL"]] * 2
    assert [stage[0].return_value for stage in stages[1:]] == [[6, 4, 10], [[6, 4, 10]]]


def test_outside_a_chain_there_is_no_stage_before():
    result = jobs.gather.enqueue()
    deliver_all()
    result.refresh()
    assert result.return_value == []


def test_a_chain_of_atomic_and_other_jobs_over_queues():
    plain = call(jobs.plain.using(queue_name="mail"), 1)
    stages = enqueue_chain([plain, call(jobs.write, 2)], [call(jobs.nap.using(queue_name="mail"), 0.0)], plain)
    deliver_all()
    assert statuses(stages) == [["SUCCESSFUL"] * 2, ["SUCCESSFUL"], ["SUCCESSFUL"]]


def test_a_job_that_is_retried_delays_the_next_stage(settings):
    configure(settings, MAX_ATTEMPTS=2, BACKOFF={"initial": 60, "jitter": 0})
    stages = enqueue_chain([call(jobs.fail, 1), call(jobs.add, 1)], call(jobs.add, 2))
    turn()
    assert statuses(stages) == [["READY", "SUCCESSFUL"], ["READY"]]
    assert JobStage.objects.get(following__gt="").remaining == 1


def test_a_failure_ends_all_later_stages():
    stages = enqueue_chain([call(jobs.add, 1), call(jobs.fail, 1)], [call(jobs.add, 2)], [call(jobs.add, 3)])
    deliver_all(raise_exceptions=False)
    assert statuses(stages) == [["SUCCESSFUL", "FAILED"], ["FAILED"], ["FAILED"]]
    for stage in stages[1:]:
        (error,) = stage[0].errors
        assert error.exception_class is exceptions.EarlierJobFailed
        assert stages[0][1].id in error.traceback
    assert jobs.log == [(1, 1)]


def test_after_a_redrive_the_chain_continues(monkeypatch):
    stages = enqueue_chain([call(jobs.fail, 1), call(jobs.fail, 2)], call(jobs.add, 2), call(jobs.add, 3))
    deliver_all(raise_exceptions=False)
    assert statuses(stages) == [["FAILED"] * 2, ["FAILED"], ["FAILED"]]
    rows = QueueMessage.objects.filter(topic="jobs.default_dlq").order_by("offset")
    first, second = rows.values_list("offset", flat=True)
    monkeypatch.setattr(jobs.fail.func, "__code__", (lambda number=0: number).__code__)
    operations.redrive("jobs.default", offsets=[first], actor="ops")
    assert statuses(stages) == [["READY", "FAILED"], ["FAILED"], ["FAILED"]], "another job still fails the chain"
    deliver_all()
    assert statuses(stages) == [["SUCCESSFUL", "FAILED"], ["FAILED"], ["FAILED"]]
    operations.redrive("jobs.default", offsets=[second], actor="ops")
    assert statuses(stages) == [["SUCCESSFUL", "READY"], ["READY"], ["READY"]]
    deliver_all()
    assert statuses(stages) == [["SUCCESSFUL"] * 2, ["SUCCESSFUL"], ["SUCCESSFUL"]]
    assert jobs.log == [(2, 1), (3, 1)]


def test_a_chain_with_a_job_whose_result_is_gone_does_not_wait_again(monkeypatch):
    """It could never end: the later stages would be READY for ever."""
    stages = enqueue_chain(call(jobs.fail, 1), [call(jobs.add, 2), call(jobs.add, 3)], call(jobs.add, 4))
    deliver_all(raise_exceptions=False)
    JobResult.objects.filter(id=stages[1][0].id).delete()
    monkeypatch.setattr(jobs.fail.func, "__code__", (lambda number=0: number).__code__)
    operations.redrive("jobs.default", offsets=[QueueMessage.objects.get(topic="jobs.default_dlq").offset], actor="ops")
    deliver_all()
    del stages[1][0]
    assert statuses(stages) == [["SUCCESSFUL"], ["SUCCESSFUL"], ["FAILED"]]


def test_cancelling_a_job_ends_the_later_stages():
    stages = enqueue_chain(call(jobs.add, 1), [call(jobs.add, 2), call(jobs.add, 3)], call(jobs.add, 4))
    cancel_job(stages[1][0])
    assert statuses(stages) == [["READY"], ["FAILED", "READY"], ["FAILED"]]
    deliver_all()
    assert statuses(stages) == [["SUCCESSFUL"], ["FAILED", "SUCCESSFUL"], ["FAILED"]]
    assert jobs.log == [(1, 1), (3, 1)]


def test_the_times_of_later_stages_are_kept():
    at = timezone.now() + datetime.timedelta(hours=1)
    stages = enqueue_chain(call(jobs.add, 1), call(jobs.add.using(run_after=at, priority=7), 2))
    deliver_all()
    assert statuses(stages) == [["SUCCESSFUL"], ["READY"]]
    (row,) = OutboxMessage.objects.filter(message_id=stages[1][0].id)
    assert abs(row.deliver_at - at.timestamp() * 1000) < 1
    deliver_all(advance=3601)
    assert statuses(stages)[1] == ["SUCCESSFUL"]


def test_a_chain_commits_with_the_callers_transaction():
    received = []
    task_enqueued.connect(lambda task_result, **kwargs: received.append(task_result.id), weak=False, dispatch_uid="x")
    try:
        with transaction.atomic():
            enqueue_chain(call(jobs.add, 1), call(jobs.add, 2))
            transaction.set_rollback(True)
    finally:
        task_enqueued.disconnect(dispatch_uid="x")
    assert len(received) == 2
    assert not JobResult.objects.exists()
    assert not JobStage.objects.exists()
    assert not OutboxMessage.objects.exists()


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ([], "The tasks must have one backend, not none"),
        ([[], []], "The tasks must have one backend, not none"),
        ([call(jobs.add, 1), []], "A stage of the chain has no jobs"),
        (
            [call(jobs.add, 1), call(jobs.alone, 1)],
            "tests.app.jobs.alone is unique: its jobs cannot be part of a chain",
        ),
    ],
)
def test_invalid_chains(stages, text):
    with pytest.raises(InvalidTask, match=text):
        enqueue_chain(*stages)
    assert not JobResult.objects.exists()


@pytest.mark.parametrize("calls", [[jobs.add], [(jobs.add, [1], {})], jobs.add, 5])
def test_what_is_no_call(calls):
    for function in (enqueue_many, enqueue_chain):
        with pytest.raises(InvalidTask, match=r"is not a call: use call\(task"):
            function(calls)


def test_one_call_is_a_list_of_one():
    assert [result.args for result in enqueue_many(call(jobs.add, 1))] == [[1]]


def test_other_backends_have_no_chains(settings):
    settings.TASKS = {"default": {"BACKEND": "django_tasks.backends.dummy.DummyBackend"}}
    with pytest.raises(InvalidTask, match="The backend 'default' of TASKS is not a MySQLQueueBackend"):
        enqueue_many([call(jobs.add, 1)])


def test_a_later_stage_that_could_not_be_published_is_refused_at_once(settings):
    settings.MYSQLQUEUE = {"MAX_PAYLOAD_BYTES": 1000}
    with pytest.raises(InvalidMessage, match="payload"):
        enqueue_chain(call(jobs.add, 1), call(jobs.add, "x" * 1000))
    assert not JobResult.objects.exists()


def test_a_limit_that_was_lowered_meanwhile_fails_the_later_stage(settings):
    """It does not wedge the outcome of the earlier job."""
    stages = enqueue_chain(call(jobs.add, 1), call(jobs.add, "x" * 2000), call(jobs.add, 3))
    settings.MYSQLQUEUE = {"MAX_PAYLOAD_BYTES": 1000}
    deliver_all()
    assert statuses(stages) == [["SUCCESSFUL"], ["FAILED"], ["FAILED"]]
    assert stages[1][0].errors[0].exception_class is exceptions.InvalidJob


def test_enqueue_many():
    results = enqueue_many(call(jobs.add, number) for number in range(5))
    deliver_all()
    assert statuses([results]) == [["SUCCESSFUL"] * 5]
    assert [result.return_value for result in results] == [1, 2, 3, 4, 5]
    assert enqueue_many([]) == []
    assert not JobStage.objects.exists()


def test_a_stage_is_deleted_with_the_last_of_its_results():
    enqueue_chain([call(jobs.add, 1), call(jobs.add, 2)], call(jobs.add, 3))
    deliver_all()
    JobResult.objects.filter(arguments__contains="[1]").update(finished_at=1)
    assert job_results.collect("default") == 1
    assert sorted(JobStage.objects.values_list("kept", flat=True)) == [1, 1]
    JobResult.objects.update(finished_at=1)
    assert job_results.collect("default") == 2
    assert not JobStage.objects.exists()


def test_chains_have_limits(monkeypatch):
    monkeypatch.setattr(backend, "MOST_STAGES", 2)
    monkeypatch.setattr(backend, "MOST_STAGE_JOBS", 3)
    one = call(jobs.add, 1)
    with pytest.raises(InvalidTask, match="The chain has 3 stages, but at most 2 are allowed"):
        enqueue_chain(one, one, one)
    with pytest.raises(InvalidTask, match="A stage of the chain has 4 jobs, but at most 3 are allowed"):
        enqueue_chain([one] * 4)
    assert not JobResult.objects.exists()
    enqueue_chain([one] * 3, one)


def test_a_large_chain():
    """More jobs than one statement takes."""
    stages = enqueue_chain([call(jobs.add, 0)], [call(jobs.add, number) for number in range(1500)], call(jobs.add, -1))
    deliver_all()
    assert JobResult.objects.filter(status="SUCCESSFUL").count() == 1502
    assert jobs.log[-1] == (-1, 1)
    stages[2][0].refresh()
    assert stages[2][0].status == SUCCESSFUL


def test_ids_of_stages():
    assert job_stages.stage_id("c", 3) == "c:0003"
    assert job_stages.stage_id("c", 12345) == "c:12345"
    assert job_stages.job_id("c:0003", 5) == "c:0003:0005"


@pytest.mark.parametrize("model", [JobStage, JobResult])
def test_results_of_an_earlier_stage_that_are_gone(model):
    """A part of them could be taken for all."""
    stages = enqueue_chain([call(jobs.add, 1), call(jobs.add, 2)], call(jobs.gather))
    turn()
    rows = (
        JobStage.objects.filter(following__gt="") if model is JobStage else JobResult.objects.filter(id=stages[0][1].id)
    )
    rows.delete()
    deliver_all(raise_exceptions=False)
    stages[1][0].refresh()
    assert stages[1][0].errors[-1].exception_class is TaskResultDoesNotExist


def test_two_ends_of_a_job_in_one_flush():
    """Of a job with two messages: it counts once, and what comes after its end changes nothing."""
    one, _ = enqueue_chain([call(jobs.add, 1), call(jobs.add, 2)], call(jobs.add, 3))
    first, second = (JobResult.objects.get(id=result.id) for result in one)
    ends = [JobEnd(first.id, stage=first.stage)] * 2
    run(USING, lambda session: job_results.follow(session, JobEnds([(end, "SUCCESSFUL") for end in ends])))
    assert JobStage.objects.get(id=first.stage).remaining == 1
    ends = [(JobEnd(second.id, stage=second.stage), status) for status in ("FAILED", "READY")]
    run(USING, lambda session: job_results.follow(session, JobEnds(ends)))
    assert sorted(JobResult.objects.values_list("status", flat=True)) == ["FAILED", "FAILED", "SUCCESSFUL"]


@pytest.mark.parametrize("released", [True, False])
def test_a_job_that_is_ready_again_ends_with_the_stage_before(released):
    """In one transaction."""
    [first], [later] = enqueue_chain(call(jobs.add, 1), call(jobs.add, 2))
    JobResult.objects.filter(id=later.id).update(status="RUNNING", worker_ids="w\n")
    stage = JobResult.objects.get(id=later.id).stage
    made = JobEnds(reasons={first.id: ("JobExpired", "")})
    if released:
        made.released[later.id] = "w"
    else:
        made.ends.append((JobEnd(later.id, stage=stage), "READY"))
    run(USING, lambda session: job_results.follow(session, made))
    later.refresh()
    assert (later.status, later.errors[-1].exception_class) == (FAILED, exceptions.EarlierJobFailed)


# -- exactly when -------------------------------------------------------------


def follow(*ends):
    """Stores the ends of jobs in one transaction, as a flush does."""
    rows = JobResult.objects.in_bulk([result.id for result, _ in ends])
    made = [(JobEnd(result.id, stage=rows[result.id].stage), status) for result, status in ends]
    run(USING, lambda session: job_results.follow(session, JobEnds(made)))


def published(*results):
    """Which jobs have messages."""
    ids = set(OutboxMessage.objects.values_list("message_id", flat=True))
    return [result.id in ids for result in results]


def test_a_stage_is_published_with_the_last_end_of_the_one_before():
    one, [later] = enqueue_chain([call(jobs.add, number) for number in range(3)], call(jobs.add, 3))
    follow((one[0], "SUCCESSFUL"))
    follow((one[1], "SUCCESSFUL"))
    assert published(later) == [False]
    follow((one[1], "SUCCESSFUL"))
    assert published(later) == [False], "it had ended"
    follow((one[2], "SUCCESSFUL"))
    assert published(later) == [True]


def test_a_success_and_a_failure_in_one_flush():
    one, [later] = enqueue_chain([call(jobs.add, 1), call(jobs.add, 2)], call(jobs.add, 3))
    follow((one[0], "SUCCESSFUL"), (one[1], "FAILED"))
    assert (statuses([[later]]), published(later)) == ([["FAILED"]], [False])


def test_jobs_of_a_later_stage_that_have_ended_stay_as_they_are():
    """They were cancelled."""
    [first], later, [last] = enqueue_chain(call(jobs.add, 1), [call(jobs.add, 2), call(jobs.add, 3)], call(jobs.add, 4))
    cancel_job(later[0])
    follow((first, "SUCCESSFUL"))
    assert published(*later, last) == [False, True, False]
    assert statuses([later, [last]]) == [["FAILED", "READY"], ["FAILED"]]


def test_cancelled_jobs_are_not_revived():
    [first], later, [last] = enqueue_chain(call(jobs.add, 1), [call(jobs.add, 2), call(jobs.add, 3)], call(jobs.add, 4))
    cancel_job(later[0])
    follow((first, "FAILED"))
    assert len(JobResult.objects.get(id=later[0].id).errors.splitlines()) == 1, "it had ended"
    JobResult.objects.filter(id=first.id).update(cancel_requested_at=5, progress='{"done": 1}')

    run(USING, lambda session: job_results.restart(session, {first.id: ""}))
    assert statuses([[first], later, [last]]) == [["READY"], ["FAILED", "READY"], ["FAILED"]]
    row = JobResult.objects.get(id=first.id)
    assert (row.cancel_requested_at, row.progress, row.finished_at) == (0, "", 0)


def test_the_queues_of_a_chain_are_in_one_database(monkeypatch):
    monkeypatch.setattr(backend, "queue_alias", lambda topic: topic)
    with pytest.raises(InvalidTask, match=r"in several databases: jobs.default, jobs.mail"):
        enqueue_chain(call(jobs.add, 1), call(jobs.add.using(queue_name="mail"), 2))
