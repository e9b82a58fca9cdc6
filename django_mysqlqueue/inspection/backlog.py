"""A group's backlog: how many messages it has not settled, and the first of each partition, at a bounded cost."""

from __future__ import annotations

import time
from collections.abc import Sequence

from django_mysqlqueue import log_queries
from django_mysqlqueue.inspection.bounds import Bounds
from django_mysqlqueue.models import ConsumerOffset
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.log import Ends
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, flat

OFFSETS = ConsumerOffset._meta.db_table


class Patience:
    """Seconds for some groups together: what one does not use is the next ones'."""

    def __init__(self, seconds: float, groups: int) -> None:
        self._left = seconds
        self._groups = groups
        self._began = 0.0
        self._share = 0.0

    def begin(self) -> None:
        """The next group's share begins."""
        self._share = self._left / max(1, self._groups)
        self._groups -= 1
        self._began = time.monotonic()

    def is_over(self) -> bool:
        return time.monotonic() - self._began > self._share

    def end(self) -> None:
        """The group is done with."""
        self._left = max(0.0, self._left - (time.monotonic() - self._began))


class BacklogReader:
    """What the counts of several groups share: the ends of their topics, and the time that they may take."""

    def __init__(self, session: Session, bounds: Bounds, groups: int) -> None:
        self.session = session
        self.bounds = bounds
        self.ends = Ends(session, bounds.partitions)
        self.patience = Patience(bounds.seconds, groups)


def held(session: Session, ref: GroupRef, most: int) -> tuple[Count, Count]:
    """How many deliveries subscribers hold, and how many wait for another attempt."""
    row = session.row(
        "SELECT COUNT(*), SUM(CASE WHEN w.delivered_by <> '' THEN 1 ELSE 0 END), "
        "SUM(CASE WHEN w.delivered_by = '' AND w.retry_count > 0 THEN 1 ELSE 0 END) FROM ("
        f"SELECT delivered_by, retry_count {log_queries.claimed(session)} LIMIT %s) w",
        (*ref, False, most + 1),
    )
    assert row is not None  # noqa: S101  # an aggregate has one row
    all_, in_flight, retrying = (int(value or 0) for value in row)
    return Count(min(in_flight, most), all_ <= most), Count(min(retrying, most), all_ <= most)


def claimed(session: Session, ref: GroupRef, most: int) -> tuple[Count, dict[str, int]]:
    """How many messages are claimed and not settled, and the first of each partition."""
    rows = session.rows(
        "SELECT w.partition_key, MIN(w.message_offset), COUNT(*) FROM (SELECT partition_key, message_offset "
        f"{log_queries.claimed(session)} LIMIT %s) w GROUP BY w.partition_key",
        (*ref, False, most + 1),
    )
    number = sum(int(count) for *_, count in rows)
    return Count.up_to(most, number), {key: int(first) for key, first, _ in rows}


def unclaimed(reader: BacklogReader, ref: GroupRef, start: int) -> tuple[Count, dict[str, int]]:
    """How many messages the group has not claimed, and the first of each partition that has some.

    Partitions are looked into, those first whose cursors are furthest behind, until
    the cap is reached or its share of the time is over: then it says so. The
    first ones are looked into in any case: nobody with a backlog seems to have none.
    """
    session, bounds, ends, patience = reader.session, reader.bounds, reader.ends, reader.patience
    most = bounds.count
    last, whole = ends.of(ref.topic)
    cursors = {
        key: int(claimed)
        for key, claimed in session.rows(
            f"SELECT partition_key, offset_claimed FROM {OFFSETS} WHERE consumer_group = %s AND topic = %s "
            "ORDER BY partition_key LIMIT %s",
            (*ref, ends.most + 1),
        )
    }
    if not whole:
        cursors.update(_cursors(session, ref, [key for key in last if key not in cursors]))
    behind = sorted((cursors.get(key, start), key) for key, end in last.items() if end > cursors.get(key, start))
    select = (
        "SELECT %s AS k, COUNT(*), MIN(w.place) FROM (SELECT m.`offset` AS place "
        f"{log_queries.unclaimed_of_partition(session)} ORDER BY m.`offset` LIMIT %s) w"
    )
    number, firsts = 0, {}
    patience.begin()
    for place in range(0, len(behind), bounds.piece):
        if number > most or (place and patience.is_over()):
            whole = False
            break
        piece = behind[place : place + bounds.piece]
        rows = session.rows(
            " UNION ALL ".join([select] * len(piece)),
            flat((key, ref.topic, key, cursor, ref.group, bounds.depth) for cursor, key in piece),
        )
        places = {key: cursor for cursor, key in piece}
        for key, count, first in rows:
            if not count:
                continue
            firsts[key] = int(first)
            if count == bounds.depth and number <= most:
                # The deep ones one by one: together they are to cost no more than the cap.
                ((_, count, _),) = session.rows(
                    select, (key, ref.topic, key, places[key], ref.group, max(bounds.depth, most + 1 - number))
                )
            number += int(count)
    patience.end()
    return Count(min(number, most), whole and number <= most), firsts


def _cursors(session: Session, ref: GroupRef, keys: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for chunk in session.chunks(sorted(keys)):
        found.update(
            session.rows(
                f"SELECT s.partition_key, s.offset_claimed FROM {session.dialect.rows(('k',), len(chunk))} "
                f"{session.dialect.join_to(OFFSETS, 's')} "
                "ON s.consumer_group = %s AND s.topic = %s AND s.partition_key = v.k",
                (*chunk, *ref),
            )
        )
    return found
