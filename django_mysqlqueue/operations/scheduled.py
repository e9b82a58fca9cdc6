"""Operations on scheduled messages, before they come due: cancel, reschedule, deliver now."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence

from django.utils.translation import gettext as _

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.naming import KEY_LENGTH
from django_mysqlqueue.operations import rescheduling
from django_mysqlqueue.operations.arguments import alias_for, delivery_time, text, texts
from django_mysqlqueue.operations.lookups import check_topic
from django_mysqlqueue.operations.results import ScheduledResult, result_of
from django_mysqlqueue.service import scheduling
from django_mysqlqueue.sql.session import Session


def cancel(
    topic: str,
    ids: Sequence[str],
    *,
    key: str | None = None,
    actor: str,
    reason: str = "",
    using: str | None = None,
    dry_run: bool = False,
) -> ScheduledResult:
    """Delete scheduled messages before they come due, so that no consumer group receives them.

    ``django_mysqlqueue.cancel`` is for publishers: it joins the caller's transaction and leaves no record. This is for
    operators. Messages that another transaction has locked are not changed.

    Args:
        topic: the topic that the messages were published to.
        ids: of the messages, as ``publish`` returned them.
        key: only messages that were published with this key. None: all of the topic with these ids.
        actor: who does it, for the audit log.
        reason: why, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing, and return what would be done.

    Returns:
        A result that names the ids that no scheduled message has.

    Raises:
        OperationRefused: none of the messages is scheduled.
    """
    with alias_for(using, actor, reason, topic=topic) as alias:
        found, missing = _find(alias, topic, ids, key)
        return cancel_rows(
            topic, found, not_scheduled=missing, actor=actor, reason=reason, using=using, dry_run=dry_run
        )


def deliver_now(
    topic: str,
    ids: Sequence[str],
    *,
    key: str | None = None,
    actor: str,
    reason: str = "",
    using: str | None = None,
    dry_run: bool = False,
) -> ScheduledResult:
    """Deliver scheduled messages now instead of at their time; otherwise like ``cancel``.

    Args:
        topic: the topic that the messages were published to.
        ids: of the messages, as ``publish`` returned them.
        key: only messages that were published with this key.
        actor: who does it, for the audit log.
        reason: why, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing, and return what would be done.

    Raises:
        OperationRefused: none of the messages is scheduled.
    """
    with alias_for(using, actor, reason, topic=topic) as alias:
        found, missing = _find(alias, topic, ids, key)
        return move_rows(
            topic, found, None, not_scheduled=missing, actor=actor, reason=reason, using=using, dry_run=dry_run
        )


def reschedule(
    topic: str,
    ids: Sequence[str],
    deliver_at: datetime.datetime,
    *,
    key: str | None = None,
    actor: str,
    reason: str = "",
    using: str | None = None,
    dry_run: bool = False,
) -> ScheduledResult:
    """Deliver scheduled messages at another time; otherwise like ``cancel``.

    Args:
        topic: the topic that the messages were published to.
        ids: of the messages, as ``publish`` returned them.
        deliver_at: the time; a naive datetime is in the project's time zone, a past one means now.
        key: only messages that were published with this key.
        actor: who does it, for the audit log.
        reason: why, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing, and return what would be done.

    Raises:
        OperationRefused: none of the messages is scheduled, or ``deliver_at`` is not a datetime.
    """
    with alias_for(using, actor, reason, topic=topic) as alias:
        found, missing = _find(alias, topic, ids, key)
        return move_rows(
            topic, found, deliver_at, not_scheduled=missing, actor=actor, reason=reason, using=using, dry_run=dry_run
        )


def cancel_rows(
    topic: str,
    rows: Sequence[int],
    *,
    not_scheduled: Sequence[str] = (),
    actor: str,
    reason: str = "",
    using: str | None = None,
    dry_run: bool = False,
) -> ScheduledResult:
    """As ``cancel``, of messages named by their primary keys in the outbox: for pages that list them."""
    with alias_for(using, actor, reason, topic=topic) as alias:

        def delete() -> int:
            return rescheduling.cancel(alias, rows, by=actor, topic=topic, reason=reason)

        planned = _("Scheduled messages that will be deleted, so that no group receives them: %(number)s.")
        done = _("Scheduled messages cancelled: %(number)s.")
        return _change("cancel", alias, rows, delete, planned, done, not_scheduled, dry_run=dry_run)


def move_rows(
    topic: str,
    rows: Sequence[int],
    deliver_at: datetime.datetime | None,
    *,
    not_scheduled: Sequence[str] = (),
    actor: str,
    reason: str = "",
    using: str | None = None,
    dry_run: bool = False,
) -> ScheduledResult:
    """As ``reschedule``, or without a time ``deliver_now``, of messages named by primary keys in the outbox."""
    with alias_for(using, actor, reason, topic=topic) as alias:
        at = None if deliver_at is None else delivery_time(deliver_at)

        def move() -> int:
            if at is None:
                return rescheduling.deliver_now(alias, rows, by=actor, topic=topic, reason=reason)
            return rescheduling.move(alias, rows, at, by=actor, topic=topic, reason=reason)

        if deliver_at is None or at is None:
            planned = _("Scheduled messages that will be delivered now: %(number)s.")
            done = _("Scheduled messages that are due now: %(number)s.")
            return _change("deliver now", alias, rows, move, planned, done, not_scheduled, dry_run=dry_run)
        time = f"{deliver_at:%Y-%m-%d %H:%M:%S%z}"
        planned = _("Scheduled messages that will be delivered at %(time)s: %(number)s.").replace("%(time)s", time)
        if at <= Session(alias).now():
            planned += " " + _("That time is past: they will be delivered now.")
        done = _("Scheduled messages moved to %(time)s: %(number)s.").replace("%(time)s", time)
        return _change("reschedule", alias, rows, move, planned, done, not_scheduled, dry_run=dry_run)


def _change(
    operation: str,
    alias: str,
    rows: Sequence[int],
    change: Callable[[], int],
    planned: str,
    done: str,
    not_scheduled: Sequence[str],
    *,
    dry_run: bool,
) -> ScheduledResult:
    if dry_run:
        number, said = scheduling.count_scheduled(Session(alias), rows), planned
    else:
        number, said = change(), done
    left = len(set(rows)) - number
    summary = [said % {"number": f"{number:,}"}] if number else []
    if left:
        summary.append(
            _("Messages left as they are, because they came due or another transaction is changing them: %(number)s.")
            % {"number": f"{left:,}"}
        )
    return result_of(ScheduledResult, operation, number, *summary, dry_run=dry_run, not_scheduled=tuple(not_scheduled))


def _find(alias: str, topic: str, ids: Sequence[str], key: str | None) -> tuple[list[int], list[str]]:
    """Primary keys of the scheduled messages, and the ids that none has."""
    wanted = texts("ids", ids)
    if key is not None:
        text("key", key, most=KEY_LENGTH)
    found = scheduling.find(Session(alias), topic, wanted, key)
    there = {one.message_id for one in found}
    missing = [one for one in wanted if one not in there]
    if not found:
        check_topic(alias, topic)
        raise OperationRefused(f"Nothing was changed. {not_scheduled_text(topic, missing)}")
    return [one.outbox_id for one in found], missing


def not_scheduled_text(topic: str, ids: Sequence[str]) -> str:
    """What is said of ids that no scheduled message has."""
    return f"Not scheduled for the topic {topic!r}: {', '.join(map(repr, ids))} (due, cancelled or unknown)."
