"""Rows of results of jobs: their columns, and the statements that read and write them.

Transactions lock them by primary key, in the order of their ids.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from django.conf import settings

from django_mysqlqueue.arguments import is_unicode
from django_mysqlqueue.db.sizes import LATEST_DELIVERY
from django_mysqlqueue.db.tables import RESULTS
from django_mysqlqueue.models import JobResult
from django_mysqlqueue.service.deliveries import JobEnd, JobRetry
from django_mysqlqueue.service.messages import Message
from django_mysqlqueue.sql.session import Session, pieces

READY, RUNNING = JobResult.Status.READY.value, JobResult.Status.RUNNING.value
FAILED, SUCCESSFUL = JobResult.Status.FAILED.value, JobResult.Status.SUCCESSFUL.value
BY_ID = "s.id = v.id"
STARTED_AT = "CASE WHEN v.started_at > 0 THEN v.started_at ELSE s.started_at END"
UNFINISHED = f"s.status IN ('{READY}', '{RUNNING}')"
UNFINISHED_READ = 1000
"""Number of results that have not ended that one query reads of each status."""
LONGEST_ERROR = 65_536
"""Maximum number of characters of a traceback; of a longer one, the end is stored."""
MOST_ERRORS = 1_048_576
"""Characters of errors of a job, after which further ones are stored without their tracebacks."""
RESTARTED = " "
"""The beginning of the first line of ``errors`` after the job was restarted. JSON ignores it."""
EXCEPTIONS = "django_mysqlqueue.tasks.exceptions"


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
    progress: str
    cancel_requested_at: int
    stage: str
    expires_in: int
    retry_at: int
    retry_since: int
    redriven_id: str

    @property
    def is_finished(self) -> bool:
        """Whether the job has ended."""
        return self.status in (FAILED, SUCCESSFUL)

    def is_run_by(self, messages: Collection[str]) -> bool:
        """Return whether one of some messages, by their ids, runs the job: no other one was published in its place."""
        return not self.redriven_id or self.redriven_id in messages

    def ended_with(self, *names: str) -> bool:
        """Return whether the job has FAILED with one of some exceptions of ``tasks.exceptions``."""
        last = (lines(self.errors) or [""])[-1] if self.status == FAILED else ""
        return any(f'"{EXCEPTIONS}.{name}"' in last for name in names)


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
    unique_key: str | None = None
    """The key that no other job may hold; None: jobs are not compared."""
    kept_key: str = ""
    """The same if it holds it until it has ended; empty: until it has started."""
    unique_for: int = 0
    """Milliseconds after which it no longer holds its key; 0: no limit."""
    stage: str = ""
    expires_in: int = 0
    """Milliseconds for which its message may wait for an attempt; 0: no limit."""


class UnfinishedJob(NamedTuple):
    """A job that has not ended."""

    id: str
    status: str
    cancel_requested_at: int
    stage: str


class StartedJob(NamedTuple):
    """What a subscriber stores of a job while it runs."""

    id: str
    started_at: int
    """When its first attempt started, in epoch milliseconds; 0: leave it."""
    attempted_at: int
    """When this attempt started, in epoch milliseconds."""
    progress: str
    """JSON; empty: none."""


def error_line(class_path: str, traceback: str) -> str:
    """Return an error as a line for the column ``errors``."""
    text = traceback[-LONGEST_ERROR:].encode("utf-8", "backslashreplace").decode()
    return json.dumps({"exception_class_path": class_path, "traceback": text}, ensure_ascii=False) + "\n"


def lines(column: str) -> list[str]:
    """Return the lines of a column. Only newlines end them: texts may contain other characters that split lines."""
    return column.split("\n")[:-1]


def since_restart(errors: str) -> list[str]:
    """Return the lines of the column ``errors`` that were added since the job was last restarted."""
    found = lines(errors)
    first = next((place for place in reversed(range(len(found))) if found[place].startswith(RESTARTED)), 0)
    return found[first:]


def as_json(value: Any) -> str:
    """Return a value as JSON that UTF-8 can encode. Texts with lone surrogates are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(value, allow_nan=False)


def with_error(errors: str, class_path: str, traceback: str) -> str:
    """Return the column ``errors`` with one more. Each is stored, because their number counts."""
    return errors + error_line(class_path, "" if len(errors) > MOST_ERRORS else traceback)


