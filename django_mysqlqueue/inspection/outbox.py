"""The outbox: what publishers have committed and the sequencer has not moved."""

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
    """Messages of a topic that are due and not in the log yet. No group's lag counts them."""

    count: Count
    """How many there are."""
    since: int
    """When the first of them was published or came due, epoch milliseconds."""


@dataclass(frozen=True, slots=True)
class OutboxOverview:
    """What waits in the outbox."""

    topics: Mapping[str, DueMessages]
    """By topic: what is due. Of more messages than a count goes, the topics of those that wait longest."""
    scheduled: Count
    """Messages that are scheduled for later."""
    next_at: int | None
    """When the first of those comes due, epoch milliseconds."""

    @property
    def waiting(self) -> Count:
        """Messages that are due, of all topics."""
        return total(one.count for one in self.topics.values())

    @property
    def waiting_since(self) -> int | None:
        """When the first message that is due was published or came due, epoch milliseconds."""
        return min((one.since for one in self.topics.values()), default=None)


def read_outbox(session: Session, now: int, *, bounds: Bounds = PAGES) -> OutboxOverview:
    """What waits in the outbox at a moment, by two ranges of its index.

    Args:
        now: the database's clock, epoch milliseconds.
        bounds: where counts stop.
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
