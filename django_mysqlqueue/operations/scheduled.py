"""Operations on scheduled messages, before they come due: cancel, reschedule. Jobs are cancelled at any time."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from django.utils.translation import gettext as _

from django_mysqlqueue import job_queues
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.naming import KEY_LENGTH
from django_mysqlqueue.operations import rescheduling
from django_mysqlqueue.operations.arguments import delivery_time, offsets_of, text, texts
from django_mysqlqueue.operations.declaring import How, operates, operating
from django_mysqlqueue.operations.jobs import cancel_jobs
from django_mysqlqueue.operations.lookups import check_topic
from django_mysqlqueue.operations.results import ScheduledResult, result_of
from django_mysqlqueue.service import scheduling
from django_mysqlqueue.sql.session import Session


@operates
def cancel(topic: str, ids: Sequence[str], *, key: str | None = None, **how: Unpack[How]) -> ScheduledResult:
    """Delete scheduled messages before they come due, so that no consumer group receives them.

    Publishers use ``django_mysqlqueue.cancel``, which joins the caller's transaction and is not recorded in the audit
    log. This function is for operators. Messages that another transaction has locked are not changed.

    In a queue of jobs (its topic is ``jobs.`` and its name), it cancels all jobs that wait, scheduled or not, and asks
    those that run to stop. Only tasks that read ``context.cancelled`` stop.

    Args:
        topic: the topic that the messages were published to.
        ids: ids of the messages, as ``publish`` returned them, or of jobs.
        key: only messages that were published with this key; if None, with any key. Jobs have no key.

    Returns:
        The result, with the ids for which there is no scheduled message, or no job that is waiting or running.

    Raises:
        OperationRefused: none of the messages is scheduled, or none of the jobs is waiting or running.
    """
    if key is None and isinstance(topic, str) and job_queues.is_queue(topic):
        return cancel_jobs(ids, topic=topic, **how)
    with operating(how, topic=topic) as (alias, by, dry_run):
        rows, missing = _find(alias, topic, ids, key)
        return _cancel(alias, topic, rows, missing, **by, dry_run=dry_run)


@operates
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
    with operating(how, topic=topic) as (alias, by, dry_run):
        rows, missing = _find(alias, topic, ids, key)
        return _move(alias, topic, rows, missing, deliver_at, **by, dry_run=dry_run)


@operates
def cancel_rows(rows: Sequence[int], **how: Unpack[How]) -> ScheduledResult:
    """Cancel messages of any topics by their primary keys in the outbox.

    ``dry_run``: change nothing; return what would be changed.
    """
    with operating(how) as (alias, by, dry_run):
        return _cancel(alias, "", offsets_of(rows, "rows"), (), **by, dry_run=dry_run)


@operates
def reschedule_rows(rows: Sequence[int], deliver_at: datetime.datetime | None, **how: Unpack[How]) -> ScheduledResult:
    """Reschedule messages of any topics by their primary keys in the outbox.

    ``deliver_at``: time of delivery; None: now. ``dry_run``: change nothing; return what would be changed.
    """
    with operating(how) as (alias, by, dry_run):
        chosen = offsets_of(rows, "rows")
        return _move(alias, "", chosen, (), deliver_at, **by, dry_run=dry_run)


def not_scheduled_text(topic: str, ids: Sequence[str]) -> str:
    """Return the error about ids that no scheduled message has."""
    return f"Not scheduled in topic {topic!r}: {', '.join(map(repr, ids))} (due, cancelled or unknown)."


def _find(alias: str, topic: str, ids: Sequence[str], key: str | None) -> tuple[list[int], list[str]]:
    """Return the primary keys of scheduled messages, and the ids that none has."""
    wanted = texts("ids", ids)
    if key is not None:
        text("key", key, most=KEY_LENGTH)
    found = scheduling.find(Session(alias), scheduling.stored_topics(topic, alias), wanted, key)
    there = {one.message_id for one in found}
    missing = [one for one in wanted if one not in there]
    if not found:
        check_topic(alias, topic)
        raise OperationRefused(f"Nothing was changed. {not_scheduled_text(topic, missing)}")
    return [one.outbox_id for one in found], missing


def _cancel(
    alias: str, topic: str, rows: Sequence[int], missing: Sequence[str], *, actor: str, reason: str, dry_run: bool
) -> ScheduledResult:
    if dry_run:
        said = _("Scheduled messages that will be deleted, so that no group receives them: %(number)s.")
    else:
        said = _("Scheduled messages cancelled: %(number)s.")
    change = functools.partial(rescheduling.cancel, alias, rows, actor=actor, topic=topic, reason=reason)
    return _change("cancel", alias, rows, missing, change, [said], {}, dry_run=dry_run)


def _move(
    alias: str,
    topic: str,
    rows: Sequence[int],
    missing: Sequence[str],
    deliver_at: datetime.datetime | None,
    *,
    actor: str,
    reason: str,
    dry_run: bool,
) -> ScheduledResult:
    record: dict[str, Any] = {"actor": actor, "topic": topic, "reason": reason}
    if deliver_at is None:
        planned = _("Scheduled messages that will be delivered now: %(number)s.")
        said = [planned if dry_run else _("Scheduled messages that are due now: %(number)s.")]
        change = functools.partial(rescheduling.deliver_now, alias, rows, **record)
        return _change("deliver now", alias, rows, missing, change, said, {}, dry_run=dry_run)
    at = delivery_time(deliver_at)
    planned = _("Scheduled messages that will be delivered at %(time)s: %(number)s.")
    said = [planned if dry_run else _("Messages rescheduled to %(time)s: %(number)s.")]
    if dry_run and at <= Session(alias).now():
        said.append(_("This time is in the past: the messages will be delivered now."))
    change = functools.partial(rescheduling.move, alias, rows, at, **record)
    values = {"time": f"{deliver_at:%Y-%m-%d %H:%M:%S%z}"}
    return _change("reschedule", alias, rows, missing, change, said, values, dry_run=dry_run)


def _change(
    operation: str,
    alias: str,
    rows: Sequence[int],
    missing: Sequence[str],
    change: Callable[[], int],
    said: Sequence[str],
    values: dict[str, str],
    *,
    dry_run: bool,
) -> ScheduledResult:
    number = scheduling.count_scheduled(Session(alias), rows) if dry_run else change()
    left = len(rows) - number
    summary = [one % {**values, "number": f"{number:,}"} for one in said] if number else []
    if left:
        text = _("Messages not changed, because they came due or another transaction is changing them: %(number)s.")
        if dry_run:
            text = _("Messages that will not be changed, because they are no longer scheduled: %(number)s.")
        summary.append(text % {"number": f"{left:,}"})
    return result_of(ScheduledResult, operation, number, *summary, dry_run=dry_run, not_scheduled=tuple(missing))
