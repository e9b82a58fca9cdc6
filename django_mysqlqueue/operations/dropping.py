"""Drop: delete a group with all its state, so that GC no longer keeps messages for it.

The group is paused first, under its row's exclusive lock, and its row is deleted last. An interrupted drop leaves a
paused group, which can only be dropped again. Until then, the group cannot be registered again beside its old rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import (
    CoalesceKey,
    ConsumerGroup,
    ConsumerOffset,
    DeliveryState,
    PartitionLease,
    Slots,
    SubscriberHeartbeat,
)
from django_mysqlqueue.operations import steps
from django_mysqlqueue.operations.limits import LIMITS, Limits
from django_mysqlqueue.service import audit, groups, job_messages
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, run


def drop(
    using: str,
    ref: GroupRef,
    *,
    actor: str = "",
    reason: str = "",
    progress: Callable[[int], object] = lambda rows: None,
    limits: Limits = LIMITS,
) -> bool:
    """Delete a group with all its state. GC no longer keeps messages for it.

    An unfinished seek of the group is stopped. If another drop finishes first, this one ends, too. A group that was
    registered again since is not changed.

    Returns:
        False if the group did not exist.

    Raises:
        OperationRefused: another drop of the group has started since, or it finished and the group was registered
            again; or deliveries, or results of jobs, are locked by transactions that do not end.
    """
    with apart(using):
        operation = run(using, lambda session: _begin(session, ref, actor, reason))
        if operation is None:
            return False
        beat = audit.beats(using, operation)
        with audit.stopping(using, operation, steps.Stopped):
            steps.delete_all(
                using,
                ref,
                lambda session: _delete_some(session, ref, operation, limits),
                progress,
                limits,
                beat=beat,
            )
            _end_jobs(using, ref, limits, beat)
            run(using, lambda session: _end(session, ref, operation, limits))
    return True


def _begin(session: Session, ref: GroupRef, actor: str, reason: str = "") -> int | None:
    try:
        found = groups.lock(session, ref)
    except OperationRefused:
        return None
    operation = steps.begin(
        session,
        ref,
        found,
        "drop",
        deletes=(PartitionLease, DeliveryState, ConsumerOffset, Slots, CoalesceKey, SubscriberHeartbeat, ConsumerGroup),
        updates=job_messages.changed(ref),
        actor=actor,
        reason=reason,
    )
    groups.change(session, ref, paused=True, after_seek=ConsumerGroup.AfterSeek.DROPPED, operation=operation)
    return operation


def _delete_some(session: Session, ref: GroupRef, operation: int, limits: Limits) -> int | None:
    """Delete some of the group's rows by primary key; return how many, or None if there are no more.

    There are no new rows: those who insert them hold a shared lock on the group row and do nothing while the group is
    paused.
    """
    fence = groups.fence(session, ref)
    if fence is None:
        return None  # another drop has finished
    steps.refuse_stopped(ref, operation, fence)
    deleted = groups.delete_rows(session, ref, PartitionLease, "partition_key", most=limits.rows)
    if not deleted:
        states = steps.delete_states(session, ref, operation, limits)
        if states is not None:
            return states
    return (
        deleted
        or groups.delete_rows(session, ref, ConsumerOffset, "partition_key", most=limits.rows)
        or groups.delete_rows(session, ref, Slots, "limit_key", most=limits.rows)
        or groups.delete_rows(session, ref, CoalesceKey, "partition_key", "coalesce_key", most=limits.rows)
        or None
    )


def _end_jobs(using: str, ref: GroupRef, limits: Limits, beat: Callable[[], None]) -> None:
    """End the jobs of a dropped queue. Without the group, nobody can tell any more that it was dropped."""
    left = job_messages.end_all(using, ref, beat=beat)
    locked_since = time.monotonic()
    while left is not None:
        if time.monotonic() - locked_since > limits.locked_wait:
            raise OperationRefused(
                f"Other transactions have locked results of jobs on topic {ref.topic!r} for {limits.locked_wait:g} s. "
                f"The group {ref.group!r} stays paused: run the operation again after they have ended."
            )
        time.sleep(steps.LOCKED_PAUSE)
        left = job_messages.end_all(using, ref, after=left, beat=beat)


def _end(session: Session, ref: GroupRef, operation: int, limits: Limits) -> None:
    try:
        found = groups.lock(session, ref)
    except OperationRefused:
        audit.stop(session, operation, "another drop has finished")
        return
    steps.refuse_stopped(ref, operation, found)
    # Subscribers may still send heartbeats, without the group's lock. GC deletes these rows when they are old.
    groups.delete_rows(session, ref, SubscriberHeartbeat, "subscriber_name", most=limits.rows)
    ConsumerGroup.objects.using(session.using).filter(pk=found.id).delete()
    audit.end(session, operation)
