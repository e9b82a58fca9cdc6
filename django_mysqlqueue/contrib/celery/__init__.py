"""Celery's tasks on the queue: ``shared_task``, signatures and chains, whose jobs are those of ``django.tasks``.

Settings may import this module: what it does not define itself is loaded on first use.
"""

from __future__ import annotations

import logging
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from django_mysqlqueue.exports import loaded_on_use

if TYPE_CHECKING:
    from django_mysqlqueue.contrib.celery.tasks import (
        Celery,
        Chain,
        EagerResult,
        SharedTask,
        Signature,
        chain,
        chord,
        group,
        shared_task,
        signature,
    )

__all__ = [
    "AlreadyQueued",
    "Celery",
    "Chain",
    "EagerResult",
    "Ignore",
    "MaxRetriesExceededError",
    "QueueOnce",
    "Reject",
    "Retry",
    "SharedTask",
    "Signature",
    "Task",
    "chain",
    "chord",
    "get_task_logger",
    "group",
    "install",
    "shared_task",
    "signature",
]

# A task that catches Celery's exceptions catches those of Celery, if it is installed.
if not TYPE_CHECKING and find_spec("celery") is not None:
    from celery.exceptions import Ignore, MaxRetriesExceededError, Reject, Retry
else:

    class Ignore(Exception):  # As Celery names it.
        """The job has succeeded, without a return value."""

    class Reject(Exception):
        """The job has FAILED; with ``requeue=True``, it is attempted again soon, and no attempt is counted."""

        def __init__(self, reason: object = None, *, requeue: bool = False) -> None:
            super().__init__(reason, requeue)
            self.reason = reason
            self.requeue = requeue

    class Retry(Exception):
        """The task has called ``retry()``."""

    class MaxRetriesExceededError(Exception):
        """The task has called ``retry()`` in its last attempt, without an exception."""


class Task:
    """The only base class that a task may have, beside ``QueueOnce``."""


class QueueOnce(Task):
    """A base class of tasks whose jobs are unique: that of celery-once, in its place."""

    once: ClassVar[dict[str, Any]] = {"graceful": False, "unlock_before_run": False}


class AlreadyQueued(Exception):  # As celery-once names it.
    """Is not raised: a second call returns the result of the job that is waiting or running."""


class Priorities:
    """How the priorities of Celery's calls become those of jobs."""

    default = 0
    highest_first = False

    @classmethod
    def of_job(cls, celery: int) -> int:
        """Return the priority of a job."""
        return celery - cls.default if cls.highest_first else cls.default - celery

    @classmethod
    def of_celery(cls, job: int) -> int:
        """Return the priority of Celery whose calls have jobs with a priority."""
        return cls.default + job if cls.highest_first else cls.default - job


ignored: set[str] = set()
"""The names of options of tasks and calls that are ignored and not refused."""


_routes: dict[str, str | Mapping[str, Any]] = {}
"""Queues, or options, by the names of tasks, or by patterns of names."""


