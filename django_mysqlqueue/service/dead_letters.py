"""Dead letters: writing them to the DLQ topic, and selecting them there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from django_mysqlqueue import limits, naming
from django_mysqlqueue.models import DeliveryState, OutboxMessage, QueueMessage
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service import delivery_events
from django_mysqlqueue.service.deliveries import Claimed
from django_mysqlqueue.service.log import PUBLISHED_ID
from django_mysqlqueue.service.messages import cut_error
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.watermarks import BY_ROW
from django_mysqlqueue.sql.session import Session, flat

STATE = DeliveryState._meta.db_table
OUTBOX = OutboxMessage._meta.db_table
LOG = QueueMessage._meta.db_table
REPLACES = limits.RESERVED_PREFIX + "replaces"
"""Metadata of a corrected message: the id of the one that it takes the place of."""


class FailedDelivery(NamedTuple):
    """A delivery that has failed for good."""

    key: str
    offset: int
    attempts: int
    """How many have failed."""
    error: str
    delivered_at: int = 0
    handled_ms: int = 0
    by: str = ""
    """The subscriber of the last attempt."""

    @classmethod
    def of(cls, delivery: Claimed, error: str, handled_ms: int = 0) -> FailedDelivery:
        """The dead letter of a delivery whose attempt was the last."""
        attempt, delivered_at = delivery.attempt, delivery.delivered_at
        return cls(delivery.key, delivery.offset, attempt, error, delivered_at, handled_ms, delivery.by)


def is_final(topic: str, attempt: int, max_attempts: int | None, *, rejected: bool = False) -> bool:
    """Whether a failed attempt makes a dead letter of its message: the last attempt, or one that rejected it.

    In a DLQ topic none does, since it has no DLQ of its own.
    """
    is_last = max_attempts is not None and attempt >= max_attempts
    return (rejected or is_last) and not naming.is_dlq(topic)


def dead_letter(session: Session, ref: GroupRef, letters: Sequence[FailedDelivery]) -> None:
    """Settles deliveries for this group and puts copies into the outbox for the DLQ topic.

    ``letters`` are of rows that this transaction has locked and found unsettled. Both happen in the one
    transaction: at every crash point the message is live or in the DLQ. The log
    row stays, since other groups still need it. The copy has a fresh id: with
    the old one it would be dropped as a repeat the second time.
    """
    ordered = sorted(letters)
    ids = {(letter.key, letter.offset): naming.new_message_id() for letter in ordered}
    for chunk in session.chunks(ordered):
        session.execute(
            session.dialect.update_joined(
                STATE,
                ("k", "o", "n"),
                len(chunk),
                BY_ROW,
                {"acked": "1", "delivery_token": "0", "delivered_by": "''", "retry_count": "v.n"},
            ),
            (*flat(letter[:3] for letter in chunk), *ref),
        )
    now = session.dialect.now_ms
    for chunk in session.chunks(ordered, weight=lambda letter: len(letter.error)):
        session.execute(
            f"INSERT INTO {OUTBOX} (topic, partition_key, id, payload, metadata, original_id, original_topic, "
            "original_offset, failed_group, failed_at, failure_count, last_error) "
            f"SELECT %s, m.partition_key, v.id, m.payload, m.metadata, "
            f"{PUBLISHED_ID}, "
            "CASE WHEN m.original_topic = '' THEN m.topic ELSE m.original_topic END, "
            "CASE WHEN m.original_offset = 0 THEN m.`offset` ELSE m.original_offset END, "
            f"%s, {now}, v.n, v.error "
            f"FROM {session.dialect.rows(('o', 'id', 'n', 'error'), len(chunk))} "
            f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o",
            (
                naming.dlq_topic(ref.topic),
                ref.group,
                *flat(
                    (letter.offset, ids[letter.key, letter.offset], letter.attempts, cut_error(letter.error))
                    for letter in chunk
                ),
            ),
        )
    if delivery_events.level(ref) != "none":
        delivery_events.record(
            session,
            [
                delivery_events.Event(
                    ref,
                    letter.key,
                    letter.offset,
                    letter.attempts,
                    Outcome.DEAD_LETTERED,
                    letter.delivered_at,
                    letter.handled_ms,
                    letter.by,
                    letter.error,
                    ids[letter.key, letter.offset],
                )
                for letter in ordered
            ],
        )


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """A selection of dead letters of a DLQ topic: those that meet every condition."""

    topic: str
    """The DLQ topic."""
    offsets: tuple[int, ...] | None = None
    """Exactly these; None: all of the topic."""
    group: str | None = None
    """That this group failed."""
    error: str | None = None
    """Whose error text has this in it."""
    since: int | None = None
    until: int | None = None
    """That failed in this time, epoch milliseconds."""

    def condition(self) -> tuple[str, tuple[Any, ...]]:
        """For a WHERE on the log as ``m``, beside the topic."""
        parts, parameters = ["m.failed_group <> ''"], []
        for sql, value in (
            ("m.failed_group = %s", self.group),
            ("m.failed_at >= %s", self.since),
            ("m.failed_at <= %s", self.until),
            ("INSTR(m.last_error, %s) > 0", self.error),
        ):
            if value is not None:
                parts.append(sql)
                parameters.append(value)
        return " AND ".join(parts), tuple(parameters)


def matching_offsets(session: Session, letters: DeadLetterFilter, *, size: int) -> Iterator[list[int]]:
    """The offsets of matching dead letters, in order of partition key and offset, as they are now.

    It reads the topic's rows along the index; it sees none that come behind where it is.
    """
    condition, parameters = letters.condition()
    if letters.offsets is not None:
        ordered = sorted(set(letters.offsets))
        for start in range(0, len(ordered), size):
            piece = ordered[start : start + size]
            found = [
                offset
                for (offset,) in session.rows(
                    f"SELECT m.`offset` FROM {session.dialect.rows(('o',), len(piece))} "
                    f"{session.dialect.join_to(LOG, 'm')} "
                    f"ON m.`offset` = v.o AND m.topic = %s AND {condition}",
                    (*piece, letters.topic, *parameters),
                )
            ]
            if found:
                yield sorted(found)
        return
    hint = session.dialect.force_index("queue_messages_partition")
    key, above = "", -1
    while True:
        # The rest of this partition first, then the next ones: two ranges of the index, each read in its order.
        looked = session.rows(
            f"SELECT partition_key, `offset` FROM {LOG}{hint} WHERE topic = %s AND partition_key = %s "
            "AND `offset` > %s ORDER BY `offset` LIMIT %s",
            (letters.topic, key, above, size),
        ) or session.rows(
            f"SELECT partition_key, `offset` FROM {LOG}{hint} WHERE topic = %s AND partition_key > %s "
            "ORDER BY partition_key, `offset` LIMIT %s",
            (letters.topic, key, size),
        )
        if not looked:
            return
        key, above = looked[-1]
        places = [offset for _, offset in looked]
        matching: set[int] = set()
        for chunk in session.chunks(places):
            matching.update(
                offset
                for (offset,) in session.rows(
                    f"SELECT m.`offset` FROM {session.dialect.rows(('o',), len(chunk))} "
                    f"{session.dialect.join_to(LOG, 'm')} "
                    f"ON m.`offset` = v.o AND {condition}",
                    (*chunk, *parameters),
                )
            )
        found = [offset for offset in places if offset in matching]
        if found:
            yield found


def failed_groups(session: Session, topic: str) -> set[str]:
    """The groups that failed the dead letters of a DLQ topic, whether or not they are still registered."""
    hint = session.dialect.force_index("queue_messages_partition")
    rows = session.rows(
        f"SELECT DISTINCT m.failed_group FROM {LOG} m{hint} WHERE m.topic = %s AND m.failed_group <> ''", (topic,)
    )
    return {group for (group,) in rows}
