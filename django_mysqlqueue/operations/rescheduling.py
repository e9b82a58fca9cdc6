"""What operators do with scheduled messages: list, cancel, move, deliver now; recorded in the audit log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from django_mysqlqueue.models import OutboxMessage
from django_mysqlqueue.operations.limits import LIMITS
from django_mysqlqueue.service import audit, scheduling
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, run

OUTBOX = OutboxMessage._meta.db_table


def cancel(using: str, ids: Sequence[int], *, actor: str, topic: str = "", reason: str = "") -> int:
    """Deletes scheduled messages that have not come due; returns how many there were.

    What another transaction has locked (it is being sequenced, cancelled or
    moved) is left alone and not counted. Done in steps: each commits by itself.

    Args:
        ids: primary keys of the outbox.
        topic: for the audit log, where all of them are of one.
    """

    def delete(session: Session, chunk: Sequence[int]) -> int:
        return scheduling.remove(session, chunk, wait=False)

    return _each(using, "cancel", ids, delete, actor=actor, topic=topic, reason=reason)


def deliver_now(using: str, ids: Sequence[int], *, actor: str, topic: str = "", reason: str = "") -> int:
    """Lets scheduled messages come due at once; otherwise as ``cancel``."""

    def bring(session: Session, chunk: Sequence[int]) -> int:
        return scheduling.move(session, chunk, None, 1, wait=False)

    return _each(using, "deliver now", ids, bring, actor=actor, topic=topic, reason=reason)


def move(using: str, ids: Sequence[int], deliver_at: int, *, actor: str, topic: str = "", reason: str = "") -> int:
    """Gives scheduled messages another time (epoch milliseconds); otherwise as ``cancel``."""
    at = max(1, deliver_at)

    def put(session: Session, chunk: Sequence[int]) -> int:
        return scheduling.move(session, chunk, None, at, wait=False)

    return _each(using, "reschedule", ids, put, actor=actor, topic=topic, reason=reason, detail=f"to {at}")


def _each(
    using: str,
    action: str,
    ids: Sequence[int],
    change: Callable[[Session, Sequence[int]], int],
    *,
    actor: str,
    topic: str,
    reason: str,
    detail: str = "",
) -> int:
    def write(session: Session, chunk: Sequence[int]) -> int:
        changed = change(session, chunk)
        if changed:
            audit.once(session, action, changed, actor=actor, reason=reason, topic=topic, detail=detail)
        return changed

    distinct = sorted(set(ids))
    total = 0
    with apart(using):
        for start in range(0, len(distinct), LIMITS.rows):
            total += run(using, partial(write, chunk=distinct[start : start + LIMITS.rows]))
    return total
