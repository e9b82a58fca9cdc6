"""Supervised subscriber processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from django_mysqlqueue import publish
from django_mysqlqueue.models import DeliveryState
from tests.support.harness import lag
from tests.support.paths import ROOT
from tests.support.processes import effects, environment, publish_numbers, wait_for

pytestmark = pytest.mark.any_engine


@pytest.mark.processes
def test_sigterm_to_the_whole_control_group_counts_once(start, tmp_path):
    """As systemd sends it: the children get one from it and one from their supervisor."""
    started, go = tmp_path / "started", tmp_path / "go"
    publish("p.action", {"n": 0, "do": "wait", "started": str(started), "go": str(go)}, key="k")
    worker = start("--processes", "1", "--group", "action")
    wait_for(started.exists, worker)
    worker.send(signal.SIGTERM)
    os.kill(worker.children()[0], signal.SIGTERM)
    wait_for(lambda: "supervisor.stopping" in worker.output and "subscriber.stopping" in worker.output, worker)
    os.kill(worker.children()[0], signal.SIGTERM)
    go.touch()
    assert worker.wait() == 0
    assert "child.exited" in worker.output
    assert lag("action", "p.action") == 0


@pytest.mark.processes
@pytest.mark.parametrize("late", [0.0, 0.15, 0.3])
def test_a_stop_of_the_control_group_is_clean_in_whatever_order_it_arrives(start, late):
    """Idle children have left, or are on their last lines, when the supervisor's own word comes."""
    worker = start("--processes", "2", "--group", "plain", ready=2)
    pids = [int(pid) for pid in re.findall(r"child.started number=\d pid=(\d+)", worker.output)]
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    time.sleep(late)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.output
    assert "child.died" not in worker.output


@pytest.mark.parametrize("arguments", [(), ("--processes", "1")])
def test_a_full_disk_behind_stdout_stops_nobody(db, arguments):
    """What nobody can read must neither keep a subscriber from its work nor spoil its exit status."""
    publish("p.plain", {"n": 1}, key="k")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "manage.py", "runsubscriber", "--group", "plain", "--drain", *arguments],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert lag("plain", "p.plain") == 0


@pytest.mark.processes
def test_the_heartbeat_file_of_one_process(start, tmp_path):
    path = tmp_path / "alive"
    worker = start("--group", "plain", "--heartbeat-file", str(path))
    for _ in range(2):
        os.utime(path, (0, 0))
        wait_for(lambda: path.stat().st_mtime > 0, worker)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert not path.exists()


@pytest.mark.processes
def test_max_messages(start):
    publish_numbers("p.plain", 7, partitions=3)
    alone = start("--group", "plain", "--max-messages", "3")
    assert alone.wait() == 0
    assert len(effects("plain")) == 3
    assert "reason=max-messages" in alone.output
    assert set(DeliveryState.objects.values_list("retry_count", "delivered_by", "acked")) <= {(0, "", False)}
    worker = start("--group", "plain", "--max-messages", "3", "--processes", "1", "--drain")
    assert worker.wait() == 0
    assert sorted(number for _, _, number in effects("plain")) == list(range(7))
    assert len(worker.children()) == 2
    assert "child.restarting" not in worker.output


@pytest.mark.processes
def test_max_memory(start):
    publish("p.action", {"n": 0, "do": "grow", "mb": 400}, key="k")
    worker = start("--group", "action", "--max-memory", "300", "--processes", "1")
    wait_for(lambda: worker.ready() == 2, worker)
    assert "memory_limit.exceeded" in worker.output
    assert "child.exited" in worker.output
    assert lag("action", "p.action") == 0
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0


COMMAND_LINES = {
    "-m django": [sys.executable, "-W", "error", "-X", "utf8", "-m", "django"],
    "django-admin": [str(Path(sys.executable).with_name("django-admin"))],
}


@pytest.mark.processes
@pytest.mark.parametrize("how", COMMAND_LINES)
def test_children_are_started_as_their_supervisor_was(db, how):
    publish("p.plain", {"n": 1}, key="k")
    done = subprocess.run(
        [*COMMAND_LINES[how], "runsubscriber", "--group", "plain", "--processes", "1", "--drain", "--pythonpath", "."],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert effects("plain") == [("k", 1, 1)]
