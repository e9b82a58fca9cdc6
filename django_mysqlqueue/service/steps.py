"""What seek and drop share: operations on a consumer group that take several transactions.

Between two of them a process may be frozen for any time, while somebody else
runs the same operation to its end. So each step checks, under the group row's
lock, that its own operation is still the one under way. It compares the id of the
operation's record, which is never used again. What the group looks like (paused,
at this start offset) would not do: it may come back to what it was.
"""

from __future__ import annotations

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import DeliveryState
from django_mysqlqueue.service import audit
from django_mysqlqueue.service.groups import Fence, GroupRef, Locked
from django_mysqlqueue.service.transactions import Session, flat
from django_mysqlqueue.service.watermarks import BY_ROW

STATE = DeliveryState._meta.db_table
CHUNK = 1000
"""State rows of one transaction."""
LOCKED_PAUSE = 0.05
"""Seconds to wait for rows that an atomic handler has locked."""


def begin(session: Session, ref: GroupRef, found: Locked, action: str, *, by: str, detail: str = "") -> int:
    """Puts an operation on record; one of the group that has not ended is stopped, and its record says so.

    Returns:
        The operation's id: to be stored in the group row, with ``paused``, in the same transaction.
    """
    operation = audit.begin(session, action, by=by, group=ref.group, topic=ref.topic, detail=detail)
    if found.operation:
        audit.stop(session, found.operation, f"stopped: a {action} by {by or 'somebody'} took over")
    return operation


def refuse_stopped(ref: GroupRef, operation: int, found: Fence | Locked | None) -> None:
    """Stops an operation that is not under way any more.

    Args:
        found: the group row, under its lock; None: the group is gone. It is paused as long as the operation is under
            way: older code, which does not know the column ``operation``, may have ended it with a seek of its own.

    Raises:
        OperationRefused: another seek or drop of the group has begun since, or the group was dropped.
    """
    if found is None or found.operation != operation or not found.paused:
        raise OperationRefused(
            f"Another seek or drop of the group {ref.group!r} of {ref.topic!r} has begun since this one did: "
            "this one has stopped."
        )


def delete_states(session: Session, ref: GroupRef, operation: int) -> int | None:
    """Deletes some of a group's state rows by primary key; returns how many, or None when there are no more.

    Nothing is waited for. Rows that an atomic handler has locked are left for the next step: its transaction
    commits its ack or rolls back in a moment. Waiting for them here would hold the group row, and the rows that
    are deleted already, for as long as the handler takes.
    """
    rows = session.rows(
        f"SELECT partition_key, message_offset FROM {STATE}{session.dialect.force_index('PRIMARY')} "
        "WHERE consumer_group = %s AND topic = %s ORDER BY partition_key, message_offset LIMIT %s",
        (*ref, CHUNK),
    )
    if not rows:
        return None
    deleted = 0
    for chunk in session.chunks(rows):
        free = session.rows(
            f"SELECT s.partition_key, s.message_offset FROM {session.dialect.rows(('k', 'o'), len(chunk))} "
            f"{session.dialect.join_to(STATE, 's')} ON {BY_ROW}{session.dialect.skip_locked}",
            (*flat(chunk), *ref),
        )
        if free:
            deleted += session.execute(
                session.dialect.delete_joined(STATE, ("k", "o"), len(free), BY_ROW), (*flat(sorted(free)), *ref)
            )
    audit.add(session, operation, deleted)
    return deleted
