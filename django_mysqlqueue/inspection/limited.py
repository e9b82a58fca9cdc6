"""Whether a consumer group waits because of its limits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from django_mysqlqueue.delivery_limits import NO_KEY, DeliveryLimits, Throttle
from django_mysqlqueue.models import Slots
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session

SLOTS = Slots._meta.db_table
ROWS = 1000
"""Maximum number of rows that are read for a group."""


@dataclass(frozen=True, slots=True)
class Limited:
    """The limits that hold messages of a group back."""

    group: bool
    """Whether a limit of the group as a whole does."""
    keys: int
    """Number of keys that a limit per key holds back, of those that were read."""
    exact: bool
    """Whether all keys were read."""
    by_rate: bool
    """Whether a rate is used up. Otherwise, too many messages are in flight: these may hang."""

    def __bool__(self) -> bool:
        return self.group or self.keys > 0


def _is_used_up(throttle: Throttle, full_at: int, now: int) -> bool:
    return throttle.next_slot(throttle.corrected(full_at, now), now) > now


def read_limited(
    session: Session, ref: GroupRef, limits: DeliveryLimits, now: int, live: Collection[str]
) -> Limited | None:
    """Return which limits of a group are reached; None if it has none.

    Args:
        session: session on the queue's database.
        ref: the group.
        limits: its limits.
        now: the database's time in epoch milliseconds.
        live: names of its live subscribers.
    """
    if not limits:
        return None
    rows = session.rows(
        f"SELECT limit_key, subscriber_name, full_at, held FROM {SLOTS}{session.dialect.force_index('PRIMARY')} "
        "WHERE consumer_group = %s AND topic = %s ORDER BY limit_key, subscriber_name LIMIT %s",
        (*ref, ROWS),
    )
    reached: set[str] = set()
    by_rate = False
    held: dict[str, int] = {}
    for key, subscriber, full_at, number in rows:
        throttle = limits.throttle_of(key)
        if not subscriber and throttle is not None and _is_used_up(throttle, full_at, now * 1000):
            reached.add(key)
            by_rate = True
        elif subscriber in live:
            held[key] = held.get(key, 0) + number
    most = {True: limits.max_in_flight, False: limits.max_in_flight_per_key}
    for key, number in held.items():
        maximum = most[key == NO_KEY]
        if maximum is not None and number >= maximum:
            reached.add(key)
    return Limited(NO_KEY in reached, len(reached - {NO_KEY}), exact=len(rows) < ROWS, by_rate=by_rate)
