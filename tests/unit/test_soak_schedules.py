"""The soak's checks of recurring schedules find what is wrong with them."""

from __future__ import annotations

import dataclasses

import pytest
from soak import plan, schedule_checker, schedule_evidence
from soak.schedule_plan import (
    BY_NAME,
    EVERY_MESSAGE,
    EVERY_TICK,
    NEWEST_MESSAGE,
    NEWEST_TICK,
    ONE_AT_A_TIME,
    SCHEDULES,
)

from tests.support.internals import run_id
from tests.support.soak_schedules import BEGAN, changed, sound, violations, with_result, with_row, without

pytestmark = pytest.mark.any_engine

TICKS = "schedules: each tick at most once, none lost"
TIMES = "schedules: ticks run when they are due"
OVERLAP = "schedules: ticks are skipped while a job has not ended"
RUNS = "schedules: what was published has run"
ROWS = "schedules: rows only move forward, until the end"
ALL = [one.name for one in SCHEDULES]


@pytest.fixture
def run():
    return sound()


def ticks(run, name):
    return sorted(run.published[name])


def test_a_sound_run_has_no_violations(run):
    assert violations(run) == {}
    assert {one.name for one in schedule_checker.check(run)} == {TICKS, TIMES, OVERLAP, RUNS, ROWS}
    kinds = {(one.catch_up, one.overlap) for one in SCHEDULES if not one.topic}
    assert kinds == {("all", "queue"), ("latest", "queue"), ("latest", "skip")}
    assert {one.catch_up for one in SCHEDULES if one.topic} == {"all", "latest"}


@pytest.mark.parametrize("name", ALL)
def test_a_tick_that_has_run_twice(run, name):
    tick = ticks(run, name)[3]
    twice = {**run.published[name], tick: [tick + 100, tick + 200]}
    assert list(violations(changed(run, "published", name, twice))) == [TICKS]


@pytest.mark.parametrize("name", ALL)
def test_a_tick_that_was_lost(run, name):
    """Of a schedule that runs only the newest, it cannot be told from one that was dropped."""
    lost = without(run, name, ticks(run, name)[7])
    assert list(violations(lost)) == ([TICKS] if BY_NAME[name].is_whole else [])


@pytest.mark.parametrize("name", [EVERY_TICK.name, NEWEST_TICK.name, EVERY_MESSAGE.name, NEWEST_MESSAGE.name])
def test_the_newest_tick_that_was_lost(run, name):
    last = ticks(run, name)[-1]
    lost = with_row(without(run, name, last), name, last_run=ticks(run, name)[-2])
    assert list(violations(lost)) == [TICKS]


@pytest.mark.parametrize("name", ALL)
def test_a_tick_that_was_not_due(run, name):
    early, late = ticks(run, name)[3] + 1, ticks(run, name)[-1] + BY_NAME[name].every * 1000
    for tick in (early, late, BEGAN):
        assert TICKS in violations(changed(run, "published", name, {**run.published[name], tick: [tick + 100]}))


@pytest.mark.parametrize("name", ALL)
def test_a_row_that_is_not_that_of_the_last_tick(run, name):
    assert list(violations(with_row(run, name, last_run=ticks(run, name)[-2]))) == [TICKS]
    assert TICKS in violations(with_row(run, name, skipped=2))


@pytest.mark.parametrize("name", ALL)
def test_a_tick_that_has_run_too_early(run, name):
    tick = ticks(run, name)[3]
    early = {**run.published[name], tick: [tick - 1]}
    assert list(violations(changed(run, "published", name, early))) == [TIMES]


@pytest.mark.parametrize("one", [NEWEST_TICK, ONE_AT_A_TIME, EVERY_TICK])
def test_a_tick_for_which_there_was_a_newer_one(run, one):
    tick = ticks(run, one.name)[3]
    for late, found in ((one.every * 1000 - 1, []), (one.every * 1000, [TIMES] if one.catch_up == "latest" else [])):
        assert list(violations(with_result(run, one.name, tick, enqueued_at=tick + late))) == found


@pytest.mark.parametrize("one", [ONE_AT_A_TIME, EVERY_TICK])
def test_two_jobs_at_a_time(run, one):
    first, second = ticks(run, one.name)[2:4]
    started = run.results[one.name][second].started_at
    long = with_result(run, one.name, first, finished_at=started + 1)
    assert list(violations(long)) == ([OVERLAP] if one.overlap == "skip" else [])
    assert violations(with_result(run, one.name, first, finished_at=started)) == {}


def test_a_job_without_a_message_and_the_reverse(run):
    tick = ticks(run, NEWEST_TICK.name)[3]
    gone = without(run, NEWEST_TICK.name, tick)
    for name in ("published", "results"):
        one = changed(gone, name, NEWEST_TICK.name, getattr(run, name)[NEWEST_TICK.name])
        assert list(violations(one)) == [RUNS]


@pytest.mark.parametrize("one", [EVERY_MESSAGE, NEWEST_MESSAGE])
def test_a_message_that_was_not_handled(run, one):
    handled = set(run.handled[one.name]) - {ticks(run, one.name)[3]}
    assert list(violations(changed(run, "handled", one.name, handled))) == [RUNS]


def test_a_job_that_has_failed(run):
    name, tick = EVERY_TICK.name, ticks(run, EVERY_TICK.name)[3]
    lost = [("django.db.utils.OperationalError", "")]
    for number, found in ((1, [RUNS]), (plan.MAX_ATTEMPTS, [])):
        assert list(violations(with_result(run, name, tick, status="FAILED", errors=lost * number))) == found
    assert list(violations(with_result(run, name, tick, status="FAILED"))) == [RUNS]


@pytest.mark.parametrize("name", ALL)
def test_rows(run, name):
    row = run.rows[name]
    missing = {key: value for key, value in run.rows.items() if key != name}
    assert ROWS in violations(dataclasses.replace(run, rows=missing))
    # It no longer ticks.
    assert ROWS in violations(dataclasses.replace(run, settled_at=row.last_tick + 1))
    for changes in (
        {"last_tick": row.last_tick + 1},
        {"last_tick": row.last_tick + 10**6},
        {"last_run": row.last_run + 1},
        {"skipped": row.skipped + 1},
        {"registered_at": row.registered_at + 1},
    ):
        seen = {name: dataclasses.replace(row, **changes)}
        assert list(violations(dataclasses.replace(run, moments=[*run.moments, seen]))) == [ROWS], changes
    assert ROWS in violations(with_row(run, name, registered_at=row.registered_at + 1))


def test_ids_name_their_schedules():
    assert [schedule_evidence._schedule(run_id(name, 1000)) for name in ALL] == ALL
