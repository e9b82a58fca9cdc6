"""Tasks: how many jobs of each wait, were enqueued lately and have failed, and how long they wait and run.

Nothing is counted when jobs run: this is read from their results, along two indexes and up to bounds.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.db.tables import GROUPS, OUTBOX, RESULTS
from django_mysqlqueue.inspection import jobs
from django_mysqlqueue.inspection.bounds import PAGES, Bounds
from django_mysqlqueue.names.rules import JOB_GROUP, job_topic
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.service.job_rows import FAILED, READY, RUNNING
from django_mysqlqueue.service.sequencing import DUE_ORDER
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.options import paused_tasks_of, stored

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
ERROR_READ = 2000
"""Number of characters at the end of the column ``errors`` in which the last line of an error is searched."""
NONE = Count(0)


class Spread(NamedTuple):
    """How long jobs took, in seconds."""

    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class TaskPeriod:
    """The jobs of a task within the last hour or day."""

    enqueued: Count
    """Jobs that were enqueued."""
    failed: Count
    """Jobs that have FAILED."""
    waited: Spread | None
    """How long the newest of those that were enqueued waited for their first attempt, from when they were due; None if
    none has started."""
    ran: Spread | None
    """How long the last attempts of those took; None if none has ended."""


@dataclass(frozen=True, slots=True)
class TaskBacklog:
    """The jobs of a task that have not ended."""

    waiting: Count = NONE
    """Those that are due and not running."""
    scheduled: Count = NONE
    """Those that are due later, or whose next attempt is."""
    running: Count = NONE
    """Those that subscribers have claimed."""


@dataclass(frozen=True, slots=True)
class TaskSummary:
    """A task in a list."""

    task: str
    """The dotted path."""
    backlog: TaskBacklog
    hour: TaskPeriod
    day: TaskPeriod
    failed_at: int = 0
    """When the last job that has FAILED within a day failed, in epoch milliseconds; 0: none."""
    failed_job: str = ""
    """The id of that job."""
    failed_topic: str = ""
    """The topic of its queue."""
    error: str = ""
    """The last line of its last error."""
    error_is_cut: bool = False
    """True if only the end of that line was read."""
    topic: str = ""
    """The topic of the queue of its newest job; empty if none was enqueued within a day."""
    paused: tuple[str, ...] = ()
    """The topics of the queues in which it is paused."""


@dataclass(frozen=True, slots=True)
class TaskListing:
    """The tasks that have results."""

    tasks: tuple[TaskSummary, ...]
    """In order of their paths."""
    whole: bool
    """False if there are more than ``bounds.job_tasks``: the others are missing."""
    now: int
    """The database's time in epoch milliseconds."""


@checked()
def summarize_tasks(*, using: str | None = None, bounds: Bounds = PAGES) -> TaskListing:
    """Summarize the tasks that have results: their backlogs, and their jobs of the last hour and the last day.

    Times are those of the newest jobs of each task, of which ``bounds.task_jobs`` are read of all tasks together.

    Args:
        using: alias of the database (default: that of the queue).
        bounds: limits of what is read. Counts that stop at one are not exact.
    """
    session = Session(queue_alias(using))
    found = jobs.tasks(session, bounds=bounds)
    names = found[: bounds.job_tasks]
    now = session.now()
    if not names:
        return TaskListing((), whole=True, now=now)
    backlogs = count_backlogs(session, now, bounds=bounds)
    failures = _failures(session, now, bounds)
    errors = last_errors(session, [one.id for one in failures.last.values()])
    counts = _counts(session, names, now, bounds)
    samples = _samples(session, names, now, bounds)
    paused = _paused(session)
    tasks = []
    for task in names:
        hour, day = (
            _period(samples[task], counts[task, span], failures.number(task, now - span), now - span)
            for span in (HOUR_MS, DAY_MS)
        )
        newest = max(samples[task], key=lambda one: one.enqueued_at, default=None)
        topic = "" if newest is None else job_topic(newest.queue)
        one = TaskSummary(task, backlogs.get(task, TaskBacklog()), hour, day, topic=topic, paused=paused[task])
        if (last := failures.last.get(task)) is not None:
            error = errors.get(last.id, ErrorLine())
            one = replace(one, failed_at=last.at, failed_job=last.id, failed_topic=job_topic(last.queue))
            one = replace(one, error=error.text, error_is_cut=error.is_cut)
        tasks.append(one)
    return TaskListing(tuple(tasks), len(found) == len(names), now)


