"""Problems of jobs that wait because live subscribers cannot run their tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_mysqlqueue.humanize import moment
from django_mysqlqueue.inspection.bounds import PAGES, Bounds, StallTimes
from django_mysqlqueue.inspection.overview import GroupOverview, QueueOverview
from django_mysqlqueue.inspection.problem import Problem, age
from django_mysqlqueue.inspection.subscribers import SubscriberStatus
from django_mysqlqueue.limits import JOB_PREFIX, KEY_LENGTH
from django_mysqlqueue.service import job_rows
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.sql.session import Session


class Jobs(NamedTuple):
    """The newest jobs of a task in a queue."""

    waiting: Count
    """Those that are due and have not ended."""
    ran_by: frozenset[str]
    """The subscribers by which others have succeeded."""


def missing(
    session: Session, overview: QueueOverview, times: StallTimes, *, bounds: Bounds = PAGES
) -> Iterator[Problem]:
    """Yield tasks that live subscribers have said they cannot run, while jobs of them wait.

    Without such subscribers, nothing is read.
    """
    for group in overview.groups:
        lacking: dict[str, list[SubscriberStatus]] = {}
        for row in group.live:
            for path in row.unknown:
                lacking.setdefault(path, []).append(row)
        for path, rows in sorted(lacking.items()):
            queue = group.ref.topic.removeprefix(JOB_PREFIX)
            jobs = jobs_of(session, path, queue, overview.now, most=bounds.jobs // len(lacking))
            if jobs.waiting:
                yield _problem(group, path, rows, jobs, overview.now, times)


def jobs_of(session: Session, path: str, queue: str, now: int, *, most: int) -> Jobs:
    """Return the newest jobs of a task that are in a queue, along the index of tasks, of which ``most`` are read."""
    rows = session.rows(
        f"SELECT queue_name, status, run_after, {session.dialect.ending('worker_ids', KEY_LENGTH + 1)} "
        f"FROM {job_rows.RESULTS}{session.dialect.force_index('queue_job_results_task')} "
        "WHERE task_path = %s ORDER BY enqueued_at DESC, id DESC LIMIT %s",
        (path, most),
    )
    of_queue = [row[1:] for row in rows if row[0] == queue]
    waiting = sum(status in (job_rows.READY, job_rows.RUNNING) and due <= now for status, due, _ in of_queue)
    ran_by = {
        workers.strip("\n").rsplit("\n", 1)[-1] for status, _, workers in of_queue if status == job_rows.SUCCESSFUL
    }
    return Jobs(Count(waiting, exact=len(rows) < most), frozenset(ran_by))


def _problem(
    group: GroupOverview, path: str, rows: Collection[SubscriberStatus], jobs: Jobs, now: int, times: StallTimes
) -> Problem:
    first = min((row.unknown[path] for row in rows), key=lambda one: one.since)
    live = {row.name for row in group.live}
    has_run = (live - {row.name for row in rows}) & jobs.ran_by
    text = ngettext(
        "%(number)s job of the task %(task)s waits: since %(since)s, %(some)s of %(all)s live subscribers of %(ref)s "
        "cannot run it.",
        "%(number)s jobs of the task %(task)s wait: since %(since)s, %(some)s of %(all)s live subscribers of %(ref)s "
        "cannot run it.",
        jobs.waiting.value,
    )
    if has_run:
        others = _("Others have run it: %(name)s.")
    elif len(rows) < len(live):
        others = _("Whether the others can is not known.")
    else:
        others = _("None of them can.")
    values = {
        "number": str(jobs.waiting),
        "task": path,
        "since": moment(first.since),
        "some": f"{len(rows):,}",
        "all": f"{len(live):,}",
        "ref": group.ref,
        "name": min(has_run, default=""),
    }
    return Problem(
        1 if has_run or age(now, first.since) < times.missing else 0,
        "missing_task",
        f"{text} {others}" % values,
        group.ref,
        since=first.since,
        messages=jobs.waiting,
        error=first.error,
        is_private=bool(has_run),
    )
