"""Results"""

from __future__ import annotations

import dataclasses
import datetime
import pickle
import uuid

import pytest
from asgiref.sync import async_to_sync
from django.utils import timezone
from django.utils.module_loading import import_string

from django_mysqlqueue.tasks.framework import TaskResultDoesNotExist, TaskResultStatus, task_backends
from tests.tasks_conformance import tasks
from tests.tasks_conformance.backends import PACKAGE
from tests.tasks_conformance.conftest import now
from tests.tasks_conformance.test_running import elsewhere

sentence, needs = pytest.mark.sentence, pytest.mark.needs
TaskResultMismatch = import_string(f"{PACKAGE}.exceptions.TaskResultMismatch")
MOMENT = datetime.timedelta(seconds=1)
"""The clocks of the database and of the process may differ by this."""
FIELDS = ("errors", "_return_value", "finished_at", "started_at", "last_attempted_at", "status", "enqueued_at")


def values(result):
    return {name: getattr(result, name) for name in (*FIELDS, "worker_ids", "id", "args", "kwargs", "backend")}


# -- fields -------------------------------------------------------------------


@sentence("ref/tasks: TaskResult.task", "The Task the result was enqueued for.")
def test_the_task_of_a_result(backend):
    task = tasks.add.using(priority=7, queue_name="mail")
    result = task.enqueue(1)
    assert result.task == task
    if backend.offers("supports_get_result"):
        assert task.get_result(result.id).task == task


@sentence("ref/tasks: TaskResult.enqueued_at", "The time when the Task was enqueued.")
def test_when_it_was_enqueued(finished):
    before = timezone.now()
    result = finished(tasks.add, 1)
    assert before - MOMENT <= result.enqueued_at <= timezone.now()


@sentence("ref/tasks: TaskResult.started_at", "The time when the Task began execution, on its first attempt.")
def test_when_it_was_started(finished):
    result = finished(tasks.add, 1)
    assert result.enqueued_at - MOMENT <= result.started_at <= timezone.now() + MOMENT


@sentence("ref/tasks: TaskResult.started_at", "The time when the Task began execution, on its first attempt.")
@needs("supports_get_result")
def test_when_it_was_started_is_known_while_it_runs(backend):
    seen = []
    tasks.hooks["call"] = lambda context: seen.append(
        elsewhere(lambda: task_backends["default"].get_result(context.task_result.id))
    )
    before = timezone.now()
    tasks.hooked.enqueue()
    backend.run()
    assert before - MOMENT <= seen[0].started_at <= timezone.now() + MOMENT


@sentence("ref/tasks: TaskResult.started_at", "The time when the Task began execution, on its first attempt.")
@needs("retries")
def test_when_it_was_started_first(backend, settings):
    settings.TASKS = backend.tasks(OPTIONS=dict(backend.retry_options))
    result = tasks.fail_first.enqueue()
    backend.run_one_attempt()
    first = now(backend, result).started_at
    backend.run()
    assert now(backend, result).status == TaskResultStatus.SUCCESSFUL
    assert result.started_at == first


@sentence("ref/tasks: TaskResult.last_attempted_at", "The time when the most recent Task run began execution.")
def test_when_it_was_attempted(finished):
    result = finished(tasks.add, 1)
    assert result.started_at <= result.last_attempted_at <= result.finished_at


@sentence("ref/tasks: TaskResult.last_attempted_at", "The time when the most recent Task run began execution.")
@needs("supports_get_result")
def test_when_it_was_attempted_is_known_while_it_runs(backend):
    seen = []
    tasks.hooks["call"] = lambda context: seen.append(
        elsewhere(lambda: task_backends["default"].get_result(context.task_result.id))
    )
    before = timezone.now()
    tasks.hooked.enqueue()
    backend.run()
    assert before - MOMENT <= seen[0].last_attempted_at <= timezone.now() + MOMENT


@sentence("ref/tasks: TaskResult.last_attempted_at", "The time when the most recent Task run began execution.")
@needs("retries", "supports_get_result")
def test_when_it_was_attempted_is_known_while_it_runs_again(backend, settings):
    settings.TASKS = backend.tasks(OPTIONS=dict(backend.retry_options))
    seen = []

    def look(context):
        seen.append(elsewhere(lambda: task_backends["default"].get_result(context.task_result.id)))
        if context.attempt == 1:
            raise ValueError

    tasks.hooks["call"] = look
    tasks.hooked.enqueue()
    backend.run_one_attempt()
    backend.run()
    first, second = seen
    assert first.last_attempted_at < second.last_attempted_at


