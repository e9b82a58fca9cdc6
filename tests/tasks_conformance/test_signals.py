"""Signals and logs"""

from __future__ import annotations

import logging

import pytest
from asgiref.sync import async_to_sync

from django_mysqlqueue.tasks.framework import (
    TaskResultStatus,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from tests.tasks_conformance import tasks
from tests.tasks_conformance.backends import PACKAGE
from tests.tasks_conformance.conftest import now

sentence, needs = pytest.mark.sentence, pytest.mark.needs
SIGNALS = {"enqueued": task_enqueued, "started": task_started, "finished": task_finished}


@pytest.fixture
def sent():
    """What is sent: name, sender, id and status of each signal."""
    got = []

    def note(sender, task_result, signal, **kwargs):
        (name,) = (name for name, one in SIGNALS.items() if one is signal)
        got.append((name, sender, task_result.id, task_result.status.value, len(task_result.errors)))

    for signal in SIGNALS.values():
        signal.connect(note)
    yield got
    for signal in SIGNALS.values():
        signal.disconnect(note)


def of(sent, name):
    """The ids, the statuses and the numbers of errors that were sent with a signal."""
    return [rest for one, _, *rest in sent if one == name]


@sentence("ref/signals: task_enqueued", "Sent once a Task has been enqueued.")
@pytest.mark.parametrize("how", ["enqueue", "aenqueue"])
def test_the_signal_of_enqueueing(backend, sent, how):
    result = tasks.add.enqueue(1) if how == "enqueue" else async_to_sync(tasks.add.aenqueue)(1)
    assert of(sent, "enqueued") == [[result.id, "READY", 0]]


@sentence("ref/signals: task_started", "Sent when a Task has started executing.")
def test_the_signal_of_the_start(backend, sent):
    result = tasks.add.enqueue(1)
    backend.run()
    assert of(sent, "started") == [[result.id, "RUNNING", 0]]


@sentence("ref/signals: task_finished", "Sent once a Task has finished executing, successfully or otherwise.")
def test_the_signal_of_a_success(backend, sent):
    result = tasks.add.enqueue(1)
    backend.run()
    assert of(sent, "finished") == [[result.id, "SUCCESSFUL", 0]]


@sentence("ref/signals: task_finished", "Sent once a Task has finished executing, successfully or otherwise.")
def test_the_signal_of_a_failure(backend, sent):
    result = tasks.fail.enqueue()
    backend.run()
    assert of(sent, "finished") == [[result.id, "FAILED", 1]]


@sentence("ref/signals: task_finished", "Sent once a Task has finished executing, successfully or otherwise.")
@needs("retries")
def test_the_signal_of_a_failure_after_the_last_attempt(backend, settings, sent):
    settings.TASKS = backend.tasks(OPTIONS=dict(backend.retry_options))
    result = tasks.fail.enqueue()
    backend.run()
    assert len(tasks.calls) == 3
    assert of(sent, "finished") == [[result.id, "FAILED", 3]]


@sentence("ref/signals: Tasks signals", "sender: The backend class which the Task was enqueued on to.")
def test_the_sender_is_the_class(backend, sent):
    tasks.add.enqueue(1)
    tasks.fail.enqueue()
    backend.run()
    assert {sender for _, sender, *_ in sent} == {type(task_backends["default"])}
    assert len(sent) == 6


@sentence("ref/signals: Tasks signals", "Sent once … enqueued. Sent when … started. Sent once … finished.")
def test_the_order_of_signals(backend, sent):
    tasks.add.enqueue(1)
    backend.run()
    assert [name for name, *_ in sent] == ["enqueued", "started", "finished"]


@sentence("ref/signals: task_finished", "task_result: The finished TaskResult.")
def test_the_finished_result_is_complete(backend):
    got = []

    def note(task_result, **kwargs):
        got.append((task_result.is_finished, task_result.finished_at is None, task_result.attempts))
        got.append(task_result.return_value)

    task_finished.connect(note)
    try:
        tasks.add.enqueue(1)
        backend.run()
    finally:
        task_finished.disconnect(note)
    assert got == [(True, False, 1), 2]


@sentence("source: django.tasks.signals.log_task_enqueued", "Task id=%s path=%s enqueued backend=%s")
def test_the_log_of_enqueueing(backend, caplog):
    with caplog.at_level(logging.DEBUG, logger=PACKAGE):
        result = tasks.add.enqueue(1)
    assert f"Task id={result.id} path=tests.tasks_conformance.tasks.add enqueued backend=default" in caplog.messages


@sentence("source: django.tasks.signals.log_task_finished", "Task id=%s path=%s state=%s")
def test_the_log_of_a_success(backend, caplog):
    with caplog.at_level(logging.INFO, logger=PACKAGE):
        result = tasks.add.enqueue(1)
        backend.run()
    found = [record.getMessage() for record in caplog.records if record.name == PACKAGE]
    task = f"Task id={result.id} path=tests.tasks_conformance.tasks.add state="
    assert found == [f"{task}RUNNING", f"{task}SUCCESSFUL"]


@sentence(
    "source: django.tasks.signals.log_task_finished",
    "Signal is sent inside exception handlers, so exc_info() is available.",
)
def test_the_log_of_a_failure(backend, caplog):
    with caplog.at_level(logging.ERROR, logger=PACKAGE):
        result = tasks.fail.enqueue("the reason")
        backend.run()
    (record,) = (record for record in caplog.records if record.name == PACKAGE)
    assert record.getMessage() == f"Task id={result.id} path=tests.tasks_conformance.tasks.fail state=FAILED"
    assert record.exc_info
    assert str(record.exc_info[1]) == "the reason"


@sentence(
    "ref/tasks: TaskResultStatus.FAILED", "The Task raised an exception during execution, or was unable to start."
)
def test_receivers_see_what_was_stored(backend, sent):
    result = tasks.fail.enqueue()
    backend.run()
    assert now(backend, result).status == TaskResultStatus.FAILED
    assert of(sent, "finished")[0][1] == "FAILED"
