"""The checks of jobs: compare what was enqueued with what has become of it. Uses no database and no files."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from soak import job_plan, plan, records
from soak.facts import Verdict, verdict
from soak.job_facts import ASKED, CANCELLED, EARLIER, LOST, NOT_CALLED, PLANNED, REFUSED, Enqueued, JobEvidence, Result
from soak.job_plan import ATOMIC_KINDS, FLAKY, MENDED, POISON
from soak.plan import FREEZES
from soak.records import COMMITTED, DONE, ROLLED_BACK, STARTED, WRONG
from soak.shutdowns import cut_off

ENDED = frozenset({"SUCCESSFUL", "FAILED"})
DATABASE_ERRORS = ("django.db.utils.", "django_mysqlqueue.exceptions.CommitOutcomeUnknown")
"""How the classes of errors begin that a lost connection or server explains."""


def check(evidence: JobEvidence) -> list[Verdict]:
    """Run all checks."""
    return [
        check_ledger(evidence),
        check_results(evidence),
        check_ends(evidence),
        check_effects(evidence),
        check_published(evidence),
        check_stages(evidence),
        check_stage_order(evidence),
        check_unique(evidence),
        check_cancelled(evidence),
        check_attempts(evidence),
    ]


def by_job(evidence: JobEvidence) -> dict[str, Enqueued]:
    """Return a row of the ledger for each job."""
    return {one.job: one for one in evidence.ledger}


def check_ledger(evidence: JobEvidence) -> Verdict:
    """Check that the ledger agrees with the producers' records of their transactions."""

    def violations() -> Iterator[str]:
        written = {_transaction_of(one) for one in evidence.ledger}
        for one in evidence.transactions:
            for number in range(one.first, one.last):
                name = f"{one.publisher}:{number}"
                if one.verb == COMMITTED and name not in written:
                    yield f"{name} was committed, but the server does not have its jobs"
                if one.verb == ROLLED_BACK and name in written:
                    yield f"{name} was rolled back, but the server has its jobs"

    return verdict(
        "jobs: the server kept every committed transaction", f"{len(evidence.transactions)} transactions", violations()
    )


def _transaction_of(one: Enqueued) -> str:
    publisher, _, rest = one.token.rpartition(":")
    return f"{publisher}:{rest.partition('/')[0].partition('.')[0]}"


def check_results(evidence: JobEvidence) -> Verdict:
    """Check that exactly the committed jobs have results and were started, and that all have ended."""
    ledger = by_job(evidence)

    def violations() -> Iterator[str]:
        for job in sorted(ledger.keys() - evidence.results.keys()):
            yield f"{_shown(ledger[job])} was committed, but has no result"
        for job, result in evidence.results.items():
            if job not in ledger and result.kind not in job_plan.WITHOUT_PRODUCER:
                yield f"{job} ({result.kind}) has a result, but was never committed"
            if result.status not in ENDED:
                yield f"{job} ({result.kind}) is {result.status} in the end"
        for job in sorted({step.message_id for step in evidence.steps} - evidence.results.keys()):
            yield f"{job} was started, but has no result"

    statuses = Counter(result.status for result in evidence.results.values())
    told = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    return verdict("jobs: every committed job, and no other, has ended", told or "no jobs", violations())


def check_ends(evidence: JobEvidence) -> Verdict:
    """Check that each job has ended as planned, or with an exception that something explains."""
    failed = {(one.of, one.stage) for one in evidence.ledger if one.of and _is_failed(evidence, one.job)}

    def violations() -> Iterator[str]:
        for one in evidence.ledger:
            result = evidence.results.get(one.job)
            if result is None or result.status not in ENDED:
                continue
            token = one.of if one.kind == job_plan.UNIQUE else one.token
            fate = job_plan.fate(one.kind, token)
            if result.kind != one.kind:
                yield f"{_shown(one)} is a job of the task {result.kind}"
            elif result.status == "SUCCESSFUL":
                yield from _unplanned_success(one, result, fate, token)
            elif not _is_explained(one, result, fate, evidence, failed):
                yield f"{_shown(one)}, planned to be {fate}, has failed with {[path for path, _ in result.errors]}"
        for step in evidence.steps:
            if step.verb == WRONG:
                yield f"{step.message_id} ({step.key}) did not get the results of the stage before it"

    lasts = Counter(one.last.rpartition(".")[2] for one in evidence.results.values() if one.status == "FAILED")
    told = ", ".join(f"{count} {name}" for name, count in sorted(lasts.items()))
    return verdict("jobs: each has ended as planned", f"failed: {told or 'none'}", violations())


