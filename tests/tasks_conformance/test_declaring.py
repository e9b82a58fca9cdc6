"""Declaring tasks"""

from __future__ import annotations

import dataclasses
import datetime
import pickle

import pytest
from django.utils import timezone

from django_mysqlqueue.tasks.framework import InvalidTask, Task, task_backends
from tests.tasks_conformance import tasks
from tests.tasks_conformance.backends import SECOND_ALIAS, SECOND_QUEUE

sentence, needs = pytest.mark.sentence, pytest.mark.needs


@sentence("ref/tasks: The task decorator", "The @task decorator defines a Task instance.")
def test_the_decorator_makes_a_task(backend):
    made = tasks.task(tasks.undecorated)
    assert isinstance(made, Task)
    defaults = (made.priority, made.queue_name, made.backend, made.takes_context, made.run_after)
    assert defaults == (0, "default", "default", False, None)
    assert made.func is tasks.undecorated


@sentence("topics/tasks: Defining Tasks", "Task attributes can be customized via the @task decorator arguments.")
def test_arguments_of_the_decorator(backend):
    made = tasks.task(priority=2, queue_name="mail")(tasks.undecorated)
    assert (made.priority, made.queue_name) == (2, "mail")


@sentence("topics/tasks: Defining Tasks", "Tasks are defined using the task() decorator on a module-level function.")
@pytest.mark.parametrize("kind", ["local", "lambda", "class"])
def test_functions_that_are_not_of_a_module(backend, kind):
    def local():
        pass

    with pytest.raises(InvalidTask):
        tasks.task({"local": local, "lambda": lambda: None, "class": dict}[kind])


@sentence("ref/tasks: Task.priority", "Priorities must be between -100 and 100.")
def test_priorities(backend):
    assert [tasks.add.using(priority=priority).priority for priority in (-100, 0, 100)] == [-100, 0, 100]
    for priority in (-101, 101):
        with pytest.raises(InvalidTask):
            tasks.add.using(priority=priority)


@sentence("source: BaseTaskBackend.validate_task", "priority must be a whole number between -100 and 100.")
def test_priorities_are_whole_numbers(backend):
    with pytest.raises(InvalidTask):
        tasks.add.using(priority=1.5)


@sentence("ref/tasks: Task.queue_name", "This must match a queue defined in QUEUES, unless QUEUES is set to [].")
def test_the_name_of_a_queue(backend):
    with pytest.raises(InvalidTask):
        tasks.task(queue_name="unknown")(tasks.undecorated)


@sentence(
    "source: BaseTaskBackend.validate_task", "Task takes context but does not have a first argument of 'context'."
)
def test_a_task_without_an_argument_for_its_context(backend):
    with pytest.raises(InvalidTask):
        tasks.task(takes_context=True)(tasks.with_wrong_context)


@sentence("ref/tasks: Task.run_after", "This can be … a timezone-aware datetime.")
@needs("supports_defer")
def test_the_time_of_a_task(backend):
    at = timezone.now() + datetime.timedelta(hours=1)
    assert tasks.add.using(run_after=at).run_after == at
    with pytest.raises(InvalidTask):
        tasks.add.using(run_after=at.replace(tzinfo=None))


@sentence("ref/tasks: Task.run_after", "This can be a timedelta, which is used relative to the current time.")
@needs("supports_defer")
def test_a_task_after_a_timedelta(backend):
    hour = datetime.timedelta(hours=1)
    before = timezone.now()
    result = tasks.add.using(run_after=hour).enqueue(1)
    assert before - datetime.timedelta(seconds=1) <= result.task.run_after - hour <= timezone.now()
    backend.run()
    assert not tasks.calls


@sentence("ref/tasks: Task", "Attributes of Task cannot be modified.")
def test_a_task_does_not_change(backend):
    with pytest.raises(dataclasses.FrozenInstanceError):
        tasks.task(tasks.undecorated).priority = 1


@sentence("ref/tasks: Task.using", "Creates a new Task with modified defaults. The existing Task is left unchanged.")
def test_using(backend, settings):
    settings.TASKS = backend.two()
    old = tasks.task(tasks.undecorated)
    new = old.using(priority=10, queue_name=SECOND_QUEUE, backend=SECOND_ALIAS)
    assert (new.priority, new.queue_name, new.backend) == (10, SECOND_QUEUE, SECOND_ALIAS)
    assert (old.priority, old.queue_name, old.backend) == (0, "default", "default")
    assert new.func is old.func


@sentence("ref/tasks: Task.name", "The name of the function decorated with task().")
def test_the_name_of_a_task(backend):
    assert tasks.task(tasks.undecorated).name == "undecorated"
    assert tasks.add.enqueue(1).task.name == "add"


@sentence(
    "ref/tasks: BaseTaskBackend.validate_task",
    "Validates whether the provided Task is able to be enqueued using the backend. If the Task is not valid, "
    "InvalidTask is raised.",
)
def test_validating(backend, settings):
    in_mail = tasks.add.using(queue_name="mail")
    task_backends["default"].validate_task(in_mail)
    settings.TASKS = backend.tasks(QUEUES=["default"])
    with pytest.raises(InvalidTask):
        task_backends["default"].validate_task(in_mail)


@sentence("releases/6.1: Tasks", "Task and TaskResult instances can now be pickled and unpickled.")
@needs("Django 6.1")
def test_pickled_tasks(backend):
    for task in (tasks.add, tasks.with_context, tasks.add.using(priority=5, queue_name="mail")):
        assert pickle.loads(pickle.dumps(task)) == task  # noqa: S301