@sentence("ref/tasks: TaskResult.last_attempted_at", "The time when the most recent Task run began execution.")
@needs("retries")
def test_when_it_was_attempted_last(backend, settings):
    settings.TASKS = backend.tasks(OPTIONS=dict(backend.retry_options))
    result = tasks.fail_first.enqueue()
    backend.run_one_attempt()
    first = now(backend, result).last_attempted_at
    backend.run()
    assert first < now(backend, result).last_attempted_at <= result.finished_at


@sentence(
    "ref/tasks: TaskResult.finished_at", "The time when the Task finished execution, whether it failed or succeeded."
)
@pytest.mark.parametrize("task", [tasks.add, tasks.fail], ids=["succeeded", "failed"])
def test_when_it_has_finished(finished, task):
    result = finished(task, 1)
    assert result.started_at <= result.finished_at <= timezone.now() + MOMENT


@sentence("ref/tasks: TaskResult.backend", "The backend the result is from.")
def test_the_backend_of_a_result(finished):
    assert finished(tasks.add, 1).backend == "default"


@sentence("ref/tasks: TaskResult.worker_ids", "The ids of the workers which have executed the Task.")
def test_workers(finished):
    result = finished(tasks.add, 1)
    assert len(result.worker_ids) == 1
    assert isinstance(result.worker_ids[0], str)
    assert result.worker_ids[0]


@sentence("ref/tasks: TaskResult.attempts", "The number of times the Task has been run.")
@pytest.mark.parametrize("task", [tasks.add, tasks.fail], ids=["succeeded", "failed"])
def test_one_attempt(finished, task):
    assert finished(task, 1).attempts == 1


@sentence("ref/tasks: TaskResult.attempts", "The number of times the Task has been run.")
@needs("retries")
def test_several_attempts(backend, settings, finished):
    settings.TASKS = backend.tasks(OPTIONS=dict(backend.retry_options))
    assert finished(tasks.fail_first).attempts == 3
    assert finished(tasks.fail).attempts == 3


@sentence("ref/tasks: TaskResult.is_finished", "Whether the Task has finished (successfully or not).")
@pytest.mark.parametrize("task", [tasks.add, tasks.fail], ids=["succeeded", "failed"])
def test_whether_it_has_finished(finished, task):
    assert finished(task, 1).is_finished is True


@sentence("ref/tasks: TaskResult", "Attributes of TaskResult cannot be modified.")
def test_a_result_does_not_change(backend):
    with pytest.raises(dataclasses.FrozenInstanceError):
        tasks.add.enqueue(1).status = TaskResultStatus.FAILED


# -- return values ------------------------------------------------------------


@sentence("ref/tasks: TaskResultStatus.SUCCESSFUL", "The Task has finished executing successfully.")
def test_a_success(finished):
    result = finished(tasks.add, 1)
    assert (result.status, result.errors) == (TaskResultStatus.SUCCESSFUL, [])


@sentence(
    "topics/tasks: Return values",
    "If your Task function returns something, it can be retrieved from the TaskResult.return_value attribute.",
)
@pytest.mark.parametrize(
    "value", [None, True, 42, 1.5, "", "é\U0001f600", [], {}, {"a": [1, {"b": None}]}, "x" * 100_000], ids=repr
)
def test_return_values(finished, value):
    assert finished(tasks.echo, value).return_value == value


@sentence(
    "topics/tasks: Enqueueing Tasks",
    "Because both Task arguments and return values are serialized to JSON, they must be JSON-serializable.",
)
def test_return_values_are_normalised(finished):
    assert finished(tasks.return_tuple).return_value == [1, [2, "three"]]


@sentence(
    "topics/tasks: Enqueueing Tasks",
    "Because both Task arguments and return values are serialized to JSON, they must be JSON-serializable.",
)
def test_return_values_that_json_has_not(finished):
    result = finished(tasks.return_object)
    assert (result.status, len(result.errors)) == (TaskResultStatus.FAILED, 1)
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value


# -- getting them -------------------------------------------------------------


@sentence("topics/tasks: Task results", "The get_result() method can retrieve a result based on its id.")
@needs("supports_get_result")
def test_get_result(backend, finished):
    result = finished(tasks.add, 1, b=2)
    assert values(tasks.add.get_result(result.id)) == values(result)
    assert tasks.add.get_result(result.id).return_value == 3


