"""Operations on messages that the log has refused: requeue, delete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Unpack

from django.db import Error
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.arguments import spelled_out
from django_mysqlqueue.db.tables import LOG, OUTBOX, QUARANTINE
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.operations.arguments import offsets_of
from django_mysqlqueue.operations.declaring import How, operating
from django_mysqlqueue.operations.limits import COUNTED, LIMITS
from django_mysqlqueue.operations.lookups import check_topic
from django_mysqlqueue.operations.results import Result, number_said, result_of
from django_mysqlqueue.service import audit, quarantine
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, flat, run

REQUEUE = audit.Action("requeue", gettext_lazy("Requeue quarantined messages"), audit.MESSAGES)
DELETE = audit.Action("delete quarantined", gettext_lazy("Delete quarantined messages"), audit.MESSAGES)


@spelled_out
def requeue_quarantined(rows: Sequence[int] | None = None, *, topic: str | None = None, **how: Unpack[How]) -> Result:
    """Move messages that the log has refused back into the outbox, after you have fixed the cause.

    They enter the log after the messages that did so in the meantime, and have no coalesce key. The summary counts
    those that no group will receive, among the first 10,000: they have expired, or have the id of a message that is in
    the log, in the outbox or among them, so that they are dropped as duplicates. Messages that GC has deleted from the
    log are not known.

    Args:
        rows: their primary keys in ``queue_quarantine``. All of them are moved, or none.
        topic: instead of the rows: all messages of this topic that are in the quarantine now. They are moved in several
            transactions, each with an entry in the audit log.
        using: alias of the queue's database (default: that of the topic, else ``MYSQLQUEUE["DATABASE"]``, else the
            router's choice).
        dry_run: change nothing; return what would be changed. For a topic, up to 10,000 are counted.

    Raises:
        OperationRefused: none of the messages is in the quarantine, there is no such topic, or the outbox refuses one
            of the messages. Those of a topic that were moved before that stay in the outbox.
    """
    said = _("Messages that will be moved back into the outbox: %(number)s.")
    if not how.get("dry_run"):
        said = _("Messages moved back into the outbox: %(number)s.")
    return _change(REQUEUE, quarantine.requeue, said, rows, topic, how)


@spelled_out
def delete_quarantined(rows: Sequence[int] | None = None, *, topic: str | None = None, **how: Unpack[How]) -> Result:
    """Delete messages that the log has refused. No consumer group receives them.

    Args:
        rows: their primary keys in ``queue_quarantine``.
        topic: instead of the rows: all messages of this topic that are in the quarantine now. They are deleted in
            several transactions, each with an entry in the audit log.
        using: alias of the queue's database (default: that of the topic, else ``MYSQLQUEUE["DATABASE"]``, else the
            router's choice).
        dry_run: change nothing; return what would be changed. For a topic, up to 10,000 are counted.

    Raises:
        OperationRefused: none of the messages is in the quarantine, or there is no such topic.
    """
    said = _("Messages that will be deleted from the quarantine: %(number)s. No group receives them.")
    if not how.get("dry_run"):
        said = _("Messages deleted from the quarantine: %(number)s.")
    return _change(DELETE, quarantine.delete, said, rows, topic, how)


def _change(
    action: audit.Action,
    change: Callable[[Session, Sequence[int]], int],
    said: str,
    rows: Sequence[int] | None,
    topic: str | None,
    how: How,
) -> Result:
    if (rows is None) == (topic is None):
        raise OperationRefused("rows or topic: pass exactly one of them")
    names = {} if topic is None else {"topic": topic}
    with operating(how, **names) as (alias, by, dry_run):
        session = Session(alias)
        if topic is None:
            planned = offsets_of(rows, "rows")
            pages = iter([planned])
            if dry_run:
                planned = list(quarantine.topics(session, planned))
        else:
            pages = _of_topic(session, topic, LIMITS.dead_letters)
            planned = next(_of_topic(session, topic, COUNTED), [])
            if not planned:
                check_topic(alias, topic)
                raise OperationRefused(f"The quarantine has no messages of topic {topic!r}.")
        lost = _lost_texts(session, planned) if action is REQUEUE else []
        number = len(planned)
        if not dry_run:
            number = 0
            for page in pages:
                number += run(alias, partial(_recorded, action, change, page, topic or "", by))
        if not number:
            raise OperationRefused("None of these messages is in the quarantine.")
        said %= {"number": number_said(number, dry_run=dry_run)}
        return result_of(Result, action, number, said, *lost, dry_run=dry_run)


def _recorded(
    action: audit.Action,
    change: Callable[[Session, Sequence[int]], int],
    rows: Sequence[int],
    topic: str,
    by: By,
    session: Session,
) -> int:
    try:
        number = change(session, rows)
    except Error as error:
        if not session.dialect.refuses_row(error):
            raise
        raise OperationRefused(f"The outbox refuses one of these messages: {error}") from error
    if number:
        audit.once(session, action, number, GroupRef("", topic), **by)
    return number


def _of_topic(session: Session, topic: str, size: int) -> Iterator[list[int]]:
    """Yield the primary keys of a topic's messages in pages, without those that are refused meanwhile."""
    source = f"FROM {QUARANTINE}{session.force_index('queue_quarantine_topic')} WHERE topic = %s"
    newest = session.row(f"SELECT quarantine_id {source} ORDER BY quarantine_id DESC LIMIT 1", (topic,))
    last, end = 0, 0 if newest is None else newest[0]
    while last < end:
        page = flat(
            session.rows(
                f"SELECT quarantine_id {source} AND quarantine_id > %s AND quarantine_id <= %s "
                "ORDER BY quarantine_id LIMIT %s",
                (topic, last, end, size),
            )
        )
        if not page:
            return
        yield page
        last = page[-1]


