"""Publishing: inserting into the outbox, in the caller's transaction.

Publishing locks nothing and updates no shared row: at REPEATABLE READ with MariaDB's snapshot isolation, that could
roll back the caller's transaction.
"""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections, transaction

from django_mysqlqueue.arguments import arguments_of, sync_only
from django_mysqlqueue.db.tables import OUTBOX
from django_mysqlqueue.exceptions import InvalidMessage, TransactionMismatch
from django_mysqlqueue.names.rules import relayed_topic
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.topics import check_topic
from django_mysqlqueue.service import debouncing, known_topics, publish_hooks, wakeups
from django_mysqlqueue.service.databases import queue_alias, queue_aliases, transaction_elsewhere
from django_mysqlqueue.service.messages import Message, OutboxRow, encode
from django_mysqlqueue.sql.connection import in_testcase, tells_commit
from django_mysqlqueue.sql.session import Session, flat

ALWAYS = {
    "topic": "topic",
    "partition_key": "partition_key",
    "id": "message_id",
    "payload": "payload",
    "metadata": "metadata",
}
"""The columns that every INSERT names, and their fields in ``OutboxRow``."""
CHUNK_ROWS = 500
CHUNK_BYTES = 1_048_576
"""Limits of one multi-row INSERT, and so of the memory that ``publish_many`` needs."""

OnMismatch = Literal["error", "commit_now", "on_commit"]


@sync_only("apublish")
def publish(
    topic: str,
    payload: Any,
    *,
    key: str | None = None,
    id: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    delay: float | datetime.timedelta | None = None,
    deliver_at: datetime.datetime | None = None,
    priority: int = 0,
    expires_at: datetime.datetime | None = None,
    expires_in: float | datetime.timedelta | None = None,
    coalesce: str | None = None,
    max_delay: float | datetime.timedelta | None = None,
    using: str | None = None,
    via: str | None = None,
    on_mismatch: OnMismatch = "error",
) -> str:
    """Publish a message, in the open transaction of the topic's database if there is one.

    Args:
        topic: the topic: 1 to 100 characters (ASCII letters, digits, ``.``, ``_`` and ``-``), not ending in the DLQ
            suffix. With ``STRICT_TOPICS``, ``TOPICS`` or a handler of this project must name it.
        payload: any value that ``DjangoJSONEncoder`` can encode, or bytes.
        key: the partition key, at most 190 characters. Messages with the same key keep their order. Without a key,
            messages are spread over ``KEYLESS_PARTITIONS`` partitions by their ids.
        id: the message id (default: a new one). A message is dropped, without an error, if the log contains one with
            the same id in the same topic and partition, even if that was handled already. Duplicates are detected after
            the commit, so ``publish`` cannot report them.
        metadata: a JSON object to store beside the payload, at most 65,535 bytes.
        delay: time to wait before delivery, in seconds or as a timedelta.
        deliver_at: time of delivery (aware if ``USE_TZ`` is True). If it is in the past, the message is delivered at
            once.
        priority: from -100 to 100, higher first. A message overtakes waiting messages with a lower priority, not
            handlers that run. Order and duplicates count within a key and priority. A key may have at most 181
            characters then.
        expires_at: time after which the handling of the message does not start (aware if ``USE_TZ`` is True). For each
            group that has not started it by then, it is settled as expired, or dead-lettered (``on_expiry``).
        expires_in: the same as a time from now, in seconds or as a timedelta.
        coalesce: the coalesce key, at most 190 characters. Of the messages with the same one (and the same topic, key
            and priority) that a group has not started, it handles only the latest; the earlier ones are settled as
            superseded. Without ``key``, the partition is that of the coalesce key.
            With ``delay``, the message is debounced: a later one with the same key that is published before its time
            replaces it, and the delay begins again.
        max_delay: the longest time that debounced messages wait, in seconds or as a timedelta: then the latest of them
            is delivered, even if its own delay has not passed. It needs ``coalesce`` and ``delay``.
        using: alias of the database to publish to (default: the one that the topic is in).
        via: alias of the queue's database that the open transaction is on, if the topic is in another one. The message
            is stored there, and subscribers relay it to the topic's database, once and in order. (Default: ``VIA`` of
            the topic in ``TOPICS``.)
        on_mismatch: what to do if the topic's database has no open transaction but another database has one:
            ``"error"`` refuses; ``"commit_now"`` commits the message in a transaction of its own (it remains even if
            the other transaction rolls back); ``"on_commit"`` publishes after the other transaction has committed (the
            message is lost if the process dies in between).

    Returns:
        The message's id. An id that you passed is returned even if the message will be dropped as a duplicate.

    Raises:
        InvalidMessage: a value breaks a rule; nothing was stored. The error names the value and the rule.
        UnknownTopic: ``STRICT_TOPICS`` does not allow the topic. This is an ``InvalidMessage``.
        TransactionMismatch: see ``on_mismatch``.
        ImproperlyConfigured: outside a transaction, the session has autocommit off without Django's knowledge (E017);
            nothing was stored.
    """
    if isinstance(payload, Message):
        raise InvalidMessage(
            "payload of type Message: publish() takes its fields; publish_many() takes Message objects"
        )
    message = Message(
        payload, key, id, metadata, delay, deliver_at, priority, expires_at, expires_in, coalesce, max_delay
    )
    alias, stored_topic = stored_at(_checked(topic), using, via)
    with publish_hooks.sending(topic, alias, message) as span:
        row = publish_hooks.encode_stamped(topic, message, span)._replace(topic=stored_topic)
        _store(alias, iter((row,)), on_mismatch, single=True)
        span.sent(1, row.message_id)
    return row.message_id


