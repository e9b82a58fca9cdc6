"""A group's backlog: the number of unsettled messages and the first of each partition, at a bounded cost."""

from __future__ import annotations

import time
from typing import NamedTuple

from django_mysqlqueue import log_queries
from django_mysqlqueue.inspection.bounds import Bounds
from django_mysqlqueue.limits import priority_of
from django_mysqlqueue.service import unclaimed as of_partitions
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.log import Ends
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session


class Patience:
    """A time limit for several groups: time that one does not use is left for the next ones."""

    def __init__(self, seconds: float, groups: int) -> None:
        self._left = seconds
        self._groups = groups
        self._began = 0.0
        self._share = 0.0

    def begin(self) -> None:
        """Start the next group's share."""
        self._share = self._left / max(1, self._groups)
        self._groups -= 1
        self._began = time.monotonic()

    def is_over(self) -> bool:
        """Return True if the group has used up its share."""
        return time.monotonic() - self._began > self._share

    def end(self) -> None:
        """End the group's share."""
        self._left = max(0.0, self._left - (time.monotonic() - self._began))


class BacklogReader:
    """State that the counts of several groups share: the ends of their topics, and their time limit."""

    def __init__(self, session: Session, bounds: Bounds, groups: int) -> None:
        self.session = session
        self.bounds = bounds
        self.ends = Ends(session, bounds.partitions)
        self.patience = Patience(bounds.seconds, groups)


def held(session: Session, ref: GroupRef, most: int) -> tuple[Count, Count]:
    """Return the number of messages in flight, and of those that wait for another attempt."""
    row = session.row(
        "SELECT COUNT(*), SUM(CASE WHEN w.delivery_token <> 0 THEN 1 ELSE 0 END), "
        "SUM(CASE WHEN w.delivery_token = 0 AND w.retry_count > 0 THEN 1 ELSE 0 END) FROM ("
        f"SELECT delivery_token, retry_count {log_queries.claimed(session)} LIMIT %s) w",
        (*ref, False, most + 1),
    )
    assert row is not None  # noqa: S101  # an aggregate has one row
    all_, in_flight, retrying = (int(value or 0) for value in row)
    return Count(min(in_flight, most), all_ <= most), Count(min(retrying, most), all_ <= most)


class Unsettled(NamedTuple):
    """Messages of a group."""

    all: Count
    by_partition: dict[str, int]
    """How many of them were counted in each partition."""
    firsts: dict[str, int]
    """The offset of the first one in each partition."""


def by_priority(*parts: Unsettled) -> dict[int, Count]:
    """Return the number of messages with each priority. All are lower bounds if one of the counts stopped."""
    found: dict[int, int] = {}
    for part in parts:
        for key, number in part.by_partition.items():
            found[priority_of(key)] = found.get(priority_of(key), 0) + number
    exact = all(part.all.exact for part in parts)
    return {priority: Count(found[priority], exact) for priority in sorted(found, reverse=True)}


def claimed(session: Session, ref: GroupRef, most: int) -> Unsettled:
    """Return the messages that are claimed and not settled."""
    rows = session.rows(
        "SELECT w.partition_key, MIN(w.message_offset), COUNT(*) FROM (SELECT partition_key, message_offset "
        f"{log_queries.claimed(session)} LIMIT %s) w GROUP BY w.partition_key",
        (*ref, False, most + 1),
    )
    numbers = {key: int(count) for key, _, count in rows}
    return Unsettled(Count.up_to(most, sum(numbers.values())), numbers, {key: int(first) for key, first, _ in rows})


def unclaimed(reader: BacklogReader, ref: GroupRef, start: int) -> Unsettled:
    """Return the messages that the group has not claimed.

    Partitions are read in the order of the group's position, the furthest behind first, until the limit of the count
    is reached or the group's share of the time is over; then the count is not exact. The first ones are read in any
    case, so that no group with a backlog seems to have none.
    """
    session, bounds, ends, patience = reader.session, reader.bounds, reader.ends, reader.patience
    most = bounds.count
    last, whole = ends.of(ref.topic)
    read = of_partitions.many_positions(session, ref, last, ends.most)
    places = {key: claimed for key, (_, claimed) in read.items()}
    behind = sorted((places.get(key, start), key) for key, end in last.items() if end > places.get(key, start))
    number = 0
    numbers: dict[str, int] = {}
    firsts: dict[str, int] = {}
    patience.begin()
    for place in range(0, len(behind), bounds.piece):
        if number > most or (place and patience.is_over()):
            whole = False
            break
        piece = behind[place : place + bounds.piece]
        places = {key: place for place, key in piece}
        for key, counted in of_partitions.count(session, ref, piece, depth=bounds.depth).items():
            firsts[key], numbers[key] = counted.first, counted.number
            if counted.number == bounds.depth and number <= most:
                # Count long ones one by one, so that together they cost no more than the limit.
                alone = of_partitions.count(
                    session, ref, [(places[key], key)], depth=max(bounds.depth, most + 1 - number)
                )
                numbers[key] = alone[key].number if key in alone else 0
            number += numbers[key]
    patience.end()
    return Unsettled(Count(min(number, most), whole and number <= most), numbers, firsts)
