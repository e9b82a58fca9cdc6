"""Tasks in a list: their jobs that wait, and those of the last hour and day."""

from __future__ import annotations

import io
import json

import pytest
from django.core.management import call_command
from prometheus_client import CollectorRegistry, generate_latest

from django_mysqlqueue import operations
from django_mysqlqueue.inspection import summarize_tasks
from django_mysqlqueue.inspection.bounds import Bounds
from django_mysqlqueue.inspection.tasks import DAY_MS, HOUR_MS, error_line
from django_mysqlqueue.metrics import labels
from django_mysqlqueue.metrics.queue import QueueCollector
from django_mysqlqueue.models import JobResult
from django_mysqlqueue.options import job_queues
from django_mysqlqueue.service import job_rows
from django_mysqlqueue.testing import deliver_all
from tests.app import jobs
from tests.support import job_worlds
from tests.support.harness import USING, Sub
from tests.support.internals import Session, groups, registry
from tests.support.job_pages import ended, errors, job
from tests.support.metrics import Samples, parsed

SLOW = "tests.app.jobs.fail_slowly"
MAIL, CHARGE = "shop.tasks.mail", "shop.tasks.charge"


@pytest.fixture
def now(db, clock, settings):
    settings.TASKS = job_worlds.TASKS
    clock.stop()
    return Session(USING).now()


def told(task=MAIL, **options):
    (one,) = [one for one in summarize_tasks(using=USING, **options).tasks if one.task == task]
    return one


def test_what_has_not_ended(now):
    for number in range(3):
        job(f"w{number}", enqueued_at=now)
    job("later", enqueued_at=now, run_after=now + 5000)
    job("again", enqueued_at=now, retry_at=now + 5000)
    job("due", enqueued_at=now, retry_at=now)
    job("r1", enqueued_at=now, status="RUNNING", task_path=CHARGE)
    ended("done", enqueued_at=now - 5000)
    mail, charge = told().backlog, told(CHARGE).backlog
    assert (str(mail.waiting), str(mail.scheduled), str(mail.running)) == ("4", "2", "0")
    assert (str(charge.waiting), str(charge.scheduled), str(charge.running)) == ("0", "0", "1")
    mail = told(bounds=Bounds(count=2)).backlog
    assert not mail.waiting.exact, "of all tasks together, only two were read"


@pytest.mark.parametrize(
    ("ago", "hour", "day"), [(HOUR_MS - 1, 1, 1), (HOUR_MS, 0, 1), (DAY_MS - 1, 0, 1), (DAY_MS, 0, 0)]
)
def test_the_last_hour_and_day(now, ago, hour, day):
    ended("j", enqueued_at=now - ago, seconds=2)
    one = told()
    assert (one.hour.enqueued.value, one.day.enqueued.value) == (hour, day)
    assert (one.hour.ran, one.day.ran) == ((2.0, 2.0) if hour else None, (2.0, 2.0) if day else None)


def test_half_and_ninety_five_of_a_hundred(now):
    for number in range(1, 101):
        ended(f"j{number}", enqueued_at=now - 10**6, seconds=number)
    assert told().hour.ran == (50.0, 95.0)
    assert told().hour.waited == (1.0, 1.0)


def test_the_wait_of_a_cancelled_job_is_no_run(now, no_handlers, clock):
    jobs.fail_slowly.enqueue()
    sub = Sub(registry.handlers()[job_worlds.JOBS])
    sub.settle()
    clock.advance(30)
    assert operations.cancel(job_worlds.JOBS.topic, task=SLOW, actor="ada").changed == 1
    assert (told(SLOW).hour.ran, told(SLOW).hour.failed.value) == (None, 1)
    jobs.fail_slowly.enqueue()
    sub.settle()
    clock.advance(61)
    sub.settle()
    assert (told(SLOW).hour.ran, told(SLOW).hour.failed.value) == ((0.0, 0.0), 2)


def test_a_job_waits_from_when_it_is_due(now):
    ended("j", enqueued_at=now - 60_000)
    JobResult.objects.update(run_after=now - 40_000, started_at=now - 30_000)
    assert told().hour.waited == (10.0, 10.0)


def test_failures_and_the_last_error(now):
    for number, ago in enumerate((3 * HOUR_MS, 2 * HOUR_MS, 60_000)):
        ended(f"f{number}", "FAILED", enqueued_at=now - ago, errors=errors("first", f"no {number}"), queue_name="mail")
    ended("other", "FAILED", enqueued_at=now - 60_000, task_path=CHARGE, errors="")
    one = told()
    assert (str(one.hour.failed), str(one.day.failed)) == ("1", "3")
    assert (one.failed_job, one.failed_topic, one.error) == ("f2", "jobs.mail", "ValueError: no 2")
    assert one.failed_at == JobResult.objects.get(id="f2").finished_at
    assert (told(CHARGE).error, told(CHARGE).failed_job) == ("", "other")
    one = told(bounds=Bounds(jobs=3))
    assert (str(one.hour.failed), str(one.day.failed)) == ("1", "2+"), "of both tasks, the newest three were read"


def test_counts_and_times_are_of_as_many_jobs_as_the_bounds_allow(now):
    for number in range(6):
        ended(f"j{number}", enqueued_at=now - 60_000 + number, seconds=number + 1)
    one = told(bounds=Bounds(task_count=8, task_jobs=2))
    assert (str(one.hour.enqueued), str(one.day.enqueued)) == ("4+", "4+")
    assert one.hour.ran == (5.0, 6.0), "the newest two"


