"""What seek and drop share: operations on a consumer group that take several transactions.

Between two of them a process may be frozen for any time, while somebody else
runs the same operation to its end. So each step checks, under the group row's
lock, that its own operation is still the one under way (``refuse_stopped``). It
compares the id of the operation's record, which is never used again. What the group
looks like (paused, at this start offset) would not do: it may come back to what it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import DeliveryState
from django_mysqlqueue.operations.limits import LIMITS, Limits
from django_mysqlqueue.service import audit
from django_mysqlqueue.service.groups import Fence, Locked
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.watermarks import BY_ROW
from django_mysqlqueue.sql.session import Session, flat, run

STATE = DeliveryState._meta.db_table
LOCKED_PAUSE = 0.05
"""Seconds between two attempts to delete rows that an atomic handler has locked."""


def begin(
    session: Session, ref: GroupRef, found: Locked, action: str, *, actor: str, reason: str = "", detail: str = ""
) -> int:
    """Puts an operation on record; one of the group that has not ended is stopped, and its record says so.

    Returns:
        The operation's id: to be stored in the group row, with ``paused``, in the same transaction.
    """
    operation = audit.begin(
        session, action, actor=actor, reason=reason, group=ref.group, topic=ref.topic, detail=detail
    )
    if found.operation:
        audit.stop(session, found.operation, f"stopped: a {action} by {actor or 'somebody'} took over")
    return operation


class Stopped(OperationRefused):
    """The operation is not the one under way any more."""


def refuse_stopped(ref: GroupRef, operation: int, found: Fence | Locked | None) -> None:
    """Stops an operation that is not under way any more.

    Args:
        found: the group row, under its lock; None: the group is gone. Code of an earlier version does not know the
            column ``operation``, and leaves it as it is when it ends a seek; ``after_seek`` is empty then.

    Raises:
        Stopped: another seek or drop of the group has begun or ended since, or the group was dropped.
    """
    if found is None or found.operation != operation or not found.after_seek:
        raise Stopped(
            f"This seek or drop of the group {ref.group!r} of {ref.topic!r} was stopped: "
            "another one has started or ended since, or the group was dropped."
        )


def delete_all(
    using: str,
    ref: GroupRef,
    delete: Callable[[Session], int | None],
    progress: Callable[[int], object],
    limits: Limits = LIMITS,
) -> int:
    """Deletes a group's rows, one transaction after another.

    Args:
        delete: deletes some of them and returns how many, or None when there are no more.
        progress: called after each transaction with the number of rows that it deleted.

    Returns:
        How many rows were deleted.

    Raises:
        OperationRefused: for ``Limits.locked_wait`` seconds other transactions have held locks on all that is left.
    """
    total = 0
    locked_since: float | None = None
    while (deleted := run(using, delete)) is not None:
        total += deleted
        progress(deleted)
        if deleted:
            locked_since = None
            continue
        now = time.monotonic()
        locked_since = now if locked_since is None else locked_since
        if now - locked_since > limits.locked_wait:
            raise OperationRefused(_locked_text(Session(using), ref, limits.locked_wait))
        time.sleep(LOCKED_PAUSE)
    return total


def _locked_text(session: Session, ref: GroupRef, waited: float) -> str:
    row = session.row(
        f"SELECT message_offset, partition_key, delivered_by FROM {STATE}{session.dialect.force_index('PRIMARY')} "
        "WHERE consumer_group = %s AND topic = %s ORDER BY partition_key, message_offset LIMIT 1",
        ref,
    )
    example = "" if row is None else f" (offset {row[0]} in partition {row[1]!r}, claimed by {row[2] or 'nobody'})"
    return (
        f"Other transactions have locked deliveries of the group {ref.group!r} of {ref.topic!r} for "
        f"{waited:g} s{example}. The group is paused; run this again when they have ended."
    )


def delete_states(session: Session, ref: GroupRef, operation: int, limits: Limits = LIMITS) -> int | None:
    """Deletes some of a group's state rows by primary key; returns how many, or None when there are no more.

    Nothing is waited for. Rows that an atomic handler has locked are left for the next step: its transaction
    commits its ack or rolls back in a moment. Waiting for them here would hold the group row, and the rows that
    are deleted already, for as long as the handler takes.
    """
    rows = session.rows(
        f"SELECT partition_key, message_offset FROM {STATE}{session.dialect.force_index('PRIMARY')} "
        "WHERE consumer_group = %s AND topic = %s ORDER BY partition_key, message_offset LIMIT %s",
        (*ref, limits.rows),
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
