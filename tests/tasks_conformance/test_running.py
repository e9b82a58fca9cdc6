"""Running tasks"""

from __future__ import annotations

import dataclasses
import json
import os
import threading

import pytest
from django.conf import settings as django_settings
from django.db import connections

from django_mysqlqueue.tasks.framework import TaskContext, TaskResultStatus, task_backends
from tests.support.processes import Worker
from tests.tasks_conformance import tasks
from tests.tasks_conformance.conftest import now

sentence, needs = pytest.mark.sentence, pytest.mark.needs


def elsewhere(function):
    """Call a function on another thread, with connections of its own."""
    found = []

    def call():
        try:
            found.append(function())
        finally:
            connections.close_all()

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return found[0]


@sentence(
    "topics/tasks: Background Task fundamentals",
    "When a new Task is added, a Worker claims the Task, executes it, and saves the status and result back to the "
    "Queue Store.",
)
def test_a_worker_runs_a_task_once(backend, finished):
    result = finished(tasks.add, 1, b=2)
    backend.run()
    assert tasks.calls == [(1, 2)]
    assert (now(backend, result).status, result.return_value) == (TaskResultStatus.SUCCESSFUL, 3)


@sentence("topics/tasks: Background Task fundamentals", "These workers run outside the request-response lifecycle.")
@needs("background", "ends")
@pytest.mark.processes
def test_a_worker_is_a_process_of_its_own(backend, tmp_path):
    class Command(Worker):
        COMMAND = ("manage.py", *backend.command)

    done, failed = tasks.pid.enqueue(), tasks.fail.enqueue("in a process")
    worker = Command(tmp_path, env={"TEST_TASKS": json.dumps(django_settings.TASKS)})
    try:
        assert worker.wait(60) == 0, worker.output
    finally:
        worker.end()
    assert now(backend, done).return_value not in (None, os.getpid())
    assert now(backend, failed).status == TaskResultStatus.FAILED
    assert "ValueError: in a process" in failed.errors[0].traceback
    assert len(done.worker_ids) == len(failed.worker_ids) == 1


@sentence("ref/tasks: TaskContext", "Context only passed to a Task if it was defined with takes_context=True.")
def test_a_context_is_passed(backend):
    tasks.note.enqueue("a", k=1)
    tasks.with_context.enqueue("a", k=1)
    backend.run()
    without, (context, args, kwargs) = tasks.calls
    assert without == (("a",), {"k": 1})
    assert isinstance(context, TaskContext)
    assert (args, kwargs) == (("a",), {"k": 1})


@sentence("ref/tasks: TaskContext", "Attributes of TaskContext cannot be modified.")
def test_a_context_does_not_change(backend):
    tasks.with_context.enqueue()
    backend.run()
    with pytest.raises(dataclasses.FrozenInstanceError):
        tasks.calls[0][0].task_result = None


@sentence("ref/tasks: TaskContext.task_result", "The TaskResult currently being run.")
def test_the_result_in_a_context(backend):
    seen = {}

    def look(context):
        result = context.task_result
        seen.update(id=result.id, status=result.status, started=result.started_at, attempted=result.last_attempted_at)
        seen.update(task=result.task.func, workers=list(result.worker_ids), finished=result.finished_at)

    tasks.hooks["call"] = look
    result = tasks.hooked.enqueue()
    backend.run()
    assert (seen["id"], seen["task"]) == (result.id, tasks.hooked.func)
    assert (seen["status"], seen["finished"]) == (TaskResultStatus.RUNNING, None)
    assert seen["started"]
    assert seen["attempted"]
    assert len(seen["workers"]) == 1


@sentence(
    "ref/tasks: TaskContext.attempt", "The number of the current execution attempts for this Task, starting at 1."
)
def test_the_first_attempt(finished):
    assert finished(tasks.with_context).return_value == 1


@sentence(
    "ref/tasks: TaskContext.attempt", "The number of the current execution attempts for this Task, starting at 1."
)
@needs("retries")
def test_the_number_of_each_attempt(backend, settings, finished):
    settings.TASKS = backend.tasks(OPTIONS=dict(backend.retry_options))
    assert finished(tasks.fail_first).return_value == 3
    assert tasks.calls == [1, 2, 3]


@sentence("ref/tasks: TaskResultStatus.RUNNING", "The Task is currently being executed.")
@needs("supports_get_result")
def test_a_task_that_runs_is_running(backend):
    seen = []
    tasks.hooks["call"] = lambda context: seen.append(
        elsewhere(lambda: task_backends["default"].get_result(context.task_result.id))
    )
    tasks.hooked.enqueue()
    backend.run()
    (result,) = seen
    assert (result.status, result.is_finished, result.finished_at) == (TaskResultStatus.RUNNING, False, None)
    with pytest.raises(ValueError, match="Task has not finished yet"):
        _ = result.return_value


@sentence(
    "ref/tasks: BaseTaskBackend.supports_async_task",
    "Whether the backend supports enqueueing async functions (coroutines).",
)
@needs("supports_async_task")
def test_async_tasks(backend, finished):
    assert finished(tasks.add_later, 1, b=2).return_value == 3
    assert tasks.calls == [(1, 2)]
    failed = finished(tasks.fail_later)
    assert (failed.status, failed.errors[0].exception_class) == (TaskResultStatus.FAILED, ValueError)


@sentence("topics/tasks: Task context", "This can be accessed by taking a context argument.")
@needs("supports_async_task")
def test_async_tasks_with_a_context(finished):
    assert finished(tasks.with_context_later, "a").return_value == [1, "a"]
