"""Real subscriber processes: how they end."""

from __future__ import annotations

import signal
from collections import Counter

import pytest
from django.db import connection

from django_mysqlqueue import Message, operations, publish, publish_many
from django_mysqlqueue.models import DeliveryState, PartitionLease, QueueMessage, SubscriberHeartbeat
from tests.support.harness import USING, lag, sequence
from tests.support.internals import GroupRef, groups, sequencing
from tests.support.processes import Worker, assert_ordered, drained, effects, publish_numbers, wait_for

pytestmark = pytest.mark.processes

HANGS_SOON = {"GROUPS": {"action": {"MAX_PROCESSING_TIME": 2}}}


def test_drain_handles_everything_waits_for_backoffs_and_exits(start):
    publish_numbers("p.plain", 50)
    publish("p.plain", {"n": 50, "fail": True}, key="k0")
    publish("p.plain", {"n": 99}, key="k0", delay=3600)
    worker = start("--drain", "--group", "plain")
    assert worker.wait() == 0
    rows = effects("plain")
    assert Counter(number for _, _, number in rows) == Counter([*range(51), 50])
    assert_ordered(rows)
    assert not DeliveryState.objects.exists()
    assert not PartitionLease.objects.exists()
    assert "group     plain on p.plain (ordered)" in worker.output
    assert f"database  default ({sequencing.Session(USING).dialect.name}" in worker.output
    assert worker.output.rstrip().endswith("Stopped.")


@pytest.mark.promise("Shutdown")
def test_sigterm_finishes_what_runs_and_gives_back_the_rest(start, tmp_path):
    started, go = tmp_path / "started", tmp_path / "go"
    publish("p.action", {"n": 0, "do": "wait", "started": str(started), "go": str(go)}, key="k")
    publish_many("p.action", (Message({"n": n}, key="k") for n in range(1, 20)))
    worker = start("--group", "action")
    wait_for(started.exists, worker)
    worker.send(signal.SIGTERM)
    wait_for(lambda: "subscriber.stopping" in worker.output, worker)
    # Its handler still runs: the lease must not be free yet.
    assert PartitionLease.objects.get().leased_by != ""
    go.touch()
    assert worker.wait() == 0
    assert effects("action") == [("k", 1, 0)]
    assert lag("action", "p.action") == 19
    assert set(DeliveryState.objects.values_list("retry_count", "delivered_by", "acked")) <= {(0, "", False)}
    assert PartitionLease.objects.get().leased_by == ""
    assert SubscriberHeartbeat.objects.get().deregistered_at > 0
    second = start("--group", "action", "--drain")
    assert second.wait() == 0
    assert effects("action") == [("k", 1, n) for n in range(20)]


def test_an_override_reaches_every_process_within_a_tick_without_a_restart(start):
    workers = [start("--group", "plain", "--name", name, LEASE_RENEWAL_INTERVAL=0.5) for name in ("w1", "w2")]

    def set_to(number, **changes):
        operations.settings("plain", "p.plain", actor="ada", **changes)
        for worker in workers:
            wait_for(lambda worker=worker: worker.output.count("settings.changed") == number, worker, timeout=5)

    set_to(1, values={"max_attempts": 1})
    publish("p.plain", {"n": 0, "fail": True}, key="a")
    wait_for(lambda: sequence() or QueueMessage.objects.filter(topic="p.plain_dlq").exists())
    set_to(2, unset=["max_attempts"])
    publish("p.plain", {"n": 1, "fail": True}, key="a")
    wait_for(lambda: ("a", 2, 1) in effects("plain"))
    assert all("max_attempts=1" in worker.output and "max_attempts=5" in worker.output for worker in workers)


def test_a_second_signal_leaves_at_once(start, tmp_path):
    started = tmp_path / "started"
    publish("p.action", {"n": 0, "do": "wait", "started": str(started), "go": str(tmp_path / "never")}, key="k")
    worker = start("--group", "action")
    wait_for(started.exists, worker)
    worker.send(signal.SIGINT)
    wait_for(lambda: "subscriber.stopping" in worker.output, worker)
    worker.send(signal.SIGINT)
    assert worker.wait(5) == 128 + signal.SIGINT


