"""Test helpers for projects that publish and handle messages.

They use the test's own connection, inside the transaction of a ``TestCase``, on any database engine, including SQLite
in memory. Nothing runs in the background: when ``deliver_all`` returns, all handlers have ended.

For pytest, there is the fixture ``mysqlqueue``.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from django.db import connections, transaction

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.db.sizes import LATEST_DELIVERY
from django_mysqlqueue.db.tables import DEBOUNCED, LOG, OUTBOX, RESULTS, SLOTS, STATE
from django_mysqlqueue.exceptions import InvalidMessage, QueueError, SubscriberError
from django_mysqlqueue.models import (
    CoalesceKey,
    DebouncedMessage,
    DeliveryState,
    JobResult,
    JobStage,
    OutboxMessage,
    QuarantinedMessage,
    QueueMessage,
)
from django_mysqlqueue.names.keys import priority_of
from django_mysqlqueue.names.rules import JOB_GROUP, JOB_PREFIX, RELAY_MARK, relay_target, relayed_from
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.validators import LONGEST_DELAY
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.inline import MOST, Delivered, InlineSubscriber, Wanted, relay_from
from django_mysqlqueue.runtime.registering import declared_schedules
from django_mysqlqueue.service import schedules, sequencing
from django_mysqlqueue.service.databases import queue_alias, queue_aliases
from django_mysqlqueue.service.deliveries import Claimed
from django_mysqlqueue.service.messages import (
    Message,
    decode,
    decode_metadata,
    duration_ms,
    encode,
    public_metadata,
    publisher_key,
)
from django_mysqlqueue.service.payloads import Body
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql import dialect_of
from django_mysqlqueue.sql.session import Retry, Session, run
from django_mysqlqueue.subscriptions import registry
from django_mysqlqueue.subscriptions.delivery import Delivery
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.text.humanize import counted, listed

if TYPE_CHECKING:
    from django.test import TestCase as _TestCase

    from django_mysqlqueue.tasks.framework import AnyResult, AnyTask
    from django_mysqlqueue.tasks.testing import RecordingContext
else:  # They need a framework for tasks, and settings, which importing this module does not.
    _TestCase, AnyResult, AnyTask, RecordingContext = object, Any, Any, Any

__all__ = [
    "Delivered",
    "Published",
    "QueueTestMixin",
    "clear_queue",
    "deliver_all",
    "delivery",
    "enqueued",
    "job_context",
    "published",
    "python_clock",
    "run_recurring",
]


Handlers = Mapping[GroupRef, Handler]


@dataclass(frozen=True, slots=True)
class Published:
    """A published message, with its payload decoded."""

    topic: str
    key: str | None
    """The publisher's key, or None if there was none."""
    id: str
    payload: Any
    metadata: dict[str, Any]
    """The publisher's metadata and ``content_type``."""
    deliver_at: datetime.datetime | None
    """When a scheduled message is due (aware, UTC) while it waits in the outbox, else None."""
    failed_group: str
    """The consumer group that dead-lettered the message; empty if it is not a dead letter."""
    last_error: str
    """The end of the last traceback, or the reason; empty if it is not a dead letter."""
    priority: int = 0
    """The publisher's priority, from -100 to 100."""
    expires_at: datetime.datetime | None = None
    """When the message expires (aware, UTC), or None."""


@checked()
def published(topic: str | None = None, *, using: str | None = None) -> list[Published]:
    """Return the published messages: first those in the log, in its order, then those in the outbox.

    A scheduled message enters the log when messages are delivered after its time, for example by ``deliver_all``.

    Messages that were published ``via`` another database, and not relayed yet, are among those of the database in whose
    outbox they are. For a topic, this looks there if ``VIA`` in ``TOPICS`` names it.

    Args:
        topic: only messages of this topic; dead letters are in the DLQ topic (``"orders_dlq"``).
            If None, the messages of all topics except dead letters.
        using: alias of the only database to look in (default: the topic's; without a topic, all of the queue's
            databases, one after another).
    """
    if using is not None:
        aliases = [queue_alias(using)]
    elif topic is None:
        aliases = queue_aliases()
    else:
        via = get_settings().topics.of(topic).via
        aliases = list(dict.fromkeys([queue_alias(topic=topic), *([] if via is None else [via])]))
    return [_published(row) for alias in aliases for row in _stored(alias, topic)]


