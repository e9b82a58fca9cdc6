"""Lists of jobs along their indexes, counts by status, and single jobs."""

from __future__ import annotations

import dataclasses
import json

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.inspection import Bounds, Count, count_jobs, get_job, jobs, list_jobs
from django_mysqlqueue.inspection.jobs import JobError
from django_mysqlqueue.models import JobResult
from tests.support import job_worlds
from tests.support.harness import USING, sequence
from tests.support.internals import Session
from tests.support.job_pages import NOW, ended, errors, job
from tests.support.recorded_statements import _reads

pytestmark = [pytest.mark.any_engine, pytest.mark.usefixtures("db")]


def ids(listing):
    return [one.id for one in listing.jobs]


def pages(**wanted):
    """All jobs, page by page, and how many pages were read."""
    found, number, after = [], 0, None
    while number == 0 or after is not None:
        page = list_jobs(after=after, **wanted)
        found += ids(page)
        after, number = page.after, number + 1
        assert number < 100
    return found, number


def test_all_jobs_by_the_time_of_enqueueing_merged_from_all_tasks():
    for number in range(12):
        job(f"j{number:02}", task_path=f"shop.tasks.t{number % 3}")
    expected = [f"j{number:02}" for number in reversed(range(12))]
    assert pages(limit=5) == (expected, 3)
    assert pages(limit=12) == (expected, 1)
    assert pages(limit=1) == (expected, 12)
    assert ids(list_jobs(task="shop.tasks.t1")) == ["j10", "j07", "j04", "j01"]
    assert pages(task="shop.tasks.t1", limit=2)[0] == ["j10", "j07", "j04", "j01"]
    assert ids(list_jobs(task="shop.tasks")) == []


def test_jobs_of_one_moment_are_listed_once_each():
    for number in range(7):
        job(f"j{number}", enqueued_at=NOW, task_path=f"t{number % 2}")
        ended(f"k{number}", enqueued_at=NOW)
    for limit in (1, 2, 3):
        assert pages(limit=limit)[0] == [f"{kind}{number}" for kind in "kj" for number in reversed(range(7))]
        assert pages(limit=limit, status="SUCCESSFUL")[0] == [f"k{number}" for number in reversed(range(7))]
        assert pages(limit=limit, status="READY")[0] == [f"j{number}" for number in reversed(range(7))]


def test_jobs_of_a_status_by_the_time_of_their_ends():
    for number, seconds in enumerate((50, 10, 30)):
        ended(f"j{number}", "FAILED", seconds=seconds)
    ended("other")
    job("waits3")
    assert ids(list_jobs(status="FAILED")) == ["j0", "j2", "j1"]
    assert pages(status="FAILED", limit=1)[0] == ["j0", "j2", "j1"]
    assert ids(list_jobs(status="READY")) == ["waits3"]
    assert ids(list_jobs(status="RUNNING")) == []


def test_a_range_of_times_is_of_enqueueing_or_of_ends():
    for number in range(5):
        ended(f"j{number}", seconds=100)
        job(f"w{number}")
    end = NOW + 101_000
    assert ids(list_jobs(since=NOW + 1000, until=NOW + 2000)) == ["w2", "j2", "w1", "j1"]
    assert ids(list_jobs(since=NOW + 4000)) == ["w4", "j4"]
    assert ids(list_jobs(until=NOW)) == ["w0", "j0"]
    assert ids(list_jobs(status="SUCCESSFUL", since=NOW + 1000, until=NOW + 2000)) == []
    assert ids(list_jobs(status="SUCCESSFUL", since=end + 1000, until=end + 2000)) == ["j2", "j1"]
    assert ids(list_jobs(status="READY", since=NOW + 1000, until=NOW + 2000)) == ["w2", "w1"]
    assert pages(since=NOW + 1000, until=NOW + 3000, limit=1)[0] == ["w3", "j3", "w2", "j2", "w1", "j1"]
    # A page that began before the range was changed.
    assert ids(list_jobs(until=NOW, after=(NOW + 4000, "j4"))) == ["w0", "j0"]


