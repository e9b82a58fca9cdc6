"""The options of jobs: ``@job`` beside ``@task``, and ``OPTIONS`` of the backend and of its queues."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from django_mysqlqueue.backoff import Backoff
from django_mysqlqueue.conf import check_handler_option, get_settings
from django_mysqlqueue.exceptions import SubscriberError

T = TypeVar("T")
ATTRIBUTE = "_mysqlqueue_job"
"""Attribute of a task's function with the options that ``@job`` has given."""


class _Unset:
    def __repr__(self) -> str:
        return "<from OPTIONS>"


UNSET: Any = _Unset()
Exceptions = type[Exception] | Sequence[type[Exception]]


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The resolved options of a job. Durations are in seconds."""

    max_attempts: int | None = 1
    """Number of failed attempts after which the job has failed; None: no limit."""
    backoff: Backoff = dataclasses.field(default_factory=Backoff)
    timeout: float | None = None
    """For async tasks: the time after which a call is cancelled."""
    atomic: bool = True
    """Whether the task runs in a transaction that also stores the result. Async tasks do not."""
    reject_on: tuple[type[Exception], ...] = ()
    retry_on: tuple[type[Exception], ...] | None = None


OF_JOBS = tuple(field.name for field in dataclasses.fields(JobOptions))


def job(
    *,
    max_attempts: int | None = UNSET,
    backoff: Backoff | Mapping[str, float] = UNSET,
    timeout: float | None = UNSET,
    atomic: bool = UNSET,
    retry_on: Exceptions = UNSET,
    reject_on: Exceptions = UNSET,
) -> Callable[[T], T]:
    """Give a task options that ``@task`` does not have. It may stand above or below ``@task``.

    Options that you do not pass come from ``OPTIONS`` of the queue and of the backend. Other backends ignore them.

    Args:
        max_attempts: number of failed attempts after which the job has FAILED; None for no limit (default: 1).
        backoff: the delay before each further attempt: a ``Backoff``, or a dict of its fields.
        timeout: for async tasks, seconds after which a call is cancelled and fails with TimeoutError.
        atomic: whether the task runs in a transaction that also stores its result, so that both commit together
            (default: True for sync tasks; async tasks have no transactions).
        retry_on: an exception class, or a sequence of classes. Only these are retried.
        reject_on: an exception class, or a sequence of classes. These are not retried.

    Raises:
        SubscriberError: a value breaks a rule. The error names the task and the rule.
    """
    given = {
        "max_attempts": max_attempts,
        "backoff": backoff,
        "timeout": timeout,
        "atomic": atomic,
        "retry_on": retry_on,
        "reject_on": reject_on,
    }

    def decorate(decorated: T) -> T:
        function: Any = getattr(decorated, "func", decorated)
        if not callable(function):
            raise SubscriberError(f"@job on {decorated!r}: it is not a task or a function")
        where = f"@job on {function.__module__}.{function.__qualname__}"
        try:
            options = {name: check_handler_option(name, value) for name, value in given.items() if value is not UNSET}
        except ValueError as error:
            raise SubscriberError(f"{where}: {error}") from error
        _check(where, options, is_async=inspect.iscoroutinefunction(function))
        setattr(function, ATTRIBUTE, options)
        return decorated

    return decorate


def _check(where: str, options: Mapping[str, Any], *, is_async: bool) -> None:
    if is_async and options.get("atomic"):
        raise SubscriberError(f"{where}: an async task cannot be atomic: Django's transactions are synchronous")
    if not is_async and options.get("timeout") is not None:
        raise SubscriberError(
            f"{where}: timeout={options['timeout']:g} is for async tasks: a sync task runs in a thread, which cannot "
            "be stopped"
        )


def options_of(function: Callable[..., Any], of_queue: Mapping[str, Any]) -> JobOptions:
    """Return the options of a task.

    Args:
        function: the task's function.
        of_queue: the parsed options of its queue.
    """
    values: dict[str, Any] = {"backoff": get_settings().backoff}
    values |= {name: value for name, value in of_queue.items() if name in OF_JOBS}
    values |= getattr(function, ATTRIBUTE, {})
    if inspect.iscoroutinefunction(function):
        values["atomic"] = False
    else:
        values["timeout"] = None
    return JobOptions(**values)
