"""Operations on the jobs of a task."""

from __future__ import annotations

import datetime
import io
import json
from functools import partial

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.utils import timezone

from django_mysqlqueue import operations, publish
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import list_scheduled
from django_mysqlqueue.models import DeliveryState, JobResult, Operation, OutboxMessage, QueueMessage
from django_mysqlqueue.operations import jobs as job_operations
from django_mysqlqueue.operations.jobs import Cancelled, TaskJobs, cancel_all
from django_mysqlqueue.operations.limits import OperationLimits
from django_mysqlqueue.tasks import call, enqueue_chain
from tests.app import jobs
from tests.support import job_worlds
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import Session, job_rows, registry
from tests.support.job_pages import errors
from tests.support.recorded_statements import _reads
from tests.support.scenarios import log

TOPIC = job_worlds.JOBS.topic
DLQ = f"{TOPIC}_dlq"
GO_ON = "tests.app.jobs.go_on"
FAIL, FAIL_TOO = "tests.app.jobs.fail", "tests.app.jobs.fail_too"


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = {"default": {"BACKEND": job_worlds.BACKEND, "QUEUES": ["default", "mail"]}}
    jobs.log.clear()


def failed():
    """Dead letters of jobs: three of a task, and two of another one."""
    made = [task.enqueue(number) for number, task in enumerate((jobs.fail, jobs.fail_too) * 2 + (jobs.fail,))]
    sub = Sub(registry.handlers()[job_worlds.JOBS])
    sub.settle()
    sub.leave()
    sequence()
    return [one.id for one in made[::2]], [one.id for one in made[1::2]]


def left():
    """The ids of the jobs that have a dead letter."""
    return sorted(QueueMessage.objects.filter(topic=DLQ).values_list("original_id", flat=True))


def run(name, *arguments):
    output = io.StringIO()
    call_command(name, *arguments, "--noinput", "--format", "json", stdout=output)
    return json.loads(output.getvalue())


def run_list(name, *arguments):
    output = io.StringIO()
    call_command(name, *arguments, "--format", "json", stdout=output)
    return json.loads(output.getvalue())


@pytest.fixture
def waiting(clock):
    """Jobs of two tasks that wait for another attempt, in place and in the outbox; and their subscriber."""
    clock.stop()
    sub = Sub(registry.handlers()[job_worlds.JOBS])
    made = []
    for seconds in (50, 3600):
        jobs.waits[:] = [seconds] * 2
        made += [task.using(priority=seconds // 60).enqueue(seconds).id for task in (jobs.go_on, jobs.ask_later)]
        sub.settle()
    return made[::2], made[1::2], sub


# -- scheduled ----------------------------------------------------------------


def test_scheduled_jobs_are_listed_by_their_task():
    later = timezone.now() + datetime.timedelta(days=1)
    made = [jobs.fail.using(run_after=later, priority=rank).enqueue(1).id for rank in (0, 10, -10)]
    other = jobs.fail_too.using(run_after=later).enqueue(1).id
    publish("t", 1, key=FAIL, id="looks-like-one", delay=60)
    found = {one["id"]: one["task"] for one in run_list("queuescheduled")["scheduled"]}
    assert found == {**dict.fromkeys(made, FAIL), other: FAIL_TOO, "looks-like-one": None}
    for topic in ([], [TOPIC]):
        assert sorted(one["id"] for one in run_list("queuescheduled", *topic, "--task", FAIL)["scheduled"]) == sorted(
            made
        )
        listing = list_scheduled(task=FAIL, topic=topic[0] if topic else None, limit=2)
        assert [len(listing.rows), len(list_scheduled(task=FAIL, after=listing.after).rows)] == [2, 1]
    assert list_scheduled(task=FAIL, topic="t").rows == ()
    output = io.StringIO()
    call_command("queuescheduled", "--task", FAIL_TOO, stdout=output)
    assert output.getvalue().endswith(f"  {TOPIC}  {other}  {FAIL_TOO}\n")
    with pytest.raises(CommandError, match="--task is a filter of the list"):
        run("queuescheduled", TOPIC, other, "--now", "--task", FAIL_TOO)


def test_without_scheduled_jobs_of_a_task():
    output = io.StringIO()
    call_command("queuescheduled", "--task", FAIL, stdout=output)
    assert output.getvalue() == f"No jobs of the task {FAIL} are scheduled.\n"


# -- names that no task has ---------------------------------------------------

WRONG = "tests.app.jobs.fial"
MEANT = f"No task of this project has the path '{WRONG}'. Did you mean {FAIL}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("queuecancel", TOPIC, "--task"),
        ("queueredrive", TOPIC, "--task"),
        ("queuediscard", TOPIC, "--reason", "test", "--task"),
        ("queueretry", *job_worlds.JOBS, "--task"),
        ("queueresume", *job_worlds.JOBS, "--task"),
    ],
)
def test_a_command_says_which_task_may_be_meant(arguments):
    failed()
    with pytest.raises(CommandError) as error:
        run(*arguments, WRONG)
    assert MEANT in str(error.value)
    with pytest.raises(CommandError) as error:
        run(*arguments, "tests.app.jobs.plain")
    assert "No task of this project" not in str(error.value)


