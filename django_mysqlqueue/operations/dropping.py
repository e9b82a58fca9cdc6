"""Drop: delete a group with all its state, so that GC no longer keeps messages for it.

The group is paused first, under its row's exclusive lock, and its row is deleted last. An interrupted drop leaves a
paused group, which can only be dropped again. Until then, the group cannot be registered again beside its old rows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Unpack

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.arguments import checked, spelled_out
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
from django_mysqlqueue.operations import redriving, seeking, steps
from django_mysqlqueue.operations.declaring import How, operating
from django_mysqlqueue.operations.limits import COUNTED, LIMITS, OperationLimits
from django_mysqlqueue.operations.lookups import group_of
from django_mysqlqueue.operations.results import DropResult, result_of
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.options.topics import dlq_topic
from django_mysqlqueue.service import audit, groups, heartbeats, job_messages, job_results, retention
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.dead_letters import DeadLetterFilter
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, run
from django_mysqlqueue.subscriptions.effective import known_handlers
from django_mysqlqueue.text.humanize import up_to

DROP = audit.Action("drop", gettext_lazy("Drop group"), audit.DELIVERIES)


@spelled_out
@checked(OperationRefused, only=("progress",))
def drop_group(
    group: str, topic: str, *, progress: Callable[[int], object] = lambda rows: None, **how: Unpack[How]
) -> DropResult:
    """Delete a consumer group with all its state. GC no longer keeps messages for it.

    A subscriber of the group that starts later registers it again. If the drop is interrupted, the group stays paused:
    run it again.

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        progress: called after each transaction with the number of partitions and deliveries that it deleted.

    Raises:
        OperationRefused: there is no such group; another drop of it has started in the meantime; or other transactions
            keep its deliveries locked.
    """
    with operating(how, group=group, topic=topic) as (alias, by, dry_run):
        ref = group_of(alias, group, topic, unfinished=["seek", "drop"]).ref
        if not dry_run:
            changed = int(drop(alias, ref, **by, progress=progress))
            text = _("The group %(ref)s is dropped.") if changed else _("The group %(ref)s no longer exists.")
            return result_of(DropResult, DROP, changed, text % {"ref": ref}, dry_run=False, group=group, topic=topic)
        session = Session(alias)
        found = seeking.preview(alias, ref, seeking.position_of(alias, "latest"))
        kept, in_time = retention.held_back_by(session, ref, most=COUNTED, rows=LIMITS.rows, seconds=LIMITS.seconds)
        found = dataclasses.replace(found, exact=found.exact and in_time)
        live = heartbeats.live(session, [ref], int(get_settings().lease_duration * 1000))[ref]
        failed = DeadLetterFilter(dlq_topic(ref.topic), group=ref.group)
        dead = redriving.count(alias, failed, most=COUNTED)
        return previewed_drop(ref, found, kept, tuple(live), dead)


def previewed_drop(ref: GroupRef, found: seeking.Preview, kept: int, live: tuple[str, ...], dead: int) -> DropResult:
    """Return the result of a preview. ``kept``: the number of messages that GC keeps only for the group."""
    warnings = [] if found.exact else [seeking.counting_stopped()]
    if found.skipped and job_results.is_of_jobs(ref):
        warnings.append(seeking.ended_jobs())
    if dead:
        text = _(
            "Dead letters of the group: %(number)s. They stay in %(topic)s, but cannot be redriven unless the group is "
            "registered again."
        )
        warnings.append(text % {"number": up_to(COUNTED, dead), "topic": dlq_topic(ref.topic)})
    if live:
        text = _("Live subscribers: %(names)s. They stop claiming: stop them before you drop the group.")
        warnings.append(text % {"names": ", ".join(live)})
    handler = known_handlers().get(ref)
    if handler is not None and handler.start == "earliest":
        text = _(
            "This project has a handler for the group. A subscriber that starts, or migrate, registers it again: "
            'the group then receives all messages that are still in the log (start="earliest").'
        )
        warnings.append(text)
    elif handler is not None:
        text = _(
            "This project has a handler for the group. A subscriber that starts, or migrate, registers it again: "
            'the group then starts after the newest message (start="latest").'
        )
        warnings.append(text)
    return result_of(
        DropResult,
        DROP,
        1,
        _("The group %(ref)s and its position in every partition will be deleted.") % {"ref": ref},
        _("Messages that the group has not settled: %(number)s.") % {"number": up_to(COUNTED, found.skipped)},
        _("Messages that GC keeps only for this group, and may delete afterwards: %(number)s.")
        % {"number": up_to(COUNTED, kept)},
        dry_run=True,
        warnings=tuple(warnings),
        group=ref.group,
        topic=ref.topic,
        unsettled=found.skipped,
        kept_for_it_alone=kept,
        live_subscribers=live,
    )


def drop(
    using: str,
    ref: GroupRef,
    *,
    progress: Callable[[int], object] = lambda rows: None,
    limits: OperationLimits = LIMITS,
    **by: Unpack[By],
) -> bool:
    """Delete a group with all its state; return False if it did not exist.

    An unfinished seek of the group is stopped. If another drop finishes first, this one ends, too. A group that was
    registered again since is not changed.
    """
    with apart(using):
        operation = run(using, lambda session: _begin(session, ref, **by))
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


def _begin(session: Session, ref: GroupRef, **by: Unpack[By]) -> int | None:
    try:
        found = groups.lock(session, ref)
    except OperationRefused:
        return None
    operation = steps.begin(
        session,
        ref,
        found,
        DROP,
        deletes=(PartitionLease, DeliveryState, ConsumerOffset, Slots, CoalesceKey, SubscriberHeartbeat, ConsumerGroup),
        updates=job_messages.changed(ref),
        **by,
    )
    groups.change(session, ref, paused=True, after_seek=ConsumerGroup.AfterSeek.DROPPED, operation=operation)
    return operation


def _delete_some(session: Session, ref: GroupRef, operation: int, limits: OperationLimits) -> int | None:
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


def _end_jobs(using: str, ref: GroupRef, limits: OperationLimits, beat: Callable[[], None]) -> None:
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


def _end(session: Session, ref: GroupRef, operation: int, limits: OperationLimits) -> None:
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
