"""The checks of recurring schedules. Uses no database and no files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from soak import plan, schedule_plan
from soak.facts import Verdict, verdict
from soak.job_checker import DATABASE_ERRORS, ENDED
from soak.job_facts import Result
from soak.schedule_plan import Planned


@dataclass(frozen=True, slots=True)
class Row:
    """The row of a schedule. Times are by the database's clock, in epoch milliseconds."""

    registered_at: int
    last_tick: int
    last_run: int = 0
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class ScheduleEvidence:
    """What the schedules have published, and what they should have."""

    rows: Mapping[str, Row]
    """By name, in the end."""
    published: Mapping[str, Mapping[int, Sequence[int]]]
    """By name and tick, when each message with its id was committed to the outbox."""
    results: Mapping[str, Mapping[int, Result]] = field(default_factory=dict)
    """By name and tick, of the schedules of tasks."""
    handled: Mapping[str, Collection[int]] = field(default_factory=dict)
    """By name, the ticks whose messages were handled, of the schedules of messages."""
    settled_at: int = 0
    """When all disturbances had ended."""
    moments: Sequence[Mapping[str, Row]] = ()
    """The rows during the run, in chronological order."""


def check(evidence: ScheduleEvidence) -> list[Verdict]:
    """Run all checks."""
    return [
        check_ticks(evidence),
        check_times(evidence),
        check_overlap(evidence),
        check_runs(evidence),
        check_rows(evidence),
    ]


def due(one: Planned, row: Row) -> list[int]:
    """Return the ticks of a schedule that its row has decided."""
    every = one.every * 1000
    return list(range(row.registered_at + every, row.last_tick + 1, every))


def check_ticks(evidence: ScheduleEvidence) -> Verdict:
    """Check that each tick has run at most once, none that was not due, and each of a schedule that runs all.

    Of another schedule, the newest one that was decided has run or was skipped.
    """

    def violations() -> Iterator[str]:
        for one, row in _rows(evidence):
            decided, ran = due(one, row), evidence.published.get(one.name, {})
            for tick, times in sorted(ran.items()):
                if len(times) != 1:
                    yield f"{one.name}: the tick {tick} was published {len(times)} times"
                if tick not in decided:
                    yield f"{one.name}: the tick {tick} was published, but not decided: the row is at {row.last_tick}"
            missing = [tick for tick in decided if tick not in ran]
            if one.is_whole:
                yield from (f"{one.name}: the tick {tick} was lost" for tick in missing)
            elif one.overlap == "queue" and row.last_tick in missing:
                yield f"{one.name}: the newest tick {row.last_tick} was decided, but not published"
            if row.skipped > (len(missing) if one.overlap == "skip" else 0):
                yield f"{one.name}: {row.skipped} ticks were skipped, but only {len(missing)} have not run"
            if row.last_run != max(ran, default=0):
                yield f"{one.name}: its last run is {max(ran, default=0)}, but its row has {row.last_run}"

    total = sum(len(due(one, row)) for one, row in _rows(evidence))
    ran = sum(map(len, evidence.published.values()))
    skipped = sum(row.skipped for row in evidence.rows.values())
    told = f"{total} ticks, {ran} published, {skipped} times skipped"
    return verdict("schedules: each tick at most once, none lost", told, violations())


def _rows(evidence: ScheduleEvidence) -> Iterator[tuple[Planned, Row]]:
    for one in schedule_plan.SCHEDULES:
        if one.name in evidence.rows:
            yield one, evidence.rows[one.name]


def check_times(evidence: ScheduleEvidence) -> Verdict:
    """Check that no tick has run before it was due and, unless all are to run, that it was the newest then."""
    compared = 0

    def violations() -> Iterator[str]:
        nonlocal compared
        for one in schedule_plan.SCHEDULES:
            for tick, times in sorted(evidence.published.get(one.name, {}).items()):
                compared += 1
                if times and min(times) < tick:
                    yield f"{one.name}: the tick {tick} was published {tick - min(times)} ms early"
            for tick, result in sorted(evidence.results.get(one.name, {}).items()):
                # Stored by the tick: the time at which it had decided.
                late = result.enqueued_at - tick
                if one.catch_up == "latest" and late >= one.every * 1000:
                    yield f"{one.name}: the tick {tick} ran {late} ms late, when there was a newer one"

    found = list(violations())
    return verdict("schedules: ticks run when they are due", f"{compared} messages", found)