def test_a_task_that_is_not_there_yet_may_be_paused():
    failed()
    (warning,) = run("queuepause", *job_worlds.JOBS, "--task", WRONG)["warnings"]
    assert MEANT in warning
    assert run("queuepause", *job_worlds.JOBS, "--task", FAIL)["warnings"] == []
    output = io.StringIO()
    call_command("queuescheduled", "--task", WRONG, stdout=output)
    assert output.getvalue().startswith(f"No jobs of the task {WRONG} are scheduled. {MEANT}")


# -- dead letters -------------------------------------------------------------


@pytest.mark.parametrize(("name", "more"), [("redrive", {}), ("discard", {"reason": "of no use"})])
def test_dead_letters_of_a_task(name, more):
    of_task, others = failed()
    operation = getattr(operations, name)
    assert operation(TOPIC, task=FAIL, actor="ada", dry_run=True, **more).planned == 3
    assert operation(TOPIC, task=FAIL, limit=1, actor="ada", **more).changed == 1
    assert operation(TOPIC, task=FAIL, actor="ada", **more).changed == 2
    assert left() == sorted(others)
    statuses = set(JobResult.objects.filter(id__in=of_task).values_list("status", flat=True))
    assert statuses == ({"READY"} if name == "redrive" else {"FAILED"})
    assert operation(TOPIC, task="fail_too", actor="ada", dry_run=True, **more).planned == 0
    assert set(Operation.objects.values_list("detail", flat=True)) == {f"task {FAIL}"}


def test_other_conditions_hold_too():
    failed()
    assert operations.redrive(DLQ, task=FAIL, error="no 2", group="jobs", actor="ada").changed == 1
    assert Operation.objects.get().detail == f"task {FAIL}, error contains 'no 2'"
    assert operations.redrive(DLQ, task=FAIL_TOO, error="no 2", actor="ada").changed == 0


def test_the_task_of_a_job_is_known_without_its_result():
    of_task, _ = failed()
    JobResult.objects.filter(id=of_task[0]).delete()
    assert operations.redrive(TOPIC, task=FAIL, actor="ada").changed == len(of_task)


@pytest.mark.parametrize("task", [1, "x" * 9999, "\ud800"])
def test_a_path_that_no_task_has_is_refused(task):
    failed()
    with pytest.raises(OperationRefused, match="task"):
        operations.redrive(TOPIC, task=task, actor="ada")


@pytest.mark.parametrize(("name", "more"), [("queueredrive", ()), ("queuediscard", ("--reason", "of no use"))])
def test_commands_on_dead_letters(name, more):
    _, others = failed()
    assert run(name, TOPIC, "--task", FAIL, *more)["changed"] == 3
    assert left() == sorted(others)


# -- jobs that wait for another attempt -----------------------------------------


def ready():
    return set(JobResult.objects.filter(status="READY").values_list("id", flat=True))


def test_retry_of_a_task(waiting):
    of_task, others, sub = waiting
    retry = partial(operations.retry, *job_worlds.JOBS, actor="ada")
    assert ready() == {*of_task, *others}
    assert retry(task=GO_ON, dry_run=True).planned == 2
    assert retry(task=GO_ON, ids=[of_task[1], others[0]], dry_run=True).planned == 1
    assert retry(task=GO_ON).changed == 2
    sub.settle()
    assert ready() == set(others)
    record = Operation.objects.get()
    assert (record.detail, record.changed) == (f"task {GO_ON}", 2)
    planned = retry(task=GO_ON, dry_run=True)
    assert planned.planned == 0
    assert planned.summary == (
        f"No jobs of the task {GO_ON} are waiting for another attempt in the group jobs/jobs.default.",
    )
    planned = retry(task=GO_ON, error="no", dry_run=True)
    assert planned.summary == (f"No jobs of the task {GO_ON} with an error that contains “no” are waiting.",)


