"""Pause and resume a consumer group, or a task in a queue of jobs: a single write to the group row, under its lock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Unpack

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.arguments import spelled_out
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.operations import group_settings
from django_mysqlqueue.operations.arguments import task_path
from django_mysqlqueue.operations.declaring import How, operating
from django_mysqlqueue.operations.lookups import group_of
from django_mysqlqueue.operations.results import Result, result_of, sentence
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.service import audit, groups
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.job_results import is_of_jobs
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, run
from django_mysqlqueue.subscriptions.options import PAUSED_TASKS, Override, paused_tasks_of

PAUSE = audit.Action("pause", gettext_lazy("Pause group"))
RESUME = audit.Action("resume", gettext_lazy("Resume group"))
PAUSE_TASK = audit.Action("pause task", gettext_lazy("Pause task"))
RESUME_TASK = audit.Action("resume task", gettext_lazy("Resume task"))


@spelled_out
def pause(group: str, topic: str, *, task: str | None = None, **how: Unpack[How]) -> Result:
    """Pause a consumer group: its subscribers finish the messages that they have claimed and claim no more.

    They keep their leases. Until you resume the group, messages stay in the log, and GC keeps them for it.

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        task: pause only the jobs of the task with this dotted path. ``topic`` is the topic of a queue.

    Raises:
        OperationRefused: there is no such group, a seek or drop of it has not finished, or the topic of a task is not
            that of a queue.
    """
    if task is None:
        planned = _(
            "The group %(ref)s will be paused: its subscribers finish the messages that they have claimed and "
            "claim no more. Messages stay in the log, and GC keeps them for the group."
        )
        done, nothing = _("The group %(ref)s is paused."), _("The group %(ref)s is already paused.")
    else:
        planned = _(
            "The task %(task)s will be paused in %(topic)s: subscribers finish the jobs of it that they have claimed "
            "and claim no more. They notice within %(seconds)s seconds."
        )
        done = _("The task %(task)s is paused in %(topic)s. Subscribers notice within %(seconds)s seconds.")
        nothing = _("The task %(task)s is already paused in %(topic)s.")
    return _change(GroupRef(group, topic), task, how, paused=True, planned=planned, done=done, nothing=nothing)


@spelled_out
def resume(group: str, topic: str, *, task: str | None = None, **how: Unpack[How]) -> Result:
    """Resume a paused consumer group. Its subscribers notice within ``LEASE_RENEWAL_INTERVAL``.

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        task: resume only the task with this dotted path. ``topic`` is the topic of a queue.

    Raises:
        OperationRefused: there is no such group, a seek or drop of it has not finished, or the topic of a task is not
            that of a queue.
    """
    if task is None:
        planned = _("The group %(ref)s will be resumed. Its subscribers notice within %(seconds)s seconds.")
        done, nothing = _("The group %(ref)s is resumed."), _("The group %(ref)s is not paused.")
    else:
        planned = _("The task %(task)s will be resumed in %(topic)s. Subscribers notice within %(seconds)s seconds.")
        done = _("The task %(task)s is resumed in %(topic)s. Subscribers notice within %(seconds)s seconds.")
        nothing = _("The task %(task)s is not paused in %(topic)s.")
    return _change(GroupRef(group, topic), task, how, paused=False, planned=planned, done=done, nothing=nothing)


def _change(
    ref: GroupRef, task: str | None, how: How, *, paused: bool, planned: str, done: str, nothing: str
) -> Result:
    with operating(how, group=ref.group, topic=ref.topic) as (alias, by, dry_run):
        path = task_path(task)
        found = group_of(alias, ref.group, ref.topic)
        if path is None:
            action = PAUSE if paused else RESUME
            number = found.paused is not paused if dry_run else set_paused(alias, ref, paused=paused, **by)
        elif not is_of_jobs(ref):
            raise OperationRefused(f"task {path!r}: {ref} is not the group of a queue of jobs")
        else:
            action = PAUSE_TASK if paused else RESUME_TASK
            overrides = group_settings.by_name(group_settings.read(Session(alias), ref))
            number = any(_with_task(overrides, path, paused=paused))
            if not dry_run:
                number = set_task_paused(alias, ref, path, paused=paused, **by)
        text = sentence(int(number), dry_run=dry_run, planned=planned, done=done, nothing=nothing)
        values = {"ref": ref, "task": path, "topic": ref.topic, "seconds": f"{get_settings().lease_renewal_interval:g}"}
        return result_of(Result, action, int(number), text % values, dry_run=dry_run)


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


def set_task_paused(using: str, ref: GroupRef, task: str, *, paused: bool, **by: Unpack[By]) -> bool:
    """Pause or resume a task of a queue of jobs; return False if it was so already.

    The tasks that are paused are an override, so a claim of a subscriber that does not know them yet takes nothing.
    """
    found = group_settings.override(
        using,
        ref,
        partial(_with_task, task=task, paused=paused),
        check=lambda found: None,
        action=PAUSE_TASK if paused else RESUME_TASK,
        detail=task,
        **by,
    )
    return bool(found)


def _with_task(
    overrides: Mapping[str, Override], task: str, *, paused: bool
) -> tuple[Mapping[str, Any], Collection[str]]:
    """Return the overrides to set and to remove: none if the task is paused, or is not paused, already."""
    tasks = set(paused_tasks_of(overrides.values()))
    if (task in tasks) is paused:
        return {}, ()
    tasks ^= {task}
    return ({PAUSED_TASKS: tuple(sorted(tasks))}, ()) if tasks else ({}, (PAUSED_TASKS,))
