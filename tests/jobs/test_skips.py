"""Jobs whose messages can no longer run end, and no other job does."""

from __future__ import annotations

import datetime
from itertools import count

import pytest
from django.db import connection, transaction
from django.utils import timezone

from django_mysqlqueue import operations, publish, reschedule
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import (
    ConsumerGroup,
    DeliveryState,
    JobResult,
    OutboxMessage,
    QuarantinedMessage,
    QueueMessage,
    Schedule,
)
from django_mysqlqueue.operations import dropping
from django_mysqlqueue.operations.limits import OperationLimits
from django_mysqlqueue.tasks import call, cancel_job, enqueue_chain, wait
from django_mysqlqueue.tasks.framework import task_backends
from django_mysqlqueue.testing import deliver_all
from tests.app import jobs
from tests.app.models import Effect
from tests.support import job_worlds
from tests.support.commands import run
from tests.support.harness import USING, Sub, handler, in_thread, sequence
from tests.support.internals import Session, groups, job_messages, pruning, registry
from tests.support.schedule_worlds import of_task, registered, tick

pytestmark = [pytest.mark.promise("Jobs")]
JOBS = job_worlds.JOBS


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    jobs.log.clear()


@pytest.fixture
def interrupted(monkeypatch):
    """Operations end before they have ended the jobs."""
    monkeypatch.setattr("tests.support.internals.job_messages.end_all", lambda *args, **options: None)


def worker(name="a"):
    return Sub(registry.handlers()[JOBS], name=name)


def register():
    worker().leave()
    sequence()


def seek(position="latest", **how):
    operations.seek(*JOBS, *([] if "time" in how else [position]), actor="ops", **how)


def gc():
    return sum(step.rows for step in pruning.prune(USING) if step.kind == "ended_jobs")


def end_of(result):
    """The status of a job, and the exception with which it has ended."""
    row = JobResult.objects.get(id=result.id)
    errors = task_backends["default"].get_result(result.id).errors
    return str(row.status), errors[-1].exception_class_path.rpartition(".")[2] if errors else None


def ends(*results):
    return [end_of(result) for result in results]


SKIPPED, DELETED = ("FAILED", "JobSkipped"), ("FAILED", "JobDeleted")
WAITS = ("READY", None)


def by_offset():
    seek(QueueMessage.objects.latest("offset").offset)


def by_time():
    seek(time=timezone.now() + datetime.timedelta(hours=1))


def drop():
    operations.drop_group(*JOBS, actor="ops")


def delete_row():
    QueueMessage.objects.filter(offset=QueueMessage.objects.earliest("offset").offset).delete()
    gc()


def delete_from_outbox():
    OutboxMessage.objects.all().delete()
    gc()


HOWS = {"latest": seek, "offset": by_offset, "time": by_time, "drop": drop, "deleted": delete_row}


# -- what ends ----------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
def test_a_job_whose_message_is_skipped_ends(how):
    first = jobs.add.enqueue(1)
    register()
    last = jobs.add.enqueue(2)
    sequence()
    HOWS[how]()
    wait(first, timeout=0.1)
    assert end_of(first) == (DELETED if how == "deleted" else SKIPPED)
    assert end_of(last) == (SKIPPED if how in ("latest", "time", "drop") else WAITS)
    deliver_all()
    assert jobs.log == ([] if how in ("latest", "time") else [(1, 1), (2, 1)] if how == "drop" else [(2, 1)])


@pytest.mark.parametrize("how", HOWS)
def test_the_later_stages_of_its_chain_end(how):
    stages = enqueue_chain(call(jobs.add, 1), [call(jobs.add, 2), call(jobs.add, 3)], call(jobs.add, 4))
    register()
    HOWS[how]()
    first, *later = [result for stage in stages for result in stage]
    assert end_of(first) == (DELETED if how == "deleted" else SKIPPED if how != "offset" else WAITS)
    assert ends(*later) == [WAITS if how == "offset" else ("FAILED", "EarlierJobFailed")] * 3


