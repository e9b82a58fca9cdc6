"""Recurring schedules that are made and changed while the project runs: ``schedules.create("nightly", task, …)``.

Each function is part of the open transaction of the queue's database, if there is one.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

from django_mysqlqueue.arguments import spelled_out
from django_mysqlqueue.inspection import ScheduleStatus, list_schedules
from django_mysqlqueue.operations import recurring
from django_mysqlqueue.operations.declaring import by
from django_mysqlqueue.operations.recurring import Changes
from django_mysqlqueue.schedules.options import ScheduleOptions
from django_mysqlqueue.service.databases import queue_aliases
from django_mysqlqueue.sql.session import Session, run

__all__ = ["create", "delete", "disable", "enable", "list", "update"]

CODE = "code"
"""Who makes a change, for the audit log, if nothing else is given."""


@spelled_out
def create(
    name: str, task: Any, *, enabled: bool = True, actor: str = CODE, **options: Unpack[ScheduleOptions]
) -> None:
    """Create a recurring schedule. All subscribers run it, and notice it within a tick, without a restart.

    If it has an interval without a start, a hash of its name chooses it, so that schedules with the same interval do
    not all run in the same second.

    Args:
        name: the name of the schedule, which neither the code nor another schedule has.
        task: a task, or the path of one that this process has imported. Jobs go to the queue, with the priority, that
            the task has now.
        enabled: False to create it paused.
        actor: who creates it, for the audit log.

    Raises:
        OperationRefused: a value breaks a rule, or there is a schedule with this name, in the code or elsewhere. The
            error names the value and the rule.
    """
    definition, using = recurring.new(name, task, options, enabled=enabled)
    recurring.require_future(name, definition, Session(using).now())
    run(using, partial(recurring.write_new, name, definition, enabled=enabled, by=by(actor)))


@spelled_out
def update(
    name: str,
    *,
    task: Any = None,
    enabled: bool | None = None,
    actor: str = CODE,
    **options: Unpack[ScheduleOptions],
) -> None:
    """Change a recurring schedule that was created here or in the admin. What is None stays as it is.

    With ``cron``, ``every`` or ``at``, its times are replaced as a whole: a start or time zone that is not given has
    its default. If its times change, it begins with its next tick. Changes of two callers at once are both made, one
    after the other.

    Args:
        name: the name of the schedule.
        task: as for ``create``. Only with it, the queue and the priority of the jobs change.
        enabled: True to enable it, False to disable it.
        actor: who changes it, for the audit log.

    Raises:
        OperationRefused: there is no such schedule, or the code declares it; or a value breaks a rule. The error names
            the value and the rule.
    """
    if task is not None:
        recurring.import_tasks()
    changes, using = Changes(task, options, enabled), recurring.home(name)
    if not run(using, partial(recurring.write_changed, name, changes, by=by(actor))):
        raise recurring.unknown(name, queue_aliases())


def delete(name: str, *, actor: str = CODE) -> None:
    """Delete a recurring schedule that was created here or in the admin. Its jobs and their results stay.

    Args:
        name: the name of the schedule.
        actor: who deletes it, for the audit log.

    Raises:
        OperationRefused: there is no such schedule, or a running process declares it in its code.
    """
    _change(name, recurring.DELETE, recurring.deleted, actor)


def enable(name: str, *, actor: str = CODE) -> None:
    """Enable a recurring schedule that was disabled or paused. It begins with its next tick.

    Args:
        name: the name of the schedule, which may be declared in the code.
        actor: who enables it, for the audit log.

    Raises:
        OperationRefused: there is no such schedule.
    """
    _change(name, recurring.RESUME, recurring.resumed, actor)


def disable(name: str, *, actor: str = CODE) -> None:
    """Disable a recurring schedule: its ticks are dropped until it is enabled.

    Args:
        name: the name of the schedule, which may be declared in the code.
        actor: who disables it, for the audit log.

    Raises:
        OperationRefused: there is no such schedule.
    """
    _change(name, recurring.PAUSE, recurring.paused, actor)


def list() -> tuple[ScheduleStatus, ...]:  # noqa: A001
    """Return the recurring schedules of all databases of the queue, with the last run of each.

    ``editable`` tells those that were created here or in the admin from those that the code declares.

    Raises:
        django.db.Error: a database refuses or does not answer.
    """
    return tuple(one for alias in queue_aliases() for one in list_schedules(using=alias))


def _change(name: str, action: Any, write: Any, actor: str) -> None:
    change = partial(recurring.change, name, action, write, by=by(actor))
    run(recurring.home(name), change)
