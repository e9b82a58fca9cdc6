"""Stages of chains of jobs: the jobs of a stage are published when all of the one before have succeeded.

All jobs of a chain are stored when it is enqueued; those of later stages have a result, but no message. The transaction
that makes the last job of a stage SUCCESSFUL publishes the next stage, and the one that makes a job FAILED ends the
jobs of all later stages. Both decide under the lock on the row of the stage.

Locks: the results of jobs in no chain, by id; then place by place in the chains, first the results of jobs, by id, then
the rows of their stages (``write``). The rows of later stages are not locked: a transaction that ends one of their jobs
has locked its result before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from django_mysqlqueue.db.tables import STAGES
from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.names.rules import job_topic
from django_mysqlqueue.service import job_rows, publishing
from django_mysqlqueue.service.deliveries import JobEnd
from django_mysqlqueue.service.job_rows import EXCEPTIONS, FAILED, READY, RUNNING, SUCCESSFUL, JobRow
from django_mysqlqueue.sql.session import Session, last_row

NO_CHAIN = -1
"""The place of jobs in no chain."""
FIRST = ":0000"
"""The end of the id of the first stage of each chain."""


class Changes(NamedTuple):
    """What becomes of jobs whose results are locked."""

    ends: Sequence[tuple[JobEnd, str]] = ()
    """The ends of attempts, each with the job's status, of jobs that have not ended."""
    restarted: Collection[str] = ()
    """The stages of jobs that had failed, and have been made READY again."""


Decide = Callable[[Mapping[str, JobRow]], Changes]


class _Turn(Enum):
    """What becomes of the jobs of a stage because of the one before."""

    START = auto()
    END = auto()
    WAIT_AGAIN = auto()


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


def place_of(job: str) -> int:
    """Return the place of a job in its chain, as its id tells."""
    chain, _, place = chain_of(job).rpartition(":")
    return int(place) if chain and place.isdecimal() else NO_CHAIN


def is_in_chain(job: str) -> bool:
    """Return whether a job is one of a chain, as its id tells."""
    return place_of(job) != NO_CHAIN


def job_id(stage: str, number: int) -> str:
    """Return the id of a job: that of its stage, and its number there."""
    return f"{stage}:{number:04}"


def by_place(ids: Iterable[str]) -> dict[int, list[str]]:
    """Return jobs by their places in their chains, in the order of their locks."""
    found: dict[int, list[str]] = {}
    for job in sorted(set(ids)):
        found.setdefault(place_of(job), []).append(job)
    return dict(sorted(found.items()))


def insert(session: Session, sizes: Mapping[str, int]) -> None:
    """Insert the stages of a chain, in the caller's transaction."""
    following = [*list(sizes)[1:], ""]
    rows = [
        Stage(stage, after, size, size, size) for (stage, size), after in zip(sizes.items(), following, strict=True)
    ]
    session.insert(STAGES, Stage._fields, rows)


def read(session: Session, stage: str, how: str = "") -> Stage | None:
    """Return a stage, or None if there is none."""
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


def write(session: Session, ids: Iterable[str], decide: Decide, how: str) -> int:
    """Change results of jobs, and with them those of the next stages: these start, end, or wait again.

    This goes from place to place in the chains, so that all transactions lock the results of several jobs, and their
    stages, in one order.

    Returns:
        The number of results that were changed because of ``Changes.ends``, without those of the next stages.
    """
    places, following, place, changed = by_place(ids), _Following(), 0, 0
    while following or places:
        place = place + 1 if following else min(places)
        following, number = _write_at(session, places.pop(place, []), decide, how, following)
        changed += number
    return changed


class _Following(dict[str, tuple[_Turn, str]]):
    """The stages at the next place that have their turn, and the job that has failed, if they end."""

    def note(self, stage: Stage, turn: _Turn, failed: str = "") -> None:
        """Note the turn of the stage after one, unless it has another one."""
        if stage.following:
            self.setdefault(stage.following, (turn, failed))


