"""Calls of tasks: enqueueing several at once, and chains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from django_mysqlqueue.tasks.backend import MySQLQueueBackend, by_alias
from django_mysqlqueue.tasks.framework import AnyResult, AnyTask, InvalidTask


class Call(NamedTuple):
    """A task with its arguments: a job to enqueue."""

    task: AnyTask
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}


def call(task: AnyTask, *args: Any, **kwargs: Any) -> Call:
    """Return a call of a task, for ``enqueue_many`` and ``enqueue_chain``.

    Args:
        task: the task.
        args: its positional arguments, which must be JSON-serializable.
        kwargs: its keyword arguments, which must be JSON-serializable.
    """
    return Call(task, args, kwargs)


def enqueue_many(calls: Iterable[Call]) -> list[AnyResult]:
    """Enqueue several jobs, all or none of them, in the open transaction of the queue's database if there is one.

    Args:
        calls: the jobs. Their tasks must have the same backend.

    Returns:
        The results, in the same order.

    Raises:
        InvalidTask: something is not a call; or the tasks have several backends, or one that is not a
            ``MySQLQueueBackend``.
        TypeError, ValueError, InvalidMessage, TransactionMismatch: as ``enqueue()`` of the backend.
    """
    calls = _checked(calls)
    return _backend_of(calls).enqueue_many(calls) if calls else []


def enqueue_chain(*stages: Call | Iterable[Call]) -> list[list[AnyResult]]:
    """Enqueue a chain: the jobs of a stage start when all jobs of the stage before have succeeded.

    If a job has FAILED, the jobs of all later stages have FAILED, too, with ``EarlierJobFailed``. If its dead letter is
    redriven, they wait again.

    Args:
        stages: a call, or several calls that may run at the same time, for each stage.

    Returns:
        The results of each stage, in the same order.

    Raises:
        InvalidTask: something is not a call; a stage has no jobs or more than 10,000; there are more than 1,000 stages;
            a task is unique; the tasks have several backends, or one that is not a ``MySQLQueueBackend``; or their
            queues are in several databases.
        TypeError, ValueError, InvalidMessage, TransactionMismatch: as ``enqueue()`` of the backend.
    """
    of_stages = [[stage] if isinstance(stage, Call) else _checked(stage) for stage in stages]
    return _backend_of([call for stage in of_stages for call in stage]).enqueue_chain(of_stages)


def _checked(calls: object) -> list[Call]:
    found: list[Any] = [calls] if isinstance(calls, Call) or not isinstance(calls, Iterable) else list(calls)
    for one in found:
        if not isinstance(one, Call):
            raise InvalidTask(f"{one!r} is not a call: use call(task, *args, **kwargs).")
    return found


def _backend_of(calls: Sequence[Call]) -> MySQLQueueBackend:
    aliases = sorted({call.task.backend for call in calls})
    if len(aliases) != 1:
        raise InvalidTask(f"The tasks must have one backend, not {', '.join(aliases) or 'none'}.")
    if (backend := by_alias().get(aliases[0])) is None:
        raise InvalidTask(f"The backend {aliases[0]!r} of TASKS is not a MySQLQueueBackend.")
    return backend
