"""Pause and resume a consumer group: a single write to the group row, under its lock."""

from __future__ import annotations

from typing import Unpack

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.arguments import spelled_out
from django_mysqlqueue.operations.declaring import How, operating
from django_mysqlqueue.operations.lookups import group_of
from django_mysqlqueue.operations.results import Result, result_of, sentence
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service import audit, groups
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, run

PAUSE = audit.Action("pause", gettext_lazy("Pause group"))
RESUME = audit.Action("resume", gettext_lazy("Resume group"))


@spelled_out
def pause(group: str, topic: str, **how: Unpack[How]) -> Result:
    """Pause a consumer group: its subscribers finish the messages that they have claimed and claim no more.

    They keep their leases. Until you resume the group, messages stay in the log, and GC keeps them for it.

    Args:
        group: the consumer group.
        topic: the topic that it reads.

    Raises:
        OperationRefused: there is no such group, or a seek or drop of it has not finished.
    """
    return _change(
        GroupRef(group, topic),
        how,
        paused=True,
        planned=_(
            "The group %(ref)s will be paused: its subscribers finish the messages that they have claimed and "
            "claim no more. Messages stay in the log, and GC keeps them for the group."
        ),
        done=_("The group %(ref)s is paused."),
        nothing=_("The group %(ref)s is already paused."),
    )


@spelled_out
def resume(group: str, topic: str, **how: Unpack[How]) -> Result:
    """Resume a paused consumer group. Its subscribers notice within ``LEASE_RENEWAL_INTERVAL``.

    Args:
        group: the consumer group.
        topic: the topic that it reads.

    Raises:
        OperationRefused: there is no such group, or a seek or drop of it has not finished.
    """
    return _change(
        GroupRef(group, topic),
        how,
        paused=False,
        planned=_("The group %(ref)s will be resumed. Its subscribers notice within %(seconds)s seconds."),
        done=_("The group %(ref)s is resumed."),
        nothing=_("The group %(ref)s is not paused."),
    )


def _change(ref: GroupRef, how: How, *, paused: bool, planned: str, done: str, nothing: str) -> Result:
    with operating(how, group=ref.group, topic=ref.topic) as (alias, by, dry_run):
        number = int(group_of(alias, ref.group, ref.topic).paused is not paused)
        if not dry_run:
            number = int(set_paused(alias, ref, paused=paused, **by))
        text = sentence(number, dry_run=dry_run, planned=planned, done=done, nothing=nothing)
        values = {"ref": ref, "seconds": f"{get_settings().lease_renewal_interval:g}"}
        return result_of(Result, PAUSE if paused else RESUME, number, text % values, dry_run=dry_run)


def set_paused(using: str, ref: GroupRef, *, paused: bool, **by: Unpack[By]) -> bool:
    """Pause or resume a group; return False if it was so already."""

    def write(session: Session) -> bool:
        group = groups.lock(session, ref)
        groups.refuse_unfinished(ref, group.after_seek)
        if group.paused is paused:
            return False
        groups.change(session, ref, paused=paused)
        audit.once(session, PAUSE if paused else RESUME, 0, ref, **by)
        return True

    with apart(using):
        return run(using, write)
