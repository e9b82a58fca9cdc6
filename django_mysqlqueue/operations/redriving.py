"""Dead letters back to the group that failed them, or out of the queue.

A dead letter is taken by deleting its row of the log by primary key, which one
operator alone can do, and in the same transaction it goes into the outbox for
the group that failed, or the record says who discarded it and why. These are
the only deletes from the log besides GC.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from django_mysqlqueue import naming
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup, DeliveryEvent, OutboxMessage, QueueMessage
from django_mysqlqueue.operations.limits import LIMITS
from django_mysqlqueue.service import audit, delivery_events, messages
from django_mysqlqueue.service.dead_letters import REPLACES, DeadLetterFilter, matching_offsets
from django_mysqlqueue.service.log import PUBLISHED_ID
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, flat, run

LOG = QueueMessage._meta.db_table
OUTBOX = OutboxMessage._meta.db_table


class _DeadLetter(NamedTuple):
    offset: int
    key: str
    failed_group: str
    original_topic: str
    attempts: int


def count(using: str, letters: DeadLetterFilter, *, most: int) -> int:
    """How many dead letters match; no more than ``most``."""
    number = 0
    for page in matching_offsets(Session(using), letters, size=LIMITS.dead_letters):
        number += len(page)
        if number >= most:
            return most
    return number


def redrive(
    using: str,
    letters: DeadLetterFilter,
    *,
    actor: str,
    reason: str = "",
    rate: float | None = None,
    limit: int | None = None,
    progress: Callable[[int], object] = lambda rows: None,
) -> int:
    """Sends dead letters back to the groups that failed them, and to those alone.

    Each becomes a message of its first topic with a fresh id and a new place in
    the log; ``Delivery.id`` goes on to show the first one's id.

    Args:
        actor: who does it, for the record.
        rate: at most so many a second; None: as fast as it goes.
        limit: at most so many.
        progress: is told how many each step has sent.

    Returns:
        How many were sent back.

    Raises:
        OperationRefused: the group that failed one of them is not registered any more: nobody would get it.
            What was sent before that stays sent.
    """

    def send_back(session: Session, found: Sequence[_DeadLetter]) -> None:
        _send_back(session, letters.topic, found, actor)

    return _take_all(
        using, letters, "redrive", send_back, actor=actor, reason=reason, rate=rate, limit=limit, progress=progress
    )


def discard(
    using: str,
    letters: DeadLetterFilter,
    *,
    actor: str,
    reason: str,
    limit: int | None = None,
    progress: Callable[[int], object] = lambda rows: None,
) -> int:
    """Deletes dead letters for good; the record keeps who did it and why.

    Returns:
        How many were deleted.

    Raises:
        OperationRefused: no reason was given.
    """
    if not reason.strip():
        raise OperationRefused("reason '': say why the messages are thrown away")

    def put_on_record(session: Session, found: Sequence[_DeadLetter]) -> None:
        _record(session, letters.topic, found, DeliveryEvent.Outcome.DISCARDED, actor, error=reason)

    return _take_all(
        using, letters, "discard", put_on_record, actor=actor, reason=reason, limit=limit, progress=progress
    )


def replace(using: str, topic: str, offset: int, payload: Any, *, actor: str, reason: str = "") -> str:
    """Sends a corrected payload in the place of a dead letter, to the group that failed it.

    It is a message of its own, with its own id; its metadata name the old one's.

    Args:
        topic, offset: the dead letter's.
        payload: as in ``publish``; metadata stay what they were.

    Returns:
        The new message's id.

    Raises:
        InvalidMessage: a payload that ``publish`` would refuse.
        OperationRefused: there is no such dead letter (any more), or its group is gone.
    """

    def write(session: Session) -> str:
        found = _lock(session, [offset], topic)
        if not found:
            raise OperationRefused(_no_letter_text(topic, offset))
        letter = found[0]
        _ref, body, kept = _replacement(session, topic, offset, payload)
        new_id = naming.new_message_id()
        session.execute(
            f"INSERT INTO {OUTBOX} (topic, partition_key, id, payload, metadata, target_group) "
            "VALUES (%s, %s, %s, %s, %s, %s)",
            (letter.original_topic, letter.key, new_id, body, kept, letter.failed_group),
        )
        _delete(session, [offset])
        _record(session, topic, found, DeliveryEvent.Outcome.REPLACED, actor, related={offset: new_id})
        audit.once(
            session,
            "replace",
            1,
            actor=actor,
            reason=reason,
            group=letter.failed_group,
            topic=topic,
            detail=f"offset {offset}",
        )
        return new_id

    with apart(using):
        return run(using, write)


def find_replaced(using: str, topic: str, offset: int, payload: Any) -> tuple[GroupRef, int]:
    """The group that ``replace`` would send a payload to, and its size in bytes; nothing is changed.

    Raises:
        InvalidMessage, OperationRefused: as ``replace``.
    """
    ref, body, _metadata = _replacement(Session(using), topic, offset, payload)
    return ref, len(body)


def _replacement(session: Session, topic: str, offset: int, payload: Any) -> tuple[GroupRef, bytes, str]:
    """What takes the place of a dead letter: the group that it is for, its payload and its metadata, encoded."""
    row = session.row(
        f"SELECT failed_group, original_topic, {PUBLISHED_ID}, metadata FROM {LOG} m "
        "WHERE m.`offset` = %s AND m.topic = %s AND m.failed_group <> ''",
        (offset, topic),
    )
    if row is None:
        raise OperationRefused(_no_letter_text(topic, offset))
    ref = GroupRef(row[0], row[1])
    _refuse_unregistered(session, {ref})
    body, kept = messages.encode_body(payload, {**messages.decode_metadata(row[3]), REPLACES: row[2]})
    return ref, body, kept


def _no_letter_text(topic: str, offset: int) -> str:
    return f"There is no dead letter at offset {offset} of {topic!r}."


def check_groups(using: str, letters: DeadLetterFilter, most: int) -> None:
    """Whether every group that failed the first of the matching dead letters would get them back.

    Args:
        most: how many are looked at.

    Raises:
        OperationRefused: one of the groups is not registered any more.
    """
    session = Session(using)
    left = most
    refs: set[GroupRef] = set()
    for page in matching_offsets(session, letters, size=LIMITS.dead_letters):
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
    letters: DeadLetterFilter,
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

    def write(session: Session, page: Sequence[int]) -> int:
        found = _lock(session, page, letters.topic)
        if found:
            take(session, found)
            _delete(session, [letter.offset for letter in found])
            audit.add(session, operation, len(found))
        return len(found)

    done = 0
    with apart(using):
        operation = run(
            using,
            lambda session: audit.begin(
                session, action, actor=actor, reason=reason, group=letters.group or "", topic=letters.topic
            ),
        )
        with audit.ending(using, operation):
            rests = 0.0
            for page in matching_offsets(Session(using), letters, size=size):
                if rests:
                    time.sleep(rests)
                began = time.monotonic()
                wanted = page if limit is None else page[: limit - done]
                taken = run(using, lambda session, wanted=wanted: write(session, wanted))  # type: ignore[misc]
                done += taken
                progress(taken)
                if limit is not None and done >= limit:
                    break
                if rate is not None:
                    rests = max(0.0, taken / rate - (time.monotonic() - began))
    return done


def _lock(session: Session, offsets: Sequence[int], topic: str) -> list[_DeadLetter]:
    """Locks those that are still there and that nobody else is taking, in order."""
    found: list[_DeadLetter] = []
    for chunk in session.chunks(sorted(offsets)):
        found += [
            _DeadLetter(*row)
            for row in session.rows(
                "SELECT m.`offset`, m.partition_key, m.failed_group, m.original_topic, m.failure_count "
                f"FROM {session.dialect.rows(('o',), len(chunk))} {session.dialect.join_to(LOG, 'm')} "
                f"ON m.`offset` = v.o AND m.topic = %s AND m.failed_group <> ''{session.dialect.skip_locked}",
                (*chunk, topic),
            )
        ]
    return sorted(found)


def _refuse_unregistered(session: Session, wanted: Collection[GroupRef]) -> None:
    """A message for a group that nobody has registered would reach nobody, and GC would take it."""
    known = {
        GroupRef(*row)
        for row in ConsumerGroup.objects.using(session.using)
        .filter(topic__in={ref.topic for ref in wanted})
        .values_list("consumer_group", "topic")
    }
    for ref in sorted(set(wanted) - known):
        raise OperationRefused(
            f"The group {ref.group!r} of {ref.topic!r}, which failed the message, is not registered any more: nobody "
            "would get it. Start a subscriber of the group first, or discard its dead letters."
        )


def _send_back(session: Session, topic: str, found: Sequence[_DeadLetter], actor: str) -> None:
    _refuse_unregistered(session, {GroupRef(letter.failed_group, letter.original_topic) for letter in found})
    ids = {letter.offset: naming.new_message_id() for letter in found}
    for chunk in session.chunks(list(ids.items())):
        session.execute(
            f"INSERT INTO {OUTBOX} (topic, partition_key, id, payload, metadata, target_group, original_id, "
            "original_topic, original_offset) "
            "SELECT m.original_topic, m.partition_key, v.id, m.payload, m.metadata, m.failed_group, m.original_id, "
            "m.original_topic, m.original_offset "
            f"FROM {session.dialect.rows(('o', 'id'), len(chunk))} "
            f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o",
            flat(chunk),
        )
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
    """Whatever the setting: what operators do is always recorded."""
    delivery_events.record(
        session,
        [
            delivery_events.Event(
                GroupRef(letter.failed_group, topic),
                letter.key,
                letter.offset,
                letter.attempts,
                outcome.value,
                0,
                0,
                actor,
                error,
                (related or {}).get(letter.offset, ""),
            )
            for letter in found
        ],
    )
