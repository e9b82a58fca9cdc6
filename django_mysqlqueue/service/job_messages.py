"""Whether the message of a job can still run, and the ends of jobs whose messages cannot.

A result ends with its message, except where nobody who knows the result sees that the message ends: a seek skips it,
its group is dropped, or somebody deletes its row. One rule covers all of them. A message can run while it is in the
outbox or the quarantine, or in the log above the group's position, or has a delivery that is not settled; a job of a
later stage also while the stage before it has not ended. ``end_some`` ends the jobs for which none of this holds. A
seek and a drop call it for what they have skipped, and GC calls it all the time.

Messages go from the outbox to the log, or to the quarantine and from the quarantine back to the outbox. So one
statement, which reads one snapshot, looks into outbox and quarantine; and what is in neither, and then not in the log,
is gone: a job only gets another message by a redrive, which waits for the lock on its result. If a seek then brings
back what was skipped, its delivery restarts the job (``job_results.begin``).
"""

from __future__ import annotations

import math
import random
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from django.db.models import Model

from django_mysqlqueue.db.tables import GROUPS, LOG, OFFSETS, OUTBOX, QUARANTINE, RESULTS, STATE
from django_mysqlqueue.models import (
    ConsumerGroup,
    JobResult,
    JobStage,
)
from django_mysqlqueue.names.ids import new_message_id
from django_mysqlqueue.names.keys import lane
from django_mysqlqueue.names.rules import JOB_GROUP, job_topic
from django_mysqlqueue.service import job_results, job_stages, partitions
from django_mysqlqueue.service.deliveries import JobEnds
from django_mysqlqueue.service.job_rows import READY, RUNNING, UNFINISHED
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session, flat, last_row, run

AfterSeek = ConsumerGroup.AfterSeek
PAGE = 500
"""Number of results that one step looks at."""
LATER = 1000
"""Number of jobs of later stages that one step ends, except for those of its first chain."""
UUID_LENGTH = 36
"""Characters of an id that are a UUID; those of jobs of chains have their places there after it."""
PARTITIONS = 100
"""Number of partitions that are searched at once for messages of jobs that were not enqueued."""
SKIPPED = (
    "JobSkipped",
    "The message of the job was skipped: its group was moved past it by a seek, or was dropped.",
)
DELETED = ("JobDeleted", "The message of the job was deleted before the job ended.")


class Unfinished(NamedTuple):
    """The columns of a result that has not ended that tell where its message may be."""

    id: str
    redriven_id: str
    queue_name: str
    task_path: str
    priority: int
    run_after: int
    retry_at: int
    status: str
    stage: str

    @property
    def topic(self) -> str:
        """The topic of its queue."""
        return job_topic(self.queue_name)

    @property
    def messages(self) -> list[tuple[str, str]]:
        """The topic and the id of each message that it may have."""
        return [(self.topic, one) for one in (self.id, self.redriven_id) if one]


class Ended(NamedTuple):
    """The result of ``end_some``."""

    rows: int
    """How many jobs were ended, without those of later stages; with ``dry_run``, how many would be."""
    topics: frozenset[str]
    """The queues of jobs that were to end, and that another transaction has locked, or ended."""
    after: ResultPosition | None
    """The place after which to continue; None if there are no more."""


class ResultPosition(NamedTuple):
    """Where the status of a result and its id are, in the order in which ``end_some`` reads them."""

    status: str = READY
    id: str = ""


def changed(ref: GroupRef) -> tuple[type[Model], ...]:
    """Return the models in whose tables ``end_some`` updates rows for what a seek or a drop of a group skips."""
    return (JobResult, JobStage) if job_results.is_of_jobs(ref) else ()


def end_all(
    using: str,
    ref: GroupRef,
    *,
    after: ResultPosition | None = None,
    seconds: float = math.inf,
    beat: Callable[[], None] = lambda: None,
) -> ResultPosition | None:
    """End the jobs that a seek or a drop has skipped, except those whose results are locked.

    ``after``: the place after which to begin; None: at the start.

    Returns:
        The place after which jobs of the queue are left; None: all have ended.
    """
    place = after or ResultPosition() if job_results.is_of_jobs(ref) else None
    left: ResultPosition | None = None
    began = time.monotonic()
    while place is not None:
        if time.monotonic() - began >= seconds:
            return left or place
        step = end_some(using, after=place)
        if ref.topic in step.topics:
            left = left or place
        place = step.after
        beat()
    return left


