"""The soak's checks know which starts a shutdown has cut off: those count no attempt, all others do."""

from __future__ import annotations

import dataclasses

import pytest
from soak import checker, job_plan, plan
from soak.facts import Trouble
from soak.job_facts import PLANNED
from soak.records import DONE, FAILED, LEFT, STARTED, Step

from tests.support import soak_jobs
from tests.support.soak_runs import BEGAN, GROUPS, KEYS, ONE, OTHER, TOTAL, a_message, name, with_steps

pytestmark = pytest.mark.any_engine

ATTEMPTS = "jobs: errors and workers account for every claim"
PID, PROCESS = 7, "7-a"
AT = 500.0
"""When the shutdown begins."""


def shutdown(kind, at=AT, pid=PID):
    return Trouble(kind, at, at, pid)


def frozen(since, until, pid=PID):
    return Trouble(plan.FREEZE_SUBSCRIBER, since, until, pid)


@pytest.fixture
def run():
    return soak_jobs.sound()


def of_a_job(run, calls, troubles, process=PROCESS):
    """The violations if a job was started beside the calls that its row tells of.

    Args:
        calls: when each further call starts, and when and how it ends.
    """
    job = soak_jobs.a_job(run, job_plan.PLAIN, job_plan.FINE)
    steps = [Step(verb, job, "", 0, 1, AT + at, process) for call in calls for verb, at in call]
    return soak_jobs.violations(
        dataclasses.replace(run, steps=sorted([*steps, *run.steps], key=lambda step: step.at), troubles=troubles)
    )


@pytest.mark.parametrize("kind", sorted(plan.SHUTDOWNS))
@pytest.mark.parametrize("start", [-2.0, 0.7, 3.0])
@pytest.mark.parametrize("end", [None, DONE, FAILED])
def test_a_job_that_runs_when_the_process_exits_is_no_attempt(run, kind, start, end):
    """Its task may even have ended, between the release and the exit."""
    call = [(STARTED, start), *([(end, max(0.0, start) + 1.1)] if end else [])]
    assert of_a_job(run, [call], [shutdown(kind)]) == {}


@pytest.mark.parametrize("kind", sorted(plan.SHUTDOWNS))
def test_what_a_job_has_done_in_the_same_process_before_is_its_own(run, kind):
    """Another call in the process has ended: that says nothing about this one."""
    calls = [[(STARTED, -4.0), (FAILED, -3.9)], [(STARTED, -0.5)]]
    failed = [(PLANNED, "no")]
    job = soak_jobs.a_job(run, job_plan.PLAIN, job_plan.FINE)
    workers = [soak_jobs.WORKER] * 2
    counted = soak_jobs.with_result(run, job, errors=failed, workers=workers)
    assert of_a_job(counted, calls, [shutdown(kind)]) == {}
    assert list(of_a_job(run, calls, [shutdown(kind)])) == [ATTEMPTS]


@pytest.mark.parametrize("kind", sorted(plan.SHUTDOWNS))
@pytest.mark.parametrize(
    "call",
    [
        pytest.param([(STARTED, -1.0), (DONE, -0.5)], id="ended before"),
        pytest.param([(STARTED, -1.0), (DONE, 0.4)], id="ended within SHUTDOWN_TIMEOUT"),
        pytest.param([(STARTED, 0.1), (FAILED, 0.4)], id="failed within SHUTDOWN_TIMEOUT"),
        pytest.param([(STARTED, 2.0), (DONE, 2.4)], id="started before it was noticed, ended within SHUTDOWN_TIMEOUT"),
        pytest.param([(STARTED, 5.5)], id="started long after"),
        pytest.param([(STARTED, 5.5), (DONE, 8.0)], id="started and ended long after"),
        pytest.param([(STARTED, -1.0 - plan.PROCESSING)], id="exceeded MAX_PROCESSING_TIME"),
    ],
)
def test_a_job_that_is_not_cut_off_is_an_attempt(run, kind, call):
    assert list(of_a_job(run, [call], [shutdown(kind)])) == [ATTEMPTS]


@pytest.mark.parametrize("kind", sorted({*plan.ACTIONS, plan.KILL_MOVE} - plan.SHUTDOWNS))
def test_nothing_but_a_shutdown_of_the_process_cuts_off(run, kind):
    call = [(STARTED, -1.0)]
    assert list(of_a_job(run, [call], [shutdown(kind), shutdown(plan.DEPLOY, pid=PID + 1)])) == [ATTEMPTS]
    assert list(of_a_job(run, [call], [])) == [ATTEMPTS]


@pytest.mark.parametrize("kind", sorted(plan.SHUTDOWNS))
def test_a_frozen_process_shuts_down_when_it_is_resumed(run, kind):
    def found(*call, stall=None):
        return list(of_a_job(run, [call], [stall or frozen(AT - 3, AT + 6), shutdown(kind)]))

    assert found((STARTED, 6.5), (DONE, 8.0)) == []
    assert found((STARTED, -3.5), (DONE, 6.3)) == [ATTEMPTS], "within SHUTDOWN_TIMEOUT"
    assert found((STARTED, 11.5)) == [ATTEMPTS]
    assert found((STARTED, 6.5), stall=frozen(AT - 3, AT + 6, pid=PID + 1)) == [ATTEMPTS]
    assert found((STARTED, 6.5), stall=frozen(AT - 9, AT - 1)) == [ATTEMPTS]
    assert found((STARTED, 6.5), stall=frozen(AT + 1, AT + 6)) == []


