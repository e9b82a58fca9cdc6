"""The handlers of the queues of jobs: they call the tasks, and decide the outcomes of jobs."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.db import OperationalError
from django.dispatch import Signal

from django_mysqlqueue.db.sizes import JOB_PATH_LENGTH
from django_mysqlqueue.exceptions import InvalidMessage, StaleDelivery, SubscriberError
from django_mysqlqueue.names.keys import priority_of
from django_mysqlqueue.names.rules import JOB_GROUP, JOB_PREFIX, job_topic
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.delivery_limits import Rate
from django_mysqlqueue.options.table import OF_QUEUES, as_text, check_option
from django_mysqlqueue.runtime.handling import rejections
from django_mysqlqueue.runtime.handling.event_loop import adopt_lent
from django_mysqlqueue.runtime.handling.observers import tell
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.service import job_results, job_retries, job_rows
from django_mysqlqueue.service.deliveries import NOT_BEGUN, Action, Claimed, JobName, Settlement
from django_mysqlqueue.service.job_rows import JobRow, NewResult, moment
from django_mysqlqueue.service.messages import decode, decode_metadata
from django_mysqlqueue.service.payloads import Body
from django_mysqlqueue.service.received import ReceivedMessage
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, run
from django_mysqlqueue.subscriptions.delivery import Delivery
from django_mysqlqueue.subscriptions.handler import Handler, Monitor
from django_mysqlqueue.subscriptions.options import broken_by, defaults
from django_mysqlqueue.subscriptions.retry_later import RetryLater
from django_mysqlqueue.subscriptions.timeouts import limited
from django_mysqlqueue.subscriptions.unknown_tasks import UnknownTasks
from django_mysqlqueue.tasks import framework
from django_mysqlqueue.tasks.attempts import Attempt, JobContext
from django_mysqlqueue.tasks.backend import (
    MySQLQueueBackend,
    backend_of,
    backends,
    by_alias,
    is_observed,
    rates_of,
    tasks_of,
    with_backend,
)
from django_mysqlqueue.tasks.exceptions import (
    InvalidJob,
    InvalidResult,
    JobCancelled,
    RetriedTooLong,
    UnknownTask,
    WorkerLost,
)
from django_mysqlqueue.tasks.framework import (
    AnyResult,
    AnyTask,
    TaskResultStatus,
    normalize_json,
    task_finished,
    task_started,
)
from django_mysqlqueue.tasks.importing import find_task, is_async
from django_mysqlqueue.tasks.monitor import JobMonitor, watching
from django_mysqlqueue.tasks.options import JobOptions, options_of
from django_mysqlqueue.tasks.results import as_result, change, errors_of

UNKNOWN_DELAY = 30
"""Seconds after which a job whose task this process does not have is delivered again."""
UNKNOWN_GRACE = 3600
"""Seconds for which that costs no attempt: a rollout may last so long."""
LOCKED_DELAY = 1
"""Seconds after which a job that could not start is delivered again, because its result is still locked, or another
message of it came first."""
LONG = 10.0
"""Seconds after which the transaction of an atomic job is long."""
_long: set[str] = set()
"""The tasks of which the log has said so."""
NEVER_RETRIED = (InvalidJob, InvalidResult, JobCancelled, UnknownTask, WorkerLost)
"""Exceptions after which a job is FAILED, regardless of its options."""


class _Begun(NamedTuple):
    """The call of a job's task."""

    attempt: Attempt
    task: AnyTask
    arguments: Sequence[Any]
    names: Mapping[str, Any]

    def called(self) -> Any:
        """Return what the task returns, in a thread.

        An async task runs in a thread once, which has imported it. That is no reason to give it another event loop.
        """
        if iscoroutinefunction(self.task.func):
            adopt_lent()
        if self.attempt.options is None or self.attempt.options.timeout is None:
            return self.task.call(*self.arguments, **self.names)
        return async_to_sync(self.awaited)()

    async def awaited(self) -> Any:
        """Return what an async task returns, within its time limit if it has one."""
        timeout = None if self.attempt.options is None else self.attempt.options.timeout
        if timeout is None:
            return await self.task.acall(*self.arguments, **self.names)
        called = limited(lambda _: self.task.acall(*self.arguments, **self.names), timeout, self.task.module_path)
        return await called(None)