@sentence(
    "topics/tasks: Task results",
    "To retrieve a TaskResult, regardless of which kind of Task it was from, use the get_result() method on the "
    "backend.",
)
@needs("supports_get_result")
def test_get_result_of_the_backend(backend, finished):
    for result in (finished(tasks.add, 1), finished(tasks.echo, "a")):
        found = task_backends["default"].get_result(result.id)
        assert (found.task.func, found.return_value) == (result.task.func, result.return_value)


@sentence(
    "topics/tasks: Task results",
    "To retrieve results in an async context, aget_result() is available as an async variant of get_result() on both "
    "the backend and Task.",
)
@needs("supports_get_result")
def test_aget_result(backend, finished):
    result = finished(tasks.add, 1)
    for get in (tasks.add.aget_result, task_backends["default"].aget_result):
        assert values(async_to_sync(get)(result.id)) == values(result)


@sentence("ref/tasks: Task.get_result", "If the result does not exist, TaskResultDoesNotExist is raised.")
@needs("supports_get_result")
@pytest.mark.parametrize("missing", ["none", "", str(uuid.uuid4()), "x" * 63, "é", "5"])
def test_results_that_do_not_exist(backend, missing):
    tasks.add.enqueue(1)
    for get in (tasks.add.get_result, task_backends["default"].get_result):
        with pytest.raises(TaskResultDoesNotExist):
            get(missing)
    for get in (tasks.add.aget_result, task_backends["default"].aget_result):
        with pytest.raises(TaskResultDoesNotExist):
            async_to_sync(get)(missing)


@sentence(
    "ref/tasks: Task.get_result",
    "If the result is not the same type as the current Task, TaskResultMismatch is raised.",
)
@needs("supports_get_result")
def test_results_of_another_task(backend):
    result = tasks.add.enqueue(1)
    with pytest.raises(TaskResultMismatch):
        tasks.echo.get_result(result.id)
    with pytest.raises(TaskResultMismatch):
        async_to_sync(tasks.echo.aget_result)(result.id)


@sentence(
    "ref/tasks: BaseTaskBackend.supports_get_result",
    "Whether the backend supports retrieving Task results from another thread after they have been enqueued.",
)
@needs("supports_get_result")
def test_results_from_another_thread(backend, finished):
    result = finished(tasks.add, 1)
    assert elsewhere(lambda: tasks.add.get_result(result.id).return_value) == 2


@sentence(
    "topics/tasks: Task results",
    "However it's likely useful to retrieve the result from somewhere else (for example another request or another "
    "Task).",
)
@needs("supports_get_result")
def test_results_from_another_task(backend, finished):
    result = finished(tasks.add, 1)
    tasks.hooks["call"] = lambda context: tasks.add.get_result(result.id).return_value
    assert finished(tasks.hooked).return_value == 2


@sentence(
    "topics/tasks: Updating results",
    "A TaskResult contains the status of a Task's execution at the point it was retrieved. If the Task finishes after "
    "get_result() is called, it will not update.",
)
@needs("supports_get_result", "background")
def test_a_result_is_of_its_time(backend):
    result = tasks.add.get_result(tasks.add.enqueue(1).id)
    backend.run()
    assert tasks.add.get_result(result.id).is_finished
    assert (result.status, result.attempts, result.finished_at) == (TaskResultStatus.READY, 0, None)


@sentence("topics/tasks: Updating results", "To refresh the values, call the TaskResult.refresh() method.")
@needs("supports_get_result", "background")
@pytest.mark.parametrize("how", ["refresh", "arefresh"])
@pytest.mark.parametrize("task", [tasks.add, tasks.fail], ids=["succeeded", "failed"])
def test_refresh(backend, how, task):
    result = task.enqueue(1)
    backend.run()
    if how == "refresh":
        result.refresh()
    else:
        async_to_sync(result.arefresh)()
    assert result.is_finished
    assert values(result) == values(task.get_result(result.id))


@sentence("releases/6.1: Tasks", "Task and TaskResult instances can now be pickled and unpickled.")
@needs("Django 6.1")
def test_pickled_results(finished):
    for result in (finished(tasks.add, 1), finished(tasks.fail)):
        copy = pickle.loads(pickle.dumps(result))  # noqa: S301
        assert values(copy) == values(result)
        assert copy.task == result.task