def test_retry_of_a_task_with_an_error(waiting):
    of_task, _, _ = waiting
    held = DeliveryState.objects.filter(acked=False)
    held.update(last_error="ValueError: no stock")
    JobResult.objects.update(errors=errors("no stock", "no money"))
    retry = partial(operations.retry, *job_worlds.JOBS, task=GO_ON, actor="ada")
    assert retry(error="stock", dry_run=True).planned == 1, "in the outbox, it is not the last error"
    assert retry(error="stock").changed == 1
    assert retry(error="money").changed == 1
    assert list(JobResult.objects.filter(retry_at=1).order_by("id").values_list("id", flat=True)) == sorted(of_task)


def test_a_group_that_runs_no_jobs_has_none_of_a_task(db):
    log(1)
    Sub(handler(function=Recorder(lambda delivery: delivery.nack(3600)))).settle()
    assert operations.retry("g", "t", actor="ada", dry_run=True).planned == 1
    assert operations.retry("g", "t", task=GO_ON, actor="ada", dry_run=True).planned == 0
    assert operations.retry("g", "t", task=GO_ON, actor="ada").changed == 0


def test_the_command_retries_a_task(waiting):
    _, others, sub = waiting
    assert run("queueretry", *job_worlds.JOBS, "--task", GO_ON)["changed"] == 2
    sub.settle()
    assert ready() == set(others)


# -- cancelling -------------------------------------------------------------------


ADD = "tests.app.jobs.add"


def unfinished():
    """Jobs of two tasks that wait, are due later, run, and were asked to stop; and one of another queue."""
    later = timezone.now() + datetime.timedelta(hours=1)
    made = [jobs.add.enqueue(1), jobs.add.using(run_after=later).enqueue(2), jobs.add.enqueue(3), jobs.add.enqueue(4)]
    others = [jobs.plain.enqueue(5), jobs.add.using(queue_name="mail").enqueue(6)]
    JobResult.objects.filter(id__in=[one.id for one in made[2:]]).update(status="RUNNING")
    JobResult.objects.filter(id=made[3].id).update(cancel_requested_at=7)
    return [one.id for one in made], [one.id for one in others]


def asked_to_stop():
    return set(JobResult.objects.filter(cancel_requested_at__gt=7).values_list("id", flat=True))


def test_cancelling_the_jobs_of_a_task():
    made, others = unfinished()
    cancel = partial(operations.cancel, TOPIC, task=ADD, actor="ada")
    planned = cancel(dry_run=True)
    assert (planned.planned, planned.summary[0]) == (3, "Waiting jobs that will be cancelled: 2.")
    assert JobResult.objects.filter(status="FAILED").count() == 0
    done = cancel()
    assert done.changed == 3
    assert done.summary == (
        "Jobs cancelled: 2.",
        "Running jobs that were asked to stop: 1.",
        "Running jobs stop only if their tasks read context.cancelled.",
    )
    assert set(JobResult.objects.filter(status="FAILED").values_list("id", flat=True)) == set(made[:2])
    assert asked_to_stop() == {made[2]}
    assert ready() == set(others)
    assert not OutboxMessage.objects.filter(deliver_at__gt=0).exists()
    record = Operation.objects.get()
    assert (record.action, record.topic, record.detail, record.changed) == ("cancel jobs", TOPIC, f"task {ADD}", 3)
    assert record.ended_at
    assert cancel(dry_run=True).summary == (
        f"In {TOPIC}, no jobs of the task {ADD} wait, or run and were not asked to stop before.",
    )
    assert cancel().summary[0].startswith(f"No jobs of the task {ADD} in {TOPIC} were changed")


def test_jobs_that_wait_for_another_attempt_are_cancelled(waiting):
    _, others, _ = waiting
    assert operations.cancel(TOPIC, task=GO_ON, actor="ada").changed == 2
    assert ready() == set(others)
    assert OutboxMessage.objects.get(topic=TOPIC).original_id == others[1]


