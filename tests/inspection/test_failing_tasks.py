"""Tasks of which every attempt fails, in a queue in which others may succeed."""

from __future__ import annotations

import pytest

from django_mysqlqueue.inspection import always_failing, find_causes, find_problems, get_overview
from django_mysqlqueue.models import DeliveryEvent, JobResult
from django_mysqlqueue.tasks import RetryLater, job
from django_mysqlqueue.tasks.handlers import job_handlers
from tests.app import jobs
from tests.support import job_worlds
from tests.support.harness import USING, Sub, sequence
from tests.support.internals import Session

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

pytestmark = pytest.mark.still_clock
FAIL = "tests.app.jobs.fail"


@task
@job(max_attempts=50)
def geocode(number):
    raise RetryLater(3600, reason="429")


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    jobs.log.clear()


@pytest.fixture
def runs(clock):
    """Runs jobs in rounds, 65 seconds apart."""
    sub = Sub(*job_handlers().values())
    clock.advance(1)

    def run(*enqueue, rounds=3):
        for _ in range(rounds):
            for one in enqueue:
                one()
            sub.settle()
            sub.poller.write_rollups()
            clock.advance(65)
            sub.heart.beat()
        sequence()

    return run


def failing(number=5):
    def enqueue():
        for one in range(number):
            jobs.fail.enqueue(one)

    return enqueue


def found(*kinds):
    return [one for one in find_problems(using=USING) if one.kind in kinds]


def test_a_task_of_which_every_job_fails_while_others_succeed(runs):
    """Of all attempts, less than half fail."""
    runs(failing(5), lambda: [jobs.add.enqueue(one) for one in range(20)])
    assert not found("failing")
    (problem,) = found("retrying")
    first = min(JobResult.objects.filter(status="FAILED").values_list("finished_at", flat=True))
    assert problem.text.startswith("fail: every attempt has failed since ")
    assert problem.text.endswith(" (15 failures of 15 jobs of jobs/jobs.default).")
    assert (problem.severity, problem.task, problem.since) == (0, FAIL, first)
    assert problem.error.startswith("ValueError: no ")
    overview = get_overview(using=USING)
    causes = [one for one in find_causes(overview) if problem in one.problems]
    assert [one.kind for one in causes] == ["retrying"]
    assert causes[0].text.startswith("fail: every attempt has failed since ")
    assert causes[0].sample.error.startswith("ValueError: no ")


def test_if_every_attempt_of_the_queue_fails_that_problem_names_the_task(runs):
    runs(failing(5))
    (problem,) = found("failing", "retrying")
    assert problem.kind == "failing"
    assert problem.text.startswith("fail: every attempt has failed since ")
    assert (problem.task, problem.severity) == (FAIL, 0)
    assert problem.error.startswith("ValueError: no ")


def test_jobs_that_wait_for_another_attempt_count(runs):
    """Their errors are in the state of their deliveries."""
    runs(lambda: [jobs.fail_slowly.enqueue() for _ in range(5)], lambda: [jobs.add.enqueue(1) for _ in range(20)])
    (problem,) = found("retrying")
    assert problem.task == "tests.app.jobs.fail_slowly"
    first = min(DeliveryEvent.objects.values_list("settled_at", flat=True))
    assert problem.since == first, "though the first jobs have ended with their second attempts"
    assert problem.text.endswith(" (25 failures of 15 jobs of jobs/jobs.default).")
    assert (problem.messages.value, problem.failed.value) == (5, 15), "the others are dead letters"
    assert "KeyError: 'no'" in problem.error
    (cause,) = [one for one in find_causes() if problem in one.problems]
    assert cause.messages.value == 5


def test_failures_beyond_those_that_are_recorded_are_a_bound(runs, monkeypatch):
    runs(lambda: [jobs.fail_slowly.enqueue() for _ in range(5)], lambda: [jobs.add.enqueue(1) for _ in range(20)])
    monkeypatch.setattr(always_failing, "RECORDED", 20)
    (problem,) = found("retrying")
    assert "(20+ failures of 15 jobs of " in problem.text