def test_more_tasks_than_the_bound(now):
    for number in range(3):
        job(f"w{number}", task_path=f"t{number}")
    found = summarize_tasks(using=USING, bounds=Bounds(job_tasks=2))
    assert ([one.task for one in found.tasks], found.whole) == (["t0", "t1"], False)
    assert summarize_tasks(using=USING).whole


def test_without_jobs(now):
    found = summarize_tasks(using=USING)
    assert (found.tasks, found.whole, found.now) == ((), True, now)


@pytest.mark.parametrize(
    ("traceback", "line"),
    [
        ("Traceback\n  File\nValueError: no 5\n", "ValueError: no 5"),
        ("one line", "one line"),
        ("", ""),
        ('Traceback\nValueError: a\\nb "traceback": "c"\n', 'ValueError: a\\nb "traceback": "c"'),
        ("Traceback\nValueError: \\\n", "ValueError: \\"),
        ("Traceback\nValueError: \u00e9\n\n", "ValueError: \u00e9"),
        ("Traceback\nValueError: \\\\nn\n", "ValueError: \\\\nn"),
    ],
)
@pytest.mark.any_engine
def test_the_last_line_of_an_error(traceback, line):
    column = job_rows.error_line("x.Earlier", "a\nb\n") + job_rows.error_line("x.Error", traceback)
    assert error_line(column) == (line, False)
    assert error_line(column[-200:]) == (line, False)


@pytest.mark.any_engine
def test_the_last_line_of_an_error_that_is_cut_or_none():
    column = job_rows.error_line("x.Error", f"Traceback\n{'x' * 50}é\\\n")
    text, is_cut = error_line(column[-20:])
    assert text.endswith("xé\\")
    assert is_cut
    assert error_line("") == ("", False)
    assert error_line("plain SQL\n") == ("plain SQL", True)


# -- what shows it ------------------------------------------------------------


def status(**options):
    output = io.StringIO()
    call_command("queuestatus", stdout=output, **options)
    return output.getvalue()


def test_queuestatus(now):
    for number in range(2):
        ended(f"j{number}", enqueued_at=now - 60_000, seconds=number + 1)
    ended("f", "FAILED", enqueued_at=now - 60_000, seconds=1, errors=errors("no stock"))
    job("w", enqueued_at=now)
    job_worlds.enqueued("a")
    found = json.loads(status(format="json"))["tasks"]
    (mail,) = [one for one in found if one["task"] == MAIL]
    assert mail == {
        "task": MAIL,
        "waiting": 1,
        "scheduled": 0,
        "running": 0,
        "hour": {"enqueued": 4, "failed": 1, "waited": {"p50": 1.0, "p95": 1.0}, "ran": {"p50": 1.0, "p95": 2.0}},
        "day": {"enqueued": 4, "failed": 1, "waited": {"p50": 1.0, "p95": 1.0}, "ran": {"p50": 1.0, "p95": 2.0}},
        "failed_at": JobResult.objects.get(id="f").finished_at,
        "error": "ValueError: no stock",
    }
    (line,) = [line for line in status(all=True).splitlines() if line.strip().startswith(MAIL)]
    assert line.split() == f"{MAIL} 1 0 0 4 1 1 s, 1 s 1 s, 2 s ValueError: no stock".split()


def collected():
    registry = CollectorRegistry()
    registry.register(QueueCollector())
    return Samples(parsed(generate_latest(registry).decode()))


def test_the_metric_of_jobs(now, monkeypatch):
    monkeypatch.setattr(job_queues, "declared", {MAIL: None, CHARGE: None, "shop.tasks.rare": None})
    monkeypatch.setattr(labels, "TASKS", 2)
    groups.register(USING, job_worlds.JOBS, mode="shared", start="earliest")
    for number in range(3):
        job(f"w{number}")
    job("r", status="RUNNING")
    job("rare", task_path="shop.tasks.rare", run_after=now + 5000)
    job("unknown", task_path="shop.tasks.unknown", run_after=now + 5000)
    found = collected()
    assert found.value("jobs", task=MAIL, state="waiting") == 3
    assert found.value("jobs", task=MAIL, state="running") == 1
    assert found.value("jobs", task="other", state="scheduled") == 2
    assert {dict(labels)["task"] for name, labels in found if name == "mysqlqueue_jobs"} == {MAIL, "other"}


def test_without_a_queue_of_jobs_there_is_no_such_metric(now):
    job("w")
    assert not [name for name, _ in collected() if name == "mysqlqueue_jobs"]


def test_jobs_as_they_run(now, no_handlers):
    """What the results of real jobs say."""

    jobs.add.enqueue(1)
    jobs.fail.enqueue()
    deliver_all(raise_exceptions=False)
    add, fail = told("tests.app.jobs.add"), told("tests.app.jobs.fail")
    assert (str(add.hour.enqueued), str(add.hour.failed), str(add.backlog.waiting)) == ("1", "0", "0")
    assert (str(fail.hour.enqueued), str(fail.hour.failed)) == ("1", "1")
    assert fail.error == "ValueError: no 0"
    assert add.hour.ran is not None
    assert add.hour.waited is not None