@dataclass(frozen=True, slots=True)
class JobHandler(Handler):
    """The handler of a queue of jobs."""

    rated: frozenset[str] = frozenset()
    """The paths of the tasks of the queue that have a rate, of those that were imported when it was declared."""

    unknown: UnknownTasks = field(default_factory=UnknownTasks, compare=False, repr=False)

    longest_task: float = 0.0
    """The longest ``max_processing_time`` of the tasks that were imported when it was declared."""

    more_time: ClassVar[str] = "@job(max_processing_time=…)"
    runs_jobs: ClassVar[bool] = True
    monitor: ClassVar[type[Monitor] | None] = JobMonitor

    @property
    def longest_time(self) -> float:
        """The longest time for which a job may run."""
        return max(self.max_processing_time, self.longest_task)

    def time_limit(self, state: object) -> float:
        """Return the time for which a job may run."""
        options = state.options if isinstance(state, Attempt) else None
        if options is None or options.max_processing_time is None:
            return self.max_processing_time
        # The server closes idle connections of handlers after the longest time that was known at the start.
        return min(options.max_processing_time, self.longest_time)

    @property
    def may_be_async(self) -> bool:
        """Whether some calls are coroutines."""
        return True

    def is_on_loop(self, state: object) -> bool:
        """Return whether the job's task is async. Until something has imported it, it runs in a thread, which does."""
        return isinstance(state, Attempt) and is_async(state.row.task_path)

    def runs_receivers(self) -> bool:
        """Return whether the project has receivers of the signals of tasks."""
        return is_observed(task_started) or is_observed(task_finished)

    def must_prepare(self, deliveries: Sequence[ReceivedMessage]) -> bool:
        """Return whether the job's result was locked when it was claimed."""
        attempt = _attempt_of(deliveries[0])
        return attempt is not None and attempt.is_locked and not (attempt.is_second or attempt.is_over)

    def prepare(self, using: str, deliveries: Sequence[ReceivedMessage]) -> None:
        """Wait for a result that was locked when its job was claimed.

        Locks are granted in turn, so the job starts although others find all the time that it waits.
        """
        attempt = _attempt_of(deliveries[0])
        if attempt is None or not self.must_prepare(deliveries):
            return
        worker = _as_delivery(deliveries[0])._claimed.by
        try:
            begun = job_results.begin(using, worker, [attempt.row.id], messages=[attempt.message], wait=True)
        except OperationalError as error:
            if not Session(using).dialect.is_retryable(error):
                raise
            return  # It is snoozed.
        if (row := begun.rows.get(attempt.row.id)) is not None:
            attempt.row, attempt.clock, attempt.now_ms, attempt.is_locked = row, time.monotonic(), begun.now, False

    def is_atomic(self, deliveries: Sequence[ReceivedMessage]) -> bool:
        """Return whether the job's task runs in a transaction that also stores its result."""
        attempt = _attempt_of(deliveries[0])
        if attempt is None or attempt.is_over or attempt.is_blocked:
            return False
        self._find_task(attempt)
        return attempt.options is not None and attempt.options.atomic

    def _find_task(self, attempt: Attempt) -> None:
        """Find the job's task and its options, if this process has it."""
        if attempt.task is None:
            try:
                attempt.task = find_task(attempt.row.task_path)
            except (Exception, SystemExit):  # noqa: BLE001  # An import runs code of the project. The call raises it again.
                return
            attempt.options = options_of(attempt.task.func, _options_of_queue(attempt.row))

    def _lacks_rate(self, attempt: Attempt) -> bool:
        """Return whether the job's task has a rate that was not known when the subscriber started."""
        return (
            attempt.options is not None and attempt.options.rate is not None and attempt.row.task_path not in self.rated
        )

    def claimed(self, using: str, bodies: Mapping[Claimed, Body]) -> Mapping[Claimed, object]:
        """Note in the results that the jobs were claimed."""
        if not bodies:
            return {}
        ids = {delivery: body.original_id or body.message_id for delivery, body in bodies.items()}
        worker = next(iter(bodies)).by
        messages = {body.message_id for body in bodies.values()}
        begun = job_results.begin(using, worker, set(ids.values()), messages=messages)
        rows, now = begun.rows, begun.now
        locked: dict[str, JobRow] = {}
        if missing := {delivery: job for delivery, job in ids.items() if job not in rows}:
            locked = job_rows.read(Session(using), missing.values())
            # The result of a dead letter may be deleted before it is redriven, and plain SQL may insert a message.
            new = [
                _new_result(job, delivery, bodies[delivery]) for delivery, job in missing.items() if job not in locked
            ]
            redriven = {
                job: bodies[delivery].message_id for delivery, job in missing.items() if bodies[delivery].original_id
            }
            if stored := [row for row in new if row is not None]:
                run(using, lambda session: _insert(session, stored, redriven))
                rows = rows | job_results.begin(using, worker, [row.id for row in stored], messages=messages).rows
        clock = time.monotonic()
        # Plain SQL may give a job two messages. They must not run it at the same time.
        found = locked | rows
        attempts = {
            delivery: Attempt(
                using,
                found[job],
                clock,
                now,
                bodies[delivery].published_at,
                delivery.attempt,
                bodies[delivery].message_id,
                is_locked=job in locked,
            )
            for delivery, job in ids.items()
            if job in found
        }
        first: dict[str, Attempt] = {}
        for attempt in attempts.values():
            if not attempt.is_over:
                attempt.is_second = first.setdefault(attempt.row.id, attempt) is not attempt
        return attempts

    def job_of(self, state: object) -> JobName | None:
        """Return the job of an attempt."""
        return JobName(state.row.id, state.row.task_path) if isinstance(state, Attempt) else None

    def tasks(self) -> Sequence[str]:
        """Return the paths of the tasks that were declared with the queue."""
        queue = self.ref.topic.removeprefix(JOB_PREFIX)
        backend = backend_of(queue)
        return () if backend is None else tasks_of(backend, queue)

    def call(self, given: Any) -> Any:
        """Call the job's task."""
        if (begun := self._begin(given)) is None:
            return
        began, attempt = time.monotonic(), begun.attempt
        try:
            with watching(attempt):
                value = begun.called()
        finally:
            if (seconds := time.monotonic() - began) > LONG and attempt.options is not None and attempt.options.atomic:
                _ran_long(begun.task.module_path, seconds)
        _returned(given, begun, value)

    async def acall(self, given: Any) -> Any:
        """Call the job's async task."""
        if (attempt := _attempt_of(given)) is not None:
            self._find_task(attempt)
        begun = await sync_to_async(self._begin)(given) if self.runs_receivers() else self._begin(given)
        if begun is None:
            return
        with watching(begun.attempt):
            value = await begun.awaited()
        _returned(given, begun, value)

    def _begin(self, given: Any) -> _Begun | None:
        """Begin the attempt of a job; return None if there is nothing to call."""
        attempt = _attempt_of(given)
        if attempt is None:
            _content(given.payload)
            raise InvalidJob(f"The message {given.id!r} has no result, because it was deleted while it was claimed.")
        if attempt.is_over:
            return None  # It was cancelled, or it was settled or replaced, and the group was rewound.
        if attempt.is_blocked:
            given.snooze(LOCKED_DELAY)
            return None
        task = attempt.task
        if task is None or self._lacks_rate(attempt):
            error = _unknown(attempt)
            self.unknown.add(attempt.row.task_path, attempt.now(), str(error))
            # It was claimed first, attempted last, or redriven.
            since = max(attempt.row.started_at, attempt.row.last_attempted_at, attempt.published_at)
            if attempt.now() - since > UNKNOWN_GRACE * 1000:
                raise error
            given.snooze(UNKNOWN_DELAY)
            return None
        self.unknown.discard(attempt.row.task_path)
        losses, most = attempt.losses, attempt.max_attempts
        if most is not None and losses >= most:
            lost = "1 subscriber was" if losses == 1 else f"{losses} subscribers were"
            raise WorkerLost(
                f"{lost} lost during an attempt at the job, in addition to the first loss (max_attempts={most})."
            )
        _, arguments_given = _content(given.payload)
        attempt.started_at = attempt.now()
        row = attempt.row._replace(last_attempted_at=attempt.started_at)
        attempt.result = result = as_result(with_backend(row), task, arguments_given)
        _tell(task_started, attempt, result)
        arguments = [JobContext(attempt, result), *result.args] if task.takes_context else result.args
        return _Begun(attempt, task, arguments, result.kwargs)

    def acked_here(self, using: str, deliveries: Sequence[ReceivedMessage]) -> None:
        """Store the result in the transaction of the task."""
        for delivery in deliveries:
            attempt = _attempt_of(delivery)
            if attempt is None or attempt.is_over:
                continue
            text = f"The job {attempt.row.id!r} has ended meanwhile: the writes of its task were rolled back."
            stale = partial(StaleDelivery, text, delivery=_as_delivery(delivery)._claimed)
            job_results.succeed(Session(using), attempt.end(), stale)

    def retried_here(self, using: str, settlements: Sequence[Settlement]) -> bool:
        """Store that the job waits, in the transaction of the task, if that has called ``context.retry``."""
        (settlement,) = settlements
        if settlement.job is None:
            return False
        job_retries.wait_here(using, settlement, settlement.job)
        return True

    def settled(
        self, deliveries: Sequence[ReceivedMessage], settlements: list[Settlement], error: BaseException | None
    ) -> list[Settlement]:
        """Decide by the options of the job what becomes of it, and tell the receivers of ``task_finished``."""
        (delivery,), (settlement,) = deliveries, settlements
        attempt = _attempt_of(delivery)
        if attempt is None:
            return [settlement._replace(action=Action.REJECT, is_final=True)] if error else settlements
        if attempt.is_over:
            return settlements
        if attempt.is_blocked:
            return [settlement._replace(job=NOT_BEGUN)]
        if isinstance(error, RetryLater) and not error.counts and not attempt.cancelled:
            try:
                return [settlement._replace(job=attempt.uncounted(error.delay_ms, error.reason))]
            except RetriedTooLong as late:
                late.__cause__ = error
                settlement = settlement._replace(error="".join(traceback.format_exception(late)))
                error = late
        if error is not None:
            return [self._failed(settlement, attempt, error)]
        if settlement.action is Action.ACK:
            _finish(attempt, TaskResultStatus.SUCCESSFUL, _return_value=attempt.returned)
            took_ms = attempt.now() - attempt.started_at
            return [settlement._replace(job=attempt.end(), handled_ms=took_ms)]
        if attempt.again is not None:
            return settlements
        if settlement.action is Action.SNOOZE and attempt.row.last_attempted_at:
            return [settlement._replace(job=attempt.taken_back())]
        return settlements  # It was snoozed before its first attempt, or found to be stale.

    def _failed(self, settlement: Settlement, attempt: Attempt, error: BaseException) -> Settlement:
        row, number = attempt.row, attempt.counted
        options = attempt.options or JobOptions()
        path = f"{type(error).__module__}.{type(error).__qualname__}"
        errors = job_rows.with_error(row.errors, path, settlement.error)
        is_rejected = attempt.cancelled or isinstance(error, NEVER_RETRIED) or rejections.is_rejected(options, error)
        most = attempt.max_attempts
        if options.atomic and rejections.is_of_database(error) and most is not None:
            # Nothing is left of the attempt, and the next one may find a better server.
            most = max(most, get_settings().max_attempts or most)
        is_final = is_rejected or (most is not None and number >= most)
        delay_ms, reason = round(options.backoff.delay(number) * 1000), ""
        if isinstance(error, RetryLater):
            delay_ms, reason = error.delay_ms, error.reason
        end = attempt.end(errors)
        if is_final:
            _finish(attempt, TaskResultStatus.FAILED, errors=errors_of(errors))
        else:
            end = end._replace(retry=attempt.retry(delay_ms, reason))
        return settlement._replace(
            action=Action.REJECT if is_rejected else Action.NACK, delay_ms=delay_ms, is_final=is_final, job=end
        )


