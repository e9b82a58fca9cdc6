"""Publishing: rows of the outbox, in the caller's transaction.

Nothing is locked and nothing shared is updated here: at REPEATABLE READ with
MariaDB's snapshot isolation that could roll back the user's transaction.
"""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections, router, transaction

from django_mysqlqueue import naming
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.exceptions import InvalidMessage, TransactionMismatch
from django_mysqlqueue.models import OutboxMessage
from django_mysqlqueue.service import known_topics, publish_hooks, wakeups
from django_mysqlqueue.service.messages import Message, OutboxRow
from django_mysqlqueue.sql.connection import in_testcase, in_transaction, is_manual, tells_commit
from django_mysqlqueue.sql.session import Session, flat

OUTBOX = OutboxMessage._meta.db_table
CHUNK_ROWS = 500
CHUNK_BYTES = 1_048_576
"""Bounds of one multi-row INSERT, and so of what publish_many keeps in memory."""

OnMismatch = Literal["error", "commit_now", "on_commit"]


def queue_alias(using: str | None = None) -> str:
    """The database alias of the queue: the one given, the setting's, else the router's."""
    if using is not None and using not in connections:
        raise InvalidMessage(f"using {using!r}: there is no such database in DATABASES")
    return using or get_settings().database or router.db_for_write(OutboxMessage)


def publish(
    topic: str,
    payload: Any,
    *,
    key: str | None = None,
    id: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    delay: float | datetime.timedelta | None = None,
    deliver_at: datetime.datetime | None = None,
    using: str | None = None,
    on_mismatch: OnMismatch = "error",
) -> str:
    """Publishes one message, in the open transaction of the queue's database if there is one.

    Args:
        topic: 1 to 100 letters, digits, ``.``, ``_``, ``-``; not ending in the DLQ suffix. With
            ``STRICT_TOPICS`` one that ``TOPICS`` or a handler of this project names.
        payload: anything DjangoJSONEncoder can write, or bytes.
        key: messages of one key keep their order (at most 190 characters). None
            spreads messages over ``KEYLESS_PARTITIONS`` partitions by their id.
        id: None for a fresh one. Of two messages with one id under the same topic
            and key the second is dropped, without an error, as long as the first is in
            the log. That is so even if the first was handled: an id names one message,
            not one that is pending. Whether it is dropped is decided after the
            commit, so ``publish`` cannot tell.
        metadata: a JSON object that travels beside the payload, at most 65,535 bytes.
        delay: seconds or a timedelta to wait before delivery.
        deliver_at: when to deliver (aware where USE_TZ is on); a past one is at once.
        using: the database alias; the setting's or the router's by default.
        on_mismatch: what to do when the queue's database has no open transaction
            and another one has. ``"error"`` refuses; ``"commit_now"`` commits the
            message by itself (it stays even if the other transaction rolls back);
            ``"on_commit"`` publishes after the other commits (it is lost if the
            process dies between the two).

    Returns:
        The message's id. For a given one that does not say that the message will be delivered: see ``id``.

    Raises:
        InvalidMessage: nothing was stored; the text names the value and the rule.
        UnknownTopic: an ``InvalidMessage``; see ``topic``.
        TransactionMismatch: see ``on_mismatch``.
        ImproperlyConfigured: outside a transaction, in a session that has autocommit off
            behind Django's back (E017): nothing was stored.
    """
    alias = queue_alias(using)
    if isinstance(payload, Message):
        raise InvalidMessage(
            "payload of type Message: publish() takes its fields; publish_many() takes Message objects"
        )
    message = Message(payload, key=key, id=id, metadata=metadata, delay=delay, deliver_at=deliver_at)
    with publish_hooks.sending(_checked(topic), alias, message) as span:
        row = publish_hooks.encode_stamped(topic, message, span)
        _store(alias, iter((row,)), on_mismatch, single=True)
        span.sent(1, row.message_id)
    return row.message_id


def publish_many(
    topic: str,
    messages: Iterable[Any],
    *,
    using: str | None = None,
    on_mismatch: OnMismatch = "error",
) -> int:
    """Publishes many messages to one topic, all or none of them, in bounded memory.

    Args:
        topic: as in ``publish``.
        messages: ``Message`` objects or bare payloads; any iterable, read once.
        using: as in ``publish``.
        on_mismatch: as in ``publish``; ``"on_commit"`` keeps the encoded messages
            in memory until the other transaction commits.

    Returns:
        The number of messages, those among them that will be dropped for their id (see ``publish``).

    Raises:
        InvalidMessage: names the first bad message by its place; none was stored.
        UnknownTopic: see ``publish``; no message was read.
        TransactionMismatch: see ``publish``.
    """
    alias = queue_alias(using)
    with publish_hooks.sending(_checked(topic), alias, None) as span:
        count = _store(alias, _encoded(topic, messages, span), on_mismatch)
        span.sent(count)
    return count


