"""Configuring backends"""

from __future__ import annotations

import pytest
from django.core import checks
from django.utils import timezone

from django_mysqlqueue.tasks.framework import BaseTaskBackend, InvalidTask, task_backends
from tests.tasks_conformance import tasks
from tests.tasks_conformance.backends import PACKAGE, SECOND_ALIAS, SECOND_QUEUE

sentence, needs = pytest.mark.sentence, pytest.mark.needs


@sentence("topics/tasks: Third-party backends", "A Task backend is a class that inherits BaseTaskBackend.")
def test_a_backend_is_a_class_that_inherits(backend):
    assert issubclass(backend.kind, BaseTaskBackend)


@sentence(
    "ref/settings: TASKS, BACKEND",
    "You can use a backend that doesn't ship with Django by setting BACKEND to a fully-qualified path of a backend "
    "class.",
)
def test_a_backend_is_found_by_its_path(backend):
    assert type(task_backends["default"]) is backend.kind
    assert task_backends["default"].alias == "default"


@sentence(
    "topics/tasks: Configuring a Task backend",
    "Whilst most applications will only need a single backend, multiple are supported.",
)
def test_several_backends(backend, settings):
    settings.TASKS = backend.two()
    results = [tasks.add.enqueue(1), tasks.add.using(backend=SECOND_ALIAS, queue_name=SECOND_QUEUE).enqueue(2)]
    assert [result.backend for result in results] == ["default", SECOND_ALIAS]
    for alias in ("default", SECOND_ALIAS):
        backend.run(alias)
    assert sorted(tasks.calls) == [(1, 1), (2, 1)]


@sentence("ref/settings: TASKS, QUEUES", 'Default: ["default"]')
def test_the_default_queue(backend, settings):
    settings.TASKS = backend.tasks()
    del settings.TASKS["default"]["QUEUES"]
    settings.TASKS = settings.TASKS
    tasks.add.enqueue(1)
    backend.run()
    assert tasks.calls == [(1, 1)]
    with pytest.raises(InvalidTask):
        tasks.add.using(queue_name="mail")


@sentence(
    "ref/settings: TASKS, QUEUES",
    "Specify the queue names supported by the backend. This can be used to ensure Tasks aren't enqueued to queues "
    "which do not exist.",
)
def test_queues_that_do_not_exist(backend):
    assert tasks.add.using(queue_name="mail").queue_name == "mail"
    with pytest.raises(InvalidTask):
        tasks.add.using(queue_name="unknown")


@sentence("ref/settings: TASKS, QUEUES", "To disable queue name validation, set to an empty list ([]).")
def test_an_empty_list_of_queues(backend, settings):
    settings.TASKS = backend.tasks(QUEUES=[])
    tasks.add.using(queue_name="any").enqueue(1)
    backend.run()
    assert tasks.calls == [(1, 1)]


@sentence(
    "ref/tasks: BaseTaskBackend.options",
    "A dictionary of extra parameters for the Task backend. These are provided using the OPTIONS setting.",
)
def test_options(backend):
    assert task_backends["default"].options == backend.options


@sentence(
    "ref/tasks: BaseTaskBackend.supports_defer",
    "Whether the backend supports enqueueing Tasks to be executed after a specific time using the run_after attribute.",
)
def test_the_flag_of_run_after(backend):
    flag = backend.kind.supports_defer
    assert flag is backend.offers("supports_defer")
    if flag:
        assert tasks.add.using(run_after=timezone.now()).run_after
    else:
        with pytest.raises(InvalidTask):
            tasks.add.using(run_after=timezone.now())


@sentence(
    "ref/tasks: BaseTaskBackend.supports_async_task",
    "Whether the backend supports enqueueing async functions (coroutines).",
)
def test_the_flag_of_async_tasks(backend):
    flag = backend.kind.supports_async_task
    assert flag is backend.offers("supports_async_task")
    if flag:
        task_backends["default"].validate_task(tasks.add_later)
    else:
        with pytest.raises(InvalidTask):
            task_backends["default"].validate_task(tasks.add_later)


@sentence(
    "ref/tasks: BaseTaskBackend.supports_priority",
    "Whether the backend supports executing Tasks as ordered by their priority.",
)
def test_the_flag_of_priorities(backend):
    flag = backend.kind.supports_priority
    assert flag is backend.offers("supports_priority")
    if flag:
        assert tasks.add.using(priority=5).priority == 5
    else:
        with pytest.raises(InvalidTask):
            tasks.add.using(priority=5)


@sentence(
    "topics/tasks: Task results",
    "Some backends, such as the built-in ImmediateBackend do not support get_result(). Calling get_result() on these "
    "backends will raise NotImplementedError.",
)
def test_the_flag_of_results(backend):
    flag = backend.kind.supports_get_result
    assert flag is backend.offers("supports_get_result")
    result = tasks.add.enqueue(1)
    if flag:
        assert task_backends["default"].get_result(result.id).id == result.id
    else:
        with pytest.raises(NotImplementedError):
            task_backends["default"].get_result(result.id)


@sentence("source: django.tasks.checks.check_tasks", "Checks all registered Task backends.")
def test_the_checks_find_nothing(backend, settings):
    assert list(task_backends["default"].check()) == []
    settings.TASKS = backend.two()
    assert not [one for one in checks.run_checks() if "task" in f"{one.id} {one.msg} {one.obj}".lower()]


@sentence(
    "source: django.tasks.signals.clear_tasks_handlers", "Reset the connection handler whenever the settings change."
)
def test_settings_that_change(backend, settings):
    first = task_backends["default"]
    assert tasks.add.using(queue_name="mail").enqueue(1).task.queue_name == "mail"
    settings.TASKS = backend.tasks(QUEUES=["default"])
    assert task_backends["default"] is not first
    with pytest.raises(InvalidTask):
        tasks.add.using(queue_name="mail")


@sentence("topics/tasks: Retrieving backends", 'The "default" backend is available as default_task_backend.')
def test_the_default_backend(backend):
    from django.utils.module_loading import import_string

    default = import_string(f"{PACKAGE}.default_task_backend")
    assert default == task_backends["default"]
    assert default.enqueue(tasks.add, [1], {"b": 2}).kwargs == {"b": 2}
