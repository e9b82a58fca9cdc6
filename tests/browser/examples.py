"""The example project on servers of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from tests.support.paths import ROOT

WAIT = 40.0
PUBLISH = """
import itertools
from django_mysqlqueue.service import sequencing
from example_project.commits.events import read_events
from example_project.commits.publishing import store
from example_project.paths import EVENTS_FILE
store(list(itertools.islice(read_events(EVENTS_FILE), {0}, {1})))
while sequencing.sequence("default").moved:
    pass
"""


class Example:
    """The example project with a database of its own."""

    def __init__(self, folder, kind: str) -> None:
        self._env = os.environ | {
            "DATABASE_URL": f"sqlite:///{folder / 'example.sqlite3'}",
            "DJANGO_SETTINGS_MODULE": "example_project.settings",
        }
        self._kind = kind
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._server: subprocess.Popen[bytes] | None = None

    def manage(self, *arguments: str) -> None:
        command = [sys.executable, "manage.py", *arguments]
        subprocess.run(command, cwd=ROOT, env=self._env, check=True, capture_output=True)

    def popen(self, *arguments: str) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        return subprocess.Popen([sys.executable, "manage.py", *arguments], cwd=ROOT, env=self._env, stderr=quiet)

    def publish(self, first: int, last: int) -> None:
        self.manage("shell", "-v", "0", "-c", PUBLISH.format(first, last))

    def start(self) -> None:
        where = ["127.0.0.1", str(self.port)]
        command = ["manage.py", "runserver", "--noreload", ":".join(where)]
        if self._kind == "asgi":
            command = ["-m", "uvicorn", "example_project.asgi:application", "--host", where[0], "--port", where[1]]
            command += ["--timeout-graceful-shutdown", "1", "--log-level", "error"]
        quiet = subprocess.DEVNULL
        self._server = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=self._env, stdout=quiet, stderr=quiet)
        deadline = time.monotonic() + WAIT
        while True:
            try:
                urllib.request.urlopen(f"{self.url}admin/login/", timeout=5).close()  # noqa: S310
                return
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def kill(self) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGKILL)
            self._server.wait(WAIT)
            self._server = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"