def moment(milliseconds: int) -> datetime.datetime | None:
    """Return epoch milliseconds as a datetime, aware if ``USE_TZ`` is True; None for 0."""
    if not milliseconds:
        return None
    seconds = milliseconds / 1000
    if settings.USE_TZ:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return datetime.datetime.fromtimestamp(seconds)  # noqa: DTZ006  # As Django's timezone.now().


def message_of(row: NewResult | JobRow) -> Message:
    """Return the message that makes subscribers run a job."""
    payload = {"task": row.task_path, **json.loads(row.arguments)}
    message = Message(payload, row.task_path, row.id, deliver_at=moment(row.run_after), priority=row.priority)
    if not row.expires_in:
        return message
    if row.run_after > time.time() * 1000:
        return replace(message, expires_at=moment(min(row.run_after + row.expires_in, LATEST_DELIVERY)))
    return replace(message, expires_in=row.expires_in / 1000)


def insert(session: Session, rows: Sequence[NewResult], *, keep: str = "") -> None:
    """Insert results of new jobs in the caller's transaction, except those whose ``keep`` exists: an id, or a key."""
    conflict = session.dialect.on_conflict_keep(RESULTS, (keep,)) if keep else ""
    also = {"unique_since": session.dialect.now_ms} if keep == "unique_key" else None
    for chunk in session.chunks(rows, weight=lambda row: len(row.arguments)):
        session.insert(RESULTS, NewResult._fields, chunk, conflict, also=also)


class Holder(NamedTuple):
    """A job that holds a unique key."""

    row: JobRow
    is_late: bool
    """Whether its time is over, so that it no longer counts."""


def insert_unique(session: Session, rows: Iterable[NewResult]) -> dict[str, JobRow]:
    """Insert results of jobs whose unique keys no other job holds, in the caller's transaction.

    A job that waits cannot start before the caller's transaction has ended: its row is locked. So it sees what the
    caller has written. One that runs is not locked, as far as its row can be read without: its outcome would wait.

    Returns:
        For each id, the job that holds its key: the one with this id, if the result was inserted.
    """
    by_key: dict[str, list[NewResult]] = {}
    for row in rows:
        by_key.setdefault(row.unique_key or "", []).append(row)
    holders = _holders(session, "unique_key", by_key)
    # At other isolation levels, a plain read may be that of a job that has ended since.
    is_current = session.dialect.read_committed(session.connection) is None
    found = {
        key: holder.row
        for key, holder in holders.items()
        if is_current and holder.row.status == RUNNING and not holder.is_late
    }
    # Locked by primary key: a lock by the unique index would also lock gaps, at REPEATABLE READ.
    if waiting := [holder.row.id for key, holder in holders.items() if key not in found]:
        locked = _holders(session, "id", waiting, session.dialect.for_update)
        found |= {key: holder.row for key, holder in locked.items() if not holder.is_late}
        _free(session, locked.values())
    if new := [by_key[key][0] for key in sorted(by_key.keys() - found.keys())]:
        keys = [row.unique_key or "" for row in new]
        # Only one waits for a row that another transaction has inserted. If that is rolled back, each that waits locks
        # the gap, and would wait for the others to insert into it: a deadlock, which the caller cannot repeat.
        with session.named_locks(keys):
            insert(session, new, keep="unique_key")
            stored = _holders(session, "unique_key", keys, session.dialect.for_update)
        found |= {key: holder.row for key, holder in stored.items()}
    return {row.id: found[key] for key, of_key in by_key.items() for row in of_key}


def _is_late(session: Session) -> str:
    """Return the SQL, with the table as ``s``, for whether the time for which a job holds its unique key is over."""
    since = f"{session.dialect.greatest}(s.unique_since, s.run_after)"
    return f"s.unique_for > 0 AND {since} + s.unique_for <= {session.dialect.now_ms}"


def _free(session: Session, holders: Iterable[Holder]) -> None:
    """Take their unique keys from those whose time is over."""
    late = sorted(holder.row.id for holder in holders if holder.is_late)
    session.update(RESULTS, "i", late, "s.id = v.i", {"unique_key": "NULL"}, _is_late(session))


