"""Operations on scheduled messages, before they come due: cancel, reschedule. Jobs are cancelled at any time."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from functools import partial
from typing import Unpack

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.arguments import spelled_out
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.names.rules import KEY_LENGTH
from django_mysqlqueue.operations.arguments import delivery_time, offsets_of, text, texts
from django_mysqlqueue.operations.declaring import How, Work, operating
from django_mysqlqueue.operations.jobs import cancel_jobs, cancel_task
from django_mysqlqueue.operations.limits import LIMITS
from django_mysqlqueue.operations.lookups import check_topic
from django_mysqlqueue.operations.results import ScheduledResult, result_of
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.service import audit, scheduling
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, pieces, run

CANCEL, NOW = 0, 1
"""Instead of the time of a scheduled message: delete it; let it come due now."""
CANCELS = audit.Action("cancel", gettext_lazy("Cancel scheduled messages"), audit.MESSAGES)
DELIVERS = audit.Action("deliver now", gettext_lazy("Deliver scheduled messages now"), audit.MESSAGES)
RESCHEDULES = audit.Action("reschedule", gettext_lazy("Reschedule messages"), audit.MESSAGES)


@spelled_out
def cancel(
    topic: str,
    ids: Sequence[str] | None = None,
    *,
    key: str | None = None,
    task: str | None = None,
    limit: int | None = None,
    **how: Unpack[How],
) -> ScheduledResult:
    """Delete scheduled messages before they come due, so that no consumer group receives them.

    Publishers use ``django_mysqlqueue.cancel``, which joins the caller's transaction and is not recorded in the audit
    log. This function is for operators. Messages that another transaction has locked are not changed.

    In a queue of jobs (its topic is ``jobs.`` and its name), it cancels all jobs that wait, scheduled or not, and asks
    those that run to stop. Only tasks that read ``context.cancelled`` stop.

    Args:
        topic: the topic that the messages were published to.
        ids: ids of the messages, as ``publish`` returned them, or of jobs.
        key: only messages that were published with this key; if None, with any key. Jobs have no key.
        task: instead of ids: all jobs of the task with this dotted path; ``topic`` is the topic of a queue.
        limit: with ``task``: maximum number of jobs; those that were enqueued first are cancelled, and those of
            schedules last.

    Returns:
        The result, with the ids for which there is no scheduled message, or no job that is waiting or running.

    Raises:
        OperationRefused: none of the messages is scheduled, or none of the jobs is waiting or running; there are ids
            as well as a task, or neither; or the topic of a task is not that of a queue.
    """
    if task is not None:
        if ids is not None or key is not None:
            raise OperationRefused("task: cannot be combined with ids or key")
        return cancel_task(task, topic=topic, limit=limit, **how)
    if ids is None or limit is not None:
        raise OperationRefused("ids, task: pass one of them, and limit only with task")
    if key is None and isinstance(topic, str) and job_queues.is_queue(topic):
        return cancel_jobs(ids, topic=topic, **how)
    with operating(how, topic=topic) as work:
        rows, missing = _find(work.using, topic, ids, key)
        return _change(work, topic, rows, missing, CANCEL)


@spelled_out
def reschedule(
    topic: str, ids: Sequence[str], deliver_at: datetime.datetime | None, *, key: str | None = None, **how: Unpack[How]
) -> ScheduledResult:
    """Deliver scheduled messages at another time, or now.

    Publishers use ``django_mysqlqueue.reschedule``, which joins the caller's transaction and is not recorded in the
    audit log. This function is for operators. Messages that another transaction has locked are not changed.

    Args:
        topic: the topic that the messages were published to.
        ids: ids of the messages, as ``publish`` returned them.
        deliver_at: time of delivery; a naive datetime is in the project's time zone. None or a time in the past: now.
        key: only messages that were published with this key; if None, with any key.

    Returns:
        The result, with the ids for which there is no scheduled message.

    Raises:
        OperationRefused: none of the messages is scheduled, or ``deliver_at`` is not a valid datetime.
    """
    with operating(how, topic=topic) as work:
        rows, missing = _find(work.using, topic, ids, key)
        return _change(work, topic, rows, missing, _time_of(deliver_at), deliver_at)


@spelled_out
def cancel_rows(rows: Sequence[int], **how: Unpack[How]) -> ScheduledResult:
    """Cancel scheduled messages of any topics by their primary keys in the outbox."""
    with operating(how) as work:
        return _change(work, "", offsets_of(rows, "rows"), (), CANCEL)


@spelled_out
def reschedule_rows(rows: Sequence[int], deliver_at: datetime.datetime | None, **how: Unpack[How]) -> ScheduledResult:
    """Reschedule messages of any topics by their primary keys in the outbox. ``deliver_at``: None: now."""
    with operating(how) as work:
        chosen = offsets_of(rows, "rows")
        return _change(work, "", chosen, (), _time_of(deliver_at), deliver_at)


def change_rows(using: str, ids: Sequence[int], at: int, *, topic: str = "", **by: Unpack[By]) -> int:
    """Delete scheduled messages, or change when they come due; return how many.

    Messages that have come due, or that another transaction has locked because it moves, cancels or reschedules them,
    are neither changed nor counted. This takes several transactions, each committed on its own.

    ``ids``: primary keys in the outbox. ``at``: epoch milliseconds, ``NOW`` or ``CANCEL``. ``topic``: topic of the
    messages, for the audit log; empty if there are several.
    """
    detail = f"to {audit.time_text(at)}" if at > NOW else ""

    def write(session: Session, chunk: Sequence[int]) -> int:
        if at == CANCEL:
            changed = scheduling.remove(session, chunk, wait=False)
        else:
            changed = scheduling.move(session, chunk, None, at, wait=False)
        if changed:
            audit.once(session, _action(at), changed, GroupRef("", topic), detail=detail, **by)
        return changed

    with apart(using):
        return sum(run(using, partial(write, chunk=chunk)) for chunk in pieces(sorted(set(ids)), LIMITS.rows))


def not_scheduled_text(topic: str, ids: Sequence[str]) -> str:
    """Return the error about ids that no scheduled message has."""
    return f"Not scheduled in topic {topic!r}: {', '.join(map(repr, ids))} (due, cancelled or unknown)."


def _find(alias: str, topic: str, ids: Sequence[str], key: str | None) -> tuple[list[int], list[str]]:
    """Return the primary keys of scheduled messages, and the ids that none has."""
    wanted = texts("ids", ids)
    if key is not None:
        text("key", key, most=KEY_LENGTH)
    found = scheduling.find(Session(alias), scheduling.stored_topics(topic, alias), wanted, key)
    there = set(found.values())
    missing = [one for one in wanted if one not in there]
    if not found:
        check_topic(alias, topic)
        raise OperationRefused(f"Nothing was changed. {not_scheduled_text(topic, missing)}")
    return list(found), missing


def _action(at: int) -> audit.Action:
    return {CANCEL: CANCELS, NOW: DELIVERS}.get(at, RESCHEDULES)


def _time_of(deliver_at: datetime.datetime | None) -> int:
    return NOW if deliver_at is None else max(NOW + 1, delivery_time(deliver_at))


def _change(
    work: Work,
    topic: str,
    rows: Sequence[int],
    missing: Sequence[str],
    at: int,
    deliver_at: datetime.datetime | None = None,
) -> ScheduledResult:
    alias, by, dry_run = work
    action, session = _action(at), Session(alias)
    planned, done = {
        CANCELS: (
            _("Scheduled messages that will be deleted, so that no group receives them: %(number)s."),
            _("Scheduled messages cancelled: %(number)s."),
        ),
        DELIVERS: (
            _("Scheduled messages that will be delivered now: %(number)s."),
            _("Scheduled messages that are due now: %(number)s."),
        ),
        RESCHEDULES: (
            _("Scheduled messages that will be delivered at %(time)s: %(number)s."),
            _("Messages rescheduled to %(time)s: %(number)s."),
        ),
    }[action]
    said = [planned if dry_run else done]
    if action is RESCHEDULES and dry_run and at <= session.now():
        said.append(_("This time is in the past: the messages will be delivered now."))
    number = scheduling.count_scheduled(session, rows) if dry_run else change_rows(alias, rows, at, topic=topic, **by)
    values = {"time": f"{deliver_at:%Y-%m-%d %H:%M:%S%z}" if deliver_at else "", "number": f"{number:,}"}
    summary = [one % values for one in said] if number else []
    if left := len(rows) - number:
        text = _("Messages not changed, because they came due or another transaction is changing them: %(number)s.")
        if dry_run:
            text = _("Messages that will not be changed, because they are no longer scheduled: %(number)s.")
        summary.append(text % {"number": f"{left:,}"})
    return result_of(ScheduledResult, action, number, *summary, dry_run=dry_run, not_scheduled=tuple(missing))