def random_place(using: str) -> ResultPosition:
    """Return a place at which a search may begin: if one step cannot look at all jobs that wait, a random one.

    Most ids begin with the time at which they were made. Those of schedules come after them, then the jobs that run.
    """
    waiting = _page(Session(using), ResultPosition(), PAGE)
    if len(waiting) < PAGE:
        return ResultPosition()
    try:
        first, last = (uuid.UUID(one).int for one in (waiting[0].id[:UUID_LENGTH], new_message_id()))
    except ValueError:
        return ResultPosition()
    return ResultPosition(id=str(uuid.UUID(int=random.randint(min(first, last), last))))


def end_some(using: str, *, after: ResultPosition | None = None, dry_run: bool = False) -> Ended:
    """End the jobs, among the next results that have not ended, whose messages can no longer run.

    It waits for no lock on a result: the transaction that holds it may end the job, and the next round finds the rest.

    ``after``: the result after which to continue; None: from the start. ``dry_run``: if True, only count.
    """
    session, place = Session(using), after or ResultPosition()
    page = _page(session, place, PAGE)
    following = ResultPosition(RUNNING) if place.status == READY else None
    if len(page) == PAGE:
        following = ResultPosition(place.status, page[-1].id)
    ended = cannot_run(session, page)
    if dry_run or not ended:
        return Ended(len(ended), frozenset(), following)
    some = _bounded(session, [job for job in page if job.id in ended])
    if len(some) < len(ended):
        following = ResultPosition(place.status, some[-1].id)
    locked: set[str] = set()
    number = 0
    for ids in job_stages.by_place(job.id for job in some).values():  # So locks are taken in their order.
        left, ended_now = run(using, partial(_end, ids=ids))
        locked |= left
        number += ended_now
    return Ended(number, frozenset(job.topic for job in some if job.id not in locked), following)


def _bounded(session: Session, jobs: list[Unfinished]) -> list[Unfinished]:
    """Return the first of some jobs, with which at most ``LATER`` jobs of later stages end, but at least one chain."""
    later, last = 0, ""
    for place, job in enumerate(jobs):
        chain = job_stages.chain_of(job.stage)
        if not chain or chain == last:
            continue
        later += job_stages.count_after(session, job.stage, most=LATER + 1)
        if last and later > LATER:
            return jobs[:place]
        last = chain
    return jobs


def unfinished(session: Session, ids: tuple[str, str], limit: int) -> list[Unfinished]:
    """Return jobs that have not ended and whose ids are between two texts, at most ``limit`` of each status."""
    above, below = ids
    return [job for status in (READY, RUNNING) for job in _page(session, ResultPosition(status, above), limit, below)]


def _page(session: Session, place: ResultPosition, limit: int, below: str | None = None) -> list[Unfinished]:
    until, ids = ("", ()) if below is None else ("AND id < %s ", (below,))
    rows = session.rows(
        f"SELECT {', '.join(Unfinished._fields)} FROM {RESULTS}"
        f"{session.dialect.force_index('queue_job_results_status')} "
        f"WHERE status = %s AND finished_at = 0 AND id > %s {until}ORDER BY id LIMIT %s",
        (*place, *ids, limit),
    )
    return [Unfinished(*row) for row in rows]


def _end(session: Session, ids: Collection[str]) -> tuple[set[str], int]:
    """End those jobs of which this is still true under the locks of their results.

    Returns:
        The jobs whose results were not locked by another transaction, and had not ended; and how many of them it ended.
    """
    rows = session.among(
        f"SELECT {', '.join(f's.{name}' for name in Unfinished._fields)} FROM {RESULTS} s"
        f"{session.dialect.force_index('PRIMARY')} WHERE s.id IN {{keys}} AND {UNFINISHED} ORDER BY s.id"
        f"{session.dialect.skip_locked}",
        ids,
    )
    locked = [Unfinished(*row) for row in rows]
    return {job.id for job in locked}, job_results.follow(session, JobEnds(reasons=cannot_run(session, locked)))


def cannot_run(session: Session, jobs: Iterable[Unfinished]) -> dict[str, tuple[str, str]]:
    """Return the jobs whose messages can no longer run, with the name of an exception and a text for each.

    A job that was enqueued for later, or waits for its next attempt, can run until its time has come, unless its
    message is in the log before.
    """
    jobs = list(jobs)
    blocked = job_stages.blocked(session, {job.stage for job in jobs if job.stage})
    jobs = [job for job in jobs if job.stage not in blocked]
    known = _in_log(session, [place for job in jobs for place in _places(job)])
    if missing := [job for job in _idle(jobs, known) if not known.keys() >= set(job.messages)]:
        now = session.now()
        later = {job.id for job in missing if job.status == READY and max(job.run_after, job.retry_at) > now}
        jobs = [job for job in jobs if job.id not in later]
        missing = [job for job in missing if job.id not in later]
        known |= _before_log(session, missing)
        known |= _in_partitions(session, _idle(missing, known))
    return {job.id: SKIPPED if known.keys() & set(job.messages) else DELETED for job in _idle(jobs, known)}


