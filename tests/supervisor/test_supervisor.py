"""The supervisor alone, with children that need no Django."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from django_mysqlqueue.runtime.process.supervisor import Slot
from tests.support.internals import HeartbeatFile, Margins, Supervisor
from tests.support.paths import ROOT
from tests.support.processes import wait_for

pytestmark = pytest.mark.any_engine

CHILD = """
import json, os, signal, sys, time
line = json.loads(os.environ["MYSQLQUEUE_LIFELINE"])
def sign(byte):
    os.write(line["pipe"], byte)
def for_ever(byte=b"p"):
    while os.getppid() == line["parent"]:
        sign(byte)
        time.sleep(0.02)
def on(number, action):
    signal.signal(number, action)
leave = lambda *_: os._exit(0)
"""


class Run:
    """A supervisor in a thread of this process, and what it logged."""

    def __init__(self, caplog, body, *, processes=1, command=None, **options):
        defaults = {"shutdown_timeout": 0.0, "longest_handler": 0.0, "lease_duration": 1.0}
        caplog.set_level("INFO", "django_mysqlqueue.subscriber")
        self._caplog = caplog
        self.supervisor = Supervisor(
            command or [sys.executable, "-I", "-S", "-c", CHILD + textwrap.dedent(body)],
            processes=processes,
            **{**defaults, **options},
        )
        self.code = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        self.code = self.supervisor.run()

    def events(self, verb, **fields):
        found = [record.mysqlqueue for record in self._caplog.records if record.mysqlqueue["event"] == verb]
        return [one for one in found if all(one.get(name) == value for name, value in fields.items())]

    def wait(self, timeout=20):
        self._thread.join(timeout)
        assert not self._thread.is_alive(), self._caplog.text
        return self.code

    def end(self):
        while self._thread.is_alive():
            self.supervisor.stop()
            self._thread.join(0.5)


@pytest.fixture
def run(caplog):
    runs = []

    def run(body, **options):
        runs.append(Run(caplog, body, **options))
        return runs[-1]

    yield run
    for one in runs:
        one.end()


def test_back_off():
    place = Slot(1, progressed_at=0.0)
    assert [place.back_off(1.0) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert place.back_off(61.0) == 0
    assert place.back_off(1.0) == 1
    # A night of crashes: 2 ** 1024 is no float.
    assert [place.back_off(1.0) for _ in range(3000)][-1] == 30


def test_a_crash_loop_is_slowed_down(run, monkeypatch):
    began, stopped = time.monotonic(), []
    restart_later = Supervisor._restart_later

    def then_stop(supervisor, place, ran):
        restart_later(supervisor, place, ran)
        if place.failures.count == 2:
            stopped.append(time.monotonic())
            supervisor.stop()

    monkeypatch.setattr(Supervisor, "_restart_later", then_stop)
    one = run("sign(b'p'); sys.exit(3)")
    wait_for(lambda: stopped)
    # A stop does not wait for the next start.
    assert one.wait(1.5) == 0
    assert stopped[0] - began >= 1.0
    assert [restart["seconds"] for restart in one.events("child.restarting")] == [1.0, 2.0]
    assert [died["code"] for died in one.events("child.died")] == [3, 3]
    assert len(one.events("child.started")) == 2


def test_a_child_that_asks_for_it_is_replaced_at_once(run):
    one = run("sign(b'p'); sign(b'r')")
    wait_for(lambda: len(one.events("child.started")) >= 4)
    assert not one.events("child.restarting")


def test_a_child_is_told_who_died_in_its_place_until_one_has_worked(run, tmp_path):
    """What a child has not lived to release is left to the next one."""
    log = tmp_path / "log"
    one = run(
        f"""
        with open({str(log)!r}, "a+") as file:
            file.write(json.dumps([os.getpid(), line["suffix"], line["predecessor"]]) + "\\n")
            file.seek(0)
            count = len(file.readlines())
        if count == 1:
            sign(b"p")  # it works, and dies
            os.kill(os.getpid(), signal.SIGKILL)
        if count == 2:
            sys.exit(1)  # it cannot start
        on(signal.SIGTERM, leave)
        if count == 3:
            sign(b"pr")  # it works, and leaves cleanly
            leave()
        for_ever()
        """
    )
    wait_for(lambda: len(one.events("child.started")) == 4)
    wait_for(lambda: one.supervisor.places[0].child and one.supervisor.places[0].child.has_signed)
    first, second, third, fourth = map(json.loads, log.read_text().splitlines())
    assert first[2] is None
    assert second[2] == third[2] == first[:2]
    assert fourth[2] is None
    assert len({suffix for _, suffix, _ in (first, second, third, fourth)}) == 4


AS_INIT = """
import ctypes, os, sys, threading, time
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
import django
django.setup()
from django_mysqlqueue.runtime.process.supervisor import Supervisor
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
child = sys.argv[1]
one = Supervisor([sys.executable, "-I", "-S", "-c", child], processes=2, shutdown_timeout=0, longest_handler=0,
                 lease_duration=1)
