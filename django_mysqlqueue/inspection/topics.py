"""Topics, with the number of their messages in the log and in the outbox."""

from __future__ import annotations

from dataclasses import dataclass

from django_mysqlqueue import naming
from django_mysqlqueue.models import OutboxMessage, QueueMessage
from django_mysqlqueue.sql.session import Session

LOG = QueueMessage._meta.db_table
OUTBOX = OutboxMessage._meta.db_table


@dataclass(frozen=True, slots=True)
class TopicOverview:
    """A topic. Counts are of messages and exact."""

    topic: str
    in_log: int
    partitions: int
    waiting: int
    """Due messages in the outbox, which the sequencer has not moved yet."""
    waiting_since: int | None
    """When the oldest of those was published or came due, in epoch milliseconds."""
    scheduled: int
    """Messages in the outbox that are scheduled for later."""
    is_dlq: bool


def read_topics(session: Session, now: int) -> list[TopicOverview]:
    """Read all topics with messages, by name. This walks the whole index of the log and the whole outbox."""
    log = {
        topic: (int(count), int(partitions))
        for topic, count, partitions in session.rows(
            f"SELECT topic, COUNT(*), COUNT(DISTINCT partition_key) FROM {LOG}"
            f"{session.dialect.force_index('queue_messages_partition')} GROUP BY topic"
        )
    }
    outbox = {
        topic: (int(due), since, int(total))
        for topic, due, since, total in session.rows(
            "SELECT topic, SUM(CASE WHEN deliver_at <= %s THEN 1 ELSE 0 END), "
            "MIN(CASE WHEN deliver_at <= 0 THEN created_at WHEN deliver_at <= %s THEN deliver_at END), "
            "COUNT(*) "
            f"FROM {OUTBOX} GROUP BY topic",
            (now, now),
        )
    }
    found = []
    for topic in sorted({*log, *outbox}):
        count, partitions = log.get(topic, (0, 0))
        due, since, total = outbox.get(topic, (0, None, 0))
        found.append(TopicOverview(topic, count, partitions, due, since, total - due, naming.is_dlq(topic)))
    return found
