"""Publishers wake the subscribers of their host by datagrams."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from django.db import connection, transaction

from django_mysqlqueue import publish
from django_mysqlqueue.inspection import get_overview
from django_mysqlqueue.inspection.overview import HostBell
from django_mysqlqueue.metrics.queue import QueueCollector
from tests.support.commands import run
from tests.support.harness import USING, Sub, handler
from tests.support.internals import Session, bell, heartbeats, wakeups
from tests.support.publishing import rolled_back

pytestmark = pytest.mark.promise("Wake-ups")


@pytest.fixture
def directory(db, settings, tmp_path_factory):
    """A runtime directory with a short path."""
    found = tmp_path_factory.mktemp("b")
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "BELL": {"DIRECTORY": str(found)}}
    return found


class Heard:
    """A listener as that of another process, and what it has heard."""

    def __init__(self, topics=("t",)):
        self.count = 0
        self.rung = threading.Event()
        self.listener = bell.Listener(USING, topics, self.wake)

    def wake(self):
        self.count += 1
        self.rung.set()

    def hears(self, seconds=60.0):
        """Return whether it is rung within some seconds, and wait for the next ring."""
        found = self.rung.wait(seconds)
        self.rung.clear()
        return found


@pytest.fixture
def heard(directory):
    """As in another process, so that this one rings it."""
    found = Heard()
    bell._own.clear()
    yield found
    found.listener.stop()


def test_after_the_commit(heard):
    with transaction.atomic():
        publish("t", 1)
        assert not heard.hears(0.1)
    assert heard.hears()


def test_without_a_transaction(heard):
    publish("t", 1)
    assert heard.hears()


def test_not_after_a_rollback(heard):
    with rolled_back():
        publish("t", 1)
    with transaction.atomic(), rolled_back():
        publish("t", 1)
    assert not heard.hears(0.2)


def test_only_for_its_topics(heard):
    publish("u", 1)
    assert not heard.hears(0.2)


def test_one_hook_for_a_transaction(heard):
    with transaction.atomic():
        for number in range(3):
            publish("t", number)
        assert len(connection.run_on_commit) == 1


def test_a_hook_for_a_savepoint_that_is_rolled_back(heard):
    with transaction.atomic():
        with rolled_back():
            publish("t", 1)
        assert connection.run_on_commit == []
        publish("t", 2)
    assert heard.hears()


def test_no_hook_if_nobody_listens(directory):
    with transaction.atomic():
        publish("t", 1)
        assert connection.run_on_commit == []


def test_a_process_that_stands_still_does_not_hold_publishers_up(heard, monkeypatch):
    held = threading.Event()
    monkeypatch.setattr(heard.listener, "_wake", held.wait)
    for number in range(50):
        publish("t", number)
    held.set()


def test_rings_together_are_few(heard):
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        bell.ring(USING, ["t"])
    assert heard.hears()
    assert heard.count <= 0.2 / bell.TOGETHER + 2


def test_rings_while_the_listener_rests_are_one(heard):
    heard.listener.rest = 600.0
    publish("t", 1)
    assert heard.hears()
    for number in range(5):
        publish("t", number)
    assert not heard.hears(0.1)
    heard.listener.stop()
    assert not heard.listener._thread.is_alive(), "it need not rest until the end"


def test_a_ring_while_the_listener_wakes_is_not_lost(heard, monkeypatch):
    """It may be for a message that the poll under way does not see."""
    woken = []

    def wake():
        woken.append(1)
        if len(woken) == 1:
            bell.ring(USING, ["t"])
        heard.rung.set()

    monkeypatch.setattr(heard.listener, "_wake", wake)
    publish("t", 1)
    until = time.monotonic() + 60
    while len(woken) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(woken) == 2


def test_what_somebody_has_removed_is_there_again(directory):
    heard = threading.Event()
    listening = wakeups.Listening(USING, ["t", "u"], heard.set)
    for gone in ("socket", "link", "folder"):
        bell.ring(USING, ["t"])
        if gone == "socket":
            os.unlink(listening.bell.path)
        elif gone == "link":
            os.unlink(bell.listeners(USING, "t")[0])
        else:
            shutil.rmtree(directory)
        listening.check()
        assert listening.bell.is_reachable()
        assert len(bell.listeners(USING, "t")) == len(bell.listeners(USING, "u")) == 1
    before = listening.bell
    listening.check()
    assert listening.bell is before
    listening.stop()
    assert bell.listeners(USING, "t") == ()


@pytest.mark.parametrize("what", ["link", "writable"])
def test_publishers_touch_nothing_in_a_folder_that_others_may_have_made(directory, tmp_path, what):
    """It may be a link to a folder of the publisher's, whose files nobody listens at either."""
    kept = tmp_path / "kept"
    kept.touch()
    folder = Path(bell.folder_of(USING, "t"))
    folder.parent.mkdir(parents=True, mode=0o700)
    if what == "link":
        folder.symlink_to(tmp_path)
    else:
        folder.mkdir()
        folder.chmod(0o777)
        (folder / "1-abc").symlink_to(kept)
    assert bell.listeners(USING, "t") == ()
    publish("t", 1)
    bell.clean(USING)
    assert kept.exists()
    assert len(list(folder.iterdir())) == 1