@pytest.mark.parametrize("limit", [1, 3, 10])
def test_conditions_that_no_index_has_are_searched_in_pieces(limit):
    for number in range(30):
        queue = "mail" if number % 7 == 0 else "default"
        ended(f"j{number:02}", queue_name=queue, task_path=f"t{number % 3}", seconds=1)
    few = Bounds(jobs=9)
    of_mail = ["j28", "j21", "j14", "j07", "j00"]
    assert pages(topic="jobs.mail", limit=limit, bounds=few)[0] == of_mail
    assert pages(topic="jobs.mail_dlq", limit=limit, bounds=few)[0] == of_mail
    assert pages(status="SUCCESSFUL", topic="jobs.mail", limit=limit, bounds=few)[0] == of_mail
    assert pages(status="SUCCESSFUL", topic="jobs.mail", task="t1", limit=limit, bounds=few)[0] == ["j28", "j07"]
    assert pages(task="t1", topic="jobs.mail", limit=limit, bounds=few)[0] == ["j28", "j07"]
    page = list_jobs(task="t0", topic="jobs.none", limit=1, bounds=Bounds(jobs=4))
    assert (page.jobs, page.whole) == ((), False)
    assert page.after is not None
    assert pages(topic="mail")[0] == []


def test_jobs_of_too_many_tasks():
    for number in range(4):
        job(f"j{number}", task_path=f"t{number}")
    page = list_jobs(bounds=Bounds(job_tasks=3))
    assert (ids(page), page.all_tasks) == (["j2", "j1", "j0"], False)
    assert list_jobs(bounds=Bounds(job_tasks=4)).all_tasks
    assert list_jobs(status="READY", bounds=Bounds(job_tasks=1)).all_tasks
    assert jobs.tasks(Session(USING), bounds=Bounds(job_tasks=2)) == ["t0", "t1", "t2"]


def test_counts_stop():
    for number in range(3):
        ended(f"f{number}", "FAILED")
    job("r")
    assert count_jobs() == {
        "READY": Count(1),
        "RUNNING": Count(0),
        "FAILED": Count(3),
        "SUCCESSFUL": Count(0),
    }
    counts = count_jobs(bounds=Bounds(count=2))
    assert (str(counts["FAILED"]), str(counts["READY"])) == ("2+", "1")


def test_a_listing_sends_no_more_statements_for_more_jobs():
    def number():
        with CaptureQueriesContext(connection) as captured:
            list_jobs(), list_jobs(status="READY"), list_jobs(topic="jobs.default"), count_jobs()
        return len(captured)

    for one in range(3):
        job(f"j{one}", task_path=f"t{one % 2}")
    before = number()
    for one in range(3, 200):
        job(f"j{one}", task_path=f"t{one % 2}")
    assert number() == before


@pytest.mark.promise("Cost")
@pytest.mark.servers_only
def test_a_page_reads_no_more_rows_of_many_jobs():
    """Wherever it begins, whatever it searches."""
    statuses = ("READY", "SUCCESSFUL", "FAILED")
    JobResult.objects.bulk_create(
        (
            JobResult(
                id=f"j{number:05}",
                backend="default",
                queue_name="default",
                task_path=f"t{number % 5}",
                arguments="{}",
                status=statuses[number % 3],
                enqueued_at=NOW + number,
                finished_at=NOW + number if number % 3 else 0,
            )
            for number in range(12_000)
        ),
        batch_size=2000,
    )
    few, wanted = Bounds(jobs=300, count=300), [{}, {"task": "t1"}, *({"status": status} for status in statuses)]
    for conditions in ({}, {"topic": "jobs.none"}):
        for one in wanted:
            for number in (11_999, 300):
                after = (0 if one == {"status": "READY"} else NOW + number, f"j{number:05}")
                reads = _reads()
                page = list_jobs(after=after, limit=20, bounds=few, **one, **conditions)
                assert len(page.jobs) == (0 if conditions else 20)
                assert conditions or page.after is not None
                assert _reads() - reads < 400, (one, conditions, number)
    reads = _reads()
    assert {str(count) for status, count in count_jobs(bounds=few).items() if status != "RUNNING"} == {"300+"}
    assert _reads() - reads < 1000


def test_what_a_job_in_a_list_says():
    made = ended("j1", "FAILED", seconds=20, priority=7, run_after=NOW + 1500, worker_ids="a\nb\n")
    (found,) = list_jobs(status="FAILED").jobs
    for column in ("id", "backend", "priority", "run_after", "status", "enqueued_at", "started_at", "finished_at"):
        assert getattr(found, column) == getattr(made, column), column
    assert (found.task, found.queue, found.topic) == ("shop.tasks.mail", "default", "jobs.default")
    assert (found.attempts, found.has_ended, found.took_ms, found.waited_ms) == (2, True, 20_000, 500)
    waits = dataclasses.replace(found, status="READY", started_at=0, finished_at=0)
    assert (waits.has_ended, waits.took_ms, waits.waited_ms) == (False, None, None)
    assert dataclasses.replace(found, last_attempted_at=0).took_ms is None, "it has ended without a call"
    attempted_at = found.last_attempted_at
    assert dataclasses.replace(found, retry_at=attempted_at).took_ms == 20_000
    assert dataclasses.replace(found, retry_at=attempted_at + 1).took_ms is None, "it has ended in a wait"


