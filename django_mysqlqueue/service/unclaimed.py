"""Counts of the messages that a group has not claimed, by partition, at a bounded cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from django_mysqlqueue.db import log_queries
from django_mysqlqueue.db.tables import OFFSETS
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session


def positions(session: Session, ref: GroupRef, keys: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return a group's watermark and position in partitions, without those that it has not read yet."""
    rows = session.joined(
        "SELECT s.partition_key, s.offset_acked, s.offset_claimed",
        "k",
        set(keys),
        f"{session.dialect.join_to(OFFSETS, 's')} ON s.consumer_group = %s AND s.topic = %s AND s.partition_key = v.k",
        after=ref,
    )
    return {key: (acked, claimed) for key, acked, claimed in rows}


def many_positions(session: Session, ref: GroupRef, keys: Collection[str], most: int) -> dict[str, tuple[int, int]]:
    """Return a group's watermark and position in partitions: those of many partitions by one range of the index.

    ``most``: maximum number of rows of the range. Keys that are not among them are read one by one.
    """
    if not keys:
        return {}
    rows = session.rows(
        f"SELECT partition_key, offset_acked, offset_claimed FROM {OFFSETS}{session.dialect.force_index('PRIMARY')} "
        "WHERE consumer_group = %s AND topic = %s AND partition_key >= %s ORDER BY partition_key LIMIT %s",
        (*ref, min(keys), most + 1),
    )
    found = {key: (acked, claimed) for key, acked, claimed in rows}
    if len(rows) > most:
        found |= positions(session, ref, [key for key in keys if key not in found])
    return found


def watermarks(session: Session, ref: GroupRef, keys: Collection[str], start: int) -> dict[str, int]:
    """Return a group's watermark in partitions that are next to each other in the log.

    ``start``: that of partitions that it has not read yet.
    """
    found = many_positions(session, ref, keys, len(keys))
    return {key: found[key][0] if key in found else start for key in keys}


class Counted(NamedTuple):
    """Messages of a partition that a group has not claimed."""

    number: int
    first: int
    """The offset of the first one."""
    last: int
    """The offset of the last one that was counted."""


def count(session: Session, ref: GroupRef, piece: Sequence[tuple[int, str]], *, depth: int) -> dict[str, Counted]:
    """Count the messages of partitions that the group has not claimed, by one statement.

    ``piece``: offset up to which the group has claimed, and partition key; few enough for one statement.
    """
    select = (
        "SELECT %s AS k, COUNT(*), MIN(w.place), MAX(w.place) FROM (SELECT m.`offset` AS place "
        f"{log_queries.unclaimed_of_partition(session)} ORDER BY m.`offset` LIMIT %s) w"
    )
    rows = session.each(select, [(key, ref.topic, key, position, ref.group, depth) for position, key in piece])
    return {key: Counted(*counted) for key, *counted in rows if counted[0]}
