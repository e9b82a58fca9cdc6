"""Operations on messages that a consumer group has claimed and not settled: retry, dead-letter."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_mysqlqueue import naming
from django_mysqlqueue.arguments import checked
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.operations import dead_lettering, retrying
from django_mysqlqueue.operations.arguments import REASON_LENGTH, alias_for, delivery_time, offsets_of, text, texts
from django_mysqlqueue.operations.limits import COUNTED
from django_mysqlqueue.operations.lookups import FoundGroup, check_known, group_of, unsettled_by_id
from django_mysqlqueue.operations.results import Result, ends_keys, number_said, result_of, sentence
from django_mysqlqueue.service import coalescing
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.effective import blocks_on_failure, known_handlers

NAMED = 5
"""Maximum number of messages that a preview describes one by one."""


@checked(OperationRefused, only=("progress",))
def retry(
    group: str,
    topic: str,
    *,
    ids: Sequence[str] | None = None,
    offsets: Sequence[int] | None = None,
    error: str | None = None,
    at: datetime.datetime | None = None,
    missing_ok: bool = False,
    reset_attempts: bool = False,
    actor: str,
    reason: str = "",
    using: str | None = None,
    dry_run: bool = False,
    progress: Callable[[int], object] = lambda rows: None,
) -> Result:
    """Retry messages that wait for another attempt, now or at a chosen time.

    They wait after a failure, a nack, a snooze, or after their subscriber was lost repeatedly. Deliveries in flight are
    not changed. Subscribers learn of it within a tick (``LEASE_RENEWAL_INTERVAL``).

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        ids: only the messages with these ids, as ``publish`` returned them.
        offsets: only the messages at these offsets. Without ``ids`` and ``offsets``, all waiting messages are retried.
        error: only messages whose last error contains this text.
        at: time of the next attempt; a naive datetime is in the project's time zone. None or a time in the past: now.
        missing_ok: ignore named messages that are not waiting, instead of refusing the operation.
        reset_attempts: count the attempts from 1 again.
        actor: who runs the operation, for the audit log.
        reason: why, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing; return what would be changed.
        progress: called after each transaction with the number of messages that it changed.

    Raises:
        OperationRefused: there is no such group; one of the named messages is not waiting; ``at`` is not a valid
            datetime; a seek or drop of the group has not finished; or it was dropped and registered again in the
            meantime.
    """
    with alias_for(using, actor, reason, group=group, topic=topic) as alias:
        found = group_of(alias, group, topic)
        ref = found.ref
        if error is not None:
            text("error", error, most=REASON_LENGTH)
        due = 0 if at is None else delivery_time(at, "at")
        if due <= Session(alias).now():
            due = 0
        rows = _waiting_rows(alias, ref, ids, offsets, due, missing_ok=missing_ok)
        if not dry_run:
            number = retrying.retry(
                alias,
                ref,
                actor=actor,
                reason=reason,
                rows=rows,
                error=error,
                due=due,
                reset_attempts=reset_attempts,
                progress=progress,
            )
        elif rows is None:
            number = retrying.waiting(alias, ref, most=COUNTED, error=error, other_than=due)
        else:
            number = len(rows if error is None else retrying.having(alias, ref, rows, error))
        said = _retry_text(number, error, due, dry_run=dry_run)
        values = {"number": number_said(number, dry_run=dry_run), "ref": ref, "error": error, "time": ""}
        if due and at is not None:
            values["time"] = f"{at:%Y-%m-%d %H:%M:%S%z}"
        more = []
        warnings: list[str] = []
        if dry_run and number:
            more += [_("This time is in the past: the messages will be retried now.")] if at and not due else []
            more += [_("Their attempts will be counted from 1 again.")] if reset_attempts else []
            warnings += _order_warnings(found) if due else []
        return result_of(Result, "retry", number, said % values, *more, dry_run=dry_run, warnings=tuple(warnings))


def _retry_text(number: int, error: str | None, due: int, *, dry_run: bool) -> str:
    planned = _("Messages of the group %(ref)s that will be retried now: %(number)s.")
    done = _("Messages of the group %(ref)s that are due now: %(number)s.")
    nothing = _("No messages of the group %(ref)s are waiting for another attempt.")
    if due:
        planned = _("Messages of the group %(ref)s that will be retried at %(time)s: %(number)s.")
        done = _("Messages of the group %(ref)s that will be retried at %(time)s: %(number)s.")
        nothing = _("No messages of the group %(ref)s are waiting for an attempt at another time than %(time)s.")
    if error is not None:
        nothing = _("No messages of the group %(ref)s with an error that contains “%(error)s” are waiting.")
    return sentence(number, dry_run=dry_run, planned=planned, done=done, nothing=nothing)


def _order_warnings(found: FoundGroup) -> list[str]:
    """Return what moving retries means for the messages behind them."""
    blocks = blocks_on_failure(found.mode, known_handlers().get(found.ref))
    if blocks:
        return [_('The handler has on_failure="block": all later messages of their partitions wait, too.')]
    warnings = []
    if blocks is None:
        warnings.append(_('If the handler has on_failure="block", all later messages of their partitions wait, too.'))
    if found.mode == ConsumerGroup.Mode.ORDERED:
        warnings.append(_("Later messages of a partition wait for a message whose subscriber was lost."))
    return warnings


def _waiting_rows(
    alias: str, ref: GroupRef, ids: Sequence[str] | None, offsets: Sequence[int] | None, due: int, *, missing_ok: bool
) -> list[tuple[str, int]] | None:
    """Return (partition key, offset) of the named messages; None for all that wait."""
    if ids is None and offsets is None:
        return None
    ids = None if ids is None else texts("ids", ids)
    offsets = None if offsets is None else offsets_of(offsets)
    by_id = unsettled_by_id(alias, ref, ids or ())
    wanted = [*(offset for found in by_id.values() for offset in found), *(offsets or ())]
    rows = retrying.at(alias, ref, wanted, due=due)
    if not missing_ok:
        waiting: set[object] = {offset for _key, offset in rows}
        waiting |= {one for one, found in by_id.items() if waiting.intersection(found)}
        refusal = f"These messages are not waiting for another attempt in the group {ref}: {{}}."
        check_known(refusal, [*(ids or ()), *(offsets or ())], waiting)
    return rows


def dead_letter(
    group: str,
    topic: str,
    *,
    ids: Sequence[str] | None = None,
    offsets: Sequence[int] | None = None,
    missing_ok: bool = False,
    actor: str,
    reason: str = "",
    using: str | None = None,
    dry_run: bool = False,
) -> Result:
    """Move messages of a consumer group to the DLQ instead of retrying them.

    Their remaining attempts are skipped.

    A message qualifies while it waits for another attempt, or if the subscriber that held it was lost.

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        ids: ids of the messages, as ``publish`` returned them.
        offsets: offsets of the messages in the log; together with ``ids``, at most 500.
        missing_ok: ignore messages at ``offsets`` that do not qualify, instead of refusing the operation. It is refused
            if none qualifies.
        actor: who runs the operation, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing; return what would be changed.
        reason: why, for the audit log and the dead letters' ``last_error``.

    Raises:
        OperationRefused: there is no such group; its topic is a DLQ topic; a seek or drop of it has not finished; or a
            message does not qualify. The text says which and why; nothing was changed.
        CommitOutcomeUnknown: the connection was lost during COMMIT. Run it again: messages that were dead-lettered are
            then refused as settled.
    """
    with alias_for(using, actor, reason, group=group, topic=topic) as alias:
        ref = group_of(alias, group, topic).ref
        if ids is None and offsets is None:
            raise OperationRefused("ids or offsets: pass at least one message")
        ids = [] if ids is None else texts("ids", ids)
        by_id = unsettled_by_id(alias, ref, ids)
        check_known(f"The group {ref} has not claimed these messages, or has settled them: {{}}.", ids, by_id)
        wanted = [offset for found in by_id.values() for offset in found]
        wanted += [] if offsets is None else offsets_of(offsets)
        dlq = naming.dlq_topic(topic)
        if not dry_run:
            changed = dead_lettering.dead_letter_now(
                alias, ref, wanted, actor=actor, reason=reason, missing_ok=missing_ok
            )
            said = _("Messages dead-lettered to %(topic)s: %(number)s.") % {
                "topic": dlq,
                "number": f"{changed:,}",
            }
            return result_of(Result, "dead_letter", changed, said, dry_run=False)
        found = dead_lettering.find(alias, ref, wanted, missing_ok=missing_ok)
        summary = [
            _("Messages of the group %(ref)s that will be dead-lettered to %(topic)s: %(number)s.")
            % {"ref": ref, "topic": dlq, "number": f"{len(found):,}"},
            *(
                ngettext(
                    "Message %(offset)s has failed %(failed)s time.",
                    "Message %(offset)s has failed %(failed)s times.",
                    one.failed,
                )
                % {"offset": one.offset, "failed": one.failed}
                for one in found[:NAMED]
            ),
            _("Dead letters get no further attempts until they are redriven."),
        ]
        warnings = (ends_keys(),) if coalescing.has_key(Session(alias), [one.offset for one in found]) else ()
        return result_of(Result, "dead_letter", len(found), *summary, dry_run=True, warnings=warnings)