one._is_init = sys.argv[2] == "True"
def states():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid():
            found.append(state)
    return found
def watch():
    time.sleep(3)
    deadline = time.monotonic() + 20
    # The child that is replaced all the time leaves some for a moment: what counts is that they do not stay.
    while bool(zombies := states().count("Z")) == one._is_init and time.monotonic() < deadline:
        time.sleep(0.05)
    print(zombies)
    one.stop()
threading.Thread(target=watch).start()
print(one.run())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a subreaper stands for PID 1")
@pytest.mark.parametrize("is_init", [True, False])
def test_as_pid_1_it_reaps_what_handlers_leave_behind(is_init):
    """And the status of its own children is theirs: one of them asks for a replacement all the time."""
    child = CHILD + textwrap.dedent(
        """
        on(signal.SIGTERM, leave)
        for _ in range(5):
            if os.fork() == 0:
                if os.fork() == 0:
                    time.sleep(0.1)
                    os._exit(0)
                os._exit(0)
            os.wait()
        sign(b"p")
        if line["number"] == 2:
            time.sleep(0.5)
            sign(b"r")
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as runsubscriber does at its end
            sys.exit(0)
        for_ever()
        """
    )
    command = [sys.executable, "-c", AS_INIT, child, str(is_init)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    zombies, code = done.stdout.split()[-2:]
    assert (int(zombies) == 0) == is_init, done
    assert code == "0", done


def test_a_command_that_cannot_be_run(run):
    one = run("", command=["/nonexistent/python"])
    wait_for(lambda: one.events("child.restarting", seconds=2.0))
    assert "No such file" in str(one.events("child.not_started")[0]["error"])


def test_a_silent_child_is_killed_and_replaced(run):
    one = run(
        """
        if line["number"] == 1:
            sign(b"p")
            os.kill(os.getpid(), signal.SIGSTOP)
        for_ever(b"a")  # without progress, but alive
        """,
        processes=2,
        margins=Margins(silence=4),
    )
    wait_for(lambda: len(one.events("child.started", number=1)) == 2)
    assert one.events("child.killed")[0]["reason"] == "no heartbeat"
    assert one.events("child.died")[0]["signal"] == "SIGKILL"
    assert len(one.events("child.started", number=2)) == 1


def test_stop_ends_with_0_when_all_leave_cleanly(run):
    one = run("on(signal.SIGTERM, leave); for_ever()", processes=2)
    wait_for(lambda: all(place.child and place.child.has_signed for place in one.supervisor.places))
    one.supervisor.stop()
    assert one.wait() == 0
    assert len(one.events("child.exited", code=0)) == 2


def test_stop_ends_with_1_when_one_does_not(run):
    one = run("on(signal.SIGTERM, lambda *_: os._exit(line['number'] - 1)); for_ever()", processes=2)
    wait_for(lambda: all(place.child and place.child.has_signed for place in one.supervisor.places))
    one.supervisor.stop()
    assert one.wait() == 1
    assert len(one.events("child.died", code=1)) == 1


def test_a_child_that_is_told_to_stop_before_it_works_left_cleanly(run):
    one = run("time.sleep(60)")
    wait_for(lambda: one.events("child.started"))
    one.supervisor.stop()
    assert one.wait() == 0


def test_nothing_is_started_after_a_stop(caplog):
    stopped = Supervisor(
        ["/nonexistent"], processes=2, shutdown_timeout=60.0, longest_handler=0.0, lease_duration=1.0, drain=True
    )
    stopped.stop()
    assert stopped.run() == 0
    assert "child." not in caplog.text


def test_a_child_that_does_not_stop_is_killed(run):
    one = run("on(signal.SIGTERM, signal.SIG_IGN); for_ever()", margins=Margins(stop=0.5))
    wait_for(lambda: all(place.child and place.child.has_signed for place in one.supervisor.places))
    one.supervisor.stop()
    assert one.wait() == 1
    assert one.events("child.killed")[0]["reason"] == "it did not stop"


@pytest.mark.parametrize(("body", "code"), [("on(signal.SIGINT, leave)", 0), ("on(signal.SIGINT, signal.SIG_IGN)", 1)])
def test_a_second_stop_makes_children_leave_at_once(run, body, code):
    """With SIGKILL where they do not hear: the interpreter's lock may be held."""
    # One that hears must not be killed for being slow to leave.
    margins = Margins(leave=2.0 if code else 9.0)
    one = run(f"on(signal.SIGTERM, signal.SIG_IGN); {body}; for_ever()", shutdown_timeout=60.0, margins=margins)
    wait_for(lambda: all(place.child and place.child.has_signed for place in one.supervisor.places))
    one.supervisor.stop()
    wait_for(lambda: one.supervisor.is_stopping)
    one.supervisor.stop()
    assert one.wait(10) == code
    assert len(one.events("child.killed")) == code


def test_drain_ends_when_every_child_has_drained(run, tmp_path):
    """One that crashes or asks for a replacement has not."""
    counts = tmp_path / "counts"
    one = run(
        f"""
        sign(b"p")
        if line["number"] == 1:
            with open({str(counts)!r}, "a+") as file:
                file.write("x")
                file.seek(0)
                count = len(file.read())
            if count == 1:
                sign(b"r")
            sys.exit(count == 2)
        """,
        processes=2,
        drain=True,
    )
    assert one.wait() == 0
    assert counts.read_text() == "xxx"
    assert len(one.events("child.started", number=2)) == 1
    assert len(one.events("child.died")) == 1


def test_a_child_that_cannot_start_waits_for_a_change(run, tmp_path):
    code = tmp_path / "code"
    code.touch()
    one = run(
        f"""
        if not open({str(code)!r}).read():
            sys.exit(1)
        sign(b"p")
        sys.exit(1)
        """,
        snapshot=lambda: {code: code.stat().st_size},
    )
    wait_for(lambda: one.events("child.waiting"))
    looked = one.supervisor._looked_at
    wait_for(lambda: one.supervisor._looked_at > looked)  # it has looked again, and waits
    assert len(one.events("child.started")) == 1
    code.write_text("fixed")
    # Now it starts, and what fails later is a crash as any other.
    wait_for(lambda: one.events("child.restarting"))
    assert len(one.events("child.waiting")) == 1


def test_the_heartbeat_file_is_fresh_while_every_child_makes_progress(run, tmp_path):
    path, stuck, is_stuck = tmp_path / "alive", tmp_path / "stuck", tmp_path / "is_stuck"
    one = run(
        f"""
        while line["number"] == 1 or not os.path.exists({str(stuck)!r}):
            sign(b"p")
            time.sleep(0.02)
        open({str(is_stuck)!r}, "w").close()
        for_ever(b"a")
        """,
        processes=2,
        heartbeat_file=HeartbeatFile(str(path)),
        longest_handler=60.0,
    )
    for _ in range(2):
        os.utime(path, (0, 0))
        wait_for(lambda: path.stat().st_mtime > 0)
    stuck.touch()
    wait_for(is_stuck.exists)
    looked = one.supervisor._looked_at
    wait_for(lambda: one.supervisor._looked_at > looked + 1)  # it has read all that was signed before
    wait_for(lambda: time.monotonic() > one.supervisor.places[1].progressed_at + 1.5)
    os.utime(path, (0, 0))
    looked = one.supervisor._looked_at
    wait_for(lambda: one.supervisor._looked_at > looked)
    assert path.stat().st_mtime == 0
