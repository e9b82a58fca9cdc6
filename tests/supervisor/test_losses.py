"""Processes that die or hang with messages in flight: how soon the messages run again, and what it costs them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
from django.db import transaction

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import DeliveryState, QueueMessage, SubscriberHeartbeat
from tests.support.harness import sequence
from tests.support.internals import unstarted
from tests.support.processes import drained, effects, wait_for

pytestmark = pytest.mark.processes

TIMES = {"LEASE_DURATION": 180, "LEASE_RENEWAL_INTERVAL": 60}
"""The other tests of processes have much shorter ones, which would hide a wait for them."""
SOON = 25.0
"""Seconds that a redelivery may take on a busy machine: less than half of what it is to be told from."""
TOPICS = {"action": "p.action", "atomic": "p.plain", "shared": "p.shared", "shared_atomic": "p.shared_atomic"}


def options(group, **more):
    own = {"MAX_ATTEMPTS": 3, "MAX_PROCESSING_TIME": 60, "VISIBILITY_TIMEOUT": 60}
    if not group.startswith("shared"):
        del own["VISIBILITY_TIMEOUT"]
    general = {name: more.pop(name) for name in list(more) if name in ("SHUTDOWN_TIMEOUT",)}
    return {**TIMES, **general, "GROUPS": {group: {**own, **more}}}


def logged_at(output, verb):
    """When each line of an event was logged, epoch seconds."""
    times = re.findall(rf"^(\S+ \S+) [A-Z]+ (?:\[\d+\] )?{re.escape(verb)} ", output, re.MULTILINE)
    return [datetime.fromisoformat(text.replace(",", ".")).timestamp() for text in times]


@pytest.mark.promise("Poison messages")
@pytest.mark.parametrize("group", ["action", "shared"])
def test_a_message_that_kills_its_process_costs_four_processes_and_seconds(start, group):
    """The first loss is free, three starts are recorded: then it is a dead letter."""
    topic = TOPICS[group]
    publish_many(topic, (Message({"n": n, "do": "kill" if n == 3 else ""}, key=f"k{n % 5}") for n in range(20)))
    worker = start("--processes", "2", "--group", group, ready=2, **options(group))
    wait_for(drained(group, topic), worker, timeout=100)
    sequence()
    (letter,) = QueueMessage.objects.filter(topic=f"{topic}_dlq")
    assert json.loads(bytes(letter.payload))["n"] == 3
    assert letter.failure_count == 3
    deaths = logged_at(worker.output, "child.died")
    assert len(deaths) == 4
    ends = [*deaths, *logged_at(worker.output, "delivery.dead_lettered")]
    assert all(later - earlier < SOON for earlier, later in pairwise(ends)), ends
    died = [one.info for one in SubscriberHeartbeat.objects.all() if "died" in one.info]
    assert [one["died"] for one in died] == ["SIGKILL"] * 4
    assert {letter.original_offset} == set.intersection(*(set(json.loads(one["handled"])) for one in died))
    assert {attempt for _, attempt, number in effects(group) if number != 3} == {1}
    assert {number for _, _, number in effects(group)} == set(range(20))


@pytest.mark.promise("Poison messages")
@pytest.mark.parametrize("group", ["action", "shared"])
def test_what_only_waited_in_a_process_that_died_is_not_suspected(start, tmp_path, group):
    """The supervisor knows what ran, and its replacement what had been claimed behind it."""
    worker = start("--processes", "1", "--threads", "1", "--group", group, **options(group))
    started, go = publish_what_hangs(tmp_path, group)
    wait_for(started.exists, worker)
    publish_many(TOPICS[group], (Message({"n": n}, key=f"k{n}") for n in range(1, 30)))
    wait_for(lambda: len(noted(worker)) == 29, worker)
    assert DeliveryState.objects.exclude(delivery_token=0).count() == 30
    os.kill(worker.children()[0], signal.SIGKILL)
    go.touch()
    wait_for(drained(group, TOPICS[group]), worker)
    lost, free = re.search(r"predecessor\.released .* deliveries=(\d+) unstarted=(\d+)", worker.output).groups()
    assert (int(lost), int(free)) == (int(group == "shared"), 29)
    assert len(effects(group)) == 31
    assert {attempt for _, attempt, _ in effects(group)} == {1}


def noted(worker):
    """What the child of a supervisor has noted as claimed and not started, which it does after its claim's COMMIT."""
    (memory,) = (
        one for one in Path(f"/proc/{worker.process.pid}/fd").iterdir() if "memfd:mysqlqueue" in os.readlink(one)
    )
    descriptor = os.open(memory, os.O_RDWR)
    try:
        return unstarted.read(descriptor)
    finally:
        os.close(descriptor)


