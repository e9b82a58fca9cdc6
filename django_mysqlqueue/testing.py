"""For the tests of projects that publish and handle messages.

All of it works on the test's own connection, inside the transaction of a
``TestCase``, on any engine, SQLite in memory included. Nothing runs beside the
test: what ``deliver_all`` does is over when it returns.

pytest has the same as a fixture, ``mysqlqueue``.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from django.db.models import Model

from django_mysqlqueue.conf import LONGEST_DELAY, Backoff, get_settings
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.models import OutboxMessage, QueueMessage
from django_mysqlqueue.runtime import registry
from django_mysqlqueue.runtime.delivery import Delivery
from django_mysqlqueue.runtime.inline import Delivered, InlineSubscriber
from django_mysqlqueue.service import scheduling
from django_mysqlqueue.service.bodies import Body
from django_mysqlqueue.service.deliveries import Claimed
from django_mysqlqueue.service.groups import GroupRef
from django_mysqlqueue.service.messages import (
    Message,
    decode,
    decode_metadata,
    duration_ms,
    encode,
    public_metadata,
    publisher_key,
)
from django_mysqlqueue.service.publishing import queue_alias

__all__ = ["Delivered", "Published", "deliver_all", "delivery", "published"]


@dataclass(frozen=True, slots=True)
class Published:
    """A message that was published: its ``topic``, ``id``, decoded ``payload``, and what follows."""

    topic: str
    key: str | None
    """The publisher's key, or None if there was none."""
    id: str
    payload: Any
    metadata: dict[str, Any]
    """The publisher's and ``content_type``."""
    deliver_at: datetime.datetime | None
    """When it is due (aware, UTC) while it waits in the outbox as a scheduled one, else None."""
    failed_group: str
    """The group that gave it up, where this is a dead letter."""
    last_error: str
    """Why it was given up, where this is a dead letter."""


def published(topic: str | None = None, *, using: str | None = None) -> list[Published]:
    """The messages that were published: first those in the log in its order, then those in the outbox.

    A scheduled message takes its place in the log when it has come due and was delivered.

    Args:
        topic: only this one's; a topic's dead letters are under its DLQ topic
            (``"orders_dlq"``). None: of all topics, without dead letters.
        using: the queue's database alias, if not the setting's.
    """
    alias = queue_alias(using)
    found: list[Published] = []
    for model, order in ((QueueMessage, "offset"), (OutboxMessage, "outbox_id")):
        rows = model._default_manager.using(alias).order_by(order)
        rows = rows.filter(failed_group="") if topic is None else rows.filter(topic=topic)
        found += [_published(row) for row in rows]
    return found


def _published(row: Model) -> Published:
    assert isinstance(row, (QueueMessage, OutboxMessage))  # noqa: S101  # for the type checker
    metadata = decode_metadata(row.metadata)
    due = getattr(row, "deliver_at", 0)
    return Published(
        topic=row.topic,
        key=publisher_key(row.partition_key, metadata),
        id=row.message_id,
        payload=decode(bytes(row.payload), metadata),
        metadata=public_metadata(metadata),
        deliver_at=datetime.datetime.fromtimestamp(due / 1000, datetime.UTC) if due else None,
        failed_group=row.failed_group,
        last_error=row.last_error,
    )


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
) -> Delivery:
    """A delivery to call a handler with, for a test of the handler by itself. Nothing is stored.

    The payload goes through the same encoding as a published one. Afterwards
    ``outcome`` tells what the handler has said. ``extend()``, and ``ack()`` inside a
    transaction, find no such delivery in the queue.

    Raises:
        InvalidMessage: ``publish`` would refuse it.
    """
    row = encode(topic, Message(payload, key=key, id=id, metadata=metadata))
    now = time.time_ns() // 1_000_000
    handler = registry.Handler(
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
    body = Body(row.message_id, row.payload, row.metadata, "", now, now)
    return Delivery(handler, claimed, body, queue_alias())


def deliver_all(
    *,
    raise_exceptions: bool = True,
    advance: float | datetime.timedelta | None = None,
    groups: Collection[str] | None = None,
    using: str | None = None,
) -> list[Delivered]:
    """Delivers everything that is due, and what handlers publish meanwhile, until nothing is left.

    Handlers run one after another in the calling thread. What they nack comes
    again at once, without its backoff, until it is acked or in the DLQ; what
    they snooze waits, as do scheduled messages, until ``advance`` covers it.
    ``on_commit`` hooks follow Django's rules: in a ``TestCase`` use
    ``captureOnCommitCallbacks(execute=True)`` around it.

    Args:
        raise_exceptions: raise what a handler raises, at once; its attempt counts
            as failed all the same. False: it is retried, as by a real subscriber.
        advance: seconds or a timedelta that pass, for what is scheduled or snoozed.
        groups: only handlers of these consumer groups.
        using: the queue's database alias, if not the setting's.

    Returns:
        What was delivered, in order.

    Raises:
        Exception: whatever a handler raised first, with ``raise_exceptions``.
        SubscriberError: ``groups`` names one that no handler has.
        QueueError: 10,000 deliveries more than were due did not come to an end.
    """
    alias = queue_alias(using)
    handlers = registry.handlers()
    if groups is not None:
        unknown = sorted(set(groups) - {ref.group for ref in handlers})
        if unknown:
            raise SubscriberError(f"groups={unknown!r}: no handler has them")
        handlers = {ref: handler for ref, handler in handlers.items() if ref.group in groups}
    if advance is not None:
        scheduling.advance(alias, duration_ms("advance", advance, longest=100 * LONGEST_DELAY))
    if not handlers:
        return []
    subscriber = InlineSubscriber(alias, handlers, get_settings())
    delivered, errors = subscriber.run(ignore_backoff=True, stop_at_error=raise_exceptions)
    for error in errors:
        if raise_exceptions or isinstance(error, KeyboardInterrupt):
            raise error
    return delivered
