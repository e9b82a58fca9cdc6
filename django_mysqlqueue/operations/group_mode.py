"""Change a group from ordered to shared or back, while it has no live subscribers."""

from __future__ import annotations

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import PartitionLease
from django_mysqlqueue.operations.limits import LIMITS
from django_mysqlqueue.service import audit, groups, heartbeats
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, run


def set_mode(using: str, ref: GroupRef, mode: str, *, lease_ms: int, actor: str = "", reason: str = "") -> bool:
    """Change the mode of a group that has no live subscribers, and delete its leases.

    A subscriber of the old mode without a heartbeat, because it was starting or frozen, claims
    nothing from then on: each claim checks the mode under the group row's lock.

    ``mode``: ``"ordered"`` or ``"shared"``.

    Returns:
        False if the group was already in this mode.

    Raises:
        OperationRefused: there is no such group, it has live subscribers, or a seek or drop of it has not finished.
    """

    def set_under_lock(session: Session) -> bool:
        found = groups.lock(session, ref)
        groups.refuse_unfinished(ref, found.after_seek)
        refuse_live(session, ref, lease_ms)
        if found.mode == mode:
            return False
        while groups.delete_rows(session, ref, PartitionLease, "partition_key", most=LIMITS.rows):
            pass
        groups.change(session, ref, revise=True, mode=mode)
        detail = f"from {found.mode} to {mode}"
        audit.once(session, "mode", 0, actor=actor, reason=reason, group=ref.group, topic=ref.topic, detail=detail)
        return True

    with apart(using):
        return run(using, set_under_lock)


def refuse_live(session: Session, ref: GroupRef, lease_ms: int) -> None:
    """Require that a group has no live subscribers.

    Raises:
        OperationRefused: the group has live subscribers.
    """
    live = heartbeats.live(session, [ref], lease_ms)[ref]
    if live:
        raise OperationRefused(
            f"The group {ref.group!r} on topic {ref.topic!r} has live subscribers: {', '.join(live)}. "
            "Stop them before you change its mode."
        )