@sync_only("apublish_many")
def publish_many(
    topic: str,
    messages: Iterable[Any],
    *,
    using: str | None = None,
    via: str | None = None,
    on_mismatch: OnMismatch = "error",
) -> int:
    """Publish many messages to one topic, all or none of them, in bounded memory.

    Args:
        topic: as in ``publish``.
        messages: an iterable of ``Message`` objects or payloads. It is read once.
        using: as in ``publish``.
        via: as in ``publish``.
        on_mismatch: as in ``publish``. ``"on_commit"`` keeps the encoded messages in memory until the other
            transaction commits.

    Returns:
        The number of messages, including those that will be dropped as duplicates (see ``publish``).

    Raises:
        InvalidMessage: a message breaks a rule; none was stored. The error names its index, the value and the rule.
        UnknownTopic: see ``publish``; no message was read.
        TransactionMismatch: see ``publish``.
    """
    alias, stored_topic = stored_at(_checked(topic), using, via)
    with publish_hooks.sending(topic, alias, None) as span:
        rows = _encoded(topic, messages, span)
        if stored_topic != topic:
            rows = (row._replace(topic=stored_topic) for row in rows)
        count = _store(alias, rows, on_mismatch)
        span.sent(count)
    return count


@arguments_of(publish)
async def apublish(*arguments: Any, **options: Any) -> str:
    """Publish a message from async code, with the arguments of ``publish``.

    The message commits in a transaction of its own: Django has no transactions in async code. To publish in a
    transaction with your data, put both into a sync function, and call it through ``sync_to_async``. (If sync code with
    an open transaction calls this through ``async_to_sync``, the message joins that transaction.)
    """
    return await sync_to_async(publish)(*arguments, **options)


async def apublish_many(
    topic: str,
    messages: Iterable[Any] | AsyncIterable[Any],
    *,
    using: str | None = None,
    via: str | None = None,
    on_mismatch: OnMismatch = "error",
) -> int:
    """Publish many messages from async code, with the arguments of ``publish_many``: all or none of them.

    They commit in a transaction of their own, as with ``apublish``. An async iterable is read to its end before
    anything is stored, so all messages are kept in memory.
    """
    if isinstance(messages, AsyncIterable):
        messages = [message async for message in messages]
    return await sync_to_async(publish_many)(topic, messages, using=using, via=via, on_mismatch=on_mismatch)