def store_redriven(session: Session, messages: Mapping[str, str]) -> None:
    """Store the ids of redriven messages of jobs whose results know of none, in the caller's transaction."""
    changes = {"redriven_id": "v.message"}
    session.update(RESULTS, ("id", "message"), sorted(messages.items()), BY_ID, changes, "s.redriven_id = ''")


def copies(session: Session, ids: Iterable[str]) -> dict[str, str]:
    """Return the ids of jobs by the ids of their redriven messages, and of the copies that wait for their attempts."""
    return {message: job for job, message in _rows(session, "id, redriven_id", ids, " AND redriven_id <> ''")}


def _holders(session: Session, column: str, values: Iterable[str | None], how: str = "") -> dict[str, Holder]:
    """Return the jobs that hold some unique keys, or those with some ids that hold one, by their keys."""
    index = "PRIMARY" if column == "id" else "queue_job_results_unique"
    columns = ", ".join(f"s.{name}" for name in JobRow._fields)
    rows = session.among(
        f"SELECT s.unique_key, CASE WHEN {_is_late(session)} THEN 1 ELSE 0 END, {columns} "
        f"FROM {RESULTS} s{session.dialect.force_index(index)} "
        f"WHERE s.{column} IN {{keys}} AND s.unique_key IS NOT NULL ORDER BY s.{column}{how}",
        values,
    )
    return {key: Holder(JobRow._make(row), bool(is_late)) for key, is_late, *row in rows}


def free_keys(session: Session, keys: Mapping[str, str]) -> set[str]:
    """Return those of some jobs whose unique keys no other job holds, or no longer in time.

    ``keys``: unique keys by the ids of the jobs. Of several jobs with one key, the first one is returned.
    """
    holders = _holders(session, "unique_key", keys.values())
    _free(session, holders.values())
    held = {key: holder.row.id for key, holder in holders.items() if not holder.is_late}
    return {job for job, key in keys.items() if held.setdefault(key, job) == job}


def read(session: Session, ids: Iterable[str], how: str = "") -> dict[str, JobRow]:
    """Return results by id."""
    rows = _rows(session, ", ".join(JobRow._fields), ids, f" ORDER BY id{how}")
    return {row.id: row for row in map(JobRow._make, rows)}


def statuses(session: Session, ids: Iterable[str]) -> dict[str, str]:
    """Return the statuses of jobs by id."""
    return dict(_rows(session, "id, status", ids))


def unfinished(session: Session, task: str, queue: str, *, size: int) -> Iterator[Sequence[UnfinishedJob]]:
    """Yield pages of the jobs of a task in a queue that have not ended, in the order of their ids.

    Ids begin with the time at which they were made, except for those of schedules, which come last. This reads the
    results that have not ended, of all tasks, along their index, without locks. Results that were enqueued after the
    newest there is now are left out.
    """
    # Not up to the database's time: the clocks of processes that enqueue may be ahead of it.
    newest = session.row(
        f"SELECT enqueued_at FROM {RESULTS}{session.dialect.force_index('queue_job_results_task')} "
        "WHERE task_path = %s ORDER BY enqueued_at DESC LIMIT 1",
        (task,),
    )
    if newest is None:
        return
    (until,) = newest
    columns = f"{', '.join(UnfinishedJob._fields)}, task_path, queue_name, enqueued_at"
    hint = session.dialect.force_index("queue_job_results_status")
    # In one statement, so that none is missed that starts or waits again meanwhile.
    ready, running = (
        f"SELECT * FROM (SELECT {columns} FROM {RESULTS}{hint} WHERE status = '{status}' AND finished_at = 0 "
        f"AND id > %s ORDER BY id LIMIT %s) AS {status.lower()}"
        for status in (READY, RUNNING)
    )
    last, is_whole = "", False
    while not is_whole:
        read = sorted(session.rows(f"{ready} UNION ALL {running}", (last, UNFINISHED_READ) * 2))
        is_whole = len(read) < UNFINISHED_READ
        rows = read[:UNFINISHED_READ]
        last = rows[-1][0] if rows else last
        wanted = [UnfinishedJob(*row[:-3]) for row in rows if row[-3:-1] == (task, queue) and row[-1] <= until]
        yield from pieces(wanted, size)


def last_errors(session: Session, ids: Iterable[str]) -> dict[str, str]:
    """Return the last errors of jobs by id; empty: none."""
    return {job: _last_error(errors) for job, errors in _rows(session, "id, errors", ids)}


