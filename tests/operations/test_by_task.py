"""Operations on the jobs of a task."""

from __future__ import annotations

import io
import json

import pytest
from django.core.management import call_command

from django_mysqlqueue import operations
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import JobResult, Operation, QueueMessage
from tests.app import jobs
from tests.support import job_worlds
from tests.support.harness import Sub, sequence
from tests.support.internals import registry

TOPIC = job_worlds.JOBS.topic
DLQ = f"{TOPIC}_dlq"
FAIL, FAIL_TOO = "tests.app.jobs.fail", "tests.app.jobs.fail_too"


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
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


def test_without_its_result_the_task_of_a_job_is_not_known():
    of_task, _ = failed()
    JobResult.objects.filter(id=of_task[0]).delete()
    assert operations.redrive(TOPIC, task=FAIL, actor="ada").changed == 2


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
