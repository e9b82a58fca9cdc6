"""Jobs in real processes, which are killed."""

from __future__ import annotations

import itertools
import json
import random
import signal
import time
from collections import Counter

import pytest
from django.db.models import Max, Min

from django_mysqlqueue import operations
from django_mysqlqueue.models import JobResult, QueueMessage
from django_mysqlqueue.tasks import call, cancel_job, enqueue_chain, enqueue_many, exceptions, progress_of, wait
from django_mysqlqueue.tasks.framework import TaskResultStatus, task_backends
from tests.app import jobs
from tests.app.models import Effect
from tests.support import job_worlds
from tests.support.harness import Sub
from tests.support.internals import registry
from tests.support.processes import Worker, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.promise("Jobs")]

ENV = {"TEST_TASKS": json.dumps(job_worlds.TASKS)}
UNLIMITED = {"TEST_TASKS": json.dumps({"default": job_worlds.TASKS["default"] | {"OPTIONS": {"MAX_ATTEMPTS": None}}})}
"""For jobs whose processes are killed again and again."""


@pytest.fixture
def start(db, no_handlers, tmp_path, settings):
    settings.TASKS = job_worlds.TASKS
    workers = []

    def start(*arguments, env=ENV, **options):
        workers.append(Worker(tmp_path, "--group", "jobs", *arguments, env=env, VISIBILITY_TIMEOUT=2, **options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.end()


def test_processes_are_killed_while_jobs_run(start):
    """Each job ends SUCCESSFUL; an atomic one has left its write once, the others at least once."""
    backend = task_backends["default"]
    atomic, plain = range(1000, 1200), range(2000, 2200)
    backend.enqueue_many([(jobs.write, [number], {}) for number in atomic])
    backend.enqueue_many([(jobs.plain, [number], {}) for number in plain])
    rows = JobResult.objects.filter(status="SUCCESSFUL")
    workers = [start(env=UNLIMITED), start(env=UNLIMITED)]
    for done in range(40, 400, 60):
        wait_for(lambda done=done: rows.count() >= done, workers[0], timeout=60)
        place = random.randrange(2)
        workers[place].send(signal.SIGKILL)
        workers[place].wait()
        workers[place] = start(env=UNLIMITED)
        wait_for(workers[place].is_ready, workers[place])
    wait_for(lambda: rows.count() == 400, workers[0], timeout=60)
    times = Counter(Effect.objects.values_list("value", flat=True))
    assert {number: times[number] for number in atomic} == dict.fromkeys(atomic, 1)
    assert all(times[number] >= 1 for number in plain)
    assert {json.loads(row.return_value) for row in rows} == {*atomic, *plain}
    lost = [row for row in rows if row.errors]
    assert all(
        json.loads(line)["exception_class_path"] == f"{exceptions.__name__}.WorkerLost"
        for row in lost
        for line in row.errors.splitlines()
    )
    assert all(len(row.worker_ids.splitlines()) == 1 + len(row.errors.splitlines()) for row in rows)


def test_processes_that_are_killed_do_not_run_a_paused_task(start):
    """Nothing of it runs until it is resumed, whatever becomes of the processes, and nothing is lost."""
    Sub(registry.handlers()[job_worlds.JOBS]).leave()
    path = jobs.plain.module_path
    operations.pause(*job_worlds.JOBS, task=path, actor="ada")
    enqueue_many([call(jobs.plain, -number) for number in range(1, 31)])
    enqueue_many([call(jobs.write, number) for number in range(200)])
    held, others = Effect.objects.filter(value__lt=0), Effect.objects.filter(value__gte=0)
    for enough in (20, 60, 120):
        worker = start(env=UNLIMITED)
        wait_for(lambda enough=enough: others.count() >= enough, worker, timeout=60)
        worker.send(random.choice([signal.SIGKILL, signal.SIGTERM]))
        worker.wait()
    worker = start(env=UNLIMITED)
    wait_for(lambda: others.count() == 200, worker, timeout=60)
    drained = start("--drain", env=UNLIMITED)
    assert drained.wait(60) == 0, drained.output
    assert not held.exists()
    operations.resume(*job_worlds.JOBS, task=path, actor="ada")
    wait_for(lambda: not JobResult.objects.exclude(status="SUCCESSFUL").exists(), worker, timeout=60)
    assert set(held.values_list("value", flat=True)) == {*range(-30, 0)}


def test_a_process_is_killed_while_a_hundred_async_jobs_run(start, tmp_path):
    """Each ends in the next process, and its result tells of the loss."""
    go = tmp_path / "go"
    first = start("--threads", "2", env=UNLIMITED)
    imported = jobs.plain.enqueue(1)  # what is claimed before runs in threads
    wait_for(lambda: imported.refresh() or imported.is_finished, first)
    JobResult.objects.all().delete()
    task_backends["default"].enqueue_many([(jobs.await_file, [str(go)], {})] * 150)
    # ``progress`` of the call: a claim alone makes a job RUNNING.
    wait_for(lambda: JobResult.objects.exclude(progress="").count() == 100, first, timeout=60)
    first.send(signal.SIGKILL)
    first.wait()
    go.touch()
    second = start("--threads", "2", env=UNLIMITED)
    rows = JobResult.objects.filter(status="SUCCESSFUL")
    wait_for(lambda: rows.count() == 150, second, timeout=60)
    errors = [json.loads(line) for row in rows for line in row.errors.splitlines()]
    assert {error["exception_class_path"] for error in errors} == {f"{exceptions.__name__}.WorkerLost"}
    assert len(errors) >= 100
    assert all(len(row.errors.splitlines()) <= 1 for row in rows)


def test_a_job_that_kills_its_process(start):
    """After as many losses as it may have attempts it has FAILED, and says why; the others end."""
    poison, other = jobs.die_twice.enqueue(), jobs.add.enqueue(1)
    codes = []
    deadline = time.monotonic() + 60
    while poison.status != TaskResultStatus.FAILED and time.monotonic() < deadline:
        codes.append(start("--drain", "--threads", "1", MAX_ATTEMPTS=5).wait(30))
        poison.refresh()
    assert codes == [-signal.SIGKILL] * 3 + [0]  # The first loss is free.
    assert poison.errors[-1].exception_class is exceptions.WorkerLost
    other.refresh()
    assert other.status == TaskResultStatus.SUCCESSFUL
    start("--drain").wait(30)
    assert QueueMessage.objects.filter(topic="jobs.default_dlq").count() == 1


def test_a_stopping_process_returns_what_it_has_not_started(start):
    results = [jobs.nap.enqueue(0.3) for _ in range(20)]
    worker = start("--threads", "1")
    wait_for(lambda: JobResult.objects.filter(status="SUCCESSFUL").count() >= 2, worker)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.output
    found = Counter(JobResult.objects.values_list("status", flat=True))
    assert set(found) == {"READY", "SUCCESSFUL"}
    assert start("--drain").wait(60) == 0
    for result in results:
        result.refresh()
        assert (result.status, result.errors, len(result.worker_ids)) == (TaskResultStatus.SUCCESSFUL, [], 1)


def test_the_log_names_the_tasks_of_jobs_that_are_cut_off(start):
    jobs.nap.enqueue(60)
    worker = start("--threads", "1", SHUTDOWN_TIMEOUT=0.5)
    wait_for(lambda: JobResult.objects.filter(status="RUNNING").exists(), worker, timeout=60)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 1
    (line,) = [one for one in worker.output.splitlines() if "handlers.abandoned" in one]
    assert "handlers=1 tasks=tests.app.jobs.nap" in line


def test_a_long_job_keeps_its_work_when_its_process_stops(start, tmp_path):
    """It learns of SIGTERM, commits what it has done, and continues in the next process; no attempt is counted."""
    started, ends = tmp_path / "started", tmp_path / "ends"
    result = jobs.until_stopped.enqueue(str(started), str(ends))
    worker = start("--threads", "1")
    wait_for(started.exists, worker, timeout=60)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.output
    result.refresh()
    assert (result.status, result.errors, result.attempts) == (TaskResultStatus.READY, [], 0)
    assert JobResult.objects.get().retry_reason == "the process stops"
    assert Effect.objects.count() == 1
    ends.touch()
    assert start("--drain").wait(60) == 0
    result.refresh()
    assert (result.status, result.attempts) == (TaskResultStatus.SUCCESSFUL, 1)
    assert Effect.objects.count() == 2


def test_chains_while_processes_are_killed(start):
    """Each job of each stage runs, and no stage begins before the one before it has ended."""
    chains = [
        enqueue_chain(
            [call(jobs.write, 1000 * chain + number) for number in range(10)],
            [call(jobs.write, 1000 * chain + 100 + number) for number in range(5)],
            call(jobs.plain, 1000 * chain + 200),
        )
        for chain in range(1, 11)
    ]
    rows = JobResult.objects.filter(status="SUCCESSFUL")
    workers = [start(env=UNLIMITED), start(env=UNLIMITED)]
    for done in range(20, 140, 30):
        wait_for(lambda done=done: rows.count() >= done, workers[0], timeout=60)
        place = random.randrange(2)
        workers[place].send(signal.SIGKILL)
        workers[place].wait()
        workers[place] = start(env=UNLIMITED)
        wait_for(workers[place].is_ready, workers[place])
    wait_for(lambda: rows.count() == 160, workers[0], timeout=60)
    times = Counter(Effect.objects.values_list("value", flat=True))
    for place, stages in enumerate(chains, 1):
        atomic = [*range(1000 * place, 1000 * place + 10), *range(1000 * place + 100, 1000 * place + 105)]
        assert {number: times[number] for number in atomic} == dict.fromkeys(atomic, 1)
        assert times[1000 * place + 200] >= 1
        ended = [JobResult.objects.filter(id__in=[one.id for one in stage]) for stage in stages]
        for earlier, later in itertools.pairwise(ended):
            first = later.aggregate(at=Min("started_at"))["at"]
            assert earlier.aggregate(at=Max("finished_at"))["at"] <= first
    messages = Counter(QueueMessage.objects.values_list("message_id", flat=True))
    assert set(messages.values()) == {1}


def test_progress_and_a_request_to_stop(start):
    """They reach a job in another process, and another process."""
    result = jobs.count_to.enqueue(10_000)
    worker = start()
    wait_for(lambda: progress_of(result) is not None, worker, timeout=30)
    first = progress_of(result)
    wait_for(lambda: progress_of(result).done > first.done, worker, timeout=30)
    result.refresh()
    assert (result.status, result.last_attempted_at) == (TaskResultStatus.RUNNING, result.started_at)
    cancel_job(result)
    wait(result, timeout=30)
    assert result.errors[-1].exception_class is exceptions.JobCancelled
    assert progress_of(result).done >= first.done
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
