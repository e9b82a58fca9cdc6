"""The options of jobs: ``@job`` beside ``@task``, and ``OPTIONS`` of the backend and of its queues."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.options import job_queues, validators
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.delivery_limits import Rate
from django_mysqlqueue.options.table import OPTIONS, check_option

T = TypeVar("T")
ATTRIBUTE = "_mysqlqueue_job"
"""Attribute of a task's function with the options that ``@job`` has given."""


class _Unset:
    def __repr__(self) -> str:
        return "<from OPTIONS>"


UNSET: Any = _Unset()
Exceptions = type[Exception] | Sequence[type[Exception]]
Unique = Literal["until_started", "until_finished"] | None
UniqueBy = Callable[..., str] | None
UNTIL_STARTED, UNTIL_FINISHED = "until_started", "until_finished"
UNIQUE_FOR = 86_400.0
"""Default of ``unique_for``, in seconds: a day."""


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
    unique: Unique = None
    unique_by: UniqueBy = None
    unique_for: float | None = UNIQUE_FOR
    rate: Rate | None = None
    """How many jobs of the task start, in all processes together."""
    max_processing_time: float | None = None
    """How long a job may run; None: as long as the queue allows."""
    expires_in: float | None = None
    """How long a job may wait for an attempt to start, from when it is due; None: no limit."""


def _function(value: Any) -> Any:
    if not callable(value):
        raise validators.Invalid("must be a function that gets the arguments of the job and returns a string")
    return value


OWN: Mapping[str, Callable[[Any], Any]] = {
    "expires_in": validators.or_none(validators.number(minimum=0.001)),
    "unique": validators.or_none(validators.choice(UNTIL_STARTED, UNTIL_FINISHED)),
    "unique_by": validators.or_none(_function),
    "unique_for": validators.or_none(validators.number(minimum=0.001)),
}
"""The parsers of options that jobs have, and handlers do not."""
OF_JOBS = (*(name for name, option in OPTIONS.items() if option.jobs == "job"), *(OWN.keys() - {"unique_by"}))
"""Options that a queue may have for its jobs. Its own ``RATE`` and ``MAX_PROCESSING_TIME`` are those of the queue."""


def job(
    *,
    max_attempts: int | None = UNSET,
    backoff: Backoff | Mapping[str, float] = UNSET,
    timeout: float | None = UNSET,
    atomic: bool = UNSET,
    retry_on: Exceptions = UNSET,
    reject_on: Exceptions = UNSET,
    unique: Unique = UNSET,
    unique_by: UniqueBy = UNSET,
    unique_for: float | None = UNSET,
    rate: str | Rate | None = UNSET,
    max_processing_time: float = UNSET,
    expires_in: float | None = UNSET,
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
        unique: a job is not enqueued while another one of the task with the same arguments holds their key:
            ``enqueue()`` returns the result of that one, and writes nothing. ``"until_started"``: a job holds its key
            while it waits for its first attempt; ``"until_finished"``: until it has ended, through all of its attempts.
            None: jobs are not compared (the default).
        unique_by: a function that gets the arguments of the job and returns a string, which is compared in their place.
        unique_for: seconds after which a job no longer holds its key, although it has neither started nor ended: from
            its ``enqueue()``, from its ``run_after``, or from its redrive (default: 86,400, a day). None for no limit.
        rate: how many jobs of the task start, in all processes together, for example ``"10/m"``; units are ``s``,
            ``m``, ``h`` and ``d``. Retries count, too. It applies as ``manage.py migrate`` has registered it. The task
            must be in a module that subscribers import when they start, such as ``tasks.py`` of an app.
        max_processing_time: seconds for which a job may run. After that, its process exits, and the attempt has failed
            (default: ``MAX_PROCESSING_TIME`` of the queue). More than that of the queue requires that the task is in a
            module that subscribers import when they start.
        expires_in: seconds after which a job that has not started has FAILED with ``JobExpired``: from the call of
            ``enqueue()``, from ``run_after``, or from the end of the stage before it in its chain. It also limits how
            long a job waits for its next attempt. A redriven job does not expire. None for no limit (the default).

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
        "unique": unique,
        "unique_by": unique_by,
        "unique_for": unique_for,
        "rate": rate,
        "max_processing_time": max_processing_time,
        "expires_in": expires_in,
    }

    def decorate(decorated: T) -> T:
        function: Any = getattr(decorated, "func", decorated)
        if not callable(function):
            raise SubscriberError(f"@job on {decorated!r}: it is not a task or a function")
        where = f"@job on {function.__module__}.{function.__qualname__}"
        try:
            options = {name: check_job_option(name, value) for name, value in given.items() if value is not UNSET}
        except ValueError as error:
            raise SubscriberError(f"{where}: {error}") from error
        _check(where, options, is_async=inspect.iscoroutinefunction(function))
        setattr(function, ATTRIBUTE, options)
        path = f"{function.__module__}.{function.__qualname__}"
        _store(job_queues.rates, path, options.get("rate"))
        _store(job_queues.time_limits, path, options.get("max_processing_time"))
        return decorated

    return decorate


