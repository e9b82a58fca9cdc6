"""What a group has not settled, by reading everything: to hold the package's own counts against."""

from __future__ import annotations

from django_mysqlqueue.models import ConsumerGroup, ConsumerOffset, DeliveryState, QueueMessage
from tests.support import invariants
from tests.support.filtering import is_for
from tests.support.internals import GroupRef, Session
from tests.support.tables import State, Tables

GROUPS = ConsumerGroup._meta.db_table
LOG = QueueMessage._meta.db_table
STATE = DeliveryState._meta.db_table
OFFSETS = ConsumerOffset._meta.db_table
SETTLED = State(acked=True)


def unsettled(session: Session, ref: GroupRef) -> tuple[int, int | None]:
    """How many messages in the log the group has not settled, and when the oldest took its place there."""
    start = f"(SELECT start_offset FROM {GROUPS} WHERE consumer_group = %s AND topic = %s)"
    row = session.row(
        f"SELECT COUNT(*), MIN(m.published_at) FROM {LOG} m{session.dialect.force_index('queue_messages_partition')} "
        f"{session.dialect.join_to(OFFSETS, 'o', left=True)} "
        "ON o.consumer_group = %s AND o.topic = m.topic AND o.partition_key = m.partition_key "
        f"WHERE m.topic = %s AND m.`offset` > COALESCE(o.offset_acked, {start}) AND m.target_group IN ('', %s) "
        f"AND NOT EXISTS (SELECT 1 FROM {STATE} d{session.dialect.force_index('PRIMARY')} "
        "WHERE d.consumer_group = %s AND d.topic = m.topic AND d.partition_key = m.partition_key "
        "AND d.message_offset = m.`offset` AND d.acked = %s)",
        (ref.group, ref.topic, *ref, ref.group, ref.group, True),
    )
    assert row is not None  # an aggregate has one row
    return int(row[0]), None if row[1] is None else int(row[1])


def unsettled_by_partition(session: Session, ref: GroupRef) -> dict[str, tuple[int, int]]:
    """For each partition with unsettled messages, how many there are, and the offset of the first."""
    start = f"(SELECT start_offset FROM {GROUPS} WHERE consumer_group = %s AND topic = %s)"
    return {
        key: (int(count), int(first))
        for key, count, first in session.rows(
            f"SELECT m.partition_key, COUNT(*), MIN(m.`offset`) FROM {LOG} m "
            f"{session.dialect.join_to(OFFSETS, 'o', left=True)} "
            "ON o.consumer_group = %s AND o.topic = m.topic AND o.partition_key = m.partition_key "
            f"WHERE m.topic = %s AND m.`offset` > COALESCE(o.offset_acked, {start}) AND m.target_group IN ('', %s) "
            f"AND NOT EXISTS (SELECT 1 FROM {STATE} d WHERE d.consumer_group = %s AND d.topic = m.topic "
            "AND d.partition_key = m.partition_key AND d.message_offset = m.`offset` AND d.acked = %s) "
            "GROUP BY m.partition_key",
            (ref.group, ref.topic, *ref, ref.group, ref.group, True),
        )
    }


def unsettled_beside_passed(tables: Tables, ref: GroupRef) -> tuple[int, int | None]:
    """The same for a group that has had filters: what was passed is not counted, though the watermark is before it."""
    found = [
        message.published_at
        for message in tables.log.values()
        if is_for(message, ref)
        and (
            message.offset > invariants.offsets_of(tables, ref, message.key).claimed
            or not tables.state.get((ref, message.key, message.offset), SETTLED).acked
        )
    ]
    return len(found), min(found, default=None)