def test_a_job_that_never_reached_the_log_ends():
    result = jobs.add.enqueue(1)
    delete_from_outbox()
    assert end_of(result) == DELETED


def test_a_job_that_is_in_flight_is_rolled_back(monkeypatch):
    """Its task commits after the seek has ended it: that is too late."""
    result = jobs.write.enqueue(1)
    sequence()
    one = worker().step()
    seek()
    assert end_of(result) == SKIPPED
    one.work()
    one.flush()
    assert end_of(result) == SKIPPED
    assert not Effect.objects.exists()


def test_a_job_that_has_failed_before_keeps_its_errors():
    result = jobs.fail_thrice.enqueue()
    sequence()
    one = worker().step()
    one.work()
    one.flush()
    seek()
    assert [
        error.exception_class_path.rpartition(".")[2] for error in task_backends["default"].get_result(result.id).errors
    ] == ["KeyError", "JobSkipped"]


@pytest.mark.parametrize("is_in_log", [True, False])
def test_a_redriven_job_ends_if_its_new_message_does(is_in_log):
    result = jobs.fail.enqueue()
    deliver_all(raise_exceptions=False)
    operations.redrive(JOBS.topic, actor="ops")
    if is_in_log:
        sequence()
    assert gc() == 0
    assert end_of(result)[0] == "READY"
    if is_in_log:
        seek()
        assert end_of(result) == SKIPPED
    else:
        OutboxMessage.objects.all().delete()
        assert gc() == 1
        assert end_of(result) == SKIPPED, "its first message is in the log, and settled"


def test_a_redriven_job_whose_result_was_deleted_is_not_ended_while_it_runs(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "database", "missing")
        result = jobs.write.enqueue(1)
        deliver_all(raise_exceptions=False)
    assert end_of(result)[0] == "FAILED"
    JobResult.objects.all().delete()
    operations.redrive(JOBS.topic, actor="ops")
    sequence()
    one = worker().step()
    assert end_of(result)[0] == "RUNNING"
    assert gc() == 0
    one.work()
    one.flush()
    assert end_of(result) == ("SUCCESSFUL", None)
    assert Effect.objects.count() == 1


def test_a_dropped_queue_that_is_registered_again_runs_what_is_in_its_log():
    result = jobs.add.enqueue(1)
    register()
    drop()
    assert end_of(result) == SKIPPED
    deliver_all()
    assert end_of(result)[0] == "SUCCESSFUL"


def test_gc_ends_what_an_interrupted_seek_has_skipped(interrupted):
    stages = enqueue_chain(call(jobs.add, 1), call(jobs.add, 2))
    results = [jobs.add.enqueue(number) for number in range(5)]
    register()
    seek()
    assert ends(*results) == [WAITS] * 5
    assert "Would end 6 jobs whose messages were skipped or deleted." in run("queuegc", "--dry-run")
    assert ends(*results) == [WAITS] * 5
    assert "Ended 6 jobs whose messages were skipped or deleted." in run("queuegc")
    assert ends(*results) == [SKIPPED] * 5
    assert end_of(stages[1][0]) == ("FAILED", "EarlierJobFailed")
    assert "jobs whose" not in run("queuegc")


def test_gc_ends_what_an_interrupted_drop_has_skipped(interrupted, monkeypatch):
    result = jobs.add.enqueue(1)
    register()
    monkeypatch.setattr("django_mysqlqueue.operations.dropping._end", lambda *args: None)
    drop()
    assert gc() == 1
    assert end_of(result) == SKIPPED