def _paused(session: Session) -> defaultdict[str, tuple[str, ...]]:
    """Return the topics of the queues in which tasks are paused, by task."""
    rows = session.rows(
        f"SELECT topic, overrides FROM {GROUPS}{session.dialect.force_index('queue_consumer_groups_name')} "
        "WHERE consumer_group = %s ORDER BY topic",
        (JOB_GROUP,),
    )
    found: defaultdict[str, tuple[str, ...]] = defaultdict(tuple)
    for topic, overrides in rows:
        for task in paused_tasks_of(stored(overrides)):
            found[task] += (topic,)
    return found


# -- what has not ended -----------------------------------------------------------


def count_backlogs(session: Session, now: int, *, bounds: Bounds = PAGES) -> dict[str, TaskBacklog]:
    """Return the jobs of each task that have not ended; ``bounds.count`` of each status are read."""
    hint = session.dialect.force_index("queue_job_results_status")
    select = (
        "SELECT w.task_path, SUM(CASE WHEN w.run_after > %s OR w.retry_at > %s THEN 1 ELSE 0 END), COUNT(*) "
        f"FROM (SELECT task_path, run_after, retry_at FROM {RESULTS}{hint} "
        "WHERE status = %s AND finished_at = 0 LIMIT %s) w GROUP BY w.task_path"
    )
    ready, running = (session.rows(select, (now, now, status, bounds.count + 1)) for status in (READY, RUNNING))
    all_ready, all_running = (sum(row[2] for row in rows) <= bounds.count for rows in (ready, running))
    runs = {task: Count(int(number), all_running) for task, _, number in running}
    later = {task: int(scheduled) for task, scheduled, _ in ready}
    waits = {task: int(number) - later[task] for task, _, number in ready}
    return {
        task: TaskBacklog(
            Count(waits.get(task, 0), all_ready),
            Count(later.get(task, 0), all_ready),
            runs.get(task, Count(0, all_running)),
        )
        for task in {**waits, **runs}
    }


# -- what has failed --------------------------------------------------------------


class EndedJob(NamedTuple):
    """A job that has ended."""

    task: str
    queue: str
    at: int
    id: str
    last_attempted_at: int = 0


def ended(session: Session, status: str, after: int, most: int) -> list[EndedJob]:
    """Return jobs that have ended after a time with a status, the last first."""
    rows = session.rows(
        "SELECT task_path, queue_name, finished_at, id, last_attempted_at "
        f"FROM {RESULTS}{session.dialect.force_index('queue_job_results_status')} "
        "WHERE status = %s AND finished_at > %s ORDER BY finished_at DESC LIMIT %s",
        (status, after, most),
    )
    return [EndedJob(*row) for row in rows]


class _Failures(NamedTuple):
    """The jobs that have FAILED within a day, the newest first."""

    jobs: Sequence[EndedJob]
    whole: bool
    last: Mapping[str, EndedJob]
    """The newest of each task."""

    def number(self, task: str, after: int) -> Count:
        """Return the number of those of a task that have failed after a time."""
        number = sum(one.task == task and one.at > after for one in self.jobs)
        return Count(number, self.whole or self.jobs[-1].at <= after)


def _failures(session: Session, now: int, bounds: Bounds) -> _Failures:
    found = ended(session, FAILED, now - DAY_MS, bounds.jobs)
    return _Failures(found, len(found) < bounds.jobs, {one.task: one for one in reversed(found)})


def last_errors(session: Session, ids: Iterable[str]) -> dict[str, ErrorLine]:
    """Return the last lines of the last errors of jobs."""
    select = f"SELECT s.id, {session.dialect.ending('s.errors', ERROR_READ)}"
    rows = session.joined(select, "i", ids, f"{session.dialect.join_to(RESULTS, 's')} ON s.id = v.i")
    return {job: error_line(end) for job, end in rows}


_NEWLINE = re.compile(r"(?<!\\)((?:\\\\)*)\\n")
"""An escaped newline of a JSON text, after a number of escaped backslashes."""


class ErrorLine(NamedTuple):
    """The last line of an error."""

    text: str = ""
    is_cut: bool = False
    """Whether only its end was read."""


