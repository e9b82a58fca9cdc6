"""Jobs: lists of their results along an index, counts by status, and single jobs.

A page reads a bounded number of rows. With a status, it follows the index of statuses; otherwise that of tasks, in
which it merges all tasks. Conditions that the index does not have are applied to the rows that it reads.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.db.tables import RESULTS
from django_mysqlqueue.inspection import log_entries
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.models import JobResult
from django_mysqlqueue.names.keys import lane
from django_mysqlqueue.names.rules import JOB_PREFIX
from django_mysqlqueue.options.topics import first_topic
from django_mysqlqueue.service import job_progress
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.job_progress import Progress
from django_mysqlqueue.service.job_rows import lines
from django_mysqlqueue.service.log import distinct
from django_mysqlqueue.sql.session import Session, among, built, grouped, matches

STATUSES = tuple(JobResult.Status.values)
ENDED = (JobResult.Status.FAILED.value, JobResult.Status.SUCCESSFUL.value)
BY_STATUS = ("queue_job_results_status", "status", "finished_at")
BY_TASK = ("queue_job_results_task", "task_path", "enqueued_at")
"""An index, its first column, and the one by which it orders."""
JobPosition = tuple[int, str]
"""The time by which a job is listed, and its id."""
COLUMNS = (
    "s.id, s.backend, s.queue_name AS queue, s.task_path AS task, s.priority, s.run_after, s.status, s.enqueued_at, "
    "s.started_at, s.last_attempted_at, s.finished_at, "
    "LENGTH(s.worker_ids) - LENGTH(REPLACE(s.worker_ids, %s, '')) AS attempts, s.progress, "
    "s.retry_at, s.retry_reason"
)
"""Columns of a ``JobSummary`` of the table as ``s``. The parameter is a newline."""
FIRST, LAST = -(2**62), 2**62
"""Below and above every time."""
WHOLE = 2**31 - 1
"""Number of characters that no text exceeds."""
ERRORS_READ = 2_000_000
"""Maximum number of characters of a job's errors that are read."""
SUBSCRIBERS_READ = 20_000
"""Maximum number of characters of the names of a job's subscribers that are read."""


@dataclass(frozen=True, slots=True)
class JobSummary:
    """A job in a list. Times are in epoch milliseconds; 0: none."""

    id: str
    """The id of the result and of the message."""
    backend: str
    """The alias in ``TASKS``."""
    queue: str
    task: str
    """The dotted path of the task."""
    priority: int
    run_after: int
    status: str
    """``"READY"``, ``"RUNNING"``, ``"FAILED"`` or ``"SUCCESSFUL"``."""
    enqueued_at: int
    started_at: int
    """When the first attempt started."""
    last_attempted_at: int
    """When the last attempt started. In the first second of an attempt, it is the time of its claim."""
    finished_at: int
    attempts: int
    """Number of claims by subscribers, including those of subscribers that were lost before the job started."""
    progress: Progress | None = None
    """What the current or the last attempt has reported; None: nothing."""
    retry_at: int = 0
    """When the next attempt is due, as the last one that was to be retried has left it; 0: none was."""
    retry_reason: str = ""
    """Why, as ``RetryLater`` and ``context.retry`` had it; empty: they had none, or it has failed."""

    @property
    def topic(self) -> str:
        """The topic of its queue."""
        return f"{JOB_PREFIX}{self.queue}"

    @property
    def has_ended(self) -> bool:
        """Whether it is FAILED or SUCCESSFUL."""
        return self.status in ENDED

    def waits_at(self, now: int) -> bool:
        """Return whether it waits for its next attempt at a time in epoch milliseconds."""
        return self.status == JobResult.Status.READY and self.retry_at > now

    @property
    def waited_ms(self) -> int | None:
        """Milliseconds from the time at which it was due to its first attempt; None if it has not started."""
        return max(0, self.started_at - max(self.enqueued_at, self.run_after)) if self.started_at else None

    @property
    def took_ms(self) -> int | None:
        """Milliseconds of its last attempt; None if it has not ended, or ended without a call or in a wait."""
        return took_ms(self.last_attempted_at, self.retry_at, self.finished_at)


def took_ms(last_attempted_at: int, retry_at: int, finished_at: int) -> int | None:
    """Return the milliseconds of a job's last attempt; None if it has not ended, or ended while it waited."""
    is_of_attempt = finished_at and last_attempted_at and last_attempted_at >= retry_at
    return max(0, finished_at - last_attempted_at) if is_of_attempt else None


