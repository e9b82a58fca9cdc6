"""The supervisor, and what only it or its children's main thread does: limits, reload, the heartbeat file."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection

from django_mysqlqueue import publish
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.management.commands.runsubscriber import Command
from django_mysqlqueue.models import DeliveryState, SubscriberHeartbeat
from django_mysqlqueue.runtime.process import lifeline, memory
from django_mysqlqueue.runtime.process.lifeline import Incarnation, Lifeline
from django_mysqlqueue.runtime.process.liveness_file import HeartbeatFile
from django_mysqlqueue.runtime.process.subscriber import Subscriber
from django_mysqlqueue.runtime.process.supervisor import Margins, Slot, Supervisor
from tests.support.harness import USING, handler, in_thread, lag
from tests.test_processes import ROOT, Worker, effects, environment, publish_numbers, wait_for

pytestmark = pytest.mark.any_engine

# -- the supervisor alone, with children that need no Django --------------------

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


def test_a_crash_loop_is_slowed_down(run):
    one = run("sign(b'p'); sys.exit(3)")
    began = time.monotonic()
    wait_for(lambda: one.events("child.restarting", seconds=2.0))
    assert time.monotonic() - began >= 1.0
    assert [died["code"] for died in one.events("child.died")] == [3, 3]
    # A stop does not wait for the next start.
    one.supervisor.stop()
    assert one.wait(1.5) == 0
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
        margins=Margins(silence=0.5),
    )
    wait_for(lambda: len(one.events("child.started", number=1)) == 2)
    assert one.events("child.killed")[0]["reason"] == "no sign of life"
    assert one.events("child.died")[0]["signal"] == "SIGKILL"
    assert len(one.events("child.started", number=2)) == 1


def test_stop_ends_with_0_when_all_leave_cleanly(run):
    one = run("on(signal.SIGTERM, leave); for_ever()", processes=2)
    wait_for(lambda: all(place.child and place.child.has_signed for place in one.supervisor.places))
    one.supervisor.stop()
    assert one.wait() == 0
    assert len(one.events("child.left", code=0)) == 2


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
    one = run(f"on(signal.SIGTERM, signal.SIG_IGN); {body}; for_ever()", shutdown_timeout=60.0)
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
    path, stuck = tmp_path / "alive", tmp_path / "stuck"
    one = run(
        f"""
        while line["number"] == 1 or not os.path.exists({str(stuck)!r}):
            sign(b"p")
            time.sleep(0.02)
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
    wait_for(lambda: time.monotonic() > one.supervisor.places[1].progressed_at + 1.5)
    os.utime(path, (0, 0))
    looked = one.supervisor._looked_at
    wait_for(lambda: one.supervisor._looked_at > looked)
    assert path.stat().st_mtime == 0


# -- the child's side -----------------------------------------------------------


def test_a_supervisor_of_another_version_is_understood(monkeypatch):
    """The package is upgraded under a running supervisor: what it tells a new child is what its version told."""
    reading, writing = os.pipe()
    told = {"pipe": writing, "parent": os.getppid(), "number": 2, "reload": False}
    try:
        for more in ({}, {"suffix": "0f", "predecessor": [7, "0e"], "of a later version": 1}):
            monkeypatch.setenv(lifeline.VARIABLE, json.dumps({**told, **more}))
            line = Lifeline.inherited()
            assert line is not None
            assert line.number == 2
            assert line.suffix == more.get("suffix", line.suffix) != ""
            assert line.predecessor == (Incarnation(7, "0e") if more else None)
    finally:
        os.close(reading)
        os.close(writing)


def test_a_lifeline_is_inherited_once_and_tells_when_it_is_cut(monkeypatch):
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    lost = Incarnation(17, "abcd")
    described = Lifeline(writing, os.getppid(), 3, reload=False, suffix="0f", predecessor=lost).described()
    for name, value in described.items():
        monkeypatch.setenv(name, value)
    line = Lifeline.inherited()
    assert line.number == 3
    assert (line.suffix, line.predecessor) == ("0f", lost)
    assert lifeline.VARIABLE not in os.environ
    assert Lifeline.inherited() is None
    assert not os.get_inheritable(writing)
    assert not os.get_blocking(writing)
    line.sign(progress=True)
    line.sign(progress=False)
    line.ask_replacement()
    assert os.read(reading, 10) == b"par"
    assert not line.is_cut()
    os.close(reading)
    line.sign(progress=True)
    assert line.is_cut()
    os.close(writing)


