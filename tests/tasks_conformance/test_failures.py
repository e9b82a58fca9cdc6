"""Errors"""

from __future__ import annotations

import pytest
from django.db import DatabaseError

from django_mysqlqueue.tasks.framework import TaskError, TaskResultStatus
from tests.tasks_conformance import tasks
from tests.tasks_conformance.conftest import now

sentence, needs = pytest.mark.sentence, pytest.mark.needs
FAILED = TaskResultStatus.FAILED


@sentence(
    "topics/tasks: Errors",
    "If the Task doesn't succeed, and instead raises an exception, either as part of the Task or as part of running "
    "it, the exception and traceback are saved to the TaskResult.errors list.",
)
def test_an_error_is_saved(finished):
    result = finished(tasks.fail, "the reason")
    (error,) = result.errors
    assert isinstance(error, TaskError)
    assert result.status == FAILED
    assert error.exception_class is ValueError


@sentence(
    "topics/tasks: Errors",
    "If the Task doesn't succeed, and instead raises an exception, either as part of the Task or as part of running "
    "it, the exception and traceback are saved to the TaskResult.errors list.",
)
def test_an_error_of_running_a_task(finished):
    result = finished(tasks.add)
    assert (result.status, result.errors[0].exception_class) == (FAILED, TypeError)


@sentence(
    "ref/tasks: TaskError.traceback", "The traceback (as a string) from the raised exception when the Task failed."
)
@pytest.mark.parametrize("text", ["no", "first\nsecond", "é\U0001f600", "a\u2028b\x85c", "x" * 5000])
def test_the_traceback(finished, text):
    traceback = finished(tasks.fail, text).errors[0].traceback
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert traceback.endswith(f"ValueError: {text}\n")
    assert 'tasks.py", line' in traceback


@sentence("ref/tasks: TaskError.exception_class", "The exception class raised when executing the Task.")
@pytest.mark.parametrize(("kind", "expected"), [("key", KeyError), ("custom", tasks.CustomError)])
def test_the_class_of_an_exception(finished, kind, expected):
    assert finished(tasks.fail_with, kind).errors[0].exception_class is expected


@sentence(
    "ref/tasks: TaskResultStatus.FAILED", "The Task raised an exception during execution, or was unable to start."
)
def test_system_exit_is_a_failure(backend, finished):
    result = finished(tasks.fail_with, "exit")
    assert (result.status, result.errors[0].exception_class) == (FAILED, SystemExit)
    assert finished(tasks.add, 1).return_value == 2


@sentence(
    "ref/tasks: TaskResultStatus.FAILED", "The Task raised an exception during execution, or was unable to start."
)
def test_an_error_of_the_database_is_a_failure(backend, finished):
    result = finished(tasks.query_nonsense)
    assert result.status == FAILED
    assert issubclass(result.errors[-1].exception_class, DatabaseError)
    assert finished(tasks.add, 1).return_value == 2


@sentence("topics/tasks: Return values", "If the Task has not finished executing, or has failed, ValueError is raised.")
def test_a_failure_has_no_return_value(finished):
    with pytest.raises(ValueError, match="Task failed"):
        _ = finished(tasks.fail).return_value


@sentence(
    "ref/tasks: TaskResult.errors",
    "A list of TaskError instances for the errors raised as part of each execution of the Task.",
)
def test_there_is_no_error_of_a_success(finished):
    assert finished(tasks.add, 1).errors == []


@sentence(
    "ref/tasks: TaskResult.errors",
    "A list of TaskError instances for the errors raised as part of each execution of the Task.",
)
@needs("retries")
def test_the_errors_of_each_attempt(backend, settings, finished):
    settings.TASKS = backend.tasks(OPTIONS=dict(backend.retry_options))
    failed = finished(tasks.fail, "again")
    assert (failed.status, len(tasks.calls)) == (FAILED, 3)
    assert [error.exception_class for error in failed.errors] == [ValueError] * 3
    succeeded = finished(tasks.fail_first)
    assert succeeded.status == TaskResultStatus.SUCCESSFUL
    assert [error.traceback.splitlines()[-1] for error in succeeded.errors] == [
        "ValueError: attempt 1",
        "ValueError: attempt 2",
    ]


@sentence("ref/tasks: TaskResultStatus.READY", "The Task has just been enqueued, or is ready to be executed again.")
@needs("retries")
def test_between_two_attempts_a_task_is_ready(backend, settings):
    settings.TASKS = backend.tasks(OPTIONS=dict(backend.retry_options))
    result = tasks.fail_first.enqueue()
    backend.run_one_attempt()
    now(backend, result)
    assert (result.status, result.is_finished, result.finished_at) == (TaskResultStatus.READY, False, None)
    assert (len(result.errors), result.attempts, tasks.calls) == (1, 1, [1])
    with pytest.raises(ValueError, match="Task has not finished yet"):
        _ = result.return_value
