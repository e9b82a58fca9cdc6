"""Lists of partitions, read along an index from key to key."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from django_mysqlqueue.db.tables import LOG, STATE
from django_mysqlqueue.names.keys import hashed_partition, lanes
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.topics import first_topic
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, flat

JUMPS = ("for group-by", "skip scan for grouping")
"""Texts of plans that jump from key to key, in the formats TRADITIONAL and TREE of ``EXPLAIN``."""
PROBED, SHORT = 100, 10_000
"""Number of messages that are read first, and maximum number of those that are read instead if these are of many
partitions: then reading on costs less than jumping."""
ROWS = (4, 20)
"""Maximum numbers of messages for each partition that is wanted, if the server does not jump: those that are read
first, and those that are read then if the partitions are short. Together they are as many as the servers read before
they jump. So only a topic whose partitions are longer than those of the other topics is not read to its end."""
MORE = 50
"""Maximum number of partitions that are then read one by one."""
ALL = 1_000_000
"""If at least this number of partitions is wanted, as by health checks, the second read is not left out."""


def in_log(session: Session, topic: str, *, after: str | None, limit: int, since: str = "") -> list[str]:
    """Return the next partitions of a topic that have messages in the log, in order of key.

    ``after``: the partition after which to continue; None: from the start. ``since``: the first partition, if ``after``
    is None.
    """
    hint = session.dialect.force_index("queue_messages_partition")
    return _keys(session, f"FROM {LOG}{hint} WHERE topic = %s", (topic,), after, limit, since)


def of_key(topic: str, key: str) -> list[str]:
    """Return the partitions in which messages that were published with a key may be: those of every priority.

    A dead letter is in the partition of its message. Messages that were hashed while ``PARTITIONS`` had another value
    are in others.
    """
    number = get_settings().partitions_of(first_topic(topic))
    return lanes(key) if number is None else [*lanes(key), *lanes(hashed_partition(key, number))]


def among(session: Session, topic: str, keys: Sequence[str]) -> list[str]:
    """Return those of some partitions of a topic that have messages in the log, in order of key."""
    hint = session.dialect.force_index("queue_messages_partition")
    return _among(session, keys, f"{LOG} m{hint} WHERE m.topic = %s AND m.partition_key = v.k", (topic,))


def among_state(session: Session, ref: GroupRef, keys: Sequence[str]) -> list[str]:
    """Return those of some partitions that have state rows of a group, in order of key."""
    source = (
        f"{STATE} s{session.dialect.force_index('PRIMARY')} "
        "WHERE s.consumer_group = %s AND s.topic = %s AND s.partition_key = v.k"
    )
    return _among(session, keys, source, ref)


def _among(session: Session, keys: Sequence[str], source: str, parameters: Sequence[str]) -> list[str]:
    # Not EXISTS: MySQL may read all rows of the topic once, if these seem to be few, instead of looking up each key.
    sql = (
        f"SELECT v.k FROM {session.dialect.rows(('k',), len(keys))} WHERE (SELECT 1 FROM {source} LIMIT 1) IS NOT NULL"
    )
    return sorted(flat(session.rows(sql, (*keys, *parameters))))


def last_offsets(
    session: Session, topic: str, *, limit: int, after: str | None = None, since: str = ""
) -> tuple[dict[str, int], bool]:
    """Return the last offsets of a topic's next partitions in the log, in order of key, and whether these are all.

    First, some messages are read (``PROBED``, ``SHORT``). Beyond them, both servers jump along the index from partition
    to partition, but only if their statistics of the whole log say that a partition has 10 to 24 messages or more. If
    another topic has very many short ones, they would read all messages of this topic. So they are asked for their
    plan. If they do not jump, a limited number of messages is read (``ROWS``), and then some partitions one by one
    (``MORE``). So fewer than ``limit`` partitions may be returned although there are more; the last one of them is
    where to continue.

    ``after``: the partition after which to continue; None: from the start. ``since``: the first partition, if ``after``
    is None.
    """
    above, place = _beyond(after, since)
    found: dict[str, int] = {}
    for most in (PROBED, min(limit + 1, SHORT)):
        read = session.rows(
            f"SELECT partition_key, `offset` FROM {LOG}{session.dialect.force_index('queue_messages_partition')} "
            f"WHERE topic = %s{above} ORDER BY partition_key, `offset` LIMIT %s",
            (topic, *place, most),
        )
        found = dict(read)
        if len(read) < most or len(found) > limit:
            return _cut(found, limit)
        if 2 * len(found) < PROBED:
            break
    del found[read[-1][0]]  # It may have further messages.
    if found:
        above, place = _beyond(None, read[-1][0])
    sql, parameters = _grouped(session, topic, above, place, limit + 1 - len(found))
    if _jumps(session.rows(f"EXPLAIN {sql}", parameters)):
        return _cut(found | dict(session.rows(sql, parameters)), limit)
    for rows in ROWS:
        end = session.row(
            f"SELECT partition_key FROM {LOG}{session.dialect.force_index('queue_messages_partition')} "
            f"WHERE topic = %s{above} ORDER BY partition_key, `offset` LIMIT 1 OFFSET %s",
            (topic, *place, limit * rows),
        )
        if end is not None:
            above, place = f"{above} AND partition_key < %s", (*place, *end)
        # With a constant topic, they cannot walk the index beyond it, as MySQL does with that of a short log otherwise.
        read = session.rows(
            f"SELECT partition_key, MAX(`offset`) FROM {LOG}{session.dialect.force_index('queue_messages_partition')} "
            f"WHERE topic = %s{above} GROUP BY partition_key ORDER BY partition_key LIMIT %s",
            (topic, *place, limit + 1 - len(found)),
        )
        found |= dict(read)
        if end is None or len(found) > limit:
            return _cut(found, limit)
        above, place = _beyond(None, end[0])
        if len(found) * sum(ROWS) < limit * rows and limit < ALL:
            break  # These partitions are long.
    most = min(MORE, limit - len(found))
    keys = in_log(session, topic, after=None, since=place[0] if place else "", limit=most + 1)
    found |= ends(session, topic, keys[:most])
    if not found and len(keys) > most > 0:  # GC has emptied these meanwhile: there would be nowhere to continue.
        return last_offsets(session, topic, limit=limit, after=keys[most - 1])
    return found, len(keys) <= most


def _cut(found: dict[str, int], limit: int) -> tuple[dict[str, int], bool]:
    return dict(islice(found.items(), limit)), len(found) <= limit


def _grouped(
    session: Session, topic: str, where: str, parameters: Sequence[str], limit: int
) -> tuple[str, tuple[object, ...]]:
    # Both servers jump from key to key, and stop at the LIMIT, only if the query groups by the whole prefix of the
    # index and none of its columns is a constant. Otherwise one of them reads everything into a temporary table.
    return (
        f"SELECT partition_key, MAX(`offset`) FROM {LOG}"
        f"{session.dialect.force_index('queue_messages_partition')} WHERE topic >= %s AND topic <= %s{where} "
        "GROUP BY topic, partition_key LIMIT %s"
    ), (topic, topic, *parameters, limit)


def _jumps(plan: Sequence[Sequence[object]]) -> bool:
    return any(text in str(cell) for row in plan for cell in row for text in JUMPS)


def all_in_log(session: Session, topic: str, *, most: int) -> list[str] | None:
    """Return all partitions of a topic that have messages in the log, in order of key; None if there are many."""
    found, whole = last_offsets(session, topic, limit=most)
    return list(found) if whole else None


def ends(session: Session, topic: str, keys: Sequence[str]) -> dict[str, int]:
    """Return the last offset of each of these partitions that has messages in the log."""
    select = (
        f"SELECT partition_key, `offset` FROM {LOG}{session.dialect.force_index('queue_messages_partition')} "
        "WHERE topic = %s AND partition_key = %s ORDER BY `offset` DESC LIMIT 1"
    )
    return dict(session.each(select, [(topic, key) for key in keys]))


def in_state(session: Session, ref: GroupRef, *, after: str | None, limit: int) -> list[str]:
    """Return the next partitions that have state rows of a group, in order of key."""
    hint = session.dialect.force_index("PRIMARY")
    return _keys(session, f"FROM {STATE}{hint} WHERE consumer_group = %s AND topic = %s", ref, after, limit)


def _keys(
    session: Session, rows_of: str, place: Sequence[Any], after: str | None, limit: int, since: str = ""
) -> list[str]:
    """Return distinct keys in index order, at a cost that grows with the partitions read, not with their rows.

    This is not a ``SELECT DISTINCT``: regardless of the LIMIT, both servers answered that from all rows of the topic
    (0.1 s for 200,000 rows, 5 s for 10 million), or from all of its partitions.
    """
    found: list[str] = []
    page = limit
    while len(found) < limit:
        above, parameters = _beyond(after, since)
        rows = session.rows(
            f"SELECT partition_key {rows_of}{above} ORDER BY partition_key LIMIT %s",
            (*place, *parameters, page),
        )
        keys = list(dict.fromkeys(key for (key,) in rows))
        found += keys
        if len(rows) < page:
            break
        after = keys[-1]
        # The next page starts after the last key: small pages skip large partitions, large pages read many small ones.
        if len(keys) * 2 >= page:
            page = min(limit, page * 2)
        elif len(keys) * 8 < page:
            page = max(1, page // 4)
    return found[:limit]


def _beyond(after: str | None, since: str) -> tuple[str, tuple[str, ...]]:
    """Return the condition, and its parameters, for the partitions after one, or from one on."""
    if after is not None:
        return " AND partition_key > %s", (after,)
    return (" AND partition_key >= %s", (since,)) if since else ("", ())
