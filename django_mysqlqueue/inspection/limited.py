"""Whether a consumer group, or one of its messages, waits because of its limits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from django_mysqlqueue.db.tables import SLOTS
from django_mysqlqueue.options.delivery_limits import NO_KEY, DeliveryLimits
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, among

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


def read_limited(
    session: Session, ref: GroupRef, limits: DeliveryLimits, now: int, live: Collection[str]
) -> Limited | None:
    """Return which limits of a group are reached; None if it has none."""
    if not limits:
        return None
    rows = _accounts(session, ref)
    reached = _reached(rows, limits, now, live)
    keys = {one.key for one in reached}
    by_rate = any(one.until for one in reached)
    return Limited(NO_KEY in keys, len(keys - {NO_KEY}), exact=len(rows) < ROWS, by_rate=by_rate)


class Reached(NamedTuple):
    """A limit that is reached: of a key, or of the group as a whole (``NO_KEY``)."""

    key: str
    until: int
    """When the next slot of the rate is free, in epoch milliseconds; 0 if too many messages are in flight."""


def read_reached(
    session: Session, ref: GroupRef, limits: DeliveryLimits, key: str, now: int, live: Collection[str]
) -> Reached | None:
    """Return the limit that holds a message back: the one for the longest, first those of messages in flight."""
    reached = _reached(_accounts(session, ref, sorted({key, NO_KEY})), limits, now, live)
    return max(reached, key=lambda one: one.until or math.inf, default=None)


def _accounts(session: Session, ref: GroupRef, keys: Sequence[str] = ()) -> list[tuple[str, str, int, int]]:
    """Read the rows of a group, or those of some keys: key, subscriber, when its rate is used up, number in flight."""
    named = f"AND {among('limit_key', keys)} " if keys else ""
    return session.rows(
        f"SELECT limit_key, subscriber_name, full_at, held FROM {SLOTS}{session.dialect.force_index('PRIMARY')} "
        f"WHERE consumer_group = %s AND topic = %s {named}ORDER BY limit_key, subscriber_name LIMIT %s",
        (*ref, *keys, ROWS),
    )


def _reached(
    rows: Sequence[tuple[str, str, int, int]], limits: DeliveryLimits, now: int, live: Collection[str]
) -> list[Reached]:
    """Return the limits that are reached. A key may have two: a rate, and the number of messages in flight."""
    reached: list[Reached] = []
    held: Counter[str] = Counter()
    for key, subscriber, full_at, number in rows:
        throttle = limits.throttle_of(key)
        if not subscriber and throttle is not None:
            slot = throttle.next_slot(throttle.corrected(full_at, now * 1000), now * 1000)
            if slot > now * 1000:
                reached.append(Reached(key, -(-slot // 1000)))
        elif subscriber in live:
            held[key] += number
    for key, number in held.items():
        maximum = limits.max_in_flight if key == NO_KEY else limits.max_in_flight_per_key
        if maximum is not None and number >= maximum:
            reached.append(Reached(key, 0))
    return reached