@pytest.mark.parametrize("kind", sorted(plan.AWAY))
def test_a_process_that_waits_for_the_server_shuts_down_later(run, kind):
    away = Trouble(kind, AT + 1, AT + 4)
    call = [(STARTED, 6.0)]
    assert of_a_job(run, [call], [away, shutdown(plan.DEPLOY)]) == {}
    assert list(of_a_job(run, [call], [dataclasses.replace(away, until=AT - 1), shutdown(plan.DEPLOY)])) == [ATTEMPTS]
    assert list(of_a_job(run, [call], [away])) == [ATTEMPTS]


# -- messages -----------------------------------------------------------------

CUT_OFF = "shared: a shutdown counts no attempt"


def repeated(evidence, *, start=-1.0, ends=(), attempt=1):
    """A message whose handler a process starts shortly before or after BEGAN, and then another process."""
    number = next(n for n in range(0, TOTAL, 3) if n == a_message("shared", after=n))
    key = KEYS[number % 3]

    def change(steps):
        kept = [step for step in steps if step.message_id != name(number)]
        first = [(STARTED, start), *ends]
        mine = [Step(verb, name(number), key, number + 1, 1, BEGAN + at, ONE) for verb, at in first]
        later = [
            Step(verb, name(number), key, number + 1, attempt, BEGAN + 4 + at, OTHER)
            for verb, at in ((STARTED, 0), (DONE, 1))
        ]
        return sorted([*kept, *mine, *later], key=lambda step: step.at)

    return number, with_steps(evidence, "shared", change)


def found(evidence, group="shared"):
    return {one.name: one.violations for one in checker.check(evidence, [GROUPS[group]]) if not one.ok}


def with_shutdown(evidence, kind, *more):
    return dataclasses.replace(evidence, troubles=[shutdown(kind, BEGAN, 1), *more])


@pytest.mark.parametrize("kind", sorted(plan.SHUTDOWNS))
@pytest.mark.parametrize("start", [-1.0, 2.5])
@pytest.mark.parametrize("ends", [(), ((DONE, 3.6),)])
@pytest.mark.parametrize("counted", [False, True])
def test_a_handler_that_a_shutdown_cuts_off(evidence, kind, start, ends, counted):
    number, once_more = repeated(evidence, start=start, ends=ends, attempt=1 + counted)
    line = f"{name(number)} at {number + 1} of a was cut off in attempt 1, and had attempt 2 next"
    assert found(with_shutdown(once_more, kind)) == ({CUT_OFF: (line,)} if counted else {})
    killed = Trouble(plan.KILL_SUBSCRIBER, BEGAN + 2, BEGAN + 2, 1)
    assert found(with_shutdown(once_more, kind, killed)) == {}


@pytest.mark.parametrize("kind", sorted(plan.SHUTDOWNS))
def test_a_handler_that_has_failed_in_time_has_had_an_attempt(evidence, kind):
    for end in (0.3, 1.5):
        ends = [(FAILED, end), (LEFT, end)]
        _, again = repeated(evidence, ends=ends, attempt=2)
        assert found(with_shutdown(again, kind)) == {}
    _, open_end = repeated(evidence, attempt=2)
    assert list(found(with_shutdown(open_end, kind))) == [CUT_OFF]


@pytest.mark.parametrize("kind", sorted(plan.SHUTDOWNS))
def test_a_handler_that_has_started_long_after_is_repeated_for_no_reason(evidence, kind):
    number, once_more = repeated(evidence, start=3.0)
    late = dataclasses.replace(once_more, troubles=[shutdown(kind, BEGAN - 3, 1)])
    line = f"{name(number)} at {number + 1} of a repeated attempt 1 after 1.0 s without a reason"
    assert found(late) == {"shared: attempts are repeated only after a loss": (line,)}


@pytest.mark.parametrize("kind", sorted(plan.SHUTDOWNS))
def test_a_handler_that_is_cut_off_may_end_beside_the_next_of_its_partition(evidence, kind):
    """The overlap of an abandoned handler with what comes after it is short, not excluded."""
    number = next(n for n in range(300, TOTAL, 3) if n == a_message("skip", after=n))
    at = BEGAN + number / 10

    def change(steps):
        mine = [step for step in steps if step.message_id == name(number)]
        place = steps.index(mine[0])
        first, late = (dataclasses.replace(step, at=at + n) for step, n in zip(mine, (-1, 0), strict=True))
        again = [dataclasses.replace(step, process=OTHER, at=at - 0.1) for step in mine]
        rest = [step for step in steps if step.message_id != name(number)]
        return [*rest[:place], first, again[0], late, again[1], *rest[place:]]

    beside = with_steps(evidence, "skip", change)
    assert found(dataclasses.replace(beside, troubles=[shutdown(kind, at - 3.5, 1)]), "skip") == {}
    expected = ["skip: attempts are repeated only after a loss", "skip: one message of a partition at a time"]
    assert list(found(beside, "skip")) == expected