def install(
    *,
    default_priority: int = 0,
    highest_first: bool = False,
    ignore: Iterable[str] = (),
    routes: Mapping[str, str | Mapping[str, Any]] | None = None,
) -> None:
    """Let ``from celery import shared_task`` in other packages return tasks whose jobs run in this queue.

    Call it in the settings, before any of these packages is imported. If Celery is not installed, modules ``celery``,
    ``celery.exceptions`` and ``celery.utils.log`` take its place, and so does ``celery_once`` that of celery-once. If
    Celery is installed, its ``shared_task`` is replaced, ``chain``, ``group``, ``chord`` and ``signature`` accept these
    tasks, too, and they are instances of its ``Task``; tasks of an application (``@app.task``) stay with Celery.

    Args:
        default_priority: the priority in Celery of calls that have none (``task_default_priority``). Their jobs have
            the priority 0.
        highest_first: whether higher priorities come first, as they do with RabbitMQ. If False, 0 comes first, as with
            Redis.
        ignore: the names of options that are ignored where they would be refused, for example ``acks_late``.
        routes: the queues of tasks that have none of their own, by their names in Celery (``task_routes``):
            ``{"shop.*": {"queue": "mail", "priority": 3}, "shop.total": "default"}``. A name comes before patterns.
    """
    _routes.clear()
    _routes.update(routes or {})
    ignored.clear()
    ignored.update(ignore)
    Priorities.default, Priorities.highest_first = default_priority, highest_first
    if "celery" not in sys.modules and find_spec("celery") is None:
        # As packages, so that what is missing is named: "No module named 'celery.signals'".
        for name in ("celery", "celery.exceptions", "celery.utils", "celery.utils.log"):
            _put(name)
    elif not getattr(sys.modules.get("celery"), "_is_mysqlqueue", False):
        celery: Any = import_module("celery")
        for name in ("shared_task", "chain", "group", "chord", "signature"):
            # Read first: Celery sets several of its names when one of them is read for the first time.
            of_celery = getattr(celery, name)
            setattr(celery, name, _shared_task if name == "shared_task" else _for_ours(name, of_celery))
        celery.Task = _class_of_both(celery.Task)
    if "celery_once" not in sys.modules and find_spec("celery_once") is None:
        _put("celery_once")


def route_of(name: str) -> Mapping[str, Any]:
    """Return the options of a task for which ``install()`` has a route, by its name in Celery."""
    patterns = (one for one in _routes if "*" in one and fnmatchcase(name, one))
    route = _routes.get(name if name in _routes else next(patterns, ""), {})
    return {"queue": route} if isinstance(route, str) else route


def _put(name: str) -> None:
    """Put a module into ``sys.modules`` that has the names of this one."""
    module: Any = ModuleType(name, f"In place of {name}: django_mysqlqueue.contrib.celery.")
    module.__path__, module.__file__, module._is_mysqlqueue = [], __file__, True
    module.__spec__ = ModuleSpec(name, None, is_package=True)  # Without it, find_spec() raises ValueError.
    module.__getattr__ = lambda attribute: _public(name, attribute)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _public(module: str, name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"django_mysqlqueue.contrib.celery has no {name!r} for the module {module!r}")
    return getattr(sys.modules[__name__], name)


def _shared_task(*args: Any, **options: Any) -> Any:
    return _public("celery", "shared_task")(*args, **options)


def _for_ours(name: str, of_celery: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for the signatures of both: an import of the own one here would be too early."""

    def either(*args: Any, **options: Any) -> Any:
        given = [*args, *options.values()]
        # Signatures of Celery are mappings.
        if args and isinstance(args[0], Iterable) and not isinstance(args[0], (str, Mapping)):
            members = list(args[0])
            args, given = (members, *args[1:]), [*members, *given]
        is_ours = any(type(one).__module__.startswith(__name__) for one in given)
        if not is_ours and name == "signature" and args and isinstance(args[0], (str, Mapping)):
            task = args[0] if isinstance(args[0], str) else args[0].get("task")
            is_ours = task in getattr(sys.modules.get(f"{__name__}.tasks"), "_by_name", ())
        return (_public("celery", name) if is_ours else of_celery)(*args, **options)

    return either


def _class_of_both(of_celery: type) -> type:
    """Return a class of tasks for Celery whose instances are those of both."""

    def of_either(cls: type, other: type) -> Any:
        return issubclass(other, (of_celery, Task)) if cls is both else NotImplemented

    both = ABCMeta("Task", (of_celery,), {"abstract": True, "__subclasshook__": classmethod(of_either)})
    both.__module__ = Task.__module__
    return both


def get_task_logger(name: str) -> logging.Logger:
    """Return the logger with a name.

    Args:
        name: its name.
    """
    return logging.getLogger(name)


_HOMES = {".tasks": "Celery Chain EagerResult SharedTask Signature chain chord group shared_task signature"}
__getattr__, __dir__ = loaded_on_use(__name__, _HOMES)
