"""The example project's page that follows a topic, on its own servers, through a restart."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import WAIT_MS
from tests.support.paths import ROOT

pytestmark = pytest.mark.any_engine
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


@pytest.fixture(params=["wsgi", "asgi"])
def example(request, tmp_path):
    found = Example(tmp_path, request.param)
    found.manage("migrate", "-v", "0")
    found.manage("demouser")
    found.start()
    yield found
    found.kill()


@pytest.mark.promise("Tails")
@pytest.mark.timeout(240)
def test_a_page_follows_a_topic_through_a_restart_of_the_server(example: Example, chromium: Browser):
    context = chromium.new_context()
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    example.publish(0, 3)
    page.goto(f"{example.url}live/")
    page.fill("#id_username", "demo")
    page.fill("#id_password", "demo")
    page.click("input[type=submit]")
    status = page.locator("#status")
    expect(status).to_have_text("Live", timeout=WAIT_MS)
    assert page.locator("#commits tr").count() == 0, "only what is new"

    def offsets() -> list[int]:
        return [int(text) for text in page.locator("#commits tr td:first-child").all_inner_texts()][::-1]

    example.publish(3, 8)
    expect(page.locator("#commits tr")).to_have_count(5, timeout=WAIT_MS)
    assert offsets() == [4, 5, 6, 7, 8]
    example.kill()
    expect(status).to_have_text("Connection lost. Connecting again …", timeout=WAIT_MS)
    example.publish(8, 15)
    example.start()
    expect(page.locator("#commits tr")).to_have_count(12, timeout=WAIT_MS)
    assert offsets() == list(range(4, 16)), "nothing twice, nothing missing"
    expect(status).to_have_text("Live")
    first = page.locator("#commits tr").last.inner_text()
    assert re.fullmatch(r"4\s+\S+\s+\d+\s+[0-9a-f]{10}\s+\d+", first)
    assert wrong == []
    context.close()
