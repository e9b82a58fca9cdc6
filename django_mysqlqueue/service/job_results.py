"""The results of jobs: each follows the deliveries of its message, in the transactions that write their outcomes.

So a result is never SUCCESSFUL while the message may be delivered again, and a message that ends without a call (it
expired, it was cancelled, an operator dead-lettered it) ends its result too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from django_mysqlqueue import job_queues
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.limits import JOB_GROUP, JOB_PREFIX
from django_mysqlqueue.models import JobResult, QueueMessage
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service.deliveries import Claimed, JobEnd
from django_mysqlqueue.service.log import PUBLISHED_ID
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, flat, run

RESULTS = JobResult._meta.db_table
LOG = QueueMessage._meta.db_table
READY, RUNNING = JobResult.Status.READY.value, JobResult.Status.RUNNING.value
FAILED, SUCCESSFUL = JobResult.Status.FAILED.value, JobResult.Status.SUCCESSFUL.value
UNFINISHED = f"s.status IN ('{READY}', '{RUNNING}')"
LONGEST_ERROR = 65_536
"""Maximum number of characters of a traceback; of a longer one, the end is stored."""
MOST_ERRORS = 1_048_576
"""Characters of errors of a job, after which further ones are stored without their tracebacks."""
CHUNK = 1000
EXCEPTIONS = "django_mysqlqueue.tasks.exceptions"
UNCALLED = {
    Outcome.EXPIRED: ("JobExpired", "The job expired before it started."),
    Outcome.SUPERSEDED: ("JobSuperseded", "A later job replaced this one before it started."),
    Outcome.DELETED: ("JobDeleted", "The message of the job was deleted from the log before the job started."),
    Outcome.DEAD_LETTERED: ("JobExpired", "The job expired before it started, and its message was dead-lettered."),
}
"""The exceptions for jobs whose messages ended without a call, by outcome, with their texts."""


class JobRow(NamedTuple):
    """A row of the table. Times are in epoch milliseconds; 0: none."""

    id: str
    backend: str
    queue_name: str
    task_path: str
    arguments: str
    priority: int
    run_after: int
    status: str
    enqueued_at: int
    started_at: int
    last_attempted_at: int
    finished_at: int
    return_value: str
    errors: str
    worker_ids: str

    @property
    def is_finished(self) -> bool:
        """Whether the job has ended."""
        return self.status in (FAILED, SUCCESSFUL)


class NewResult(NamedTuple):
    """The columns of a new result. Times are in epoch milliseconds."""

    id: str
    backend: str
    queue_name: str
    task_path: str
    arguments: str
    priority: int
    run_after: int
    enqueued_at: int


class Begun(NamedTuple):
    """The result of ``begin``."""

    rows: dict[str, JobRow]
    now: int
    """The database's time in epoch milliseconds."""


def is_of_jobs(ref: GroupRef) -> bool:
    """Return whether a group runs the jobs of a queue. Other groups on its topic only read their messages."""
    return ref.group == JOB_GROUP and job_queues.is_queue(ref.topic)


def error_line(class_path: str, traceback: str) -> str:
    """Return an error as a line for the column ``errors``."""
    text = traceback[-LONGEST_ERROR:].encode("utf-8", "backslashreplace").decode()
    return json.dumps({"exception_class_path": class_path, "traceback": text}, ensure_ascii=False) + "\n"


def lines(column: str) -> list[str]:
    """Return the lines of a column. Only newlines end them: texts may contain other characters that split lines."""
    return column.split("\n")[:-1]


