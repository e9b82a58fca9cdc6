"""Retry: make deliveries due that wait for another attempt, now or at another time.

Owners of ordered partitions keep backoffs in memory, so each step increases the group's revision, which makes them read
their partitions again. Jobs that wait for long wait in the outbox (``job_retries``): those are rescheduled.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Unpack

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.arguments import checked, spelled_out
from django_mysqlqueue.db.tables import LOG, STATE
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.names.keys import lane_of
from django_mysqlqueue.operations.arguments import REASON_LENGTH, delivery_time, key_of, offsets_of, text, texts
from django_mysqlqueue.operations.declaring import How, Work, operating
from django_mysqlqueue.operations.limits import COUNTED, LIMITS, OperationLimits
from django_mysqlqueue.operations.lookups import FoundGroup, check_known, group_of, unsettled_by_id
from django_mysqlqueue.operations.results import Result, number_said, result_of, sentence
from django_mysqlqueue.operations.scheduled import NOW
from django_mysqlqueue.service import audit, groups, job_results, job_retries, job_rows, log, partitions, scheduling
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.job_retries import WaitingJob
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.watermarks import BY_ROW
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, flat, pieces, run
from django_mysqlqueue.subscriptions.effective import blocks_on_failure, known_handlers

RETRY = audit.Action("retry", gettext_lazy("Retry"), audit.DELIVERIES)
HAS_ERROR = " AND INSTR(s.last_error, %s) > 0"
"""The condition that the last error contains a text, as for dead letters."""


class Conditions(NamedTuple):
    """What the messages that are retried have in common."""

    error: str | None = None
    """A text that the last error contains."""
    key: str | None = None
    """The key with which they were published; that of jobs is the dotted path of their task."""


@spelled_out
@checked(OperationRefused, only=("progress",))
def retry(
    group: str,
    topic: str,
    *,
    ids: Sequence[str] | None = None,
    offsets: Sequence[int] | None = None,
    error: str | None = None,
    key: str | None = None,
    task: str | None = None,
    at: datetime.datetime | None = None,
    missing_ok: bool = False,
    reset_attempts: bool = False,
    progress: Callable[[int], object] = lambda rows: None,
    **how: Unpack[How],
) -> Result:
    """Retry messages that wait for another attempt, now or at a chosen time.

    They wait after a failure, a nack, a snooze, or after their subscriber was lost repeatedly; jobs also because their
    tasks ask for it. Deliveries in flight are not changed. Subscribers learn of it within a tick
    (``LEASE_RENEWAL_INTERVAL``).

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        ids: only the messages with these ids, as ``publish`` returned them.
        offsets: only the messages at these offsets. Without ``ids`` and ``offsets``, all waiting messages are retried.
            The offset of a job is that of the message with which it was enqueued.
        error: only messages whose last error contains this text.
        key: only messages that were published with this key. Those that were hashed while ``PARTITIONS`` had another
            value are not found, unless ``ids`` or ``offsets`` name them.
        task: only jobs of the task with this dotted path, which is their key.
        at: time of the next attempt; a naive datetime is in the project's time zone. None or a time in the past: now.
        missing_ok: ignore named messages that are not waiting, instead of refusing the operation.
        reset_attempts: count the attempts from 1 again.
        progress: called after each transaction with the number of messages that it changed.

    Raises:
        OperationRefused: there is no such group; one of the named messages is not waiting; ``at`` is not a valid
            datetime; a seek or drop of the group has not finished; or it was dropped and registered again in the
            meantime.
    """
    with operating(how, group=group, topic=topic) as work:
        found = group_of(work.using, group, topic)
        if error is not None:
            text("error", error, most=REASON_LENGTH)
        named = _Names(ids, offsets, missing_ok)
        conditions = Conditions(error, key_of(key, task))
        return _retry(work, found, named, conditions, at, reset_attempts=reset_attempts, progress=progress)


@spelled_out
def retry_found(
    group: str, topic: str, offsets: Sequence[int], kind: str, *, reset_attempts: bool = False, **how: Unpack[How]
) -> Result:
    """Retry messages that somebody has found by the kind of their error, if they still wait."""
    with operating(how, group=group, topic=topic) as work:
        found = group_of(work.using, group, topic)
        named = _Names(None, offsets, missing_ok=True)
        return _retry(work, found, named, Conditions(), None, kind=kind, reset_attempts=reset_attempts)


class _Names(NamedTuple):
    """The arguments that name messages."""

    ids: Sequence[str] | None
    offsets: Sequence[int] | None
    missing_ok: bool


def _retry(
    work: Work,
    found: FoundGroup,
    named: _Names,
    conditions: Conditions,
    at: datetime.datetime | None,
    *,
    kind: str | None = None,
    reset_attempts: bool,
    progress: Callable[[int], object] = lambda rows: None,
) -> Result:
    (alias, by, dry_run), ref = work, found.ref
    due = 0 if at is None else delivery_time(at, "at")
    if due <= Session(alias).now():
        due = 0
    rows, jobs = _named(alias, ref, named, due)
    if dry_run:
        number = _number(alias, ref, rows, jobs, due, conditions)
    else:
        number = make_due(
            alias,
            ref,
            **by,
            **conditions._asdict(),
            rows=rows,
            jobs=jobs,
            kind=kind,
            due=due,
            reset_attempts=reset_attempts,
            progress=progress,
        )
    said = _retry_text(number, ref, conditions, due, dry_run=dry_run)
    values = {"number": number_said(number, dry_run=dry_run), "ref": ref, "time": "", **conditions._asdict()}
    if due and at is not None:
        values["time"] = f"{at:%Y-%m-%d %H:%M:%S%z}"
    more = []
    warnings: list[str] = []
    if dry_run and number:
        more += [_("This time is in the past: the messages will be retried now.")] if at and not due else []
        more.append(
            _("Their attempts will be counted from 1 again.") if reset_attempts else _("Each retry uses up an attempt.")
        )
        warnings += _order_warnings(found) if due else []
    return result_of(Result, RETRY, number, said % values, *more, dry_run=dry_run, warnings=tuple(warnings))


def _retry_text(number: int, ref: GroupRef, conditions: Conditions, due: int, *, dry_run: bool) -> str:
    planned = _("Messages of the group %(ref)s that will be retried now: %(number)s.")
    done = _("Messages of the group %(ref)s that are due now: %(number)s.")
    nothing = _("No messages of the group %(ref)s are waiting for another attempt.")
    if due:
        planned = _("Messages of the group %(ref)s that will be retried at %(time)s: %(number)s.")
        done = _("Messages of the group %(ref)s that will be retried at %(time)s: %(number)s.")
        nothing = _("No messages of the group %(ref)s are waiting for an attempt at another time than %(time)s.")
    if conditions.error is not None:
        nothing = _("No messages of the group %(ref)s with an error that contains “%(error)s” are waiting.")
    if conditions.key is not None and job_results.is_of_jobs(ref):
        nothing = _("No jobs of the task %(key)s are waiting for another attempt in the group %(ref)s.")
        if conditions.error is not None:
            nothing = _("No jobs of the task %(key)s with an error that contains “%(error)s” are waiting.")
    elif conditions.key is not None:
        nothing = _("No messages with the key “%(key)s” are waiting for another attempt in the group %(ref)s.")
        if conditions.error is not None:
            nothing = _("No messages with the key “%(key)s” and an error that contains “%(error)s” are waiting.")
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


def _named(
    alias: str, ref: GroupRef, named: _Names, due: int
) -> tuple[list[tuple[str, int]] | None, list[WaitingJob] | None]:
    """Return (partition key, offset) of the named messages, and those of jobs in the outbox; None for all that wait."""
    ids, offsets, missing_ok = named
    if ids is None and offsets is None:
        return None, None
    ids = None if ids is None else texts("ids", ids)
    offsets = None if offsets is None else offsets_of(offsets)
    by_id = unsettled_by_id(alias, ref, ids or ())
    wanted = [*(offset for found in by_id.values() for offset in found), *(offsets or ())]
    rows = waiting_at(alias, ref, wanted, due=due)
    given: set[object] = {*(ids or ()), *(offsets or ())}
    jobs = [one for page in _pages_of_jobs(alias, ref, None, 0) for one in page if given & {one.id, one.offset}]
    if not missing_ok:
        waiting: set[object] = {offset for _key, offset in rows}
        waiting |= {one for one, found in by_id.items() if waiting.intersection(found)}
        waiting |= {name for one in jobs for name in (one.id, one.offset)}
        refusal = f"These messages are not waiting for another attempt in the group {ref}: {{}}."
        check_known(refusal, [*(ids or ()), *(offsets or ())], waiting)
    return rows, jobs


def waiting(using: str, ref: GroupRef, *, most: int, error: str | None = None, other_than: int = 0) -> int:
    """Count a group's deliveries that wait for another attempt after a failure, a nack, a snooze or a loss.

    ``error``: only those whose last error contains this text. ``other_than``: only those that are not due at this time,
    in epoch milliseconds.
    """
    session = Session(using)
    (number,) = session.one(
        f"SELECT COUNT(*) FROM (SELECT 1 FROM {STATE} s{session.dialect.force_index('queue_delivery_state_due')} "
        "WHERE s.consumer_group = %s AND s.topic = %s AND s.acked = %s "
        f"AND s.invisible_until > {session.dialect.now_ms} AND s.invisible_until <> %s AND s.delivery_token = 0"
        f"{HAS_ERROR if error else ''} LIMIT %s) w",
        (*ref, False, other_than, *([error] if error else []), most),
    )
    return int(number)


def waiting_at(using: str, ref: GroupRef, offsets: Sequence[int], *, due: int = 0) -> list[tuple[str, int]]:
    """Return (partition key, offset) of the messages at some offsets that wait for another attempt."""
    session = Session(using)
    return session.joined(
        "SELECT s.partition_key, s.message_offset",
        "o",
        offsets,
        f"{session.dialect.join_to(LOG, 'm')} ON m.`offset` = v.o AND m.topic = %s "
        f"{session.dialect.join_to(STATE, 's')} "
        "ON s.consumer_group = %s AND s.topic = m.topic AND s.partition_key = m.partition_key "
        "AND s.message_offset = v.o AND s.acked = %s AND s.delivery_token = 0 AND s.invisible_until >= %s",
        after=(ref.topic, ref.group, False, 0 if due else 1),
    )


def having(using: str, ref: GroupRef, rows: Sequence[tuple[str, int]], error: str) -> list[tuple[str, int]]:
    """Return those of some deliveries whose last error contains a text."""
    session = Session(using)
    joins = f"{session.dialect.join_to(STATE, 's')} ON {BY_ROW}{HAS_ERROR}"
    return session.joined("SELECT s.partition_key, s.message_offset", "ko", rows, joins, after=(*ref, error))


def _number(
    alias: str,
    ref: GroupRef,
    rows: Sequence[tuple[str, int]] | None,
    jobs: Sequence[WaitingJob] | None,
    due: int,
    conditions: Conditions,
) -> int:
    """Count what a retry would change; unless messages are named, up to ``COUNTED``."""
    number, most = 0, COUNTED if rows is None else len(rows) + len(jobs or ())
    pages: Iterable[Sequence[tuple[str, int]]] = () if rows is None else (rows,)
    if rows is None and conditions.key is None:
        number = waiting(alias, ref, most=most, error=conditions.error, other_than=due)
    elif rows is None:
        pages = _pages(alias, ref, LIMITS.rows, due, conditions.key)
    of_rows = (len(_chosen(alias, ref, page, conditions)) for page in pages)
    of_jobs = (len(_chosen_jobs(alias, page, conditions)) for page in _pages_of_jobs(alias, ref, jobs, due))
    for more in chain(of_rows, of_jobs):
        number += more
        if number >= most:
            break
    return min(number, most)


def _chosen(
    using: str, ref: GroupRef, rows: Sequence[tuple[str, int]], conditions: Conditions
) -> Sequence[tuple[str, int]]:
    """Return those of some deliveries that meet the conditions."""
    if conditions.key is not None:
        keys = log.publisher_keys(Session(using), {offset: partition for partition, offset in rows})
        rows = [row for row in rows if keys[row[1]] == conditions.key]
    return rows if conditions.error is None else having(using, ref, rows, conditions.error)


def _chosen_jobs(using: str, jobs: Sequence[WaitingJob], conditions: Conditions) -> Sequence[WaitingJob]:
    """Return those of some jobs that meet the conditions."""
    if conditions.key is not None:
        jobs = [one for one in jobs if lane_of(one.key).partition == conditions.key]
    if conditions.error is not None:
        errors = job_rows.last_errors(Session(using), [one.id for one in jobs])
        jobs = [one for one in jobs if conditions.error in errors.get(one.id, "")]
    return jobs


def _pages_of_jobs(
    using: str, ref: GroupRef, jobs: Sequence[WaitingJob] | None, due: int, limits: OperationLimits = LIMITS
) -> Iterator[Sequence[WaitingJob]]:
    """Yield pages of some jobs in the outbox; None: of all that wait there and are not due at ``due``."""
    if jobs is not None:
        yield from pieces(jobs, limits.jobs)
    elif job_results.is_of_jobs(ref):
        yield from job_retries.waiting(Session(using), ref, size=limits.jobs, other_than=due)


def make_due(
    using: str,
    ref: GroupRef,
    *,
    rows: Sequence[tuple[str, int]] | None = None,
    jobs: Sequence[WaitingJob] | None = None,
    error: str | None = None,
    key: str | None = None,
    kind: str | None = None,
    due: int = 0,
    reset_attempts: bool = False,
    progress: Callable[[int], object] = lambda rows: None,
    limits: OperationLimits = LIMITS,
    **by: Unpack[By],
) -> int:
    """Make waiting deliveries due now or at another time; return how many were not due at that time already.

    This takes several transactions. Each reads the deliveries that wait at that time, so after a seek in between it may
    retry some that were claimed since. It stops if the group has been dropped.

    ``rows``: (partition key, offset) of the deliveries; None: all that wait now. ``jobs``: those in the outbox; None:
    all, unless ``rows`` are given. ``kind``: the kind of error by which they were found, for the audit log. ``due``:
    when they come due, in epoch milliseconds; 0: now.
    """

    def begin(session: Session) -> tuple[int, int]:
        found = groups.lock(session, ref)
        groups.refuse_unfinished(ref, found.after_seek)
        details = [
            f"at {audit.time_text(due)}" if due else "",
            "attempts counted from 1 again" if reset_attempts else "",
            "" if key is None else audit.key_text(ref.topic, key),
            "" if rows is None or kind is not None else audit.offsets_text(named),
            "" if error is None else audit.error_text(error),
            "" if kind is None else audit.kind_text(kind),
        ]
        detail = ", ".join(filter(None, details))
        return audit.begin(session, RETRY, ref, detail=detail, total=len(named), **by), found.id

    def change(session: Session, page: Sequence[tuple[str, int]]) -> int:
        _check(session, ref, registration)
        changed = 0
        for chunk in session.chunks(page):
            free = session.rows(
                f"SELECT s.partition_key, s.message_offset FROM {session.dialect.rows(('k', 'o'), len(chunk))} "
                f"{session.dialect.join_to(STATE, 's')} ON {BY_ROW} AND s.acked = %s AND s.delivery_token = 0 "
                f"AND s.invisible_until <> %s{condition}{session.dialect.skip_locked}",
                (*flat(chunk), *ref, False, due, *searched),
            )
            if free:
                session.execute(
                    session.dialect.update_joined(STATE, ("k", "o", "due"), len(free), BY_ROW, assign),
                    (*flat((key, offset, due) for key, offset in sorted(free)), *ref),
                )
            if free and of_jobs:
                job_results.wait_until(session, [offset for _, offset in free], due or NOW)
            changed += len(free)
        if changed:
            groups.change(session, ref, revise=True)
            audit.add(session, operation, changed)
        return changed

    def reschedule(session: Session, page: Sequence[WaitingJob]) -> int:
        _check(session, ref, registration)
        ids = [one.outbox_id for one in page]
        changed = scheduling.move(session, ids, None, due or NOW, wait=False, changes=counted)
        audit.add(session, operation, changed)
        return changed

    if rows is not None and jobs is None:
        jobs = ()
    named = sorted({offset for _, offset in rows or ()} | {one.offset for one in jobs or ()})
    of_jobs = job_results.is_of_jobs(ref)
    counted = {"failure_count": "0"} if reset_attempts else {}
    conditions = Conditions(error, key)
    condition, searched = ("", ()) if error is None else (HAS_ERROR, (error,))
    assign = {"invisible_until": "v.due"} | ({"retry_count": "0"} if reset_attempts else {})

    def take(step: Callable[..., int], pages: Iterable[Sequence[Any]], chosen: Callable[[Any], Sequence[Any]]) -> int:
        changed = 0
        for page in pages:
            beat()
            if found := chosen(page):
                done = run(using, partial(step, page=found))
                changed += done
                progress(done)
        return changed

    with apart(using):
        operation, registration = run(using, begin)
        beat = audit.beats(using, operation)
        pages = _pages(using, ref, limits.rows, due, key) if rows is None else pieces(sorted(set(rows)), limits.rows)
        with audit.ending(using, operation):
            changed = take(change, pages, lambda page: _chosen(using, ref, page, conditions))
            in_outbox = _pages_of_jobs(using, ref, jobs, due, limits)
            changed += take(reschedule, in_outbox, lambda page: _chosen_jobs(using, page, conditions))
    return changed


def _check(session: Session, ref: GroupRef, registration: int) -> None:
    found = groups.lock(session, ref)
    groups.refuse_unfinished(ref, found.after_seek)
    if found.id != registration:
        raise OperationRefused(
            f"The group {ref.group!r} on topic {ref.topic!r} was dropped and registered again during the retry. "
            "Deliveries of the new group were not retried."
        )


def _pages(using: str, ref: GroupRef, most: int, due: int, key: str | None) -> Iterator[list[tuple[str, int]]]:
    """Yield pages of waiting deliveries, read without locks. Locked ones are skipped later.

    Deliveries that are due at ``due`` are left out: this operation may have moved them there. ``key``: only those in
    the partitions of this key.
    """
    session = Session(using)
    until = session.now()
    return _by_time(session, ref, most, due, until) if key is None else _of_key(session, ref, most, due, until, key)


def _of_key(
    session: Session, ref: GroupRef, most: int, due: int, until: int, key: str
) -> Iterator[list[tuple[str, int]]]:
    """Yield pages of the deliveries in the partitions of a key that wait, in order of their offsets."""
    for partition in partitions.among_state(session, ref, partitions.of_key(ref.topic, key)):
        above = 0
        while rows := session.rows(
            "SELECT message_offset, acked, delivery_token, invisible_until "
            f"FROM {STATE}{session.dialect.force_index('PRIMARY')} WHERE consumer_group = %s AND topic = %s "
            "AND partition_key = %s AND message_offset > %s ORDER BY message_offset LIMIT %s",
            (*ref, partition, above, most),
        ):
            above = rows[-1][0]
            yield [
                (partition, offset)
                for offset, acked, token, at in rows
                if not acked and not token and at > until and at != due
            ]


def _by_time(session: Session, ref: GroupRef, most: int, due: int, until: int) -> Iterator[list[tuple[str, int]]]:
    """Yield pages of all deliveries that wait, in order of their times."""
    place: tuple[int, str, int] | None = None
    while True:
        # By time and, for equal times, by key: the index's order, so that each page continues after the previous one.
        above = (
            "invisible_until > %s"
            if place is None
            else (
                "(invisible_until > %s OR (invisible_until = %s AND (partition_key > %s OR "
                "(partition_key = %s AND message_offset > %s))))"
            )
        )
        at = (until,) if place is None else (place[0], place[0], place[1], place[1], place[2])
        rows = session.rows(
            "SELECT invisible_until, partition_key, message_offset "
            f"FROM {STATE}{session.dialect.force_index('queue_delivery_state_due')} "
            f"WHERE consumer_group = %s AND topic = %s AND acked = %s AND invisible_until >= %s AND {above} "
            "AND invisible_until <> %s AND delivery_token = 0 "
            "ORDER BY invisible_until, partition_key, message_offset LIMIT %s",
            (*ref, False, until if place is None else place[0], *at, due, most),
        )
        if rows:
            yield sorted((key, offset) for _due, key, offset in rows)
        if len(rows) < most:
            return
        place = (int(rows[-1][0]), rows[-1][1], int(rows[-1][2]))
