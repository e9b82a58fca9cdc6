"""Cancel jobs: those that wait end, and those that run are asked to stop."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Unpack

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.names.rules import job_topic
from django_mysqlqueue.operations.arguments import texts
from django_mysqlqueue.operations.declaring import How, operates, operating
from django_mysqlqueue.operations.limits import LIMITS
from django_mysqlqueue.operations.results import ScheduledResult, result_of
from django_mysqlqueue.service import audit, job_results, job_rows, job_stages, scheduling
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.job_rows import READY, RUNNING
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, pieces, run

CANCEL_JOBS = audit.Action("cancel jobs", gettext_lazy("Cancel jobs"), audit.JOBS)


@dataclass(frozen=True, slots=True)
class Cancellable:
    """Jobs that can be cancelled, and others of the given ids."""

    waiting: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    """Those that were not asked to stop before."""
    asked: tuple[str, ...] = ()
    """Running ones that were asked to stop before."""
    stages: frozenset[str] = frozenset()
    """The stages of ``waiting`` and ``running`` in their chains."""
    topics: frozenset[str] = frozenset()
    scheduled: tuple[tuple[str, int], ...] = ()
    """The ids of scheduled ones, and the primary keys of their messages. A message in plain SQL may have no result."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The numbers of jobs that were cancelled, and that were asked to stop."""

    ended: int = 0
    asked: int = 0


@operates
def cancel_jobs(ids: Sequence[str], *, topic: str = "", **how: Unpack[How]) -> ScheduledResult:
    """Cancel jobs that wait, and ask those that run to stop.

    ``topic``: the topic of their queue. Other jobs are not changed, and it is an error if there is none to change.
    Empty: jobs of any queue. ``dry_run``: change nothing; return what would be changed.

    Raises:
        OperationRefused: an argument is invalid; or with ``topic``, none of the jobs is waiting or running.
    """
    names = {"topic": topic} if topic else {}
    with operating(how, **names) as (alias, by, dry_run):
        wanted = texts("ids", ids)
        found = find(alias, wanted, topic)
        there = {*found.waiting, *found.running, *found.asked}
        missing = [one for one in wanted if one not in there] if topic else []
        if topic and not there:
            raise OperationRefused(f"Nothing was changed. {not_cancelled_text(topic, missing)}")
        done = Cancelled(len(found.waiting), len(found.running)) if dry_run else cancel(alias, wanted, topic, **by)
        number = done.ended + done.asked
        summary = _summary(done, max(0, len(wanted) - len(missing) - number), dry_run=dry_run)
        warnings = []
        if dry_run and has_later_jobs(alias, found):
            warnings.append(_("Jobs of later stages of their chains will fail, with EarlierJobFailed."))
        return result_of(
            ScheduledResult,
            CANCEL_JOBS,
            number,
            *summary,
            dry_run=dry_run,
            not_scheduled=tuple(missing),
            warnings=tuple(warnings),
        )


def _summary(done: Cancelled, left: int, *, dry_run: bool) -> list[str]:
    said = []
    if done.ended:
        text = _("Waiting jobs that will be cancelled: %(number)s.") if dry_run else _("Jobs cancelled: %(number)s.")
        said.append(text % {"number": f"{done.ended:,}"})
    if done.asked:
        text = _("Running jobs that will be asked to stop: %(number)s.")
        text = text if dry_run else _("Running jobs that were asked to stop: %(number)s.")
        said.append(text % {"number": f"{done.asked:,}"})
        said.append(_("Running jobs stop only if their tasks read context.cancelled."))
    if left:
        text = _(
            "Jobs not changed, because they have ended, were asked to stop before, or another transaction is changing "
            "them: %(number)s."
        )
        if dry_run:
            text = _("Jobs that will not be changed, because they have ended or were asked to stop before: %(number)s.")
        said.append(text % {"number": f"{left:,}"})
    return said


def not_cancelled_text(topic: str, ids: Sequence[str]) -> str:
    """Return the error about ids of jobs that cannot be cancelled."""
    return f"Neither waiting nor running in topic {topic!r}: {', '.join(map(repr, ids))} (ended or unknown)."