def check_overlap(evidence: ScheduleEvidence) -> Verdict:
    """Check that no job of a schedule that skips ticks has started before those of earlier ticks had ended."""
    compared = 0

    def violations() -> Iterator[str]:
        nonlocal compared
        for one in schedule_plan.SCHEDULES:
            if one.overlap != "skip":
                continue
            ended = 0
            for _, result in sorted(evidence.results.get(one.name, {}).items()):
                compared += 1
                if 0 < result.started_at < ended:
                    yield f"{result.job} started {ended - result.started_at} ms before an earlier one had ended"
                ended = max(ended, result.finished_at)

    found = list(violations())
    return verdict("schedules: ticks are skipped while a job has not ended", f"{compared} jobs", found)


def check_runs(evidence: ScheduleEvidence) -> Verdict:
    """Check that each tick that was published has a job that has succeeded, or that its message was handled."""

    def violations() -> Iterator[str]:
        for one in schedule_plan.SCHEDULES:
            results = evidence.results.get(one.name, {})
            for tick in sorted(evidence.published.get(one.name, {}).keys() | results.keys()):
                if one.topic:
                    if tick not in evidence.handled.get(one.name, ()):
                        yield f"{one.name}: the message of the tick {tick} was not handled"
                elif tick not in evidence.published.get(one.name, {}):
                    yield f"{one.name}: the tick {tick} has a result, but no message"
                elif tick not in results:
                    yield f"{one.name}: the tick {tick} has a message, but no result"
                elif not _has_succeeded(results[tick]):
                    last = results[tick].last
                    yield f"{one.name}: the job of the tick {tick} is {results[tick].status} with {last or 'no error'}"

    jobs = sum(map(len, evidence.results.values()))
    told = f"{jobs} jobs, {sum(map(len, evidence.handled.values()))} messages handled"
    return verdict("schedules: what was published has run", told, violations())


def _has_succeeded(result: Result) -> bool:
    """Whether a job has succeeded, or errors of the database explain that it has not.

    Other checks find those that have not ended.
    """
    unlucky = result.last.startswith(DATABASE_ERRORS) and len(result.failures) >= plan.MAX_ATTEMPTS
    return result.status not in ENDED or result.status == "SUCCESSFUL" or unlucky


def check_rows(evidence: ScheduleEvidence) -> Verdict:
    """Check that each schedule has a row, which only moved forward, in whole intervals, and did so until the end."""

    def violations() -> Iterator[str]:
        for one in schedule_plan.SCHEDULES:
            row = evidence.rows.get(one.name)
            if row is None:
                yield f"{one.name} has no row"
                continue
            if row.last_tick < evidence.settled_at:
                late = (evidence.settled_at - row.last_tick) / 1000
                yield f"{one.name} has decided no tick for {late:.1f} s before the end"
            if (row.last_tick - row.registered_at) % (one.every * 1000):
                yield f"{one.name} is at {row.last_tick}, which is not a whole number of intervals after its start"
            seen = [moment[one.name] for moment in evidence.moments if one.name in moment]
            for earlier, later in pairwise([*seen, row]):
                if later.registered_at != earlier.registered_at:
                    yield f"{one.name} was registered again at {later.registered_at}"
                for name in ("last_tick", "last_run", "skipped"):
                    if getattr(later, name) < getattr(earlier, name):
                        yield f"{one.name}: {name} went from {getattr(earlier, name)} back to {getattr(later, name)}"

    told = f"{len(evidence.rows)} rows, {len(evidence.moments)} moments"
    return verdict("schedules: rows only move forward, until the end", told, violations())