def test_many_jobs_are_ended_in_steps(interrupted, monkeypatch, clock):
    """A round goes on as long as it ends jobs; the next one continues where it has ended."""
    monkeypatch.setattr("tests.support.internals.job_messages.PAGE", 3)
    monkeypatch.setattr(pruning, "IDLE_STEPS", 1)
    monkeypatch.setattr(job_messages, "random_place", lambda using: job_messages.ResultPosition())
    results = [jobs.add.enqueue(number) for number in range(10)]
    register()
    seek()
    waiting = [jobs.add.enqueue(number) for number in range(10)]
    JobResult.objects.filter(id=waiting[-1].id).update(id="~")  # The last one, which has no message.
    one = worker("w")
    one.beat()
    ended = []
    for _ in range(6):
        for _ in one.poller.maintenance.round():
            pass
        ended.append(JobResult.objects.filter(status="FAILED").count())
        clock.advance(60)
    assert ended == [10, 10, 11, 11, 11, 11]
    assert ends(*results, *waiting[:-1]) == [SKIPPED] * 10 + [WAITS] * 9


def test_searches_that_end_with_their_processes_reach_every_job(interrupted, monkeypatch):
    """Each one begins at another place."""
    monkeypatch.setattr("tests.support.internals.job_messages.PAGE", 2)
    waiting = [jobs.add.enqueue(number) for number in range(20)]
    OutboxMessage.objects.filter(message_id__in=[result.id for result in waiting[14:]]).delete()
    for _ in range(200):
        assert len(list(pruning._end_jobs(USING, pruning.Search(), dry_run=False))) > 0
        if JobResult.objects.filter(status="FAILED").count() == 6:
            break
    assert ends(*waiting) == [WAITS] * 14 + [DELETED] * 6


def test_a_search_wraps_around(monkeypatch):
    """What is before the place where it began comes in the next round."""
    result = jobs.add.enqueue(1)
    OutboxMessage.objects.all().delete()
    monkeypatch.setattr(job_messages, "random_place", lambda using: job_messages.ResultPosition(id="~"))
    search = pruning.Search()
    for status in ("READY", "FAILED"):
        list(pruning.prune(USING, search=search))
        assert end_of(result)[0] == status


def test_a_search_of_few_jobs_begins_at_the_start():
    jobs.add.enqueue(1)
    assert job_messages.random_place(USING) == job_messages.ResultPosition()


def test_ids_that_are_no_uuids_are_searched_from_the_start(monkeypatch):
    monkeypatch.setattr("tests.support.internals.job_messages.PAGE", 1)
    jobs.add.enqueue(1)
    JobResult.objects.update(id="one")
    assert job_messages.random_place(USING) == job_messages.ResultPosition()


def test_a_step_ends_the_later_jobs_of_few_chains(interrupted, monkeypatch):
    monkeypatch.setattr(job_messages, "LATER", 5)
    chains = [enqueue_chain(call(jobs.add, 1), [call(jobs.add, 2)] * 2, call(jobs.add, 3)) for _ in range(3)]
    big = enqueue_chain([call(jobs.add, 1)] * 2, [call(jobs.add, 2)] * 9)
    alone = jobs.add.enqueue(1)
    register()
    seek()
    ended, place = [], job_messages.ResultPosition()
    while place is not None:
        _, _, place = job_messages.end_some(USING, after=place)
        ended.append(JobResult.objects.filter(status="FAILED").count() - sum(ended))
    assert len([number for number in ended if number]) == 4
    assert (sum(ended), max(ended) <= 12) == (24, True)
    results = [result for stages in (*chains, big) for stage in stages for result in stage]
    assert {status for status, _ in ends(*results, alone)} == {"FAILED"}


def test_jobs_are_ended_after_all_deletions(monkeypatch):
    """A search that fails keeps nobody from deleting."""
    monkeypatch.setattr("tests.support.internals.job_messages.end_some", None)
    done = []
    with pytest.raises(TypeError):
        done.extend(step.kind for step in pruning.prune(USING))
    assert set(done) >= pruning.KINDS.keys() - {"partition_positions"}


# -- what does not ----------------------------------------------------------------


def in_outbox():
    return jobs.add.enqueue(1)


def in_log():
    result = jobs.add.enqueue(1)
    register()
    return result


def in_log_without_a_group():
    result = jobs.add.enqueue(1)
    sequence()
    ConsumerGroup.objects.all().delete()
    return result


def scheduled():
    return jobs.add.using(run_after=datetime.timedelta(hours=1)).enqueue(1)


