"""Reloading on changed code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from django.db import connection

from django_mysqlqueue import publish
from django_mysqlqueue.models import SubscriberHeartbeat
from tests.support.harness import lag
from tests.support.paths import ROOT
from tests.support.processes import Supervised, effects, environment, wait_for

pytestmark = pytest.mark.any_engine

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
        """As an editor does, at once: no child reads half of it. Each version has a later time."""
        draft = self._code.with_suffix(".draft")
        draft.write_text(text)
        self._written_at += 1
        os.utime(draft, (self._written_at, self._written_at))
        draft.replace(self._code)

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
        project.write(SUBSCRIBERS.format(version="three"))
        publish("p.reload", {"n": 3}, key="k")
        wait_for(lambda: effects("three") == [("k", 1, 3)], project)
        project.send(signal.SIGTERM)
        assert project.wait() == 0
        assert project.output.count("SyntaxError") == project.output.count("child.waiting")
        assert "reason='the code has changed'" in project.output
        assert project.output.count("Press Ctrl-C") == 1
        assert not SubscriberHeartbeat.objects.filter(deregistered_at=0).exists()
        assert lag("reload", "p.reload") == 0
    finally:
        project.end()
