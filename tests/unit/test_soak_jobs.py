"""The soak's checks of jobs find what is wrong with them."""

from __future__ import annotations

import dataclasses

import pytest
from soak import job_checker, job_evidence, job_plan, plan, records
from soak.facts import Trouble
from soak.job_facts import CANCELLED, LOST, PLANNED, Enqueued, Result
from soak.records import Step, Transaction

from django_mysqlqueue.models import JobResult, JobStage
from tests.support import job_invariants
from tests.support.internals import GroupRef
from tests.support.soak_jobs import CANCELLED_TEXT, WORKER, a_job, sound, violations, with_result
from tests.support.tables import Group, Logged, Offsets, Tables, Waiting

pytestmark = pytest.mark.any_engine

LEDGER = "jobs: the server kept every committed transaction"
RESULTS = "jobs: every committed job, and no other, has ended"
ENDS = "jobs: each has ended as planned"
EFFECTS = "jobs: writes of atomic jobs exactly once, others at least once"
PUBLISHED = "jobs: each is published exactly once"
STAGES = "jobs: the counts of stages are right"
ORDER = "jobs: no stage starts before the one before it has ended"
UNIQUE = "jobs: unique ones see what their callers have written"
CANCELS = "jobs: what was cancelled does not start"
ATTEMPTS = "jobs: errors and workers account for every claim"


@pytest.fixture
def run():
    return sound()


def replaced(run, name, job, value):
    return dataclasses.replace(run, **{name: {**getattr(run, name), job: value}})


def test_a_sound_run_has_every_fate_and_no_violations(run):
    assert violations(run) == {}
    names = {one.name for one in job_checker.check(run)}
    assert names == {LEDGER, RESULTS, ENDS, EFFECTS, PUBLISHED, STAGES, ORDER, UNIQUE, CANCELS, ATTEMPTS}
    assert {one.status for one in run.results.values()} == {"SUCCESSFUL", "FAILED"}


def test_transactions(run):
    lost = Transaction(records.COMMITTED, "p", 10**6, 10**6 + 1)
    assert list(violations(dataclasses.replace(run, transactions=[*run.transactions, lost]))) == [LEDGER]
    number = run.transactions[0].first
    kept = Transaction(records.ROLLED_BACK, "p", number, number + 1)
    assert list(violations(dataclasses.replace(run, transactions=[kept]))) == [LEDGER]


def test_a_rolled_back_job_that_has_left_something(run):
    stranger = Result("stranger", job_plan.PLAIN, "FAILED", [(PLANNED, "")], [WORKER], 1, 2)
    assert list(violations(replaced(run, "results", "stranger", stranger))) == [RESULTS]
    assert list(violations(replaced(run, "published", "stranger", 1))) == [PUBLISHED]
    assert list(violations(replaced(run, "effects", "stranger", 1))) == [EFFECTS]
    step = Step(records.STARTED, "stranger", "p:1", 0, 1, 1.0, "1-a")
    assert RESULTS in violations(dataclasses.replace(run, steps=[*run.steps, step]))


def test_a_job_of_a_schedule_has_no_producer(run, monkeypatch):
    monkeypatch.setattr(job_plan, "WITHOUT_PRODUCER", frozenset({"nightly"}))
    recurring = Result("nightly-1", "nightly", "FAILED", [(PLANNED, "")], [WORKER], 1, 2)
    run = replaced(replaced(run, "results", "nightly-1", recurring), "published", "nightly-1", 1)
    assert violations(run) == {}


def test_a_job_that_is_lost(run):
    job = a_job(run, job_plan.ATOMIC, job_plan.FINE)
    left = {name: one for name, one in run.results.items() if name != job}
    assert RESULTS in violations(dataclasses.replace(run, results=left))
    for status in ("READY", "RUNNING"):
        assert RESULTS in violations(with_result(run, job, status=status))