def _ran_long(path: str, seconds: float) -> None:
    """Log once for each task that its transactions are long."""
    if path not in _long:
        _long.add(path)
        event(logging.WARNING, "job.long_transaction", task=path, seconds=round(seconds, 1))


def _attempt_of(delivery: ReceivedMessage) -> Attempt | None:
    state = _as_delivery(delivery)._state
    return state if isinstance(state, Attempt) else None


def _as_delivery(delivery: ReceivedMessage) -> Delivery:
    assert isinstance(delivery, Delivery)  # noqa: S101  # A handler gets nothing else.
    return delivery


def _options_of_queue(row: JobRow) -> Mapping[str, Any]:
    # TASKS may not have the backend any more.
    backend = by_alias().get(row.backend)
    return {} if backend is None else backend.queue_options.get(row.queue_name, {})


def _insert(session: Session, rows: Sequence[NewResult], redriven: Mapping[str, str]) -> None:
    """Insert results of messages that have none. Some jobs have messages that were redriven, with ids of their own."""
    job_rows.insert(session, rows, keep="id")
    job_rows.store_redriven(session, {row.id: redriven[row.id] for row in rows if row.id in redriven})


def _new_result(job: str, delivery: Claimed, body: Body) -> NewResult | None:
    """Return the result of a message that has none, or None if it is not a job."""
    queue = delivery.ref.topic.removeprefix(JOB_PREFIX)
    backend = backend_of(queue)
    try:
        path, arguments = _content(decode(body.payload, decode_metadata(body.metadata)))
    except (InvalidJob, InvalidMessage):
        return None
    if backend is None:
        return None
    text = job_rows.as_json(arguments)
    return NewResult(
        id=job,
        backend=backend.alias,
        queue_name=queue,
        task_path=path,
        arguments=text,
        priority=priority_of(delivery.key),
        run_after=0,
        enqueued_at=body.created_at,
    )


