"""Tasks of ``django.tasks`` that are declared and called as Celery's are."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import inspect
import json
import logging
import random
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NoReturn

from django.conf import settings
from django.utils import timezone

from django_mysqlqueue.contrib.celery import (
    Ignore,
    MaxRetriesExceededError,
    Priorities,
    Reject,
    Retry,
    Task,
    get_task_logger,
    ignored,
    route_of,
)
from django_mysqlqueue.contrib.celery.encoding import decode, encode
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.service.job_stages import chain_of
from django_mysqlqueue.subscriptions.retry_later import RetryLater
from django_mysqlqueue.tasks.attempts import Attempt, JobContext
from django_mysqlqueue.tasks.calls import Call, enqueue_chain, enqueue_many
from django_mysqlqueue.tasks.framework import DEFAULT_TASK_QUEUE_NAME, AnyResult, AnyTask, InvalidTask
from django_mysqlqueue.tasks.options import UNTIL_FINISHED, UNTIL_STARTED, job

logger = logging.getLogger(__name__)

PREVIOUS = "__previous__"
"""Argument of a job of a chain whose first argument is the result of the stage before: ONE, or the list of ALL."""
ONE, ALL = "one", "all"
RETRIES = "__retries__"
"""Argument of a job that a retry with other arguments has enqueued: the number of the retry."""
REQUEUE_DELAY = 1.0
"""Seconds after which a job is attempted again that was rejected with ``requeue=True``."""
SHORTEST = 0.001
"""Seconds after which a job expires that would have expired before it is due."""
REFUSED = {
    "acks_late": "a message is acked when its job has ended: the only value is True",
    "after_return": "use a receiver of the signal task_finished",
    "before_start": "use a receiver of the signal task_started",
    "compression": "messages are not compressed",
    "exchange": "there are no exchanges: use queue=",
    "headers": "a job has arguments only",
    "ignore_result": "it belongs to the task",
    "link": "use a chain",
    "link_error": "use a receiver of the signal task_finished",
    "on_failure": "use a receiver of the signal task_finished",
    "on_retry": "the log has each retry",
    "on_success": "use a chain, or a receiver of the signal task_finished",
    "once": "it belongs to the task; of calls, the only value is {'graceful': True}",
    "reject_on_worker_lost": "a job is attempted again after its subscriber was lost: the only value is True",
    "routing_key": "there are no routing keys: use queue=",
    "serializer": "arguments and results are JSON: the only value is 'json'",
    "soft_time_limit": "nothing is raised in a running task: look at self.request.context.stopping, or use time_limit",
    "store_errors_even_if_ignored": "errors are always stored: the only value is True",
    "task_id": "the queue gives jobs their ids",
    "track_started": "starts are always stored: the only value is True",
}
"""Why options of Celery's tasks and calls are refused."""
OTHERS = {
    "Request",
    "Strategy",
    "abstract",
    "acks_on_failure",
    "acks_on_failure_or_timeout",
    "acks_on_timeout",
    "app",
    "backend",
    "delivery_mode",
    "immediate",
    "mandatory",
    "pydantic",
    "pydantic_context",
    "pydantic_dump_kwargs",
    "pydantic_strict",
    "resultrepr_maxsize",
    "retry_on_worker_lost",
    "send_events",
    "shared",
    "store_eager_result",
    "throws",
    "trail",
    "typing",
}
"""Options of Celery's tasks that are refused, too."""
ONLY = {
    "acks_late": True,
    "reject_on_worker_lost": True,
    "serializer": "json",
    "store_errors_even_if_ignored": True,
    "track_started": True,
}
"""The only values of options that say what happens anyway."""
ABSENT = {
    "AsyncResult": "use get_result(id)",
    "app": "there is no application",
    "backend_id": "there is no result backend",
    "chunks": "use group()",
    "map": "use group()",
    "replace": "a job cannot become another one: enqueue it",
    "starmap": "use group()",
    "update_state": "use self.request.context.progress(done, total, message)",
}
"""Why tasks do not have some of the attributes of Celery's."""
ABSENT_IN_REQUESTS = {
    "callbacks": "use a chain",
    "chain": "use context.previous_results()",
    "chord": "use context.previous_results()",
    "errbacks": "use a receiver of the signal task_finished",
    "group": "use context.previous_results()",
    "headers": "a job has arguments only",
    "timelimit": "use context.stopping",
}
"""Why requests do not have some of the attributes of Celery's."""


