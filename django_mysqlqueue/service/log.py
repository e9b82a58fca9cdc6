"""The log's topics, where it and their partitions end, and what stands between two offsets; all along an index."""

from __future__ import annotations

from collections.abc import Mapping

from django_mysqlqueue import log_queries
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.models import CollectedTopic, ConsumerGroup, QueueMessage
from django_mysqlqueue.service.sequencing import OUTBOX
from django_mysqlqueue.sql.session import UNION_TERMS, Session, flat

LOG = QueueMessage._meta.db_table
PUBLISHED_ID = "CASE WHEN m.original_id = '' THEN m.id ELSE m.original_id END"
"""SQL, with the log as ``m``: the id that ``publish`` returned. Dead letters and what is redriven have others."""
NEWEST = 2000
"""So many of the newest messages are looked through for partitions beyond those that are looked at."""
WAITING = 2500
"""So many of the oldest rows of the outbox are looked through for topics."""


def end_of_log(session: Session) -> int:
    """The highest offset that is or was in the log, 0 if there was none: all up to it is final."""
    return log_queries.end_of_log(session)


def first_since(session: Session, moment: int) -> int:
    """The lowest offset from which on all messages entered the log at a moment (epoch milliseconds) or later.

    It is one above the end of the log if all messages are older, or GC has deleted all of them.
    """
    return log_queries.first_since(session, moment)


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


def used(session: Session) -> list[str]:
    """Every topic that has messages in the log or the outbox, or had some that GC has deleted, in order.

    Of an outbox with more than ``WAITING`` rows, the topics of the oldest.
    """
    hint = session.dialect.force_index("PRIMARY")
    waiting = session.rows(
        f"SELECT topic FROM {OUTBOX}{hint} WHERE outbox_id > 0 ORDER BY outbox_id LIMIT %s", (WAITING,)
    )
    collected = CollectedTopic.objects.using(session.using).values_list("topic", flat=True)
    return sorted({*all_topics(session), *(topic for (topic,) in waiting), *collected})


def known(session: Session) -> list[str]:
    """Every topic that operators may name, in order: those in use, those of groups, those that ``TOPICS`` has."""
    of_groups = ConsumerGroup.objects.using(session.using).values_list("topic", flat=True)
    return sorted({*used(session), *of_groups, *get_settings().topics})


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


def count_between(session: Session, topic: str, ranges: Mapping[str, tuple[int, int]], most: int) -> dict[str, int]:
    """Counts messages in the log: partition key → (above, up to) → how many, at most ``most`` for each.

    It reads what it counts of the index, and nothing else.
    """
    one = (
        f"SELECT %s AS k, COUNT(*) AS n FROM (SELECT 1 FROM {LOG}"
        f"{session.dialect.force_index('queue_messages_partition')} "
        "WHERE topic = %s AND partition_key = %s AND `offset` > %s AND `offset` <= %s LIMIT %s) m"
    )
    found: dict[str, int] = {}
    items = sorted(ranges.items())
    for start in range(0, len(items), UNION_TERMS):
        piece = items[start : start + UNION_TERMS]
        sql = " UNION ALL ".join(f"SELECT * FROM ({one}{number}) p{number}" for number in range(len(piece)))
        found.update(session.rows(sql, flat((key, topic, key, above, upto, most) for key, (above, upto) in piece)))
    return found