def stored_at(topic: str, using: str | None, via: str | None) -> tuple[str, str]:
    """Return the database whose outbox takes a topic's messages, and the topic under which it stores them."""
    if using is not None and via is not None:
        raise InvalidMessage(f"using={using!r}, via={via!r}: pass one of them")
    target = queue_alias(using, topic=topic)
    if via is None and using is None:
        via = get_settings().topics.of(topic).via
    if via is None or via == target:
        return target, topic
    if via not in (aliases := queue_aliases()):
        raise InvalidMessage(f"via={via!r}: must be a database of the queue ({', '.join(map(repr, aliases))})")
    return via, relayed_topic(topic, target)


def check(topic: str, message: Message) -> OutboxRow:
    """Return the row that ``publish`` would store, without storing it."""
    return encode(_checked(topic), message)


def _checked(topic: object) -> str:
    name = check_topic(topic)
    if get_settings().strict_topics:
        known_topics.require(name)
    return name


def _encoded(topic: str, messages: Iterable[Any], span: publish_hooks.Sending) -> Iterator[OutboxRow]:
    single = isinstance(messages, (str, bytes, bytearray, memoryview, Mapping, Message))
    if single or not isinstance(messages, Iterable):
        raise InvalidMessage(f"messages: must be an iterable of messages, not a single {type(messages).__name__}")
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
        require_transaction(alias)
    if not connections[other].in_atomic_block:
        raise TransactionMismatch(
            f"on_mismatch='on_commit': the database {other!r} has autocommit off, so Django cannot tell when it "
            f"commits. Open transaction.atomic(using={other!r}) around the publish."
        )
    kept = list(rows)
    transaction.on_commit(lambda: None if not kept else _insert(alias, iter(kept), single=single), using=other)
    return len(kept)


def require_transaction(alias: str) -> None:
    """Raise TransactionMismatch if a database has no open transaction, but another one has."""
    other = transaction_elsewhere(alias)
    if other is None:
        return
    relay = f"publish via={other!r}, " if other in queue_aliases() else ""
    raise TransactionMismatch(
        f"The message would be stored in the database {alias!r}, which has no open transaction, but {other!r} has "
        f"one: it would not commit with it. Write your rows to {alias!r} in the same transaction, {relay}or accept "
        "the risk of on_mismatch='commit_now' or 'on_commit'."
    )