def test_jobs_that_wait_for_long_count(runs):
    """Their messages are settled: results and the outbox have their failures."""
    runs(lambda: [geocode.enqueue(one) for one in range(5)], lambda: [jobs.add.enqueue(1) for _ in range(20)])
    (problem,) = found("retrying")
    assert problem.task == geocode.module_path
    assert problem.text.startswith("geocode: every attempt has failed since ")
    # Of each job, the last attempt counts.
    assert problem.text.endswith(" (15 failures of 15 jobs of jobs/jobs.default).")
    assert "RetryLater: in 3600 s: 429" in problem.error


def test_several_tasks_the_one_with_most_jobs_first(runs):
    runs(
        failing(9),
        lambda: [jobs.fail_too.enqueue(one) for one in range(5)],
        lambda: [jobs.add.enqueue(1) for _ in range(40)],
    )
    (problem,) = found("retrying")
    assert problem.text.startswith("fail, fail_too: every attempt has failed since ")


def test_a_success_ends_it(runs, clock):
    runs(failing(5), lambda: [jobs.add.enqueue(one) for one in range(20)])
    assert found("retrying")
    last = JobResult.objects.filter(task_path=FAIL).latest("finished_at")
    clock.advance(1)
    JobResult.objects.filter(id=last.id).update(status="SUCCESSFUL", finished_at=last.finished_at + 1)
    assert not found("retrying")


@pytest.mark.parametrize(
    ("number", "rounds"), [(20, 1), (3, 3), (1, 12)], ids=["at one time", "few attempts", "one job"]
)
def test_a_passing_fault_or_a_few_failures_are_no_such_problem(runs, number, rounds):
    again = jobs.fail.enqueue if number == 1 else failing(number)
    runs(again if number > 1 else lambda: None, lambda: [jobs.add.enqueue(1) for _ in range(50)], rounds=rounds)
    assert not found("retrying")


def test_jobs_that_were_cancelled_before_they_started_have_not_failed(runs):
    def cancelled():
        ids = [jobs.plain.enqueue(one).id for one in range(5)]
        JobResult.objects.filter(id__in=ids).update(status="FAILED", finished_at=Session(USING).now())

    runs(cancelled, failing(5), lambda: [jobs.add.enqueue(one) for one in range(20)])
    (problem,) = found("retrying")
    assert problem.text.startswith("fail: ")


def test_failures_of_processes_that_have_ended_do_not_count(runs, clock):
    runs(failing(5))
    session, now = Session(USING), Session(USING).now()
    assert always_failing.find_tasks(session, {job_worlds.JOBS: now - 600_000}, least=10, recent=0)
    assert not always_failing.find_tasks(session, {job_worlds.JOBS: now - 1000}, least=10, recent=0)


def test_of_successes_that_were_not_read_nothing_is_said(runs, monkeypatch):
    """Before the oldest success that was read, the task may have succeeded."""
    runs(failing(5), lambda: [jobs.add.enqueue(one) for one in range(20)])
    session, began = Session(USING), {job_worlds.JOBS: Session(USING).now() - 600_000}
    assert always_failing.find_tasks(session, began, least=10, recent=0)
    monkeypatch.setattr(always_failing, "ENDED", 15)
    assert not always_failing.find_tasks(session, began, least=10, recent=0)


def test_what_failed_before_the_window_and_waits_for_nothing_is_over(runs, clock):
    runs(failing(5), lambda: [jobs.add.enqueue(one) for one in range(20)])
    assert found("retrying")
    clock.advance(601)
    runs(lambda: [jobs.fail_too.enqueue(one) for one in range(10)], lambda: [jobs.add.enqueue(1) for _ in range(30)])
    (problem,) = found("retrying")
    assert problem.text.startswith("fail_too: ")


def test_without_failures_results_are_not_read(runs, monkeypatch):
    runs(lambda: [jobs.add.enqueue(one) for one in range(20)], rounds=1)
    monkeypatch.setattr(always_failing, "ended", None)
    assert not found("failing", "retrying")
