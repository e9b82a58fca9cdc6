"""Cancel jobs, with entries in the audit log."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from django_mysqlqueue.limits import JOB_PREFIX
from django_mysqlqueue.operations.limits import LIMITS
from django_mysqlqueue.service import audit, job_results, job_rows, job_stages, scheduling
from django_mysqlqueue.service.job_rows import READY, RUNNING, JobRow
from django_mysqlqueue.sql.connection import apart
from django_mysqlqueue.sql.session import Session, run

ACTION = "cancel jobs"


@dataclass(frozen=True, slots=True)
class Found:
    """Jobs that can be cancelled, and others of the given ids."""

    waiting: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    """Those that were not asked to stop before."""
    asked: tuple[str, ...] = ()
    """Running ones that were asked to stop before."""
    stages: frozenset[str] = frozenset()
    """The stages of ``waiting`` and ``running`` in their chains."""
    topics: frozenset[str] = frozenset()
    outbox_ids: tuple[int, ...] = ()
    """Primary keys of the messages of scheduled ones. A message in plain SQL may have no result."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The numbers of jobs that were cancelled, and that were asked to stop."""

    ended: int = 0
    asked: int = 0


def find(using: str, ids: Collection[str], topic: str = "") -> Found:
    """Return the jobs with some ids, without those that have ended.

    ``topic``: only jobs of the queue with this topic; empty: of any.
    """
    session = Session(using)
    found = Found()
    distinct = sorted(set(ids))
    for start in range(0, len(distinct), LIMITS.jobs):
        one = _find(session, distinct[start : start + LIMITS.jobs], topic)
        found = Found(
            found.waiting + one.waiting,
            found.running + one.running,
            found.asked + one.asked,
            found.stages | one.stages,
            found.topics | one.topics,
            found.outbox_ids + one.outbox_ids,
        )
    return found


def _find(session: Session, ids: Sequence[str], topic: str) -> Found:
    rows = job_rows.read(session, ids)
    of_queue = {job: row for job, row in rows.items() if topic in ("", _topic_of(row))}
    waiting = {job for job, row in of_queue.items() if row.status == READY}
    running = [job for job, row in of_queue.items() if row.status == RUNNING]
    new = [job for job in running if not of_queue[job].cancel_requested_at]
    topics = {_topic_of(of_queue[job]) for job in (*waiting, *running)}
    # The search reads the whole index of scheduled messages.
    scheduled = [job for job in ids if (job in waiting and rows[job].run_after) or (topic and job not in rows)]
    there = scheduling.find(session, sorted(topics | ({topic} - {""})), scheduled) if scheduled else []
    return Found(
        tuple(sorted(waiting | {one.message_id for one in there})),
        tuple(new),
        tuple(job for job in running if job not in new),
        frozenset(of_queue[job].stage for job in (*waiting, *new)) - {""},
        frozenset(topics),
        tuple(one.outbox_id for one in there),
    )


def _topic_of(row: JobRow) -> str:
    return JOB_PREFIX + row.queue_name


def has_later_jobs(using: str, found: Found) -> bool:
    """Return whether further stages follow in the chains of some jobs."""
    session = Session(using)
    stages = (job_stages.read(session, stage) for stage in sorted(found.stages))
    return any(stage is not None and stage.following for stage in stages)


def cancel(using: str, ids: Collection[str], topic: str = "", *, actor: str, reason: str = "") -> Cancelled:
    """Cancel jobs that wait, and ask those that run to stop.

    Jobs that another transaction has locked, because it claims, ends or cancels them, are neither changed nor counted.
    This takes several transactions, each committed on its own.

    Args:
        using: alias of the queue's database.
        ids: the ids.
        topic: only jobs of the queue with this topic; empty: of any.
        actor: who runs the operation, for the audit log.
        reason: why, for the audit log.
    """

    def write(session: Session, chunk: Sequence[str]) -> Cancelled:
        found = _find(session, chunk, topic)
        removed = scheduling.remove(session, found.outbox_ids, wait=False)
        requested = job_results.request_cancel(session, (*found.waiting, *found.running), wait=False)
        done = Cancelled(removed + requested.ended, requested.asked)
        if done != Cancelled():
            detail = f"asked to stop: {done.asked}" if done.asked else ""
            one = topic or (min(found.topics) if len(found.topics) == 1 else "")
            audit.once(session, ACTION, done.ended + done.asked, actor=actor, reason=reason, topic=one, detail=detail)
        return done

    distinct = sorted(set(ids))
    total = Cancelled()
    with apart(using):
        for start in range(0, len(distinct), LIMITS.jobs):
            done = run(using, partial(write, chunk=distinct[start : start + LIMITS.jobs]))
            total = Cancelled(total.ended + done.ended, total.asked + done.asked)
    return total
