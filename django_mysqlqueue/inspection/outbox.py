"""The outbox: committed messages that the sequencer has not moved into the log yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.models import OutboxMessage
from django_mysqlqueue.service.counts import Count, total
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.sequencing import DUE_ORDER
from django_mysqlqueue.sql.session import Session

OUTBOX = OutboxMessage._meta.db_table


@dataclass(frozen=True, slots=True)
class DueMessages:
    """Due messages that are not in the log yet. They are not part of any group's backlog."""

    count: Count
    """Number of messages."""
    since: int
    """When the first of them was published or came due, in epoch milliseconds."""


@dataclass(frozen=True, slots=True)
class OutboxOverview:
    """The messages in the outbox."""

    topics: Mapping[str, DueMessages]
    """Due messages for all groups of a topic, by topic. If there are too many to count, only the topics of those that
    wait longest."""
    groups: Mapping[GroupRef, DueMessages]
    """Due messages for a single group, such as redriven ones, by group."""
    scheduled: Count
    """Number of messages that are scheduled for later."""
    next_at: int | None
    """When the first of those comes due, in epoch milliseconds."""

    @property
    def waiting(self) -> Count:
        """Number of due messages, of all topics."""
        return total(one.count for one in self._due())

    @property
    def waiting_since(self) -> int | None:
        """When the first due message was published or came due, in epoch milliseconds."""
        return min((one.since for one in self._due()), default=None)

    def of(self, ref: GroupRef) -> DueMessages | None:
        """Return the due messages that a group will receive, or None if there are none."""
        found = [one for one in (self.topics.get(ref.topic), self.groups.get(ref)) if one is not None]
        if not found:
            return None
        return DueMessages(total(one.count for one in found), min(one.since for one in found))

    def _due(self) -> list[DueMessages]:
        return [*self.topics.values(), *self.groups.values()]


def read_outbox(session: Session, now: int, *, bounds: Bounds = PAGES) -> OutboxOverview:
    """Read the messages in the outbox, in two ranges of its index."""
    most = bounds.count
    hint = session.dialect.force_index("queue_outbox_due")
    rows = session.rows(
        "SELECT w.topic, w.target_group, COUNT(*), "
        "MIN(CASE WHEN w.deliver_at <= 0 THEN w.created_at ELSE w.deliver_at END) FROM "
        f"(SELECT topic, target_group, deliver_at, created_at FROM {OUTBOX}{hint} WHERE deliver_at <= %s "
        f"ORDER BY {DUE_ORDER} LIMIT %s) w GROUP BY w.topic, w.target_group",
        (now, most + 1),
    )
    exact = sum(int(number) for _, _, number, _ in rows) <= most
    due = {
        (topic, group): DueMessages(Count(min(int(number), most), exact), int(since))
        for topic, group, number, since in sorted(rows)
    }
    later = session.row(
        "SELECT COUNT(*), MIN(w.deliver_at) FROM "
        f"(SELECT deliver_at FROM {OUTBOX}{hint} WHERE deliver_at > %s ORDER BY {DUE_ORDER} LIMIT %s) w",
        (now, most + 1),
    )
    assert later is not None  # noqa: S101  # an aggregate has one row
    return OutboxOverview(
        {topic: found for (topic, group), found in due.items() if not group},
        {GroupRef(group, topic): found for (topic, group), found in due.items() if group},
        Count.up_to(most, int(later[0])),
        None if later[1] is None else int(later[1]),
    )
