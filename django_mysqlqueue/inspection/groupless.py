"""Topics that have messages but no consumer group, so that nothing handles them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.inspection import scheduled
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.service import groups, log_places, partitions
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.sql.session import Session

LOG = QueueMessage._meta.db_table


@dataclass(frozen=True, slots=True)
class GrouplessTopic:
    """A topic that has messages but no consumer group, and is not ``GROUPLESS``."""

    topic: str
    messages: Count
    """Number of messages in the log and in the outbox."""
    oldest_at: int | None
    """When the oldest message entered the log, in epoch milliseconds; None if the log has none, or the topic has too
    many partitions to search."""


def find(session: Session, in_log: Iterable[str], *, bounds: Bounds = PAGES) -> list[GrouplessTopic]:
    """Return the topics that have messages but no group, and are neither ``GROUPLESS`` nor DLQ topics, by name."""
    waiting = dict(scheduled.topics(session, scheduled_only=False, bounds=bounds))
    settings = get_settings()
    topics = [topic for topic in sorted({*in_log, *waiting}) if not settings.may_lack_groups(topic)]
    # Read groups after topics: a group that was registered before its topic's first message must not be missed.
    read = {ref.topic for ref in groups.registered_refs(session.using)} if topics else set()
    return [_look(session, topic, waiting.get(topic, Count(0)), bounds) for topic in topics if topic not in read]


def _look(session: Session, topic: str, waiting: Count, bounds: Bounds) -> GrouplessTopic:
    hint = session.dialect.force_index("queue_messages_partition")
    row = session.row(
        f"SELECT COUNT(*) FROM (SELECT 1 FROM {LOG}{hint} WHERE topic = %s LIMIT %s) w", (topic, bounds.count + 1)
    )
    assert row is not None  # noqa: S101  # an aggregate has one row
    return GrouplessTopic(topic, Count.up_to(bounds.count, int(row[0])) + waiting, _oldest(session, topic, bounds))


def _oldest(session: Session, topic: str, bounds: Bounds) -> int | None:
    """Return when the oldest message entered the log; None if there is none, or many partitions."""
    keys = partitions.all_in_log(session, topic, most=bounds.groupless_partitions) or []
    for first in log_places.in_partitions(session, topic, keys, 0, 1, newer=True):
        row = session.row(f"SELECT published_at FROM {LOG} WHERE `offset` = %s", (first,))
        return None if row is None else int(row[0])
    return None
