"""Tasks by their paths: workers find a task only by importing it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from asgiref.sync import iscoroutinefunction
from django.apps import apps
from django.utils.module_loading import import_string

from django_mysqlqueue.options import job_queues
from django_mysqlqueue.tasks.framework import AnyTask, InvalidTask, Task

_importable: dict[str, Callable[..., Any]] = {}
"""By path, the function of the task that was found there."""
_declared: dict[tuple[str, object], tuple[Callable[..., Any], str]] = {}
"""By path and place, the functions of the tasks that were declared, and the aliases of their backends in ``TASKS``."""


def find_task(path: str) -> AnyTask:
    """Return the task with a dotted path.

    Raises:
        ImportError: there is nothing with this path.
        InvalidTask: it is not a task.
    """
    found: AnyTask = import_string(path)
    # Not isinstance: a backend may have a class of tasks of its own.
    if not hasattr(found, "get_backend") or not hasattr(found, "using"):
        raise InvalidTask(f"{path} is not a task: {found!r}")
    return found


def known_tasks() -> list[str]:
    """Return the paths of the tasks in the imported modules of the installed apps."""
    prefixes = tuple(f"{config.name}." for config in apps.get_app_configs())
    modules = [(name, module) for name, module in list(sys.modules.items()) if name.startswith(prefixes)]
    # By their types: isinstance would evaluate lazy objects of the project.
    return sorted(
        f"{name}.{attribute}"
        for name, module in modules
        for attribute, value in list(vars(module).items())
        if issubclass(type(value), Task) and value.module_path == f"{name}.{attribute}"
    )


def is_async(path: str) -> bool:
    """Return whether a path is that of an async task, as far as it is known without importing anything."""
    module, _, name = path.rpartition(".")
    function = getattr(getattr(sys.modules.get(module), name, None), "func", None)
    return iscoroutinefunction(function)


def declared(task: AnyTask) -> None:
    """Note a task for ``check``. It cannot be imported yet: its name is bound after its declaration.

    Raises:
        InvalidTask: its path cannot be one that is imported.
    """
    path, function = task.module_path, task.func
    if _importable.get(path) is function:
        return
    if not function.__qualname__.isidentifier():
        raise InvalidTask(f"{_refused(path)}: it must be a named function at the top level of a module.")
    job_queues.declared.setdefault(path)
    # A module that is imported again replaces its own.
    _declared[path, _place_of(function)] = (function, task.backend)


def require_importable(task: AnyTask) -> None:
    """Require that importing a task's path returns the task. It is imported once for each path.

    Raises:
        InvalidTask: it does not.
    """
    path, function = task.module_path, task.func
    if _importable.get(path) is not function:
        _require(path, function)
        _importable[path] = function


def problems(alias: str) -> Iterator[str]:
    """Yield why workers cannot import some of the tasks that were declared with a backend."""
    for (path, _), (function, backend) in list(_declared.items()):
        # A test may have removed a module of its own.
        if backend == alias and function.__module__ in sys.modules:
            try:
                _require(path, function)
            except InvalidTask as error:
                yield str(error)


def _require(path: str, function: Callable[..., Any]) -> None:
    if function.__module__ == "__main__":
        raise InvalidTask(f"{_refused(path)}: its module runs as a script. Declare it in a module that is imported.")
    try:
        found = find_task(path)
    except Exception as error:  # An import runs code of the project.
        raise InvalidTask(f"{_refused(path)}: {error}") from error
    if _place_of(found.func) != _place_of(function):
        raise InvalidTask(
            f"{path!r} is not the task that a worker would import: its module has another one with this name."
        )


def _place_of(function: Callable[..., Any]) -> object:
    """Return the place in the source where a function is defined, which stays if its module is imported again."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def _refused(path: str) -> str:
    return f"{path!r} is not a task that a worker can import"
