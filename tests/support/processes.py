"""Real ``runsubscriber`` processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from django.db import connection

from django_mysqlqueue import Message, publish_many
from tests.app.models import Effect
from tests.support import forked
from tests.support.harness import USING, lag
from tests.support.internals import polling
from tests.support.paths import ROOT

SHORT = {
    "LEASE_DURATION": 3,
    "LEASE_RENEWAL_INTERVAL": 1,
    "POLL_INTERVAL": 0.05,
    "MAX_POLL_INTERVAL": 0.2,
    "SHUTDOWN_TIMEOUT": 10,
}


def hear_ctrl_c():
    """``preexec_fn`` of a program that gets Ctrl-C: those in the background of a shell inherit that it is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def deaf_to_ctrl_c():
    """The programs that are started meanwhile ignore SIGINT unless they reset it, as after ``make test &``."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def environment(**settings):
    database = connection.settings_dict
    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "TEST_MYSQLQUEUE": json.dumps(SHORT | settings),
        "TEST_WITHOUT_ADMIN": "1",
    }
    if connection.vendor == "mysql":
        parts = urlsplit(os.environ["DATABASE_URL"])
        env["DATABASE_URL"] = urlunsplit(parts._replace(path=f"/{database['NAME']}"))
    else:
        env["TEST_SQLITE_FILE"] = str(database["NAME"])
    return env


class Worker:
    """A ``runsubscriber`` process that this test started, and ends."""

    COMMAND = ("manage.py", "runsubscriber")

    def __init__(self, tmp_path, *arguments, env=None, whole_env=None, **settings):
        self.log = tmp_path / f"worker-{random.getrandbits(32):08x}.log"
        environ = whole_env or environment(**settings) | (env or {})
        # A supervisor starts its processes as it was started.
        forks = type(self) is Worker and not {"--processes", "--reload"} & set(arguments)
        if forks and (found := forked.start([*self.COMMAND, *arguments], environ, self.log)):
            self.process = found
            return
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error::ResourceWarning", *self.COMMAND, *arguments],
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def send(self, number):
        self.process.send_signal(number)

    def freeze(self):
        freeze(self.process.pid)

    def wait(self, timeout=30):
        return self.process.wait(timeout)

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    def is_ready(self):
        return "subscriber.started" in self.output

    def is_there(self):
        return self.process.poll() is None

    def end(self):
        if self.is_there():
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()


def freeze(pid):
    """Stop a process, and wait until each of its threads stands still.

    On a busy machine a thread goes on for some ten milliseconds after ``kill`` has returned.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: all(_state(task) == "T" for task in Path(f"/proc/{pid}/task").iterdir()))


def _state(task):
    """A letter as in ``ps``; None: the process or thread has ended."""
    try:
        return (task / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def wait_for(condition, worker=None, timeout=40):
    deadline = time.monotonic() + timeout
    while not condition():
        if worker is not None and worker.process.poll() is not None and not condition():
            raise AssertionError(f"the worker has left with {worker.process.returncode}:\n{worker.output}")
        if time.monotonic() > deadline:
            raise AssertionError("waited in vain" + (f":\n{worker.output}" if worker else ""))
        time.sleep(0.05)


def effects(name):
    return [
        (key, int(attempt), value)
        for row, value in Effect.objects.order_by("id").values_list("name", "value")
        for kind, key, attempt in [row.split("|")]
        if kind == name
    ]


def drained(group, topic):
    def check():  # what is due first: it becomes lag in one commit
        return not polling.poll(polling.Session(USING)).due and lag(group, topic) == 0

    return check


def publish_numbers(topic, count, partitions=5, **more):
    publish_many(topic, (Message({"n": n, **more}, key=f"k{n % partitions}") for n in range(count)))


def assert_ordered(rows):
    """The first starts of each key are in published order."""
    first = {}
    for key, _, number in rows:
        if number not in first.setdefault(key, []):
            first[key].append(number)
    for key, numbers in first.items():
        assert numbers == sorted(numbers), key


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


def is_running(pid):
    """A zombie does not run: whoever adopted it may be slow to bury it."""
    return _state(Path(f"/proc/{pid}")) not in (None, "Z")