def _insert(alias: str, rows: Iterator[OutboxRow], *, single: bool) -> int:
    session = Session(alias)
    if single:
        (row,) = rows
        _insert_chunk(session, [row])
        wake_on_commit(session, row.topic)
        return 1
    # Escaping doubles a byte at worst, so half of max_allowed_packet always fits.
    limit = min(CHUNK_BYTES, session.dialect.max_statement_bytes(session.connection) // 2)
    chunks = _chunks(rows, limit)
    first, is_last = next(chunks, ([], True))
    if is_last:
        # One statement is all or nothing by itself.
        if first:
            _insert_chunk(session, first)
            wake_on_commit(session, first[0].topic)
        return len(first)
    published = 0
    with _all_or_nothing(session):
        for chunk in chain((first,), (chunk for chunk, _ in chunks)):
            _insert_chunk(session, chunk)
            published += len(chunk)
    wake_on_commit(session, chunk[-1].topic)
    return published


def _all_or_nothing(session: Session) -> transaction.Atomic:
    """Return a transaction or, inside a caller's, a savepoint: all or nothing, even if the caller catches an error."""
    if not tells_commit(session.connection):  # Autocommit is off.
        session.dialect.begin_manual(session.connection)
    return transaction.atomic(session.using)


def wake_on_commit(session: Session, topic: str) -> None:
    """Wake the topic's subscribers when the message has committed, and deliver it if ``EAGER`` is on."""
    if get_settings().eager and wakeups.eager is not None:
        _deliver_on_commit(session)
    wakeups.notify_on_commit(session, topic)


def _deliver_on_commit(session: Session) -> None:
    """Deliver with ``EAGER``: on commit, or at once if the only open transaction is that of a ``TestCase``."""
    deliver, using = wakeups.eager, session.using
    assert deliver is not None  # noqa: S101  # The caller has checked it.
    if in_testcase(session.connection):
        deliver(using)
    elif tells_commit(session.connection):
        transaction.on_commit(lambda: deliver(using), using=using)


def _chunks(rows: Iterator[OutboxRow], limit: int) -> Iterator[tuple[list[OutboxRow], bool]]:
    """Yield chunks for one statement each, and whether it is the last."""
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
    """Return the maximum number of bytes of a row in a statement before escaping, at four bytes per character."""
    text = len(row.metadata) + len(row.topic) + len(row.partition_key) + len(row.message_id)
    if row.publisher_key or row.coalesce_key:
        text += len(row.publisher_key or "") + len(row.coalesce_key or "")
    return len(row.payload) + 4 * text + 100


def _insert_chunk(session: Session, chunk: list[OutboxRow]) -> None:
    _check_packet(session, chunk)
    if not any(row.coalesce_key and row.is_debounced for row in chunk):
        _insert_rows(session, chunk)
        return
    with _all_or_nothing(session):
        _insert_rows(session, chunk)
        debouncing.remember(session, chunk)


def _insert_rows(session: Session, chunk: list[OutboxRow]) -> None:
    columns, values = _columns(session, chunk)
    alone = session.connection.get_autocommit()
    if alone:  # No id may be returned for a row that will not be committed.
        values = values.replace("%s", session.dialect.if_autocommit(session.connection, "%s"), 1)
    try:
        # As Model.save() does: after a deadlock, which rolls back everything, a caller that catches it must not commit.
        with transaction.mark_for_rollback_on_error(session.using):
            session.later(
                f"INSERT INTO {OUTBOX} ({', '.join(columns)}) VALUES {values}",
                flat(zip(*columns.values(), strict=True)),
            )
    except Error as error:
        if alone and session.dialect.is_uncommitted(error):
            raise ImproperlyConfigured(
                f"The connection to {session.using!r} has autocommit off, but Django assumes that it is on: the "
                "message would never be committed. Nothing was stored. Run manage.py check --database "
                f"{session.using}, which tells how to turn it on, or publish inside transaction.atomic()."
            ) from error
        raise
    if alone:
        session.dialect.has_committed(session.connection)


def _columns(session: Session, chunk: Sequence[OutboxRow]) -> tuple[dict[str, Sequence[Any]], str]:
    """Return the columns that rows need, with their values, and the VALUES of the INSERT.

    Who does not use an option sends nothing for it.
    """
    given = dict(zip(OutboxRow._fields, zip(*chunk, strict=True), strict=True))
    columns: dict[str, Sequence[Any]] = {column: given[name] for column, name in ALWAYS.items()}
    for name in ("publisher_key", "coalesce_key"):
        if given[name].count(None) < len(chunk):
            columns[name] = given[name]
    marks: dict[str, list[str]] = {}
    for name, within in (("deliver_at", "delay_ms"), ("expires_at", "expires_in_ms")):
        if any(given[name]) or given[within].count(None) < len(chunk):
            pairs = list(zip(given[name], given[within], strict=True))
            columns[name] = [at if relative is None else relative for at, relative in pairs]
            marks[name] = ["%s" if relative is None else f"{session.dialect.now_ms} + %s" for _, relative in pairs]
    if not marks:
        return columns, session.dialect.placeholders(len(chunk), f"({', '.join(['%s'] * len(columns))})")
    every = (marks.get(name, ["%s"] * len(chunk)) for name in columns)
    return columns, ", ".join(f"({', '.join(row)})" for row in zip(*every, strict=True))


def _check_packet(session: Session, chunk: list[OutboxRow]) -> None:
    """Refuse a single row for which the server would close the connection. ``_chunks`` limits several rows."""
    if len(chunk) > 1:
        return
    row = chunk[0]
    keys = (row.publisher_key or "") + (row.coalesce_key or "")
    size = len(row.payload) + len((row.metadata + keys).encode()) + 2000
    if size * 2 < 1_048_576:
        return
    limit = session.dialect.max_statement_bytes(session.connection)
    if size * 2 > limit:
        raise InvalidMessage(
            f"payload of {len(row.payload)} bytes: the server's max_allowed_packet of {limit} bytes allows at most "
            "half of that"
        )