def _content(payload: Any) -> tuple[str, dict[str, Any]]:
    """Return the path of a job's task, and its arguments.

    Raises:
        InvalidJob: the payload is not a job.
    """
    try:
        path, args, kwargs = payload["task"], list(payload["args"]), dict(payload["kwargs"])
    except (ValueError, TypeError, KeyError):
        path, args, kwargs = None, [], {}
    if not isinstance(path, str) or len(path) > JOB_PATH_LENGTH:
        # Without the payload: the error is logged.
        raise InvalidJob(
            f"A payload of type {type(payload).__name__} is not a job: it must be a JSON object with task (a dotted "
            f"path of at most {JOB_PATH_LENGTH} characters), args (a list) and kwargs (an object)."
        )
    return path, {"args": args, "kwargs": kwargs}


def _unknown(attempt: Attempt) -> UnknownTask:
    """Log that this process does not have a task, or does not know its rate, and return the exception."""
    path = attempt.row.task_path
    if attempt.options is not None:
        late = UnknownTask(
            f"The task {path!r} has rate='{attempt.options.rate}', but it was imported only for this job, or belongs "
            "to another queue. Import its module in tasks.py of an app, and run migrate."
        )
        event(logging.WARNING, "job.unknown", task=path, id=attempt.row.id, error=late)
        return late
    try:
        find_task(path)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # An import runs code of the project.
        event(logging.WARNING, "job.unknown", task=path, id=attempt.row.id, error=error)
        unknown = UnknownTask(f"This process has no task {path!r}: {error}")
        unknown.__cause__ = error
        return unknown
    return UnknownTask(f"This process could not import the task {path!r} when the job was claimed.")


