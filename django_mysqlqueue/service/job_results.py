"""The results of jobs: each follows the deliveries of its message, in the transactions that write their outcomes.

So a result is never SUCCESSFUL while the message may be delivered again, and a message that ends without a call (it
expired, it was cancelled, an operator dead-lettered it) ends its result too. Messages that end in other ways, by a seek
for example, are those of ``job_messages``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from django.db import IntegrityError

from django_mysqlqueue.db.tables import LOG, RESULTS
from django_mysqlqueue.names.keys import PARTITION_PREFIX, lane_of
from django_mysqlqueue.names.rules import JOB_GROUP, job_topic
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service import job_rows, job_stages, wakeups
from django_mysqlqueue.service.deliveries import JobEnd, JobEnds
from django_mysqlqueue.service.job_rows import (
    EXCEPTIONS,
    FAILED,
    READY,
    RUNNING,
    SUCCESSFUL,
    JobRow,
    lines,
    read,
    with_error,
)
from django_mysqlqueue.service.job_stages import Changes
from django_mysqlqueue.service.log import PUBLISHED_ID
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Retry, Session, run

CHUNK = 1000
UNCALLED = {
    Outcome.EXPIRED: ("JobExpired", "The job expired while it waited."),
    Outcome.SUPERSEDED: ("JobSuperseded", "A later job replaced this one before it started."),
    Outcome.DEAD_LETTERED: ("JobExpired", "The job expired while it waited, and its message was dead-lettered."),
}
"""The exceptions for jobs whose messages ended without a call, by outcome, with their texts."""
CANCELLED = ("JobCancelled", "The job was cancelled before it started.")


class Begun(NamedTuple):
    """The result of ``begin``."""

    rows: dict[str, JobRow]
    now: int
    """The database's time in epoch milliseconds."""


class CancelRequested(NamedTuple):
    """The result of ``request_cancel``."""

    ended: tuple[str, ...]
    """The jobs that waited."""
    asked: int
    """The number of running jobs that were asked to stop, and had not been asked before."""


def is_of_jobs(ref: GroupRef) -> bool:
    """Return whether a group runs the jobs of a queue. Other groups on its topic only read their messages."""
    return ref.group == JOB_GROUP and job_queues.is_queue(ref.topic)


def task_of(ref: GroupRef, partition: str) -> str:
    """Return the path of the task of jobs in a partition of a queue; empty if the group runs no jobs."""
    key = lane_of(partition).partition if is_of_jobs(ref) else ""
    return "" if key.startswith(PARTITION_PREFIX) else key  # Somebody has published a message without a key there.


def begin(
    using: str,
    worker: str,
    ids: Collection[str],
    *,
    messages: Collection[str] = (),
    wait: bool = False,
) -> Begun:
    """Note that a subscriber has claimed jobs: they are RUNNING, unless they have ended.

    A job that is RUNNING already was claimed by a subscriber that was lost; that is added to its errors. One that was
    asked to stop then does not start again. A job that has FAILED because its message was skipped, which a seek has
    brought back, starts from the beginning.

    ``messages``: the ids of the messages that were claimed. A job is left if another message was published in the place
    of the one that was claimed, which a seek has brought back. ``wait``: whether to wait once for rows that another
    transaction has locked (it enqueues a job with the same unique key, or cancels the job), instead of leaving them
    out.

    Returns:
        The rows as they are now, except that ``last_attempted_at`` is that of the attempt before. Those that have ended
        or were left are unchanged.

    Raises:
        django.db.Error: the database refused, or ``wait`` is set, and the wait took too long.
    """

    def write(session: Session) -> Begun:
        found = read(session, ids, session.dialect.for_update if wait else session.dialect.skip_locked)
        now = session.now()
        mine = [row for row in found.values() if row.is_run_by(messages)]
        skipped = [row for row in mine if row.ended_with("JobSkipped", "JobDeleted")]
        if back := [row.id for row in skipped if not row.cancel_requested_at]:
            restart(session, dict.fromkeys(back, ""))
            found |= read(session, back)
        waiting = [row for one in mine if not (row := found[one.id]).is_finished]
        begun = [_begun(row, worker, now) for row in waiting if not row.cancel_requested_at]
        job_rows.begin(session, begun, now)
        if stopped := [row.id for row in waiting if row.cancel_requested_at]:
            _end(session, stopped, lambda row: _failed(_lost(row), CANCELLED))
            found |= read(session, stopped)
        return Begun(found | {row.id: row for row in begun}, now)

    return run(using, write, attempts=1) if wait else run(using, write)