async def apublish(
    topic: str,
    payload: Any,
    *,
    key: str | None = None,
    id: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    delay: float | datetime.timedelta | None = None,
    deliver_at: datetime.datetime | None = None,
    using: str | None = None,
    on_mismatch: OnMismatch = "error",
) -> str:
    """``publish`` for async code, where it joins no transaction: the message commits by itself.

    Django has no transactions in async code. To publish with your data, put
    both into one sync function and call that by ``sync_to_async``. (Called through
    ``async_to_sync`` by sync code that has a transaction open, it joins that one.)
    """
    return await sync_to_async(publish)(
        topic,
        payload,
        key=key,
        id=id,
        metadata=metadata,
        delay=delay,
        deliver_at=deliver_at,
        using=using,
        on_mismatch=on_mismatch,
    )


async def apublish_many(
    topic: str,
    messages: Iterable[Any] | AsyncIterable[Any],
    *,
    using: str | None = None,
    on_mismatch: OnMismatch = "error",
) -> int:
    """``publish_many`` for async code: all or none, in a transaction of its own.

    It joins no other one, as ``apublish``. An async iterable is read to its end
    before anything is stored, so it is kept in memory.
    """
    if isinstance(messages, AsyncIterable):
        messages = [message async for message in messages]
    return await sync_to_async(publish_many)(topic, messages, using=using, on_mismatch=on_mismatch)


def _checked(topic: object) -> str:
    name = naming.check_topic(topic)
    if get_settings().strict_topics:
        known_topics.require(name)
    return name


def _encoded(topic: str, messages: Iterable[Any], span: publish_hooks.Sending) -> Iterator[OutboxRow]:
    single = isinstance(messages, (str, bytes, bytearray, memoryview, Mapping, Message))
    if single or not isinstance(messages, Iterable):
        raise InvalidMessage(f"messages: must be an iterable of messages, not one {type(messages).__name__}")
    for place, message in enumerate(messages):
        try:
            yield publish_hooks.encode_stamped(
                topic, message if isinstance(message, Message) else Message(message), span
            )
        except InvalidMessage as error:
            raise InvalidMessage(f"message {place}: {error}") from error


def _store(alias: str, rows: Iterator[OutboxRow], on_mismatch: OnMismatch, *, single: bool = False) -> int:
    if on_mismatch not in ("error", "commit_now", "on_commit"):
        raise InvalidMessage(f"on_mismatch={on_mismatch!r}: must be 'error', 'commit_now' or 'on_commit'")
    other = None if on_mismatch == "commit_now" else transaction_elsewhere(alias)
    if other is None:
        return _insert(alias, rows, single=single)
    if on_mismatch == "error":
        raise TransactionMismatch(
            f"The queue is on the database {alias!r}, which has no open transaction, but {other!r} has one: "
            f"the message would not commit with it. Write your rows to {alias!r} in the same transaction, or choose "
            "what may go wrong: on_mismatch='commit_now' or 'on_commit'."
        )
    if not connections[other].in_atomic_block:
        raise TransactionMismatch(
            f"on_mismatch='on_commit': the database {other!r} has autocommit off, so Django cannot tell when it "
            f"commits. Open transaction.atomic(using={other!r}) around the publish."
        )
    kept = list(rows)
    transaction.on_commit(lambda: None if not kept else _insert(alias, iter(kept), single=single), using=other)
    return len(kept)


def transaction_elsewhere(alias: str) -> str | None:
    """Another database with an open transaction while the queue's has none."""
    queue = connections[alias]
    if in_transaction(queue):
        return None
    for connection in connections.all(initialized_only=True):
        if connection is not queue and in_transaction(connection):
            return connection.alias
    return None


