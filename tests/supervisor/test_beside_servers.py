"""Subscribers beside web servers: started once, started again, and stopped with the server, even if that is killed."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from django_mysqlqueue.contrib import asgi
from django_mysqlqueue.models import PartitionLease, SubscriberHeartbeat
from django_mysqlqueue.runtime.process import keeper
from tests.support.paths import ROOT
from tests.support.processes import drained, effects, environment, is_running, publish_numbers, wait_for

pytestmark = pytest.mark.processes
KEEPER = str(Path(keeper.__file__))


class Server:
    """A web server that this test has started, with what it and its subscribers have written."""

    def __init__(self, log, *command, cwd=ROOT, **env):
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=cwd,
                env={**environment(), **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.seen = set()

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    def started(self):
        """Pids of the supervisors, in the order in which they were started."""
        return [int(pid) for pid in re.findall(r"supervisor\.started pid=(\d+)", self.output)]

    def subscribers(self):
        return len(re.findall(r"subscriber\.started", self.output))

    def keepers(self):
        """Pids of the processes that keep subscribers for this server or one of its workers."""
        parents = {self.process.pid, *_children(self.process.pid)}
        return [pid for parent in parents for pid in _children(parent) if KEEPER in _command(pid)]

    def wait_for_subscribers(self, number):
        wait_for(lambda: self.subscribers() >= number, self, timeout=60)
        self.seen |= {*self.keepers(), *self.started()}

    def end(self):
        self.seen |= {*_children(self.process.pid), *self.keepers(), *self.started()}
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in self.seen:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


def _children(pid):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.append(int(process.name))
    return found


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


@pytest.fixture
def start(db, tmp_path):
    servers = []

    def start(*command, **options):
        server = Server(tmp_path / f"server-{len(servers)}.log", *command, **options)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.end()


@pytest.fixture
def gunicorn(start):
    def start_gunicorn(**env):
        arguments = ("--config", "python:tests.support.gunicorn_conf", "tests.support.gunicorn_conf:application")
        return start("-m", "gunicorn", *arguments, **env)

    return start_gunicorn


def _is_gone(server):
    return not any(map(is_running, server.started()))


def test_gunicorn_starts_one_subscriber_and_stops_it(gunicorn):
    server = gunicorn()
    server.wait_for_subscribers(1)
    wait_for(lambda: server.output.count("Booting worker") >= 2, server)
    (kept,) = server.keepers()
    publish_numbers("p.plain", 20)
    wait_for(drained("plain", "p.plain"), server)
    server.process.terminate()
    assert server.process.wait(60) == 0
    # It has waited.
    assert not is_running(kept)
    assert _is_gone(server)
    assert server.subscribers() == 1
    assert server.output.count("Stopped.") == 1
    assert len(effects("plain")) == 20
    assert not PartitionLease.objects.exclude(leased_by="").exists()
    assert not SubscriberHeartbeat.objects.filter(deregistered_at=0).exists()


@pytest.mark.any_engine
def test_gunicorn_starts_a_subscriber_again_that_was_killed(gunicorn):
    server = gunicorn()
    server.wait_for_subscribers(1)
    os.kill(server.started()[0], signal.SIGKILL)
    server.wait_for_subscribers(2)
    assert "the subscriber ended (signal 9); next start in 1 s" in server.output
    assert server.process.poll() is None
    publish_numbers("p.plain", 5)
    wait_for(drained("plain", "p.plain"), server)


def test_a_subscriber_stops_if_gunicorn_is_killed(gunicorn):
    server = gunicorn()
    server.wait_for_subscribers(1)
    (kept,) = server.keepers()
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not is_running(kept) and _is_gone(server), timeout=60)
    assert server.output.count("Stopped.") == 1
    assert not SubscriberHeartbeat.objects.filter(deregistered_at=0).exists()


@pytest.mark.any_engine
def test_a_keeper_that_is_killed_takes_its_subscriber_with_it_and_is_replaced(gunicorn):
    server = gunicorn()
    server.wait_for_subscribers(1)
    (first,) = server.keepers()
    os.kill(first, signal.SIGKILL)
    server.wait_for_subscribers(2)
    wait_for(lambda: not is_running(server.started()[0]), server, timeout=60)
    (second,) = server.keepers()
    assert second != first
    assert server.output.count("Stopped.") == 1
    assert server.process.poll() is None
    server.process.terminate()
    assert server.process.wait(60) == 0
    assert not is_running(second)
    assert _is_gone(server)


@pytest.mark.any_engine
def test_a_reload_of_gunicorn_restarts_the_subscriber(gunicorn):
    server = gunicorn()
    server.wait_for_subscribers(1)
    first = server.keepers()
    server.process.send_signal(signal.SIGHUP)
    server.wait_for_subscribers(2)
    assert server.keepers() == first
    assert server.output.count("Stopped.") == 1
    assert "next start" not in server.output


@pytest.mark.any_engine
def test_a_reload_right_after_the_start_does_not_end_the_keeper():
    kept = keeper.start([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        kept.send_signal(signal.SIGHUP)
        wait_for(lambda: kept.poll() is not None or _children(kept.pid), None)
        assert kept.poll() is None
    finally:
        kept.terminate()
        kept.wait(60)


@pytest.mark.any_engine
def test_a_keeper_tries_again_to_start_what_cannot_be_started(capfd):
    kept = keeper.start(["/absent"])
    try:
        wait_for(lambda: kept.poll() is not None or "next start in 1 s" in capfd.readouterr().err, None)
        wait_for(lambda: kept.poll() is not None or "next start in 2 s" in capfd.readouterr().err, None)
        assert kept.poll() is None
    finally:
        kept.terminate()
        kept.wait(60)


@pytest.mark.any_engine
def test_an_asgi_server_tries_again_to_start_a_keeper(monkeypatch, capfd, tmp_path):
    starts = []

    def start(command):
        starts.append(command)
        if len(starts) == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    async def keep(lock):
        keeping = asyncio.create_task(asgi._keep(["x"], lock))
        async with asyncio.timeout(60):
            while len(starts) < 2:
                await asyncio.sleep(0.01)
        keeping.cancel()
        await asyncio.wait([keeping])

    monkeypatch.setattr(keeper, "start", start)
    monkeypatch.setattr(asgi, "PAUSE", 0.01)
    with (tmp_path / "lock").open("w") as lock:
        asyncio.run(keep(lock.fileno()))
    assert "the subscriber cannot be started ([Errno 11] Resource temporarily unavailable)" in capfd.readouterr().err


def test_gunicorn_does_not_start_without_manage_py(gunicorn):
    server = gunicorn(TEST_MANAGE="absent.py")
    assert server.process.wait(60) != 0
    assert "manage='absent.py': there is no such file" in server.output


@pytest.fixture
def uvicorn(start, tmp_path):
    def start_uvicorn(*arguments):
        folder = tmp_path / "bell"
        folder.mkdir(mode=0o700, exist_ok=True)
        settings = environment(BELL={"DIRECTORY": str(folder)})["TEST_MYSQLQUEUE"]
        command = ("-m", "uvicorn", "tests.support.asgi_project:application", "--port", "0", *arguments)
        return start(*command, TEST_MYSQLQUEUE=settings)

    return start_uvicorn


def test_one_worker_of_uvicorn_has_the_subscriber(uvicorn):
    server = uvicorn("--workers", "2")
    server.wait_for_subscribers(1)
    wait_for(lambda: server.output.count("Application startup complete") >= 2, server, timeout=60)
    (kept,) = server.keepers()
    publish_numbers("p.plain", 20)
    wait_for(drained("plain", "p.plain"), server)
    server.process.terminate()
    server.process.wait(60)
    assert not is_running(kept)
    assert _is_gone(server)
    assert (server.subscribers(), server.output.count("Stopped.")) == (1, 1)
    assert not SubscriberHeartbeat.objects.filter(deregistered_at=0).exists()


@pytest.mark.any_engine
def test_another_worker_takes_over(uvicorn):
    server = uvicorn("--workers", "2")
    server.wait_for_subscribers(1)
    (kept,) = server.keepers()
    (leader,) = [pid for pid in _children(server.process.pid) if kept in _children(pid)]
    os.kill(leader, signal.SIGKILL)
    server.wait_for_subscribers(2)
    wait_for(lambda: not is_running(kept), server)
    assert len(server.keepers()) == 1
    # A keeper that is gone is replaced, too.
    os.kill(server.keepers()[0], signal.SIGKILL)
    server.wait_for_subscribers(3)


@pytest.mark.any_engine
def test_a_subscriber_stops_if_uvicorn_is_killed(uvicorn):
    server = uvicorn()
    server.wait_for_subscribers(1)
    server.process.kill()
    wait_for(lambda: _is_gone(server), timeout=60)
    assert server.output.count("Stopped.") == 1


@pytest.mark.any_engine
def test_uvicorn_does_not_start_if_there_is_no_place_for_the_lock(uvicorn, tmp_path):
    (tmp_path / "bell").mkdir()
    (tmp_path / "bell").chmod(0o777)
    server = uvicorn()
    assert server.process.wait(60) != 0
    assert "The subscriber cannot be started: " in server.output
    assert "can be written to by every user" in server.output


MANAGE = """
import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
    execute_from_command_line(sys.argv)