def test_a_job_with_everything():
    ended("j1", errors=errors("no\nway", "é"), return_value='{"a": "é"}', worker_ids="a\nb\n", queue_name="mail")
    found = get_job("j1")
    assert found == get_job("j1", topic="jobs.mail")
    assert get_job("j1", topic="jobs.default") is None
    assert get_job("j1", topic="mail") is None
    assert get_job("j") is None
    assert found.summary == list_jobs().jobs[0]
    assert json.loads(found.arguments) == {"args": [1], "kwargs": {}}
    assert (found.return_value, found.return_value_size) == ('{"a": "é"}', 11)
    assert [one.exception_class_path for one in found.errors] == ["builtins.ValueError"] * 2
    assert found.errors[0].traceback.endswith("ValueError: no\nway\n")
    assert (found.error_count, found.subscribers) == (2, ("a", "b"))


def test_of_long_texts_the_beginning_and_of_many_errors_the_last(monkeypatch):
    lines = errors(*map(str, range(50)))
    ended("j1", arguments='"' + "é" * 1000 + '"', errors=lines, worker_ids="host\n" * 30)
    found = jobs.read(Session(USING), "j1", most=100)
    assert found.arguments == '"' + "é" * 99
    assert found.arguments_size == (2002 if connection.vendor == "mysql" else 1002)
    monkeypatch.setattr(jobs, "ERRORS_READ", len(lines) // 2)
    monkeypatch.setattr(jobs, "SUBSCRIBERS_READ", 12)
    found = jobs.read(Session(USING), "j1", most=100)
    assert (found.error_count, found.summary.attempts) == (50, 30)
    assert [one.traceback.split()[-1] for one in found.errors] == [str(n) for n in range(50 - len(found.errors), 50)]
    assert 20 < len(found.errors) < 26
    assert found.subscribers == ("host", "host")


@pytest.mark.parametrize("line", ["no json", "[1]", "{}", '{"more": 1}', "5"])
def test_errors_that_somebody_has_written(line):
    ended("j1", errors=f"{line}\n")
    assert get_job("j1").errors == (JobError("", line),)


def test_the_message_of_a_job():
    job_worlds.enqueued("a", "b")
    session = Session(USING)
    one = jobs.summaries(session, ["a"])["a"]
    with job_worlds.configured():
        offset = jobs.message_offset(session, one)
        assert jobs.message_offset(session, dataclasses.replace(one, id="none")) is None
        publish_many("jobs.default", [Message("b", job_worlds.PATH, "d", priority=5)])
        sequence()
        urgent = jobs.message_offset(session, dataclasses.replace(one, id="d", priority=5))
    assert None not in (offset, urgent)
    assert offset < urgent


def test_a_result_that_is_gone_between_two_statements(monkeypatch):
    job("j1"), job("j2")
    found = jobs.tasks

    def delete(*args, **options):
        JobResult.objects.filter(id="j2").delete()
        return found(*args, **options)

    places = jobs._places
    monkeypatch.setattr(jobs, "_places", lambda *args: (places(*args), delete(Session(USING)))[0])
    assert ids(list_jobs()) == ["j1"]


def test_jobs_that_wait_for_their_next_attempts_the_next_one_first():
    now = Session(USING).now()
    for number, seconds in enumerate((300, 100, 200, -100)):
        job(f"w{number}", retry_at=now + seconds * 1000, retry_reason=f"in {seconds} s")
    job("ready")
    job("runs", status="RUNNING", retry_at=now + 50_000)
    found = jobs.waiting(Session(USING), limit=2)
    assert [(one.id, one.retry_reason, one.retry_at - now) for one in found] == [
        ("w1", "in 100 s", 100_000),
        ("w2", "in 200 s", 200_000),
    ]
    assert [one.id for one in jobs.waiting(Session(USING), limit=9, bounds=Bounds(jobs=2))] == ["w0"]
    assert found[0].waits_at(now)
    assert not found[0].waits_at(now + 100_000)
    assert get_job("w1").summary == found[0]
