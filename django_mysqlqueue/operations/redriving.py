"""Redrive, discard and replace dead letters.

A dead letter is taken by deleting its row of the log by primary key, which only one operation can do. The same
transaction inserts it into the outbox for the group that failed it, or records who discarded it and why. These are the
only deletes from the log apart from GC.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Unpack

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.arguments import checked, spelled_out
from django_mysqlqueue.db.tables import LOG, OUTBOX
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup, DeliveryEvent
from django_mysqlqueue.names.ids import new_message_id
from django_mysqlqueue.names.rules import NAME_LENGTH, REPLACES
from django_mysqlqueue.operations.arguments import (
    REASON_LENGTH,
    check_limit,
    check_rate,
    key_of,
    milliseconds,
    offsets_of,
    text,
    texts,
)
from django_mysqlqueue.operations.declaring import How, Work, operating
from django_mysqlqueue.operations.limits import COUNTED, LIMITS
from django_mysqlqueue.operations.lookups import check_known, check_topic, dead_letters_by_id, known_names
from django_mysqlqueue.operations.results import EditResult, Result, ends_keys, number_said, result_of
from django_mysqlqueue.options.topics import dlq_topic, first_topic
from django_mysqlqueue.service import audit, coalescing, delivery_events, groups, job_results, messages, routing
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.dead_letters import DeadLetterFilter, failed_groups, matching_offsets
from django_mysqlqueue.service.log import PUBLISHED_ID
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, flat, run

REDRIVE = audit.Action("redrive", gettext_lazy("Redrive dead letters"), audit.DEAD_LETTERS)
DISCARD = audit.Action("discard", gettext_lazy("Discard dead letters"), audit.DEAD_LETTERS)
_KEY_HELD = gettext_lazy("Dead letters left, because other jobs hold the unique keys of their jobs: %(number)s.")
REPLACE = audit.Action("replace", gettext_lazy("Edit and redrive"), audit.DEAD_LETTERS)
COUNTED_AT_ONCE = 1000
"""Number of dead letters that a count reads at once. Unlike transactions, it keeps nobody waiting."""


class _DeadLetter(NamedTuple):
    offset: int
    key: str
    publisher_key: str | None
    failed_group: str
    original_topic: str
    attempts: int


@spelled_out
@checked(OperationRefused, only=("progress",))
def redrive(
    topic: str,
    *,
    ids: Sequence[str] | None = None,
    offsets: Sequence[int] | None = None,
    group: str | None = None,
    key: str | None = None,
    task: str | None = None,
    error: str | None = None,
    since: datetime.datetime | None = None,
    until: datetime.datetime | None = None,
    missing_ok: bool = False,
    rate: float | None = None,
    limit: int | None = None,
    progress: Callable[[int], object] = lambda rows: None,
    **how: Unpack[How],
) -> Result:
    """Publish dead letters again, each only for the consumer group that dead-lettered it.

    Each becomes a message of its original topic with a new id and a new offset; ``Delivery.id`` is still the id that
    ``publish`` returned. If ``ids`` or ``offsets`` name dead letters, only those are considered, otherwise all. Of
    these, the ones that meet every other condition are redriven. A dead letter of a job whose unique key another job
    holds is left, and the result has a warning.

    Args:
        topic: the topic that the messages were published to, or its DLQ topic.
        ids: only the dead letters of the messages with these ids, as ``publish`` returned them.
        offsets: only the dead letters at these offsets of the DLQ topic.
        group: only dead letters of this consumer group.
        key: only dead letters of messages that were published with this key. Those that were hashed while
            ``PARTITIONS`` had another value are not found, unless ``ids`` or ``offsets`` name them.
        task: only dead letters of jobs of the task with this dotted path, which is their key.
        error: only dead letters whose error contains this text.
        since: only dead letters that failed at or after this time; a naive datetime is in the project's time zone.
        until: only dead letters that failed at or before this time.
        missing_ok: ignore ids and offsets without a dead letter, instead of refusing the operation.
        rate: maximum number of messages per second; None: no limit.
        limit: maximum number of dead letters.
        progress: called after each transaction with the number of dead letters that it redrove.

    Raises:
        OperationRefused: there is no such topic, group or dead letter; ``rate`` or ``limit`` is out of range; or the
            group of a dead letter is no longer registered. What was redriven before that stays redriven.
    """
    with operating(how, topic=topic) as work:
        alias = work.using
        check_rate(rate)
        check_limit(limit)
        wanted = _filter(alias, topic, group, key_of(key, task), error, since, until)
        wanted = _named(alias, wanted, ids, offsets, missing_ok=missing_ok)
        return _redrive(work, wanted, rate=rate, limit=limit, progress=progress)


@spelled_out
def redrive_found(
    found: DeadLetterFilter, *, kind: str | None = None, rate: float | None = None, **how: Unpack[How]
) -> Result:
    """Redrive dead letters that somebody has selected, or found by a filter: those at its offsets.

    ``kind``: the kind of error by which they were found, for the audit log.
    """
    with operating(how, topic=found.topic) as work:
        check_rate(rate)
        return _redrive(work, found, kind=kind, rate=rate)


def _redrive(
    work: Work,
    wanted: DeadLetterFilter,
    *,
    kind: str | None = None,
    rate: float | None = None,
    limit: int | None = None,
    progress: Callable[[int], object] = lambda rows: None,
) -> Result:
    alias, by, dry_run = work
    held: set[int] = set()
    if dry_run:
        number = count(alias, wanted, most=min(COUNTED, limit or COUNTED))
        check_groups(alias, wanted, number)
        said = _("Dead letters of %(topic)s that will be redriven, each for the group that failed it: %(number)s.")
    else:
        number = redrive_all(alias, wanted, **by, kind=kind, rate=rate, limit=limit, progress=progress, held=held)
        said = _("Dead letters redriven: %(number)s.")
    warnings = [_KEY_HELD % {"number": f"{len(held):,}"}] if held else []
    return _result(REDRIVE, wanted, number, said, *warnings, dry_run=dry_run)


# Not ``How``: here, the reason is required.
@checked(OperationRefused, only=("progress",))
def discard(
    topic: str,
    *,
    ids: Sequence[str] | None = None,
    offsets: Sequence[int] | None = None,
    group: str | None = None,
    key: str | None = None,
    task: str | None = None,
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
        key: only dead letters of messages that were published with this key. Those that were hashed while
            ``PARTITIONS`` had another value are not found, unless ``ids`` or ``offsets`` name them.
        task: only dead letters of jobs of the task with this dotted path, which is their key.
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
    how: How = {"actor": actor, "reason": reason, "using": using, "dry_run": dry_run}
    with operating(how, topic=topic) as work:
        alias = work.using
        check_limit(limit)
        wanted = _filter(alias, topic, group, key_of(key, task), error, since, until)
        wanted = _named(alias, wanted, ids, offsets, missing_ok=missing_ok)
        return _discard(work, wanted, limit=limit, progress=progress)


@spelled_out
def discard_found(found: DeadLetterFilter, *, kind: str | None = None, **how: Unpack[How]) -> Result:
    """Delete dead letters as ``redrive_found`` redrives them."""
    with operating(how, topic=found.topic) as work:
        return _discard(work, found, kind=kind)


def _discard(
    work: Work,
    wanted: DeadLetterFilter,
    *,
    kind: str | None = None,
    limit: int | None = None,
    progress: Callable[[int], object] = lambda rows: None,
) -> Result:
    alias, by, dry_run = work
    if not dry_run:
        number = discard_all(alias, wanted, **by, kind=kind, limit=limit, progress=progress)
        return _result(DISCARD, wanted, number, _("Dead letters deleted: %(number)s."), dry_run=False)
    number = count(alias, wanted, most=min(COUNTED, limit or COUNTED))
    first = next(matching_offsets(Session(alias), wanted, size=LIMITS.dead_letters), [])
    warnings = [ends_keys()] if coalescing.has_key(Session(alias), first[:limit]) else []
    said = _("Dead letters of %(topic)s that will be deleted: %(number)s.")
    return _result(DISCARD, wanted, number, said, *warnings, dry_run=True)


@spelled_out
def edit(
    topic: str, payload: Any, *, id: str | None = None, offset: int | None = None, **how: Unpack[How]
) -> EditResult:
    """Replace a dead letter with a message that has a corrected payload.

    Only the group that dead-lettered the original receives the new message. It has a new id; its metadata contains the
    id of the old one.

    Args:
        topic: the topic that the message was published to, or its DLQ topic.
        payload: as in ``publish``; the metadata does not change.
        id: id of the message, as ``publish`` returned it.
        offset: instead of the id: offset of the dead letter in the DLQ topic.

    Returns:
        The result, with the id of the new message.

    Raises:
        InvalidMessage: ``publish`` would refuse the payload.
        OperationRefused: there is no such topic or dead letter; several groups dead-lettered the message, so that you
            must pass the offset of one dead letter; or the group is no longer registered.
    """
    with operating(how, topic=topic) as (alias, by, dry_run):
        check_topic(alias, topic)
        dlq = dlq_topic(topic)
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
            ref, body, _metadata = _replacement(Session(alias), dlq, offset, payload)
            said = _(
                "A new message of %(size)s bytes will replace the dead letter. Only the group %(ref)s receives it."
            )
            return result_of(EditResult, REPLACE, 1, said % {"size": f"{len(body):,}", "ref": ref}, dry_run=True)
        new_id = replace(alias, dlq, offset, payload, **by)
        said = _("The message %(id)s has replaced the dead letter.")
        return result_of(EditResult, REPLACE, 1, said % {"id": new_id}, dry_run=False, message_id=new_id)


def _filter(
    alias: str,
    topic: str,
    group: str | None,
    key: str | None,
    error: str | None,
    since: datetime.datetime | None,
    until: datetime.datetime | None,
) -> DeadLetterFilter:
    check_topic(alias, topic)
    dlq = dlq_topic(topic)
    if error is not None:
        text("error", error, most=REASON_LENGTH)
    if group is not None:
        _check_group(alias, dlq, text("group", group, most=NAME_LENGTH))
    return DeadLetterFilter(
        dlq,
        group=group,
        key=key,
        error=error,
        since=None if since is None else milliseconds("since", since),
        until=None if until is None else milliseconds("until", until),
    )


def _named(
    alias: str,
    wanted: DeadLetterFilter,
    ids: Sequence[str] | None,
    offsets: Sequence[int] | None,
    *,
    missing_ok: bool,
) -> DeadLetterFilter:
    """Return a filter for the dead letters that ids and offsets name; without both, for all."""
    if ids is None and offsets is None:
        return wanted
    dlq = wanted.topic
    ids = [] if ids is None else texts("ids", ids)
    offsets = [] if offsets is None else offsets_of(offsets)
    by_id = dead_letters_by_id(alias, dlq, ids)
    there: set[object] = set()
    if offsets and not missing_ok:
        at = DeadLetterFilter(dlq, offsets=tuple(offsets))
        there = {offset for page in matching_offsets(Session(alias), at, size=LIMITS.dead_letters) for offset in page}
    if not missing_ok:
        check_known(f"{dlq} has no dead letter of these messages: {{}}.", ids, by_id)
        check_known(f"There is no dead letter of {dlq} at these offsets: {{}}.", offsets, there)
    named = {offset for found in by_id.values() for offset in found}
    return wanted._replace(offsets=tuple(sorted(named.union(offsets))))


def _check_group(alias: str, dlq: str, group: str) -> None:
    """Require a registered group on the topic, or a former one that has dead letters."""
    topic = first_topic(dlq)
    if groups.find(alias, GroupRef(group, topic)) or count(alias, DeadLetterFilter(dlq, group=group), most=1):
        return
    known = {ref.group for ref in groups.registered_refs(alias) if ref.topic == topic}
    known |= failed_groups(Session(alias), dlq)
    raise OperationRefused(
        f"There is no group {group!r} on topic {topic!r}, and {dlq} has no dead letters of a dropped one.",
        known=known_names("Groups", group, dict.fromkeys(sorted(known), topic)),
    )


def _result(
    action: audit.Action, wanted: DeadLetterFilter, number: int, said: str, *warnings: str, dry_run: bool
) -> Result:
    text = said if number or warnings else _("No dead letters of %(topic)s match.")
    values = {"topic": wanted.topic, "number": number_said(number, dry_run=dry_run)}
    return result_of(Result, action, number, text % values, dry_run=dry_run, warnings=warnings)


def count(using: str, wanted: DeadLetterFilter, *, most: int) -> int:
    """Count the dead letters that match a filter."""
    number = 0
    for page in matching_offsets(Session(using), wanted, size=COUNTED_AT_ONCE):
        number += len(page)
        if number >= most:
            return most
    return number


def redrive_all(
    using: str,
    wanted: DeadLetterFilter,
    *,
    kind: str | None = None,
    rate: float | None = None,
    limit: int | None = None,
    progress: Callable[[int], object] = lambda rows: None,
    held: set[int] | None = None,
    **by: Unpack[By],
) -> int:
    """Publish dead letters again, each only for the group that failed it; return how many.

    ``kind``: the kind of error by which the offsets of the filter were found, for the audit log. ``held``: gets the
    offsets of those that are left because another job holds the unique key of theirs.
    """
    left = set() if held is None else held

    def send_back(session: Session, found: Sequence[_DeadLetter]) -> Sequence[_DeadLetter]:
        sent = _send_back(session, wanted.topic, found, by["actor"])
        left.difference_update(one.offset for one in found)  # The transaction may be run again.
        left.update({one.offset for one in found} - {one.offset for one in sent})
        return sent

    return _take_all(using, wanted, REDRIVE, send_back, kind=kind, rate=rate, limit=limit, progress=progress, **by)


def discard_all(
    using: str,
    wanted: DeadLetterFilter,
    *,
    kind: str | None = None,
    limit: int | None = None,
    progress: Callable[[int], object] = lambda rows: None,
    **by: Unpack[By],
) -> int:
    """Delete dead letters for good, and return how many. ``kind``: as for ``redrive_all``."""
    if not (reason := by.get("reason", "")).strip():
        raise OperationRefused("reason '': must not be empty, since the messages are deleted")

    def record(session: Session, found: Sequence[_DeadLetter]) -> Sequence[_DeadLetter]:
        _record(session, wanted.topic, found, DeliveryEvent.Outcome.DISCARDED, by["actor"], error=reason)
        return found

    return _take_all(using, wanted, DISCARD, record, kind=kind, limit=limit, progress=progress, **by)


def replace(using: str, topic: str, offset: int, payload: Any, **by: Unpack[By]) -> str:
    """Replace a dead letter by a message with a corrected payload, only for the group that failed it; return its id."""

    def write(session: Session) -> str:
        found = _lock(session, [offset], topic)
        if not found:
            raise OperationRefused(_no_dead_letter_text(topic, offset))
        (old,) = found
        _ref, body, kept = _replacement(session, topic, offset, payload)
        new_id = new_message_id()
        session.execute(
            f"INSERT INTO {OUTBOX} (topic, partition_key, publisher_key, id, payload, metadata, target_group) "
            "VALUES (%s, %s, %s, %s, %s, %s, %s)",
            (old.original_topic, old.key, old.publisher_key, new_id, body, kept, old.failed_group),
        )
        _delete(session, [offset])
        _record(session, topic, found, DeliveryEvent.Outcome.REPLACED, by["actor"], related={offset: new_id})
        audit.once(session, REPLACE, 1, GroupRef(old.failed_group, topic), detail=f"offset {offset}", **by)
        return new_id

    with apart(using):
        return run(using, write)


def _replacement(session: Session, topic: str, offset: int, payload: Any) -> tuple[GroupRef, bytes, str]:
    """Return the group of a dead letter, and the encoded payload and metadata of its replacement."""
    row = session.row(
        f"SELECT failed_group, original_topic, {PUBLISHED_ID}, metadata FROM {LOG} m "
        "WHERE m.`offset` = %s AND m.topic = %s AND m.failed_group <> ''",
        (offset, topic),
    )
    if row is None:
        raise OperationRefused(_no_dead_letter_text(topic, offset))
    ref = GroupRef(row[0], row[1])
    _refuse_unregistered(session, {ref})
    body, kept = messages.encode_body(payload, {**messages.decode_metadata(row[3]), REPLACES: row[2]})
    return ref, body, kept


def _no_dead_letter_text(topic: str, offset: int) -> str:
    return f"There is no dead letter at offset {offset} of {topic!r}."


def check_groups(using: str, wanted: DeadLetterFilter, most: int) -> None:
    """Require that the groups of the first matching dead letters are registered."""
    session = Session(using)
    left = most
    refs: set[GroupRef] = set()
    for page in matching_offsets(session, wanted, size=LIMITS.dead_letters):
        joins = f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o"
        refs.update(
            GroupRef(*row) for row in session.joined("SELECT m.failed_group, m.original_topic", "o", page[:left], joins)
        )
        left -= len(page)
        if left <= 0:
            break
    _refuse_unregistered(session, refs)


def _take_all(
    using: str,
    wanted: DeadLetterFilter,
    action: audit.Action,
    take: Callable[[Session, Sequence[_DeadLetter]], Sequence[_DeadLetter]],
    *,
    kind: str | None,
    rate: float | None = None,
    limit: int | None,
    progress: Callable[[int], object],
    **by: Unpack[By],
) -> int:
    most = LIMITS.dead_letters
    size = most if rate is None else max(1, min(most, int(rate)))

    total = limit or 0
    if wanted.offsets is not None:
        total = len(set(wanted.offsets)) if limit is None else min(limit, len(set(wanted.offsets)))

    def write(session: Session, page: Sequence[int]) -> int:
        found = _lock(session, page, wanted.topic)
        taken = take(session, found) if found else []
        if taken:
            _delete(session, [one.offset for one in taken])
            audit.add(session, operation, len(taken))
        return len(taken)

    done = 0
    with apart(using):
        on, conditions = GroupRef(wanted.group or "", wanted.topic), _condition_text(wanted, kind)
        operation = run(using, lambda session: audit.begin(session, action, on, detail=conditions, total=total, **by))
        beat = audit.beats(using, operation)
        rests = 0.0
        with audit.ending(using, operation):
            for page in matching_offsets(Session(using), wanted, size=size):
                _rest(rests, beat)
                began, before, left = time.monotonic(), done, list(page)
                while left and (limit is None or done < limit):  # Those that are not taken do not count.
                    beat()
                    end = len(left) if limit is None else limit - done
                    chosen, left = left[:end], left[end:]
                    taken = run(using, lambda session, chosen=chosen: write(session, chosen))  # type: ignore[misc]
                    done += taken
                    progress(taken)
                if limit is not None and done >= limit:
                    break
                rests = 0.0 if rate is None else max(0.0, (done - before) / rate - (time.monotonic() - began))
    return done


def _condition_text(wanted: DeadLetterFilter, kind: str | None) -> str:
    """Return the conditions beside topic and group, for the audit log.

    What a filter has found up to an offset is described by that filter. Errors come last: not everybody may view them.
    """
    parts = [] if wanted.key is None else [audit.key_text(wanted.topic, wanted.key)]
    for condition, at in (("failed since", wanted.since), ("failed until", wanted.until)):
        if at is not None:
            parts.append(f"{condition} {audit.time_text(at)}")
    if wanted.upto is not None:
        parts.append(f"up to offset {wanted.upto}")
    elif wanted.offsets is not None:
        parts.append(audit.offsets_text(wanted.offsets))
    parts += [] if wanted.error is None else [audit.error_text(wanted.error)]
    parts += [] if kind is None else [audit.kind_text(kind)]
    return ", ".join(parts)


def _rest(seconds: float, beat: Callable[[], None]) -> None:
    """Wait before the next transaction, and record meanwhile that the operation is running."""
    beat()
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, audit.BEAT_SECONDS))
        beat()


def _lock(session: Session, offsets: Sequence[int], topic: str) -> list[_DeadLetter]:
    """Lock the dead letters that still exist and that no other transaction has locked, in order."""
    rows = session.joined(
        "SELECT m.`offset`, m.partition_key, m.publisher_key, m.failed_group, m.original_topic, m.failure_count",
        "o",
        offsets,
        f"{session.dialect.join_to(LOG, 'm')} "
        f"ON m.`offset` = v.o AND m.topic = %s AND m.failed_group <> ''{session.dialect.skip_locked}",
        after=(topic,),
    )
    return sorted(map(_DeadLetter._make, rows))


def _refuse_unregistered(session: Session, wanted: Collection[GroupRef]) -> None:
    """Refuse groups that are not registered: nothing would receive the message, and GC would delete it.

    The groups of a topic that has moved are registered in another database, to which the message will be relayed.
    """
    missing = set(wanted) - _registered(session.using, wanted)
    for topic in {ref.topic for ref in missing}:
        route = routing.route_of(session, topic)
        if route is not None and route.target != routing.HERE:
            missing -= _registered(route.target, missing)
    for ref in sorted(missing):
        raise OperationRefused(
            f"The group {ref.group!r} on topic {ref.topic!r}, which failed the message, is no longer registered and "
            "would not receive it. Start a subscriber of the group first, or discard its dead letters."
        )


def _registered(using: str, wanted: Collection[GroupRef]) -> set[GroupRef]:
    rows = ConsumerGroup.objects.using(using).filter(topic__in={ref.topic for ref in wanted})
    return {GroupRef(*row) for row in rows.values_list("consumer_group", "topic")}


def _send_back(session: Session, topic: str, found: Sequence[_DeadLetter], actor: str) -> Sequence[_DeadLetter]:
    """Publish locked dead letters again; return those that no unique key has held back."""
    _refuse_unregistered(session, {GroupRef(one.failed_group, one.original_topic) for one in found})
    of_jobs = {one.offset for one in found if job_results.is_of_jobs(GroupRef(one.failed_group, one.original_topic))}
    jobs = job_results.redrivable(session, of_jobs) if of_jobs else {}
    found = [one for one in found if one.offset not in of_jobs or one.offset in jobs]
    ids = {one.offset: new_message_id() for one in found}
    for chunk in session.chunks(list(ids.items())):
        session.execute(
            f"INSERT INTO {OUTBOX} (topic, partition_key, id, payload, metadata, publisher_key, target_group, "
            "original_id, original_topic, original_offset) "
            "SELECT m.original_topic, m.partition_key, v.id, m.payload, m.metadata, m.publisher_key, m.failed_group, "
            "m.original_id, m.original_topic, m.original_offset "
            f"FROM {session.dialect.rows(('o', 'id'), len(chunk))} "
            f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o",
            flat(chunk),
        )
    if jobs:
        job_results.redriven(session, {job: ids[offset] for offset, job in jobs.items()})
    _record(session, topic, found, DeliveryEvent.Outcome.REDRIVEN, actor, related=ids)
    return found


def _delete(session: Session, offsets: Sequence[int]) -> None:
    session.delete(LOG, "o", sorted(offsets), "s.`offset` = v.o")


def _record(
    session: Session,
    topic: str,
    found: Sequence[_DeadLetter],
    outcome: DeliveryEvent.Outcome,
    actor: str,
    *,
    error: str = "",
    related: dict[int, str] | None = None,
) -> None:
    """Record an operation on dead letters, regardless of ``RECORD_DELIVERIES``."""
    delivery_events.record(
        session,
        [
            delivery_events.Event(
                GroupRef(one.failed_group, topic),
                one.key,
                one.offset,
                one.attempts,
                outcome.value,
                0,
                0,
                actor,
                error,
                (related or {}).get(one.offset, ""),
            )
            for one in found
        ],
    )