def publish_what_hangs(tmp_path, group):
    started, go = tmp_path / "started", tmp_path / "go"
    publish(TOPICS[group], {"n": 0, "do": "wait", "started": str(started), "go": str(go)}, key="k")
    return started, go


def start_two(start, tmp_path, group, **settings):
    """Two subscribers; the handler of one does not return. The other one has more time for the message."""
    hung = start("--group", group, "--name", "one", **settings)
    started, go = publish_what_hangs(tmp_path, group)
    wait_for(started.exists, hung)
    started.unlink()
    other = start("--group", group, "--name", "two", **options(group))
    return hung, other, started, go


def check_taken_over(group, hung, other, started, go, *, recorded):
    """The message runs again as soon as its process has left.

    ``recorded``: the attempt has failed, because it has exceeded its time.
    """
    assert hung.wait(SOON) == 1
    left = time.monotonic()
    wait_for(started.exists, other)
    assert time.monotonic() - left < SOON
    assert list(DeliveryState.objects.values_list("retry_count", "delivered_by")) == [
        (recorded, re.search(r"subscriber\.started name=(\S+)", other.output)[1])
    ]
    go.touch()
    wait_for(drained(group, TOPICS[group]), other)
    assert "release.failed" not in hung.output
    last = ("k", 1 + recorded, 0)
    assert effects(group) == [last] if group.endswith("atomic") else [("k", 1, 0), last]  # or it was rolled back


GROUPS = [
    "action",
    "shared",
    pytest.param("atomic", marks=pytest.mark.servers_only),  # on SQLite it holds the only write lock there is
    pytest.param("shared_atomic", marks=pytest.mark.servers_only),
]


@pytest.mark.promise("Handlers that hang")
@pytest.mark.parametrize("group", GROUPS)
def test_a_hung_handler_is_shown_and_its_message_is_released(start, tmp_path, group):
    settings = options(group, MAX_PROCESSING_TIME=5)
    hung, other, started, go = start_two(start, tmp_path, group, **settings)
    wait_for(lambda: "subscriber.stopped" in hung.output, hung)
    check_taken_over(group, hung, other, started, go, recorded=1)
    line, stacks = re.search(
        r"^(.* CRITICAL handler\.hung .*)\n((?:(?!\d{4}-).*\n)+)", hung.output, re.MULTILINE
    ).groups()
    assert f"group={group} topic={TOPICS[group]} partition=k offset=" in line
    first, *others = re.split(r"^(?=Thread )", stacks, flags=re.MULTILINE)[1:]
    assert re.match(r"Thread mysqlqueue-handler-\d:\n", first)
    # It sleeps, and now and then looks whether it may go on.
    lines = r'(time\.sleep\(0\.01\)|while not Path\(payload\["go"\]\)\.exists\(\):)'
    assert re.search(rf'subscribers\.py", line \d+, in act\n +{lines}\n', first)
    assert {"Thread MainThread:", "Thread mysqlqueue-heartbeat:", "Thread mysqlqueue-poller:"} <= {
        text.split("\n")[0] for text in others
    }


@pytest.mark.promise("Shutdown")
@pytest.mark.parametrize("group", ["action", "shared"])
def test_what_outlasts_the_shutdown_is_released(start, tmp_path, group):
    settings = options(group, SHUTDOWN_TIMEOUT=1)
    hung, other, started, go = start_two(start, tmp_path, group, **settings)
    hung.send(signal.SIGTERM)
    check_taken_over(group, hung, other, started, go, recorded=0)
    assert "handlers.abandoned" in hung.output


@pytest.mark.promise("Handlers that hang")
@pytest.mark.servers_only
def test_a_process_leaves_although_the_database_does_not_let_it_release(start, tmp_path):
    hung = start("--group", "shared", "--name", "hung", **options("shared", MAX_PROCESSING_TIME=6))
    started, _ = publish_what_hangs(tmp_path, "shared")
    wait_for(started.exists, hung)
    with transaction.atomic():
        rows = SubscriberHeartbeat.objects.filter(subscriber_name__startswith="hung:")
        assert len(rows.select_for_update()) == 1
        assert hung.wait(SOON) == 1
    assert "release.failed name=hung:" in hung.output
    assert "error='no answer within 2 s'" in hung.output
    # Who replaces it can do it, and so do the lease and the visibility timeout.
    assert rows.get().deregistered_at == 0