def _insert(alias: str, rows: Iterator[OutboxRow], *, single: bool) -> int:
    session = Session(alias)
    if single:
        _insert_chunk(session, list(rows))
        wake_on_commit(session)
        return 1
    # Escaping doubles a byte at worst, so half of max_allowed_packet always fits.
    limit = min(CHUNK_BYTES, session.dialect.max_statement_bytes(session.connection) // 2)
    chunks = _chunks(rows, limit)
    first, is_last = next(chunks, ([], True))
    if is_last:
        # One statement is all or nothing by itself.
        if first:
            _insert_chunk(session, first)
            wake_on_commit(session)
        return len(first)
    published = 0
    if is_manual(session.connection):
        session.dialect.begin_manual(session.connection)
    # A savepoint inside a caller's transaction: all or nothing also for one who catches the error.
    with transaction.atomic(alias):
        for chunk in chain((first,), (chunk for chunk, _ in chunks)):
            _insert_chunk(session, chunk)
            published += len(chunk)
    wake_on_commit(session)
    return published


def wake_on_commit(session: Session) -> None:
    """Wakes subscribers of this process when the message is there for them to see."""
    if get_settings().eager and wakeups.eager is not None:
        _deliver_on_commit(session)
    if not wakeups.has_listeners(session.using):
        return
    if tells_commit(session.connection):
        using = session.using

        def wake() -> None:  # no partial: a failing robust hook is logged by its name
            wakeups.notify(using)

        transaction.on_commit(wake, using=using, robust=True)
    # With autocommit off Django cannot tell when the caller commits: the next poll finds it.


def _deliver_on_commit(session: Session) -> None:
    """``EAGER``: as a hook of ``on_commit``; right now where only a ``TestCase`` keeps a transaction open."""
    deliver, using = wakeups.eager, session.using
    assert deliver is not None  # noqa: S101  # the caller has looked
    if in_testcase(session.connection):
        deliver(using)
    elif tells_commit(session.connection):
        transaction.on_commit(lambda: deliver(using), using=using)


def _chunks(rows: Iterator[OutboxRow], limit: int) -> Iterator[tuple[list[OutboxRow], bool]]:
    """Pieces that one statement takes, and whether it is the last."""
    chunk: list[OutboxRow] = []
    size = 0
    for row in rows:
        length = _weight(row)
        if chunk and (len(chunk) >= CHUNK_ROWS or size + length > limit):
            yield chunk, False
            chunk, size = [], 0
        chunk.append(row)
        size += length
    if chunk:
        yield chunk, True


def _weight(row: OutboxRow) -> int:
    """Bytes that a row takes in a statement before its escaping, at most: four for a character."""
    text = len(row.metadata) + len(row.topic) + len(row.partition_key) + len(row.message_id)
    return len(row.payload) + 4 * text + 100


def _insert_chunk(session: Session, chunk: list[OutboxRow]) -> None:
    _check_packet(session, chunk)
    columns = "topic, partition_key, id, payload, metadata"
    rows: Iterable[tuple[Any, ...]] = (
        (row.topic, row.partition_key, row.message_id, row.payload, row.metadata) for row in chunk
    )
    values = session.dialect.placeholders(len(chunk), "(%s, %s, %s, %s, %s)")
    if any(row.delay_ms is not None or row.deliver_at for row in chunk):
        columns += ", deliver_at"
        rows = (
            (*row, one.deliver_at if one.delay_ms is None else one.delay_ms)
            for row, one in zip(rows, chunk, strict=True)
        )
        now = session.dialect.now_ms
        values = ", ".join(
            "(%s, %s, %s, %s, %s, %s)" if row.delay_ms is None else f"(%s, %s, %s, %s, %s, {now} + %s)" for row in chunk
        )
    alone = session.connection.get_autocommit()
    if alone:  # an id must not be returned for a row that nobody will commit
        values = values.replace("%s", session.dialect.if_autocommit(session.connection, "%s"), 1)
    try:
        # As Model.save() does: a caller who catches a deadlock, which rolled everything back, must not commit the rest.
        with transaction.mark_for_rollback_on_error(session.using):
            session.execute(f"INSERT INTO {OUTBOX} ({columns}) VALUES {values}", flat(rows))
    except Error as error:
        if alone and session.dialect.is_uncommitted(error):
            raise ImproperlyConfigured(
                f"The connection to {session.using!r} has autocommit off, and Django takes it to be on: the message "
                f"would never be committed. Nothing was stored. Run manage.py check --database {session.using}, "
                "which says how to turn it on, or publish inside transaction.atomic()."
            ) from error
        raise
    if alone:
        session.dialect.has_committed(session.connection)


def _check_packet(session: Session, chunk: list[OutboxRow]) -> None:
    """Refuses a single row that the server would refuse by closing the connection; ``_chunks`` counts several."""
    if len(chunk) > 1:
        return
    size = len(chunk[0].payload) + len(chunk[0].metadata.encode()) + 2000
    if size * 2 < 1_048_576:
        return
    limit = session.dialect.max_statement_bytes(session.connection)
    if size * 2 > limit:
        largest = max(len(row.payload) for row in chunk)
        raise InvalidMessage(
            f"payload of {largest} bytes: the server's max_allowed_packet of {limit} bytes takes at most half of that"
        )