def _returned(given: ReceivedMessage, begun: _Begun, value: Any) -> None:
    """Note what a task has returned, or that it is to be called again."""
    attempt, delivery = begun.attempt, _as_delivery(given)
    if (again := attempt.again) is None:
        attempt.returned, attempt.value = _stored(begun.task, value)
        return
    end = again.end._replace(progress=attempt.progress or None)
    delivery._verdict = Settlement(delivery._claimed, Action.SNOOZE, again.delay_ms, again.reason, job=end)


def _stored(task: AnyTask, value: Any) -> tuple[Any, str]:
    """Return a return value as JSON has it, and as JSON text."""
    try:
        normalized = normalize_json(value)
        text = job_rows.as_json(normalized)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidResult(f"{task.module_path} returned a value that is not JSON-serializable: {error}") from error
    most = get_settings().max_payload_bytes
    if (size := len(text.encode())) > most:
        raise InvalidResult(
            f"{task.module_path} returned a value of {size:,} bytes of JSON, but at most {most:,} are allowed "
            "(MAX_PAYLOAD_BYTES): store it elsewhere, and return where it is."
        )
    return normalized, text


def _finish(attempt: Attempt, status: TaskResultStatus, **values: Any) -> None:
    """Send ``task_finished``. If the call never began, there is no result to send."""
    if attempt.result is not None:
        change(attempt.result, status=status, finished_at=moment(attempt.now()), **values)
        _tell(task_finished, attempt, attempt.result)


