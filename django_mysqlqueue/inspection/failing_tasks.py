"""Tasks of which every attempt fails, while jobs of others succeed or not.

A queue has jobs of many tasks, so its counts do not tell that one of them fails. Results tell: which jobs have ended
lately, and how; and the rows of jobs that wait for another attempt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from django_mysqlqueue.db.tables import RESULTS
from django_mysqlqueue.inspection.retried_keys import GROUPS, LEAST, SPAN_MS, failed_at, failing
from django_mysqlqueue.inspection.tasks import ERROR_READ, EndedJob, ended, error_line, failed_ones
from django_mysqlqueue.names.rules import JOB_PREFIX
from django_mysqlqueue.service import job_results, messages
from django_mysqlqueue.service.job_rows import FAILED, SUCCESSFUL
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session

SCHEDULED = 2500
"""Number of scheduled messages among which jobs that wait for long are searched, of all topics together."""
ENDED = 1000
"""Number of the newest results of each status that are read, of all queues together."""

_Successes = defaultdict[tuple[str, str], int]
"""By queue and task, the time after which certainly no job has succeeded."""


@dataclass(frozen=True, slots=True)
class FailingTasks:
    """The tasks of a queue of which every attempt fails."""

    tasks: tuple[str, ...]
    """Their dotted paths, the one with most jobs first."""
    jobs: int
    """Number of jobs that have failed since the last success of their task, of those that were read."""
    failures: int
    """How many attempts of these have failed since, as far as they are known."""
    exact: bool
    """True if all jobs that have failed lately were read."""
    since: int
    """When the first of these attempts failed."""
    error: str
    """The last line of the error of one of the jobs."""


@dataclass(slots=True)
class _Failures:
    """The failures of a task."""

    jobs: set[object] = field(default_factory=set)
    """The offset of a message for a job that waits, or the id of one that has ended."""
    times: list[int] = field(default_factory=list)
    ended: str = ""
    """The id of the newest that has ended."""
    error: str = ""
    """The end of the error of one that waits."""
    moved: str = ""
    """The id of one that waits for long."""

    def is_task(self, least: int, recent: int) -> bool:
        """Return whether the task itself seems to fail: several of its jobs, often, for long enough, and still."""
        if len(self.jobs) < LEAST or len(self.times) < least:
            return False
        last = max(self.times)
        return last - min(self.times) >= SPAN_MS and (last >= recent or bool(self.error or self.moved))


def find(session: Session, started: Mapping[GroupRef, int], *, least: int, recent: int) -> dict[GroupRef, FailingTasks]:
    """Return the first ``GROUPS`` queues that have tasks of which every attempt since ``started`` fails."""
    if not started:
        return {}
    first = min(started.values())
    good, bad = (ended(session, status, first, ENDED) for status in (SUCCESSFUL, FAILED))
    known_from = good[-1].at if len(good) >= ENDED else 0
    succeeded = defaultdict(lambda: known_from, {(one.queue, one.task): one.at for one in reversed(good)})
    moved, is_read = _moved(session, started)
    found = {}
    for ref, begin in list(started.items())[:GROUPS]:
        of_task: defaultdict[str, _Failures] = defaultdict(_Failures)
        _add(of_task, ref, [one for one in bad if one.last_attempted_at and one.at > begin], succeeded)
        is_whole = _add_waiting(session, of_task, ref, begin, succeeded) and is_read
        _add(of_task, ref, [one for one in moved if one.at > begin], succeeded)
        chosen = {task: failures for task, failures in of_task.items() if failures.is_task(least, recent)}
        if chosen:
            found[ref] = _summary(session, chosen, exact=is_whole and len(bad) < ENDED)
    return found


def _add(of_task: Mapping[str, _Failures], ref: GroupRef, jobs: Iterable[EndedJob], succeeded: _Successes) -> None:
    """Add the last failures of jobs of a queue since the last success of their task."""
    queue = ref.topic.removeprefix(JOB_PREFIX)
    for one in jobs:
        if one.queue == queue and one.at > succeeded[queue, one.task]:
            failures = of_task[one.task]
            failures.jobs.add(one.id)
            failures.times.append(one.at)
            if one.last_attempted_at:
                failures.ended = failures.ended or one.id
            else:
                failures.moved = failures.moved or one.id


def _add_waiting(
    session: Session, of_task: Mapping[str, _Failures], ref: GroupRef, begin: int, succeeded: _Successes
) -> bool:
    """Add the failed attempts of jobs that wait for another one; return whether all of these jobs were read."""
    queue = ref.topic.removeprefix(JOB_PREFIX)
    waiting, is_whole = failing(session, ref)
    times = failed_at(session, ref, [one.offset for one in waiting])
    for one in waiting:
        task = job_results.task_of(ref, one.partition)
        since = max(begin, succeeded[queue, task])
        if failed := [at for at in times.get(one.offset, ()) if at > since]:
            failures = of_task[task]
            failures.jobs.add(one.offset)
            failures.times += failed
            failures.error = failures.error or messages.last_line(one.error)
    return is_whole


def _moved(session: Session, refs: Collection[GroupRef]) -> tuple[list[EndedJob], bool]:
    """Return jobs of queues that wait for long, as if they had ended with their last attempts, and if these are all."""
    topics = {ref.topic for ref in refs}
    jobs, is_whole = failed_ones(session, most=SCHEDULED)
    select = "SELECT s.task_path, s.queue_name, s.last_attempted_at, s.id"
    joins = f"{session.dialect.join_to(RESULTS, 's')} ON s.id = v.i"
    rows = session.joined(select, "i", [one.id for one in jobs if one.topic in topics], joins)
    return [EndedJob(*row) for row in rows], is_whole


def _summary(session: Session, chosen: Mapping[str, _Failures], *, exact: bool) -> FailingTasks:
    tasks = sorted(chosen, key=lambda task: (-len(chosen[task].jobs), task))
    first = chosen[tasks[0]]
    return FailingTasks(
        tasks=tuple(tasks),
        jobs=sum(len(one.jobs) for one in chosen.values()),
        failures=sum(len(one.times) for one in chosen.values()),
        exact=exact,
        since=min(at for one in chosen.values() for at in one.times),
        error=first.error if first.error and not first.ended else _last_error(session, first.ended or first.moved),
    )


def _last_error(session: Session, job: str) -> str:
    """Return the last line of the last error of a job; empty if it is gone."""
    row = session.row(f"SELECT {session.dialect.ending('errors', ERROR_READ)} FROM {RESULTS} WHERE id = %s", (job,))
    return "" if row is None else error_line(row[0]).text
