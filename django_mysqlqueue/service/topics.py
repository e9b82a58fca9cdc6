"""Which topics there are, and where the log and their partitions end; read along an index, from key to key."""

from __future__ import annotations

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.models import CollectedTopic, ConsumerGroup, QueueMessage
from django_mysqlqueue.service.sequencing import MUTEX, MUTEX_ID, OUTBOX
from django_mysqlqueue.service.transactions import Session

LOG = QueueMessage._meta.db_table
NEWEST = 2000
"""So many of the newest messages are looked through for partitions beyond those that are looked at."""
WAITING = 2500
"""So many of the oldest rows of the outbox are looked through for topics."""


def end_of_log(session: Session) -> int:
    """The highest offset that is or was in the log, 0 if there was none: all up to it is final.

    The sequencer stores it in the transaction that appends, so it stays when GC
    has emptied the log. The log itself counts where the sequencer's row was lost
    or restored. It takes no lock, at any isolation level; a failover to a replica
    that lacks transactions may lower it.
    """
    row = session.row(
        f"SELECT {session.dialect.greatest}((SELECT COALESCE(MAX(m.`offset`), 0) FROM {LOG} m), "
        f"COALESCE((SELECT s.last_offset FROM {MUTEX} s WHERE s.id = {MUTEX_ID}), 0))"
    )
    assert row is not None  # noqa: S101  # a SELECT without FROM has one row
    return int(row[0])


def all_topics(session: Session) -> list[str]:
    """Every topic that has a message in the log, one look along the index for each."""
    hint = session.dialect.force_index("queue_messages_partition")
    found: list[str] = []
    while True:
        comparison, last = (">", found[-1]) if found else (">=", "")
        row = session.row(f"SELECT topic FROM {LOG}{hint} WHERE topic {comparison} %s ORDER BY topic LIMIT 1", (last,))
        if row is None:
            return found
        found.append(row[0])


def known(session: Session) -> list[str]:
    """Every topic that there is, in order: what operators may name.

    One that has messages in the log or the outbox, or had some that GC has
    deleted, one that a group is registered for, and one that ``TOPICS`` has
    settings for. (Of an outbox with more than ``WAITING`` rows, those of the
    oldest.)
    """
    hint = session.dialect.force_index("PRIMARY")
    waiting = session.rows(
        f"SELECT topic FROM {OUTBOX}{hint} WHERE outbox_id > 0 ORDER BY outbox_id LIMIT %s", (WAITING,)
    )
    return sorted(
        {
            *all_topics(session),
            *(topic for (topic,) in waiting),
            *CollectedTopic.objects.using(session.using).values_list("topic", flat=True),
            *ConsumerGroup.objects.using(session.using).values_list("topic", flat=True),
            *get_settings().topics,
        }
    )


class Ends:
    """The last offset of each partition of a topic, read once for all its groups.

    It is one look along an index for each partition, up to ``most`` of them, and
    those that the newest messages are in.
    """

    def __init__(self, session: Session, most: int) -> None:
        self._session = session
        self.most = most
        self._found: dict[str, tuple[dict[str, int], bool]] = {}

    def of(self, topic: str) -> tuple[dict[str, int], bool]:
        """Last offsets by partition key, and whether that is all of them."""
        if topic not in self._found:
            self._found[topic] = self._read(topic)
        return self._found[topic]

    def _read(self, topic: str) -> tuple[dict[str, int], bool]:
        # Both servers jump from key to key, and stop at the LIMIT, only if the whole prefix of the index is grouped
        # by and none of it is a constant: then one of them would read all of them into a temporary table.
        rows = self._session.rows(
            f"SELECT partition_key, MAX(`offset`) FROM {LOG}"
            f"{self._session.dialect.force_index('queue_messages_partition')} WHERE topic >= %s AND topic <= %s "
            "GROUP BY topic, partition_key LIMIT %s",
            (topic, topic, self.most + 1),
        )
        found = {key: int(last) for key, last in rows}
        if len(rows) <= self.most:
            return found, True
        newest = self._session.rows(
            "SELECT w.partition_key, w.place FROM (SELECT topic, partition_key, `offset` AS place "
            f"FROM {LOG}{self._session.dialect.force_index('PRIMARY')} WHERE `offset` > 0 "
            "ORDER BY `offset` DESC LIMIT %s) w "
            "WHERE w.topic = %s",
            (NEWEST, topic),
        )
        for key, offset in newest:
            found[key] = max(found.get(key, 0), int(offset))
        return found, False