def _tell(signal: Signal, attempt: Attempt, result: AnyResult) -> None:
    backend = by_alias().get(attempt.row.backend)
    tell(signal, sender=MySQLQueueBackend if backend is None else type(backend), home=framework, task_result=result)


# -- declaring them ---------------------------------------------------------------

FIXED = {
    "mode": "shared",
    "atomic": False,
    "start": "earliest",
    "on_failure": "skip",
    "max_attempts": None,
    "batch_size": 1,
}
"""Options that a queue has in any case: ``JobHandler`` decides for each job."""


def job_handlers() -> dict[GroupRef, Handler]:
    """Return the handlers of all queues of the backends of this kind in ``TASKS``."""
    settings = get_settings()
    found: dict[GroupRef, Handler] = {}
    for backend in backends():
        for name in sorted(backend.queue_options):
            ref = GroupRef(JOB_GROUP, job_topic(name))
            own = {option: value for option, value in backend.queue_options[name].items() if option in OF_QUEUES}
            options = {**defaults(settings), "priority_share": 0, **own, **settings.groups.get(JOB_GROUP, {}), **FIXED}
            options["longest_task"] = max(job_queues.time_limits.values(), default=0.0)
            where, rates = f"TASKS[{backend.alias!r}], queue {name!r}", rates_of(backend, name)
            if rates:
                _refuse_other_rates(where, options, rates)
                options |= {"rate_per_key": check_option("rate_per_key", rates), "rated": frozenset(rates)}
            found[ref] = JobHandler(ref=ref, function=_run, where=where, **options)
            for rule in broken_by(found[ref]):
                raise SubscriberError(f"{found[ref].where}: {rule.text}")
    return found


def _refuse_other_rates(where: str, options: Mapping[str, Any], rates: Mapping[str, Rate]) -> None:
    if (value := options.get("rate_per_key")) is not None:
        raise SubscriberError(
            f"{where}: MYSQLQUEUE['GROUPS'][{JOB_GROUP!r}] has RATE_PER_KEY={as_text('rate_per_key', value)!r}, but "
            f"the rates per key of this queue are those of its tasks (@job(rate=)): {', '.join(sorted(rates))}. "
            "Remove one of the two."
        )


def _run(delivery: Delivery) -> None:
    """Stand for ``JobHandler.call``, where a function is shown."""
    raise NotImplementedError
