"""The first unsettled messages of partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from django_mysqlqueue.models import DeliveryState, QueueMessage
from django_mysqlqueue.service.losses import HELD_BY
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session

LOG = QueueMessage._meta.db_table
STATE = DeliveryState._meta.db_table


@dataclass(frozen=True, slots=True)
class HeadMessage:
    """The first message of a partition that a group has not settled."""

    key: str
    """The partition key."""
    offset: int
    published_at: int
    """When it entered the log, in epoch milliseconds."""
    started: bool
    """True if it has been claimed at least once, even if no handler was called."""
    attempts: int
    """Number of attempts that have been counted."""
    delivered_by: str
    """The subscriber that holds it now; empty if none does."""
    invisible_until: int
    """When it comes due, in epoch milliseconds; 0 if it is already due."""
    last_error: str
    """The last traceback, or empty."""


def heads(session: Session, ref: GroupRef, first: Sequence[tuple[int, str]]) -> list[HeadMessage]:
    """Read the first messages of partitions, oldest first, without those that were settled in the meantime."""
    found: list[HeadMessage] = []
    for chunk in session.chunks(sorted(first)):
        found += [
            HeadMessage(key, int(offset), int(at), bool(started), int(attempts), by, int(until), error)
            for key, offset, at, acked, started, attempts, by, until, error in session.rows(
                "SELECT m.partition_key, m.`offset`, m.published_at, COALESCE(s.acked, 0), "
                "CASE WHEN s.message_offset IS NULL THEN 0 ELSE 1 END, COALESCE(s.retry_count, 0), "
                f"COALESCE({HELD_BY}, ''), COALESCE(s.invisible_until, 0), COALESCE(s.last_error, '') "
                f"FROM {session.dialect.rows(('o',), len(chunk))} {session.dialect.join_to(LOG, 'm')} "
                f"ON m.`offset` = v.o {session.dialect.join_to(STATE, 's', left=True)} "
                "ON s.consumer_group = %s AND s.topic = m.topic "
                "AND s.partition_key = m.partition_key AND s.message_offset = m.`offset`",
                (*(offset for offset, _ in chunk), ref.group),
            )
            if not acked
        ]
    return sorted(found, key=lambda head: head.offset)
