"""Priorities, queues and times"""

from __future__ import annotations

import datetime
import time

import pytest
from django.utils import timezone

from django_mysqlqueue.tasks.framework import TaskResultStatus
from tests.tasks_conformance import tasks
from tests.tasks_conformance.conftest import now

sentence, needs = pytest.mark.sentence, pytest.mark.needs


@sentence(
    "ref/tasks: Task.priority",
    "Priorities must be between -100 and 100, where larger numbers are higher priority, and will be run sooner.",
)
@needs("supports_priority", "background")
def test_higher_priorities_run_sooner(backend):
    for priority in (0, -100, 5, 100, -1, 99):
        tasks.add.using(priority=priority).enqueue(priority)
    backend.run()
    assert [priority for priority, _ in tasks.calls] == [100, 99, 5, 0, -1, -100]


@sentence("ref/tasks: Task.queue_name", "The name of the queue the Task will be enqueued on to.")
def test_the_queue_of_a_task(backend):
    result = tasks.add.using(queue_name="mail").enqueue(1)
    assert result.task.queue_name == "mail"
    backend.run()
    assert now(backend, result).return_value == 2


@sentence("ref/tasks: Task.run_after", "The earliest time the Task will be executed.")
@needs("supports_defer")
def test_a_task_is_not_run_before_its_time(backend):
    at = timezone.now() + datetime.timedelta(seconds=0.4)
    result = tasks.add.using(run_after=at).enqueue(1)
    backend.run()
    if timezone.now() < at:
        assert (now(backend, result).status, tasks.calls) == (TaskResultStatus.READY, [])
    time.sleep(0.5)
    backend.run()
    assert now(backend, result).return_value == 2
    assert result.started_at >= at - datetime.timedelta(milliseconds=50)


@sentence("ref/tasks: Task.run_after", "The earliest time the Task will be executed.")
@needs("supports_defer")
def test_a_time_that_is_over(backend):
    result = tasks.add.using(run_after=timezone.now() - datetime.timedelta(days=1)).enqueue(1)
    backend.run()
    assert now(backend, result).return_value == 2


@sentence("ref/tasks: Task.run_after", "The earliest time the Task will be executed.")
@needs("supports_defer")
def test_other_time_zones(backend):
    zone = datetime.timezone(datetime.timedelta(hours=-11))
    later = tasks.add.using(run_after=timezone.now().astimezone(zone) + datetime.timedelta(hours=1)).enqueue(1)
    due = tasks.add.using(run_after=timezone.now().astimezone(zone) - datetime.timedelta(minutes=1)).enqueue(2)
    backend.run()
    assert (now(backend, later).status, now(backend, due).return_value) == (TaskResultStatus.READY, 3)


@sentence("ref/tasks: TaskResult.task", "The Task the result was enqueued for.")
@needs("supports_defer", "supports_get_result")
def test_the_time_is_kept(backend):
    at = (timezone.now() + datetime.timedelta(hours=1)).replace(microsecond=123000)
    result = tasks.add.using(run_after=at).enqueue(1)
    assert result.task.run_after == at
    assert tasks.add.get_result(result.id).task.run_after == at