def _stored(alias: str, topic: str | None) -> list[QueueMessage | OutboxMessage]:
    """Return the rows of a database, without those that are only left there because they were relayed."""
    targets = [other for other in queue_aliases() if other != alias]
    names = [] if topic is None else [topic, *(f"{topic}{RELAY_MARK}{target}" for target in targets)]
    found: list[QueueMessage | OutboxMessage] = []
    for model, order in ((QueueMessage, "offset"), (OutboxMessage, "outbox_id")):
        rows = model._default_manager.using(alias).order_by(order)
        if topic is None:
            rows = rows.filter(failed_group="")
        else:
            rows = rows.filter(topic__in=names) if targets else rows.filter(topic=topic)
        found += rows
    return [row for row in found if not _is_relayed(row)]


def _is_relayed(row: QueueMessage | OutboxMessage) -> bool:
    target = relay_target(row.topic)
    if target is None:
        return False
    same = {"topic": relayed_from(row.topic), "message_id": row.message_id}
    return any(model._default_manager.using(target).filter(**same).exists() for model in (QueueMessage, OutboxMessage))


def _published(row: QueueMessage | OutboxMessage) -> Published:
    metadata = decode_metadata(row.metadata)
    due = getattr(row, "deliver_at", 0)
    return Published(
        topic=relayed_from(row.topic),
        key=publisher_key(row.partition_key, row.publisher_key),
        id=row.message_id,
        payload=decode(bytes(row.payload), metadata),
        metadata=public_metadata(metadata),
        deliver_at=_time(due) if due > 0 else None,
        priority=priority_of(row.partition_key),
        failed_group=row.failed_group,
        last_error=row.last_error,
        expires_at=None if row.expires_at is None else _time(row.expires_at),
    )


