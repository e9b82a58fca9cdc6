"""Kills of a supervisor and its children: what they held in the database is handed over, on every engine."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter

import pytest

from django_mysqlqueue import publish
from django_mysqlqueue.models import DeliveryState, PartitionLease, SubscriberHeartbeat
from tests.support.processes import assert_ordered, drained, effects, freeze, is_running, publish_numbers, wait_for

pytestmark = pytest.mark.processes


def test_a_killed_child_is_replaced_and_a_stop_hands_everything_over(start, tmp_path):
    path = tmp_path / "alive"
    worker = start("--processes", "2", "--group", "plain", "--heartbeat-file", str(path), ready=2)
    assert worker.output.count("Press Ctrl-C") == 1
    assert "2 processes with" in worker.output
    os.utime(path, (0, 0))
    publish_numbers("p.plain", 200)
    wait_for(lambda: len(effects("plain")) >= 20, worker)
    os.kill(worker.children()[0], signal.SIGKILL)
    wait_for(drained("plain", "p.plain"), worker)
    wait_for(lambda: worker.ready() == 3, worker)
    wait_for(lambda: path.stat().st_mtime > 0, worker)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert f"child.died number=1 pid={worker.children()[0]} signal=SIGKILL" in worker.output
    assert "[1] subscriber.started" in worker.output
    assert worker.output.rstrip().endswith("Stopped.")
    assert {number for _, _, number in effects("plain")} == set(range(200))
    assert_ordered(effects("plain"))
    assert not DeliveryState.objects.exists()
    assert not PartitionLease.objects.exclude(leased_by="").exists()
    assert not SubscriberHeartbeat.objects.filter(deregistered_at=0).exists()
    assert re.search(rf"predecessor\.released name=\S+:{worker.children()[0]}:", worker.output)
    assert not path.exists()


def test_children_leave_when_their_supervisor_is_killed(start):
    worker = start("--processes", "2", "--group", "plain", ready=2)
    worker.send(signal.SIGKILL)
    worker.wait()
    wait_for(lambda: not any(map(is_running, worker.children())))
    assert worker.output.count("reason='the supervisor is gone'") == 2
    assert not SubscriberHeartbeat.objects.filter(deregistered_at=0).exists()


@pytest.mark.any_engine
def test_a_frozen_child_and_one_whose_lock_is_held_are_killed_and_replaced(start, tmp_path):
    """Neither can leave by itself. What they held is done by those that replace them."""
    started = tmp_path / "started"
    limits = {"SHUTDOWN_TIMEOUT": 0.5, "GROUPS": {"action": {"MAX_PROCESSING_TIME": 4}}}
    worker = start("--processes", "2", "--group", "action", ready=2, **limits)
    frozen, other = worker.children()
    freeze(frozen)
    publish("p.action", {"n": 0, "do": "hog", "started": str(started)}, key="k")
    publish("p.action", {"n": 1}, key="other")
    wait_for(lambda: worker.ready() == 4, worker)
    for pid in (frozen, other):
        assert re.search(rf"child\.killed number=\d pid={pid} reason='no heartbeat'", worker.output)
    wait_for(drained("action", "p.action"), worker)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert Counter(number for _, _, number in effects("action"))[0] == 2
