"""Redrive, discard and replace dead letters.

A dead letter is taken by deleting its row of the log by primary key, which only one operation can do. The same
transaction inserts it into the outbox for the group that failed it, or records who discarded it and why. These are the
only deletes from the log apart from GC.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from django_mysqlqueue import naming
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.limits import REPLACES
from django_mysqlqueue.models import ConsumerGroup, DeliveryEvent, OutboxMessage, QueueMessage
from django_mysqlqueue.operations.limits import LIMITS
from django_mysqlqueue.service import audit, delivery_events, job_results, messages, routing
from django_mysqlqueue.service.dead_letters import DeadLetterFilter, matching_offsets
from django_mysqlqueue.service.log import PUBLISHED_ID
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, flat, run

LOG = QueueMessage._meta.db_table
OUTBOX = OutboxMessage._meta.db_table


class _DeadLetter(NamedTuple):
    offset: int
    key: str
    publisher_key: str | None
    failed_group: str
    original_topic: str
    attempts: int


def count(using: str, wanted: DeadLetterFilter, *, most: int) -> int:
    """Count the dead letters that match a filter."""
    number = 0
    for page in matching_offsets(Session(using), wanted, size=LIMITS.dead_letters):
        number += len(page)
        if number >= most:
            return most
    return number


def redrive(
    using: str,
    wanted: DeadLetterFilter,
    *,
    actor: str,
    reason: str = "",
    rate: float | None = None,
    limit: int | None = None,
    progress: Callable[[int], object] = lambda rows: None,
) -> int:
    """Publish dead letters again, each only for the group that failed it.

    Each becomes a message of its original topic with a new id and a new offset; ``Delivery.id`` is still the original
    id.

    Args:
        using: alias of the queue's database.
        wanted: the dead letters.
        actor: who runs the operation, for the audit log.
        reason: why, for the audit log.
        rate: maximum number of messages per second; None: no limit.
        limit: maximum number of dead letters; None: no limit.
        progress: called after each transaction with the number of dead letters that it redrove.

    Returns:
        The number of redriven dead letters.

    Raises:
        OperationRefused: the group of a dead letter is no longer registered. What was redriven before that stays
            redriven.
    """

    def send_back(session: Session, found: Sequence[_DeadLetter]) -> None:
        _send_back(session, wanted.topic, found, actor)

    return _take_all(
        using, wanted, "redrive", send_back, actor=actor, reason=reason, rate=rate, limit=limit, progress=progress
    )


def discard(
    using: str,
    wanted: DeadLetterFilter,
    *,
    actor: str,
    reason: str,
    limit: int | None = None,
    progress: Callable[[int], object] = lambda rows: None,
) -> int:
    """Delete dead letters for good. The audit log records who did it and why.

    Args:
        using: alias of the queue's database.
        wanted: the dead letters.
        actor: who runs the operation, for the audit log.
        reason: why, for the audit log; required.
        limit: maximum number of dead letters; None: no limit.
        progress: called after each transaction with the number of dead letters that it deleted.

    Returns:
        The number of deleted dead letters.

    Raises:
        OperationRefused: no reason was given.
    """
    if not reason.strip():
        raise OperationRefused("reason '': must not be empty, since the messages are deleted")

    def record(session: Session, found: Sequence[_DeadLetter]) -> None:
        _record(session, wanted.topic, found, DeliveryEvent.Outcome.DISCARDED, actor, error=reason)

    return _take_all(using, wanted, "discard", record, actor=actor, reason=reason, limit=limit, progress=progress)


def replace(using: str, topic: str, offset: int, payload: Any, *, actor: str, reason: str = "") -> str:
    """Replace a dead letter by a message with a corrected payload, only for the group that failed it.

    The message has a new id; its metadata contains the id of the old one.

    ``payload``: as in ``publish``; the metadata does not change.

    Returns:
        The id of the new message.

    Raises:
        InvalidMessage: ``publish`` would refuse the payload.
        OperationRefused: there is no such dead letter, or its group is no longer registered.
    """

    def write(session: Session) -> str:
        found = _lock(session, [offset], topic)
        if not found:
            raise OperationRefused(_no_dead_letter_text(topic, offset))
        (old,) = found
        _ref, body, kept = _replacement(session, topic, offset, payload)
        new_id = naming.new_message_id()
        session.execute(
            f"INSERT INTO {OUTBOX} (topic, partition_key, publisher_key, id, payload, metadata, target_group) "
            "VALUES (%s, %s, %s, %s, %s, %s, %s)",
            (old.original_topic, old.key, old.publisher_key, new_id, body, kept, old.failed_group),
        )
        _delete(session, [offset])
        _record(session, topic, found, DeliveryEvent.Outcome.REPLACED, actor, related={offset: new_id})
        audit.once(
            session,
            "replace",
            1,
            actor=actor,
            reason=reason,
            group=old.failed_group,
            topic=topic,
            detail=f"offset {offset}",
        )
        return new_id

    with apart(using):
        return run(using, write)


def find_replaced(using: str, topic: str, offset: int, payload: Any) -> tuple[GroupRef, int]:
    """Return the group that ``replace`` would publish a payload for, and its size in bytes, without changing anything.

    Raises:
        InvalidMessage: ``publish`` would refuse the payload.
        OperationRefused: as for ``replace``.
    """
    ref, body, _metadata = _replacement(Session(using), topic, offset, payload)
    return ref, len(body)


def _replacement(session: Session, topic: str, offset: int, payload: Any) -> tuple[GroupRef, bytes, str]:
    """Return the group of a dead letter, and the encoded payload and metadata of its replacement."""
    row = session.row(
        f"SELECT failed_group, original_topic, {PUBLISHED_ID}, metadata FROM {LOG} m "
        "WHERE m.`offset` = %s AND m.topic = %s AND m.failed_group <> ''",
        (offset, topic),
    )
    if row is None:
        raise OperationRefused(_no_dead_letter_text(topic, offset))
    ref = GroupRef(row[0], row[1])
    _refuse_unregistered(session, {ref})
    body, kept = messages.encode_body(payload, {**messages.decode_metadata(row[3]), REPLACES: row[2]})
    return ref, body, kept


def _no_dead_letter_text(topic: str, offset: int) -> str:
    return f"There is no dead letter at offset {offset} of {topic!r}."


def check_groups(using: str, wanted: DeadLetterFilter, most: int) -> None:
    """Require that the groups of the first matching dead letters are registered.

    Raises:
        OperationRefused: one of the groups is no longer registered.
    """
    session = Session(using)
    left = most
    refs: set[GroupRef] = set()
    for page in matching_offsets(session, wanted, size=LIMITS.dead_letters):
        for chunk in session.chunks(page[:left]):
            refs.update(
                GroupRef(*row)
                for row in session.rows(
                    f"SELECT m.failed_group, m.original_topic FROM {session.dialect.rows(('o',), len(chunk))} "
                    f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o",
                    chunk,
                )
            )
        left -= len(page)
        if left <= 0:
            break
    _refuse_unregistered(session, refs)


def _take_all(
    using: str,
    wanted: DeadLetterFilter,
    action: str,
    take: Callable[[Session, Sequence[_DeadLetter]], None],
    *,
    actor: str,
    reason: str,
    rate: float | None = None,
    limit: int | None = None,
    progress: Callable[[int], object],
) -> int:
    most = LIMITS.dead_letters
    size = most if rate is None else max(1, min(most, int(rate)))

    total = limit or 0
    if wanted.offsets is not None:
        total = len(set(wanted.offsets)) if limit is None else min(limit, len(set(wanted.offsets)))

    def write(session: Session, page: Sequence[int]) -> int:
        found = _lock(session, page, wanted.topic)
        if found:
            take(session, found)
            _delete(session, [one.offset for one in found])
            audit.add(session, operation, len(found))
        return len(found)

    done = 0
    with apart(using):
        operation = run(
            using,
            lambda session: audit.begin(
                session,
                action,
                actor=actor,
                reason=reason,
                group=wanted.group or "",
                topic=wanted.topic,
                detail=_condition_text(wanted),
                total=total,
            ),
        )
        beat = audit.beats(using, operation)
        rests = 0.0
        with audit.ending(using, operation):
            for page in matching_offsets(Session(using), wanted, size=size):
                _rest(rests, beat)
                rests = 0.0
                if not page:
                    continue
                began = time.monotonic()
                chosen = page if limit is None else page[: limit - done]
                taken = run(using, lambda session, chosen=chosen: write(session, chosen))  # type: ignore[misc]
                done += taken
                progress(taken)
                if limit is not None and done >= limit:
                    break
                if rate is not None:
                    rests = max(0.0, taken / rate - (time.monotonic() - began))
    return done


def _condition_text(wanted: DeadLetterFilter) -> str:
    """Return the conditions beside topic and group, for the audit log."""
    parts = [] if wanted.error is None else [audit.error_text(wanted.error)]
    for text, at in (("failed since", wanted.since), ("failed until", wanted.until)):
        if at is not None:
            parts.append(f"{text} {audit.time_text(at)}")
    if wanted.offsets is not None:
        parts.append(f"offset {wanted.offsets[0]}" if len(wanted.offsets) == 1 else "selected offsets")
    return ", ".join(parts)


def _rest(seconds: float, beat: Callable[[], None]) -> None:
    """Wait before the next transaction, and record meanwhile that the operation is running."""
    beat()
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, audit.BEAT_SECONDS))
        beat()


def _lock(session: Session, offsets: Sequence[int], topic: str) -> list[_DeadLetter]:
    """Lock the dead letters that still exist and that no other transaction has locked, in order."""
    found: list[_DeadLetter] = []
    for chunk in session.chunks(sorted(offsets)):
        found += [
            _DeadLetter(*row)
            for row in session.rows(
                "SELECT m.`offset`, m.partition_key, m.publisher_key, m.failed_group, m.original_topic, "
                "m.failure_count "
                f"FROM {session.dialect.rows(('o',), len(chunk))} {session.dialect.join_to(LOG, 'm')} "
                f"ON m.`offset` = v.o AND m.topic = %s AND m.failed_group <> ''{session.dialect.skip_locked}",
                (*chunk, topic),
            )
        ]
    return sorted(found)


def _refuse_unregistered(session: Session, wanted: Collection[GroupRef]) -> None:
    """Refuse groups that are not registered: nothing would receive the message, and GC would delete it.

    The groups of a topic that has moved are registered in another database, to which the message will be relayed.
    """
    missing = set(wanted) - _registered(session.using, wanted)
    for topic in {ref.topic for ref in missing}:
        route = routing.route_of(session, topic)
        if route is not None and route.target != routing.HERE:
            missing -= _registered(route.target, missing)
    for ref in sorted(missing):
        raise OperationRefused(
            f"The group {ref.group!r} on topic {ref.topic!r}, which failed the message, is no longer registered and "
            "would not receive it. Start a subscriber of the group first, or discard its dead letters."
        )


def _registered(using: str, wanted: Collection[GroupRef]) -> set[GroupRef]:
    rows = ConsumerGroup.objects.using(using).filter(topic__in={ref.topic for ref in wanted})
    return {GroupRef(*row) for row in rows.values_list("consumer_group", "topic")}


def _send_back(session: Session, topic: str, found: Sequence[_DeadLetter], actor: str) -> None:
    _refuse_unregistered(session, {GroupRef(one.failed_group, one.original_topic) for one in found})
    ids = {one.offset: naming.new_message_id() for one in found}
    for chunk in session.chunks(list(ids.items())):
        session.execute(
            f"INSERT INTO {OUTBOX} (topic, partition_key, id, payload, metadata, publisher_key, target_group, "
            "original_id, original_topic, original_offset) "
            "SELECT m.original_topic, m.partition_key, v.id, m.payload, m.metadata, m.publisher_key, m.failed_group, "
            "m.original_id, m.original_topic, m.original_offset "
            f"FROM {session.dialect.rows(('o', 'id'), len(chunk))} "
            f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o",
            flat(chunk),
        )
    of_jobs = [one.offset for one in found if job_results.is_of_jobs(GroupRef(one.failed_group, one.original_topic))]
    if of_jobs:
        job_results.redriven(session, {offset: ids[offset] for offset in of_jobs})
    _record(session, topic, found, DeliveryEvent.Outcome.REDRIVEN, actor, related=ids)


def _delete(session: Session, offsets: Sequence[int]) -> None:
    for chunk in session.chunks(sorted(offsets)):
        session.execute(session.dialect.delete_joined(LOG, ("o",), len(chunk), "s.`offset` = v.o"), chunk)


def _record(
    session: Session,
    topic: str,
    found: Sequence[_DeadLetter],
    outcome: DeliveryEvent.Outcome,
    actor: str,
    *,
    error: str = "",
    related: dict[int, str] | None = None,
) -> None:
    """Record an operation on dead letters, regardless of ``RECORD_DELIVERIES``."""
    delivery_events.record(
        session,
        [
            delivery_events.Event(
                GroupRef(one.failed_group, topic),
                one.key,
                one.offset,
                one.attempts,
                outcome.value,
                0,
                0,
                actor,
                error,
                (related or {}).get(one.offset, ""),
            )
            for one in found
        ],
    )
