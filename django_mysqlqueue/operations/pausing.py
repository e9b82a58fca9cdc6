"""Pause and resume: a single write to the group row, under its lock."""

from __future__ import annotations

from django_mysqlqueue.service import audit, groups
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, run


def pause(using: str, ref: GroupRef, *, actor: str, reason: str = "") -> bool:
    """Pause a group: subscribers finish the messages that they have claimed, keep their leases, and claim no more.

    Args:
        using: alias of the queue's database.
        ref: the group and its topic.
        actor: who runs the operation, for the audit log.
        reason: why, for the audit log.

    Returns:
        False if the group was already paused.

    Raises:
        OperationRefused: there is no such group, or a seek or drop of it has not finished.
    """
    return _set_paused(using, ref, paused=True, actor=actor, reason=reason)


def resume(using: str, ref: GroupRef, *, actor: str, reason: str = "") -> bool:
    """Resume a group. Its subscribers notice within ``LEASE_RENEWAL_INTERVAL``.

    Args:
        using: alias of the queue's database.
        ref: the group and its topic.
        actor: who runs the operation, for the audit log.
        reason: why, for the audit log.

    Returns:
        False if the group was not paused.

    Raises:
        OperationRefused: there is no such group, or a seek or drop of it has not finished.
    """
    return _set_paused(using, ref, paused=False, actor=actor, reason=reason)


def _set_paused(using: str, ref: GroupRef, *, paused: bool, actor: str, reason: str) -> bool:
    action = "pause" if paused else "resume"

    def write(session: Session) -> bool:
        found = groups.lock(session, ref)
        groups.refuse_unfinished(ref, found.after_seek)
        if found.paused is paused:
            return False
        groups.change(session, ref, paused=paused)
        audit.once(session, action, 0, actor=actor, reason=reason, group=ref.group, topic=ref.topic)
        return True

    with apart(using):
        return run(using, write)
