"""The messages that the log has refused."""

from __future__ import annotations

from dataclasses import dataclass

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.quarantine import QUARANTINE
from django_mysqlqueue.sql.session import Session


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """A message that the log has refused. Times are in epoch milliseconds of the database's clock."""

    quarantine_id: int
    """Its primary key in the quarantine, in the order in which they came."""
    topic: str
    partition_key: str
    message_id: str
    size: int
    """The length of its payload in bytes."""
    created_at: int
    """When the publisher wrote it."""
    quarantined_at: int
    reason: str
    """The error of the database."""


@checked()
def list_quarantined(
    *, topic: str | None = None, after: int = 0, limit: int = 50, using: str | None = None
) -> tuple[QuarantinedRow, ...]:
    """List the messages that the log has refused, the oldest first, without their payloads.

    Args:
        topic: only messages of this topic.
        after: only messages after this ``quarantine_id``.
        limit: maximum number of messages.
        using: alias of the database (default: that of the topic, else ``MYSQLQUEUE["DATABASE"]``, else the router's
            choice).

    Raises:
        InvalidMessage: ``using`` is not an alias in ``DATABASES``.
        django.db.Error: the database refuses or does not answer.
    """
    session = Session(queue_alias(using, topic=topic))
    index, condition = "PRIMARY", "quarantine_id > %s"
    values: tuple[object, ...] = (after, limit)
    if topic is not None:
        index, condition, values = "queue_quarantine_topic", f"topic = %s AND {condition}", (topic, *values)
    rows = session.rows(
        "SELECT quarantine_id, topic, partition_key, id, size, created_at, quarantined_at, reason "
        f"FROM {QUARANTINE}{session.force_index(index)} WHERE {condition} ORDER BY quarantine_id LIMIT %s",
        values,
    )
    return tuple(QuarantinedRow(*row) for row in rows)
