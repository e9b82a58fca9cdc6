"""Which topics there are, and where their partitions end; read along an index, from key to key."""

from __future__ import annotations

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.models import ConsumerGroup, QueueMessage
from django_mysqlqueue.service.transactions import Session

LOG = QueueMessage._meta.db_table
NEWEST = 2000
"""So many of the newest messages are looked through for partitions beyond those that are looked at."""


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


def exists(session: Session, topic: str) -> bool:
    """Whether the log has a message of a topic, a group is registered for it, or ``TOPICS`` names it."""
    if topic in get_settings().topics or ConsumerGroup.objects.using(session.using).filter(topic=topic).exists():
        return True
    hint = session.dialect.force_index("queue_messages_partition")
    return session.row(f"SELECT 1 FROM {LOG}{hint} WHERE topic = %s LIMIT 1", (topic,)) is not None


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
