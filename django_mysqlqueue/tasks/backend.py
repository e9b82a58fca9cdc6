"""The backend: it stores a result and a message for each job, in the caller's transaction."""

from __future__ import annotations

import contextlib
import functools
import itertools
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

from django_mysqlqueue.arguments import is_unicode, sync_only
from django_mysqlqueue.db.sizes import JOB_PATH_LENGTH, MOST_STAGE_JOBS, MOST_STAGES
from django_mysqlqueue.exceptions import InvalidMessage, SubscriberError
from django_mysqlqueue.names.ids import new_message_id
from django_mysqlqueue.names.rules import job_topic
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.delivery_limits import Rate
from django_mysqlqueue.options.table import OF_QUEUES
from django_mysqlqueue.options.topics import check_topic
from django_mysqlqueue.schedules.registry import Destination, OtherBackend
from django_mysqlqueue.service import job_rows, job_stages, publishing
from django_mysqlqueue.service.databases import queue_alias, queue_aliases
from django_mysqlqueue.service.job_rows import JobRow, NewResult
from django_mysqlqueue.service.messages import encode
from django_mysqlqueue.sql.packets import together
from django_mysqlqueue.sql.session import Session, run
from django_mysqlqueue.subscriptions import registry
from django_mysqlqueue.tasks import importing
from django_mysqlqueue.tasks.framework import (
    DEFAULT_TASK_QUEUE_NAME,
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
from django_mysqlqueue.tasks.options import (
    OF_JOBS,
    UNIQUE_FOR,
    UNTIL_FINISHED,
    check_job_option,
    option_of,
    unique_key,
)
from django_mysqlqueue.tasks.results import as_result, in_milliseconds, in_queue, timed

NOT_OF_QUEUES = {
    "via": (
        "their results could not commit with the caller's transaction",
        "Use DATABASE alone, and enqueue in a transaction on that database.",
    ),
    "partitions": ("each task has a partition of its own, whose name is its path", "Remove PARTITIONS."),
}
"""Options of ``TOPICS`` that a queue cannot have: the rule, and what to do."""


class MySQLQueueBackend(BaseTaskBackend):
    """A backend of ``django.tasks`` whose jobs ``manage.py runsubscriber`` runs.

    Attributes:
        alias: the alias in ``TASKS``.
        queues: the names of its queues.
        queue_options: the parsed ``OPTIONS`` of each queue. If ``QUEUES`` is empty, all jobs are in ``default``.
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
            self.queue_options = _parsed(alias, self.queues or {DEFAULT_TASK_QUEUE_NAME}, self.options)
        except ValueError as error:
            raise ImproperlyConfigured(f"TASKS[{alias!r}]['OPTIONS']: {error}") from None

    def validate_task(self, task: AnyTask) -> None:
        """Check a task without a query: Django calls it when the task is declared.

        Raises:
            InvalidTask: the backend cannot run it. The error names the rule.
        """
        given: Any = task  # What a project passes need not have the types that the framework declares.
        if type(given.priority) is not int:
            raise InvalidTask(f"priority={given.priority!r}: must be an integer.")
        if not isinstance(given.queue_name, str):
            raise InvalidTask(f"queue_name={given.queue_name!r}: must be a str.")
        super().validate_task(timed(task))
        if len(task.module_path) > JOB_PATH_LENGTH:
            raise InvalidTask(f"{task.module_path!r}: the path may have at most {JOB_PATH_LENGTH} characters.")
        importing.declared(task)

    @sync_only("aenqueue")
    def enqueue(self, task: AnyTask, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AnyResult:
        """Enqueue a job, in the open transaction of the queue's database if there is one.

        Args:
            task: the task.
            args: its positional arguments, which must be JSON-serializable.
            kwargs: its keyword arguments, which must be JSON-serializable.

        Returns:
            The result, which is READY. If the task is unique, and another job holds the key, it is the result of that
            one, which may be RUNNING.

        Raises:
            InvalidTask: the backend cannot run the task, or a worker could not import it.
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
        by_alias: dict[str, list[AnyResult]] = {}
        for result in results:
            by_alias.setdefault(alias_of(result), []).append(result)
        alias = next(iter(by_alias)) if len(by_alias) == 1 else None
        is_alone = alias is not None and not connections[alias].in_atomic_block
        if alias is not None and is_alone and any(self._option(result, "unique") for result in results):
            publishing.require_transaction(alias)
            # In a transaction of its own, a deadlock is not the caller's: it is repeated.
            stored = run(alias, lambda session: self._store(alias, {"": results}))
            return [stored[result.id] for result in results]
        with _all_or_none(by_alias):
            kept = [self._store(alias, {"": by_alias[alias]}) for alias in sorted(by_alias)]
        by_id = {result_id: result for stored in kept for result_id, result in stored.items()}
        return [by_id[result.id] for result in results]

    def enqueue_chain(
        self, stages: Iterable[Iterable[tuple[AnyTask, Sequence[Any], Mapping[str, Any]]]]
    ) -> list[list[AnyResult]]:
        """Enqueue a chain: the jobs of a stage start when all jobs of the one before are SUCCESSFUL.

        If a job has FAILED, the jobs of all later stages have FAILED, too, with ``EarlierJobFailed``.

        Args:
            stages: the jobs of each stage, each as in ``enqueue_many``.

        Returns:
            The results of each stage, in the same order.

        Raises:
            InvalidTask: as in ``enqueue``; or a stage has no jobs or more than 10,000, there are more than 1,000
                stages, a task is unique, or the queues are in several databases.
            TypeError, ValueError, InvalidMessage, TransactionMismatch: as in ``enqueue``.
        """
        chain = new_message_id()
        results: dict[str, list[AnyResult]] = {}
        for place, calls in enumerate(stages):
            stage = job_stages.stage_id(chain, place)
            results[stage] = [
                self._result(*call, id=job_stages.job_id(stage, number)) for number, call in enumerate(calls)
            ]
        self._check_chain(results)
        aliases = {alias_of(result) for stage in results.values() for result in stage}
        if len(aliases) > 1:
            raise InvalidTask(f"The queues of a chain are in several databases: {', '.join(sorted(aliases))}.")
        with _all_or_none(aliases):
            self._store(aliases.pop(), results)
        return list(results.values())

    def _check_chain(self, stages: Mapping[str, Sequence[AnyResult]]) -> None:
        if not stages or not all(stages.values()):
            raise InvalidTask("A stage of the chain has no jobs.")
        if len(stages) > MOST_STAGES:
            raise InvalidTask(f"The chain has {len(stages):,} stages, but at most {MOST_STAGES:,} are allowed.")
        for stage in stages.values():
            if len(stage) > MOST_STAGE_JOBS:
                raise InvalidTask(
                    f"A stage of the chain has {len(stage):,} jobs, but at most {MOST_STAGE_JOBS:,} are allowed."
                )
            for result in stage:
                if self._option(result, "unique"):
                    raise InvalidTask(
                        f"{result.task.module_path} is unique: its jobs cannot be part of a chain. Enqueue it in the "
                        "job before, or use another task without unique."
                    )

    def _option(self, result: AnyResult, name: str, default: Any = None) -> Any:
        return option_of(name, result.task.func, self.queue_options[result.task.queue_name], default)

    def _result(
        self, task: AnyTask, args: Sequence[Any], kwargs: Mapping[str, Any], *, id: str | None = None
    ) -> AnyResult:
        self.validate_task(task)
        importing.require_importable(task)
        task = timed(task) if self.queues else in_queue(timed(task), DEFAULT_TASK_QUEUE_NAME)
        path = task.module_path
        if path in job_queues.rates and not _is_declared_in(self, path, task.queue_name):
            raise InvalidTask(
                f"{path} has rate='{job_queues.rates[path]}', which holds in the queue that it was declared with: it "
                f"cannot be enqueued in {task.queue_name!r} of the backend {self.alias!r}."
            )
        try:
            return TaskResult(
                task=task,
                id=id or new_message_id(),
                status=TaskResultStatus.READY,
                enqueued_at=in_milliseconds(timezone.now()),
                started_at=None,
                finished_at=None,
                last_attempted_at=None,
                args=args,  # type: ignore[arg-type]  # It makes a list of it.
                kwargs=kwargs,  # type: ignore[arg-type]
                backend=self.alias,
                errors=[],
                worker_ids=[],
            )
        except RecursionError as error:
            raise InvalidMessage(f"arguments of {path}: {error}") from None

    def _store(self, alias: str, stages: Mapping[str, Sequence[AnyResult]]) -> Mapping[str, AnyResult]:
        """Store results, with a message for each of the first stage, in the open transaction.

        ``stages``: the results of each stage of a chain, by its id; those of jobs in no chain are one, ``""``.

        Returns:
            By the id of each result of the first stage, the same, or the result of the job that holds its key.
        """
        session = Session(alias)
        first, results = next(iter(stages.items()))
        rows = [self._row(result, stage) for stage, of in stages.items() for result in of]
        if first:
            job_stages.insert(session, {stage: len(of) for stage, of in stages.items()})
        job_rows.insert(session, [row for row in rows if row.unique_key is None])
        unique = [row for row in rows if row.unique_key is not None]
        holders = job_rows.insert_unique(session, unique) if unique else {}
        new = [row for row in rows if row.id not in holders or holders[row.id].id == row.id]
        by_topic: dict[str, list[NewResult]] = {}
        for row in new:
            topic = job_topic(row.queue_name)
            if row.stage == first:
                by_topic.setdefault(topic, []).append(row)
            else:
                encode(topic, job_rows.message_of(row))  # It is published later, but refused now.
        for topic, of_topic in by_topic.items():
            publishing.publish_many(topic, map(job_rows.message_of, of_topic), using=alias)
        is_new = {row.id for row in new}
        for result in (result for of in stages.values() for result in of if result.id in is_new):
            task_enqueued.send(type(self), task_result=result)
        return {result.id: result if result.id in is_new else as_result(holders[result.id]) for result in results}

    def _row(self, result: AnyResult, stage: str) -> NewResult:
        task = result.task
        expires_in = getattr(task, "expires_in", None)  # Of a call, for tasks of contrib.celery.
        if expires_in is None:
            expires_in = self._option(result, "expires_in")
        try:
            arguments = job_rows.as_json({"args": result.args, "kwargs": result.kwargs})
        except ValueError as error:
            raise InvalidMessage(f"arguments of {task.module_path}: {error}") from error
        assert result.enqueued_at is not None  # noqa: S101  # It has just been set.
        row = NewResult(
            id=result.id,
            backend=result.backend,
            queue_name=task.queue_name,
            task_path=task.module_path,
            arguments=arguments,
            priority=task.priority,
            run_after=0 if task.run_after is None else int(task.run_after.timestamp() * 1000),
            enqueued_at=int(result.enqueued_at.timestamp() * 1000),
            stage=stage,
            expires_in=round((expires_in or 0) * 1000),
        )
        if (unique := self._option(result, "unique")) is None:
            return row
        key = unique_key(task.module_path, self._option(result, "unique_by"), result.args, result.kwargs)
        return row._replace(
            unique_key=key,
            kept_key=key if unique == UNTIL_FINISHED else "",
            unique_for=round((self._option(result, "unique_for", UNIQUE_FOR) or 0) * 1000),
        )

    def get_result(self, result_id: str) -> AnyResult:
        """Return the result of a job.

        Raises:
            TaskResultDoesNotExist: there is none with this id, or it was deleted after ``RESULTS_RETENTION``.
            ImportError: this process does not have its task.
        """
        if not is_unicode(str(result_id)):
            raise TaskResultDoesNotExist(result_id)
        # The queues of old results may be gone, and have been in another database.
        own = (queue_alias(topic=job_topic(name)) for name in sorted(self.queue_options))
        for alias in dict.fromkeys((*own, *queue_aliases())):
            for row in job_rows.read(Session(alias), [str(result_id)]).values():
                return as_result(with_backend(row))
        raise TaskResultDoesNotExist(result_id)

    def check(self, **kwargs: Any) -> Iterable[checks.CheckMessage]:
        """Check ``TASKS``: E025 for queues, E026 for queues that two backends share, E031 for tasks."""
        for name in sorted(self.queue_options):
            try:
                topic = check_topic(job_topic(name))
            except InvalidMessage as error:
                yield checks.Error(
                    f"TASKS[{self.alias!r}]['QUEUES'] has the queue {name!r}: {error}", id="django_mysqlqueue.E025"
                )
                continue
            given = get_settings().topics.of(topic)
            for option, (rule, hint) in NOT_OF_QUEUES.items():
                if getattr(given, option) is not None:
                    yield checks.Error(
                        f"MYSQLQUEUE['TOPICS'] has {option.upper()} for {topic!r}, the queue {name!r} of jobs: {rule}.",
                        hint=hint,
                        id="django_mysqlqueue.E025",
                    )
        for other in backends():
            if other.alias < self.alias and (common := other.queue_options.keys() & self.queue_options.keys()):
                yield checks.Error(
                    f"The backends {other.alias!r} and {self.alias!r} of TASKS share queues: "
                    f"{', '.join(sorted(common))}.",
                    hint="Give each backend queues of its own.",
                    id="django_mysqlqueue.E026",
                )
        with contextlib.suppress(SubscriberError):  # reported by E008
            registry.discover()
        for text in importing.problems(self.alias):
            yield checks.Error(text, id="django_mysqlqueue.E031")


def rates_of(backend: MySQLQueueBackend, queue_name: str) -> dict[str, Rate]:
    """Return the rates of the tasks of a queue that this process has imported, by the path of each."""
    rates = dict(job_queues.rates)  # Another thread may import a task.
    return {path: rate for path, rate in rates.items() if _is_declared_in(backend, path, queue_name)}


def tasks_of(backend: MySQLQueueBackend, queue_name: str) -> list[str]:
    """Return the paths of the tasks of a queue that this process has declared, in the order of declaration."""
    return [path for path in list(job_queues.declared) if _is_declared_in(backend, path, queue_name)]


def _is_declared_in(backend: MySQLQueueBackend, path: str, queue_name: str) -> bool:
    """Return whether a task was declared with a queue of a backend."""
    try:
        task = importing.find_task(path)
    except (ImportError, InvalidTask):
        return False  # The function is not a task, or not yet.
    return task.backend == backend.alias and queue_name == (
        task.queue_name if backend.queues else DEFAULT_TASK_QUEUE_NAME
    )


OWN_RECEIVERS = ("django.tasks.signals", "django_tasks.signals")
"""The modules whose receivers of the signals of tasks only log."""


def is_observed(signal: Any) -> bool:
    """Return whether a signal of tasks has receivers of the project."""
    every = [*itertools.chain(*signal._live_receivers(MySQLQueueBackend))]
    return any(getattr(one, "__module__", "") not in OWN_RECEIVERS for one in every)


@contextlib.contextmanager
def _all_or_none(aliases: Iterable[str]) -> Iterator[None]:
    """Write all jobs or none: in transactions of their own or, as ``Model.save()`` does, in the caller's.

    Raises:
        TransactionMismatch: a database has no open transaction, but another one has.
    """
    aliases = sorted(aliases)
    with ExitStack() as transactions:
        for alias in aliases:
            publishing.require_transaction(alias)
        if len(aliases) == 1 and not is_observed(task_enqueued):
            transactions.enter_context(together(connections[aliases[0]]))
        for alias in aliases:
            in_block = connections[alias].in_atomic_block
            transactions.enter_context(
                transaction.mark_for_rollback_on_error(alias) if in_block else transaction.atomic(alias)
            )
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
    return frozenset(job_topic(name) for backend in backends() for name in backend.queue_options)


@functools.cache
def by_alias() -> Mapping[str, MySQLQueueBackend]:
    """Return the backends by their aliases, as long as ``TASKS`` does not change. They have no state of a thread."""
    return {backend.alias: backend for backend in backends()}


def backend_of(queue_name: str) -> MySQLQueueBackend | None:
    """Return the backend that has a queue, or None."""
    return next((one for one in by_alias().values() if queue_name in one.queue_options), None)


def place_of(path: str, given: Destination | None) -> Destination:
    """Return where the jobs of a task of a recurring schedule go.

    ``given``: the place of the task object that was declared; None: that of the task with the path.

    Raises:
        ImportError: there is nothing with this path.
        ValueError: it is not a task, or its backend cannot run it.
        OtherBackend: its backend is not the queue's.
    """
    try:
        task = importing.find_task(path)
        importing.require_importable(task)
    except InvalidTask as error:
        raise ValueError(str(error)) from None
    place = given or Destination.of(task)
    backend = by_alias().get(place.backend)
    if backend is None:
        raise OtherBackend(f"the backend {place.backend!r} of the task {path} in TASKS is not MySQLQueueBackend.")
    if not backend.queues:
        place = place._replace(queue_name=DEFAULT_TASK_QUEUE_NAME)
    elif place.queue_name not in backend.queues:
        raise ValueError(f"the backend {place.backend!r} has no queue {place.queue_name!r} for the task {path}")
    if len(path) > JOB_PATH_LENGTH:
        raise ValueError(f"task {path!r}: the path may have at most {JOB_PATH_LENGTH} characters")
    return place


def option_of_task(name: str, alias: str, queue_name: str, path: str) -> Any:
    """Return an option of the jobs of a task, or None if this process does not have it."""
    backend = by_alias().get(alias)
    try:
        task = importing.find_task(path)
    except (ImportError, InvalidTask):
        return None
    return option_of(name, task.func, {} if backend is None else backend.queue_options.get(queue_name, {}))


def with_backend(row: JobRow) -> JobRow:
    """Return a result with a backend that can read it, if ``TASKS`` has that of the result no longer."""
    known = by_alias()
    if row.backend in known or not known:
        return row
    alias = next((alias for alias, one in known.items() if row.queue_name in one.queue_options), next(iter(known)))
    return row._replace(backend=alias)


@receiver(setting_changed)
def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting == "TASKS":
        queue_topics.cache_clear()
        by_alias.cache_clear()


def alias_of(result: AnyResult) -> str:
    """Return the alias of the database of a job's queue."""
    return queue_alias(topic=job_topic(result.task.queue_name))


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
        if name.lower() not in (*OF_QUEUES, *OF_JOBS) or not name.isupper():
            known = ", ".join(one.upper() for one in sorted((*OF_QUEUES, *OF_JOBS)))
            raise ValueError(f"{name!r} is not an option. Options: {known}")
        values[name.lower()] = check_job_option(name.lower(), value)
    return values
