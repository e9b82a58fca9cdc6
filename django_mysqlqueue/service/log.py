"""Reads of the log along an index: its topics, the ends of the log and of partitions, and counts between offsets."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from django_mysqlqueue.db.log_queries import all_topics as all_topics
from django_mysqlqueue.db.log_queries import distinct as distinct
from django_mysqlqueue.db.log_queries import end_of_log as end_of_log
from django_mysqlqueue.db.log_queries import first_since as first_since
from django_mysqlqueue.db.tables import LOG, OUTBOX, QUARANTINE
from django_mysqlqueue.models import CollectedTopic, ConsumerGroup
from django_mysqlqueue.names.keys import PARTITION_PREFIX, lane_of
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service import messages, partitions
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.sql.session import UNION_TERMS, Session, pieces

PUBLISHED_ID = "CASE WHEN m.original_id = '' THEN m.id ELSE m.original_id END"
"""SQL, with the log as ``m``, for the id that ``publish`` returned. Dead letters and redriven messages have others."""
NEWEST = 2000
"""Number of the newest messages that are searched for partitions beyond those that are read."""
WAITING = 2500
"""Number of the oldest rows of the outbox that are searched for topics."""


def at_offsets(
    session: Session,
    columns: str,
    offsets: Collection[int],
    condition: str = "",
    *,
    joins: str = "",
    before: Sequence[Any] = (),
    after: Sequence[Any] = (),
) -> list[Any]:
    """Return columns of the log as ``m`` at some offsets, as named tuples, without those that are not there.

    ``joins``: joins to further tables. ``before``, ``after``: the parameters of the columns and of the condition.
    """
    log = f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o{f' AND {condition}' if condition else ''}"
    return session.joined(f"SELECT {columns}", "o", offsets, f"{log} {joins}", before=before, after=after)


def publisher_keys(session: Session, partitions: Mapping[int, str]) -> dict[int, str | None]:
    """Return the keys with which messages were published, by offset; None: without one.

    Only hashed keys are read, from the log: of a message that it no longer has, the key is None.

    ``partitions``: the partition keys by offset.
    """
    hashed = [offset for offset, key in partitions.items() if lane_of(key).partition.startswith(PARTITION_PREFIX)]
    stored = dict(at_offsets(session, "m.`offset`, m.publisher_key", hashed))
    return {offset: messages.publisher_key(key, stored.get(offset)) for offset, key in partitions.items()}


def used(session: Session) -> list[str]:
    """Return all topics that have messages in the log or the outbox, or had some that GC has deleted, in order.

    If the outbox has more than ``WAITING`` rows, only the oldest are searched.
    """
    hint = session.dialect.force_index("PRIMARY")
    waiting = session.rows(
        f"SELECT topic FROM {OUTBOX}{hint} WHERE outbox_id > 0 ORDER BY outbox_id LIMIT %s", (WAITING,)
    )
    collected = CollectedTopic.objects.using(session.using).values_list("topic", flat=True)
    return sorted({*all_topics(session), *(topic for (topic,) in waiting), *collected})


def known(session: Session) -> list[str]:
    """Return all topics that operators may name, in order.

    They are those in use, in the quarantine, of groups, in ``TOPICS``, and of ``TASKS``.
    """
    of_groups = ConsumerGroup.objects.using(session.using).values_list("topic", flat=True)
    named = (*get_settings().topics.names(), *job_queues.topics())
    configured = [name for name in named if queue_alias(topic=name) == session.using]
    return sorted({*used(session), *quarantined(session), *of_groups, *configured})


def quarantined(session: Session) -> list[str]:
    """Return all topics that have messages in the quarantine, in order."""
    return all_topics(session, QUARANTINE, "queue_quarantine_topic")


class Ends:
    """The last offset of each partition of a topic, read once for all its groups.

    Up to ``most`` partitions are read (``partitions.last_offsets``), and in addition those of the newest messages.

    Args:
        session: the session.
        most: maximum number of partitions to read.
    """

    def __init__(self, session: Session, most: int) -> None:
        self._session = session
        self.most = most
        self._found: dict[str, tuple[dict[str, int], bool]] = {}

    def of(self, topic: str) -> tuple[dict[str, int], bool]:
        """Return the last offsets by partition key, and whether these are all partitions."""
        if topic not in self._found:
            self._found[topic] = self._read(topic)
        return self._found[topic]

    def _read(self, topic: str) -> tuple[dict[str, int], bool]:
        found, whole = partitions.last_offsets(self._session, topic, limit=self.most)
        if whole:
            return found, True
        for key, offset in newest(self._session, topic).items():
            found[key] = max(found.get(key, 0), offset)
        return found, False


def newest(session: Session, topic: str) -> dict[str, int]:
    """Return the partitions of a topic's messages among the newest ones of the log, with their last offsets."""
    rows = session.rows(
        "SELECT w.partition_key, w.place FROM (SELECT topic, partition_key, `offset` AS place "
        f"FROM {LOG}{session.dialect.force_index('PRIMARY')} WHERE `offset` > 0 "
        "ORDER BY `offset` DESC LIMIT %s) w "
        "WHERE w.topic = %s",
        (NEWEST, topic),
    )
    return {key: int(offset) for key, offset in sorted(rows, key=lambda row: row[1])}


def count_between(session: Session, topic: str, ranges: Mapping[str, tuple[int, int]], most: int) -> int:
    """Count messages of the log between two offsets of partitions, up to ``most`` in all.

    Only the counted entries of the index are read: partitions with many messages again, up to a higher number.
    """
    one = (
        f"SELECT %s AS k, COUNT(*) AS n FROM (SELECT 1 FROM {LOG}"
        f"{session.dialect.force_index('queue_messages_partition')} "
        "WHERE topic = %s AND partition_key = %s AND `offset` > %s AND `offset` <= %s LIMIT %s) m"
    )
    number = 0
    for piece in pieces(sorted(ranges), UNION_TERMS):
        keys = piece
        while keys:
            limit = (most - number) // len(keys) + 1
            counts = dict(session.each(one, [(key, topic, key, *ranges[key], limit) for key in keys]))
            if number + sum(counts.values()) >= most:
                return most
            keys = [key for key in keys if counts[key] == limit]
            number += sum(count for count in counts.values() if count < limit)
    return number
