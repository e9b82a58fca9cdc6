"""Cancel, move and deliver scheduled messages, with entries in the audit log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from django_mysqlqueue.operations.limits import LIMITS
from django_mysqlqueue.service import audit, scheduling
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, run


def cancel(using: str, ids: Sequence[int], *, actor: str, topic: str = "", reason: str = "") -> int:
    """Delete scheduled messages that have not come due.

    Messages that another transaction has locked, because it moves, cancels or reschedules them, are neither changed nor
    counted. This takes several transactions, each committed on its own.

    Args:
        using: alias of the queue's database.
        ids: primary keys in the outbox.
        actor: who runs the operation, for the audit log.
        topic: topic of the messages, for the audit log; empty if there are several.
        reason: why, for the audit log.

    Returns:
        The number of deleted messages.
    """

    def delete(session: Session, chunk: Sequence[int]) -> int:
        return scheduling.remove(session, chunk, wait=False)

    return _each(using, "cancel", ids, delete, actor=actor, topic=topic, reason=reason)


def deliver_now(using: str, ids: Sequence[int], *, actor: str, topic: str = "", reason: str = "") -> int:
    """Make scheduled messages due now; otherwise as ``cancel``.

    ``topic``: topic of the messages, for the audit log; empty if there are several.

    Returns:
        The number of messages that were made due.
    """

    def bring(session: Session, chunk: Sequence[int]) -> int:
        return scheduling.move(session, chunk, None, 1, wait=False)

    return _each(using, "deliver now", ids, bring, actor=actor, topic=topic, reason=reason)


def move(using: str, ids: Sequence[int], deliver_at: int, *, actor: str, topic: str = "", reason: str = "") -> int:
    """Change the time of scheduled messages; otherwise as ``cancel``.

    ``topic``: topic of the messages, for the audit log; empty if there are several.

    Returns:
        The number of changed messages.
    """
    at = max(1, deliver_at)

    def put(session: Session, chunk: Sequence[int]) -> int:
        return scheduling.move(session, chunk, None, at, wait=False)

    detail = f"to {audit.time_text(at)}"
    return _each(using, "reschedule", ids, put, actor=actor, topic=topic, reason=reason, detail=detail)


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