def _last_error(errors: str) -> str:
    *_, last = lines(errors) or [""]
    try:
        return str(json.loads(last)["traceback"])
    except (ValueError, TypeError, KeyError):
        return last  # There is none, or somebody has written it in plain SQL.


def _rows(session: Session, columns: str, ids: Iterable[str], end: str = "") -> list[tuple[Any, ...]]:
    """Return columns of results, by primary key."""
    hint = session.dialect.force_index("PRIMARY")
    return session.among(f"SELECT {columns} FROM {RESULTS}{hint} WHERE id IN {{keys}}{end}", ids)


def begin(session: Session, rows: Sequence[JobRow], now: int) -> None:
    """Store that jobs are RUNNING, and that they are attempted now.

    They no longer wait, so unique keys that they do not keep are free, and have made no progress.

    ``rows``: the rows as they are to be, except for ``last_attempted_at``.
    """
    columns = ("started_at", "errors", "worker_ids")
    alike: dict[tuple[int, str, str], list[str]] = {}
    for row in rows:
        alike.setdefault((row.started_at, row.errors, row.worker_ids), []).append(row.id)
    # Most have not been claimed before, so that their values are the same. A join takes up to four times as long.
    values, most = max(alike.items(), key=lambda one: len(one[1]), default=((0, "", ""), []))
    common = {"status": f"'{RUNNING}'", "last_attempted_at": str(now), "unique_key": _kept(), "progress": "''"}
    for ids in session.chunks(most):
        sets = ", ".join([f"{name} = {value}" for name, value in common.items()] + [f"{name} = %s" for name in columns])
        session.later(
            f"UPDATE {RESULTS}{session.dialect.force_index('PRIMARY')} SET {sets} "
            f"WHERE id IN ({session.dialect.placeholders(len(ids), '%s')})",
            (*values, *ids),
        )
    others = [(job, *key) for key, found in alike.items() if key != values for job in found]
    for chunk in session.chunks(others, weight=lambda row: len(row[2]) + len(row[3])):
        changes = common | {name: f"v.{name}" for name in columns}
        session.update(RESULTS, ("id", *columns), chunk, BY_ID, changes)


def _kept(table: str = "") -> str:
    """Return the SQL for the unique key of a job that has started and not ended: NULL, unless it keeps it."""
    return f"CASE WHEN {table}kept_key = '' THEN NULL ELSE {table}unique_key END"


def end(session: Session, ends: Sequence[tuple[JobEnd, str]]) -> int:
    """Store the ends of attempts, each with the job's status, except for jobs that have ended; return how many."""
    if len(ends) == 1:  # For a join, MariaDB fills a temporary table, which takes eight times as long.
        return session.execute(*end_of_one(session, *ends[0]))
    names = ("id", "started_at", "attempted_at", "return_value", "errors", "progress", "worker_ids")
    is_over = f"v.status IN ('{FAILED}', '{SUCCESSFUL}')"
    changes = {
        "status": "v.status",
        "finished_at": f"CASE WHEN {is_over} THEN {session.dialect.now_ms} ELSE 0 END",
        "started_at": STARTED_AT,
        "last_attempted_at": "CASE WHEN v.attempted_at > 0 THEN v.attempted_at "
        "WHEN v.worker_ids = '' THEN 0 ELSE s.last_attempted_at END",
        "return_value": "v.return_value",
        **{name: f"COALESCE(v.{name}, s.{name})" for name in ("errors", "progress", "worker_ids")},
        "unique_key": f"CASE WHEN {is_over} THEN NULL ELSE {_kept('s.')} END",
    }
    retries = JobRetry._fields if any(one.retry is not None for one, _ in ends) else ()
    changes |= {name: f"COALESCE(v.{name}, s.{name})" for name in retries}
    no_retry = (None,) * len(retries)
    changed = 0
    ordered = sorted(ends, key=lambda one: one[0].id)
    for chunk in session.chunks(ordered, weight=lambda one: len(one[0].return_value) + len(one[0].errors or "")):
        rows = [(*(getattr(one, name) for name in names), *(one.retry or no_retry), status) for one, status in chunk]
        changed += session.update(RESULTS, (*names, *retries, "status"), rows, BY_ID, changes, UNFINISHED)
    return changed


