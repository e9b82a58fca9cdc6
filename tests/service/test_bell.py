"""Publishers wake the subscribers of their host by datagrams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from django.db import connection, transaction

from django_mysqlqueue import publish
from tests.support.harness import USING
from tests.support.internals import bell
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

    def hears(self, seconds=10.0):
        """Return whether it is rung within some seconds, and wait for the next ring."""
        found = self.rung.wait(seconds)
        self.rung.clear()
        return found


@pytest.fixture
def heard(directory, monkeypatch):
    """The process id in the names of its sockets is another one's, so that this process rings it."""
    with monkeypatch.context() as patched:
        patched.setattr(bell.os, "getpid", lambda: 1)
        found = Heard()
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
    until = time.monotonic() + 10
    while len(woken) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(woken) == 2


LISTEN = """
import sys, time
import django
django.setup()
from django.db import connection
connection.settings_dict["NAME"] = sys.argv[1]
from django_mysqlqueue.service import bell
bell.Listener("default", ["t"], lambda: print("rung", flush=True))
print("listens", flush=True)
time.sleep(60)
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