def _is_failed(evidence: JobEvidence, job: str) -> bool:
    return job in evidence.results and evidence.results[job].status == "FAILED"


def _unplanned_success(one: Enqueued, result: Result, fate: str, token: str) -> Iterator[str]:
    planned = result.failures.count(PLANNED)
    if fate in (POISON, job_plan.REFUSED):
        yield f"{_shown(one)} is SUCCESSFUL, although its task always fails"
    elif fate == job_plan.ASKING and ASKED not in result.failures:
        yield f"{_shown(one)} is SUCCESSFUL, but has not asked for another attempt"
    elif (fate == FLAKY and not planned) or (fate == MENDED and len(result.failures) < job_plan.MAX_ATTEMPTS):
        yield f"{_shown(one)} is SUCCESSFUL after {planned} planned failures"
    if not isinstance(result.value, dict) or result.value.get("token") != token:
        yield f"{_shown(one)} has returned {result.value!r}"


def _is_explained(
    one: Enqueued, result: Result, fate: str, evidence: JobEvidence, failed: set[tuple[str, int]]
) -> bool:
    """Whether the last error of a job that has failed is as planned, or explained by what was done to it.

    A job that was asked to stop is not retried after a failure.
    """
    failures, asked = len(result.failures), one.job in evidence.cancelled
    match result.last:
        case path if path == CANCELLED:
            return asked
        case path if path == EARLIER:
            return any((one.of, stage) in failed for stage in range(one.stage))
        case path if path == PLANNED:
            return fate in (POISON, MENDED, FLAKY) and (asked or failures >= job_plan.MAX_ATTEMPTS)
        case path if path == ASKED:
            return fate == job_plan.ASKING and (asked or failures >= job_plan.MAX_ATTEMPTS)
        case path if path == REFUSED:
            return fate == job_plan.REFUSED
        case path if path.startswith(DATABASE_ERRORS):
            return one.kind in ATOMIC_KINDS and (asked or failures >= plan.MAX_ATTEMPTS)
    return False


def check_effects(evidence: JobEvidence) -> Verdict:
    """Check what the tasks have written: exactly once if they are atomic, otherwise at least once."""
    done = {step.message_id for step in evidence.steps if step.verb == DONE}
    fates = _fates(evidence)

    def violations() -> Iterator[str]:
        for job, result in evidence.results.items():
            count = evidence.effects.get(job, 0)
            successful = result.status == "SUCCESSFUL"
            expected = {int(successful and result.kind in ATOMIC_KINDS)}
            if fates.get(job) == job_plan.CONTINUING:
                expected = {2} if successful else {0, 1}  # It may have been cancelled while it waited.
            if count not in expected:
                yield f"{job} ({result.kind}) is {result.status}, and its writes were committed {count} times"
            if successful and job not in done:
                yield f"{job} ({result.kind}) is SUCCESSFUL, but its task has never ended"
        for job in sorted(evidence.effects.keys() - evidence.results.keys()):
            yield f"{job} has left its writes, but has no result"

    return verdict(
        "jobs: writes of atomic jobs exactly once, others at least once",
        f"{sum(evidence.effects.values())} writes, {len(done)} jobs whose tasks ended",
        violations(),
    )


def _fates(evidence: JobEvidence) -> dict[str, str]:
    """Return what the tasks of the jobs in the ledger do."""
    return {
        one.job: job_plan.fate(one.kind, one.of if one.kind == job_plan.UNIQUE else one.token)
        for one in evidence.ledger
    }