def test_in_small_transactions_and_up_to_a_limit():
    JobResult.objects.bulk_create(
        JobResult(id=f"j{number}", backend="default", queue_name="default", task_path=ADD, arguments="{}",
                  enqueued_at=number // 3)
        for number in range(11)
    )  # fmt: skip
    wanted = TaskJobs(ADD, TOPIC, limit=7)
    assert cancel_all(USING, wanted, limits=OperationLimits(jobs=2), actor="ada") == Cancelled(7, 0)
    assert len(ready()) == 4
    assert min(JobResult.objects.filter(status="READY").values_list("enqueued_at", flat=True)) == 2
    assert cancel_all(USING, wanted._replace(limit=None), limits=OperationLimits(jobs=2), actor="ada").number == 4


def test_jobs_that_have_ended_meanwhile_do_not_count_for_the_limit(monkeypatch):
    for number in range(4):
        jobs.add.enqueue(number)
    unfinished = job_rows.unfinished

    def read(*args, **options):
        for page in unfinished(*args, **options):
            JobResult.objects.filter(id__in=[job.id for job in page[:2]]).update(status="SUCCESSFUL", finished_at=1)
            yield page

    monkeypatch.setattr(job_rows, "unfinished", read)
    assert operations.cancel(TOPIC, task=ADD, limit=1, actor="ada").changed == 1
    assert len(ready()) == 1


def test_small_pages_of_all_jobs_that_have_not_ended(monkeypatch):
    monkeypatch.setattr(job_rows, "UNFINISHED_READ", 2)
    made = [jobs.add.enqueue(number).id for number in range(7)]
    others = [jobs.fail.enqueue(number).id for number in range(5)]
    JobResult.objects.filter(id__in=(*made[1:7:2], others[0])).update(status="RUNNING")
    JobResult.objects.filter(id=made[0]).update(status="SUCCESSFUL", finished_at=1)
    read = job_rows.unfinished(Session(USING), ADD, "default", size=9)
    assert [job.id for page in read for job in page] == sorted(made[1:])
    assert not list(job_rows.unfinished(Session(USING), ADD, "mail", size=9))


@pytest.mark.servers_only
def test_results_that_have_ended_are_not_read():
    JobResult.objects.bulk_create(
        JobResult(id=f"j{number}", backend="default", queue_name="default", task_path=ADD, arguments="{}",
                  status="SUCCESSFUL", enqueued_at=number, finished_at=number)
        for number in range(1, 5000)
    )  # fmt: skip
    jobs.add.enqueue(1)
    before = _reads()
    assert operations.cancel(TOPIC, task=ADD, actor="ada").changed == 1
    assert _reads() - before < 200


def test_a_preview_stops_counting(monkeypatch):
    monkeypatch.setattr(job_operations, "COUNTED", 2)
    made = [jobs.add.enqueue(number) for number in range(5)]
    planned = operations.cancel(TOPIC, task=ADD, actor="ada", dry_run=True)
    assert planned.planned == 2
    assert planned.summary[-1] == "These are the first ones: the preview stops counting at 2."
    assert operations.cancel(TOPIC, task=ADD, actor="ada").changed == len(made)


def test_the_later_jobs_of_a_chain_are_announced():
    enqueue_chain(call(jobs.add, 1), call(jobs.plain, 2))
    text = "Jobs of later stages of their chains will fail, with EarlierJobFailed."
    assert operations.cancel(TOPIC, task=ADD, actor="ada", dry_run=True).warnings == (text,)
    assert operations.cancel(TOPIC, task="tests.app.jobs.plain", actor="ada", dry_run=True).warnings == ()
    assert operations.cancel(TOPIC, task=ADD, actor="ada").changed == 1
    assert not ready()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"task": ADD, "ids": ["x"]}, "task: cannot be combined"),
        ({"task": ADD, "key": "x"}, "task: cannot be combined"),
        ({"task": ADD, "topic": "default"}, "is not the topic of a queue"),
        ({"task": ADD, "limit": 0}, "limit 0"),
        ({}, "ids, task: pass one of them"),
        ({"ids": ["x"], "limit": 5}, "limit only with task"),
    ],
)
def test_arguments_that_contradict_are_refused(given, error):
    jobs.add.enqueue(1)
    with pytest.raises(OperationRefused, match=error):
        operations.cancel(**{"topic": TOPIC, **given}, actor="ada")
    assert len(ready()) == 1


def test_the_command_cancels_a_task():
    _, others = unfinished()
    assert run("queuecancel", TOPIC, "--task", ADD, "--limit", "1")["changed"] == 1
    found = run("queuecancel", TOPIC, "--task", ADD)
    assert (found["planned"], found["changed"], found["not_scheduled"]) == (2, 2, [])
    assert ready() == set(others)
    with pytest.raises(CommandError, match="no jobs of the task"):
        run("queuecancel", TOPIC, "--task", ADD)
    with pytest.raises(CommandError, match="pass one of them"):
        run("queuecancel", TOPIC)
    with pytest.raises(CommandError, match="topic"):
        run("queuecancel")
    with pytest.raises(CommandError, match="unrecognized arguments: --unknown"):
        run("queuecancel", TOPIC, "--unknown", "x")