def _time(milliseconds: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(milliseconds / 1000, datetime.UTC)


@checked()
def enqueued(task: AnyTask | None = None, *, using: str | None = None) -> list[AnyResult]:
    """Return the results of the jobs that were enqueued, in order: ``args``, ``kwargs``, ``status`` and so on.

    They are as the database has them now: after ``deliver_all`` they have the jobs' return values and errors.

    Args:
        task: only the jobs of this task, whichever queue, priority or time ``using()`` has given them (default: those
            of all tasks).
        using: alias of the only database to look in (default: all of the queue's databases, one after another).

    Raises:
        ImportError: there are jobs of a task that cannot be imported.
        ValueError: ``task`` is not a task.
    """
    from django_mysqlqueue.tasks.testing import enqueued_in

    return enqueued_in(queue_aliases() if using is None else [queue_alias(using)], task)


@checked()
def job_context(
    task: AnyTask,
    *,
    attempt: int = 1,
    cancelled: bool = False,
    stopping: bool = False,
    previous_results: Sequence[Any] = (),
) -> RecordingContext:
    """Return a context to call a task with, if it has ``takes_context=True``. Nothing is stored.

    ``context.reports`` has each progress that the task has reported, and ``context.retries`` the delay in seconds and
    the reason of each ``context.retry()``.

    Args:
        task: the task.
        attempt: number of this attempt, up to 10,000; 1 is the first.
        cancelled: whether the job was asked to stop.
        stopping: whether the process is stopping.
        previous_results: the return values of the jobs of the stage before, if the task belongs to a chain.

    Raises:
        ValueError: an argument breaks a rule, for example a return value that is not JSON-serializable.
    """
    from django_mysqlqueue.tasks.testing import make_context

    return make_context(task, attempt=attempt, cancelled=cancelled, stopping=stopping, previous=previous_results)


@checked()
def clear_queue(*, using: str | None = None) -> None:
    """Delete all messages and all jobs, with their results: for example what fixtures have published.

    Consumer groups stay. Recorded deliveries and the audit log stay, too.

    Args:
        using: alias of the only database to clear (default: all of the queue's databases).
    """
    for alias in queue_aliases() if using is None else [queue_alias(using)]:
        with transaction.atomic(using=alias):
            for model in (
                OutboxMessage,
                QueueMessage,
                DebouncedMessage,
                CoalesceKey,
                DeliveryState,
                JobResult,
                JobStage,
            ):
                model._default_manager.using(alias).all().delete()


@contextlib.contextmanager
def python_clock() -> Iterator[None]:
    """Let the queue of this process use Python's clock in place of the database's, which nothing can freeze.

    While the context manager is open, a clock that freezegun or time-machine has frozen is that of the queue, too: of
    delays and backoffs, of what ``deliver_all`` finds due, and of the times of messages and results.
    """
    kinds = {type(dialect_of(connections[alias])) for alias in queue_aliases()}
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(mock.patch.object(kind, "now_ms", property(lambda _: str(int(time.time() * 1000)))))
        yield


@checked()
def run_recurring(name: str) -> str:
    """Publish the message or enqueue the job of a recurring schedule now, as a subscriber does when it is due.

    The schedule is the one that the code or the settings declare; nothing is registered. ``deliver_all`` then handles
    the message or runs the job.

    Args:
        name: the name of the schedule.

    Returns:
        The id of the message, which is that of the job's result.

    Raises:
        SubscriberError: there is no such schedule, or a schedule breaks a rule.
    """
    declared = declared_schedules()
    for alias, found in declared.items():
        if name in found:
            publish = partial(schedules.publish_by_hand, name=name, definition=found[name])
            return run(alias, publish)
    known = sorted(one for found in declared.values() for one in found)
    raise SubscriberError(f"There is no schedule {name!r}. Schedules: {listed(known)}.")


@checked()
def delivery(
    payload: Any = None,
    *,
    topic: str = "test",
    group: str = "test",
    key: str | None = None,
    id: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    attempt: int = 1,
    max_attempts: int | None = None,
    offset: int = 1,
    priority: int = 0,
    expires_at: datetime.datetime | None = None,
) -> Delivery:
    """Return a delivery to call a handler with, to test the handler by itself. Nothing is stored.

    The payload is encoded and decoded as ``publish`` does. After the call, the delivery's ``outcome`` is the one that
    the handler chose. Because the delivery is not in the queue, ``extend()`` raises ``StaleDelivery``, and so does
    ``ack()`` inside a transaction.

    Args:
        payload: the message's payload: a value that ``DjangoJSONEncoder`` can encode, or bytes.
        topic: the message's topic.
        group: the consumer group of the handler.
        key: the message's key.
        id: the message's id (default: a new one).
        metadata: the message's metadata, a JSON object.
        attempt: number of this attempt; 1 is the first.
        max_attempts: maximum number of attempts; None: no limit.
        offset: the message's offset in the log.
        priority: the message's priority.
        expires_at: when the message expires.

    Raises:
        InvalidMessage: ``publish`` would refuse the message.
    """
    row = encode(topic, Message(payload, key=key, id=id, metadata=metadata, priority=priority, expires_at=expires_at))
    now = time.time_ns() // 1_000_000
    handler = Handler(
        ref=GroupRef(group, topic),
        function=lambda delivery: None,
        where="a test",
        mode="ordered",
        atomic=False,
        start="earliest",
        on_failure="skip",
        max_attempts=max_attempts,
        visibility_timeout=60.0,
        max_processing_time=600.0,
        backoff=Backoff(),
    )
    claimed = Claimed(handler.ref, row.partition_key, offset, 1, attempt, suspect=False, size=len(row.payload))
    body = Body(
        row.message_id,
        row.payload,
        row.metadata,
        "",
        now,
        now,
        publisher_key=row.publisher_key,
        expires_at=row.expires_at,
    )
    return Delivery(handler, claimed, body, queue_alias(topic=topic))


@checked(InvalidMessage)
def deliver_all(
    *,
    raise_exceptions: bool = True,
    advance: float | datetime.timedelta | None = None,
    groups: Collection[str] | None = None,
    tasks: Collection[Any] | None = None,
    using: str | None = None,
) -> list[Delivered]:
    """Deliver all due messages, and those that handlers publish in the meantime, until none is left.

    Handlers run one after another in the calling thread. A failed message is redelivered at once, without a backoff,
    until it is acked or dead-lettered. Snoozed and scheduled messages wait until ``advance`` makes them due, and so do
    messages beyond the limits of their group. Filters of groups apply as they are registered or overridden: messages
    that do not match are passed. So are messages that have expired, and, of those with one coalesce key, all but the
    latest.
    ``on_commit`` hooks follow Django's rules: in a ``TestCase``, wrap the call in
    ``captureOnCommitCallbacks(execute=True)``.

    If topics are in several databases, the handlers of each database's topics run one database after another, again and
    again while handlers publish to other databases. Messages that were published ``via`` another database are relayed.
    A ``TestCase`` must have all of them in its ``databases``.

    Args:
        raise_exceptions: if True, stop at the first exception of a handler and raise it; the attempt counts as failed.
            If False, retry the message as a subscriber does. ``RetryLater`` is not raised, except at the last attempt.
        advance: seconds or a timedelta. Scheduled and snoozed messages, and the times at which the group's limits
            allow further messages, are brought forward by this time before delivering; messages expire earlier by it,
            and unique jobs hold their keys until earlier.
        groups: run only the handlers of these consumer groups.
        tasks: run only the jobs of these tasks and, if ``groups`` is passed, their handlers. Other jobs stay as they
            are.
        using: alias of the only database in which messages are delivered (default: all of the queue's databases).

    Returns:
        The deliveries, in order.

    Raises:
        Exception: the first exception of a handler or a task, with its traceback, if ``raise_exceptions`` is True.
        TransactionManagementError: in a ``TestCase``, a handler that is not atomic continued after a database error
            that it had caught; the text says what to do.
        SubscriberError: one of the ``groups`` has no handler, one of the ``tasks`` is not a task of a
            ``MySQLQueueBackend``, a group is registered with a mode other than its handler's, or its filter cannot be
            parsed.
        QueueError: handlers keep publishing: there were 10,000 more deliveries than messages due at the start; or, if
            ``raise_exceptions`` is True, the log has refused messages, for example because of a trigger. The others
            were delivered.
    """
    aliases = queue_aliases() if using is None else [queue_alias(using)]
    handlers = _chosen(groups, tasks)
    paths = None if tasks is None else {task.module_path for task in tasks}
    if advance is not None:
        milliseconds = duration_ms("advance", advance, longest=100 * LONGEST_DELAY)
        for alias in aliases:
            _advance(alias, milliseconds)
    chosen = {alias: registry.handlers_in(alias, handlers) for alias in aliases}
    reported = {alias: _last_quarantined(alias) for alias in aliases} if raise_exceptions else {}
    delivered = _deliver(
        chosen,
        wanted=lambda ref, body: paths is None or not _is_job(ref) or _task_path(body) in paths,
        raise_exceptions=raise_exceptions,
    )
    for alias, last in reported.items():
        _require_none_refused(alias, last)
    return delivered


def _chosen(groups: Collection[str] | None, tasks: Collection[Any] | None) -> Handlers:
    """Return the handlers of some groups, and those of the queues of some tasks.

    Raises:
        SubscriberError: a group has no handler, or something is not a task of the queue's backend.
    """
    handlers = registry.handlers()
    if groups is not None and (unknown := sorted(set(groups) - {ref.group for ref in handlers})):
        raise SubscriberError(f"groups={unknown!r}: no handler has these groups")
    for task in tasks or ():
        if getattr(task, "backend", None) not in _backends():
            raise SubscriberError(f"tasks has {task!r}: it is not a task of a MySQLQueueBackend")
    if groups is None and tasks is None:
        return handlers
    return {
        ref: handler
        for ref, handler in handlers.items()
        if ref.group in (groups or ()) or (tasks is not None and _is_job(ref))
    }


def _backends() -> Collection[str]:
    from django_mysqlqueue.tasks.backend import by_alias

    return by_alias()


def _is_job(ref: GroupRef) -> bool:
    return ref.group == JOB_GROUP and ref.topic.startswith(JOB_PREFIX)


def _task_path(body: Body) -> str | None:
    """Return the path of the task of a job, or None if the message is not a job."""
    try:
        payload = decode(body.payload, decode_metadata(body.metadata))
    except InvalidMessage:
        return None
    path = payload.get("task") if isinstance(payload, dict) else None
    return path if isinstance(path, str) else None


def _last_quarantined(using: str) -> int:
    return QuarantinedMessage.objects.using(using).order_by("-pk").values_list("pk", flat=True).first() or 0


def _require_none_refused(using: str, after: int) -> None:
    refused = QuarantinedMessage.objects.using(using).filter(pk__gt=after).order_by("pk")
    texts = [f"message {one.message_id!r} of topic {one.topic!r} ({one.reason})" for one in refused]
    if texts:
        raise QueueError(f"The log has refused {counted(len(texts), 'message')}: {listed(texts)}.")


def _advance(using: str, milliseconds: int) -> None:
    """Bring all scheduled messages, backoffs, slots, expiries and unique keys nearer, as if the time had passed."""
    run(using, partial(_bring_nearer, milliseconds=milliseconds))


def _bring_nearer(session: Session, milliseconds: int) -> None:
    if not sequencing.take_mutex(session):
        raise Retry  # The sequencer is running.
    # By primary key, as all transactions lock these rows: by the index on due times it deadlocked with cancels.
    by_key = session.dialect.force_index("PRIMARY")

    def earlier(table: str, column: str, where: str, *parameters: object) -> None:
        # Not 0, which means "at once" and comes before messages that have come due.
        value = f"{session.dialect.greatest}(1, {column} - %s)"
        session.execute(f"UPDATE {table}{by_key} SET {column} = {value} WHERE {where}", (milliseconds, *parameters))

    earlier(OUTBOX, "deliver_at", "deliver_at > 0")
    earlier(STATE, "invisible_until", "invisible_until > 0 AND delivery_token = 0 AND acked = %s", False)  # noqa: FBT003
    earlier(DEBOUNCED, "deliver_by", "deliver_by < %s", LATEST_DELIVERY)
    for table in (OUTBOX, LOG):
        earlier(table, "expires_at", "expires_at IS NOT NULL")
    for column in ("retry_at", "retry_since"):
        earlier(RESULTS, column, f"{column} > 0")
    for column in ("unique_since", "run_after"):  # From the later one, a unique job holds its key for a time.
        earlier(RESULTS, column, f"{column} > 0 AND unique_key IS NOT NULL")
    session.execute(f"UPDATE {SLOTS}{by_key} SET full_at = full_at - %s WHERE full_at > 0", (milliseconds * 1000,))


def _deliver(by_database: Mapping[str, Handlers], *, wanted: Wanted, raise_exceptions: bool) -> list[Delivered]:
    """Deliver in each database, until none has been left with messages by the handlers of the others."""
    chosen = {alias: handlers for alias, handlers in by_database.items() if handlers}
    sessions.forget_uses()
    is_alone = len(by_database) == 1
    allowed = 0 if is_alone else MOST + sum(map(len, chosen.values())) * sum(map(_due, by_database))
    delivered: list[Delivered] = []
    while True:
        quiet = 0
        for alias, handlers in itertools.cycle(chosen.items()):
            most = MOST if is_alone else allowed - len(delivered) - len(handlers) * _due(alias)
            try:
                found, errors = InlineSubscriber(alias, handlers, get_settings(), wanted).run(
                    ignore_backoff=True, stop_at_error=raise_exceptions, most=most
                )
            except QueueError as error:
                if is_alone or type(error) is not QueueError:
                    raise
                last = str(error).partition(": ")[2]
                text = f"Stopped after {allowed} deliveries in {len(by_database)} databases: {last}"
                raise QueueError(text) from None
            for one in errors:
                if raise_exceptions or isinstance(one, KeyboardInterrupt):
                    raise one
            delivered += found
            # It has left nothing in its own database.
            quiet = 1 if found else quiet + 1
            if quiet >= len(chosen):
                break
        if is_alone:
            return delivered
        reached = [target for source in by_database for target in relay_from(source)]
        if not reached:
            return delivered


def _due(alias: str) -> int:
    return sequencing.count_due(Session(alias))


class QueueTestMixin(_TestCase):
    """For a ``TestCase`` of Django: each test begins with an empty queue, and has assertions about the queue.

    It deletes what ``setUpTestData`` and fixtures have published and enqueued; code in ``setUp`` after
    ``super().setUp()`` publishes for the test.
    """

    def setUp(self) -> None:
        """Clear the queue."""
        super().setUp()
        clear_queue()

    def deliver_all(self, *, advance: float | datetime.timedelta | None = None, **options: Any) -> list[Delivered]:
        """Deliver as the function ``deliver_all``, and call the ``on_commit`` hooks of handlers after each round.

        If hooks publish or enqueue something, there is another round.

        Args:
            advance: as for the function ``deliver_all``.
            options: its other arguments.
        """
        delivered: list[Delivered] = []
        while True:
            with contextlib.ExitStack() as stack:
                for alias in queue_aliases():
                    stack.enter_context(self.captureOnCommitCallbacks(using=alias, execute=True))
                found = deliver_all(advance=advance, **options)
            if not found:
                return delivered
            delivered += found
            advance = None

    def assertPublished(self, topic: str, payload: Any) -> None:  # noqa: N802  # As unittest names them.
        """Fail unless a message with a payload was published to a topic."""
        self.assertIn(payload, [message.payload for message in published(topic)], f"published({topic!r})")

    def assertEnqueued(self, task: AnyTask, *args: Any, **kwargs: Any) -> None:  # noqa: N802
        """Fail unless a job of a task was enqueued with some arguments."""
        calls = [(result.args, result.kwargs) for result in enqueued(task)]
        self.assertIn((list(args), kwargs), calls, f"enqueued({task.module_path})")