class Retried(RetryLater, Retry):
    """A task has called ``retry()``."""

    def __init__(self, delay: float, exc: BaseException | None, *, counts: bool) -> None:
        super().__init__(delay, reason="" if exc is None else repr(exc), counts=counts)
        self.exc = exc
        self.when = delay


class Followed(Retry):
    """A task has called ``retry()`` with other arguments: a new job follows."""


class CalledAgain(Retry):
    """A task that ``apply()`` calls has called ``retry()``."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__("Task can be retried")
        self.call = args, kwargs


@dataclass(frozen=True)
class EagerResult:
    """What has become of a task that ``apply()`` has called."""

    id: str
    result: Any
    """The return value; or the exception."""
    state: str
    """``SUCCESS``, ``FAILURE``, ``IGNORED`` or ``REJECTED``."""

    @property
    def status(self) -> str:
        """The state."""
        return self.state

    def get(self, timeout: float | None = None, *, propagate: bool = True) -> Any:
        """Return the return value, or raise the exception.

        Args:
            timeout: nothing has to be waited for.
            propagate: if False, return the exception.
        """
        if self.failed() and propagate:
            raise self.result
        return self.result if self.successful() or self.failed() else None

    def ready(self) -> bool:
        """Return True."""
        return True

    def successful(self) -> bool:
        """Return whether the task has returned."""
        return self.state == "SUCCESS"

    def failed(self) -> bool:
        """Return whether it has raised an exception."""
        return self.state == "FAILURE"


@dataclass
class Request:
    """The attempt of a job that is running, or a direct call of the task."""

    id: str | None = None
    retries: int = 0
    """The number of attempts that have failed. If the task makes it less, ``retry()`` does not count this attempt."""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    called_directly: bool = True
    context: JobContext | None = None
    task: str | None = None
    """The name of the task in Celery."""
    root_id: str | None = None
    """The id of the chain; without one, of the job."""
    hostname: str | None = None
    """The name of the subscriber."""
    eta: str | None = None
    """When the job was due, if its call had a time or a countdown."""
    is_eager: bool = False
    """Whether ``apply()`` has called the task."""
    delivery_info: dict[str, Any] = field(default_factory=dict)
    """``routing_key`` is the queue, and ``priority`` that of Celery."""
    properties: dict[str, Any] = field(default_factory=dict)
    """The same ``priority``."""

    def __post_init__(self) -> None:
        self._retries = self.retries

    @property
    def counts(self) -> bool:
        """Whether ``retry()`` counts this attempt."""
        return self.retries >= self._retries

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or a default for one that there is not."""
        return getattr(self, name, default)

    def __getattr__(self, name: str) -> NoReturn:
        """Name the reason why the request lacks an attribute."""
        reason = ABSENT_IN_REQUESTS.get(name, f"use get({name!r})")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}: {reason}")


_running: ContextVar[tuple[str, Request] | None] = ContextVar("request", default=None)
"""The path of the task that is running, and its request."""


@dataclass(frozen=True)
class CeleryOptions:
    """The options of a task that its own code reads, and not the queue."""

    function: Callable[..., Any]
    name: str
    bind: bool = False
    max_retries: int | None = 3
    default_retry_delay: float = 180
    autoretry_for: tuple[type[Exception], ...] = ()
    dont_autoretry_for: tuple[type[Exception], ...] = ()
    retry_kwargs: Mapping[str, Any] = field(default_factory=dict)
    retry_backoff: float = 0
    retry_backoff_max: int = 600
    retry_jitter: bool = True
    ignore_result: bool = False

    @property
    def max_attempts(self) -> int | None:
        """The number of failed attempts after which a job has FAILED; None: no limit."""
        own = self.max_retries
        return None if own is None else 1 + max(own, self.retry_kwargs.get("max_retries") or 0)

    def retry_options(self, retries: int) -> dict[str, Any]:
        """Return the arguments of ``retry()`` after an exception of ``autoretry_for``."""
        options = dict(self.retry_kwargs)
        if self.retry_backoff:
            countdown = min(self.retry_backoff_max, int(max(1.0, self.retry_backoff)) * 2**retries)
            options["countdown"] = random.randrange(countdown + 1) if self.retry_jitter else countdown
        return options


@dataclass(frozen=True, kw_only=True)
class _Fields(AnyTask):
    celery: CeleryOptions = field(compare=False)
    expires_in: float | None = None