def _lost(row: JobRow) -> JobRow:
    """Return a row with an error if the subscriber that had its job was lost."""
    if row.status != RUNNING:
        return row
    *_, earlier = lines(row.worker_ids) or [""]
    text = f"The subscriber {earlier!r} was lost after it had claimed the job, or could not store the outcome."
    return row._replace(errors=with_error(row.errors, f"{EXCEPTIONS}.WorkerLost", text))


def _begun(row: JobRow, worker: str, now: int) -> JobRow:
    return _lost(row)._replace(
        status=RUNNING,
        started_at=row.started_at or now,
        worker_ids=f"{row.worker_ids}{worker}\n",
        progress="",
    )


def follow(session: Session, jobs: JobEnds, *, waits: bool = True) -> int:
    """Write what has become of jobs, except those that have ended already; return how many results were changed.

    Without ``waits``, results of released jobs that another transaction has locked stay RUNNING until their next claim.
    """
    wakeups.notify_on_commit(session, wakeups.RESULTS)
    by_job: dict[str, tuple[JobEnd, str]] = {}
    for one in jobs.ends:
        if one[0].id not in by_job or by_job[one[0].id][1] not in (SUCCESSFUL, FAILED):
            by_job[one[0].id] = one
    others, by = jobs.reasons, jobs.released
    if by:
        # Without a lock: what was passed over by the claim may be locked for long, and is READY.
        statuses = job_rows.statuses(session, by)
        by = {job: worker for job, worker in by.items() if statuses.get(job) == RUNNING}
    if not others and not by and not any(map(job_stages.is_in_chain, by_job)):
        return job_rows.end(session, list(by_job.values()))

    def end(row: JobRow) -> tuple[JobEnd, str] | None:
        one, status = by_job.get(row.id, (None, READY))
        if one is None and row.id in by and row.status == RUNNING:
            one = JobEnd(row.id, worker_ids=_without(row.worker_ids, by[row.id]))
        if row.id in others and status == READY:
            return _failed(row, others[row.id], one)
        return None if one is None else (one, status)

    ended = {*by_job, *others}
    if waits:
        return _end(session, ended | by.keys(), end)
    # These come last, so that nothing is waited for while they are locked out of order.
    return _end(session, ended, end) + _end(session, by.keys() - ended, end, session.dialect.skip_locked)


def succeed(session: Session, end: JobEnd, otherwise: Callable[[], Exception]) -> None:
    """Write the success of a job in the transaction of its task.

    ``otherwise`` returns what is raised, at the latest with the COMMIT, if the job has ended already.
    """
    if job_stages.is_in_chain(end.id):
        if not follow(session, JobEnds([(end, SUCCESSFUL)])):
            raise otherwise()
        return
    wakeups.notify_on_commit(session, wakeups.RESULTS)
    session.later(*job_rows.end_of_one(session, end, SUCCESSFUL), rows=1, otherwise=otherwise)


def _without(workers: str, by: str) -> str:
    """Return the workers of a job without the last one if it is ``by``, which has not run it; otherwise all of them."""
    return workers.removesuffix(f"{by}\n") if f"\n{workers}".endswith(f"\n{by}\n") else workers


def _end(
    session: Session, ids: Iterable[str], end: Callable[[JobRow], tuple[JobEnd, str] | None], how: str = ""
) -> int:
    """Write the ends of jobs that have not ended, and what follows in their chains; return how many were changed."""

    def decide(rows: Mapping[str, JobRow]) -> Changes:
        return Changes([one for row in rows.values() if not row.is_finished and (one := end(row)) is not None])

    return job_stages.write(session, ids, decide, how or session.dialect.for_update)


def of_messages(session: Session, offsets: Iterable[int]) -> dict[int, str]:
    """Return the ids of jobs by the offsets of their messages."""
    hint = session.dialect.force_index("PRIMARY")
    select = f"SELECT m.`offset`, {PUBLISHED_ID} FROM {LOG} m{hint} WHERE m.`offset` IN {{keys}}"
    return dict(session.among(select, offsets))


def wait_until(session: Session, offsets: Collection[int], at: int) -> None:
    """Store when jobs, by the offsets of their messages, get their next attempts, as ``job_rows.wait_until`` does."""
    job_rows.wait_until(session, of_messages(session, offsets).values(), at)


def _failed(row: JobRow, reason: tuple[str, str], attempt: JobEnd | None = None) -> tuple[JobEnd, str]:
    """Return the end of a job without a call, after what an attempt has left that is not retried."""
    name, text = reason
    one = attempt or JobEnd(row.id)
    errors = row.errors if one.errors is None else one.errors
    return one._replace(errors=with_error(errors, f"{EXCEPTIONS}.{name}", text), stage=row.stage), FAILED