def test_a_full_pipe_does_not_block_a_child():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    line = Lifeline(writing, os.getppid(), 1, reload=False, suffix="0f")
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"a" * 4096)
    line.sign(progress=True)
    assert not line.is_cut()
    os.close(reading)
    os.close(writing)


def test_signs_tell_life_from_progress(db, tmp_path):
    path = tmp_path / "alive"
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    one = handler()
    sub = Subscriber(
        USING,
        {one.ref: one},
        get_settings(),
        heartbeat_file=HeartbeatFile(str(path)),
        lifeline=Lifeline(writing, os.getppid(), 1, reload=False, suffix="0f"),
    )
    for stuck_for, sign in ((0, lifeline.PROGRESS), (31, lifeline.ALIVE)):
        os.utime(path, (0, 0))
        sub.progress.at = time.monotonic() - stuck_for
        sub._signs_at = 0.0
        sub._give_signs()
        assert os.read(reading, 10) == sign
        assert (path.stat().st_mtime > 0) == (sign == lifeline.PROGRESS)
    sub._give_signs()  # not yet: it is not a second later
    with pytest.raises(BlockingIOError):
        os.read(reading, 10)
    os.close(reading)
    sub._signs_at = 0.0
    sub._give_signs()
    assert sub._stopping.is_set()  # nobody reads any more
    os.close(writing)


def test_a_database_that_is_away_is_no_lack_of_progress(db, monkeypatch):
    one = handler()
    poller = Subscriber(USING, {one.ref: one}, get_settings()).poller
    progress = []

    def fail():
        progress.append(poller.context.progress.at)
        raise OperationalError("away")

    monkeypatch.setattr(poller, "step", fail)
    in_thread(lambda: poller.run(lambda: len(progress) == 3))
    assert progress[0] < progress[1] < progress[2]


def test_resident_memory_is_that_of_this_process():
    before = memory.resident_mb()
    assert 10 < before < 4000
    ballast = b"x" * (200 << 20)
    assert memory.resident_mb() > before + 150
    del ballast


# -- options --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"processes": 2, "reload": True}, "--reload is for one process"),
        ({"processes": 2, "group": ["nobody"]}, "--group nobody: no handler has it"),
        ({"processes": 2, "heartbeat_file": "/nonexistent/alive"}, "/nonexistent/alive cannot be written: No such"),
        ({"heartbeat_file": "/nonexistent/alive"}, "/nonexistent/alive cannot be written: No such"),
        ({"max_memory": 5}, r"--max-memory 5: the process takes \d+ MB before"),
        ({"processes": 2, "database": "nowhere"}, "'nowhere'"),
    ],
)
def test_wrong_options_are_refused_before_any_child_starts(db, monkeypatch, options, text):
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(CommandError, match=text):
        call_command("runsubscriber", **options)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("debug", "out", "more", "expected"),
    [
        (True, Terminal(), {}, True),
        (False, Terminal(), {}, False),
        (True, io.StringIO(), {}, False),
        (True, Terminal(), {"processes": 2}, False),
        (True, Terminal(), {"drain": True}, False),
        (True, Terminal(), {"max_messages": 5}, False),
        (True, Terminal(), {"reload": False}, False),
        (False, io.StringIO(), {"reload": True}, True),
    ],
)
def test_when_the_code_is_watched(settings, debug, out, more, expected):
    settings.DEBUG = debug
    options = {"processes": None, "drain": False, "max_messages": None, "reload": None, **more}
    assert Command(stdout=out)._reloads(options) is expected


# -- real processes -------------------------------------------------------------


