"""Questions about the log that Django's side and Spark's side must answer alike, so from one SQL text.

``service`` asks them through a ``Session``, the pipeline through a ``Database``. Imports no Django: Spark's executors
need none. Placeholders are ``%s`` for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

LOG = "queue_messages"
SEQUENCER = "queue_sequencer"
SEQUENCER_ID = 1
"""The one row of the sequencer."""
OFFSETS = "queue_offsets"
STATE = "queue_delivery_state"
BY_PARTITION = "queue_messages_partition"
"""The log's index of (topic, partition_key, offset)."""
BY_DUE = "queue_delivery_state_due"
"""The index of delivery state that begins with (consumer_group, topic, acked)."""

FOR_GROUP = "m.target_group IN ('', %s)"
"""Messages of the log (``m``) that are for all groups, or for the one of the parameter."""


class Reader(Protocol):
    """A connection, as far as these questions need one."""

    def rows(self, sql: str, parameters: Sequence[Any] = (), /) -> list[tuple[Any, ...]]:
        """All rows of a SELECT."""

    def force_index(self, name: str, /) -> str:
        """The hint after a table's alias that keeps the optimizer on one index."""


# -- where things are ------------------------------------------------------------


def end_of_log(reader: Reader) -> int:
    """The highest offset that is or was in the log, 0 if there was none: all up to it is final.

    The sequencer stores it in the transaction that appends, so it stays when GC
    has emptied the log. The log itself counts where the sequencer's row was lost
    or restored. It takes no lock, at any isolation level; a failover to a replica
    that lacks transactions may lower it.
    """
    ((in_log, sequenced),) = reader.rows(
        f"SELECT COALESCE((SELECT MAX(m.`offset`) FROM {LOG} m), 0), "
        f"COALESCE((SELECT s.last_offset FROM {SEQUENCER} s WHERE s.id = {SEQUENCER_ID}), 0)"
    )
    return max(int(in_log), int(sequenced))


def first_since(reader: Reader, moment: int) -> int:
    """The lowest offset from which on all messages entered the log at a moment (epoch milliseconds) or later.

    The log is in order of time, so this is a bisection. The offset may be that of a gap before the first such message.
    It is one above the end of the log if all messages are older, or GC has deleted all of them.
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


# -- lag ---------------------------------------------------------------------------
#
# What a group has not settled is what it has claimed and not settled, and what it has not claimed. Each of these is the
# FROM and WHERE of a SELECT.


def claimed(reader: Reader) -> str:
    """A group's deliveries that are claimed and not settled.

    Parameters: group, topic, False.
    """
    return f"FROM {STATE}{reader.force_index(BY_DUE)} WHERE consumer_group = %s AND topic = %s AND acked = %s"


def unclaimed_of_partition(reader: Reader) -> str:
    """Messages (``m``) of a partition that a group has not claimed.

    Parameters: topic, partition key, the offset up to which the group has claimed, group.
    """
    return (
        f"FROM {LOG} m{reader.force_index(BY_PARTITION)} WHERE m.topic = %s AND m.partition_key = %s "
        f"AND m.`offset` > %s AND {FOR_GROUP}"
    )


def unclaimed_of_topic(reader: Reader) -> str:
    """Messages (``m``) of a topic that a group has not claimed. This reads all that is in the topic.

    Parameters: group, topic, the group's start offset, group.
    """
    return (
        f"FROM {LOG} m{reader.force_index(BY_PARTITION)} LEFT JOIN {OFFSETS} o{reader.force_index('PRIMARY')} "
        "ON o.consumer_group = %s AND o.topic = m.topic AND o.partition_key = m.partition_key "
        f"WHERE m.topic = %s AND m.`offset` > COALESCE(o.offset_claimed, %s) AND {FOR_GROUP}"
    )
