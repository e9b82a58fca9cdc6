"""Runs of the soak's schedules as it would record them, sound and broken."""

from __future__ import annotations

import dataclasses

from soak import job_plan, schedule_checker, schedule_plan
from soak.job_facts import Result
from soak.schedule_checker import Row, ScheduleEvidence

BEGAN = 1_000_000
"""When the schedules were registered, in epoch milliseconds."""
SECONDS = 60
LATE_MS = 100
"""Milliseconds after which a tick runs."""
TOOK_MS = 300


def result_of(name, tick):
    """A job that has succeeded."""
    decided = tick + LATE_MS
    return Result(
        f"recurring:{name}:{tick:013}",
        job_plan.ON_TIME,
        "SUCCESSFUL",
        started_at=decided,
        finished_at=decided + TOOK_MS,
        enqueued_at=decided,
    )


def sound():
    """A run in which schedules skip ticks, and run only the newest, as they should."""
    rows, published, results, handled = {}, {}, {}, {}
    for one in schedule_plan.SCHEDULES:
        every = one.every * 1000
        ticks = list(range(BEGAN + every, BEGAN + SECONDS * 1000 + 1, every))
        # One tick was not run: it was skipped, or a newer one was run after an outage.
        ran = ticks if one.is_whole else [tick for tick in ticks if tick != ticks[5]]
        rows[one.name] = Row(BEGAN, ticks[-1], ran[-1], int(one.overlap == "skip"))
        published[one.name] = {tick: [tick + LATE_MS] for tick in ran}
        if one.topic:
            handled[one.name] = set(ran)
        else:
            results[one.name] = {tick: result_of(one.name, tick) for tick in ran}
    first = {name: dataclasses.replace(row, last_tick=BEGAN, last_run=0, skipped=0) for name, row in rows.items()}
    second = {
        name: dataclasses.replace(row, last_tick=BEGAN + 2000, last_run=BEGAN + 2000) for name, row in first.items()
    }
    return ScheduleEvidence(rows, published, results, handled, BEGAN + SECONDS * 1000 - 500, [{}, first, second])


def violations(evidence):
    return {one.name: one.violations for one in schedule_checker.check(evidence) if not one.ok}


def changed(evidence, name, schedule, value):
    """A run with another value for a schedule."""
    return dataclasses.replace(evidence, **{name: {**getattr(evidence, name), schedule: value}})


def with_row(evidence, schedule, **values):
    return changed(evidence, "rows", schedule, dataclasses.replace(evidence.rows[schedule], **values))


def without(evidence, schedule, tick):
    """A run in which a tick has left nothing."""
    for name in ("published", "results"):
        values = getattr(evidence, name).get(schedule, {})
        evidence = changed(evidence, name, schedule, {key: value for key, value in values.items() if key != tick})
    return changed(evidence, "handled", schedule, set(evidence.handled.get(schedule, ())) - {tick})


def with_result(evidence, schedule, tick, **values):
    results = evidence.results[schedule]
    return changed(evidence, "results", schedule, {**results, tick: dataclasses.replace(results[tick], **values)})