@pytest.mark.parametrize(
    ("fate", "change"),
    [
        (job_plan.POISON, {"status": "SUCCESSFUL", "value": {"token": ""}}),
        (job_plan.MENDED, {"status": "SUCCESSFUL", "errors": [(PLANNED, "")]}),
        (job_plan.POISON, {"errors": [(PLANNED, "")] * (job_plan.MAX_ATTEMPTS - 1)}),
        (job_plan.FLAKY, {"errors": []}),
        (job_plan.FLAKY, {"status": "FAILED"}),
        (job_plan.ASKING, {"errors": []}),
        (job_plan.ASKING, {"status": "FAILED"}),
        (job_plan.FINE, {"value": {"token": "another"}}),
        (job_plan.FINE, {"kind": job_plan.PATIENT}),
        (job_plan.FINE, {"status": "FAILED", "errors": [(CANCELLED, CANCELLED_TEXT)]}),
        (job_plan.FINE, {"status": "FAILED", "errors": [(LOST, "")]}),
        (job_plan.FINE, {"status": "FAILED", "errors": [("django.db.utils.OperationalError", "")]}),
        (job_plan.REFUSED, {"errors": [(PLANNED, "")]}),
    ],
)
def test_an_end_that_was_not_planned(run, fate, change):
    assert ENDS in violations(with_result(run, a_job(run, job_plan.PLAIN, fate), **change))


def test_ends_that_something_explains(run):
    errors = [("django.db.utils.OperationalError", "")] * plan.MAX_ATTEMPTS
    atomic = a_job(run, job_plan.ATOMIC, job_plan.FINE)
    unlucky = with_result(run, atomic, status="FAILED", errors=errors, workers=[WORKER] * len(errors))
    assert violations(replaced(unlucky, "effects", atomic, 0)) == {}
    # One that was asked to stop is not retried.
    flaky = a_job(run, job_plan.PLAIN, job_plan.FLAKY)
    asked = with_result(run, flaky, status="FAILED", workers=[WORKER])
    asked = dataclasses.replace(asked, steps=[one for one in run.steps if one.message_id != flaky or one.attempt == 1])
    assert ENDS in violations(asked)
    assert violations(replaced(asked, "cancelled", flaky, ["RUNNING"])) == {}


def test_effects(run):
    atomic, plain = (a_job(run, kind, job_plan.FINE) for kind in (job_plan.ATOMIC, job_plan.PLAIN))
    failed = a_job(run, job_plan.ATOMIC, job_plan.POISON)
    for job, count in ((atomic, 0), (atomic, 2), (failed, 1), (plain, 1)):
        assert list(violations(replaced(run, "effects", job, count))) == [EFFECTS]
    steps = [step for step in run.steps if (step.message_id, step.verb) != (plain, records.DONE)]
    assert list(violations(dataclasses.replace(run, steps=steps))) == [EFFECTS]


def test_published(run):
    single = a_job(run, job_plan.PLAIN, job_plan.FINE)
    later = a_job(run, job_plan.ATOMIC, job_plan.FINE, stage=1, in_chain=True)
    cannot = next(one.job for one in run.ledger if one.is_later and not run.published[one.job])
    for job, count in ((single, 0), (single, 2), (later, 0), (later, 2), (cannot, 1)):
        assert list(violations(replaced(run, "published", job, count))) == [PUBLISHED]


def test_a_job_of_a_later_stage_that_was_cancelled_need_not_be_published(run):
    later = next(one.job for one in run.ledger if one.stage == 2 and run.published[one.job])
    ended = with_result(
        run, later, status="FAILED", errors=[(CANCELLED, CANCELLED_TEXT)], workers=[], started_at=0, value=None
    )
    ended = replaced(replaced(ended, "cancelled", later, [records.CANCELLED]), "effects", later, 0)
    stage = next(one for one in run.stages.values() if later in one.jobs)
    ended = replaced(ended, "stages", stage.stage, dataclasses.replace(stage, remaining=1))
    ended = dataclasses.replace(ended, steps=[step for step in run.steps if step.message_id != later])
    for count, found in ((0, []), (1, []), (2, [PUBLISHED])):
        assert list(violations(replaced(ended, "published", later, count))) == found


