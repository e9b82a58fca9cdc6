"""Operations on dead letters: redrive, discard, edit."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

from django.utils.translation import gettext as _

from django_mysqlqueue import naming
from django_mysqlqueue.arguments import checked
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.operations import redriving
from django_mysqlqueue.operations.arguments import (
    REASON_LENGTH,
    alias_for,
    check_limit,
    check_rate,
    milliseconds,
    offsets_of,
    text,
    texts,
)
from django_mysqlqueue.operations.limits import COUNTED, LIMITS
from django_mysqlqueue.operations.lookups import check_known, check_topic, dead_letters_by_id, known_names
from django_mysqlqueue.operations.results import EditResult, Result, ends_keys, number_said, result_of, sentence
from django_mysqlqueue.service import coalescing, groups
from django_mysqlqueue.service.dead_letters import DeadLetterFilter, failed_groups, matching_offsets
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session


@checked(OperationRefused, only=("progress",))
def redrive(
    topic: str,
    *,
    ids: Sequence[str] | None = None,
    offsets: Sequence[int] | None = None,
    group: str | None = None,
    error: str | None = None,
    since: datetime.datetime | None = None,
    until: datetime.datetime | None = None,
    missing_ok: bool = False,
    rate: float | None = None,
    limit: int | None = None,
    actor: str,
    reason: str = "",
    using: str | None = None,
    dry_run: bool = False,
    progress: Callable[[int], object] = lambda rows: None,
) -> Result:
    """Publish dead letters again, each only for the consumer group that dead-lettered it.

    Each becomes a message of its original topic with a new id and a new offset; ``Delivery.id`` is still the id that
    ``publish`` returned. If ``ids`` or ``offsets`` name dead letters, only those are considered, otherwise all. Of
    these, the ones that meet every other condition are redriven.

    Args:
        topic: the topic that the messages were published to, or its DLQ topic.
        ids: only the dead letters of the messages with these ids, as ``publish`` returned them.
        offsets: only the dead letters at these offsets of the DLQ topic.
        group: only dead letters of this consumer group.
        error: only dead letters whose error contains this text.
        since: only dead letters that failed at or after this time; a naive datetime is in the project's time zone.
        until: only dead letters that failed at or before this time.
        missing_ok: ignore ids and offsets without a dead letter, instead of refusing the operation.
        rate: maximum number of messages per second; None: no limit.
        limit: maximum number of dead letters.
        actor: who runs the operation, for the audit log.
        reason: why, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing; return what would be changed.
        progress: called after each transaction with the number of dead letters that it redrove.

    Raises:
        OperationRefused: there is no such topic, group or dead letter; ``rate`` or ``limit`` is out of range; or the
            group of a dead letter is no longer registered. What was redriven before that stays redriven.
    """
    with alias_for(using, actor, reason, topic=topic) as alias:
        check_rate(rate)
        check_limit(limit)
        wanted = _filter(alias, topic, ids, offsets, group, error, since, until, missing_ok=missing_ok)
        if dry_run:
            number = _count(alias, wanted, limit)
            redriving.check_groups(alias, wanted, number)
        else:
            number = redriving.redrive(
                alias, wanted, actor=actor, reason=reason, rate=rate, limit=limit, progress=progress
            )
        said = sentence(
            number,
            dry_run=dry_run,
            planned=_(
                "Dead letters of %(topic)s that will be redriven, each for the group that failed it: %(number)s."
            ),
            done=_("Dead letters redriven: %(number)s."),
            nothing=_nothing(),
        )
        return result_of(Result, "redrive", number, said % _values(wanted, number, dry_run=dry_run), dry_run=dry_run)


@checked(OperationRefused, only=("progress",))
def discard(
    topic: str,
    *,
    ids: Sequence[str] | None = None,
    offsets: Sequence[int] | None = None,
    group: str | None = None,
    error: str | None = None,
    since: datetime.datetime | None = None,
    until: datetime.datetime | None = None,
    missing_ok: bool = False,
    limit: int | None = None,
    actor: str,
    reason: str,
    using: str | None = None,
    dry_run: bool = False,
    progress: Callable[[int], object] = lambda rows: None,
) -> Result:
    """Delete dead letters. This cannot be undone. The audit log records who did it, when and why.

    Args:
        topic: the topic that the messages were published to, or its DLQ topic.
        ids: only the dead letters of the messages with these ids, as ``publish`` returned them.
        offsets: only the dead letters at these offsets of the DLQ topic.
        group: only dead letters of this consumer group.
        error: only dead letters whose error contains this text.
        since: only dead letters that failed at or after this time; a naive datetime is in the project's time zone.
        until: only dead letters that failed at or before this time.
        missing_ok: ignore ids and offsets without a dead letter, instead of refusing the operation.
        limit: maximum number of dead letters.
        actor: who runs the operation, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing; return what would be changed.
        reason: why; required, except with ``dry_run``.
        progress: called after each transaction with the number of dead letters that it deleted.

    Raises:
        OperationRefused: there is no such topic, group or dead letter; ``limit`` is out of range; or no reason was
            given.
    """
    with alias_for(using, actor, reason, topic=topic) as alias:
        check_limit(limit)
        wanted = _filter(alias, topic, ids, offsets, group, error, since, until, missing_ok=missing_ok)
        warnings: tuple[str, ...] = ()
        if dry_run:
            number = _count(alias, wanted, limit)
            first = next(matching_offsets(Session(alias), wanted, size=LIMITS.dead_letters), [])
            warnings = (ends_keys(),) if coalescing.has_key(Session(alias), first[:limit]) else ()
        else:
            number = redriving.discard(alias, wanted, actor=actor, reason=reason, limit=limit, progress=progress)
        said = sentence(
            number,
            dry_run=dry_run,
            planned=_("Dead letters of %(topic)s that will be deleted: %(number)s."),
            done=_("Dead letters deleted: %(number)s."),
            nothing=_nothing(),
        )
        said %= _values(wanted, number, dry_run=dry_run)
        return result_of(Result, "discard", number, said, dry_run=dry_run, warnings=warnings)


def edit(
    topic: str,
    payload: Any,
    *,
    id: str | None = None,
    offset: int | None = None,
    actor: str,
    reason: str = "",
    using: str | None = None,
    dry_run: bool = False,
) -> EditResult:
    """Replace a dead letter with a message that has a corrected payload.

    Only the group that dead-lettered the original receives the new message. It has a new id; its metadata contains the
    id of the old one.

    Args:
        topic: the topic that the message was published to, or its DLQ topic.
        payload: as in ``publish``; the metadata does not change.
        id: id of the message, as ``publish`` returned it.
        offset: instead of the id: offset of the dead letter in the DLQ topic.
        actor: who runs the operation, for the audit log.
        reason: why, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing; return what would be changed.

    Returns:
        The result, with the id of the new message.

    Raises:
        InvalidMessage: ``publish`` would refuse the payload.
        OperationRefused: there is no such topic or dead letter; several groups dead-lettered the message, so that you
            must pass the offset of one dead letter; or the group is no longer registered.
    """
    with alias_for(using, actor, reason, topic=topic) as alias:
        check_topic(alias, topic)
        dlq = naming.dlq_topic(topic)
        if (id is None) == (offset is None):
            raise OperationRefused("id or offset: pass exactly one of them")
        if offset is None:
            found = [offset for one in dead_letters_by_id(alias, dlq, texts("id", [id])).values() for offset in one]
            if len(found) > 1:
                raise OperationRefused(
                    f"id {id!r}: {dlq} has {len(found)} dead letters of this message, at the offsets "
                    f"{', '.join(map(str, sorted(found)))}; pass the offset of one"
                )
            if not found:
                raise OperationRefused(f"id {id!r}: {dlq} has no dead letter of this message")
            offset = found[0]
        (offset,) = offsets_of([offset], "offset")
        if dry_run:
            ref, size = redriving.find_replaced(alias, dlq, offset, payload)
            said = _(
                "A new message of %(size)s bytes will replace the dead letter. Only the group %(ref)s receives it."
            )
            return result_of(EditResult, "replace", 1, said % {"size": f"{size:,}", "ref": ref}, dry_run=True)
        new_id = redriving.replace(alias, dlq, offset, payload, actor=actor, reason=reason)
        said = _("The message %(id)s has replaced the dead letter.")
        return result_of(EditResult, "replace", 1, said % {"id": new_id}, dry_run=False, message_id=new_id)


def _filter(
    alias: str,
    topic: str,
    ids: Sequence[str] | None,
    offsets: Sequence[int] | None,
    group: str | None,
    error: str | None,
    since: datetime.datetime | None,
    until: datetime.datetime | None,
    *,
    missing_ok: bool,
) -> DeadLetterFilter:
    check_topic(alias, topic)
    dlq = naming.dlq_topic(topic)
    if error is not None:
        text("error", error, most=REASON_LENGTH)
    if group is not None:
        _check_group(alias, dlq, text("group", group, most=naming.NAME_LENGTH))
    return DeadLetterFilter(
        dlq,
        offsets=_offsets(alias, dlq, ids, offsets, missing_ok=missing_ok),
        group=group,
        error=error,
        since=None if since is None else milliseconds("since", since),
        until=None if until is None else milliseconds("until", until),
    )


def _offsets(
    alias: str, dlq: str, ids: Sequence[str] | None, offsets: Sequence[int] | None, *, missing_ok: bool
) -> tuple[int, ...] | None:
    """Return the offsets of the named dead letters; None for all."""
    if ids is None and offsets is None:
        return None
    ids = None if ids is None else texts("ids", ids)
    offsets = None if offsets is None else offsets_of(offsets)
    by_id = dead_letters_by_id(alias, dlq, ids or ())
    there: set[object] = set()
    if offsets and not missing_ok:
        pages = matching_offsets(
            Session(alias), DeadLetterFilter(dlq, offsets=tuple(offsets)), size=LIMITS.dead_letters
        )
        there = {offset for page in pages for offset in page}
    if not missing_ok:
        check_known(f"{dlq} has no dead letter of these messages: {{}}.", ids or (), by_id)
        check_known(f"There is no dead letter of {dlq} at these offsets: {{}}.", offsets or (), there)
    return tuple(sorted({*(offset for found in by_id.values() for offset in found), *(offsets or ())}))


def _check_group(alias: str, dlq: str, group: str) -> None:
    """Require a registered group on the topic, or a former one that has dead letters."""
    topic = naming.first_topic(dlq)
    if groups.find(alias, GroupRef(group, topic)) or redriving.count(alias, DeadLetterFilter(dlq, group=group), most=1):
        return
    known = {ref.group for ref in groups.registered_refs(alias) if ref.topic == topic}
    known |= failed_groups(Session(alias), dlq)
    raise OperationRefused(
        f"There is no group {group!r} on topic {topic!r}, and {dlq} has no dead letters of a dropped one.",
        known=known_names("Groups", group, dict.fromkeys(sorted(known), topic)),
    )


def _count(alias: str, wanted: DeadLetterFilter, limit: int | None) -> int:
    return redriving.count(alias, wanted, most=COUNTED if limit is None else min(COUNTED, limit))


def _nothing() -> str:
    return _("No dead letters of %(topic)s match.")


def _values(wanted: DeadLetterFilter, number: int, *, dry_run: bool) -> dict[str, str]:
    return {"topic": wanted.topic, "number": number_said(number, dry_run=dry_run)}
