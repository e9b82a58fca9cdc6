"""The outbox: committed messages that the sequencer has not moved into the log yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.models import OutboxMessage
from django_mysqlqueue.service.counts import Count, total
from django_mysqlqueue.sql.session import Session

OUTBOX = OutboxMessage._meta.db_table


@dataclass(frozen=True, slots=True)
class DueMessages:
    """Due messages of a topic that are not in the log yet. They are not part of any group's backlog."""

    count: Count
    """Number of messages."""
    since: int
    """When the first of them was published or came due, in epoch milliseconds."""


@dataclass(frozen=True, slots=True)
class OutboxOverview:
    """The messages in the outbox."""

    topics: Mapping[str, DueMessages]
    """Due messages by topic. If there are too many to count, only the topics of those that wait longest."""
    scheduled: Count
    """Number of messages that are scheduled for later."""
    next_at: int | None
    """When the first of those comes due, in epoch milliseconds."""

    @property
    def waiting(self) -> Count:
        """Number of due messages, of all topics."""
        return total(one.count for one in self.topics.values())

    @property
    def waiting_since(self) -> int | None:
        """When the first due message was published or came due, in epoch milliseconds."""
        return min((one.since for one in self.topics.values()), default=None)


def read_outbox(session: Session, now: int, *, bounds: Bounds = PAGES) -> OutboxOverview:
    """Read the messages in the outbox, in two ranges of its index.

    Args:
        session: session on the queue's database.
        now: the database's clock, in epoch milliseconds.
        bounds: limits of the counts.
    """
    most = bounds.count
    hint = session.dialect.force_index("queue_outbox_due")
    rows = session.rows(
        "SELECT w.topic, COUNT(*), MIN(CASE WHEN w.deliver_at <= 0 THEN w.created_at ELSE w.deliver_at END) FROM "
        f"(SELECT topic, deliver_at, created_at FROM {OUTBOX}{hint} WHERE deliver_at <= %s "
        "ORDER BY deliver_at, outbox_id LIMIT %s) w GROUP BY w.topic",
        (now, most + 1),
    )
    exact = sum(int(number) for _, number, _ in rows) <= most
    later = session.row(
        "SELECT COUNT(*), MIN(w.deliver_at) FROM "
        f"(SELECT deliver_at FROM {OUTBOX}{hint} WHERE deliver_at > %s ORDER BY deliver_at, outbox_id LIMIT %s) w",
        (now, most + 1),
    )
    assert later is not None  # noqa: S101  # an aggregate has one row
    return OutboxOverview(
        {topic: DueMessages(Count(min(int(number), most), exact), int(since)) for topic, number, since in sorted(rows)},
        Count.up_to(most, int(later[0])),
        None if later[1] is None else int(later[1]),
    )
