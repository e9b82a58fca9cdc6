"""Dead letters: a message that failed for good goes to the DLQ topic, for its group alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django_mysqlqueue import names
from django_mysqlqueue.models import DeliveryState, OutboxMessage, QueueMessage
from django_mysqlqueue.service import history
from django_mysqlqueue.service.groups import GroupRef
from django_mysqlqueue.service.messages import cut_error
from django_mysqlqueue.service.transactions import Session, flat
from django_mysqlqueue.service.watermarks import BY_ROW

STATE = DeliveryState._meta.db_table
OUTBOX = OutboxMessage._meta.db_table
LOG = QueueMessage._meta.db_table


class Letter(NamedTuple):
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


def is_used_up(topic: str, failed: int, max_attempts: int | None) -> bool:
    """Whether so many failed attempts make a dead letter of a message; in a DLQ topic never: it has no DLQ."""
    return max_attempts is not None and failed >= max_attempts and not names.is_dlq(topic)


def dead_letter(session: Session, ref: GroupRef, letters: Sequence[Letter]) -> None:
    """Settles deliveries for this group and puts copies into the outbox for the DLQ topic.

    ``letters`` are of rows that this transaction has locked and found unsettled. Both happen in the one
    transaction: at every crash point the message is live or in the DLQ. The log
    row stays, since other groups still need it. The copy has a fresh id: with
    the old one it would be dropped as a repeat the second time.
    """
    ordered = sorted(letters)
    ids = {(letter.key, letter.offset): names.new_message_id() for letter in ordered}
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
            "CASE WHEN m.original_id = '' THEN m.id ELSE m.original_id END, "
            "CASE WHEN m.original_topic = '' THEN m.topic ELSE m.original_topic END, "
            "CASE WHEN m.original_offset = 0 THEN m.`offset` ELSE m.original_offset END, "
            f"%s, {now}, v.n, v.error "
            f"FROM {session.dialect.rows(('o', 'id', 'n', 'error'), len(chunk))} "
            f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o",
            (
                names.dlq_topic(ref.topic),
                ref.group,
                *flat(
                    (letter.offset, ids[letter.key, letter.offset], letter.attempts, cut_error(letter.error))
                    for letter in chunk
                ),
            ),
        )
    if history.level(ref) != "none":
        history.record(
            session,
            [
                history.Event(
                    ref,
                    letter.key,
                    letter.offset,
                    letter.attempts,
                    history.Outcome.DEAD_LETTERED,
                    letter.delivered_at,
                    letter.handled_ms,
                    letter.by,
                    letter.error,
                    ids[letter.key, letter.offset],
                )
                for letter in ordered
            ],
        )