@dataclass(frozen=True, slots=True)
class JobError:
    """An error of a job."""

    exception_class_path: str
    traceback: str


@dataclass(frozen=True, slots=True)
class JobDetails:
    """A job with its arguments, its return value and its errors."""

    summary: JobSummary
    arguments: str
    """JSON with ``args`` and ``kwargs``."""
    arguments_size: int
    """Number of bytes of the arguments."""
    return_value: str
    """JSON; empty if there is none."""
    return_value_size: int
    """Number of bytes of the return value."""
    errors: tuple[JobError, ...]
    """Oldest first: at most the last 2,000,000 characters of them."""
    error_count: int
    subscribers: tuple[str, ...]
    """Names of the last subscribers that have claimed it, oldest first."""
    cancel_requested_at: int = 0
    """When it was asked to stop while it ran, in epoch milliseconds; 0: never."""
    stage: str = ""
    """The stage of its chain; empty: it has none."""


@dataclass(frozen=True, slots=True)
class JobListing:
    """A page of jobs."""

    jobs: tuple[JobSummary, ...]
    """Newest first."""
    after: tuple[int, str] | None
    """The argument ``after`` for the next page; None if this is the last."""
    whole: bool
    """True if the page is full, or all jobs after its start were searched."""
    all_tasks: bool = True
    """False if there are more than ``bounds.job_tasks`` tasks, so that only the jobs of the first ones were read."""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Conditions for jobs. Times are in epoch milliseconds, and inclusive."""

    status: str | None = None
    task: str | None = None
    queues: Collection[str] | None = None
    """None: all."""
    since: int | None = None
    until: int | None = None

    @property
    def by_end(self) -> bool:
        """Whether the times are those at which jobs ended. Otherwise, they are those at which they were enqueued."""
        return self.status in ENDED

    @property
    def index(self) -> tuple[str, str, str]:
        """The index that is read."""
        return BY_TASK if self.status is None else BY_STATUS

    def beside(self) -> tuple[str, list[Any]]:
        """Return the condition that the index does not have, or an empty text, and its parameters."""
        conditions: list[str] = []
        parameters: list[Any] = []
        if self.queues is not None:
            conditions.append(among("queue_name", self.queues))
            parameters += sorted(self.queues)
        if self.status is not None:
            since, until = (None, None) if self.by_end else (self.since, self.until)
            given = {"task_path = %s": self.task, "enqueued_at >= %s": since, "enqueued_at <= %s": until}
            conditions += [condition for condition, value in given.items() if value is not None]
            parameters += [value for value in given.values() if value is not None]
        return " AND ".join(conditions), parameters

    def along(self, after: JobPosition | None) -> tuple[str, list[Any]]:
        """Return the condition and the order in which the index is read, and its parameters."""
        *_, order = self.index
        if self.status is not None and not self.by_end:
            # These all have the same time: a range of times would be read from its start again for each page.
            below, job = ("", []) if after is None else (" AND id < %s", [after[1]])
            return f"{order} = 0{below} ORDER BY id DESC", job
        stop = (LAST if self.until is None else self.until + 1, "")
        at, last = stop if after is None else min(after, stop)
        return (
            f"{order} >= %s AND {order} <= %s AND ({order} < %s OR id < %s) ORDER BY {order} DESC, id DESC",
            [FIRST if self.since is None else self.since, at, at, last],
        )


def queues_of(topics: Iterable[str]) -> frozenset[str]:
    """Return the names of the queues among some topics. A DLQ topic counts as its topic."""
    firsts = {first_topic(topic) for topic in topics}
    return frozenset(topic.removeprefix(JOB_PREFIX) for topic in firsts if topic.startswith(JOB_PREFIX))


@checked()
def list_jobs(
    *,
    status: str | None = None,
    task: str | None = None,
    topic: str | None = None,
    since: int | None = None,
    until: int | None = None,
    after: tuple[int, str] | None = None,
    limit: int = 50,
    using: str | None = None,
    bounds: Bounds = PAGES,
) -> JobListing:
    """List jobs, without their arguments, return values and errors.

    The newest come first. If ``status`` is ``"FAILED"`` or ``"SUCCESSFUL"``, the order is that of the times at which
    the jobs ended; with another status the descending one of their ids; otherwise that of the times at which
    they were enqueued. Only an index of the status or of the task is read: if there are further conditions, the
    next ``bounds.jobs`` jobs are searched, so a page may have fewer jobs than the limit although there are more.

    Args:
        status: only jobs with this status.
        task: only jobs of the task with this dotted path.
        topic: only jobs of the queue with this topic, which is ``jobs.`` and its name.
        since: only jobs that were enqueued (if they are listed by their ends: that ended) at or after this time, in
            epoch milliseconds.
        until: only jobs that were enqueued (or ended) at or before this time, in epoch milliseconds.
        after: the attribute ``after`` of the previous page.
        limit: maximum number of jobs.
        using: alias of the database (default: that of the topic, else of the queue).
        bounds: limits of what is read.
    """
    session = Session(queue_alias(using, topic=topic))
    wanted = JobFilter(status, task, None if topic is None else queues_of([topic]), since, until)
    return look(session, wanted, after=after, limit=limit, bounds=bounds)


def look(
    session: Session,
    wanted: JobFilter,
    *,
    after: JobPosition | None = None,
    limit: int = 50,
    known: Sequence[str] | None = None,
    bounds: Bounds = PAGES,
) -> JobListing:
    """Return a page of the jobs that match a filter, of the ``known`` tasks if ``tasks`` has returned them."""
    value = wanted.task if wanted.status is None else wanted.status
    if value is not None:
        known = [value]
    elif known is None:
        known = tasks(session, bounds=bounds)
    values, all_tasks = known[: bounds.job_tasks], len(known) <= bounds.job_tasks
    places, end = _places(session, wanted, values, after, limit, bounds) if values else ([], None)
    found = summaries(session, [job for _, job in places[:limit]])
    jobs = tuple(found[job] for _, job in places[:limit] if job in found)
    if len(places) > limit:
        return JobListing(jobs, places[limit - 1], whole=True, all_tasks=all_tasks)
    return JobListing(jobs, end, whole=end is None, all_tasks=all_tasks)


def _places(
    session: Session, wanted: JobFilter, values: Sequence[str], after: JobPosition | None, limit: int, bounds: Bounds
) -> tuple[list[JobPosition], JobPosition | None]:
    """Return the places of jobs that match, newest first, and that up to which the index was read; None: to its end."""
    index, first, order = wanted.index
    condition, parameters = wanted.beside()
    number = max(limit + 1, bounds.jobs // len(values)) if condition else limit + 1
    along, limits = wanted.along(after)
    select = (
        f"SELECT %s AS place, {order} AS at, id, {matches(condition)} AS matches "
        f"FROM {RESULTS}{session.force_index(index)} WHERE {first} = %s AND {along} LIMIT %s"
    )
    rows = session.each(select, [(place, *parameters, value, *limits, number) for place, value in enumerate(values)])
    of_value = grouped((place, (moment, job)) for place, moment, job, _ in rows)
    # Behind the newest of the values' last places, rows that were not read may come first: the next page has them.
    end = max((min(places) for places in of_value.values() if len(places) == number), default=None)
    found = [(moment, job) for _, moment, job, is_match in rows if is_match]
    return sorted((place for place in found if end is None or place >= end), reverse=True), end


def tasks(session: Session, *, bounds: Bounds = PAGES) -> list[str]:
    """Return the paths of tasks that have results, one more than ``bounds.job_tasks`` if there are more."""
    return distinct(session, RESULTS, BY_TASK[0], "task_path", most=bounds.job_tasks + 1)


def summaries(session: Session, ids: Iterable[str]) -> dict[str, JobSummary]:
    """Return jobs by id, without those that do not exist."""
    joins = f"{session.dialect.join_to(RESULTS, 's')} ON s.id = v.i"
    return {row.id: _summary(row) for row in session.joined(f"SELECT {COLUMNS}", "i", set(ids), joins, before=["\n"])}


def waiting(session: Session, *, limit: int, bounds: Bounds = PAGES) -> list[JobSummary]:
    """Return jobs that wait for their next attempts, among the first ``bounds.jobs`` that are READY; the next first."""
    rows = session.rows(
        f"SELECT retry_at, id FROM {RESULTS}{session.dialect.force_index(BY_STATUS[0])} "
        "WHERE status = %s AND finished_at = 0 ORDER BY id LIMIT %s",
        (JobResult.Status.READY.value, bounds.jobs),
    )
    now = session.now()
    ids = [job for at, job in sorted(rows) if at > now][:limit]
    found = summaries(session, ids) if ids else {}
    return [found[job] for job in ids if job in found]


def _summary(row: Any) -> JobSummary:
    return built(JobSummary, row, progress=_progress(row.progress))


@checked()
def count_jobs(*, using: str | None = None, bounds: Bounds = PAGES) -> dict[str, Count]:
    """Count the jobs of all queues by status.

    Args:
        using: alias of the database (default: that of the queue).
        bounds: each count stops at ``bounds.count``.
    """
    session = Session(queue_alias(using))
    one = (
        f"SELECT %s AS status, COUNT(*) AS number FROM (SELECT 1 FROM {RESULTS}"
        f"{session.dialect.force_index('queue_job_results_status')} WHERE status = %s LIMIT %s) w"
    )
    rows = session.each(one, [(status, status, bounds.count + 1) for status in STATUSES])
    return {status: Count.up_to(bounds.count, number) for status, number in rows}


@checked()
def get_job(job_id: str, *, topic: str | None = None, using: str | None = None) -> JobDetails | None:
    """Read a job with its arguments, its return value and its errors; None if there is no result with this id.

    Args:
        job_id: the id of the result.
        topic: the topic of its queue, which is ``jobs.`` and its name. A job of another queue is not returned.
        using: alias of the database (default: that of the topic, else of the queue).
    """
    found = read(Session(queue_alias(using, topic=topic)), job_id)
    if found is None or (topic is not None and found.summary.queue not in queues_of([topic])):
        return None
    return found


def read(session: Session, job_id: str, *, most: int = WHOLE) -> JobDetails | None:
    """Return a job with the first ``most`` characters of its arguments and of its return value, or None."""
    dialect = session.dialect
    for row in session.named(
        f"SELECT {COLUMNS}, LENGTH(s.errors) - LENGTH(REPLACE(s.errors, %s, '')) AS error_count, "
        "SUBSTR(s.arguments, 1, %s) AS arguments, LENGTH(s.arguments) AS arguments_size, "
        "SUBSTR(s.return_value, 1, %s) AS return_value, LENGTH(s.return_value) AS return_value_size, "
        f"{dialect.ending('s.errors', ERRORS_READ)} AS errors, "
        f"{dialect.ending('s.worker_ids', SUBSCRIBERS_READ)} AS subscribers, s.cancel_requested_at, s.stage "
        f"FROM {RESULTS} s WHERE s.id = %s",
        ("\n", "\n", most, most, job_id),
    ):
        return built(
            JobDetails,
            row,
            summary=_summary(row),
            arguments_size=_size(row.arguments, row.arguments_size, most),
            return_value_size=_size(row.return_value, row.return_value_size, most),
            errors=tuple(_error(line) for line in _last_lines(row.errors, ERRORS_READ)),
            subscribers=tuple(_last_lines(row.subscribers, SUBSCRIBERS_READ)),
        )
    return None


def _progress(column: str) -> Progress | None:
    try:
        return job_progress.decode(column)
    except (ValueError, TypeError, KeyError, OverflowError, AssertionError):
        return None  # Somebody has written it in plain SQL.


def _size(text: str, stored: int, most: int) -> int:
    """Return the number of bytes of a text of which at most some characters were read. SQLite stores characters."""
    return len(text.encode()) if len(text) < most else stored


def _last_lines(end: str, most: int) -> list[str]:
    """Return the whole lines at the end of a column of which at most some characters were read."""
    return lines(end)[1:] if len(end) >= most else lines(end)


def _error(line: str) -> JobError:
    try:
        return JobError(**json.loads(line))
    except (ValueError, TypeError):
        return JobError("", line)  # Somebody has written it in plain SQL.


def message_offset(session: Session, job: JobSummary, *, search: bool = True, bounds: Bounds = PAGES) -> int | None:
    """Return the offset of a job's message, or None; ``search``: False if only ``enqueue()`` can have published it."""
    place = (job.topic, lane(job.task, job.priority), job.id)
    found = log_entries.at_ids(session, [place]).get(place)
    if found is None and search:
        entries = log_entries.by_id(session, job.id, topic=job.topic, bounds=bounds).entries
        found = entries[0].offset if entries else None
    return found