def check_published(evidence: JobEvidence) -> Verdict:
    """Check that each job was published exactly once, and one of a later stage only if those before have succeeded.

    One of a later stage that was cancelled, or that can never start, may have been published before that.
    """
    ready = _stages_that_may_start(evidence)
    ledger = by_job(evidence)

    def violations() -> Iterator[str]:
        for job, one in ledger.items():
            count, result = evidence.published.get(job, 0), evidence.results.get(job)
            may_start = not one.is_later or (one.of, one.stage) in ready
            need_not = one.is_later and result is not None and result.last in (CANCELLED, EARLIER)
            if count != may_start and not (may_start and need_not and count == 0):
                yield f"{_shown(one)} was published {count} times"
        for job in sorted(evidence.published.keys() - ledger.keys() - _without_producer(evidence)):
            yield f"{job} was published, but never committed"

    later = sum(one.is_later for one in ledger.values())
    told = f"{sum(evidence.published.values())} messages of jobs, {later} jobs of later stages"
    return verdict("jobs: each is published exactly once", told, violations())


def _without_producer(evidence: JobEvidence) -> set[str]:
    return {job for job, one in evidence.results.items() if one.kind in job_plan.WITHOUT_PRODUCER}


def _stages_that_may_start(evidence: JobEvidence) -> set[tuple[str, int]]:
    """Return the chain and the number of each later stage if all jobs of the stage before are SUCCESSFUL."""
    statuses: dict[tuple[str, int], set[str]] = defaultdict(set)
    for one in evidence.ledger:
        if one.of and one.job in evidence.results:
            statuses[one.of, one.stage].add(evidence.results[one.job].status)
    return {(of, stage + 1) for (of, stage), found in statuses.items() if found == {"SUCCESSFUL"}}


def check_stages(evidence: JobEvidence) -> Verdict:
    """Check that the count of each stage is the number of its jobs that are not SUCCESSFUL."""

    def violations() -> Iterator[str]:
        successful = {job for job, result in evidence.results.items() if result.status == "SUCCESSFUL"}
        for row in evidence.stages.values():
            left, size = len(set(row.jobs) - successful), len(row.jobs)
            if (row.remaining, row.kept) != (left, size):
                yield f"{row.stage}: {left} of {size} jobs remain, but {row.remaining} and {row.kept} are stored"
        staged = {job for one in evidence.stages.values() for job in one.jobs}
        for one in evidence.ledger:
            is_of_chain = one.kind != job_plan.UNIQUE and bool(one.of)
            if is_of_chain != (one.job in staged):
                yield f"{_shown(one)} is {'not ' if is_of_chain else ''}in a stage"

    finished = sum(one.remaining == 0 for one in evidence.stages.values())
    return verdict(
        "jobs: the counts of stages are right", f"{len(evidence.stages)} stages, {finished} finished", violations()
    )


def check_stage_order(evidence: JobEvidence) -> Verdict:
    """Check that no job of a stage starts before those of the stage before have ended, by both clocks."""
    starts, ends = _extremes(evidence)
    before: dict[tuple[str, int], list[str]] = defaultdict(list)
    for one in evidence.ledger:
        if one.of and one.kind != job_plan.UNIQUE:
            before[one.of, one.stage + 1].append(one.job)
    compared = 0

    def violations() -> Iterator[str]:
        nonlocal compared
        for one in evidence.ledger:
            if not one.is_later or one.job not in starts:
                continue
            for job in before[one.of, one.stage]:
                compared += 1
                other = evidence.results.get(job)
                if other is None or other.status != "SUCCESSFUL":
                    yield f"{_shown(one)} started, although {job} has not succeeded"
                elif starts[one.job] < ends.get(job, float("inf")):
                    yield f"{_shown(one)} started before the task of {job} had ended"
                elif (mine := evidence.results.get(one.job)) and 0 < mine.started_at < other.finished_at:
                    yield f"{_shown(one)} started {other.finished_at - mine.started_at} ms before {job} had ended"

    found = list(violations())
    return verdict("jobs: no stage starts before the one before it has ended", f"{compared} pairs of jobs", found)


def _extremes(evidence: JobEvidence) -> tuple[dict[str, float], dict[str, float]]:
    """Return, by job, when its task started for the first time, and when it first ended without an error."""
    starts: dict[str, float] = {}
    ends: dict[str, float] = {}
    for step in sorted(evidence.steps, key=lambda step: step.at):
        if step.verb == STARTED:
            starts.setdefault(step.message_id, step.at)
        elif step.verb == DONE:
            ends.setdefault(step.message_id, step.at)
    return starts, ends


