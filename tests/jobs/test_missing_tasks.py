"""Jobs whose task a subscriber cannot run: what its heartbeat, the problems and the metrics say, and since when."""

from __future__ import annotations

import dataclasses
import json

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from prometheus_client import CollectorRegistry, generate_latest

from django_mysqlqueue import operations
from django_mysqlqueue.inspection import check_health, find_causes, find_problems, get_overview
from django_mysqlqueue.inspection.trends import read_rows
from django_mysqlqueue.metrics.process import ProcessMetrics, Source
from django_mysqlqueue.models import DeliveryState, JobResult, QueueMessage, SubscriberHeartbeat
from django_mysqlqueue.subscriptions.unknown_tasks import MOST
from django_mysqlqueue.tasks import exceptions, handlers
from tests.app import jobs
from tests.support import job_worlds
from tests.support.commands import run as command
from tests.support.harness import USING, Sub
from tests.support.internals import LONGEST_ERROR, NewResult, Session, UnknownTasks, job_rows, registry
from tests.support.job_worlds import JOBS
from tests.support.metrics import Samples, parsed

OLD = "tests.app.jobs.old"
"""The path of a task that no code has any more."""


@pytest.fixture(autouse=True)
def _backend(db, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    jobs.log.clear()


def process(name="a"):
    return Sub(registry.handlers()[JOBS], name=name)


def enqueued(number=1, path=OLD):
    results = [jobs.add.enqueue(one) for one in range(number)]
    JobResult.objects.filter(id__in=[one.id for one in results]).update(task_path=path)
    return results


def turn(*subs):
    """Each subscriber gets what waits, and shows at its next tick what it cannot run."""
    for sub in subs:
        DeliveryState.objects.update(invisible_until=0)
        sub.step()
        sub.work()
        sub.flush()
        sub.step()


def problems(overview=None):
    return [one for one in find_problems(overview) if one.kind == "missing_task"]


def at(seconds):
    """The state as it will be."""
    state = get_overview()
    return dataclasses.replace(state, now=state.now + round(seconds * 1000))


def test_a_bad_deploy_is_said_at_once_and_makes_the_queue_unhealthy_within_a_minute():
    enqueued(3)
    first, second = process(), process("b")
    turn(first)
    (problem,) = problems()
    assert (problem.severity, problem.ref, problem.messages.value) == (1, JOBS, 3)
    since = min(one.since for one in first.poller.groups[0].handler.unknown.tasks.values())
    assert problem.since == since
    assert problem.text.startswith(f"3 jobs of the task {OLD} wait: since 20")
    assert problem.text.endswith(
        ", 1 of 2 live subscribers of jobs/jobs.default cannot run it. Whether the others can is not known."
    )
    assert OLD in problem.error
    assert [one.severity for seconds in (25, 35) for one in problems(at(seconds))] == [1, 0]
    turn(second)
    (problem,) = problems(at(40))
    assert (problem.severity, problem.since) == (0, since)
    assert problem.text.endswith(", 2 of 2 live subscribers of jobs/jobs.default cannot run it. None of them can.")


def test_where_it_is_shown(clock):
    enqueued()
    turn(process())
    clock.advance(25)
    assert check_health().healthy
    clock.advance(10)
    SubscriberHeartbeat.objects.update(heartbeat_at=get_overview().now)
    report = check_health()
    (finding,) = report.findings
    assert (report.healthy, finding.kind, finding.ref) == (False, "missing_task", JOBS)
    assert f"1 job of the task {OLD} waits" in command("queuestatus", "--all")
    (cause,) = find_causes()
    assert (
        cause.advice
        == "Deploy the code that has the task, or cancel the jobs. An hour after their first claim, they fail."
    )
    state = get_overview()
    (row,) = read_rows(state, find_problems(state))
    assert (row.state.text, row.state.rank) == ("task missing", 0)


def test_while_other_subscribers_run_it_the_queue_is_healthy(monkeypatch):
    """As in a rollout."""
    earlier, later = process("earlier"), process("later")
    jobs.add.enqueue(1)
    with monkeypatch.context() as patch:
        patch.setattr(handlers, "find_task", lambda path: (_ for _ in ()).throw(ImportError(f"no {path}")))
        turn(earlier)
    turn(later)
    assert jobs.log == [(1, 1)]
    assert problems() == [], "nothing waits"
    jobs.add.enqueue(2)
    (problem,) = problems(at(3600))
    assert problem.severity == 1
    assert problem.text.endswith(
        f" 1 of 2 live subscribers of jobs/jobs.default cannot run it. Others have run it: {later.name}."
    )


def test_it_ends_when_the_jobs_end_or_the_subscriber_does():
    (result,) = enqueued()
    sub = process()
    turn(sub)
    assert len(problems()) == 1
    JobResult.objects.update(run_after=2**50)
    assert problems() == [], "it is not due"
    JobResult.objects.update(run_after=0)
    assert operations.cancel(JOBS.topic, [result.id], actor="ada").changed == 1
    assert problems() == []
    JobResult.objects.update(status="READY", finished_at=0)
    assert len(problems()) == 1
    SubscriberHeartbeat.objects.update(deregistered_at=1)
    assert problems() == []


def test_a_task_that_can_be_imported_later_is_shown_no_longer(monkeypatch):
    jobs.add.enqueue(1)
    sub = process()
    with monkeypatch.context() as patch:
        patch.setattr(handlers, "find_task", lambda path: (_ for _ in ()).throw(ImportError(f"no {path}")))
        turn(sub)
    assert "unknown" in SubscriberHeartbeat.objects.get().info
    turn(sub)
    assert jobs.log == [(1, 1)]
    assert "unknown" not in SubscriberHeartbeat.objects.get().info
    assert problems() == []


def test_jobs_of_each_task_and_queue_are_counted(settings):
    settings.TASKS = {"default": {**job_worlds.TASKS["default"], "QUEUES": ["default", "mail"]}}
    enqueued(2)
    enqueued(1, "tests.app.jobs.older")
    other = jobs.add.using(queue_name="mail").enqueue(1)
    JobResult.objects.filter(id=other.id).update(task_path=OLD)
    turn(process())
    assert [one.text.split(":")[0] for one in problems()] == [
        f"2 jobs of the task {OLD} wait",
        "1 job of the task tests.app.jobs.older waits",
    ]


def test_jobs_that_have_failed_since_are_no_problem_of_this_kind():
    enqueued()
    sub = process()
    turn(sub)
    JobResult.objects.update(started_at=1)
    QueueMessage.objects.update(published_at=1)
    turn(sub)
    row = JobResult.objects.get()
    assert json.loads(row.errors)["exception_class_path"] == f"{exceptions.__name__}.UnknownTask"
    assert problems() == []


def test_a_count_that_ends_at_its_bound_says_so(monkeypatch):
    enqueued(1)
    turn(process())
    job_rows.insert(
        Session(USING), [NewResult(f"x{number}", "default", "default", OLD, "{}", 0, 0, 1) for number in range(2600)]
    )
    (problem,) = problems()
    assert problem.text.startswith(f"2,500+ jobs of the task {OLD} wait")


def test_the_heartbeat_is_written_once_for_each_task_and_jobs_that_are_known_cost_nothing():
    sub = process()
    jobs.add.enqueue(1)
    turn(sub)
    with CaptureQueriesContext(connection) as queries:
        enqueued(2)
        turn(sub)
        turn(sub)
        jobs.add.enqueue(1)
        turn(sub)
    assert sum("JSON_SET(info, '$.unknown'" in one["sql"] for one in queries) == 1
    SubscriberHeartbeat.objects.update(info={})
    with CaptureQueriesContext(connection) as queries:
        assert problems() == []
    assert not any("worker_ids" in one["sql"] for one in queries)


def test_the_metrics_count_them():
    sub = process()
    registered = CollectorRegistry()
    metrics = ProcessMetrics([Source(USING, sub.handlers, sub.inbox)], registered)

    def count():
        found = Samples(parsed(generate_latest(registered).decode()))
        return found.value("process_unknown_task_total", topic=JOBS.topic, group=JOBS.group)

    assert count() == 0, "there from the start"
    enqueued(2)
    turn(sub, sub)
    assert count() == 4
    metrics.unregister()


def test_what_is_remembered_is_bounded():
    found = UnknownTasks()
    for number in range(MOST + 5):
        found.add(f"a.b{number}", 1, "x" * 1000)
        found.add(f"a.b{number}", 2, "y")
    assert (found.deliveries, len(found.tasks)) == (2 * (MOST + 5), MOST)
    assert found.tasks["a.b0"] == (1, "x" * LONGEST_ERROR)
    before = found.tasks
    found.discard("a.b1")
    found.discard("a.b1")
    assert (len(before), len(found.tasks)) == (MOST, MOST - 1)