def test_counts_of_stages(run):
    stage, row = next((stage, one) for stage, one in run.stages.items() if one.remaining == 0)
    for change in ({"remaining": 1}, {"remaining": -1}, {"kept": 0}):
        assert list(violations(replaced(run, "stages", stage, dataclasses.replace(row, **change)))) == [STAGES]
    missing = {name: one for name, one in run.stages.items() if name != stage}
    assert list(violations(dataclasses.replace(run, stages=missing))) == [STAGES]


def test_a_stage_that_starts_too_early(run):
    first, later = (
        next(one.job for one in run.ledger if one.of and one.stage == stage and run.results[one.job].value)
        for stage in (0, 1)
    )
    at = next(step.at for step in run.steps if (step.message_id, step.verb) == (first, records.DONE))
    early = [dataclasses.replace(one, at=at - 0.5) if one.message_id == later else one for one in run.steps]
    assert list(violations(dataclasses.replace(run, steps=early))) == [ORDER]
    assert list(violations(with_result(run, later, started_at=run.results[first].finished_at - 1))) == [ORDER]
    cannot = next(one.job for one in run.ledger if one.is_later and not run.published[one.job])
    step = Step(records.STARTED, cannot, "", 0, 1, 10**6, "1-a")
    assert ORDER in violations(dataclasses.replace(run, steps=[*run.steps, step]))


def test_a_job_without_the_results_of_the_stage_before(run):
    wrong = Step(records.WRONG, run.ledger[0].job, "", 0, 1, 1.0, "1-a")
    assert list(violations(dataclasses.replace(run, steps=[*run.steps, wrong]))) == [ENDS]


def test_a_unique_job_that_has_not_seen_its_caller(run):
    one = next(one for one in run.ledger if one.kind == job_plan.UNIQUE)
    blind = {**run.results[one.job].value, "saw": []}
    assert list(violations(with_result(run, one.job, value=blind))) == [UNIQUE]
    # A call that got the job of another one.
    second = Enqueued("p:1.unique.second", one.job, one.kind, one.of)
    shared = dataclasses.replace(run, ledger=[*run.ledger, second])
    assert list(violations(shared)) == [UNIQUE]
    saw = {**run.results[one.job].value, "saw": [one.token, second.token]}
    assert violations(with_result(shared, one.job, value=saw)) == {}


def test_a_cancelled_job_that_starts(run):
    job = next(iter(run.cancelled_at))
    at = run.cancelled_at[job]
    start = Step(records.STARTED, job, "", 0, 1, at + 1, "7-a")
    claimed = with_result(run, job, workers=[WORKER], errors=[(PLANNED, ""), (CANCELLED, CANCELLED_TEXT)])
    started = dataclasses.replace(claimed, steps=[*run.steps, start])
    assert list(violations(started)) == [CANCELS]
    frozen = Trouble(plan.FREEZE_SUBSCRIBER, at - 1, at + 0.5, 7)
    assert violations(dataclasses.replace(started, troubles=[frozen])) == {}
    assert list(violations(dataclasses.replace(started, troubles=[dataclasses.replace(frozen, pid=8)]))) == [CANCELS]
    other = a_job(run, job_plan.PLAIN, job_plan.FINE)
    assert list(violations(replaced(run, "cancelled", other, [records.CANCELLED]))) == [CANCELS]


@pytest.mark.parametrize(
    "change",
    [
        {"workers": []},
        {"workers": [WORKER] * 2},
        {"errors": [(LOST, "")]},
        {"started_at": 10**6},
    ],
)
def test_claims_that_are_not_accounted_for(run, change):
    job = a_job(run, job_plan.PLAIN, job_plan.FINE)
    assert list(violations(with_result(run, job, **change))) == [ATTEMPTS]