@pytest.mark.any_engine
def test_a_hung_handler_ends_its_process(start):
    publish("p.action", {"n": 0, "do": "hang"}, key="k")
    publish("p.action", {"n": 1}, key="other")
    worker = start("--group", "action", **HANGS_SOON)
    assert worker.wait(20) == 1
    assert "handler.hung" in worker.output
    assert SubscriberHeartbeat.objects.get().deregistered_at > 0
    if connection.vendor != "sqlite":  # where one thread is all there is
        assert ("other", 1, 1) in effects("action")
    # Deregistered: another one takes over without waiting for the lease, and so on. Each attempt counts.
    for _ in range(2):
        assert start("--group", "action", **HANGS_SOON).wait(20) == 1
    last = start("--group", "action", "--drain", **HANGS_SOON)
    assert last.wait() == 0
    sequence()
    assert QueueMessage.objects.get(topic="p.action_dlq").failure_count == 3


@pytest.mark.servers_only
def test_a_hung_handler_does_not_take_healthy_ones_with_it(start, tmp_path):
    """They have SHUTDOWN_TIMEOUT; only the hung one is not waited for."""
    started, go = tmp_path / "started", tmp_path / "go"
    publish("p.plain", {"n": 1, "do": "wait", "started": str(started), "go": str(go)}, key="healthy")
    worker = start("--group", "action", "--group", "atomic", **HANGS_SOON)
    wait_for(started.exists, worker)
    publish("p.action", {"n": 0, "do": "hang"}, key="hung")
    wait_for(lambda: ("hung", 1, 0) in effects("action"), worker)
    wait_for(lambda: "subscriber.stopping" in worker.output, worker)
    go.touch()
    assert worker.wait(20) == 1
    assert effects("atomic") == [("healthy", 1, 1)]
    assert lag("atomic", "p.plain") == 0


@pytest.mark.servers_only
def test_a_hung_handler_that_returns_in_the_end_is_no_clean_end(start, tmp_path):
    """The process waited for another one meanwhile; whoever started it must know that it did not end as it should."""
    files = {name: (tmp_path / f"started-{name}", tmp_path / f"go-{name}") for name in ("p.action", "p.plain")}

    def publish_to(topic):
        started, go = files[topic]
        publish(topic, {"n": 0, "do": "wait", "started": str(started), "go": str(go)}, key="k")

    publish_to("p.plain")
    worker = start("--group", "action", "--group", "atomic", "--drain", **HANGS_SOON)
    wait_for(files["p.plain"][0].exists, worker)
    publish_to("p.action")
    wait_for(lambda: "subscriber.stopping" in worker.output, worker)
    assert "handler.hung" in worker.output
    assert all(started.exists() for started, _ in files.values())
    files["p.action"][1].touch()
    wait_for(drained("action", "p.action"), worker)
    files["p.plain"][1].touch()
    assert worker.wait(20) == 1
    assert "handlers.abandoned" not in worker.output


def test_a_group_of_another_mode_is_refused(db, tmp_path):
    groups.register(USING, GroupRef("plain", "p.plain"), mode="shared", start="earliest")
    worker = Worker(tmp_path, "--group", "plain")
    assert worker.wait() == 1
    assert "is registered as shared" in worker.output
    assert "queuegroupmode plain p.plain ordered" in worker.output


@pytest.mark.servers_only
def test_one_partition_and_many_threads_is_warned_of(start):
    publish_numbers("p.plain", 3, partitions=1)
    sequence()
    worker = start("--group", "plain", "--threads", "4", "--drain")
    assert worker.wait() == 0
    assert "warning   topic 'p.plain' has one partition" in worker.output


def test_an_unknown_group_is_refused(db, tmp_path):
    worker = Worker(tmp_path, "--group", "nobody")
    assert worker.wait() == 1
    names = (
        "action, async, atomic, batch, controlled, controlled_shared, coroutines, coroutines_shared, few, limited, "
        "limited_shared, plain, shared, shared_atomic, strict"
    )
    assert f"no handler has this group. Handlers have: {names}." in worker.output