def check_unique(evidence: JobEvidence) -> Verdict:
    """Check that each call of ``enqueue()`` for a unique job got one that saw what the caller had written.

    So the job that it got, a new one or one that waited, did not start before the caller's COMMIT. That two never wait
    is the unique index's.
    """
    calls = [one for one in evidence.ledger if one.kind == job_plan.UNIQUE]

    def violations() -> Iterator[str]:
        for one in calls:
            result = evidence.results.get(one.job)
            if result is None or result.status != "SUCCESSFUL" or not isinstance(result.value, Mapping):
                continue  # Other checks find it.
            if result.value.get("token") != one.of:
                yield f"{_shown(one)} got a job with other arguments: {result.value.get('token')}"
            elif one.token not in result.value["saw"]:
                yield f"{_shown(one)} did not see the row of the transaction that has enqueued it"

    told = f"{len(calls)} calls, {len({one.job for one in calls})} jobs"
    return verdict("jobs: unique ones see what their callers have written", told, violations())


def check_cancelled(evidence: JobEvidence) -> Verdict:
    """Check that a job that was cancelled while it waited has failed, and has not started afterwards.

    A process that was frozen may start a job that it had claimed before another process did. The dead letter of a job
    that was cancelled between two attempts may be redriven.
    """
    ours = evidence.cancelled.keys() - evidence.redriven.keys()
    cancelled = {job for job in ours if records.CANCELLED in evidence.cancelled[job]}

    def violations() -> Iterator[str]:
        for job in sorted(cancelled):
            result = evidence.results.get(job)
            if result is None or (result.status, result.last) != ("FAILED", CANCELLED):
                yield f"{job} was cancelled, but is {result and result.status} with {result and result.last}"
        for step in evidence.steps:
            at = evidence.cancelled_at.get(step.message_id)
            if step.verb != STARTED or at is None or step.at <= at or step.message_id in evidence.redriven:
                continue
            if not any(one.kind in FREEZES and one.pid == step.pid and one.until > at for one in evidence.troubles):
                yield f"{step.message_id} started {step.at - at:.1f} s after it was cancelled"

    requests = sum(found.count("RUNNING") for found in evidence.cancelled.values())
    told = f"{len(cancelled)} jobs that waited, {requests} requests to stop"
    return verdict("jobs: what was cancelled does not start", told, violations())


def check_attempts(evidence: JobEvidence) -> Verdict:
    """Check that each claim of a job is accounted for: it has succeeded, has an error, or its subscriber was lost.

    Jobs that may have two messages are left out: two subscribers may run them at the same time. A start that a
    shutdown has cut off is no claim.
    """
    sought = any(one.kind == plan.SEEK for one in evidence.troubles)
    unfinished = cut_off(evidence.steps, evidence.troubles)
    starts = Counter(step.message_id for step in evidence.steps if step.verb == STARTED and step not in unfinished)
    fates = _fates(evidence)
    uncounted = (job_plan.WAITING, job_plan.CONTINUING)

    def violations() -> Iterator[str]:
        for job, result in evidence.results.items():
            if sought and job in evidence.redriven and result.kind in job_plan.IN_SOUGHT:
                continue
            successful = result.status == "SUCCESSFUL"
            attempts = sum(not text.endswith(NOT_CALLED) for _, text in result.errors) + successful
            if result.status in ENDED and len(result.workers) != attempts:
                yield f"{job} ({result.kind}) has {len(result.workers)} workers, but {attempts} attempts ended"
            if starts[job] > len(result.workers) and fates.get(job) not in uncounted:
                yield f"{job} ({result.kind}) started {starts[job]} times, but has {len(result.workers)} workers"
            if job not in evidence.redriven and len(result.failures) > plan.MAX_ATTEMPTS:
                yield f"{job} ({result.kind}) failed {len(result.failures)} times"
            if result.finished_at < result.started_at:
                yield f"{job} ({result.kind}) ended before it started"

    lost = sum(path == LOST for result in evidence.results.values() for path, _ in result.errors)
    told = f"{starts.total()} starts, {len(unfinished)} cut off, {lost} lost subscribers"
    told += f", {sum(evidence.redriven.values())} redriven, {sum(evidence.moved.values())} waited for long"
    return verdict("jobs: errors and workers account for every claim", told, violations())


def _shown(one: Enqueued) -> str:
    return f"{one.job} ({one.kind} {one.token})"
