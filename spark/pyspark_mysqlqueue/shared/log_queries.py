# Generated from django_mysqlqueue/db/log_queries.py by tools/shared_modules.py.
"""Queries on the log that Django's side and Spark's side share, so that both give the same answers.

``service`` runs them through a ``Session``, the pipeline through a ``Database``. Placeholders are ``%s`` in both. This
module does not import Django, because Spark's executors do not have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pyspark_mysqlqueue.shared.tables import LOG, OFFSETS, SEQUENCER, SEQUENCER_ID, STATE

BY_PARTITION = "queue_messages_partition"
"""The log's index on (topic, partition_key, offset)."""
BY_DUE = "queue_delivery_state_due"
"""The index of delivery state that begins with (consumer_group, topic, acked)."""

FOR_GROUP = "m.target_group IN ('', %s)"
"""The condition for messages of the log (``m``) that are for all groups or for the group in the parameter."""


class Reader(Protocol):
    """The interface of a connection for these queries."""

    def rows(self, sql: str, parameters: Sequence[Any] = (), /) -> list[tuple[Any, ...]]:
        """Return all rows of a SELECT."""

    def force_index(self, name: str, /) -> str:
        """Return the hint, after a table's alias, that makes the optimizer use an index."""


# -- where things are ------------------------------------------------------------


def end_of_log(reader: Reader) -> int:
    """Return the highest offset that is or was in the log, or 0 if there was none. The log is final up to it.

    The sequencer stores it in the transaction that appends, so it remains when GC has emptied the log. The log itself
    is read too, in case the sequencer's row was lost or restored. This takes no lock, at any isolation level. A
    failover to a replica that lacks transactions may lower the value.
    """
    ((in_log, sequenced),) = reader.rows(
        f"SELECT COALESCE((SELECT MAX(m.`offset`) FROM {LOG} m), 0), "
        f"COALESCE((SELECT s.last_offset FROM {SEQUENCER} s WHERE s.id = {SEQUENCER_ID}), 0)"
    )
    return max(int(in_log), int(sequenced))


def first_since(reader: Reader, moment: int) -> int:
    """Return the lowest offset from which all messages entered the log at a given time or later.

    The log is in order of time, so this is a bisection. The offset may be in a gap before the first such message. It
    is one above the end of the log if all messages are older, or if GC has deleted all of them.
    """
    end = end_of_log(reader)
    ((first,),) = reader.rows(f"SELECT COALESCE(MIN(m.`offset`), %s) FROM {LOG} m", (end + 1,))
    low, high = int(first), end + 1
    newer = False
    while low < high:
        middle = (low + high) // 2
        found = reader.rows(
            f"SELECT m.`offset`, m.published_at FROM {LOG} m{reader.force_index('PRIMARY')} "
            "WHERE m.`offset` >= %s ORDER BY m.`offset` LIMIT 1",
            (middle,),
        )
        if not found or found[0][1] >= moment:
            high, newer = middle, newer or bool(found)
        else:
            low = int(found[0][0]) + 1
    return low if newer else end + 1


# -- what is there ---------------------------------------------------------------


def all_topics(reader: Reader, table: str = LOG, index: str = BY_PARTITION) -> list[str]:
    """Return all topics that have messages in the log or another table."""
    return distinct(reader, table, index, "topic")


def distinct(reader: Reader, table: str, index: str, column: str, *, most: int | None = None) -> list[str]:
    """Return the values of the first column of an index, in order, by one query along the index for each."""
    found: list[str] = []
    while most is None or len(found) < most:
        comparison, last = (">", found[-1]) if found else (">=", "")
        rows = reader.rows(
            f"SELECT {column} FROM {table}{reader.force_index(index)} "
            f"WHERE {column} {comparison} %s ORDER BY {column} LIMIT 1",
            (last,),
        )
        if not rows:
            break
        found.append(rows[0][0])
    return found


# -- lag ---------------------------------------------------------------------------
#
# The lag of a group is the number of messages that it has claimed and not settled, plus those that it has not claimed.
# Each function returns the FROM and WHERE of a SELECT.


def claimed(reader: Reader) -> str:
    """Return the SQL for a group's deliveries that are claimed and not settled.

    Parameters: group, topic, False.
    """
    return f"FROM {STATE}{reader.force_index(BY_DUE)} WHERE consumer_group = %s AND topic = %s AND acked = %s"


def unclaimed_of_partition(reader: Reader) -> str:
    """Return the SQL for the messages (``m``) of a partition that a group has not claimed.

    Parameters: topic, partition key, the offset up to which the group has claimed, group.
    """
    return (
        f"FROM {LOG} m{reader.force_index(BY_PARTITION)} WHERE m.topic = %s AND m.partition_key = %s "
        f"AND m.`offset` > %s AND {FOR_GROUP}"
    )


def unclaimed_of_topic(reader: Reader) -> str:
    """Return the SQL for the messages (``m``) of a topic that a group has not claimed. It reads the whole topic.

    Parameters: group, topic, the group's start offset, group.
    """
    return (
        f"FROM {LOG} m{reader.force_index(BY_PARTITION)} LEFT JOIN {OFFSETS} o{reader.force_index('PRIMARY')} "
        "ON o.consumer_group = %s AND o.topic = m.topic AND o.partition_key = m.partition_key "
        f"WHERE m.topic = %s AND m.`offset` > COALESCE(o.offset_claimed, %s) AND {FOR_GROUP}"
    )
