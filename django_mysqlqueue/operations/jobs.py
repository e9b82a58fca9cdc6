"""Cancel jobs: those that wait end, and those that run are asked to stop."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Unpack

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.arguments import spelled_out
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.names.rules import JOB_PREFIX, job_topic
from django_mysqlqueue.operations.arguments import check_limit, task_path, texts
from django_mysqlqueue.operations.declaring import How, operating
from django_mysqlqueue.operations.limits import COUNTED, LIMITS, OperationLimits
from django_mysqlqueue.operations.results import ScheduledResult, result_of
from django_mysqlqueue.service import audit, job_results, job_rows, job_stages, scheduling
from django_mysqlqueue.service.audit import By
from django_mysqlqueue.service.job_rows import READY, RUNNING, UnfinishedJob
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

    @property
    def number(self) -> int:
        """The number of both."""
        return self.ended + self.asked

    def __add__(self, other: Cancelled) -> Cancelled:
        return Cancelled(self.ended + other.ended, self.asked + other.asked)


@spelled_out
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
        summary = _summary(done, max(0, len(wanted) - len(missing) - done.number), dry_run=dry_run)
        warns = dry_run and has_later_jobs(alias, found.stages)
        return result_of(
            ScheduledResult,
            CANCEL_JOBS,
            done.number,
            *summary,
            dry_run=dry_run,
            not_scheduled=tuple(missing),
            warnings=_warnings() if warns else (),
        )


@spelled_out
def cancel_task(task: str, *, topic: str, limit: int | None = None, **how: Unpack[How]) -> ScheduledResult:
    """Cancel the jobs of a task in a queue that wait, and ask those that run to stop.

    Those that were enqueued first come first, and those of schedules last.

    ``topic``: the topic of the queue. ``limit``: maximum number of jobs. ``dry_run``: change nothing; return what would
    be changed.

    Raises:
        OperationRefused: an argument is invalid, or the topic is not that of a queue.
    """
    with operating(how, topic=topic) as (alias, by, dry_run):
        check_limit(limit)
        if not topic.startswith(JOB_PREFIX):
            raise OperationRefused(f"topic {topic!r}: is not the topic of a queue of jobs: {JOB_PREFIX} and its name")
        wanted = TaskJobs(task_path(task) or "", topic, limit)
        if dry_run:
            done, stages = _of_task(alias, wanted)
        else:
            done, stages = cancel_all(alias, wanted, **by), frozenset()
        summary = _summary(done, 0, dry_run=dry_run)
        if not done.number:
            text = _(
                "No jobs of the task %(task)s in %(topic)s were changed: they have ended, were asked to stop before, "
                "or another transaction is changing them."
            )
            if dry_run:
                text = _("In %(topic)s, no jobs of the task %(task)s wait, or run and were not asked to stop before.")
            summary = [text % {"task": task, "topic": topic}]
        elif dry_run and done.number == COUNTED:
            text = _("These are the first ones: the preview stops counting at %(number)s.")
            summary.append(text % {"number": f"{COUNTED:,}"})
        warnings = _warnings() if has_later_jobs(alias, stages) else ()
        return result_of(ScheduledResult, CANCEL_JOBS, done.number, *summary, dry_run=dry_run, warnings=warnings)


def _warnings() -> tuple[str, ...]:
    return (_("Jobs of later stages of their chains will fail, with EarlierJobFailed."),)


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


class TaskJobs(NamedTuple):
    """The jobs of a task in a queue that have not ended, and were not asked to stop."""

    task: str
    topic: str
    """That of the queue."""
    limit: int | None = None
    """Maximum number of jobs."""


def _pages_of(using: str, wanted: TaskJobs, size: int) -> Iterator[list[UnfinishedJob]]:
    queue = wanted.topic.removeprefix(JOB_PREFIX)
    for page in job_rows.unfinished(Session(using), wanted.task, queue, size=size):
        if some := [job for job in page if not job.cancel_requested_at]:
            yield some


def _of_task(using: str, wanted: TaskJobs) -> tuple[Cancelled, frozenset[str]]:
    """Return how many jobs of a task can be cancelled, at most ``COUNTED``, and the first stages of chains in them."""
    most = min(COUNTED, wanted.limit or COUNTED)
    number, waiting = 0, 0
    stages: set[str] = set()
    for page in _pages_of(using, wanted, LIMITS.rows):
        some = page[: most - number]
        number += len(some)
        waiting += sum(job.status == READY for job in some)
        if len(stages) < LIMITS.jobs:
            stages |= {job.stage for job in some} - {""}
        if number == most:
            break
    return Cancelled(waiting, number - waiting), frozenset(sorted(stages)[: LIMITS.jobs])


def cancel_all(using: str, wanted: TaskJobs, *, limits: OperationLimits = LIMITS, **by: Unpack[By]) -> Cancelled:
    """Cancel the jobs of a task in a queue, in several transactions, each committed on its own; return how many.

    Jobs that another transaction has locked are neither changed nor counted.
    """

    def write(session: Session, ids: Sequence[str]) -> Cancelled:
        done, _found = _cancel(session, ids, wanted.topic)
        audit.add(session, operation, done.number)
        return done

    total = Cancelled()
    with apart(using):
        on, detail = GroupRef("", wanted.topic), f"task {wanted.task}"
        operation = run(using, lambda session: audit.begin(session, CANCEL_JOBS, on, detail=detail, **by))
        beat = audit.beats(using, operation)
        with audit.ending(using, operation):
            for page in _pages_of(using, wanted, limits.jobs):
                left = [job.id for job in page]
                while left and total.number != wanted.limit:  # Those that are not changed do not count.
                    beat()
                    end = len(left) if wanted.limit is None else wanted.limit - total.number
                    some, left = left[:end], left[end:]
                    total += run(using, partial(write, ids=sorted(some)))
                if total.number == wanted.limit:
                    break
    return total


def has_later_jobs(using: str, stages: Collection[str]) -> bool:
    """Return whether further stages follow some stages of chains."""
    session = Session(using)
    found = (job_stages.read(session, stage) for stage in sorted(stages))
    return any(stage is not None and stage.following for stage in found)


def cancel(using: str, ids: Collection[str], topic: str = "", **by: Unpack[By]) -> Cancelled:
    """Cancel jobs that wait, and ask those that run to stop.

    Jobs that another transaction has locked, because it claims, ends or cancels them, are neither changed nor counted.
    This takes several transactions, each committed on its own.
    """

    def write(session: Session, chunk: Sequence[str]) -> Cancelled:
        done, found = _cancel(session, chunk, topic)
        if done != Cancelled():
            detail = f"asked to stop: {done.asked}" if done.asked else ""
            one = topic or (min(found.topics) if len(found.topics) == 1 else "")
            audit.once(session, CANCEL_JOBS, done.number, GroupRef("", one), detail=detail, **by)
        return done

    total = Cancelled()
    with apart(using):
        for chunk in pieces(sorted(set(ids)), LIMITS.jobs):
            total += run(using, partial(write, chunk=chunk))
    return total


def _cancel(session: Session, ids: Sequence[str], topic: str) -> tuple[Cancelled, Cancellable]:
    """Cancel jobs in the current transaction; return how many, and what was found."""
    found = _find(session, ids, topic)
    # All results in one call, which locks them in the order of their chains. Messages follow: the claim settles one
    # that stays because another transaction has locked it.
    requested = job_results.request_cancel(session, (*found.waiting, *found.running), wait=False)
    with_results = job_rows.read(session, [job for job, _outbox_id in found.scheduled])
    scheduling.remove(session, [row for job, row in found.scheduled if job in requested.ended], wait=False)
    alone = [row for job, row in found.scheduled if job not in with_results]
    return Cancelled(len(requested.ended) + scheduling.remove(session, alone, wait=False), requested.asked), found
