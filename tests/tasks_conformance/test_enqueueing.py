"""Enqueueing"""

from __future__ import annotations

import datetime
import decimal

import pytest
from asgiref.sync import async_to_sync
from django.utils import timezone

from django_mysqlqueue.tasks.framework import InvalidTask, TaskResult, TaskResultStatus, task_backends
from tests.tasks_conformance import tasks
from tests.tasks_conformance.conftest import now

sentence, needs = pytest.mark.sentence, pytest.mark.needs
ENQUEUE = ("enqueue", "aenqueue")


def enqueue(task, how, *args, **kwargs):
    return getattr(task, how)(*args, **kwargs) if how == "enqueue" else async_to_sync(task.aenqueue)(*args, **kwargs)


@sentence(
    "topics/tasks: Enqueueing Tasks",
    "This returns a TaskResult, which can be used to retrieve the result of the Task once it has finished executing.",
)
def test_enqueue(backend):
    result = tasks.add.enqueue(1)
    assert isinstance(result, TaskResult)
    backend.run()
    assert now(backend, result).return_value == 2


@sentence(
    "topics/tasks: Enqueueing Tasks",
    "To enqueue Tasks in an async context, aenqueue() is available as an async variant of enqueue().",
)
def test_aenqueue(backend):
    result = async_to_sync(tasks.add.aenqueue)(1, b=5)
    assert isinstance(result, TaskResult)
    assert (result.args, result.kwargs) == ([1], {"b": 5})
    backend.run()
    assert now(backend, result).return_value == 6


@sentence("topics/tasks: Enqueueing Tasks", "If the Task takes arguments, these can be passed as-is.")
@pytest.mark.parametrize("how", ENQUEUE)
def test_arguments(backend, how):
    values = [
        None,
        True,
        0,
        -5,
        1.5,
        "",
        "é\U0001f600\x00'\"\\",
        [],
        {},
        [[1, {"a": [None]}]],
        {"k": {"n": "v"}},
        2**62,
    ]
    result = enqueue(tasks.note, how, *values, key=values)
    assert (result.args, result.kwargs) == (values, {"key": values})
    backend.run()
    assert tasks.calls == [(tuple(values), {"key": values})]
    assert now(backend, result).args == values


@sentence(
    "ref/tasks: BaseTaskBackend.enqueue",
    "args are the positional arguments and kwargs are the keyword arguments to be passed to the task. Returns a "
    "TaskResult.",
)
def test_enqueue_of_the_backend(backend):
    assert isinstance(task_backends["default"].enqueue(tasks.add, [1], {"b": 5}), TaskResult)
    assert isinstance(async_to_sync(task_backends["default"].aenqueue)(tasks.add, [2], {"b": 5}), TaskResult)
    backend.run()
    assert sorted(tasks.calls) == [(1, 5), (2, 5)]


@sentence(
    "topics/tasks: Enqueueing Tasks",
    "Because both Task arguments and return values are serialized to JSON, they must be JSON-serializable.",
)
@pytest.mark.parametrize("how", ENQUEUE)
@pytest.mark.parametrize("value", [datetime.datetime(2026, 1, 1), object(), {1, 2}, decimal.Decimal(1)])  # noqa: DTZ001
def test_arguments_that_json_has_not(backend, how, value):
    for args, kwargs in (([value], {}), ([], {"key": value}), ([{"in": [value]}], {})):
        with pytest.raises(TypeError):
            enqueue(tasks.note, how, *args, **kwargs)
    backend.run()
    assert not tasks.calls


@sentence(
    "ref/tasks: Task.enqueue",
    "Arguments are passed to the Task's function after a round-trip through a json.dumps()/json.loads() cycle.",
)
def test_a_round_trip_of_sequences(backend):
    result = tasks.note.enqueue((1, (2, 3)), key=("a", b"b"))
    assert (result.args, result.kwargs) == ([[1, [2, 3]]], {"key": ["a", "b"]})
    backend.run()
    assert tasks.calls == [(([1, [2, 3]],), {"key": ["a", "b"]})]


@sentence(
    "ref/tasks: Task.enqueue",
    "Arguments are passed to the Task's function after a round-trip through a json.dumps()/json.loads() cycle.",
)
def test_a_round_trip_of_keys(backend):
    tasks.note.enqueue({1: 2})
    backend.run()
    assert tasks.calls == [(({"1": 2},), {})]


@sentence(
    "topics/tasks: Enqueueing Tasks",
    "The double_dictionary Task fails because after the JSON round-trip the tuple (1, 2, 3) becomes the list "
    "[1, 2, 3], which cannot be used as a dictionary key.",
)
def test_the_example_of_a_round_trip(finished):
    result = finished(tasks.double_dictionary, (1, 2, 3))
    assert result.status == TaskResultStatus.FAILED
    assert "TypeError: unhashable type: 'list'" in result.errors[0].traceback


@sentence("ref/tasks: Task.enqueue", "If the Task is not valid according to the backend, InvalidTask is raised.")
@pytest.mark.parametrize("how", ENQUEUE)
def test_a_task_that_is_not_valid_any_more(backend, settings, how):
    task = tasks.note.using(queue_name="mail")
    settings.TASKS = backend.tasks(QUEUES=["default"])
    with pytest.raises(InvalidTask):
        enqueue(task, how)
    backend.run()
    assert not tasks.calls


@sentence("topics/tasks: Task results", "Each TaskResult has a unique id.")
def test_ids_are_unique(backend):
    assert len({tasks.add.enqueue(1).id for _ in range(20)}) == 20


@sentence("ref/tasks: TaskResult.id", "Task result ids are always strings less than 64 characters.")
def test_ids_are_short_strings(backend):
    result = tasks.add.enqueue(1)
    assert isinstance(result.id, str)
    assert 0 < len(result.id) < 64


@sentence("ref/tasks: TaskResultStatus.READY", "The Task has just been enqueued, or is ready to be executed again.")
@needs("background")
def test_an_enqueued_task_is_ready(backend):
    before = timezone.now()
    result = tasks.add.enqueue(1, b=2)
    assert (result.status, result.is_finished) == (TaskResultStatus.READY, False)
    assert (result.started_at, result.last_attempted_at, result.finished_at) == (None, None, None)
    assert (result.errors, result.worker_ids, result.attempts) == ([], [], 0)
    assert not tasks.calls
    assert before - datetime.timedelta(seconds=1) <= result.enqueued_at <= timezone.now()


@sentence("topics/tasks: Return values", "If the Task has not finished executing, or has failed, ValueError is raised.")
@needs("background")
def test_an_enqueued_task_has_no_return_value(backend):
    with pytest.raises(ValueError, match="Task has not finished yet"):
        _ = tasks.add.enqueue(1).return_value
