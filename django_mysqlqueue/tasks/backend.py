"""The backend: it stores a result and a message for each job, in the caller's transaction."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import connections, transaction
from django.dispatch import receiver
from django.utils import timezone
from django.utils.module_loading import import_string

from django_mysqlqueue import naming
from django_mysqlqueue.conf import check_handler_option, get_settings
from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.limits import JOB_PATH_LENGTH, JOB_PREFIX
from django_mysqlqueue.service import job_results, publishing
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.job_results import NewResult
from django_mysqlqueue.service.messages import Message
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.tasks.framework import (
    AnyResult,
    AnyTask,
    BaseTaskBackend,
    InvalidTask,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
    task_enqueued,
)
from django_mysqlqueue.tasks.results import as_result, rounded

GROUP_OPTIONS = (
    "visibility_timeout",
    "max_processing_time",
    "claim_size",
    "prefetch",
    "poll_interval",
    "max_poll_interval",
    "rate",
    "burst",
    "max_in_flight",
)
"""Options of the subscribers of a queue."""
JOB_OPTIONS = ("max_attempts", "backoff", "timeout", "atomic")
"""Options of its jobs, which ``@job`` overrides."""


class MySQLQueueBackend(BaseTaskBackend):
    """A backend of ``django.tasks`` whose jobs ``manage.py runsubscriber`` runs.

    Attributes:
        alias: the alias in ``TASKS``.
        queues: the names of its queues.
        queue_options: the parsed ``OPTIONS`` of each queue.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        queues = params.get("QUEUES", [])
        if not isinstance(queues, (list, tuple, set, frozenset)) or not all(isinstance(one, str) for one in queues):
            raise ImproperlyConfigured(f"TASKS[{alias!r}]['QUEUES'] = {queues!r}: must be a list of names")
        super().__init__(alias, params)
        try:
            self.queue_options = _parsed(alias, self.queues, self.options)
        except ValueError as error:
            raise ImproperlyConfigured(f"TASKS[{alias!r}]['OPTIONS']: {error}") from None

    def validate_task(self, task: AnyTask) -> None:
        """Check a task without a query: Django calls it when the task is declared.

        Raises:
            InvalidTask: the backend cannot run it. The error names the rule.
        """
        super().validate_task(task)
        if len(task.module_path) > JOB_PATH_LENGTH:
            raise InvalidTask(f"{task.module_path!r}: the path may have at most {JOB_PATH_LENGTH} characters.")
        if task.queue_name not in self.queue_options:
            raise InvalidTask(f"Queue {task.queue_name!r} is not valid for backend.")

    def enqueue(self, task: AnyTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AnyResult:
        """Enqueue a job, in the open transaction of the queue's database if there is one.

        Args:
            task: the task.
            args: its positional arguments, which must be JSON-serializable.
            kwargs: its keyword arguments, which must be JSON-serializable.

        Returns:
            The result, which is READY.

        Raises:
            InvalidTask: the backend cannot run the task.
            TypeError, ValueError: an argument is not JSON-serializable.
            InvalidMessage: the arguments are too long, or ``run_after`` is too late.
            TransactionMismatch: the queue's database has no open transaction, but another one has.
        """
        (result,) = self.enqueue_many([(task, args, kwargs)])
        return result

    def enqueue_many(self, jobs: Iterable[tuple[AnyTask, Sequence[Any], Mapping[str, Any]]]) -> list[AnyResult]:
        """Enqueue several jobs, all or none of them; otherwise as ``enqueue``.

        If their queues are in several databases, and there is no open transaction, each database commits by itself.

        Args:
            jobs: the task, the positional and the keyword arguments of each.

        Returns:
            The results, in the same order.
        """
        results = [self._result(task, args, kwargs) for task, args, kwargs in jobs]
        by_topic: dict[str, list[AnyResult]] = {}
        for result in results:
            by_topic.setdefault(topic_of(result.task.queue_name), []).append(result)
        with ExitStack() as transactions:
            aliases = sorted({queue_alias(topic=topic) for topic in by_topic})
            for alias in aliases:
                publishing.require_transaction(alias)
            for alias in aliases:
                transactions.enter_context(_together(alias))
            for alias in aliases:
                self._store(alias, {topic: of for topic, of in by_topic.items() if queue_alias(topic=topic) == alias})
        return results

    def _result(self, task: AnyTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AnyResult:
        self.validate_task(task)
        return TaskResult(
            task=rounded(task),
            id=naming.new_message_id(),
            status=TaskResultStatus.READY,
            enqueued_at=_now(),
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=args,  # type: ignore[arg-type]  # It makes a list of it.
            kwargs=kwargs,  # type: ignore[arg-type]
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )

    def _store(self, alias: str, by_topic: Mapping[str, Sequence[AnyResult]]) -> None:
        for topic, results in by_topic.items():
            publishing.publish_many(topic, (_message(result) for result in results), using=alias)
        job_results.insert(Session(alias), [_row(result) for of in by_topic.values() for result in of])
        for of in by_topic.values():
            for result in of:
                task_enqueued.send(type(self), task_result=result)

    def get_result(self, result_id: str) -> AnyResult:
        """Return the result of a job.

        Raises:
            TaskResultDoesNotExist: there is none with this id, or it was deleted after ``RESULTS_RETENTION``.
            ImportError: this process does not have its task.
        """
        try:
            str(result_id).encode()
        except UnicodeEncodeError:
            raise TaskResultDoesNotExist(result_id) from None
        for alias in dict.fromkeys(queue_alias(topic=topic_of(name)) for name in sorted(self.queues)):
            for row in job_results.read(Session(alias), [str(result_id)]).values():
                return as_result(row)
        raise TaskResultDoesNotExist(result_id)

    def check(self, **kwargs: Any) -> Iterable[checks.CheckMessage]:
        """Check ``TASKS``: E025 for queues, E026 for queues that two backends share."""
        if not self.queues:
            yield checks.Error(
                f"TASKS[{self.alias!r}]['QUEUES'] is empty: subscribers would not know which jobs to run.",
                hint="Name the queues, or leave QUEUES out for the queue 'default'.",
                id="django_mysqlqueue.E025",
            )
        for name in sorted(map(str, self.queues)):
            try:
                topic = naming.check_topic(topic_of(name))
            except InvalidMessage as error:
                yield checks.Error(
                    f"TASKS[{self.alias!r}]['QUEUES'] has the queue {name!r}: {error}", id="django_mysqlqueue.E025"
                )
                continue
            if get_settings().topics.of(topic).via is not None:
                yield checks.Error(
                    f"MYSQLQUEUE['TOPICS'] has VIA for {topic!r}, the queue {name!r} of jobs: their results could not "
                    "commit with the caller's transaction.",
                    hint="Use DATABASE alone, and enqueue in a transaction on that database.",
                    id="django_mysqlqueue.E025",
                )
        for other in backends():
            if other.alias < self.alias and (common := other.queues & self.queues):
                yield checks.Error(
                    f"The backends {other.alias!r} and {self.alias!r} of TASKS share queues: "
                    f"{', '.join(sorted(common))}.",
                    hint="Give each backend queues of its own.",
                    id="django_mysqlqueue.E026",
                )


@contextlib.contextmanager
def _together(alias: str) -> Iterator[None]:
    """Write nothing of a job if a part of it fails: in a transaction or, as ``Model.save()`` does, in the caller's."""
    in_block = connections[alias].in_atomic_block
    with transaction.mark_for_rollback_on_error(alias) if in_block else transaction.atomic(alias):
        yield


def backends() -> list[MySQLQueueBackend]:
    """Return the backends of this kind in ``TASKS``. Others are not created."""
    found: list[MySQLQueueBackend] = []
    for alias, params in task_backends.settings.items():
        try:
            kind = import_string(params["BACKEND"])
        except (ImportError, KeyError):
            continue  # Django's check reports it.
        if isinstance(kind, type) and issubclass(kind, MySQLQueueBackend):
            found.append(cast(MySQLQueueBackend, task_backends[alias]))
    return found


@functools.cache
def queue_topics() -> frozenset[str]:
    """Return the topics of all queues, as long as ``TASKS`` does not change."""
    return frozenset(topic_of(name) for backend in backends() for name in backend.queues)


@functools.cache
def by_alias() -> Mapping[str, MySQLQueueBackend]:
    """Return the backends by their aliases, as long as ``TASKS`` does not change. They have no state of a thread."""
    return {backend.alias: backend for backend in backends()}


@receiver(setting_changed)
def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting == "TASKS":
        queue_topics.cache_clear()
        by_alias.cache_clear()


def topic_of(queue_name: str) -> str:
    """Return the topic of a queue."""
    return f"{JOB_PREFIX}{queue_name}"


def _parsed(alias: str, queues: Iterable[str], options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of each queue: its own in ``OPTIONS["QUEUES"]``, else those of the backend.

    Raises:
        ValueError: an option is unknown or invalid.
    """
    if not isinstance(options, Mapping):
        raise ValueError(f"{options!r}: must be a dict")
    given = dict(options)
    own = given.pop("QUEUES", {})
    if not isinstance(own, Mapping):
        raise ValueError(f"QUEUES={own!r}: must be a dict, by queue")
    if unknown := sorted(set(own) - set(queues)):
        raise ValueError(f"QUEUES has options for {unknown[0]!r}, which is not among the queues of {alias!r}")
    common = _values(given)
    return {name: common | _values(own.get(name, {})) for name in queues}


def _values(options: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise ValueError(f"{options!r}: must be a dict")
    values = {}
    for name, value in options.items():
        if name.lower() not in (*GROUP_OPTIONS, *JOB_OPTIONS) or not name.isupper():
            known = ", ".join(one.upper() for one in sorted((*GROUP_OPTIONS, *JOB_OPTIONS)))
            raise ValueError(f"{name!r} is not an option. Options: {known}")
        values[name.lower()] = check_handler_option(name.lower(), value)
    return values


def _message(result: AnyResult) -> Message:
    task = result.task
    payload = {"task": task.module_path, "args": result.args, "kwargs": result.kwargs}
    return Message(payload, id=result.id, deliver_at=task.run_after, priority=task.priority)


def _row(result: AnyResult) -> NewResult:
    task = result.task
    arguments = job_results.as_json({"args": result.args, "kwargs": result.kwargs})
    run_after = 0 if task.run_after is None else int(task.run_after.timestamp() * 1000)
    assert result.enqueued_at is not None  # noqa: S101  # It has just been set.
    enqueued = int(result.enqueued_at.timestamp() * 1000)
    return NewResult(
        result.id,
        result.backend,
        task.queue_name,
        task.module_path,
        arguments,
        task.priority,
        run_after,
        enqueued,
    )


def _now() -> Any:
    """Return the current time as it is stored: in milliseconds."""
    now = timezone.now()
    return now.replace(microsecond=now.microsecond // 1000 * 1000)
