"""Supervised subscriber processes in a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import threading

import pytest

from django_mysqlqueue import publish
from tests.support.harness import lag
from tests.support.paths import ROOT
from tests.support.processes import environment, wait_for

pytestmark = pytest.mark.any_engine

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
    assert "Stopping: running handlers have up to 10 s to finish; Ctrl-C again exits at once." in one.output
    assert "reason=signal running=1" in one.output
    go.touch()
    assert one.wait() == 0
    assert "Exiting at once" not in one.output
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
    assert "Exiting at once: in-flight messages will be redelivered after 3 s" in one.output