def _store(found: dict[str, T], path: str, value: T | None) -> None:
    if value is None:
        found.pop(path, None)
    else:
        found[path] = value


def check_job_option(name: str, value: Any) -> Any:
    """Return the parsed value of an option of jobs or of the subscribers of a queue.

    Raises:
        ValueError: the value is invalid; the text names the option, the value and the rule.
    """
    if name not in OWN:
        return check_option(name, value)
    try:
        return OWN[name](value)
    except validators.Invalid as error:
        raise ValueError(f"{name}={value!r}: {error}") from None


def option_of(name: str, function: Callable[..., Any], of_queue: Mapping[str, Any], default: Any = None) -> Any:
    """Return an option of a task alone: ``options_of`` costs each ``enqueue()`` more."""
    return getattr(function, ATTRIBUTE, {}).get(name, of_queue.get(name, default))


def unique_key(task_path: str, by: UniqueBy, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the unique key of a job.

    Raises:
        SubscriberError: the function did not return a string.
    """
    text: Any = json.dumps([args, kwargs], sort_keys=True) if by is None else by(*args, **kwargs)
    if not isinstance(text, str):
        raise SubscriberError(f"@job on {task_path}: unique_by returned {text!r}: it must return a string")
    return hashlib.sha256(f"{task_path}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()


def _check(where: str, options: Mapping[str, Any], *, is_async: bool) -> None:
    if is_async and options.get("atomic"):
        raise SubscriberError(f"{where}: an async task cannot be atomic: Django's transactions are synchronous")
    if not is_async and options.get("timeout") is not None:
        raise SubscriberError(
            f"{where}: timeout={options['timeout']:g} is for async tasks: a sync task runs in a thread, which cannot "
            "be stopped"
        )
    for name in ("unique_by", "unique_for"):
        if name in options and options.get("unique") is None:
            raise SubscriberError(f"{where}: {name} needs unique='{UNTIL_STARTED}' or '{UNTIL_FINISHED}'")
    timeout, longest = options.get("timeout"), options.get("max_processing_time")
    if timeout is not None and longest is not None and timeout >= longest:
        raise SubscriberError(
            f"{where}: timeout={timeout:g} must be less than max_processing_time={longest:g}, after which its whole "
            "process exits"
        )


def options_of(function: Callable[..., Any], of_queue: Mapping[str, Any]) -> JobOptions:
    """Return the options of a task."""
    values: dict[str, Any] = {"backoff": get_settings().backoff}
    values |= {name: value for name, value in of_queue.items() if name in OF_JOBS}
    values |= getattr(function, ATTRIBUTE, {})
    if inspect.iscoroutinefunction(function):
        values["atomic"] = False
    else:
        values["timeout"] = None
    return JobOptions(**values)