def end_of_one(session: Session, one: JobEnd, status: str) -> tuple[str, tuple[object, ...]]:
    """Return an UPDATE by primary key of the columns that the end of an attempt changes, and its values."""
    values: dict[str, object] = {"status": status, "return_value": one.return_value}
    values |= {"started_at": one.started_at} if one.started_at else {}
    values |= {"last_attempted_at": one.attempted_at} if one.attempted_at or one.worker_ids == "" else {}
    values |= {name: text for name in ("errors", "progress", "worker_ids") if (text := getattr(one, name)) is not None}
    values |= {
        name: value for name, value in ([] if one.retry is None else one.retry._asdict().items()) if value is not None
    }
    sets = ", ".join(f"{name} = %s" for name in values)
    is_over = status in (FAILED, SUCCESSFUL)
    finished, key = (session.dialect.now_ms, "NULL") if is_over else ("0", _kept("s."))
    sql = (
        f"UPDATE {RESULTS} AS s{session.dialect.force_index('PRIMARY')} SET {sets}, finished_at = {finished}, "
        f"unique_key = {key} WHERE s.id = %s AND {UNFINISHED}"
    )
    return sql, (*values.values(), one.id)


def store_started(session: Session, jobs: Sequence[StartedJob]) -> set[str]:
    """Store the starts and the progress of running jobs, except for jobs whose later attempt has been stored.

    Returns:
        The ids of the jobs, without those whose rows another transaction has locked: nothing was stored for them.
    """
    # With ids alone, MySQL would read the whole index of a small table.
    rows = _rows(session, "id, status", (job.id for job in jobs), session.dialect.skip_locked)
    locked = {job for job, _ in rows}
    changes = {"started_at": STARTED_AT, "last_attempted_at": "v.attempted_at", "progress": "v.progress"}
    is_later = f"s.status = '{RUNNING}' AND s.last_attempted_at <= v.attempted_at"
    for chunk in session.chunks(sorted(job for job in jobs if job.id in locked), weight=lambda job: len(job.progress)):
        session.update(RESULTS, StartedJob._fields, chunk, BY_ID, changes, is_later)
    return locked


def cancel_requested(session: Session, ids: Iterable[str], how: str = "") -> set[str]:
    """Return the ids of the jobs that were asked to stop."""
    return {job for job, at in _rows(session, "id, cancel_requested_at", ids, f" ORDER BY id{how}") if at}


def wait_until(session: Session, ids: Iterable[str], value: int, *, at: str = "v.at") -> None:
    """Store when jobs that wait for their next attempts get them, except those that another transaction has locked.

    ``at``: SQL for the time in epoch milliseconds, with the value as ``v.at``.
    """
    # With ids alone, MySQL would read the whole index of a small table.
    end = f" AND status = '{READY}' AND retry_at > 0 ORDER BY id{session.dialect.skip_locked}"
    rows = [(job, value) for job, _ in _rows(session, "id, status", ids, end)]
    session.update(RESULTS, ("id", "at"), rows, BY_ID, {"retry_at": at})


def restart(session: Session, messages: Mapping[str, str]) -> None:
    """Make jobs that have FAILED READY again. Their attempts are counted from 1 again.

    ``messages``: by id of a job, the id of its new message; empty: it has no new one, and does not take its unique key
    again, which another job may hold.

    Raises:
        django.db.IntegrityError: another job holds the unique key of one that has a new message.
    """
    changes = {
        "status": f"'{READY}'",
        "finished_at": "0",
        "cancel_requested_at": "0",
        "progress": "''",
        "retry_at": "0",
        "retry_since": "0",
        "errors": session.dialect.appended("s.errors", RESTARTED),
        "redriven_id": "CASE WHEN v.message = '' THEN s.redriven_id ELSE v.message END",
        "unique_key": "CASE WHEN v.message = '' THEN s.unique_key ELSE NULLIF(s.kept_key, '') END",
        "unique_since": f"CASE WHEN v.message = '' THEN s.unique_since ELSE {session.dialect.now_ms} END",
    }
    has_failed = f"s.status = '{FAILED}'"
    session.update(RESULTS, ("id", "message"), sorted(messages.items()), BY_ID, changes, has_failed)