def _idle(jobs: Iterable[Unfinished], known: Mapping[tuple[str, str], bool]) -> list[Unfinished]:
    """Return the jobs of which no message is known to be able to run."""
    return [job for job in jobs if not any(known.get(message) for message in job.messages)]


def _places(job: Unfinished) -> list[tuple[str, str, str]]:
    """Return where the messages of a job that was enqueued are in the log: topic, partition and id.

    A redrive keeps the partition.
    """
    return [(job.topic, lane(job.task_path, job.priority), message) for _, message in job.messages]


def _in_log(session: Session, wanted: Collection[tuple[str, str, str]]) -> dict[tuple[str, str], bool]:
    """Return whether those messages can run that are in the log at some topics and partitions, by topic and id."""
    groups = _groups(session, {topic for topic, _, _ in wanted})
    found: dict[tuple[str, str], bool] = {}
    for chunk in session.chunks(sorted(set(wanted))):
        for topic, message, offset, position, is_settled in session.whole(
            f"SELECT m.topic, m.id, m.`offset`, o.offset_claimed, s.acked "
            f"FROM {session.dialect.rows(('t', 'k', 'i'), len(chunk))} "
            f"{session.dialect.join_to(LOG, 'm', 'queue_messages_id')} "
            "ON m.topic = v.t AND m.partition_key = v.k AND m.id = v.i "
            f"{session.dialect.join_to(OFFSETS, 'o', left=True)} "
            "ON o.consumer_group = %s AND o.topic = m.topic AND o.partition_key = m.partition_key "
            f"{session.dialect.join_to(STATE, 's', left=True)} "
            "ON s.consumer_group = %s AND s.topic = m.topic AND s.partition_key = m.partition_key "
            f"AND s.message_offset = m.`offset`{last_row(5)}",
            (*flat(chunk), JOB_GROUP, JOB_GROUP),
        ):
            # Without a group, it waits for one: a queue is registered from the beginning of the log.
            can_run = True
            if topic in groups:
                start, after_seek = groups[topic]
                is_above = offset > (start if position is None else position)
                can_run = after_seek != AfterSeek.DROPPED and (is_above if is_settled is None else not is_settled)
            found[topic, message] = can_run or found.get((topic, message), False)
    return found


def _groups(session: Session, topics: Collection[str]) -> dict[str, tuple[int, str]]:
    rows = session.among(
        f"SELECT topic, start_offset, after_seek FROM {GROUPS}"
        f"{session.dialect.force_index('queue_consumer_groups_name')} WHERE consumer_group = %s AND topic IN {{keys}}",
        topics,
        before=(JOB_GROUP,),
    )
    return {topic: (start, after_seek) for topic, start, after_seek in rows}


def _before_log(session: Session, jobs: Collection[Unfinished]) -> dict[tuple[str, str], bool]:
    """Return those messages of jobs that are in the outbox or the quarantine, which have no index by id alone."""
    wanted = {message for job in jobs for message in job.messages}
    found: set[tuple[str, str]] = set()
    # Most of them have just been published. The others may have been rescheduled meanwhile, so all rows are read.
    for condition in (f"deliver_at <= {session.dialect.now_ms}", "deliver_at >= 0"):
        for chunk in session.chunks(sorted({message for _, message in wanted - found})):
            marks = session.dialect.placeholders(len(chunk), "%s")
            found |= {
                (topic, message)
                for topic, message in session.whole(
                    f"SELECT topic, id FROM {OUTBOX}{session.dialect.force_index('queue_outbox_due')} "
                    f"WHERE {condition} AND id IN ({marks}) UNION ALL "
                    f"SELECT topic, id FROM {QUARANTINE}{session.dialect.force_index('PRIMARY')} "
                    f"WHERE quarantine_id > 0 AND id IN ({marks}){last_row(2)}",
                    (*chunk, *chunk),
                )
            }
    return dict.fromkeys(found & wanted, True)


def _in_partitions(session: Session, jobs: Collection[Unfinished]) -> dict[tuple[str, str], bool]:
    """Look for messages of jobs in every partition: plain SQL may have chosen any key, and an editor another task."""
    found: dict[tuple[str, str], bool] = {}
    for topic in sorted({job.topic for job in jobs}):
        ids = [message for job in jobs if job.topic == topic for _, message in job.messages]
        after: str | None = None
        while keys := partitions.in_log(session, topic, after=after, limit=PARTITIONS):
            found |= _in_log(session, [(topic, key, message) for key in keys for message in ids])
            after = keys[-1]
    return found