class SharedTask(_Fields, Task):
    """A task with the methods of Celery's tasks, which tests may patch.

    Attributes:
        expires_in: seconds after which a job expires that has not started; None: ``expires_in`` of the queue.
    """

    # It is not frozen, as tasks of Django are.
    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__

    @property
    def name(self) -> str:
        """The name in Celery."""
        return self.celery.name

    @property
    def max_retries(self) -> int | None:
        """How often an attempt may be repeated; None: no limit."""
        return self.celery.max_retries

    @property
    def default_retry_delay(self) -> float:
        """Seconds until the next attempt, if ``retry()`` has no other."""
        return self.celery.default_retry_delay

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function; with ``bind=True`` a method of the task."""
        function = self.celery.function
        return MethodType(function, self) if self.celery.bind else function

    @property
    def request(self) -> Request:
        """The attempt that is running."""
        running = _running.get()
        return running[1] if running is not None and running[0] == self.module_path else Request()

    def __getattr__(self, name: str) -> NoReturn:
        """Name the reason why the task lacks an attribute."""
        reason = f": {ABSENT[name]}" if name in ABSENT else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{reason}")

    def __repr__(self) -> str:
        return f"<@task: {self.name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, without a job."""
        with self._requested(Request(args=args, kwargs=kwargs)):
            return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function in the current attempt."""
        options = self.celery
        final: tuple[type[BaseException], ...] = (Ignore, Retry, *options.dont_autoretry_for)
        try:
            return self.__wrapped__(*args, **kwargs)
        except final:
            raise
        except options.autoretry_for as error:
            self.retry(exc=error, **options.retry_options(self.request.retries))

    def delay(self, *args: Any, **kwargs: Any) -> AnyResult:
        """Enqueue a job, in the open transaction if there is one.

        Args:
            args: the positional arguments.
            kwargs: the keyword arguments.
        """
        return self.apply_async(args, kwargs)

    def delay_on_commit(self, *args: Any, **kwargs: Any) -> AnyResult:
        """Enqueue a job as ``delay()`` does: it starts after the commit in any case."""
        return self.apply_async(args, kwargs)

    def apply_async(
        self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> AnyResult:
        """Enqueue a job, in the open transaction if there is one.

        Args:
            args: the positional arguments.
            kwargs: the keyword arguments.
            options: ``countdown`` and ``expires`` (seconds), ``eta`` (a datetime), ``priority`` and ``queue``.

        Returns:
            The result: a ``TaskResult`` of ``django.tasks``.

        Raises:
            InvalidTask: an option has no counterpart; or as ``enqueue()`` does.
            TypeError, ValueError, InvalidMessage, TransactionMismatch: as ``enqueue()`` does.
        """
        task, args, kwargs = self._call(args or (), kwargs or {}, options)
        return task.enqueue(*args, **kwargs)

    def apply(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        retries: int = 0,
        throw: bool = False,
        **options: Any,
    ) -> EagerResult:
        """Call the function now, in this process and without a job. ``retry()`` calls it again at once.

        Args:
            args: the positional arguments.
            kwargs: the keyword arguments.
            retries: the number of attempts that have failed.
            throw: raise an exception of the task.
            options: those of ``apply_async``, which change nothing.

        Raises:
            InvalidTask: an option has no counterpart.
        """
        _known(self.name, options)
        request = Request(
            id=str(uuid.uuid4()),
            retries=retries,
            args=list(args or ()),
            kwargs=dict(kwargs or {}),
            called_directly=False,
            task=self.name,
            hostname=socket.gethostname(),
            is_eager=True,
        )
        id_ = request.root_id = str(request.id)
        try:
            with self._requested(request):
                return EagerResult(id_, self.run(*request.args, **request.kwargs), "SUCCESS")
        except CalledAgain as again:
            following = again
        except Ignore as error:
            return EagerResult(id_, error, "IGNORED")
        except Reject as error:
            return EagerResult(id_, error, "REJECTED")
        except Exception as error:
            if throw:
                raise
            return EagerResult(id_, error, "FAILURE")
        return self.apply(*following.call, retries=request.retries + 1, throw=throw)

    def s(self, *args: Any, **kwargs: Any) -> Signature:
        """Return a signature. In a chain, the result of the stage before becomes the first argument."""
        return Signature(self, args, kwargs)

    def si(self, *args: Any, **kwargs: Any) -> Signature:
        """Return a signature whose arguments stay as they are."""
        return Signature(self, args, kwargs, immutable=True)

    def signature(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        immutable: bool = False,
        **options: Any,
    ) -> Signature:
        """Return a signature with options of ``apply_async``."""
        return Signature(self, tuple(args), kwargs or {}, options, immutable)

    def get_logger(self) -> Any:
        """Return a logger with the name of the task."""
        return get_task_logger(self.name)

    def retry(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        exc: BaseException | None = None,
        *,
        throw: bool = True,
        eta: datetime.datetime | None = None,
        countdown: float | None = None,
        max_retries: int | None = None,
    ) -> None:
        """End this attempt, which has failed, and let the next one follow.

        Args:
            args: other positional arguments. A new job gets them, which continues to count; this one is SUCCESSFUL. If
                the call had ``expires``, both expire at the same time.
            kwargs: other keyword arguments, as ``args``.
            exc: the reason. It is raised if this was the last attempt.
            throw: if False, do not end this attempt: enqueue a new job, as with other arguments.
            eta: time of the next attempt.
            countdown: seconds until the next attempt (default: ``default_retry_delay``). Unless it is 0, it comes
                before ``eta``.
            max_retries: a lower limit than that of the task.

        Raises:
            Retry: always, unless ``throw`` is False.
            MaxRetriesExceededError: this was the last attempt, and there is no ``exc``.
            InvalidTask: what is asked for has no counterpart.
        """
        request = self.request
        if request.called_directly:
            raise exc or Retry("Task can be retried")
        limit = self.celery.max_attempts
        if max_retries is not None and limit is not None and max_retries >= limit:
            raise InvalidTask(
                f"{self.name}: retry(max_retries={max_retries}): the queue counts up to max_retries={limit - 1} of the "
                "task. Declare it with that number."
            )
        most = self.max_retries if max_retries is None else max_retries
        if most is not None and request.retries >= most:
            raise exc or MaxRetriesExceededError(f"Can't retry {self.name}[{request.id}]: it was retried {most} times.")
        if eta is not None and not countdown:
            countdown = max(0.0, (_time(self.name, "eta", eta) - timezone.now()).total_seconds())
        delay = self.default_retry_delay if countdown is None else countdown
        given = request.args if args is None else list(args), request.kwargs if kwargs is None else dict(kwargs)
        if request.is_eager:
            if throw:
                raise CalledAgain(*given) from exc
            self.apply(*given, retries=request.retries + 1)
            return
        if throw and given == (request.args, request.kwargs):
            raise Retried(delay, exc, counts=request.counts) from exc
        context: Any = request.context
        if throw and context._attempt.row.stage:
            raise InvalidTask(f"{self.name}: retry(args=…, kwargs=…): a job of a chain keeps its arguments.")
        # With the queue and the priority of this job.
        task: Any = context.task_result.task
        if (expires_in := _expires_in(context._attempt, delay)) is not None:
            task = dataclasses.replace(task, expires_in=expires_in)
        following = task.apply_async(given[0], {**given[1], RETRIES: request.retries + 1}, countdown=delay)
        if following.id == request.id:
            raise InvalidTask(f"{self.name}: retry(): this job is unique, and has not ended.")
        if throw:
            raise Followed(f"{following.id} follows: {exc!r}") from exc

    @contextmanager
    def _requested(self, request: Request) -> Iterator[None]:
        token = _running.set((self.module_path, request))
        try:
            yield
        finally:
            _running.reset(token)

    def _attempt(self, context: JobContext, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the function in an attempt of a job."""
        args, names = decode(args), decode(kwargs)
        retries, previous = names.pop(RETRIES, 0), names.pop(PREVIOUS, None)
        if previous is not None:
            values = [decode(result.return_value) for result in context.previous_results()]
            args = [values if previous == ALL else values[0], *args]
        result = context.task_result
        due, priority = result.task.run_after, {"priority": Priorities.of_celery(result.task.priority)}
        request = Request(
            id=result.id,
            retries=retries + context.attempt - 1,
            args=args,
            kwargs=names,
            called_directly=False,
            context=context,
            task=self.name,
            root_id=chain_of(context._attempt.row.stage) or result.id,
            hostname=result.worker_ids[-1],
            eta=None if due is None else due.isoformat(),
            delivery_info={"routing_key": result.task.queue_name, **priority},
            properties=priority,
        )
        with self._requested(request):
            try:
                value = self.run(*args, **names)
            except (Ignore, Followed):
                return None
            except Reject as error:
                if error.requeue:
                    raise RetryLater(REQUEUE_DELAY, reason=repr(error), counts=False) from error
                raise
        return None if self.celery.ignore_result else encode(value)

    def _call(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
        previous: str | None = None,
    ) -> Call:
        """Return the call of the job to enqueue.

        Raises:
            InvalidTask: an option has no counterpart, or is invalid.
        """
        options = _known(self.name, options)
        changes: dict[str, Any] = {}
        if options.get("priority") is not None:
            changes["priority"] = _priority(self.name, options["priority"])
        if options.get("queue") is not None:
            changes["queue_name"] = options["queue"]
        now = timezone.now()
        due = None
        if options.get("countdown"):  # As in Celery, 0 is none.
            due = now + datetime.timedelta(seconds=options["countdown"])
        elif options.get("eta") is not None:
            due = _time(self.name, "eta", options["eta"])
        if due is not None:
            changes["run_after"] = due
        if (expires := options.get("expires")) is not None:
            is_time = isinstance(expires, datetime.datetime)
            end = _time(self.name, "expires", expires) if is_time else now + datetime.timedelta(seconds=expires)
            # A job expires that long after it is due.
            if (seconds := (end - max(now, due or now)).total_seconds()) <= 0:
                raise InvalidTask(f"{self.name}: expires={expires!r}: the job would expire before it is due.")
            changes["expires_in"] = seconds
        task = dataclasses.replace(self, **changes) if changes else self
        arguments = dict(kwargs) if previous is None else {**kwargs, PREVIOUS: previous}
        try:
            return Call(task, encode(args), encode(arguments))
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}") from error


