"""Real subscribers and publishers while their server restarts, dies, is demoted or falls silent.

The server is private to this file. Whatever happens to it, in the end every
committed message has been handled once more than never by every group, in
order per key, and exactly once by the atomic one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from urllib.parse import quote

import pytest
from django.db import connections, transaction

from django_mysqlqueue import publish
from django_mysqlqueue.models import PartitionLease, SubscriberHeartbeat
from tests.app.models import Effect
from tests.conftest import QUEUE_MODELS
from tests.support import accounts
from tests.support.outages import PRIVATE
from tests.support.paths import ROOT
from tests.support.processes import Worker, wait_for
from tests.support.proxy import Proxy
from tools import servers

pytestmark = [pytest.mark.processes, pytest.mark.servers_only]

EVERY_GROUP = [argument for group in accounts.GROUPS for argument in ("--group", group)]
# A failed message holds up those behind it, so that the order of effects is the order of first starts.
IN_ORDER = {"GROUPS": {"plain": {"ON_FAILURE": "block"}, "atomic": {"ON_FAILURE": "block"}}}
READ_TIMEOUT = 3


class Scene:
    """A proxy before the private server, and the processes that work there."""

    def __init__(self, server, tmp_path):
        self.server = server
        self.tmp_path = tmp_path
        # Beside the server's own socket: the path of one is short.
        self.proxy = Proxy(server.folder / f"proxy-{tmp_path.name[-20:]}", server.socket)
        self.stop_publishing = tmp_path / "stop-publishing"
        self.processes = []

    def env(self, *, direct=False):
        path = self.server.socket if direct else self.proxy.path
        timeouts = f"connect_timeout={READ_TIMEOUT}&read_timeout={READ_TIMEOUT}&write_timeout={READ_TIMEOUT}"
        return {
            "DATABASE_URL": f"mysql://app@/{servers.DATABASE}?unix_socket={quote(str(path), safe='')}&{timeouts}",
            "DJANGO_SETTINGS_MODULE": "tests.settings",
        }

    def subscriber(self, *arguments, direct=False, **settings):
        worker = Worker(self.tmp_path, *(arguments or EVERY_GROUP), env=self.env(direct=direct), **IN_ORDER | settings)
        self.processes.append(worker.process)
        wait_for(worker.is_ready, worker)
        return worker

    def publishers(self, count=2):
        """They go past the proxy: what happens to subscribers alone must not stop them."""
        for name in "abcdef"[:count]:
            with (self.tmp_path / f"publisher-{name}.log").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.support.publisher", name, str(self.stop_publishing)],
                        cwd=ROOT,
                        env={**os.environ, **self.env(direct=True)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.proxy.close()

    def finish(self, *workers):
        """Publishers stop, subscribers drain and leave: everything has been done."""
        self.stop_publishing.touch()
        for process in self.processes:
            if "tests.support.publisher" in process.args:
                assert process.wait(30) == 0
        wait_for(lambda: accounts.is_drained(PRIVATE), workers[0], timeout=60)
        for worker in workers:
            worker.send(signal.SIGTERM)
        assert [worker.wait() for worker in workers] == [0] * len(workers), workers[0].output
        accounts.assert_balanced(PRIVATE)


@pytest.fixture
def scene(db, server, tmp_path):
    for alias in (PRIVATE, f"{PRIVATE}_queue"):
        for model in (*QUEUE_MODELS, Effect):
            model.objects.using(alias).all().delete()
    scene = Scene(server, tmp_path)
    yield scene
    scene.close()


def handled(group, more_than=0):
    return lambda: accounts.count(group, PRIVATE) > more_than


def reconnect():
    """This process's own connection has died with the server."""
    for alias in (PRIVATE, f"{PRIVATE}_queue"):
        connections[alias].close()


@pytest.fixture
def impatient_server(server):
    """It ends every connection that says nothing for two seconds."""
    server.execute("SET GLOBAL wait_timeout = 2")
    yield
    server.execute("SET GLOBAL wait_timeout = 28800")


# -- idle ---------------------------------------------------------------------