class Supervised(Worker):
    """``runsubscriber`` with a supervisor."""

    def children(self):
        """Pids in the order in which they were started."""
        return [int(pid) for pid in re.findall(r"child\.started number=\d+ pid=(\d+)", self.output)]

    def ready(self):
        return len(re.findall(r"subscriber\.started", self.output))

    def end(self):
        super().end()
        gone = set(re.findall(r"child\.(?:left|died) number=\d+ pid=(\d+)", self.output))
        for pid in self.children():
            if str(pid) not in gone:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(db, tmp_path):
    workers = []

    def start(*arguments, ready=1, **settings):
        worker = Supervised(tmp_path, *arguments, **settings)
        workers.append(worker)
        wait_for(lambda: worker.ready() >= ready, worker)
        return worker

    yield start
    for worker in workers:
        worker.end()


def is_running(pid):
    """A zombie does not run: whoever adopted it may be slow to bury it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


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
    assert "child.left" in worker.output
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
    # A busy machine may need more than the group's two seconds to hand out so much.
    limits = {"GROUPS": {"action": {"MAX_PROCESSING_TIME": 60}}}
    worker = start("--group", "action", "--max-memory", "300", "--processes", "1", **limits)
    wait_for(lambda: worker.ready() == 2, worker)
    assert "memory.exceeded" in worker.output
    assert "child.left" in worker.output
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


# -- a terminal -----------------------------------------------------------------

FOREGROUND = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
"""Makes the terminal on stdin the new session's own, so that a Ctrl-C in it becomes a SIGINT as a person's does."""


class InTerminal:
    """``runsubscriber`` in the foreground of a terminal of its own."""

    def __init__(self, *arguments):
        self._keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", FOREGROUND, sys.executable, "manage.py", "runsubscriber", *arguments],
            cwd=ROOT,
            env=environment(),
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
        )
        os.close(screen)
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with contextlib.suppress(OSError):  # EIO: nobody has it open any more
            while shown := os.read(self._keyboard, 4096):
                self.output += shown.decode(errors="replace")

    def press_ctrl_c(self):
        os.write(self._keyboard, b"\x03")

    def wait(self, timeout=30):
        code = self.process.wait(timeout)
        self._reader.join(10)
        return code

    def end(self):
        if self.process.poll() is None:
            self.process.kill()  # its children notice
            self.process.wait()
        self._reader.join(10)
        os.close(self._keyboard)


@pytest.fixture
def in_terminal(db):
    started = []

    def start(*arguments):
        started.append(InTerminal(*arguments))
        return started[-1]

    yield start
    for one in started:
        one.end()


SINGLE, SUPERVISED = (), ("--processes", "1")


@pytest.mark.processes
@pytest.mark.parametrize("arguments", [SINGLE, SUPERVISED])
def test_ctrl_c_reaches_the_parent_alone_and_handlers_finish(in_terminal, tmp_path, arguments):
    started, go = tmp_path / "started", tmp_path / "go"
    publish("p.action", {"n": 0, "do": "wait", "started": str(started), "go": str(go)}, key="k")
    one = in_terminal("--group", "action", *arguments)
    wait_for(started.exists, one)
    for pid in re.findall(r"child\.started number=1 pid=(\d+)", one.output):
        assert os.getpgid(int(pid)) != os.getpgid(one.process.pid)  # so the terminal's SIGINT does not reach it
    one.press_ctrl_c()
    wait_for(lambda: "subscriber.stopping" in one.output, one)
    assert "Stopping: handlers that run have up to 10 s; Ctrl-C again leaves at once." in one.output
    assert "reason=signal running=1" in one.output
    go.touch()
    assert one.wait() == 0
    assert "Leaving at once" not in one.output
    assert one.output.rstrip().endswith("Stopped.")
    assert lag("action", "p.action") == 0


@pytest.mark.processes
@pytest.mark.parametrize(("arguments", "code"), [(SINGLE, 130), (SUPERVISED, 1)])
def test_a_second_ctrl_c_says_that_it_leaves_at_once_and_does(in_terminal, tmp_path, arguments, code):
    started = tmp_path / "started"
    publish("p.action", {"n": 0, "do": "wait", "started": str(started), "go": str(tmp_path / "never")}, key="k")
    one = in_terminal("--group", "action", "--no-reload", *arguments)
    wait_for(started.exists, one)
    one.press_ctrl_c()
    wait_for(lambda: "subscriber.stopping" in one.output, one)
    one.press_ctrl_c()
    assert one.wait(8) == code
    assert "Leaving at once: what was in hand comes again after 3 s" in one.output


# -- reload ---------------------------------------------------------------------

SUBSCRIBERS = """
from django_mysqlqueue import subscriber
from tests.app.subscribers import act, record

