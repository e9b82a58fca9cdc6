"""Stages of chains of jobs: the jobs of a stage are published when all of the one before have succeeded.

All jobs of a chain are stored when it is enqueued; those of later stages have a result, but no message. The transaction
that makes the last job of a stage SUCCESSFUL publishes the next stage, and the one that makes a job FAILED ends the
jobs of all later stages. Both decide under the lock on the row of the stage.

Locks: the results of the jobs that end, then the rows of their stages, then the results of later stages. The rows of
later stages are not locked: a transaction that ends one of their jobs has locked its result before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.limits import JOB_PREFIX
from django_mysqlqueue.models import JobStage
from django_mysqlqueue.service import job_rows, publishing
from django_mysqlqueue.service.deliveries import JobEnd
from django_mysqlqueue.service.job_rows import EXCEPTIONS, FAILED, READY, RUNNING, SUCCESSFUL, JobRow
from django_mysqlqueue.sql.session import Session, flat, last_row

STAGES = JobStage._meta.db_table
FIRST = ":0000"
"""The end of the id of the first stage of each chain."""


class Stage(NamedTuple):
    """The columns of a stage."""

    id: str
    following: str
    remaining: int
    kept: int
    size: int

    @property
    def job_ids(self) -> list[str]:
        """The ids of its jobs."""
        return [job_id(self.id, number) for number in range(self.size)]


def stage_id(chain: str, place: int) -> str:
    """Return the id of a stage: that of its chain, and its place."""
    return f"{chain}:{place:04}"


def chain_of(stage: str) -> str:
    """Return the id of the chain of a stage; empty if there is none."""
    return stage.rpartition(":")[0]


def job_id(stage: str, number: int) -> str:
    """Return the id of a job: that of its stage, and its number there."""
    return f"{stage}:{number:04}"


def insert(session: Session, sizes: Mapping[str, int]) -> None:
    """Insert the stages of a chain, in the caller's transaction.

    Args:
        session: the current transaction.
        sizes: the number of jobs of each stage, by its id, in order.
    """
    following = [*list(sizes)[1:], ""]
    rows = [
        Stage(stage, after, size, size, size) for (stage, size), after in zip(sizes.items(), following, strict=True)
    ]
    for chunk in session.chunks(rows):
        session.execute(
            f"INSERT INTO {STAGES} ({', '.join(Stage._fields)}) VALUES "
            + session.dialect.placeholders(len(chunk), "(%s, %s, %s, %s, %s)"),
            flat(chunk),
        )


def read(session: Session, stage: str, how: str = "") -> Stage | None:
    """Return a stage, or None if there is none.

    Args:
        session: the session.
        stage: its id.
        how: the end of the statement, to lock the row.
    """
    row = session.row(f"SELECT {', '.join(Stage._fields)} FROM {STAGES} WHERE id = %s{how}", (stage,))
    return None if row is None else Stage(*row)


def _lock(session: Session, stage: str, succeeded: int = 0) -> Stage | None:
    """Lock a stage, count jobs that have succeeded, and return it."""
    session.execute(f"UPDATE {STAGES} SET remaining = remaining - %s WHERE id = %s", (succeeded, stage))
    return read(session, stage, session.dialect.for_update)


def before(session: Session, stage: str) -> Stage | None:
    """Return the stage before one, or None if there is none."""
    chain, _, place = stage.rpartition(":")
    return read(session, stage_id(chain, int(place) - 1))


def blocked(session: Session, stages: Collection[str]) -> set[str]:
    """Return those stages whose jobs have no message yet, because the stage before has not ended."""
    after = {
        stage_id(chain, int(place) - 1): f"{chain}:{place}"
        for chain, _, place in (stage.rpartition(":") for stage in stages if not stage.endswith(FIRST))
    }
    found: set[str] = set()
    for chunk in session.chunks(sorted(after)):
        found |= {
            after[stage]
            for (stage,) in session.whole(  # Without a row, a job would end that waits.
                f"SELECT id FROM {STAGES}{session.dialect.force_index('PRIMARY')} "
                f"WHERE id IN ({session.dialect.placeholders(len(chunk), '%s')}) AND remaining > 0{last_row(1)}",
                chunk,
            )
        }
    return found


def follow(session: Session, ended: Iterable[tuple[JobEnd, str]]) -> None:
    """Publish the stages that can start now, and end the jobs that cannot start any more.

    Args:
        session: the current transaction, which has made these jobs SUCCESSFUL or FAILED.
        ended: the ends of jobs of stages, each with the status.
    """
    succeeded: Counter[str] = Counter()
    failed: dict[str, str] = {}
    for one, status in ended:
        if status == SUCCESSFUL:
            succeeded[one.stage] += 1
        elif status == FAILED:
            failed[one.stage] = one.id
    for stage in sorted(succeeded | dict.fromkeys(failed, 0)):
        row = _lock(session, stage, succeeded[stage])
        if row is None or not row.following:
            continue
        if stage in failed:
            _fail_after(session, row, failed[stage])
        elif row.remaining == 0:
            _publish(session, row.following)


def _publish(session: Session, stage: str) -> None:
    row = read(session, stage)
    if row is None:
        return
    waiting = [
        job for job in job_rows.read(session, row.job_ids, session.dialect.for_update).values() if not job.is_finished
    ]
    by_topic: dict[str, list[JobRow]] = {}
    for job in waiting:
        by_topic.setdefault(JOB_PREFIX + job.queue_name, []).append(job)
    for topic, jobs in sorted(by_topic.items()):
        try:
            publishing.publish_many(topic, map(job_rows.message_of, jobs), using=session.using)
        except InvalidMessage as error:  # MAX_PAYLOAD_BYTES, for example, may have been lowered since.
            _fail(session, jobs, "InvalidJob", f"The job could not be published: {error}")
            _fail_after(session, row, jobs[0].id)


def _fail_after(session: Session, stage: Stage, failed: str) -> None:
    """End the jobs of the stages after one."""
    for later in _after(session, stage):
        rows = job_rows.read(session, later.job_ids, session.dialect.for_update)
        text = f"The job {failed!r} of an earlier stage of the chain has failed."
        _fail(session, [row for row in rows.values() if not row.is_finished], "EarlierJobFailed", text)


def _after(session: Session, stage: Stage) -> Iterator[Stage]:
    """Yield the stages after one. They are not locked: what is read of them does not change."""
    following = stage.following
    while following and (later := read(session, following)) is not None:
        yield later
        following = later.following


def count_after(session: Session, stage: str, *, most: int) -> int:
    """Return how many jobs the stages after one have; it stops counting when there are ``most``."""
    row, number = read(session, stage), 0
    for later in () if row is None else _after(session, row):
        number += later.size
        if number >= most:
            break
    return number


def _fail(session: Session, rows: Iterable[JobRow], name: str, text: str) -> None:
    path = f"{EXCEPTIONS}.{name}"
    job_rows.end(
        session, [(JobEnd(row.id, errors=job_rows.with_error(row.errors, path, text)), FAILED) for row in rows]
    )


def revive(session: Session, stages: Iterable[str]) -> None:
    """Let the jobs after some stages wait again: jobs of these stages that had failed are READY again.

    They stay FAILED if another job of their chain can no longer succeed.

    Args:
        session: the current transaction.
        stages: the ids of the stages.
    """
    for stage in sorted(set(stages)):
        row = _lock(session, stage)
        if row is None or _alive(job_rows.statuses(session, row.job_ids).values()) < row.remaining:
            continue
        for later in _after(session, row):
            rows = job_rows.read(session, later.job_ids, session.dialect.for_update)
            revived = [job.id for job in rows.values() if job.ended_with("EarlierJobFailed")]
            job_rows.restart(session, dict.fromkeys(revived, ""))
            if _alive(job.status for job in rows.values()) + len(revived) < later.remaining:
                break  # One was cancelled, or its result was deleted: the later stages cannot start.


def _alive(statuses: Iterable[str]) -> int:
    """Return how many jobs can still succeed."""
    return sum(status in (READY, RUNNING) for status in statuses)


def forget(session: Session, deleted: Mapping[str, int]) -> None:
    """Delete the stages whose results were all deleted.

    Args:
        session: the current transaction.
        deleted: the number of results that it has deleted, by stage.
    """
    for stage, number in sorted(deleted.items()):
        session.execute(f"UPDATE {STAGES} SET kept = kept - %s WHERE id = %s", (number, stage))
        session.execute(f"DELETE FROM {STAGES} WHERE id = %s AND kept <= 0", (stage,))
