"""The results of jobs: each follows the deliveries of its message, in the transactions that write their outcomes.

So a result is never SUCCESSFUL while the message may be delivered again, and a message that ends without a call (it
expired, it was cancelled, an operator dead-lettered it) ends its result too. Messages that end in other ways, by a seek
for example, are those of ``job_messages``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from django_mysqlqueue import job_queues
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.limits import JOB_GROUP, JOB_PREFIX
from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service import job_rows, job_stages
from django_mysqlqueue.service.deliveries import Claimed, JobEnd
from django_mysqlqueue.service.job_rows import (
    EXCEPTIONS,
    FAILED,
    READY,
    RESULTS,
    RUNNING,
    SUCCESSFUL,
    JobRow,
    lines,
    read,
    with_error,
)
from django_mysqlqueue.service.log import PUBLISHED_ID
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, flat, run

LOG = QueueMessage._meta.db_table
CHUNK = 1000
UNCALLED = {
    Outcome.EXPIRED: ("JobExpired", "The job expired before it started."),
    Outcome.SUPERSEDED: ("JobSuperseded", "A later job replaced this one before it started."),
    Outcome.DEAD_LETTERED: ("JobExpired", "The job expired before it started, and its message was dead-lettered."),
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

    ended: int
    """The number of jobs that waited."""
    asked: int
    """The number of running jobs that were asked to stop, and had not been asked before."""


def is_of_jobs(ref: GroupRef) -> bool:
    """Return whether a group runs the jobs of a queue. Other groups on its topic only read their messages."""
    return ref.group == JOB_GROUP and job_queues.is_queue(ref.topic)


def begin(using: str, worker: str, ids: Collection[str], *, wait: bool = False) -> Begun:
    """Note that a subscriber has claimed jobs: they are RUNNING, unless they have ended.

    A job that is RUNNING already was claimed by a subscriber that was lost; that is added to its errors. One that was
    asked to stop then does not start again. A job that has FAILED because its message was skipped, which a seek has
    brought back, starts from the beginning.

    Args:
        using: alias of the queue's database.
        worker: name of the subscriber.
        ids: the ids of the jobs.
        wait: whether to wait once for rows that another transaction has locked (it enqueues a job with the same unique
            key, or cancels the job), instead of leaving them out.

    Returns:
        The rows as they are now, except that ``last_attempted_at`` is that of the attempt before. Those that have ended
        are unchanged.

    Raises:
        django.db.Error: the database refused, or ``wait`` is set, and the wait took too long.
    """

    def write(session: Session) -> Begun:
        found = read(session, ids, session.dialect.for_update if wait else session.dialect.skip_locked)
        now = session.now()
        skipped = [row for row in found.values() if row.ended_with("JobSkipped", "JobDeleted")]
        if back := [row.id for row in skipped if not row.cancel_requested_at]:
            _restart(session, dict.fromkeys(back, ""))
            found |= read(session, back)
        waiting = [row for row in found.values() if not row.is_finished]
        begun = [_begun(row, worker, now) for row in waiting if not row.cancel_requested_at]
        job_rows.begin(session, begun, now)
        if stopped := [_lost(row) for row in waiting if row.cancel_requested_at]:
            _fail(session, dict.fromkeys(stopped, CANCELLED))
            found |= read(session, [row.id for row in stopped])
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


def follow(session: Session, ends: Sequence[tuple[JobEnd, str]]) -> int:
    """Write what has become of jobs, except those that have ended already.

    Args:
        session: the current transaction, which has locked or settled the deliveries.
        ends: the ends of attempts, each with the job's status. Of several of one job, those after its end do not count.

    Returns:
        The number of results that were changed.
    """
    by_job: dict[str, tuple[JobEnd, str]] = {}
    for one in ends:
        if one[0].id not in by_job or by_job[one[0].id][1] not in (SUCCESSFUL, FAILED):
            by_job[one[0].id] = one
    ends = list(by_job.values())
    if not any(end.stage for end, _ in ends):
        return job_rows.end(session, ends)
    rows = read(session, [end.id for end, _ in ends], session.dialect.for_update)
    ends = [one for one in ends if one[0].id in rows and not rows[one[0].id].is_finished]
    changed = job_rows.end(session, ends)
    job_stages.follow(session, [one for one in ends if one[0].stage])
    return changed


def fail_messages(session: Session, reasons: Mapping[int, tuple[str, str]]) -> None:
    """End the jobs of messages that end without a call.

    Args:
        session: the current transaction.
        reasons: by offset, the name of an exception in ``tasks.exceptions``, and its text.
    """
    if reasons:
        fail(session, {job: reasons[offset] for offset, job in _ids(session, reasons).items()})


def passed(session: Session, ref: GroupRef, ended: Iterable[tuple[str, int, Outcome]]) -> None:
    """End the jobs of messages that a claim has settled: partition, offset and outcome of each."""
    if is_of_jobs(ref):
        fail_messages(session, {offset: UNCALLED[outcome] for _, offset, outcome in ended})


def release(session: Session, deliveries: Iterable[Claimed], *, waits: bool = True) -> None:
    """Make jobs ready again whose claims ended before they started. Their subscribers do not count as workers.

    A job without an attempt keeps ``started_at``: the time for which its task may be unknown counts from there.
    """
    by = {delivery.offset: delivery.by for delivery in deliveries}
    ids = {job: by[offset] for offset, job in _ids(session, by).items()}
    # Without a lock: what was passed over by the claim may be locked for long, and is READY.
    statuses = job_rows.statuses(session, ids)
    ids = {job: worker for job, worker in ids.items() if statuses.get(job) == RUNNING}
    rows = [
        (row.id, row.worker_ids.removesuffix(f"{ids[row.id]}\n"))
        for row in read(session, ids, session.dialect.for_update if waits else session.dialect.skip_locked).values()
        if row.status == RUNNING
    ]
    for chunk in session.chunks(rows, weight=lambda row: len(row[1])):
        session.execute(
            session.dialect.update_joined(
                RESULTS,
                ("id", "worker_ids"),
                len(chunk),
                "s.id = v.id",
                {
                    "status": f"'{READY}'",
                    "worker_ids": "v.worker_ids",
                    "last_attempted_at": "CASE WHEN v.worker_ids = '' THEN 0 ELSE s.last_attempted_at END",
                },
            ),
            flat(chunk),
        )


def _ids(session: Session, offsets: Iterable[int]) -> dict[int, str]:
    found: dict[int, str] = {}
    for chunk in session.chunks(sorted(offsets)):
        found |= session.rows(
            f"SELECT m.`offset`, {PUBLISHED_ID} FROM {LOG} m{session.dialect.force_index('PRIMARY')} "
            f"WHERE m.`offset` IN ({session.dialect.placeholders(len(chunk), '%s')})",
            chunk,
        )
    return found


def fail(session: Session, reasons: Mapping[str, tuple[str, str]]) -> int:
    """End jobs that have not ended, without a call; return how many.

    Args:
        session: the current transaction.
        reasons: by id, the name of an exception in ``tasks.exceptions``, and its text.
    """
    rows = read(session, reasons, session.dialect.for_update) if reasons else {}
    return _fail(session, {row: reasons[row.id] for row in rows.values()})


def _fail(session: Session, reasons: Mapping[JobRow, tuple[str, str]]) -> int:
    return follow(
        session,
        [
            (JobEnd(row.id, errors=with_error(row.errors, f"{EXCEPTIONS}.{name}", text), stage=row.stage), FAILED)
            for row, (name, text) in reasons.items()
        ],
    )


def cancel(session: Session, topics: Mapping[str, str]) -> int:
    """End jobs whose messages are not delivered any more, because somebody has cancelled them; return how many.

    Args:
        session: the current transaction.
        topics: the topic of each job's queue, by id.
    """
    rows = read(session, topics, session.dialect.for_update) if topics else {}
    return _fail(session, {row: CANCELLED for row in rows.values() if topics[row.id] == JOB_PREFIX + row.queue_name})


def request_cancel(session: Session, ids: Iterable[str], *, wait: bool = True) -> CancelRequested:
    """End jobs that wait, and ask those that run to stop.

    The message of a job that waits stays: the claim finds that the job has ended, and settles it.

    Args:
        session: the current transaction.
        ids: the ids of the jobs.
        wait: whether to wait for results that another transaction has locked, instead of skipping them.
    """
    rows = read(session, ids, session.dialect.for_update if wait else session.dialect.skip_locked).values()
    ended = _fail(session, {row: CANCELLED for row in rows if row.status == READY})
    running = [row.id for row in rows if row.status == RUNNING and not row.cancel_requested_at]
    asked = sum(
        session.execute(
            f"UPDATE {RESULTS}{session.dialect.force_index('PRIMARY')} SET cancel_requested_at = "
            f"{session.dialect.now_ms} WHERE id IN ({session.dialect.placeholders(len(chunk), '%s')})",
            chunk,
        )
        for chunk in session.chunks(running)
    )
    return CancelRequested(ended, asked)


def redriven(session: Session, ids: Mapping[int, str]) -> None:
    """Make jobs that have failed ready again: an operator has redriven their dead letters.

    Args:
        session: the current transaction.
        ids: by offset of the dead letter, the id of the message that was published from it.
    """
    _restart(session, {job: ids[offset] for offset, job in _ids(session, ids).items()})


def _restart(session: Session, messages: Mapping[str, str]) -> None:
    """Make jobs that have failed ready again, and those of later stages that have failed for that.

    Args:
        session: the current transaction.
        messages: by id of a job, the id of its new message; empty: it has no new one.
    """
    job_rows.restart(session, messages)
    job_stages.revive(session, {row.stage for row in read(session, messages).values() if row.stage})


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
        if staged := [job for job, stage in old.items() if stage]:
            # Only what this transaction deletes counts: another one may delete the same, or restart it.
            found = read(session, staged, session.dialect.for_update)
            kept = {job for job in staged if job not in found or not found[job].is_finished}
            old = {job: stage for job, stage in old.items() if job not in kept}
        number = sum(
            session.execute(
                session.dialect.delete_joined(RESULTS, ("i",), len(chunk), "s.id = v.i", "s.finished_at > 0"), chunk
            )
            for chunk in session.chunks(sorted(old))
        )
        job_stages.forget(session, Counter(stage for stage in old.values() if stage))
        return number

    return run(using, delete)