def _lost_texts(session: Session, rows: Sequence[int]) -> list[str]:
    """Return sentences about those messages that no group will receive after a requeue."""
    duplicates = expired = 0
    chosen: set[tuple[str, ...]] = set()
    for chunk in session.chunks(rows):
        found = session.rows(
            f"SELECT s.topic, s.partition_key, s.id, s.expires_at <= {session.dialect.now_ms}, m.`offset` "
            f"FROM {session.dialect.rows(('i',), len(chunk))} "
            f"{session.dialect.join_to(QUARANTINE, 's')} ON s.quarantine_id = v.i "
            f"{session.dialect.join_to(LOG, 'm', 'queue_messages_id', left=True)} "
            "ON m.topic = s.topic AND m.partition_key = s.partition_key AND m.id = s.id",
            chunk,
        )
        waiting = _in_outbox(session, [row[2] for row in found])
        for *place, is_expired, offset in found:
            if offset is not None or tuple(place) in waiting or tuple(place) in chosen:
                duplicates += 1
            elif is_expired:
                expired += 1
            chosen.add(tuple(place))
    texts = (
        (
            duplicates,
            _("Will be dropped as duplicates, since their topic has a message with the same key and id: %(number)s."),
        ),
        (expired, _("Have expired, so that no group will receive them: %(number)s.")),
    )
    return [text % {"number": f"{number:,}"} for number, text in texts if number]


def _in_outbox(session: Session, ids: Sequence[str]) -> set[tuple[str, ...]]:
    """Return topic, partition key and id of the messages in the outbox with some ids. This reads its whole index."""
    found: set[tuple[str, ...]] = set()
    for chunk in session.chunks(sorted(set(ids))):
        found |= {
            tuple(row)
            for row in session.rows(
                f"SELECT topic, partition_key, id FROM {OUTBOX}{session.force_index('queue_outbox_due')} "
                f"WHERE deliver_at >= 0 AND id IN ({session.dialect.placeholders(len(chunk), '%s')})",
                chunk,
            )
        }
    return found
