"""Schedules in real processes, which are killed: each tick runs once."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter

import pytest

from django_mysqlqueue.models import JobResult, Operation, OutboxMessage, QueueMessage, Schedule
from tests.app.models import Effect
from tests.support import job_worlds
from tests.support.commands import run as command
from tests.support.internals import schedules, tick_of
from tests.support.processes import Worker, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.promise("Recurring schedules")]

ENV = {"TEST_TASKS": json.dumps(job_worlds.TASKS)}
RECURRING = {
    "job": {"EVERY": 1, "TASK": "tests.app.jobs.write", "ARGS": [5], "CATCH_UP": "all"},
    "message": {"EVERY": 1, "TOPIC": "ticks", "PAYLOAD": 1, "CATCH_UP": "all"},
    "newest": {"EVERY": 1, "TASK": "tests.app.jobs.add", "ARGS": [1]},
    "nap": {"EVERY": 1, "TASK": "tests.app.jobs.nap", "ARGS": [2.5], "OVERLAP": "skip"},
}


@pytest.fixture
def start(db, no_handlers, tmp_path, settings):
    settings.TASKS = job_worlds.TASKS
    workers = []

    def start(*arguments, recurring=RECURRING, **options):
        workers.append(Worker(tmp_path, *arguments, env=ENV, VISIBILITY_TIMEOUT=2, RECURRING=recurring, **options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.end()


def ticks(name):
    """The ticks of the messages of a schedule, in outbox and log, each as often as it is there.

    The outbox is read first: a message that the sequencer moves meanwhile is in one of them.
    """
    found = Counter()
    for model in (OutboxMessage, QueueMessage):
        ids = model._default_manager.filter(message_id__startswith=f"recurring:{name}:")
        found.update(tick_of(one) for one in ids.values_list("message_id", flat=True))
    return found


def test_processes_are_killed_while_they_tick(start):
    """Each tick is there once, none is missing, and each atomic job has left its write once."""
    workers = [start(MAX_ATTEMPTS=None) for _ in range(3)]
    wait_for(lambda: Schedule.objects.count() == 4, workers[0])
    began = dict(Schedule.objects.values_list("name", "last_tick"))
    for number in range(6):
        time.sleep(random.uniform(0.3, 1.5))
        place = number % 3
        workers[place].send(signal.SIGKILL)
        workers[place].wait()
        workers[place] = start(MAX_ATTEMPTS=None)
        wait_for(workers[place].is_ready, workers[place])
    wait_for(lambda: len(ticks("job")) > 12, workers[0], timeout=60)
    for worker in workers:
        worker.send(signal.SIGTERM)
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    rows = {row.name: row for row in Schedule.objects.all()}
    for name in ("job", "message"):
        found = ticks(name)
        assert set(found.values()) == {1}
        assert max(found) == rows[name].last_tick == rows[name].last_run
        # Without a gap, and without drift.
        first = min(found)
        assert sorted(found) == list(range(first, rows[name].last_tick + 1, 1000))
        assert (first - began[name]) % 1000 == 0
    assert set(ticks("newest").values()) == {1}
    assert all((one - began["newest"]) % 1000 == 0 for one in ticks("newest"))
    # No two naps at a time, except that a killed process leaves one to another.
    assert set(ticks("nap").values()) == {1}
    assert rows["nap"].skipped >= len(ticks("nap"))
    assert {tick_of(one) for one in JobResult.objects.values_list("id", flat=True)} == {
        *ticks("job"),
        *ticks("newest"),
        *ticks("nap"),
    }
    start("--drain", recurring={}, MAX_ATTEMPTS=None).wait(60)
    results = JobResult.objects.filter(id__startswith="recurring:job:")
    assert set(results.values_list("status", flat=True)) == {"SUCCESSFUL"}
    assert Effect.objects.filter(name="jobs", value=5).count() == results.count() == len(ticks("job"))


def test_a_process_ticks_whatever_it_selects_and_none_while_it_drains(start):
    worker = start("--group", "jobs", recurring={"message": RECURRING["message"]})
    wait_for(lambda: len(ticks("message")) >= 2, worker)
    worker.send(signal.SIGTERM)
    began = time.monotonic()
    assert worker.wait() == 0
    assert time.monotonic() - began < 5
    before = len(ticks("message"))
    drained = start("--drain", recurring={"message": RECURRING["message"], "new": RECURRING["message"]})
    assert drained.wait() == 0
    assert len(ticks("message")) == before
    assert not Schedule.objects.filter(name="new").exists()
    eager = start(recurring={"new": RECURRING["message"]}, EAGER=True)
    wait_for(eager.is_ready, eager)
    time.sleep(1.2)
    assert not Schedule.objects.filter(name="new").exists()


def test_the_processes_of_a_supervisor(start):
    supervisor = start("--processes", "2", recurring={"message": RECURRING["message"]})
    wait_for(lambda: len(ticks("message")) >= 3, supervisor)
    supervisor.send(signal.SIGTERM)
    assert supervisor.wait() == 0
    found = ticks("message")
    assert sorted(found) == list(range(min(found), max(found) + 1, 1000))
    assert set(found.values()) == {1}


def test_a_process_with_earlier_code_ticks_by_the_row(start):
    """Whoever starts last registers; those that run go on with what is registered."""
    earlier = start(recurring={"s": {"EVERY": 1, "TOPIC": "ticks", "PAYLOAD": "earlier"}})
    wait_for(lambda: len(ticks("s")) >= 1, earlier)
    later = start(recurring={"s": {"EVERY": 2, "TOPIC": "ticks", "PAYLOAD": "later"}})
    wait_for(later.is_ready, later)
    changed_at = Schedule.objects.get().registered_at
    later.send(signal.SIGKILL)
    wait_for(lambda: Schedule.objects.get().last_run > changed_at + 2000, earlier)
    earlier.send(signal.SIGTERM)
    assert earlier.wait() == 0
    after = [one for one in ticks("s") if one > changed_at]
    assert all(
        row.payload == b'"later"'
        for row in QueueMessage.objects.filter(topic="ticks")
        if tick_of(row.message_id) > changed_at
    )
    assert all((one - min(after)) % 2000 == 0 for one in after)
    assert json.loads(Schedule.objects.get().definition)["payload"] == "later"


def test_an_operator_pauses_resumes_and_runs(start):
    worker = start(recurring={"message": RECURRING["message"]})
    wait_for(lambda: len(ticks("message")) >= 1, worker)
    assert "is paused." in command("queuerecurring", "--pause", "message", "--noinput")
    paused = len(ticks("message"))
    time.sleep(2.2)
    assert len(ticks("message")) == paused
    assert "A message is published: recurring:message:" in command(
        "queuerecurring", "--run-now", "message", "--noinput"
    )
    assert len(ticks("message")) == paused + 1
    assert "is resumed." in command("queuerecurring", "--resume", "message", "--noinput")
    wait_for(lambda: len(ticks("message")) >= paused + 3, worker)
    assert list(Operation.objects.values_list("action", "detail")) == [
        ("pause recurring", "message"),
        ("run recurring", "message"),
        ("resume recurring", "message"),
    ]


def test_a_clean_stop_ends_the_declarations(start):
    """So a schedule that the next release does not declare can be deleted, and is not missed."""
    worker = start()
    wait_for(lambda: Schedule.objects.count() == 4, worker)
    wait_for(worker.is_ready, worker)
    declared = {row.name: row.seen_at for row in Schedule.objects.all()}
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    for row in Schedule.objects.all():
        moved = declared[row.name] - row.seen_at
        assert moved > schedules.DECLARED_MS - schedules.ENDED_MS - 30_000, "but for the time that it ran"