def topics_of(using: str, ids: Collection[str]) -> set[str]:
    """Return the topics of the queues of jobs, without those that do not exist."""
    return {job_topic(row.queue_name) for row in job_rows.read(Session(using), ids).values()}


def find(using: str, ids: Collection[str], topic: str = "") -> Cancellable:
    """Return the jobs with some ids, without those that have ended.

    ``topic``: only jobs of the queue with this topic; empty: of any.
    """
    session = Session(using)
    found = Cancellable()
    for chunk in pieces(sorted(set(ids)), LIMITS.jobs):
        one = _find(session, chunk, topic)
        found = Cancellable(
            found.waiting + one.waiting,
            found.running + one.running,
            found.asked + one.asked,
            found.stages | one.stages,
            found.topics | one.topics,
            found.scheduled + one.scheduled,
        )
    return found


def _find(session: Session, ids: Sequence[str], topic: str) -> Cancellable:
    rows = job_rows.read(session, ids)
    of_queue = {job: row for job, row in rows.items() if topic in ("", job_topic(row.queue_name))}
    waiting = {job for job, row in of_queue.items() if row.status == READY}
    running = [job for job, row in of_queue.items() if row.status == RUNNING]
    new = [job for job in running if not of_queue[job].cancel_requested_at]
    topics = {job_topic(of_queue[job].queue_name) for job in (*waiting, *running)}
    # The search reads the whole index of scheduled messages.
    later = {job for job in waiting if rows[job].run_after or rows[job].retry_at}
    scheduled = [job for job in ids if job in later or (topic and job not in rows)]
    there = scheduling.find(session, sorted(topics | ({topic} - {""})), scheduled) if scheduled else {}
    return Cancellable(
        tuple(sorted(waiting.union(there.values()))),
        tuple(new),
        tuple(job for job in running if job not in new),
        frozenset(of_queue[job].stage for job in (*waiting, *new)) - {""},
        frozenset(topics),
        tuple((message_id, outbox_id) for outbox_id, message_id in there.items()),
    )


def has_later_jobs(using: str, found: Cancellable) -> bool:
    """Return whether further stages follow in the chains of some jobs."""
    session = Session(using)
    stages = (job_stages.read(session, stage) for stage in sorted(found.stages))
    return any(stage is not None and stage.following for stage in stages)


def cancel(using: str, ids: Collection[str], topic: str = "", **by: Unpack[By]) -> Cancelled:
    """Cancel jobs that wait, and ask those that run to stop.

    Jobs that another transaction has locked, because it claims, ends or cancels them, are neither changed nor counted.
    This takes several transactions, each committed on its own.
    """

    def write(session: Session, chunk: Sequence[str]) -> Cancelled:
        found = _find(session, chunk, topic)
        # All results in one call, which locks them in the order of their chains. Messages follow: the claim settles one
        # that stays because another transaction has locked it.
        requested = job_results.request_cancel(session, (*found.waiting, *found.running), wait=False)
        with_results = job_rows.read(session, [job for job, _outbox_id in found.scheduled])
        scheduling.remove(session, [row for job, row in found.scheduled if job in requested.ended], wait=False)
        alone = [row for job, row in found.scheduled if job not in with_results]
        done = Cancelled(len(requested.ended) + scheduling.remove(session, alone, wait=False), requested.asked)
        if done != Cancelled():
            detail = f"asked to stop: {done.asked}" if done.asked else ""
            one = topic or (min(found.topics) if len(found.topics) == 1 else "")
            audit.once(session, CANCEL_JOBS, done.ended + done.asked, GroupRef("", one), detail=detail, **by)
        return done

    total = Cancelled()
    with apart(using):
        for chunk in pieces(sorted(set(ids)), LIMITS.jobs):
            done = run(using, partial(write, chunk=chunk))
            total = Cancelled(total.ended + done.ended, total.asked + done.asked)
    return total