def test_processes_of_a_group(directory, settings):
    """Their files have the group's rights; folders of another group are not used."""
    group = grp.getgrgid(os.getegid()).gr_name
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "BELL": {"DIRECTORY": str(directory / "g"), "GROUP": group}}
    rung = threading.Event()
    listener = bell.Listener(USING, ["t"], rung.set)
    looks = bell.Looks(USING, "what")
    bell._own.clear()
    publish("t", 1)
    assert rung.wait(60)
    folder = Path(listener.path).parent
    modes = {stat.S_IMODE(path.lstat().st_mode) for path in folder.iterdir() if not path.is_dir()}
    assert modes == {0o660}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o2770
    looks.close()
    listener.stop()
    if os.geteuid() == 0:
        os.chown(folder, -1, os.getegid() + 1)
        with pytest.raises(bell.Unavailable, match="belongs to another group"):
            bell.Listener(USING, ["t"], rung.set)
        assert bell.listeners(USING, "t") == ()


def test_only_links_and_sockets_are_removed(heard):
    (Path(heard.listener.path).parent / bell._short("t") / "1-file").touch()
    publish("t", 1)
    assert heard.hears()
    assert (Path(heard.listener.path).parent / bell._short("t") / "1-file").exists()


def test_without_topics_there_is_nobody_to_wait_for(directory):
    """A database that only relays."""
    listening = wakeups.Listening(USING, [], lambda: None)
    assert listening.bell.neighbours() == 1
    listening.stop()


def test_stopping_waits_for_nobody_who_rings(directory):
    listening = wakeups.Listening(USING, ["t"], lambda: None)
    path, stopped = listening.bell.path, threading.Event()

    def flood():
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            while not stopped.is_set():
                with contextlib.suppress(OSError):
                    sender.sendto(b".", path)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        for _ in range(20):
            listening.stop()
            listening = wakeups.Listening(USING, ["t"], lambda: None)
            path = listening.bell.path
    finally:
        stopped.set()
        thread.join()
        listening.stop()


def test_processes_with_the_same_id_ring_each_other(directory, monkeypatch):
    """In containers that share the directory."""
    rung = threading.Event()
    listener = bell.Listener(USING, ["t"], rung.set)
    bell._own.clear()  # as the other process
    bell.ring(USING, ["t"])
    assert rung.wait(60)
    listener.stop()


def test_what_is_new_is_not_removed(directory):
    """Between the two steps of a bind, nobody listens at a socket."""
    listening = wakeups.Listening(USING, ["t"], lambda: None)
    half = Path(listening.bell.path).parent / "1-bound"
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as bound:
        bound.bind(str(half))
    bell.clean(USING)
    assert half.exists()
    os.utime(half, (0, 0))
    bell.clean(USING)
    assert not half.exists()
    assert listening.bell.is_reachable()
    listening.stop()


def test_each_host_shows_whether_it_is_rung(directory):
    sub = Sub(handler())
    ref = sub.poller.groups[0].ref
    listening = wakeups.Listening(USING, ["t"], lambda: None)
    sub.poller.listen(listening)

    def shown():
        for _ in range(2):  # The first heartbeat tells nothing of this.
            heartbeats.beat(USING, "p:1", [ref], {"host": "h1"}, sub.progress.facts())
        (found,) = get_overview().bells
        return found

    assert shown() == HostBell("h1", 1, None, "")
    listening.bell.rung_at = time.monotonic() - 3600
    assert shown().rung_at == pytest.approx(Session(USING).now() - 3_600_000, abs=60_000)
    ages = [
        (sample.labels["host"], round(sample.value / 3600))
        for metric in QueueCollector().collect()
        if metric.name == "mysqlqueue_bell_age_seconds"
        for sample in metric.samples
    ]
    assert ages == [("h1", 1)]
    assert "1 h ago" in run("queuestatus")
    listening.stop()
    listening.bell, listening.reason = None, "there is no group 'x'"
    assert shown().error == "there is no group 'x'"
    assert "there is no group 'x'" in run("queuestatus")


LISTEN = """
import sys, time
import django
django.setup()
from django.db import connection
connection.settings_dict["NAME"] = sys.argv[1]
from django_mysqlqueue.service import bell
bell.Listener("default", ["t"], lambda: print("rung", flush=True))
print("listens", flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_leaves_is_removed(directory):
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "TEST_MYSQLQUEUE": json.dumps({"BELL": {"DIRECTORY": str(directory)}}),
    }
    command = [sys.executable, "-c", LISTEN, str(connection.settings_dict["NAME"])]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "listens\n"
        (left,) = bell.listeners(USING, "t")
        bell.ring(USING, ["t"])
        assert process.stdout.readline() == "rung\n"
        process.send_signal(signal.SIGKILL)
    publish("t", 1)
    assert not Path(left).is_symlink()
    assert bell.listeners(USING, "t") == ()