def _expires_in(attempt: Attempt, delay: float) -> float | None:
    """Return when a job expires, in seconds from when it is due, that takes the place of another one; None: as others.

    ``delay``: seconds until it is due.
    """
    row = attempt.row
    usual = job_queues.option_of("expires_in", row.backend, row.queue_name, row.task_path) or 0
    if row.expires_in == round(usual * 1000):
        return None
    # A job of a later stage counts from when its message is published.
    since = max(row.run_after, attempt.published_at if row.stage else row.enqueued_at)
    return max(SHORTEST, (since + row.expires_in - attempt.now()) / 1000 - delay)


def _known(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a call that have a counterpart.

    Raises:
        InvalidTask: others are given.
    """
    known = {"countdown", "eta", "expires", "priority", "queue"}
    found = {}
    for option, value in options.items():
        if option in known:
            found[option] = value
        elif not _says_nothing(option, value) and (option, value) != ("once", {"graceful": True}):
            _refuse(name, option, value)
    return found


def _says_nothing(option: str, value: Any) -> bool:
    """Return whether an option asks for what happens anyway."""
    return value is None or option in ignored or (option in ONLY and value == ONLY[option])


def _priority(name: str, value: Any) -> int:
    """Return the priority of a job for one of Celery."""
    if type(value) is not int:
        raise InvalidTask(f"{name}: priority={value!r}: must be an integer.")
    return Priorities.of_job(value)


def _time(name: str, option: str, value: Any) -> datetime.datetime:
    """Return a time as ``timezone.now()`` has it."""
    if not isinstance(value, datetime.datetime):
        raise InvalidTask(f"{name}: {option}={value!r}: must be a datetime.")
    if timezone.is_aware(value) == settings.USE_TZ:
        return value
    if settings.USE_TZ:
        raise InvalidTask(f"{name}: {option}={value!r}: must have a time zone.")
    return timezone.make_naive(value)


def _refuse(name: str, option: str, value: Any) -> NoReturn:
    reason = REFUSED.get(option, "it has no counterpart in this queue")
    raise InvalidTask(f"{name}: {option}={value!r}: {reason}.")


def shared_task(*args: Any, **options: Any) -> Any:
    """Declare a task as Celery's decorator does. Its jobs run in the queue of the default backend in ``TASKS``.

    The job's writes are not in one transaction: ``atomic`` is False. A static method of a class at the top level of a
    module can be a task.

    Args:
        args: the function, if the decorator stands without parentheses.
        options: ``name``, ``bind``, ``base`` (``QueueOnce``), ``once``, ``queue``, ``priority``, ``expires``,
            ``max_retries`` (default: 3; None for no limit), ``default_retry_delay`` (seconds, default: 180),
            ``autoretry_for``, ``dont_autoretry_for``, ``retry_kwargs``, ``retry_backoff``, ``retry_backoff_max``
            (seconds), ``retry_jitter``, ``rate_limit``, ``time_limit`` (seconds), ``ignore_result``. Names that are not
            options of Celery's tasks become attributes of the task, and a warning is logged.

    Returns:
        The task, or a decorator.

    Raises:
        InvalidTask: an option has no counterpart, the function is async, or the backend cannot run it.
        SubscriberError: the value of an option breaks a rule of ``@job``.
    """
    if args:
        return _declared(*args, **options)
    return functools.partial(_declared, **options)


def _declared(function: Callable[..., Any], **options: Any) -> SharedTask:
    name = options.pop("name", None) or f"{function.__module__}.{function.__name__}"
    if inspect.iscoroutinefunction(function):
        raise InvalidTask(f"{name} is async, which Celery's tasks cannot be: use @task of django.tasks.")
    options |= {option: value for option, value in route_of(name).items() if options.get(option) is None}
    queue = options.pop("queue", None) or DEFAULT_TASK_QUEUE_NAME
    rate, time_limit = options.pop("rate_limit", None), options.pop("time_limit", None)
    expires, priority = options.pop("expires", None), options.pop("priority", None)
    inherited = _once_of(name, options.pop("base", None))
    once = options.pop("once", None) or inherited
    own, attributes = _sorted_out(name, options)
    celery = CeleryOptions(function, name, **own)

    # Positional only: the function may have an argument of this name.
    def run(context: JobContext, /, *args: Any, **kwargs: Any) -> Any:
        return task._attempt(context, args, kwargs)

    func: Any = functools.update_wrapper(run, function)
    # Of this function, and not of the wrapped one.
    func.__signature__ = inspect.signature(run, follow_wrapped=False)
    # Subscribers import a task as an attribute of its module, which a static method is not.
    func.__qualname__ = function.__qualname__.replace(".", "_")
    given: dict[str, Any] = {"atomic": False, "retry_on": RetryLater, "max_attempts": celery.max_attempts}
    if rate is not None:
        given["rate"] = f"{rate:g}/s" if isinstance(rate, (int, float)) else rate
    if time_limit is not None:
        given["max_processing_time"] = time_limit
    if expires is not None:
        given["expires_in"] = expires
    if once is not None:
        given |= _unique(function, once, is_bound=celery.bind)
    job(**given)(func)
    rank = 0 if priority is None else _priority(name, priority)
    task = SharedTask(func=func, priority=rank, queue_name=queue, takes_context=True, celery=celery)
    if func.__qualname__ != function.__qualname__:
        setattr(sys.modules[function.__module__], func.__qualname__, task)
    for option, value in attributes.items():
        logger.warning("task.unknown_option task=%s option=%s", name, option)
        setattr(task, option, value)
    _by_name[name] = task
    return task


def _sorted_out(name: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return those options of a task that are fields of ``CeleryOptions``, and those that become its attributes.

    Raises:
        InvalidTask: others are given.
    """
    own: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    names = {one.name for one in dataclasses.fields(CeleryOptions)} - {"function", "name"}
    for option, value in options.items():
        if option in names:
            own[option] = value
        elif option not in REFUSED and option not in OTHERS and not hasattr(SharedTask, option):
            attributes[option] = value
        elif not _says_nothing(option, value):
            _refuse(name, option, value)
    for option in ("autoretry_for", "dont_autoretry_for"):
        own[option] = tuple(own.get(option, ()))
    return own, attributes


_by_name: dict[str, SharedTask] = {}
"""The tasks by their names in Celery."""


def _once_of(name: str, base: Any) -> Mapping[str, Any] | None:
    """Return the option ``once`` of a base class.

    Raises:
        InvalidTask: the class has code of its own.
    """
    if base is None:
        return None
    known = (Task.__module__, "celery_once.tasks", "celery.app.task", "celery.contrib.django.task")
    for cls in base.__mro__:
        if cls.__module__ in known:
            return getattr(base, "once", None)
        nothing = ("abstract", "once", "_abc_impl")
        if more := sorted(one for one in vars(cls) if not one.startswith("__") and one not in nothing):
            raise InvalidTask(f"{name}: base={base.__qualname__} defines {more[0]}: a task is a function.")
    raise InvalidTask(f"{name}: base={base.__qualname__}: the only base classes of tasks are Task and QueueOnce.")


def _unique(function: Callable[..., Any], once: Mapping[str, Any], *, is_bound: bool) -> dict[str, Any]:
    """Return the options of ``@job`` of a task of celery-once."""
    parameters = [*inspect.signature(function).parameters.values()][int(is_bound) :]
    signature = inspect.Signature(parameters)
    keys = once.get("keys")

    def key(*args: Any, **kwargs: Any) -> str:
        kwargs.pop(RETRIES, None)
        arguments = signature.bind(*args, **kwargs).arguments
        return json.dumps(arguments if keys is None else {one: arguments.get(one) for one in keys}, sort_keys=True)

    options = {"unique": UNTIL_STARTED if once.get("unlock_before_run") else UNTIL_FINISHED, "unique_by": key}
    return options if once.get("timeout") is None else {**options, "unique_for": once["timeout"]}


class Celery:
    """An application that declares tasks, and nothing else: the rest of its settings is in ``TASKS``.

    Args:
        main: its name, which nothing reads.
    """

    def __init__(self, main: str | None = None) -> None:
        self.main = main

    task = staticmethod(shared_task)

    def __getattr__(self, name: str) -> NoReturn:
        """Name the reason why the application lacks an attribute."""
        raise AttributeError(
            f"Celery().{name}: remove it. The queue is set up in TASKS, subscribers import tasks.py of each app, and "
            "schedules are declared with @recurring."
        )


# -- signatures -------------------------------------------------------------------


@dataclass(slots=True)
class Signature:
    """A task with arguments and options of ``apply_async``."""

    task: SharedTask
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    immutable: bool = False

    def set(self, *, immutable: bool | None = None, **options: Any) -> Signature:
        """Set options of ``apply_async``, and return the signature."""
        self.options |= options
        self.immutable = self.immutable if immutable is None else immutable
        return self

    def clone(self) -> Signature:
        """Return a copy."""
        return dataclasses.replace(self, kwargs=dict(self.kwargs), options=dict(self.options))

    def __json__(self) -> dict[str, Any]:
        """Return what Celery makes of it as an argument of a job: ``signature()`` reads it."""
        fields = {"task": self.task.name, "args": self.args, "kwargs": self.kwargs, "options": self.options}
        return {**fields, "subtask_type": None, "immutable": self.immutable}

    def delay(self, *args: Any, **kwargs: Any) -> AnyResult:
        """Enqueue the job. More positional arguments come first."""
        return self.apply_async(args, kwargs)

    def apply_async(
        self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> AnyResult:
        """Enqueue the job, as ``SharedTask.apply_async`` does. More positional arguments come first."""
        task, values, names = self._call(args or (), kwargs or {}, options)
        return task.enqueue(*values, **names)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, without a job."""
        values, names = self._merged(args, kwargs)
        return self.task(*values, **names)

    def __or__(self, other: Signature | Chain) -> Chain:
        """Return a chain."""
        return chain(self, other)

    def _call(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
        previous: str | None = None,
    ) -> Call:
        values, names = self._merged(args, kwargs)
        return self.task._call(values, names, {**self.options, **options}, None if self.immutable else previous)

    def _merged(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Return the arguments, with more of them if they may change."""
        return (self.args, self.kwargs) if self.immutable else ((*args, *self.args), {**self.kwargs, **kwargs})


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages of a chain: each is a signature, or a list of signatures, which is a group.

    A chain of one group is that group, and one of a group and a signature is a chord.
    """

    stages: tuple[Signature | list[Signature], ...]

    def delay(self, *args: Any, **kwargs: Any) -> Any:
        """Enqueue the jobs, with these arguments for those of the first stage."""
        return self.apply_async(args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Enqueue the jobs, as ``delay()`` does."""
        return self.apply_async(args, kwargs)

    def apply_async(
        self, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> Any:
        """Enqueue all jobs, in the open transaction if there is one.

        Args:
            args: positional arguments for the first stage, which come first.
            kwargs: keyword arguments for the first stage.
            options: as for a task. ``priority`` and ``queue`` are those of all jobs, ``countdown``, ``eta`` and
                ``expires`` those of the first stage.

        Returns:
            The result of the last stage: a list, if it is a group; None, if there is no stage.

        Raises:
            InvalidTask: a stage cannot be part of a chain; or as ``enqueue_chain()`` does.
        """
        common = {name: value for name, value in options.items() if name not in ("countdown", "eta", "expires")}
        calls: list[list[Call]] = []
        before: Signature | list[Signature] | None = None
        if self.stages and self.stages[0] == []:
            args, kwargs = ([],), {}  # The results of a chord without jobs.
        for stage in [stage for stage in self.stages if stage]:
            if before is None:
                calls.append([one._call(args or (), kwargs or {}, options) for one in _members(stage)])
            else:
                calls.append([_following(one, before, common) for one in _members(stage)])
            before = stage
        if before is None:
            return [] if self.stages else None
        results = enqueue_chain(*calls)[-1] if len(calls) > 1 else enqueue_many(calls[0])
        return results if isinstance(before, list) else results[0]

    def __or__(self, other: Signature | Chain) -> Chain:
        """Return a chain."""
        return chain(self, other)


def _members(stage: Signature | list[Signature]) -> list[Signature]:
    return stage if isinstance(stage, list) else [stage]


def _following(one: Signature, before: Signature | list[Signature], options: Mapping[str, Any]) -> Call:
    """Return the call of a later stage.

    Raises:
        InvalidTask: it cannot wait for a time, or needs a result that is not kept.
    """
    if one.options.get("countdown") is not None:
        raise InvalidTask(f"{one.task.name}: countdown={one.options['countdown']!r}: a later stage starts at once.")
    if isinstance(expires := one.options.get("expires"), datetime.datetime):
        raise InvalidTask(f"{one.task.name}: expires={expires!r}: of a later stage, it must be seconds from its start.")
    if not one.immutable:
        for earlier in _members(before):
            if earlier.task.celery.ignore_result:
                raise InvalidTask(
                    f"{one.task.name} gets the result of {earlier.task.name}, which has ignore_result=True: use si()."
                )
    return one._call((), {}, options, ALL if isinstance(before, list) else ONE)


def _given(tasks: tuple[Any, ...]) -> Sequence[Any]:
    """Return the arguments of ``chain`` and ``group``, which may be one iterable."""
    if len(tasks) == 1 and not isinstance(tasks[0], (Signature, Chain)):
        return list(tasks[0])
    return tasks


def chain(*tasks: Any) -> Chain:
    """Return a chain, whose stages run one after another.

    Args:
        tasks: signatures, groups and chains, or one iterable of them.

    Raises:
        InvalidTask: something else is given.
    """
    stages: list[Signature | list[Signature]] = []
    for one in _given(tasks):
        if isinstance(one, Signature):
            stages.append(one)
        elif isinstance(one, Chain):
            stages += one.stages
        else:
            raise InvalidTask(f"chain: {one!r} is not a signature of a task of django_mysqlqueue.contrib.celery.")
    return Chain(tuple(stages))


def group(*tasks: Any) -> Chain:
    """Return a group, whose jobs may run at the same time.

    Args:
        tasks: signatures and groups, or one iterable of them.

    Raises:
        InvalidTask: a chain is given, or something else.
    """
    members: list[Signature] = []
    for one in _given(tasks):
        if isinstance(one, Chain) and len(one.stages) == 1:
            members += _members(one.stages[0])
        elif isinstance(one, Signature):
            members.append(one)
        elif isinstance(one, Chain):
            raise InvalidTask("group: a group of chains has no counterpart: enqueue each chain, or chain groups.")
        else:
            raise InvalidTask(f"group: {one!r} is not a signature of a task of django_mysqlqueue.contrib.celery.")
    return Chain((members,))


def chord(header: Any, body: Signature | Chain | None = None) -> Any:
    """Return a group whose results, as a list, are the first argument of a further job.

    Args:
        header: the signatures of the group.
        body: that of the further job. If it is not given, the returned function takes it, and enqueues the jobs.

    Raises:
        InvalidTask: as ``group``.
    """
    if body is None:
        return lambda body: chord(header, body).apply_async()
    return group(header) | body


def signature(
    task: SharedTask | Signature | Mapping[str, Any] | str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Signature:
    """Return a signature.

    Args:
        task: a task, or its name in Celery; or a signature to copy, as it is or as an argument of a job has it.
        args: its positional arguments.
        kwargs: its keyword arguments.
        options: ``immutable``, and those of ``apply_async``.

    Raises:
        InvalidTask: this process has no task with this name.
    """
    if isinstance(task, Signature):
        return task.clone()
    if isinstance(task, Mapping):
        name, immutable = task.get("task"), task.get("immutable", False)
        return signature(
            str(name), task.get("args") or (), task.get("kwargs"), immutable=immutable, **(task.get("options") or {})
        )
    found = _by_name.get(task) if isinstance(task, str) else task
    if found is None:
        raise InvalidTask(f"signature: this process has no task with the name {task!r}.")
    return found.signature(args, kwargs, **options)