@subscriber("p.reload", group="reload")
def handle(delivery):
    act(delivery.payload)
    record("{version}", delivery)
"""


class Project(Supervised):
    """``runsubscriber --reload`` in a project whose one app the test edits."""

    def __init__(self, folder):
        self._code = folder / "shop" / "subscribers.py"
        self._code.parent.mkdir()
        (folder / "shop" / "__init__.py").touch()
        (folder / "shop_settings.py").write_text(
            "from tests.settings import *\nINSTALLED_APPS = [*INSTALLED_APPS, 'shop']\n"
        )
        self._written_at = time.time()
        self.write(SUBSCRIBERS.format(version="one"))
        env = environment() | {"DJANGO_SETTINGS_MODULE": "shop_settings", "PYTHONPATH": f"{folder}:{ROOT}"}
        if connection.vendor == "sqlite":
            env["TEST_SQLITE_FILE"] = str(Path(env["TEST_SQLITE_FILE"]).absolute())
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "django", "runsubscriber", "--reload", "--group", "reload"],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def write(self, text):
        """As an editor does. Each version is younger than the one before, however coarse the clock."""
        self._code.write_text(text)
        self._written_at += 1
        os.utime(self._code, (self._written_at, self._written_at))

    def write_until(self, text, condition):
        """Again and again: the reloader may not have seen the version before."""
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, self.output
            self.write(text)
            time.sleep(0.2)


@pytest.mark.processes
def test_reload(db, tmp_path):
    """New code runs; what ran before finishes; an error waits for its mending."""
    started, go = tmp_path / "started", tmp_path / "go"
    project = Project(tmp_path)
    try:
        publish("p.reload", {"n": 1, "do": "wait", "started": str(started), "go": str(go)}, key="k")
        wait_for(started.exists, project)
        project.write_until(SUBSCRIBERS.format(version="two"), lambda: "subscriber.stopping" in project.output)
        go.touch()
        publish("p.reload", {"n": 2}, key="k")
        wait_for(lambda: effects("two") == [("k", 1, 2)], project)
        assert effects("one") == [("k", 1, 1)]
        project.write_until("def broken(:\n", lambda: "child.waiting" in project.output)
        shown = project.output.count("SyntaxError")
        project.write(SUBSCRIBERS.format(version="three"))
        publish("p.reload", {"n": 3}, key="k")
        wait_for(lambda: effects("three") == [("k", 1, 3)], project)
        project.send(signal.SIGTERM)
        assert project.wait() == 0
        assert shown == project.output.count("child.waiting")
        assert "reason='the code has changed'" in project.output
        assert project.output.count("Ctrl-C stops it") == 1
        assert not SubscriberHeartbeat.objects.filter(deregistered_at=0).exists()
        assert lag("reload", "p.reload") == 0
    finally:
        project.end()


def test_a_heartbeat_file_that_fails_is_said_once_and_recovers(tmp_path, caplog):
    folder = tmp_path / "folder"
    folder.mkdir()
    file = HeartbeatFile(str(folder / "alive"))
    (folder / "alive").unlink()
    folder.rmdir()
    file.touch()
    file.touch()
    assert caplog.text.count("heartbeat_file.failed") == 1
    folder.mkdir()
    file.touch()
    assert (folder / "alive").exists()


def test_memory_without_proc(tmp_path):
    assert 5 < memory.resident_mb(tmp_path / "none") < 100_000


def test_a_supervisor_needs_a_command_line_to_start_again(db):
    """Called from a script it would start that script."""
    with pytest.raises(CommandError, match="start this command line again"):
        call_command("runsubscriber", processes=2, group=["plain"])
