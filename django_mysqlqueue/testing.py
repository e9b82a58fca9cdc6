"""Test helpers for projects that publish and handle messages.

They use the test's own connection, inside the transaction of a ``TestCase``, on any database engine, including SQLite
in memory. Nothing runs in the background: when ``deliver_all`` returns, all handlers have ended.

For pytest, there is the fixture ``mysqlqueue``.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.db.sizes import LATEST_DELIVERY
from django_mysqlqueue.db.tables import DEBOUNCED, LOG, OUTBOX, RESULTS, SLOTS, STATE
from django_mysqlqueue.exceptions import InvalidMessage, QueueError, SubscriberError
from django_mysqlqueue.models import (
    OutboxMessage,
    QuarantinedMessage,
    QueueMessage,
)
from django_mysqlqueue.names.keys import priority_of
from django_mysqlqueue.names.rules import RELAY_MARK, relay_target, relayed_from
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.validators import LONGEST_DELAY
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.inline import MOST, Delivered, InlineSubscriber, relay_from
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
from django_mysqlqueue.sql.session import Retry, Session, run
from django_mysqlqueue.subscriptions import registry
from django_mysqlqueue.subscriptions.delivery import Delivery
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.text.humanize import counted, listed

__all__ = ["Delivered", "Published", "deliver_all", "delivery", "published", "run_recurring"]


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
            If False, retry the message as a subscriber does.
        advance: seconds or a timedelta. Scheduled and snoozed messages, and the times at which the group's limits
            allow further messages, are brought forward by this time before delivering; messages expire earlier by it.
        groups: run only the handlers of these consumer groups.
        using: alias of the only database in which messages are delivered (default: all of the queue's databases).

    Returns:
        The deliveries, in order.

    Raises:
        Exception: the first exception of a handler, if ``raise_exceptions`` is True.
        TransactionManagementError: in a ``TestCase``, a handler that is not atomic continued after a database error
            that it had caught; the text says what to do.
        SubscriberError: one of the ``groups`` has no handler, a group is registered with a mode other than its
            handler's, or its filter cannot be parsed.
        QueueError: handlers keep publishing: there were 10,000 more deliveries than messages due at the start; or, if
            ``raise_exceptions`` is True, the log has refused messages, for example because of a trigger. The others
            were delivered.
    """
    aliases = queue_aliases() if using is None else [queue_alias(using)]
    handlers = registry.handlers()
    if groups is not None:
        unknown = sorted(set(groups) - {ref.group for ref in handlers})
        if unknown:
            raise SubscriberError(f"groups={unknown!r}: no handler has these groups")
        handlers = {ref: handler for ref, handler in handlers.items() if ref.group in groups}
    if advance is not None:
        milliseconds = duration_ms("advance", advance, longest=100 * LONGEST_DELAY)
        for alias in aliases:
            _advance(alias, milliseconds)
    chosen = {alias: registry.handlers_in(alias, handlers) for alias in aliases}
    reported = {alias: _last_quarantined(alias) for alias in aliases} if raise_exceptions else {}
    delivered = _deliver(chosen, raise_exceptions=raise_exceptions)
    for alias, last in reported.items():
        _require_none_refused(alias, last)
    return delivered


def _last_quarantined(using: str) -> int:
    return QuarantinedMessage.objects.using(using).order_by("-pk").values_list("pk", flat=True).first() or 0


def _require_none_refused(using: str, after: int) -> None:
    refused = QuarantinedMessage.objects.using(using).filter(pk__gt=after).order_by("pk")
    texts = [f"message {one.message_id!r} of topic {one.topic!r} ({one.reason})" for one in refused]
    if texts:
        raise QueueError(f"The log has refused {counted(len(texts), 'message')}: {listed(texts)}.")


def _advance(using: str, milliseconds: int) -> None:
    """Bring all scheduled messages, backoffs, slots and expiries nearer, as if the time had passed."""
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
    session.execute(f"UPDATE {SLOTS}{by_key} SET full_at = full_at - %s WHERE full_at > 0", (milliseconds * 1000,))


Handlers = Mapping[GroupRef, Handler]


def _deliver(by_database: Mapping[str, Handlers], *, raise_exceptions: bool) -> list[Delivered]:
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
                found, errors = InlineSubscriber(alias, handlers, get_settings()).run(
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
