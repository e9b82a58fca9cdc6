"""Steps of seek and drop, which are operations on a consumer group that take several transactions.

Between two of them, a process may be frozen for any time while another process runs the same operation to its end. So
each step checks, under the group row's lock, that its own operation is still the current one (``refuse_stopped``). It
compares the id of the operation's entry in the audit log, which is never reused. Comparing the group's state (paused,
at this start offset) would not suffice, since the group may return to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Unpack

from django.db.models import Model

from django_mysqlqueue.db.tables import STATE
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import Operation
from django_mysqlqueue.operations.limits import OperationLimits
from django_mysqlqueue.service import audit
from django_mysqlqueue.service.audit import Action, By
from django_mysqlqueue.service.groups import Fence, Locked
from django_mysqlqueue.service.losses import HELD_BY
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.watermarks import BY_ROW
from django_mysqlqueue.sql.session import Session, flat, run

LOCKED_PAUSE = 0.05
"""Seconds between two attempts to delete rows that an atomic handler has locked."""


def begin(
    session: Session,
    ref: GroupRef,
    found: Locked,
    action: Action,
    *,
    deletes: Sequence[type[Model]],
    updates: Sequence[type[Model]],
    detail: str = "",
    **by: Unpack[By],
) -> int:
    """Record the start of an operation in the audit log. An unfinished one on the group is stopped there.

    Returns:
        The operation's id. Store it in the group row, with ``paused``, in the same transaction.
    """
    _require_privileges(session, deletes, (*updates, Operation))
    operation = audit.begin(session, action, ref, detail=detail, **by)
    if found.operation:
        audit.stop(session, found.operation, f"stopped: replaced by a {action} of {by['actor'] or 'an unknown actor'}")
    return operation


def _require_privileges(session: Session, deletes: Sequence[type[Model]], updates: Sequence[type[Model]]) -> None:
    """Fail if the user of the database may not delete from some tables, or update others: before anything is changed.

    Grants of before an upgrade have no privileges on its new tables. An operation that finds out in a later transaction
    leaves the group paused. EXPLAIN needs the privileges of the statement, and locks nothing.
    """
    if session.dialect.current_user is None:
        return
    names = ", ".join(model._meta.db_table for model in deletes)
    session.rows(f"EXPLAIN DELETE {names} FROM {names} WHERE 1 = 0")
    columns = [(model._meta.db_table, model._meta.concrete_fields[0].column) for model in updates]
    assignments = ", ".join(f"{table}.{column} = {table}.{column}" for table, column in columns)
    session.rows(f"EXPLAIN UPDATE {', '.join(table for table, _ in columns)} SET {assignments} WHERE 1 = 0")


class Stopped(OperationRefused):
    """The operation is no longer the current one."""


def refuse_stopped(ref: GroupRef, operation: int, found: Fence | Locked | None) -> None:
    """Refuse to continue an operation that is no longer the current one.

    ``found``: the group row, under its lock; None if the group no longer exists.
    """
    if found is None or found.operation != operation:
        raise Stopped(
            f"This seek or drop of the group {ref.group!r} on topic {ref.topic!r} was stopped: "
            "another one has started or ended since, or the group was dropped."
        )


def delete_all(
    using: str,
    ref: GroupRef,
    delete: Callable[[Session], int | None],
    progress: Callable[[int], object],
    limits: OperationLimits,
    *,
    beat: Callable[[], None],
) -> int:
    """Delete a group's rows, one transaction after another, and return how many.

    ``delete``: deletes some rows and returns how many, or None if there are no more.
    """
    total = 0
    locked_since: float | None = None
    while (deleted := run(using, delete)) is not None:
        total += deleted
        beat()
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
        f"SELECT s.message_offset, s.partition_key, {HELD_BY} FROM {STATE} s{session.dialect.force_index('PRIMARY')} "
        "WHERE s.consumer_group = %s AND s.topic = %s ORDER BY s.partition_key, s.message_offset LIMIT 1",
        ref,
    )
    example = ""
    if row is not None:
        offset, key, holder = row
        claim = f"claimed by {holder}" if holder else "not claimed"
        example = f" (for example offset {offset} in partition {key!r}, {claim})"
    return (
        f"Other transactions have locked deliveries of the group {ref.group!r} on topic {ref.topic!r} for "
        f"{waited:g} s{example}. The group stays paused: run the operation again after they have ended."
    )


def delete_states(session: Session, ref: GroupRef, operation: int, limits: OperationLimits) -> int | None:
    """Delete some of a group's state rows by primary key; return how many, or None if there are no more.

    Rows that an atomic handler has locked are skipped and left for the next step: its transaction will commit its ack
    or roll back. Waiting for them here would lock the group row, and the rows that are already deleted, for as long as
    the handler takes.
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