def rescheduled():
    result = jobs.add.using(run_after=datetime.timedelta(hours=1)).enqueue(1)
    reschedule(result.id, topic=JOBS.topic, delay=7200)
    JobResult.objects.update(run_after=1)
    return result


def in_flight():
    result = jobs.add.enqueue(1)
    sequence()
    worker().step()
    return result


def waits_for_its_next_attempt():
    result = jobs.fail_slowly.enqueue()
    sequence()
    one = worker().step()
    one.work()
    one.flush()
    assert DeliveryState.objects.get().delivery_token == 0
    return result


def of_a_later_stage():
    return enqueue_chain(call(jobs.add, 1), call(jobs.add, 2), call(jobs.add, 3))[2][0]


def of_a_stage_that_was_just_published():
    stages = enqueue_chain(call(jobs.add, 1), call(jobs.add, 2))
    sequence()
    one = worker().step()
    one.work()
    one.flush()
    return stages[1][0]


def redriven():
    result = jobs.fail.enqueue()
    deliver_all(raise_exceptions=False)
    operations.redrive(JOBS.topic, actor="ops")
    sequence()
    return result


def in_quarantine():
    result = jobs.add.enqueue(1)
    job_worlds.set_aside()
    return result


def redriven_into_the_quarantine():
    result = jobs.fail.enqueue()
    deliver_all(raise_exceptions=False)
    operations.redrive(JOBS.topic, actor="ops")
    job_worlds.set_aside()
    return result


def with_a_priority():
    result = jobs.add.using(priority=7).enqueue(1)
    register()
    return result


WAITING = [
    in_outbox,
    in_log,
    in_log_without_a_group,
    scheduled,
    rescheduled,
    in_flight,
    waits_for_its_next_attempt,
    of_a_later_stage,
    of_a_stage_that_was_just_published,
    redriven,
    in_quarantine,
    redriven_into_the_quarantine,
    with_a_priority,
]


@pytest.mark.parametrize("waiting", WAITING)
def test_a_job_whose_message_can_run_does_not_end(waiting):
    result = waiting()
    before = JobResult.objects.get(id=result.id).status
    assert gc() == 0
    assert JobResult.objects.get(id=result.id).status == before in ("READY", "RUNNING")


@pytest.mark.parametrize("waiting", WAITING)
def test_a_seek_to_where_it_waits_does_not_end_it(waiting):
    """A seek back ends nothing."""
    result = waiting()
    if not ConsumerGroup.objects.exists():
        register()
    seek("earliest")
    assert str(JobResult.objects.get(id=result.id).status) in ("READY", "RUNNING")


@pytest.mark.parametrize("key", [None, "k"])
def test_a_job_from_plain_sql_that_waits_does_not_end(key):
    """Its message may have any key."""
    payload = {"task": jobs.fail_thrice.module_path, "args": [], "kwargs": {}}
    publish(JOBS.topic, payload, key=key, id="of plain SQL")
    sub = worker()
    sequence()
    sub.step()
    sub.work()
    sub.flush()
    assert DeliveryState.objects.filter(acked=False, delivery_token=0).count() == 1
    JobResult.objects.update(retry_at=1)  # It has come due.
    assert gc() == 0
    assert JobResult.objects.get(id="of plain SQL").status == "READY"


def test_what_other_groups_skip_ends_no_job():
    result = jobs.add.enqueue(1)
    register()
    Sub(handler(group="reader", topic=JOBS.topic)).leave()
    operations.seek("reader", JOBS.topic, "latest", actor="ops")
    assert gc() == 0
    assert end_of(result) == WAITS


def test_a_job_for_later_whose_message_is_gone_ends_at_its_time():
    result = scheduled()
    OutboxMessage.objects.all().delete()
    assert gc() == 0
    JobResult.objects.update(run_after=1)
    assert gc() == 1
    assert end_of(result) == DELETED


# -- the quarantine ---------------------------------------------------------------


def rows():
    return list(QuarantinedMessage.objects.values_list("pk", flat=True))


def requeue():
    operations.requeue_quarantined(rows(), actor="ops")