@pytest.mark.promise("Server outages")
def test_idle_connections_that_the_server_ends(scene, impatient_server, tmp_path):
    """Pauses between messages and within a handler cost no attempt, on the queue's alias nor on the handlers' own."""
    worker = scene.subscriber("--group", "plain", "--group", "atomic", "--threads", "2", DATABASE="queue")
    queue = f"{PRIVATE}_queue"

    def send(number, **more):
        with transaction.atomic(using=queue):
            publish("p.plain", {"n": number, **more}, key="k", using=queue)

    def seen():
        return [[number for _, number in accounts.effects(group, PRIVATE)] for group in ("plain", "atomic")]

    send(0)
    wait_for(lambda: seen() == [[0], [0]], worker)
    # The test's own time: nothing tells it from outside when an idle connection has been ended.
    time.sleep(3.5)
    started, go = tmp_path / "started", tmp_path / "go"
    send(1, do="wait", started=str(started), go=str(go))
    for number in range(2, 6):
        send(number)
    wait_for(started.exists, worker)
    time.sleep(3.5)
    go.touch()
    wait_for(lambda: seen() == [[*range(6)], [*range(6)]], worker)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert "failed" not in worker.output
    assert "died" not in worker.output


# -- the server goes and comes back -------------------------------------------


@pytest.mark.promise("Server outages")
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_server_that_restarts_under_load(scene, end):
    worker = scene.subscriber()
    scene.publishers()
    wait_for(handled("atomic", 20), worker)
    reconnect()
    getattr(scene.server, end)()
    scene.server.start()
    before = accounts.count("committed", PRIVATE)
    wait_for(handled("committed", before + 60), worker)
    scene.finish(worker)


@pytest.mark.promise("Server outages")
def test_a_primary_that_turns_read_only_and_is_replaced(scene):
    """Nothing that a handler could not write in the meantime goes to the DLQ."""
    read_only = "super_read_only" if scene.server.engine == "mysql" else "read_only"
    worker = scene.subscriber()
    scene.publishers()
    wait_for(handled("atomic", 20), worker)
    scene.server.execute(f"SET GLOBAL {read_only} = 1")
    wait_for(lambda: "heartbeat.failed" in worker.output, worker)
    time.sleep(2)
    reconnect()
    scene.server.stop()
    scene.server.start()
    before = accounts.count("committed", PRIVATE)
    wait_for(handled("committed", before + 60), worker)
    scene.finish(worker)


@pytest.mark.promise("Server outages")
def test_a_demoted_primary_that_answers_on(scene):
    """Its connections live and read; every thread leaves them for the new primary by itself."""
    worker = scene.subscriber()
    scene.publishers()
    wait_for(handled("atomic", 20), worker)
    demoted = scene.proxy.demote()

    def are_left():
        # The main thread's say nothing more after the start.
        used = [link for link in demoted if link.spoke]
        return len(used) >= 3 and all(link.closed for link in used)  # heart, poller, handlers

    wait_for(are_left, worker)
    before = accounts.count("atomic", PRIVATE)
    wait_for(handled("atomic", before + 60), worker)
    wait_for(are_left, worker)
    scene.finish(worker)


# -- silence ------------------------------------------------------------------


@pytest.mark.promise("Server outages")
def test_connections_that_fall_silent(scene):
    """Others take over after the lease; the one that was cut off comes back after its read time-outs."""
    cut_off = scene.subscriber("--name", "cut-off", *EVERY_GROUP)
    scene.publishers()
    wait_for(handled("atomic", 20), cut_off)
    scene.proxy.go_dark()
    other = scene.subscriber("--name", "other", *EVERY_GROUP, direct=True)
    before = accounts.count("committed", PRIVATE)
    # What was committed before anybody else was there is handled: the leases have been taken over.
    wait_for(lambda: accounts.count("atomic", PRIVATE) >= before, other)
    scene.proxy.heal()

    def is_back():
        beats = SubscriberHeartbeat.objects.using(PRIVATE).filter(subscriber_name__startswith="cut-off")
        leases = PartitionLease.objects.using(PRIVATE).filter(leased_by__startswith="cut-off")
        return beats.exists() and leases.exists()

    wait_for(is_back, cut_off)
    scene.finish(other, cut_off)