def cancel(session: Session, topics: Mapping[str, str]) -> int:
    """End jobs whose messages are not delivered any more, because somebody has cancelled them; return how many.

    ``topics``: the topic of each job's queue, by id.
    """
    return _end(
        session,
        topics,
        lambda row: _failed(row, CANCELLED) if topics[row.id] == job_topic(row.queue_name) else None,
    )


def request_cancel(session: Session, ids: Iterable[str], *, wait: bool = True) -> CancelRequested:
    """End jobs that wait, and ask those that run to stop.

    The message of a job that waits stays: the claim finds that the job has ended, and settles it.

    ``wait``: whether to wait for results that another transaction has locked, instead of skipping them.
    """
    waiting: list[str] = []
    running: list[str] = []

    def end(row: JobRow) -> tuple[JobEnd, str] | None:
        if row.status == READY:
            waiting.append(row.id)
            return _failed(row, CANCELLED)
        running.extend([] if row.cancel_requested_at else [row.id])
        return None

    _end(session, ids, end, session.dialect.for_update if wait else session.dialect.skip_locked)
    asked = sum(
        session.execute(
            f"UPDATE {RESULTS}{session.dialect.force_index('PRIMARY')} SET cancel_requested_at = "
            f"{session.dialect.now_ms} WHERE id IN ({session.dialect.placeholders(len(chunk), '%s')})",
            chunk,
        )
        for chunk in session.chunks(running)
    )
    return CancelRequested(tuple(waiting), asked)


def redrivable(session: Session, offsets: Iterable[int]) -> dict[int, str]:
    """Return the ids of jobs by the offsets of their dead letters, without those whose unique key another job holds."""
    hint = session.dialect.force_index("PRIMARY")
    select = (
        f"SELECT m.`offset`, {PUBLISHED_ID}, s.kept_key FROM {LOG} m{hint} "
        f"{session.dialect.join_to(RESULTS, 's', left=True)} ON s.id = {PUBLISHED_ID} AND s.status = '{FAILED}' "
        "WHERE m.`offset` IN {keys}"
    )
    rows = sorted(session.among(select, offsets))
    keys = {job: key for _, job, key in rows if key}
    free = job_rows.free_keys(session, keys) if keys else set()
    return {offset: job for offset, job, _ in rows if job not in keys or job in free}


def redriven(session: Session, messages: Mapping[str, str]) -> None:
    """Make jobs that have failed ready again: an operator has redriven their dead letters.

    ``messages``: by id of a job, the id of its new message.
    """
    try:
        restart(session, messages)
    except IntegrityError as error:
        raise Retry from error  # A job with the same unique key was enqueued in the meantime.


def restart(session: Session, messages: Mapping[str, str]) -> None:
    """Make jobs that have failed ready again, and those of later stages that have failed for that.

    ``messages``: by id of a job, the id of its new message; empty: it has no new one.
    """

    def decide(rows: Mapping[str, JobRow]) -> Changes:
        failed = [row for row in rows.values() if row.status == FAILED]
        job_rows.restart(session, {row.id: messages[row.id] for row in failed})
        return Changes(restarted={row.stage for row in failed if row.stage})

    job_stages.write(session, messages, decide, session.dialect.for_update)


def outdated(session: Session) -> tuple[str, tuple[object, ...]]:
    """Return the FROM and WHERE of the results that have ended and are older than ``RESULTS_RETENTION``."""
    return (
        f"{RESULTS} WHERE status IN (%s, %s) AND finished_at > 0 AND finished_at < {session.dialect.now_ms} - %s",
        (SUCCESSFUL, FAILED, int(get_settings().results_retention * 1000)),
    )


def collect(using: str) -> int:
    """Delete some of the results that have ended and are older than ``RESULTS_RETENTION``; return how many."""
    keep_ms = int(get_settings().results_retention * 1000)

    def delete(session: Session) -> int:
        old = dict(
            row
            for status in (SUCCESSFUL, FAILED)
            for row in session.rows(
                f"SELECT id, stage FROM {RESULTS}{session.dialect.force_index('queue_job_results_status')} "
                f"WHERE status = %s AND finished_at > 0 AND finished_at < {session.dialect.now_ms} - %s "
                "ORDER BY finished_at LIMIT %s",
                (status, keep_ms, CHUNK),
            )
        )
        number = 0
        for ids in job_stages.by_place(old).values():
            gone = ids
            if any(old[job] for job in ids):
                # Only what this transaction deletes counts: another one may delete the same, or restart it.
                gone = [job for job, row in read(session, ids, session.dialect.for_update).items() if row.is_finished]
            number += session.delete(RESULTS, "i", gone, "s.id = v.i", "s.finished_at > 0")
            job_stages.forget(session, Counter(old[job] for job in gone if old[job]))
        return number

    return run(using, delete)
