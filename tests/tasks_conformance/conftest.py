"""One test for each sentence of Django's documentation that promises something of a backend, for each backend.

A test names its sentence with ``@pytest.mark.sentence``, and with ``@pytest.mark.needs`` what a backend must offer for
the sentence to apply to it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from django_mysqlqueue.tasks import importing
from tests.tasks_conformance import backends, tasks

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.json"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" not in metafunc.fixturenames:
        return
    needs = {name for mark in metafunc.definition.iter_markers("needs") for name in mark.args}
    names = [name for name in backends.TESTED if all(backends.ALL[name].offers(need) for need in needs)]
    metafunc.parametrize("backend", [pytest.param(name, marks=_marks(name, metafunc)) for name in names], indirect=True)


def _marks(name: str, metafunc: pytest.Metafunc) -> list[pytest.MarkDecorator]:
    if name != backends.Immediate.name:
        return []
    marks = [pytest.mark.any_engine]
    if "TEST_TASK_BACKENDS" not in os.environ:
        # The page of the results says so, and the suite says when it does not any more.
        test = f"{metafunc.module.__name__.rpartition('.')[2]}::{metafunc.definition.originalname}"
        if json.loads(RESULTS.read_text())["outcomes"][name].get(test):
            marks.append(pytest.mark.xfail(strict=True, reason="as the results say"))
    return marks


@pytest.fixture
def backend(request, db, no_handlers, settings, monkeypatch):
    """A backend, which is the default one."""
    # Tests make tasks of functions that are not bound to them; a later check would say so.
    monkeypatch.setattr(importing, "_declared", {})
    backend = backends.ALL[request.param]
    settings.TASKS = backend.tasks()
    tasks.calls.clear()
    tasks.hooks.clear()
    backend.clear()
    return backend


@pytest.fixture
def finished(backend):
    """Run a task to its end, and return its result."""

    def run(task, *args, **kwargs):
        result = task.enqueue(*args, **kwargs)
        backend.run()
        return now(backend, result)

    return run


def now(backend, result):
    """Return the result as it is now. ImmediateBackend has no other result than the enqueued one."""
    if backend.offers("supports_get_result"):
        result.refresh()
    return result