def as_json(value: Any) -> str:
    """Return a value as JSON that UTF-8 can encode. Texts with lone surrogates are escaped.

    Raises:
        TypeError, ValueError: the value is not JSON-serializable.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def with_error(errors: str, class_path: str, traceback: str) -> str:
    """Return the column ``errors`` with one more. Each is stored, because their number counts."""
    return errors + error_line(class_path, "" if len(errors) > MOST_ERRORS else traceback)


def insert(session: Session, rows: Sequence[NewResult], *, keep: bool = False) -> None:
    """Insert results of new jobs in the caller's transaction.

    Args:
        session: the current transaction.
        rows: the results.
        keep: whether a result with the same id may exist, and is kept.
    """
    conflict = session.dialect.on_conflict_keep(RESULTS, ("id",)) if keep else ""
    for chunk in session.chunks(rows, weight=lambda row: len(row.arguments)):
        session.execute(
            f"INSERT INTO {RESULTS} ({', '.join(NewResult._fields)}) VALUES "
            + session.dialect.placeholders(len(chunk), f"({', '.join(['%s'] * len(NewResult._fields))})")
            + conflict,
            flat(chunk),
        )


def read(session: Session, ids: Iterable[str], how: str = "") -> dict[str, JobRow]:
    """Return results by id.

    Args:
        session: the session.
        ids: the ids.
        how: the end of the statement, to lock the rows.
    """
    found: dict[str, JobRow] = {}
    for chunk in session.chunks(sorted(set(ids))):
        for row in session.rows(
            f"SELECT {', '.join(JobRow._fields)} FROM {RESULTS}{session.dialect.force_index('PRIMARY')} "
            f"WHERE id IN ({session.dialect.placeholders(len(chunk), '%s')}) ORDER BY id{how}",
            chunk,
        ):
            found[row[0]] = JobRow(*row)
    return found


def begin(using: str, worker: str, ids: Collection[str]) -> Begun:
    """Note that a subscriber has claimed jobs: they are RUNNING, unless they have ended.

    A job that is RUNNING already was claimed by a subscriber that was lost; that is added to its errors.

    Args:
        using: alias of the queue's database.
        worker: name of the subscriber.
        ids: the ids of the jobs.

    Returns:
        The rows as they are now; those that have ended are unchanged.
    """

    def write(session: Session) -> Begun:
        found = read(session, ids, session.dialect.for_update)
        now = session.now()
        begun = [_begun(row, worker, now) for row in found.values() if not row.is_finished]
        for chunk in session.chunks(begun, weight=lambda row: len(row.errors) + len(row.worker_ids)):
            session.execute(
                session.dialect.update_joined(
                    RESULTS,
                    ("id", "started_at", "errors", "worker_ids"),
                    len(chunk),
                    "s.id = v.id",
                    {"status": f"'{RUNNING}'"} | {name: f"v.{name}" for name in ("started_at", "errors", "worker_ids")},
                ),
                flat((row.id, row.started_at, row.errors, row.worker_ids) for row in chunk),
            )
        return Begun(found | {row.id: row for row in begun}, now)

    return run(using, write)


def _begun(row: JobRow, worker: str, now: int) -> JobRow:
    errors = row.errors
    if row.status == RUNNING:
        *_, earlier = lines(row.worker_ids) or [""]
        errors = with_error(
            errors,
            f"{EXCEPTIONS}.WorkerLost",
            f"The subscriber {earlier!r} was lost after it had claimed the job, or could not store the outcome.",
        )
    return row._replace(
        status=RUNNING,
        started_at=row.started_at or now,
        errors=errors,
        worker_ids=f"{row.worker_ids}{worker}\n",
    )


def follow(session: Session, ends: Sequence[tuple[JobEnd, str]]) -> int:
    """Write what has become of jobs, except those that have ended already.

    Args:
        session: the current transaction, which has locked or settled the deliveries.
        ends: the ends of attempts, each with the job's status.

    Returns:
        The number of results that were changed.
    """
    ordered, changed = sorted(ends, key=lambda end: end[0].id), 0
    is_over = f"v.status IN ('{FAILED}', '{SUCCESSFUL}')"
    for chunk in session.chunks(ordered, weight=lambda end: len(end[0].return_value) + len(end[0].errors or "")):
        changed += session.execute(
            session.dialect.update_joined(
                RESULTS,
                (*JobEnd._fields, "status"),
                len(chunk),
                "s.id = v.id",
                {
                    "status": "v.status",
                    "finished_at": f"CASE WHEN {is_over} THEN {session.dialect.now_ms} ELSE 0 END",
                    "started_at": "CASE WHEN v.started_at > 0 THEN v.started_at ELSE s.started_at END",
                    "last_attempted_at": "CASE WHEN v.attempted_at > 0 THEN v.attempted_at "
                    "ELSE s.last_attempted_at END",
                    "return_value": "v.return_value",
                    "errors": "COALESCE(v.errors, s.errors)",
                },
                UNFINISHED,
            ),
            flat((*end, status) for end, status in chunk),
        )
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


def release(session: Session, deliveries: Iterable[Claimed]) -> None:
    """Make jobs ready again whose claims ended before they started. Their subscribers do not count as workers."""
    by = {delivery.offset: delivery.by for delivery in deliveries}
    ids = {job: by[offset] for offset, job in _ids(session, by).items()}
    rows = [
        (row.id, row.worker_ids.removesuffix(f"{ids[row.id]}\n"))
        for row in read(session, ids, session.dialect.for_update).values()
        if row.status == RUNNING
    ]
    for chunk in session.chunks(rows, weight=lambda row: len(row[1])):
        session.execute(
            session.dialect.update_joined(
                RESULTS,
                ("id", "worker_ids"),
                len(chunk),
                "s.id = v.id",
                {"status": f"'{READY}'", "worker_ids": "v.worker_ids"},
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
            (JobEnd(row.id, errors=with_error(row.errors, f"{EXCEPTIONS}.{name}", text)), FAILED)
            for row, (name, text) in reasons.items()
        ],
    )


def cancel(session: Session, topics: Mapping[str, str]) -> int:
    """End jobs whose messages are not delivered any more, because somebody has cancelled them; return how many.

    Args:
        session: the current transaction.
        topics: the topic of each job's queue, by id.
    """
    reason = ("JobCancelled", "The job was cancelled before it started.")
    rows = read(session, topics, session.dialect.for_update) if topics else {}
    return _fail(session, {row: reason for row in rows.values() if topics[row.id] == JOB_PREFIX + row.queue_name})


def restart(session: Session, offsets: Collection[int]) -> None:
    """Make jobs that have failed ready again: an operator has redriven their dead letters."""
    for chunk in session.chunks(sorted(_ids(session, offsets).values())):
        session.execute(
            f"UPDATE {RESULTS} SET status = %s, finished_at = 0 WHERE status = %s "
            f"AND id IN ({session.dialect.placeholders(len(chunk), '%s')})",
            (READY, FAILED, *chunk),
        )


def collect(using: str) -> int:
    """Delete some of the results that have ended and are older than ``RESULTS_RETENTION``; return how many."""
    keep_ms = int(get_settings().results_retention * 1000)

    def delete(session: Session) -> int:
        ids = [
            job
            for status in (SUCCESSFUL, FAILED)
            for (job,) in session.rows(
                f"SELECT id FROM {RESULTS}{session.dialect.force_index('queue_job_results_status')} "
                f"WHERE status = %s AND finished_at > 0 AND finished_at < {session.dialect.now_ms} - %s "
                "ORDER BY finished_at LIMIT %s",
                (status, keep_ms, CHUNK),
            )
        ]
        return sum(
            session.execute(session.dialect.delete_joined(RESULTS, ("i",), len(chunk), "s.id = v.i"), chunk)
            for chunk in session.chunks(sorted(ids))
        )

    return run(using, delete)