"""


@pytest.fixture
def runserver(start, tmp_path):
    def start_runserver(*arguments, debug=True, apps=()):
        project = tmp_path / "project"
        shutil.copytree(ROOT / "tests" / "orders_project", project)
        (project / "manage.py").write_text(MANAGE)
        with (project / "settings.py").open("a") as settings:
            settings.write(f'DEBUG = {debug}\nALLOWED_HOSTS = ["*"]\nMYSQLQUEUE["RUN_IN_SERVER"] = True\n')
            settings.write(f"INSTALLED_APPS += {apps!r}\n")
        for app in apps:
            (project / "lib" / app).mkdir(parents=True)
            (project / "lib" / app / "__init__.py").touch()
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**environment(), "PYTHONPATH": os.pathsep.join([path, str(project / "lib")])}
        migrate = [sys.executable, "manage.py", "migrate", "--run-syncdb"]
        subprocess.run(migrate, cwd=project, env=env, check=True, capture_output=True)
        return start("manage.py", "runserver", "127.0.0.1:0", *arguments, cwd=project, PYTHONPATH=path)

    return start_runserver


STARTING = "Starting a subscriber beside the server (MYSQLQUEUE['RUN_IN_SERVER'])."


@pytest.mark.any_engine
def test_runserver_has_a_subscriber_that_is_restarted_with_the_code(runserver):
    server = runserver()
    server.wait_for_subscribers(1)
    assert server.output.count(STARTING) == 1
    views = server.log.parent / "project" / "orders" / "views.py"
    wait_for(lambda: "Watching for file changes" in server.output, server)

    def changed():
        if "changed, reloading" in server.output:
            return True
        views.touch()  # Again, if the reloader had not seen the file before.
        return False

    wait_for(changed, server, timeout=60)
    server.wait_for_subscribers(2)
    wait_for(lambda: not is_running(server.started()[0]), server)
    server.process.terminate()
    server.process.wait(60)
    wait_for(lambda: _is_gone(server), timeout=60)


@pytest.mark.any_engine
@pytest.mark.parametrize("arguments", [("--pythonpath=lib",), ("--pythonpath", "lib")])
def test_the_subscriber_of_runserver_has_its_python_path(runserver, arguments):
    server = runserver("--noreload", *arguments, apps=("elsewhere",))
    server.wait_for_subscribers(1)
    assert "next start" not in server.output


@pytest.mark.any_engine
@pytest.mark.parametrize("debug", [True, False])
def test_runserver_without_the_reloader(runserver, debug):
    server = runserver("--noreload", debug=debug)
    if debug:
        server.wait_for_subscribers(1)
        assert server.output.count(STARTING) == 1
        server.process.kill()
        wait_for(lambda: _is_gone(server), timeout=60)
        return
    wait_for(lambda: "RUN_IN_SERVER'] is ignored, because DEBUG is False" in server.output, server)
    wait_for(lambda: "Quit the server" in server.output, server)
    assert server.keepers() == server.started() == []