@pytest.mark.promise("Quarantine")
def test_a_job_in_the_quarantine_runs_when_it_is_requeued():
    stages = enqueue_chain(call(jobs.add, 1), call(jobs.add, 2))
    job_worlds.set_aside()
    assert gc() == 0
    requeue()
    assert gc() == 0
    deliver_all()
    assert ends(*(one for stage in stages for one in stage)) == [("SUCCESSFUL", None)] * 2
    assert jobs.log == [(1, 1), (2, 1)]


@pytest.mark.promise("Quarantine")
def test_a_job_that_is_deleted_from_the_quarantine_ends():
    stages = enqueue_chain(call(jobs.add, 1), call(jobs.add, 2))
    job_worlds.set_aside()
    operations.delete_quarantined(rows(), actor="ops")
    assert gc() == 1
    assert ends(*(one for stage in stages for one in stage)) == [DELETED, ("FAILED", "EarlierJobFailed")]


@pytest.mark.promise("Quarantine")
@pytest.mark.parametrize("by_operator", [False, True])
@pytest.mark.parametrize("enqueued", [in_outbox, scheduled])
def test_a_job_in_the_quarantine_can_be_cancelled(enqueued, by_operator):
    """It ends at once. Its message stays there, and ends without a call after an operator has requeued it."""
    result = enqueued()
    OutboxMessage.objects.filter(deliver_at__gt=0).update(deliver_at=1)  # Its time has come.
    job_worlds.set_aside()
    if by_operator:
        assert operations.cancel(JOBS.topic, [result.id], actor="ops").changed == 1
    else:
        cancel_job(result)
    assert end_of(result) == ("FAILED", "JobCancelled")
    requeue()
    assert (gc(), OutboxMessage.objects.count()) == (0, 1)
    deliver_all()
    assert not jobs.log
    assert end_of(result) == ("FAILED", "JobCancelled")
    assert not DeliveryState.objects.exists()


@pytest.mark.promise("Quarantine")
def test_a_unique_job_in_the_quarantine_waits():
    first = jobs.alone.enqueue(1)
    job_worlds.set_aside()
    assert gc() == 0
    assert jobs.alone.enqueue(1).id == first.id
    requeue()
    deliver_all()
    assert jobs.log == [1]
    assert jobs.alone.enqueue(1).id != first.id


@pytest.mark.promise("Quarantine")
@pytest.mark.parametrize("begun", [0, 1])
def test_no_job_ends_whose_message_moves_meanwhile(begun):
    """It moves before each statement of a search, from one on: into the quarantine, back, and at last into the log."""
    moves = (*(job_worlds.set_aside, requeue) * 4, sequence)
    for first in count():
        result = jobs.add.enqueue(1)
        for move in moves[:begun]:
            move()
        found, left = search_beside(moves[begun:], first)
        assert not found, f"from statement {first} on"
        for move in left:
            move()
        deliver_all()
        assert end_of(result) == ("SUCCESSFUL", None)
        if len(left) == len(moves) - begun:
            break
    assert first > 3


def search_beside(moves, first):
    """Returns the jobs that would end, and the moves that are left."""
    left, numbers, moving = list(moves), count(), []
    session = Session(USING)
    waiting = job_messages.unfinished(session, ("", "~"), 10)

    def move(execute, sql, params, many, context):
        if not moving and next(numbers) >= first and left:
            moving.append(True)
            left.pop(0)()
            moving.clear()
        return execute(sql, params, many, context)

    with connection.execute_wrapper(move):
        return job_messages.cannot_run(session, waiting), left


@pytest.mark.servers_only
@pytest.mark.django_db(transaction=True)
def test_a_locked_result_is_left_to_the_next_round(interrupted):
    results = [jobs.add.enqueue(number) for number in range(2)]
    register()
    seek()
    with transaction.atomic():
        JobResult.objects.select_for_update().get(id=results[0].id)
        assert in_thread(gc) == 1
    assert ends(*results) == [WAITS, SKIPPED]
    assert gc() == 1
    assert ends(*results) == [SKIPPED] * 2