def _write_at(
    session: Session, ids: Collection[str], decide: Decide, how: str, turns: _Following
) -> tuple[_Following, int]:
    """Do so at one place; return the turns at the next one, and the number of results."""
    for_update = session.dialect.for_update
    stages = [row for stage in sorted(turns) if (row := read(session, stage)) is not None]
    theirs = {job for stage in stages for job in stage.job_ids}
    rows = job_rows.read(session, theirs.union(ids if how == for_update else ()), for_update)
    if how != for_update:
        rows |= job_rows.read(session, set(ids) - theirs, how)
    ends, restarted = decide({job: rows[job] for job in ids if job in rows}) if ids else Changes()
    changed, ended = job_rows.end(session, ends), {one.id for one, status in ends if status != READY}
    following = _Following()
    for stage in stages:
        jobs = [rows[job] for job in stage.job_ids if job in rows]
        waiting = [job for job in jobs if not job.is_finished and job.id not in ended]
        turn, failed = turns[stage.id]
        if turn is _Turn.WAIT_AGAIN:
            revived = [job.id for job in jobs if job.ended_with("EarlierJobFailed")]
            job_rows.restart(session, dict.fromkeys(revived, ""))
            if len(waiting) + len(revived) >= stage.remaining:
                following.note(stage, turn)
            # Otherwise one was cancelled, or its result was deleted: the later stages cannot start.
        elif turn is _Turn.END:
            text = f"The job {failed!r} of an earlier stage of the chain has failed."
            _fail(session, waiting, "EarlierJobFailed", text)
            following.note(stage, turn, failed)
        elif failed := _publish(session, waiting):
            following.note(stage, _Turn.END, failed)
    _write_stages(session, ends, restarted, following)
    return following, changed


def _write_stages(
    session: Session, ends: Iterable[tuple[JobEnd, str]], restarted: Iterable[str], following: _Following
) -> None:
    """Lock the stages of jobs that have ended or wait again, and note the turns of those after them."""
    succeeded: Counter[str] = Counter()
    failed: dict[str, str] = {}
    for one, status in ends:
        if one.stage and status == SUCCESSFUL:
            succeeded[one.stage] += 1
        elif one.stage and status == FAILED:
            failed[one.stage] = one.id
    for stage in sorted({*succeeded, *failed, *restarted}):
        row = _lock(session, stage, succeeded[stage])
        if row is None:
            continue
        if stage in failed:
            following.note(row, _Turn.END, failed[stage])
        elif stage not in restarted:
            if row.remaining == 0:
                following.note(row, _Turn.START)
        elif _alive(job_rows.statuses(session, row.job_ids).values()) >= row.remaining:
            following.note(row, _Turn.WAIT_AGAIN)
        # Otherwise another job of the stage can no longer succeed.


def _publish(session: Session, jobs: Iterable[JobRow]) -> str:
    """Publish the jobs of a stage; return one that could not be published and has failed, if there is one."""
    by_topic: dict[str, list[JobRow]] = {}
    for job in jobs:
        by_topic.setdefault(job_topic(job.queue_name), []).append(job)
    failed = ""
    for topic, those in sorted(by_topic.items()):
        try:
            publishing.publish_many(topic, map(job_rows.message_of, those), using=session.using)
        except InvalidMessage as error:  # MAX_PAYLOAD_BYTES, for example, may have been lowered since.
            _fail(session, those, "InvalidJob", f"The job could not be published: {error}")
            failed = failed or those[0].id
    return failed


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


def _alive(statuses: Iterable[str]) -> int:
    """Return how many jobs can still succeed."""
    return sum(status in (READY, RUNNING) for status in statuses)


def forget(session: Session, deleted: Mapping[str, int]) -> None:
    """Delete the stages whose results were all deleted.

    ``deleted``: the number of results that the transaction has deleted, by stage.
    """
    for stage, number in sorted(deleted.items()):
        session.execute(f"UPDATE {STAGES} SET kept = kept - %s WHERE id = %s", (number, stage))
        session.execute(f"DELETE FROM {STAGES} WHERE id = %s AND kept <= 0", (stage,))
