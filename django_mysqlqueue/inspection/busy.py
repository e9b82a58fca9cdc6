"""How busy the handler threads of a group's subscribers are, and how long its handlers take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django_mysqlqueue import log_queries
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.inspection.subscribers import SubscriberStatus
from django_mysqlqueue.models import DeliveryEvent
from django_mysqlqueue.service import delivery_events
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session

EVENTS = DeliveryEvent._meta.db_table
CALLS = 200
"""Number of the newest recorded deliveries of a group whose handler times are averaged."""
WINDOW_MS = 5 * 60_000
"""Older ones are not."""


@dataclass(frozen=True, slots=True)
class Busy:
    """The handler threads of a group's live subscribers."""

    threads: int
    """Number of threads. They also serve the other groups of their processes."""
    busy: int
    """How many of them the group's messages in flight can occupy."""
    processes: int

    @property
    def is_full(self) -> bool:
        """True if no thread is free."""
        return self.busy >= self.threads


def read_busy(
    session: Session, ref: GroupRef, live: Iterable[SubscriberStatus], *, bounds: Bounds = PAGES
) -> Busy | None:
    """Return how busy the threads of a group's live subscribers are.

    A subscriber handles as many of its messages in flight as it has threads. The others wait in its memory.

    Returns:
        None if there are no live subscribers, or if one of them is a consumer in plain SQL, which has no threads.
    """
    threads = {one.name: one.threads for one in live}
    if not threads or None in threads.values():
        return None
    rows = session.rows(
        "SELECT w.delivered_by, COUNT(*) FROM (SELECT delivered_by, delivery_token "
        f"{log_queries.claimed(session)} LIMIT %s) w WHERE w.delivery_token <> 0 GROUP BY w.delivered_by",
        (*ref, False, bounds.in_flight),
    )
    held = {name: int(number) for name, number in rows}
    busy = sum(min(held.get(name, 0), number or 0) for name, number in threads.items())
    return Busy(sum(number or 0 for number in threads.values()), busy, len(threads))


def mean_handler_ms(session: Session, ref: GroupRef, now: int) -> float | None:
    """Return how long the last calls of a group's handler took on average, in milliseconds.

    Returns:
        None if there were no calls lately, or if acks of the group are not recorded (``RECORD_DELIVERIES``): the others
        are not typical.
    """
    if delivery_events.level(ref) != "all":
        return None
    row = session.row(
        "SELECT AVG(CASE WHEN w.handled_ms > 0 AND w.settled_at >= %s THEN w.handled_ms END) FROM "
        f"(SELECT handled_ms, settled_at FROM {EVENTS}{session.dialect.force_index('queue_delivery_events_group')} "
        "WHERE consumer_group = %s AND topic = %s ORDER BY id DESC LIMIT %s) w",
        (now - WINDOW_MS, *ref, CALLS),
    )
    assert row is not None  # noqa: S101  # an aggregate has one row
    return None if row[0] is None else float(row[0])