def error_line(end: str) -> ErrorLine:
    """Return the last line of the last error of a job, of whose column ``errors`` the last characters are given."""
    # Quotes in the text itself are escaped.
    _, begins, text = end.strip().rsplit("\n", 1)[-1].rpartition('"traceback": "')
    pieces = [one for one in _NEWLINE.sub(r"\1\n", text.removesuffix('"}')).split("\n") if one.strip()]
    line = pieces[-1] if pieces else ""
    is_cut = bool(line) and not begins and len(pieces) == 1
    try:
        return ErrorLine(str(json.loads(f'"{line}"')).strip(), is_cut)
    except ValueError:  # It was cut, or somebody has written it in plain SQL.
        return ErrorLine(line.strip(), is_cut)


# -- how many, and how long they take ----------------------------------------------


def _counts(session: Session, names: Sequence[str], now: int, bounds: Bounds) -> dict[tuple[str, int], Count]:
    """Return how many jobs of tasks were enqueued within an hour and within a day. Only the index is read."""
    most = max(1, bounds.task_count // (2 * len(names)))
    hint = session.dialect.force_index("queue_job_results_task")
    select = (
        f"SELECT %s AS place, %s AS span, COUNT(*) AS number FROM (SELECT 1 FROM {RESULTS}{hint} "
        "WHERE task_path = %s AND enqueued_at > %s LIMIT %s) w"
    )
    wanted = [
        (place, span, task, now - span, most + 1) for place, task in enumerate(names) for span in (HOUR_MS, DAY_MS)
    ]
    return {(names[place], span): Count.up_to(most, number) for place, span, number in session.each(select, wanted)}


class _Sample(NamedTuple):
    """A job that was enqueued lately."""

    queue: str
    enqueued_at: int
    run_after: int
    started_at: int
    last_attempted_at: int
    retry_at: int
    finished_at: int


def _samples(session: Session, names: Sequence[str], now: int, bounds: Bounds) -> dict[str, list[_Sample]]:
    """Return the newest jobs of tasks, of those that were enqueued within a day."""
    most = max(1, bounds.task_jobs // len(names))
    select = (
        "SELECT %s AS place, queue_name, enqueued_at, run_after, started_at, last_attempted_at, retry_at, finished_at "
        f"FROM {RESULTS}{session.dialect.force_index('queue_job_results_task')} "
        "WHERE task_path = %s AND enqueued_at > %s ORDER BY enqueued_at DESC LIMIT %s"
    )
    found: defaultdict[str, list[_Sample]] = defaultdict(list)
    for place, *job in session.each(select, [(place, task, now - DAY_MS, most) for place, task in enumerate(names)]):
        found[names[place]].append(_Sample(*job))
    return found


def _period(samples: Sequence[_Sample], enqueued: Count, failed: Count, after: int) -> TaskPeriod:
    within = [one for one in samples if one.enqueued_at > after]
    return TaskPeriod(
        enqueued,
        failed,
        _spread([one.started_at - max(one.enqueued_at, one.run_after) for one in within if one.started_at]),
        _spread([ms for one in within if (ms := jobs.took_ms(*one[-3:])) is not None]),
    )


def _spread(milliseconds: Sequence[int]) -> Spread | None:
    """Return the values below which half, and 95 %, of some durations are."""
    if not milliseconds:
        return None
    ordered = sorted(max(0, one) / 1000 for one in milliseconds)
    return Spread(*(ordered[-(-len(ordered) * percent // 100) - 1] for percent in (50, 95)))


# -- what has failed and waits for long -----------------------------------------------


class FailedJob(NamedTuple):
    """A job that has failed, and waits in the outbox for its next attempt."""

    topic: str
    id: str
    offset: int
    """That of the message with which it was enqueued."""
    at: int
    """When its last attempt failed, in epoch milliseconds."""
    key: str
    """The partition key."""


def failed_ones(session: Session, *, most: int) -> tuple[list[FailedJob], bool]:
    """Return the jobs that have failed among the next ``most`` scheduled messages, and whether these are all."""
    next_ones = (
        f"FROM {OUTBOX}{session.dialect.force_index('queue_outbox_due')} WHERE deliver_at > {session.dialect.now_ms} "
        f"ORDER BY {DUE_ORDER} LIMIT "
    )
    rows = session.rows(
        "SELECT w.topic, w.original_id, w.original_offset, w.created_at, w.partition_key FROM (SELECT topic, "
        f"target_group, original_id, original_offset, failure_count, created_at, partition_key {next_ones}%s) w "
        "WHERE w.target_group = %s AND w.original_id <> '' AND w.failure_count > 0",
        (most, JOB_GROUP),
    )
    return [FailedJob(*row) for row in rows], session.row(f"SELECT outbox_id {next_ones}1 OFFSET {most}") is None
