"""Real processes that end by themselves while handlers run: what they cut off starts again at once, uncounted."""

from __future__ import annotations

import json
import signal

import pytest

from django_mysqlqueue import Message, operations, publish_many
from django_mysqlqueue.models import DeliveryState, JobResult, QueueMessage
from django_mysqlqueue.tasks.framework import task_backends
from tests.app import jobs
from tests.support import job_worlds
from tests.support.harness import USING, sequence
from tests.support.internals import GroupRef, groups
from tests.support.processes import Supervised, Worker, drained, effects, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.promise("Shutdown")]

TIMES = {"LEASE_DURATION": 600, "LEASE_RENEWAL_INTERVAL": 60, "SHUTDOWN_TIMEOUT": 1}
"""No lease and no visibility timeout ends while the test runs."""
TOPICS = {"action": "p.action", "atomic": "p.plain", "shared": "p.shared", "shared_atomic": "p.shared_atomic"}
COUNT = 4


def options(group, **more):
    own = {"MAX_ATTEMPTS": 2, "MAX_PROCESSING_TIME": 600, **more}
    if group.startswith("shared"):
        own["VISIBILITY_TIMEOUT"] = 600
    return {**TIMES, "GROUPS": {group: own}}


class Work:
    """Messages whose handlers run until the test lets them end."""

    def __init__(self, folder, group, count=COUNT):
        self.topic = TOPICS[group]
        self.go = folder / f"go-{group}"
        self.started = [folder / f"started-{group}-{number}" for number in range(count)]
        publish_many(
            self.topic,
            (
                Message({"n": number, "do": "wait", "started": str(started), "go": str(self.go)}, key=f"k{number}")
                for number, started in enumerate(self.started)
            ),
        )

    def wait_until_all_run(self, worker):
        """All at once: none of them can end."""
        wait_for(lambda: all(started.exists() for started in self.started), worker)
        for started in self.started:
            started.unlink()


def is_free():
    """Whether no row is held or suspected, and no attempt counted."""
    return set(DeliveryState.objects.values_list("delivered_by", "delivery_token", "retry_count")) == {("", 0, 0)}


@pytest.mark.servers_only  # On SQLite a process has one thread, and an atomic handler the only write lock.
@pytest.mark.parametrize("group", TOPICS)
def test_deployments_count_no_attempts(start, tmp_path, group):
    work = Work(tmp_path, group)
    for _ in range(3):  # The first loss would be free, and the third one final.
        worker = start("--group", group, "--threads", str(COUNT), **options(group))
        work.wait_until_all_run(worker)
        worker.send(signal.SIGTERM)
        assert worker.wait() == 1
        assert "handlers.abandoned" in worker.output
        assert is_free()
    last = start("--group", group, "--threads", str(COUNT), **options(group))
    work.wait_until_all_run(last)
    work.go.touch()
    wait_for(drained(group, work.topic), last)
    assert {attempt for _, attempt, _ in effects(group)} == {1}
    sequence()
    assert not QueueMessage.objects.filter(topic=f"{work.topic}_dlq").exists()


def test_the_process_of_a_supervisor(db, tmp_path):
    work = Work(tmp_path, "shared", count=1)
    worker = Supervised(tmp_path, "--processes", "1", "--group", "shared", **options("shared"))
    try:
        for _ in range(2):
            work.wait_until_all_run(worker)
            worker.send(signal.SIGTERM)
            assert worker.wait() == 1
            assert is_free()
            worker = Supervised(tmp_path, "--processes", "1", "--group", "shared", **options("shared"))
        work.go.touch()
        wait_for(drained("shared", "p.shared"), worker)
    finally:
        worker.end()
    assert {attempt for _, attempt, _ in effects("shared")} == {1}


@pytest.mark.servers_only
def test_a_limit_ends_the_process(db, tmp_path):
    """Each successor starts all of them again."""
    work = Work(tmp_path, "shared")
    arguments = ("--processes", "1", "--group", "shared", "--threads", "4", "--max-messages", str(COUNT))
    worker = Supervised(tmp_path, *arguments, **options("shared"))
    try:
        for _ in range(5):
            work.wait_until_all_run(worker)
        work.go.touch()
        wait_for(drained("shared", "p.shared"), worker)
    finally:
        worker.end()
    assert {attempt for _, attempt, _ in effects("shared")} == {1}


@pytest.mark.servers_only
@pytest.mark.promise("Handlers that hang")
def test_what_runs_beside_a_hung_handler_is_not_charged(start, tmp_path):
    hung, beside = Work(tmp_path, "action", count=1), Work(tmp_path, "shared", count=3)
    settings = options("action", MAX_PROCESSING_TIME=3)
    settings["GROUPS"] |= options("shared")["GROUPS"]
    settings["LEASE_RENEWAL_INTERVAL"] = 1
    groups.register(USING, GroupRef("action", hung.topic), mode="ordered", start="earliest")
    for failures in (1, 2):
        operations.pause("action", hung.topic, actor="test")  # until those beside it run
        worker = start("--group", "action", "--group", "shared", "--threads", str(COUNT), **settings)
        beside.wait_until_all_run(worker)
        operations.resume("action", hung.topic, actor="test")
        hung.wait_until_all_run(worker)
        assert worker.wait() == 1
        assert "handler.hung" in worker.output
        rows = DeliveryState.objects.order_by("consumer_group", "message_offset")
        (first, *others) = rows.values_list("consumer_group", "retry_count")
        assert first == ("action", failures)
        assert others == [("shared", 0)] * 3
        assert not any(row.delivered_by for row in rows), "none is suspected"


@pytest.mark.servers_only
@pytest.mark.promise("Jobs")
def test_jobs_are_ready_again(db, no_handlers, tmp_path, settings):
    """Sync ones and async ones."""
    settings.TASKS = job_worlds.TASKS
    backend = task_backends["default"]
    backend.enqueue_many([(jobs.nap, [600], {})] * 2 + [(jobs.count_to, [10**6], {})] * 2)
    rows = JobResult.objects
    for _ in range(3):
        worker = Worker(
            tmp_path,
            *("--group", "jobs", "--threads", str(COUNT)),
            env={"TEST_TASKS": json.dumps(job_worlds.TASKS)},
            **{**TIMES, "VISIBILITY_TIMEOUT": 600, "MAX_ATTEMPTS": 2},
        )
        try:
            # ``started`` of the call: a claim alone makes a job RUNNING.
            wait_for(lambda: rows.filter(status="RUNNING").count() == COUNT, worker)
            wait_for(lambda: rows.exclude(progress="").count() == 2, worker)
            worker.send(signal.SIGTERM)
            assert worker.wait() == 1
        finally:
            worker.end()
        assert set(rows.values_list("status", "errors", "worker_ids")) == {("READY", "", "")}
        rows.update(progress="")
        assert is_free()