@pytest.mark.servers_only
@pytest.mark.django_db(transaction=True)
@pytest.mark.promise("Interrupted operations")
def test_a_drop_waits_for_locked_results():
    """Nobody could end these jobs after it."""
    locked, other = [jobs.add.enqueue(number) for number in range(2)]
    register()
    with transaction.atomic():
        JobResult.objects.select_for_update().get(id=locked.id)
        with pytest.raises(OperationRefused, match=r"locked results of jobs on topic 'jobs\.default' for 0\.2 s"):
            in_thread(lambda: dropping.drop(USING, JOBS, actor="ops", limits=OperationLimits(locked_wait=0.2)))
    assert ends(locked, other) == [WAITS, SKIPPED]
    assert ConsumerGroup.objects.get().after_seek == "dropped"
    drop()
    assert ends(locked, other) == [SKIPPED] * 2
    assert not ConsumerGroup.objects.exists()


# -- back again -------------------------------------------------------------------


def test_a_seek_back_over_skipped_jobs_runs_them():
    stages = enqueue_chain(call(jobs.add, 1), call(jobs.add, 2), call(jobs.add, 3))
    result, cancelled = jobs.write.enqueue(1), jobs.add.enqueue(9)
    register()
    cancel_job(cancelled)
    seek()
    results = [result, *(one for stage in stages for one in stage)]
    assert [end_of(one)[0] for one in results] == ["FAILED"] * 4
    seek("earliest")
    assert [end_of(one)[0] for one in results] == ["FAILED"] * 4, "until it is delivered"
    deliver_all()
    assert [end_of(one)[0] for one in results] == ["SUCCESSFUL"] * 4
    assert sorted(jobs.log) == [(1, 1), (2, 1), (3, 1)]
    assert Effect.objects.count() == 1
    assert end_of(cancelled) == ("FAILED", "JobCancelled")


def test_a_job_that_runs_again_has_all_of_its_attempts():
    result = jobs.fail_thrice.enqueue()
    sequence()
    one = worker().step()
    one.work()
    one.flush()
    one.leave()
    seek()
    seek("earliest")
    jobs.log.clear()
    deliver_all(raise_exceptions=False, advance=60)
    assert len(jobs.log) == 3
    assert end_of(result) == ("FAILED", "KeyError")


def test_the_preview_says_what_becomes_of_jobs():
    jobs.add.enqueue(1)
    register()
    for found in (
        operations.seek(*JOBS, "latest", actor="ops", dry_run=True),
        operations.drop_group(*JOBS, actor="ops", dry_run=True),
    ):
        assert any("JobSkipped" in warning for warning in found.warnings)
    reader = JOBS._replace(group="reader")
    groups.register(USING, reader, mode="shared", start="earliest")
    found = operations.seek(*reader, "latest", actor="ops", dry_run=True)
    assert not any("JobSkipped" in warning for warning in found.warnings)


# -- schedules --------------------------------------------------------------------


@pytest.mark.promise("Recurring schedules")
@pytest.mark.parametrize("how", ["latest", "time", "drop", "deleted", "outbox"])
def test_a_schedule_runs_on_after_its_job_was_skipped(how, interrupted, monkeypatch):
    """Even before the result has ended: a job counts only while its message can run."""
    last = registered(of_task(overlap="skip"), age=70)
    register()
    assert tick(USING).published

    def is_skipped():
        Schedule.objects.update(last_tick=last)
        return tick(USING).skipped

    assert is_skipped()
    job_worlds.set_aside()
    assert is_skipped()
    requeue()
    if how != "outbox":
        sequence()
        assert is_skipped()
    monkeypatch.setattr("tests.jobs.test_skips.gc", lambda: None)
    if how == "drop":
        monkeypatch.setattr("django_mysqlqueue.operations.dropping._end", lambda *args: None)
    (HOWS | {"outbox": delete_from_outbox})[how]()
    assert JobResult.objects.get().status == "READY"
    assert not is_skipped()
