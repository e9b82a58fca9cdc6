"""The quarantine: messages of the outbox that the log refuses, for example because of a trigger.

The sequencer sets them aside, each alone, so that the log goes on. Nothing but an operator deletes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from django.db import Error, transaction

from django_mysqlqueue.db.columns import COPIED_COLUMNS
from django_mysqlqueue.db.tables import OUTBOX, QUARANTINE
from django_mysqlqueue.sql.session import Session

COLUMNS = ", ".join((*COPIED_COLUMNS, "deliver_at", "created_at"))
REQUEUED = COLUMNS.replace("coalesce_key, ", "")
"""Without the coalesce key: a message that comes late must not supersede a later one."""


def append_each(session: Session, append: Callable[[Sequence[int]], object], ids: Sequence[int]) -> int:
    """Append rows of the outbox to the log, and store those that it refuses in the quarantine.

    A chunk that fails is halved until the rows are found. Each half is appended after the one before it, so the
    messages of a partition keep their order.

    Returns:
        The number of rows that were refused. The caller deletes them from the outbox, as it does the others.
    """
    try:
        # A failed statement of several rows leaves none of them; the savepoint does not depend on the engine for it.
        with transaction.atomic(session.using):
            append(ids)
    except Error as error:
        if not session.dialect.refuses_row(error):
            raise
        reason = str(error)
    else:
        return 0
    if len(ids) > 1:
        half = len(ids) // 2
        return append_each(session, append, ids[:half]) + append_each(session, append, ids[half:])
    session.execute(
        f"INSERT INTO {QUARANTINE} ({COLUMNS}, reason) SELECT {COLUMNS}, %s FROM {OUTBOX} WHERE outbox_id = %s",
        (reason, ids[0]),
    )
    return 1


def in_due_order(session: Session, ids: Sequence[int]) -> list[int]:
    """Return scheduled rows of the outbox in the order in which they enter the log."""
    join = f"{session.dialect.join_to(OUTBOX, 's')} ON s.outbox_id = v.i"
    rows = session.joined("SELECT s.outbox_id, s.deliver_at, s.priority", "i", ids, join)
    return [row.outbox_id for row in sorted(rows, key=lambda row: (row.deliver_at, -row.priority, row.outbox_id))]


def topics(session: Session, ids: Sequence[int], how: str = "") -> dict[int, str]:
    """Return the topics of those messages that are in the quarantine, by primary key.

    ``how``: the end of the statement, to lock the rows.
    """
    join = f"{session.dialect.join_to(QUARANTINE, 's')} ON s.quarantine_id = v.i{how}"
    return dict(session.joined("SELECT s.quarantine_id, s.topic", "i", ids, join))


def requeue(session: Session, ids: Sequence[int]) -> int:
    """Move messages of the quarantine back into the outbox; return how many there were."""
    # Locked, so that two operators do not requeue one twice.
    found = list(topics(session, ids, session.dialect.for_update))
    for chunk in session.chunks(found):
        session.execute(
            f"INSERT INTO {OUTBOX} ({REQUEUED}) SELECT {REQUEUED} FROM {QUARANTINE}{session.force_index('PRIMARY')} "
            f"WHERE quarantine_id IN ({session.dialect.placeholders(len(chunk), '%s')}) ORDER BY quarantine_id",
            chunk,
        )
    return delete(session, found)


def delete(session: Session, ids: Sequence[int]) -> int:
    """Delete messages of the quarantine; return how many there were."""
    return session.delete(QUARANTINE, "i", sorted(ids), "s.quarantine_id = v.i")
