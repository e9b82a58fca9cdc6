"""Subscribers of the last release beside today's, on one schema: real processes, restarted and killed.

Before 1.0, the other side is HEAD. ``UPGRADE_FROM=REVISION`` chooses another one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from django.core.management import call_command
from django.db import connection

from django_mysqlqueue.models import DeliveryState, OutboxMessage, PartitionLease
from tests.app.models import Effect
from tests.conftest import QUEUE_MODELS
from tests.support import accounts
from tests.support.paths import ROOT
from tests.support.processes import Worker, environment, wait_for
from tests.upgrades import releases

pytestmark = [
    pytest.mark.promise("Rolling upgrades"),
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

APP = "django_mysqlqueue"
EVERY_GROUP = [argument for group in accounts.GROUPS for argument in ("--group", group)]
PUBLISHERS = {"old": "a", "new": "b"}
"""By side, the name of its publisher, with which its keys begin."""
# Not by the finder of an editable install: where the old code lacks a module it would find the working tree's.
MANAGE = (
    "import sys; sys.meta_path[:] = [one for one in sys.meta_path if '__editable__' not in str(one)]; "
    "import django_mysqlqueue; print('code', django_mysqlqueue.__file__, flush=True); "
    "from django.core.management import execute_from_command_line as run; run(['manage.py', *sys.argv[1:]])"
)


@pytest.fixture(scope="session")
def code(tmp_path_factory):
    """By side, the folder with its package."""
    return {"old": releases.build(releases.chosen(), tmp_path_factory.mktemp("release")), "new": ROOT}


class Subscriber(Worker):
    """Old or new code; its first line says which."""

    # -P: nothing comes before PYTHONPATH, not even the folder that it is started in.
    COMMAND = ("-P", "-c", MANAGE, "runsubscriber")

    def __init__(self, tmp_path, side, name, env):
        super().__init__(tmp_path, *EVERY_GROUP, "--name", name, "--claim-size", "20", whole_env=env)
        self.side = side

    def kill(self):
        self.send(signal.SIGKILL)
        self.wait()


class Scene:
    """The processes of a test."""

    def __init__(self, tmp_path, code):
        self.tmp_path, self.code = tmp_path, code
        self.stop = tmp_path / "stop"
        self.publishers, self.subscribers = {}, []

    def env(self, side):
        env = environment()
        if side == "old":  # what it covers is not the working tree
            env = {name: value for name, value in env.items() if not name.startswith("COVERAGE_")}
        path = os.pathsep.join([str(self.code[side]), str(ROOT)])
        return env | {"PYTHONPATH": path, "DJANGO_SETTINGS_MODULE": "tests.upgrades.settings", "UPGRADE_SIDE": side}

    def is_of(self, side, output):
        return output.startswith(f"code {self.code[side]}{os.sep}{APP}{os.sep}__init__.py")

    def run(self, side, *command):
        """Run a management command to its end."""
        done = subprocess.run(
            [sys.executable, "-P", "-c", MANAGE, *command],
            env=self.env(side),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert self.is_of(side, done.stdout)

    def subscriber(self, side, name):
        one = Subscriber(self.tmp_path, side, name, self.env(side))
        self.subscribers.append(one)
        wait_for(one.is_ready, one)
        assert self.is_of(side, one.output)
        return one

    def publisher(self, side):
        name = PUBLISHERS[side]
        with (self.tmp_path / f"publisher-{name}.log").open("wb") as log:
            self.publishers[side] = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.support.publisher", name, str(self.stop)],
                env=self.env(side),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def count(self, group, side):
        if group == "committed":
            return Effect.objects.filter(name__startswith=f"committed|{PUBLISHERS[side]}").count()
        return Effect.objects.filter(name__startswith=f"{group}|", name__endswith=f"|{side}").count()

    def continues(self, *workers, more=20):
        """Each publisher publishes, and the side of each worker handles messages of every group."""
        for name, sides in {"committed": self.publishers, **dict.fromkeys(accounts.GROUPS, workers)}.items():
            for side in sorted({one if isinstance(one, str) else one.side for one in sides}):
                before = self.count(name, side)
                wait_for(lambda name=name, side=side, n=before + more: self.count(name, side) >= n, workers[0])

    def leave(self, *workers):
        for worker in workers:
            worker.send(signal.SIGTERM)
        assert [worker.wait() for worker in workers] == [0] * len(workers), workers[0].output

    def finish(self, *workers):
        """Everything was handled, in order; nothing is left, and no process has failed."""
        self.stop.touch()
        assert [one.wait(30) for one in self.publishers.values()] == [0] * len(self.publishers)
        wait_for(accounts.is_drained, workers[0], timeout=60)
        self.leave(*workers)
        accounts.assert_balanced()
        for one in self.subscribers:
            assert "died" not in one.output
            assert "group.failed" not in one.output

    def end(self):
        for process in [*self.publishers.values(), *(one.process for one in self.subscribers)]:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def scene(db, tmp_path, code):
    scene = Scene(tmp_path, code)
    yield scene
    scene.end()


@pytest.fixture
def expand(db):
    """A schema of some later version: every table has one more column and index, and there is one more table."""
    tables = [model._meta.db_table for model in QUEUE_MODELS]
    undo = []

    def expand():
        with connection.cursor() as cursor:
            for table in tables:
                cursor.execute(f"ALTER TABLE {table} ADD COLUMN later BIGINT DEFAULT 7 NOT NULL")
                undo.append(f"ALTER TABLE {table} DROP COLUMN later")
                cursor.execute(f"CREATE INDEX later_{table} ON {table} (later)")
                undo.append(f"DROP INDEX later_{table}" + (f" ON {table}" if connection.vendor == "mysql" else ""))
            cursor.execute("CREATE TABLE queue_later (id BIGINT PRIMARY KEY)")
            undo.append("DROP TABLE queue_later")

    yield expand
    with connection.cursor() as cursor:
        for statement in reversed(undo):
            cursor.execute(statement)


def test_a_rolling_restart_with_kills(scene, expand):
    """The schema grows while old code works; its processes are replaced one by one, and both sides are killed."""
    killed, left = (scene.subscriber("old", f"old{number}") for number in range(2))
    for side in PUBLISHERS:
        scene.publisher(side)
    scene.continues(killed)
    expand()
    scene.continues(killed)
    first = scene.subscriber("new", "new0")
    scene.continues(left, first)
    killed.kill()
    second = scene.subscriber("new", "new1")
    scene.continues(left, second)
    scene.leave(left)
    scene.continues(second)
    first.kill()
    third = scene.subscriber("new", "new2")
    scene.continues(third)
    scene.finish(second, third)


def test_a_step_back(scene):
    """New code is replaced by old code again: what it left behind is read, and nothing is lost."""
    new = scene.subscriber("new", "new")
    scene.publisher("new")
    scene.continues(new)
    new.kill()
    assert DeliveryState.objects.exists() or OutboxMessage.objects.exists() or PartitionLease.objects.exists()
    old = scene.subscriber("old", "old")
    scene.continues(old)
    scene.finish(old)


def test_the_last_releases_schema_migrates_with_what_is_in_it(scene):
    """Old code on its own schema, killed; then ``migrate``; then new code."""
    call_command("migrate", APP, "zero", verbosity=0)
    try:
        scene.run("old", "migrate", APP, "--verbosity", "0")
        old = scene.subscriber("old", "old")
        scene.publisher("old")
        scene.continues(old)
        old.kill()
    finally:
        call_command("migrate", APP, verbosity=0)
    new = scene.subscriber("new", "new")
    scene.continues(new)
    scene.finish(new)
