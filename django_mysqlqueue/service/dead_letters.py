"""Dead letters: writing them to the DLQ topic, and selecting them there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from django_mysqlqueue.db.tables import LOG, OUTBOX, STATE
from django_mysqlqueue.names.ids import new_message_id
from django_mysqlqueue.options.topics import dlq_topic, is_dlq
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service import delivery_events, losses, partitions
from django_mysqlqueue.service.deliveries import Claimed
from django_mysqlqueue.service.log import PUBLISHED_ID
from django_mysqlqueue.service.messages import cut_error
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.watermarks import BY_ROW
from django_mysqlqueue.sql.base import lane_partition
from django_mysqlqueue.sql.session import Session, flat, matches, pieces


class FailedDelivery(NamedTuple):
    """A delivery that is to be dead-lettered."""

    key: str
    offset: int
    attempts: int
    """Number of attempts that have failed."""
    error: str
    delivered_at: int = 0
    handled_ms: int = 0
    by: str = ""
    """The subscriber of the last attempt."""

    @classmethod
    def of(cls, delivery: Claimed, error: str, handled_ms: int = 0, *, is_started: bool = True) -> FailedDelivery:
        """Return the failed delivery of a claim whose attempt was the last, or was not started."""
        attempts, delivered_at = delivery.attempt - (not is_started), delivery.delivered_at
        return cls(delivery.key, delivery.offset, attempts, error, delivered_at, handled_ms, delivery.by)


def is_final(topic: str, attempt: int, max_attempts: int | None, *, rejected: bool = False) -> bool:
    """Return whether a failed attempt dead-letters its message: the last attempt, or one that rejected it.

    On a DLQ topic none does, because it has no DLQ of its own.
    """
    is_last = max_attempts is not None and attempt >= max_attempts
    return (rejected or is_last) and not is_dlq(topic)


def dead_letter(session: Session, ref: GroupRef, failed: Sequence[FailedDelivery]) -> None:
    """Settle deliveries for this group, and put copies into the outbox for the DLQ topic.

    Both happen in one transaction, so at every crash point the message is either live or in the DLQ. The message stays
    in the log, because other groups still need it. The copy has a new id: with the old one, a second dead letter of
    the message would be dropped as a duplicate.

    ``failed``: the deliveries, whose rows this transaction has locked and found unsettled.
    """
    ordered = sorted(failed)
    ids = {(one.key, one.offset): new_message_id() for one in ordered}
    settled = {"acked": "1", **losses.NOT_HELD, "delivered_by": "''", "retry_count": "v.n"}
    session.update(STATE, ("k", "o", "n"), [one[:3] for one in ordered], BY_ROW, settled, after=ref)
    now = session.dialect.now_ms
    for chunk in session.chunks(ordered, weight=lambda one: len(one.error)):
        session.execute(
            f"INSERT INTO {OUTBOX} (topic, partition_key, id, payload, metadata, publisher_key, original_id, "
            "original_topic, original_offset, failed_group, failed_at, failure_count, last_error) "
            f"SELECT %s, m.partition_key, v.id, m.payload, m.metadata, m.publisher_key, {PUBLISHED_ID}, "
            "CASE WHEN m.original_topic = '' THEN m.topic ELSE m.original_topic END, "
            "CASE WHEN m.original_offset = 0 THEN m.`offset` ELSE m.original_offset END, "
            f"%s, {now}, v.n, v.error "
            f"FROM {session.dialect.rows(('o', 'id', 'n', 'error'), len(chunk))} "
            f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o",
            (
                dlq_topic(ref.topic),
                ref.group,
                *flat((one.offset, ids[one.key, one.offset], one.attempts, cut_error(one.error)) for one in chunk),
            ),
        )
    if delivery_events.level(ref) != "none":
        delivery_events.record(
            session,
            [
                delivery_events.Event(
                    ref,
                    one.key,
                    one.offset,
                    one.attempts,
                    Outcome.DEAD_LETTERED,
                    one.delivered_at,
                    one.handled_ms,
                    one.by,
                    one.error,
                    ids[one.key, one.offset],
                )
                for one in ordered
            ],
        )


class DeadLetterFilter(NamedTuple):
    """A selection of the dead letters of a DLQ topic that meet all conditions."""

    topic: str
    """The DLQ topic."""
    offsets: tuple[int, ...] | None = None
    """The offsets of the dead letters; None: all of the topic."""
    group: str | None = None
    """The group that dead-lettered them."""
    error: str | None = None
    """A text that the error contains."""
    since: int | None = None
    """The earliest time of failure, in epoch milliseconds."""
    until: int | None = None
    """The latest time of failure, in epoch milliseconds."""
    key: str | None = None
    """The key with which the messages were published; that of jobs is the dotted path of their task."""
    upto: int | None = None
    """The highest offset: without dead letters that were added later."""

    def condition(self) -> tuple[str, tuple[Any, ...]]:
        """Return the condition for a WHERE on the log as ``m``, without the topic, and its parameters."""
        parts, parameters = ["m.failed_group <> ''"], []
        for sql, value in (
            ("m.failed_group = %s", self.group),
            ("m.failed_at >= %s", self.since),
            ("m.failed_at <= %s", self.until),
            ("INSTR(m.last_error, %s) > 0", self.error),
            (f"COALESCE(m.publisher_key, {lane_partition('m.partition_key')}) = %s", self.key),
            ("m.`offset` <= %s", self.upto),
        ):
            if value is not None:
                parts.append(sql)
                parameters.append(value)
        return " AND ".join(parts), tuple(parameters)


def matching_offsets(session: Session, chosen: DeadLetterFilter, *, size: int) -> Iterator[list[int]]:
    """Yield the offsets of matching dead letters, in order of partition key and offset.

    This reads the topic's rows along the index. It does not see rows that are added before the place that it has
    reached. For each query, there is one list, which may be empty.
    """
    if chosen.offsets is not None:
        condition, parameters = chosen.condition()
        for piece in pieces(sorted(set(chosen.offsets)), size):
            join = f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o AND m.topic = %s AND {condition}"
            found = session.joined("SELECT m.`offset`", "o", piece, join, after=(chosen.topic, *parameters))
            yield sorted(flat(found))
        return
    for rows in _rows(session, chosen, size):
        yield [offset for _, offset, is_match in rows if is_match]


def _rows(session: Session, chosen: DeadLetterFilter, size: int) -> Iterator[list[tuple[Any, ...]]]:
    """Yield key, offset and whether it matches of a DLQ topic in pages, or those of the partitions of a key in it."""
    condition, parameters = chosen.condition()
    source = (
        f"SELECT m.partition_key, m.`offset`, {matches(condition)} "
        f"FROM {LOG} m{session.dialect.force_index('queue_messages_partition')} WHERE m.topic = %s"
    )
    of_one = f"{source} AND m.partition_key = %s AND m.`offset` > %s ORDER BY m.`offset` LIMIT %s"
    if chosen.key is not None:
        for key in partitions.among(session, chosen.topic, partitions.of_key(chosen.topic, chosen.key)):
            above = -1
            while rows := session.rows(of_one, (*parameters, chosen.topic, key, above, size)):
                above = rows[-1][1]
                yield rows
        return
    key, above = "", -1
    while True:
        # First the rest of this partition, then the next ones: two ranges of the index, each read in its order.
        rows = session.rows(of_one, (*parameters, chosen.topic, key, above, size)) or session.rows(
            f"{source} AND m.partition_key > %s ORDER BY m.partition_key, m.`offset` LIMIT %s",
            (*parameters, chosen.topic, key, size),
        )
        if not rows:
            return
        key, above, _ = rows[-1]
        yield rows


def failed_groups(session: Session, topic: str) -> set[str]:
    """Return the groups that dead-lettered the messages of a DLQ topic, whether or not they are still registered."""
    hint = session.dialect.force_index("queue_messages_partition")
    rows = session.rows(
        f"SELECT DISTINCT m.failed_group FROM {LOG} m{hint} WHERE m.topic = %s AND m.failed_group <> ''", (topic,)
    )
    return set(flat(rows))
