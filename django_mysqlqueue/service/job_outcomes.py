"""Jobs: what a transaction that settles deliveries of a queue of jobs writes of the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service import job_results, job_retries, job_rows
from django_mysqlqueue.service.deliveries import OUTCOMES, UNCALLED, Action, Flushed, JobEnds, Settlement
from django_mysqlqueue.service.job_stages import is_in_chain
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Retry, Session

UNENDED = (Action.RELEASE, Action.SNOOZE, Action.NACK)
"""The actions after which a job is ready again, if its attempt has left nothing for its result."""


class Jobs:
    """The results that one transaction writes.

    In a transaction that locks slots, those of jobs in no chain are written with the outcomes of their deliveries, and
    those in chains at the end (``store``): others that hold the slots may wait for them. Otherwise all are written at
    the end.

    Without ``waits``, results of released jobs that another transaction has locked stay RUNNING until their next claim.
    """

    def __init__(self, session: Session, *, locks_slots: bool, waits: bool) -> None:
        self._session = session
        self._locks_slots = locks_slots
        self._waits = waits
        self._left = JobEnds()
        self._later: set[str] = set()
        """Those that wait for long, because nobody had asked them to stop."""

    def settled(self, settlements: Sequence[Settlement], flushed: Flushed) -> None:
        """Note what has become of jobs, except those whose outcome was not written now, and write a part of it."""
        jobs = self._ends(settlements, flushed)
        if self._locks_slots:
            job_results.follow(self._session, _those(jobs, chained=False), waits=self._waits)
            jobs = _those(jobs, chained=True)
        self._left.ends += jobs.ends
        self._left.reasons |= jobs.reasons
        self._left.released |= jobs.released

    def passed(self, ended: Iterable[tuple[str, int, Outcome]]) -> None:
        """Note that jobs end whose messages a claim has settled: partition, offset and outcome of each."""
        reasons = {offset: job_results.UNCALLED[outcome] for _, offset, outcome in ended}
        names = job_results.of_messages(self._session, reasons)
        self._left.reasons |= {job: reasons[offset] for offset, job in names.items()}

    def store(self) -> None:
        """Write what is left.

        Raises:
            Retry: a job that waits for long was asked to stop after it had been read.
        """
        job_results.follow(self._session, self._left, waits=self._waits)
        # Now that their results are locked. The lock also reads what has been committed since the snapshot.
        if self._later and job_rows.cancel_requested(self._session, self._later, self._session.dialect.skip_locked):
            raise Retry

    def _ends(self, settlements: Sequence[Settlement], flushed: Flushed) -> JobEnds:
        not_written = {id(settlement) for settlement in (*flushed.stale, *flushed.locked)}
        dead = {delivery for delivery, _ in flushed.dead}
        ends, released, uncalled = [], {}, {}
        for settlement in settlements:
            delivery, action = settlement.delivery, settlement.action
            if id(settlement) in not_written or settlement.is_written or action is Action.STALE:
                continue
            if settlement.job is not None:
                over = job_rows.FAILED if delivery in dead else job_rows.READY
                end = settlement.job
                if copy := flushed.moved.get((delivery.key, delivery.offset)):
                    end = job_retries.at(end, copy)
                    if not copy.is_due:
                        self._later.add(end.id)
                ends.append((end, job_rows.SUCCESSFUL if action is Action.ACK else over))
            elif delivery in dead:
                expired = job_results.UNCALLED[Outcome.DEAD_LETTERED]
                uncalled[delivery.offset] = ("DeadLettered", settlement.error) if settlement.is_started else expired
            elif action in UNCALLED:
                uncalled[delivery.offset] = job_results.UNCALLED[OUTCOMES[action]]
            elif action in UNENDED:
                released[delivery.offset] = delivery.by
        names = job_results.of_messages(self._session, [*released, *uncalled])
        return JobEnds(
            ends,
            {names[offset]: reason for offset, reason in uncalled.items() if offset in names},
            {names[offset]: by for offset, by in released.items() if offset in names},
        )


def jobs_of(session: Session, ref: GroupRef, *, locks_slots: bool = True, waits: bool = True) -> Jobs | None:
    """Return the results that a transaction writes for a group; None if the group has no jobs."""
    return Jobs(session, locks_slots=locks_slots, waits=waits) if job_results.is_of_jobs(ref) else None


def _those(jobs: JobEnds, *, chained: bool) -> JobEnds:
    """Return what has become of jobs in chains, or of the others."""
    return JobEnds(
        [one for one in jobs.ends if is_in_chain(one[0].id) is chained],
        {job: reason for job, reason in jobs.reasons.items() if is_in_chain(job) is chained},
        {job: by for job, by in jobs.released.items() if is_in_chain(job) is chained},
    )
