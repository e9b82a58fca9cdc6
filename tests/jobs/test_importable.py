"""Tasks that a worker could not import: what refuses them, and when."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from django.core import checks

from django_mysqlqueue.models import JobResult, OutboxMessage
from django_mysqlqueue.tasks import call, enqueue_chain, enqueue_many, importing
from django_mysqlqueue.tasks.framework import InvalidTask, task_backends
from tests.app import jobs
from tests.support import job_worlds

HEAD = """
try:
    from django.tasks import task
except ImportError:
    from django_tasks import task
"""


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings, monkeypatch):
    settings.TASKS = job_worlds.TASKS
    monkeypatch.setattr(importing, "_declared", {})


@pytest.fixture
def module(monkeypatch):
    """Returns a module with some code, which can be imported by its name during the test."""

    def made(code, name="tests_declared"):
        found = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, found)
        exec(HEAD + code, vars(found))  # noqa: S102
        return found

    return made


def errors():
    return [one.msg for one in checks.run_checks() if one.id == "django_mysqlqueue.E031"]


NO_FUNCTIONS = {
    "a static method": ("class K:\n    @staticmethod\n    @task\n    def f(x): ...", r"tests_declared\.K\.f"),
    "a method": ("class K:\n    @task\n    def f(x): ...", r"tests_declared\.K\.f"),
    "a lambda": ("f = task(lambda x: x)", r"tests_declared\.<lambda>"),
}


@pytest.mark.parametrize("name", NO_FUNCTIONS)
def test_the_declaration_refuses_what_is_no_function_of_a_module(module, name):
    code, path = NO_FUNCTIONS[name]
    with pytest.raises(
        InvalidTask, match=f"^'{path}' is not a task that a worker can import: it must be a named function"
    ):
        module(code)
    assert errors() == []


SHADOWED = {
    "by another task": (
        "@task\ndef f(): ...\nfirst = f\n@task\ndef f(): ...",
        "'tests_declared.f' is not the task that a worker would import: its module has another one with this name.",
    ),
    "by a function": (
        "@task\ndef f(): ...\nfirst = f\ndef f(): ...",
        "'tests_declared.f' is not a task that a worker can import: tests_declared.f is not a task: <function f at ",
    ),
    "by nothing": (
        "@task\ndef f(): ...\nfirst = f\ndel f",
        '\'tests_declared.f\' is not a task that a worker can import: Module "tests_declared" does not define a "f"',
    ),
    "by the name of a module that is not there": (
        "def f(): ...\nf.__module__ = 'no.such'\nfirst = f = task(f)",
        "'no.such.f' is not a task that a worker can import: No module named 'no'",
    ),
}


@pytest.mark.parametrize("name", SHADOWED)
def test_a_task_that_is_not_found_by_its_path_is_refused_by_enqueue_and_check(module, name):
    code, text = SHADOWED[name]
    first = module(code).first
    for enqueue in (
        first.enqueue,
        first.using(priority=5).enqueue,
        lambda: enqueue_many([call(jobs.add, 1), call(first)]),
        lambda: enqueue_chain(call(jobs.add, 1), call(first)),
    ):
        with pytest.raises(InvalidTask) as caught:
            enqueue()
        assert str(caught.value).startswith(text)
    assert not JobResult.objects.exists()
    assert not OutboxMessage.objects.exists()
    assert [one.startswith(text) for one in errors()] == [True] * ("no.such" not in code)


def test_a_task_of_a_script_is_refused_by_enqueue_and_check(module):
    """It is declared, because a module with tasks may be run as a script; but a worker has another ``__main__``."""
    first = module("@task\ndef f(): ...", "__main__").f
    text = "'__main__.f' is not a task that a worker can import: its module runs as a script."
    with pytest.raises(InvalidTask, match=f"^{text}"):
        first.enqueue()
    (error,) = errors()
    assert error.startswith(text)


def test_a_schedule_of_a_task_of_a_script_is_refused(module, settings):
    found = module("@task\ndef f(): ...", "__main__")
    settings.MYSQLQUEUE = {"RECURRING": {"a": {"EVERY": 60, "TASK": "__main__.f"}}}
    (error,) = [one.msg for one in checks.run_checks() if one.id == "django_mysqlqueue.E027"]
    assert "'__main__.f' is not a task that a worker can import: its module runs as a script." in error
    del found


def test_each_path_is_imported_once(monkeypatch):
    found = []
    monkeypatch.setattr(importing, "_importable", {})
    real = importing.find_task
    monkeypatch.setattr(importing, "find_task", lambda path: found.append(path) or real(path))
    for number in range(3):
        jobs.add.using(priority=number).enqueue(number)
    enqueue_many([call(jobs.write, number) for number in range(3)])
    assert found == ["tests.app.jobs.add", "tests.app.jobs.write"]


def test_a_task_that_is_refused_may_be_enqueued_once_it_is_found(module):
    found = module("@task\ndef f(): ...\nfirst = f\ndel f")
    with pytest.raises(InvalidTask):
        found.first.enqueue()
    found.f = found.first
    found.f.enqueue()
    assert errors() == []


def test_a_module_that_is_imported_again_replaces_its_tasks(module):
    """Also for those that hold the former task."""
    code = "import functools\n\ndef wrapped(f):\n    return functools.wraps(f)(lambda: f())\n\n"
    code += "@task\ndef f(): ...\n\n@task\n@wrapped\ndef g(): ..."
    former, again = module(code), module(code)
    for found in (former, again, former):
        found.f.enqueue()
        found.g.enqueue()
    assert errors() == []


def test_two_tasks_with_one_wrapper_are_told_apart(module):
    code = "import functools\n\ndef wrapped(f):\n    return functools.wraps(f)(lambda: f())\n\n"
    found = module(f"{code}@task\n@wrapped\ndef f(): ...\n\nfirst = f\n\n@task\n@wrapped\ndef f(): ...")
    found.f.enqueue()
    with pytest.raises(InvalidTask, match="has another one with this name"):
        found.first.enqueue()
    assert len(errors()) == 1


def test_tasks_of_other_backends_are_not_checked(module, settings):
    other = {"BACKEND": f"{task_backends.__module__}.backends.dummy.DummyBackend"}
    settings.TASKS = {**job_worlds.TASKS, "other": other}
    module("@task(backend='other')\ndef f(): ...\nfirst = f\ndel f")
    assert errors() == []
