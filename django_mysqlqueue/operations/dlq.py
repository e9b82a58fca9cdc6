"""Operations on dead letters: redrive, discard, edit."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

from django.utils.translation import gettext as _

from django_mysqlqueue import naming
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
from django_mysqlqueue.operations.lookups import check_known, check_topic, dead_letters_by_id, named_or_meant
from django_mysqlqueue.operations.results import EditResult, Result, number_said, result_of, sentence
from django_mysqlqueue.service import groups
from django_mysqlqueue.service.dead_letters import DeadLetterFilter, failed_groups, matching_offsets
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session


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
    """Send dead letters back to the consumer groups that failed them, each to that group alone.

    Each becomes a message of its first topic with a new id and a new offset; ``Delivery.id`` still shows the id that
    ``publish`` returned. If ``ids`` or ``offsets`` name dead letters, only those are sent; of these, or of
    all, those that meet every other condition.

    Args:
        topic: the topic that the messages were published to, or its DLQ topic.
        ids: only the dead letters of the messages with these ids, as ``publish`` returned them.
        offsets: only those at these offsets of the DLQ topic.
        group: only those that this group failed.
        error: only those whose error has this text in it.
        since: only those that failed then or later; a naive datetime is in the project's time zone.
        until: only those that failed then or earlier.
        missing_ok: pass over ids and offsets without a dead letter, instead of refusing them.
        rate: maximum number per second; None: no limit.
        limit: maximum number.
        actor: who does it, for the audit log.
        reason: why, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing, and return what would be done.
        progress: called after each transaction with the number of dead letters that it has sent.

    Raises:
        OperationRefused: there is no such topic, group or dead letter; ``rate`` or ``limit`` is out of range; or the
            group that failed one of them is not registered any more. What was sent before that stays sent.
    """
    with alias_for(using, actor, reason, topic=topic) as alias:
        check_rate(rate)
        check_limit(limit)
        letters = _filter(alias, topic, ids, offsets, group, error, since, until, missing_ok=missing_ok)
        if dry_run:
            number = _count(alias, letters, limit)
            redriving.check_groups(alias, letters, number)
        else:
            number = redriving.redrive(
                alias, letters, actor=actor, reason=reason, rate=rate, limit=limit, progress=progress
            )
        said = sentence(
            number,
            dry_run=dry_run,
            planned=_(
                "Dead letters of %(topic)s that will be sent back, each to the group that failed it: %(number)s."
            ),
            done=_("Dead letters sent back: %(number)s."),
            nothing=_nothing(),
        )
        return result_of(Result, "redrive", number, said % _values(letters, number, dry_run=dry_run), dry_run=dry_run)


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
    """Delete dead letters; this cannot be undone. The audit log keeps who did it, when and why.

    Args:
        topic: the topic that the messages were published to, or its DLQ topic.
        ids: only the dead letters of these messages: the ids that ``publish`` returned.
        offsets: only those at these offsets of the DLQ topic.
        group: only those that this group failed.
        error: only those whose error contains this text.
        since: only those that failed then or later; a naive datetime is in the project's time zone.
        until: only those that failed then or earlier.
        missing_ok: pass over ids and offsets without a dead letter, instead of refusing them.
        limit: maximum number.
        actor: who does it, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing, and return what would be done.
        reason: why; required, except with ``dry_run``.
        progress: called after each transaction with the number of dead letters that it has deleted.

    Raises:
        OperationRefused: there is no such topic, group or dead letter; ``limit`` is out of range; or no reason was
            given.
    """
    with alias_for(using, actor, reason, topic=topic) as alias:
        check_limit(limit)
        letters = _filter(alias, topic, ids, offsets, group, error, since, until, missing_ok=missing_ok)
        if dry_run:
            number = _count(alias, letters, limit)
        else:
            number = redriving.discard(alias, letters, actor=actor, reason=reason, limit=limit, progress=progress)
        said = sentence(
            number,
            dry_run=dry_run,
            planned=_("Dead letters of %(topic)s that will be deleted: %(number)s."),
            done=_("Dead letters deleted: %(number)s."),
            nothing=_nothing(),
        )
        return result_of(Result, "discard", number, said % _values(letters, number, dry_run=dry_run), dry_run=dry_run)


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
    """Replace a dead letter by a message with a corrected payload, for the group that failed it alone.

    The new message has an id of its own; its metadata name the id of the old one.

    Args:
        topic: the topic that the message was published to, or its DLQ topic.
        payload: as in ``publish``; the metadata stay as they were.
        id: of the message, as ``publish`` returned it.
        offset: of the dead letter in the DLQ topic, instead of the id.
        actor: who does it, for the audit log.
        reason: why, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing, and return what would be done.

    Returns:
        A result with the new message's id.

    Raises:
        InvalidMessage: ``publish`` would refuse the payload.
        OperationRefused: there is no such topic or dead letter; several groups failed the message, so that only an
            offset names one dead letter; or the group is not registered any more.
    """
    with alias_for(using, actor, reason, topic=topic) as alias:
        check_topic(alias, topic)
        dlq = naming.dlq_topic(topic)
        if (id is None) == (offset is None):
            raise OperationRefused("id or offset: exactly one of them must name the dead letter")
        if offset is None:
            found = [offset for one in dead_letters_by_id(alias, dlq, texts("id", [id])).values() for offset in one]
            if len(found) > 1:
                raise OperationRefused(
                    f"id {id!r}: {dlq} has {len(found)} dead letters of it, at the offsets "
                    f"{', '.join(map(str, sorted(found)))}; name one by its offset"
                )
            if not found:
                raise OperationRefused(f"id {id!r}: {dlq} has no dead letter of it")
            offset = found[0]
        (offset,) = offsets_of([offset], "offset")
        if dry_run:
            ref, size = redriving.find_replaced(alias, dlq, offset, payload)
            said = _(
                "A new message (size in bytes: %(size)s) will replace the dead letter, for the group %(ref)s alone."
            )
            return result_of(EditResult, "replace", 1, said % {"size": f"{size:,}", "ref": ref}, dry_run=True)
        new_id = redriving.replace(alias, dlq, offset, payload, actor=actor, reason=reason)
        said = _("The message %(id)s replaces the dead letter.")
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
    """The dead letters that are named; None: all are meant."""
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
    """A group of the topic, or one that has failed a message of it and is not registered any more."""
    topic = naming.first_topic(dlq)
    if groups.find(alias, GroupRef(group, topic)) or redriving.count(alias, DeadLetterFilter(dlq, group=group), most=1):
        return
    known = {ref.group for ref in groups.registered_refs(alias) if ref.topic == topic}
    known |= failed_groups(Session(alias), dlq)
    raise OperationRefused(
        f"There is no group {group!r} of {topic!r}, and {dlq} has no dead letters of a former one. "
        f"Groups: {named_or_meant(group, sorted(known))}"
    )


def _count(alias: str, letters: DeadLetterFilter, limit: int | None) -> int:
    return redriving.count(alias, letters, most=COUNTED if limit is None else min(COUNTED, limit))


def _nothing() -> str:
    return _("No dead letter of %(topic)s matches.")


def _values(letters: DeadLetterFilter, number: int, *, dry_run: bool) -> dict[str, str]:
    return {"topic": letters.topic, "number": number_said(number, dry_run=dry_run)}
