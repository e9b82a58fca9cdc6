"""Lists of scheduled messages, along the index of their times, with a bounded number of rows read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.db.tables import DEBOUNCED, OUTBOX
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.names.keys import public_coalesce_key
from django_mysqlqueue.names.rules import JOB_GROUP
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.service import messages, payloads, scheduling
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.job_results import task_of
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.sequencing import DUE_ORDER
from django_mysqlqueue.sql.base import lane_partition
from django_mysqlqueue.sql.session import Session, built

START = (0, 0, 0)
"""Before all scheduled messages."""
READ_BYTES = 20_001
"""Maximum number of bytes of a payload that a list reads."""


@dataclass(frozen=True, slots=True)
class ScheduledListing:
    """A page of scheduled messages."""

    rows: tuple[ScheduledMessage, ...]
    """Messages in order of their time."""
    after: tuple[int, int, int] | None
    """The argument ``after`` for the next page; None if this is the last."""
    whole: bool
    """True if the page is full, or all scheduled messages after its start were read."""


@dataclass(frozen=True, slots=True)
class ScheduledContent:
    """The content of a scheduled message."""

    payload: bytes
    """At most its first ``READ_BYTES`` bytes."""
    metadata: dict[str, Any]
    expires_at: int | None
    """When it expires, in epoch milliseconds; None: never."""


@checked()
def list_scheduled(
    *,
    topic: str | None = None,
    task: str | None = None,
    after: tuple[int, int, int] | None = None,
    limit: int = 50,
    using: str | None = None,
    bounds: Bounds = PAGES,
) -> ScheduledListing:
    """List scheduled messages in order of their time, without their payloads.

    If ``topic`` or ``task`` is given, their messages are searched for among the next ``bounds.scheduled`` messages of
    all topics, so a page may have fewer messages than the limit although there are more.

    Args:
        topic: only messages of this topic.
        task: only jobs of the task with this dotted path.
        after: the attribute ``after`` of the previous page.
        limit: maximum number of messages.
        using: alias of the database (default: that of the topic, else of the queue).
        bounds: limits of what is read.
    """
    session = Session(queue_alias(using, topic=topic))
    source, parameters = _behind(session, after or START)
    if topic is None and task is None:
        sql = f"SELECT {COLUMNS.format(table=OUTBOX)} {source} ORDER BY {DUE_ORDER} LIMIT %s"
        found = [_message(row) for row in session.named(sql, (*parameters, limit + 1))]
        more = len(found) > limit
        return ScheduledListing(tuple(found[:limit]), _place(found[limit - 1]) if more else None, whole=True)
    condition, values = _condition(session, topic, task)
    rows = session.rows(
        f"SELECT w.deliver_at, -w.priority, w.outbox_id FROM "
        f"(SELECT deliver_at, priority, outbox_id, topic, partition_key {source} ORDER BY {DUE_ORDER} LIMIT %s) w "
        f"WHERE {condition}",
        (*parameters, bounds.scheduled, *values),
    )
    places = sorted(rows)
    shown = tuple(_by_id(session, [place[-1] for place in places[:limit]]))
    if len(places) > limit:
        return ScheduledListing(shown, places[limit - 1], whole=True)
    end: Any = session.row(
        f"SELECT deliver_at, -priority, outbox_id {source} ORDER BY {DUE_ORDER} LIMIT 1 OFFSET {bounds.scheduled - 1}",
        parameters,
    )
    return ScheduledListing(shown, end, whole=end is None)


def _condition(session: Session, topic: str | None, task: str | None) -> tuple[str, list[str]]:
    """Return a condition on rows of a topic, of the jobs of a task, or of both, and its parameters."""
    if task is None:
        return "topic = %s", [topic or ""]
    # The key of a job is its task, that of other messages may look like it.
    queues = [one for one in (job_queues.topics() if topic is None else [topic]) if job_queues.is_queue(one)] or [""]
    placeholders = session.dialect.placeholders(len(queues), "%s")
    return f"topic IN ({placeholders}) AND {lane_partition('partition_key')} = %s", [*queues, task]


def _place(row: ScheduledMessage) -> tuple[int, int, int]:
    return row.deliver_at, -row.priority, row.outbox_id


def _behind(session: Session, start: tuple[int, int, int]) -> tuple[str, tuple[int, ...]]:
    """Return FROM and WHERE for scheduled messages after a position, and their parameters."""
    at, rank, last = start
    hint = session.dialect.force_index("queue_outbox_due")
    source = (
        f"FROM {OUTBOX}{hint} WHERE deliver_at >= %s AND deliver_at > 0 "
        "AND (deliver_at > %s OR -priority > %s OR (-priority = %s AND outbox_id > %s))"
    )
    return source, (at, at, rank, rank, last)


def _by_id(session: Session, ids: Iterable[int]) -> list[ScheduledMessage]:
    joins = f"{session.dialect.join_to(OUTBOX, 's')} ON s.outbox_id = v.i AND s.deliver_at > 0"
    rows = session.joined(f"SELECT {COLUMNS.format(table='s')}", "i", list(ids), joins)
    return sorted(map(_message, rows), key=_place)


COLUMNS = (
    "{table}.outbox_id, {table}.topic, {table}.partition_key AS `key`, {table}.priority, {table}.id AS message_id, "
    "{table}.size, {table}.deliver_at, {table}.created_at, "
    f"COALESCE((SELECT d.coalesce_key FROM {DEBOUNCED} d WHERE d.outbox_id = {{table}}.outbox_id), '') AS coalesce_key"
)
"""Columns of a ``ScheduledMessage``."""


def _message(row: Any) -> ScheduledMessage:
    return built(
        ScheduledMessage,
        row,
        coalesce_key=public_coalesce_key(row.key, row.coalesce_key),
        task=task_of(GroupRef(JOB_GROUP, row.topic), row.key),
    )


def with_id(session: Session, topic: str, message_id: str) -> list[ScheduledMessage]:
    """Return the scheduled messages of a topic with an id, which is unique within a key, in order of their time."""
    return _by_id(session, list(scheduling.find(session, [topic], [message_id])))


def topics(session: Session, *, scheduled_only: bool = True, bounds: Bounds = PAGES) -> list[tuple[str, Count]]:
    """Return the topics of the next ``bounds.scheduled`` messages, with or without a delay, and their numbers."""
    hint = session.dialect.force_index("queue_outbox_due")
    rows = session.rows(
        f"SELECT w.topic, COUNT(*) FROM (SELECT topic FROM {OUTBOX}{hint} WHERE deliver_at > %s "
        f"ORDER BY {DUE_ORDER} LIMIT %s) w GROUP BY w.topic",
        (0 if scheduled_only else -1, bounds.scheduled + 1),
    )
    exact = sum(number for _, number in rows) <= bounds.scheduled
    return sorted((topic, Count(number, exact).capped(bounds.scheduled)) for topic, number in rows)


def contents(session: Session, ids: Sequence[int]) -> dict[int, ScheduledContent]:
    """Return the content of scheduled messages by row id, without those that no longer exist."""
    select = "SELECT s.outbox_id, SUBSTR(s.payload, 1, %s), s.metadata, s.expires_at"
    joins = f"{session.dialect.join_to(OUTBOX, 's')} ON s.outbox_id = v.i"
    return {
        row_id: ScheduledContent(payloads.content(payload), messages.decode_metadata(metadata), expires_at)
        for row_id, payload, metadata, expires_at in session.joined(select, "i", ids, joins, before=[READ_BYTES])
    }


def topics_of(session: Session, ids: Sequence[int]) -> set[str]:
    """Return the topics of scheduled messages, without those that no longer exist."""
    joins = f"{session.dialect.join_to(OUTBOX, 's')} ON s.outbox_id = v.i"
    return {topic for (topic,) in session.joined("SELECT s.topic", "i", ids, joins)}


@dataclass(frozen=True, slots=True)
class ScheduledMessage:
    """A message that waits in the outbox until it is due."""

    outbox_id: int
    """Primary key of its row."""
    topic: str
    key: str
    """The partition key."""
    priority: int
    message_id: str
    size: int
    """Size of its payload in bytes."""
    deliver_at: int
    """When it is due, in epoch milliseconds."""
    created_at: int
    """When it was published, in epoch milliseconds."""
    coalesce_key: str
    """The coalesce key by which it is debounced: a later message with this key replaces it; empty if it is not."""
    task: str
    """The path of the task of a job; empty for other messages."""


def first_scheduled(using: str, *, topic: str | None, task: str | None, limit: int) -> list[ScheduledMessage]:
    """Return the next scheduled messages, of all or of a topic or a task, however many others are before them."""
    found: list[ScheduledMessage] = []
    after: tuple[int, int, int] | None = START
    while after is not None and len(found) < limit:
        page = list_scheduled(topic=topic, task=task, after=after, limit=limit - len(found), using=using)
        found += page.rows
        after = page.after
    return found