def test_a_lost_subscriber_is_accounted_for(run):
    job = a_job(run, job_plan.PLAIN, job_plan.FINE)
    assert violations(with_result(run, job, errors=[(LOST, "")], workers=[WORKER] * 2)) == {}


def test_jobs_with_two_messages_are_left_out(run):
    job = a_job(run, job_plan.PLAIN, job_plan.FINE)
    twice = replaced(with_result(run, job, workers=[]), "redriven", job, 1)
    assert list(violations(twice)) == [ATTEMPTS]
    assert violations(dataclasses.replace(twice, troubles=[Trouble(plan.SEEK, 1.0, 2.0)])) == {}


# -- during the run -----------------------------------------------------------

REF = GroupRef("jobs", "jobs.default")


def contradictions(*, outbox=(), log=(), acked=0, status="READY", stage="", remaining=None, known=True):
    tables = Tables(
        log={offset: Logged(offset, REF.topic, "", *one) for offset, one in enumerate(log, 1)},
        outbox=[Waiting(1, REF.topic, "", *one) for one in outbox],
        groups={REF: Group(mode="shared")} if known else {},
        offsets={(REF, ""): Offsets(acked, acked)},
    )
    stages = [] if remaining is None else [JobStage(id="c:0000", remaining=remaining)]
    result = JobResult(id="job", queue_name="default", status=status, stage=stage)
    return list(job_invariants.contradictions(tables, [result], stages))


def test_a_result_that_waits_for_its_message():
    here, redriven = ("job", b""), ("new", b"", "jobs", "job")
    for status in ("READY", "RUNNING"):
        assert not contradictions(outbox=[here], status=status)
        assert not contradictions(log=[here], status=status)
        assert not contradictions(log=[here, redriven], acked=1, status=status)
        assert contradictions(status=status)
        assert contradictions(log=[here], acked=1, status=status)
        assert contradictions(outbox=[("other", b"")], status=status)


def test_a_result_that_waits_for_an_earlier_stage():
    here = ("job", b"")
    assert not contradictions(stage="c:0001", remaining=1)
    assert contradictions(stage="c:0001", remaining=0), "it should have been published"
    assert not contradictions(stage="c:0001", remaining=0, outbox=[here])
    assert contradictions(stage="c:0001", remaining=1, outbox=[here]), "it was published too early"
    assert contradictions(stage="c:0001", remaining=1, status="RUNNING")
    assert not contradictions(stage="c:0000", outbox=[here])
    assert contradictions(stage="c:0000")


def test_moments_count_what_they_compare():
    seen = job_evidence.JobMoments()
    waiting = JobResult(id="job", queue_name="default", status="READY", stage="")
    seen.add(Tables(), job_evidence.JobRows([waiting], []))
    found = seen.verdict()
    assert (found.compared, found.count) == ("1 moments, 1 results that had not ended", 1)


@pytest.mark.parametrize(
    ("status", "effects", "is_sound"),
    [
        ("SUCCESSFUL", 2, True),
        ("SUCCESSFUL", 1, False),
        ("SUCCESSFUL", 3, False),
        ("FAILED", 1, True),
        ("FAILED", 2, False),
    ],
)
def test_a_job_that_continues_leaves_what_each_call_has_written(run, status, effects, is_sound):
    job = a_job(run, job_plan.ATOMIC, job_plan.CONTINUING)
    run = replaced(with_result(run, job, status=status), "effects", job, effects)
    assert (EFFECTS not in violations(run)) is is_sound


@pytest.mark.parametrize(("fate", "is_sound"), [(job_plan.WAITING, True), (job_plan.FINE, False)])
def test_calls_that_do_not_count_are_no_claims_of_the_result(run, fate, is_sound):
    job = a_job(run, job_plan.PLAIN, fate)
    steps = [Step(verb, job, "p:1", 0, 1, 5.0, "1-a") for verb in (records.STARTED, records.FAILED)]
    assert (violations(dataclasses.replace(run, steps=[*run.steps, *steps])) == {}) is is_sound
