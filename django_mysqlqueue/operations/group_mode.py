"""Change a group from ordered to shared or back, while it has no live subscribers."""

from __future__ import annotations

from typing import Literal, Unpack

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.arguments import spelled_out
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup, PartitionLease
from django_mysqlqueue.operations.declaring import How, operating
from django_mysqlqueue.operations.limits import LIMITS
from django_mysqlqueue.operations.lookups import group_of
from django_mysqlqueue.operations.results import Result, result_of, sentence
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service import audit, groups, heartbeats
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, run

MODE = audit.Action("mode", gettext_lazy("Change mode"))


@spelled_out
def set_group_mode(group: str, topic: str, mode: Literal["ordered", "shared"], **how: Unpack[How]) -> Result:
    """Change the delivery mode of a consumer group. Its subscribers must be stopped.

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        mode: the mode that the group's handler will declare.

    Raises:
        OperationRefused: there is no such group or mode; the group has live subscribers; or a seek or drop of it has
            not finished.
    """
    with operating(how, group=group, topic=topic) as (alias, by, dry_run):
        if mode not in ConsumerGroup.Mode.values:
            raise OperationRefused(f"mode {mode!r}: must be one of {', '.join(map(repr, ConsumerGroup.Mode.values))}")
        found = group_of(alias, group, topic)
        number = int(found.mode != mode)
        lease_ms = int(get_settings().lease_duration * 1000)
        if number and dry_run:
            _refuse_live(Session(alias), found.ref, lease_ms)
        elif number:
            number = int(set_mode(alias, found.ref, mode, **by, lease_ms=lease_ms))
        text = sentence(
            number,
            dry_run=dry_run,
            planned=_("The mode of the group %(ref)s will change to %(mode)s."),
            done=_("The mode of the group %(ref)s is now %(mode)s."),
            nothing=_("The mode of the group %(ref)s is already %(mode)s."),
        )
        return result_of(Result, MODE, number, text % {"ref": found.ref, "mode": mode}, dry_run=dry_run)


def set_mode(using: str, ref: GroupRef, mode: str, *, lease_ms: int, **by: Unpack[By]) -> bool:
    """Change the mode of a group that has no live subscribers, and delete its leases; return False if it had the mode.

    A subscriber of the old mode without a heartbeat, because it was starting or frozen, claims nothing from then on:
    each claim checks the mode under the group row's lock.
    """

    def set_under_lock(session: Session) -> bool:
        found = groups.lock(session, ref)
        groups.refuse_unfinished(ref, found.after_seek)
        _refuse_live(session, ref, lease_ms)
        if found.mode == mode:
            return False
        while groups.delete_rows(session, ref, PartitionLease, "partition_key", most=LIMITS.rows):
            pass
        groups.change(session, ref, revise=True, mode=mode)
        audit.once(session, MODE, 0, ref, detail=f"from {found.mode} to {mode}", **by)
        return True

    with apart(using):
        return run(using, set_under_lock)


def _refuse_live(session: Session, ref: GroupRef, lease_ms: int) -> None:
    live = heartbeats.live(session, [ref], lease_ms)[ref]
    if live:
        raise OperationRefused(
            f"The group {ref.group!r} on topic {ref.topic!r} has live subscribers: {', '.join(live)}. "
            "Stop them before you change its mode."
        )
