"""Processes of ``manage.py`` that start at once: forks of one that has set Django up in the same environment.

Importing Django and the package takes half a second of CPU time, and the tests start subscribers by the hundred.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path

from tests.support.paths import ROOT

MODULES = ("django_mysqlqueue.management.commands.runsubscriber", "django_mysqlqueue.runtime.process.subscriber")
"""What most of the processes import."""
SERVERS = 6
"""As many environments are kept ready; of more, those that were not used for longest end."""


class Forked:
    """A process, with those methods of ``subprocess.Popen`` that tests call."""

    def __init__(self, server: _Server, pid: int, args: list[str]) -> None:
        self._server = server
        self.pid = pid
        self.args = args
        self.stdout = None
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.status(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if until is None else until - time.monotonic()
            if left is not None and left < 0:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = self._server.status(self.pid, left)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    """The process that forks, in one environment."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._statuses: dict[int, int] = {}
        self._running = 0
        self._lock = threading.Lock()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error::ResourceWarning", "-m", __name__, str(theirs.fileno())],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._answers: list[str] = []
        self._rest = ""
        while self._read() and not self._answers:
            pass
        self.is_ready = self._answers == ["ready"]
        self._answers.clear()

    def _read(self) -> bool:
        """Reads answers; False: there are none any more."""
        data = self._socket.recv(65536).decode()
        *lines, self._rest = (self._rest + data).split("\n")
        for kind, *numbers in map(str.split, lines):
            if kind == "ended":
                self._statuses[int(numbers[0])] = int(numbers[1])
                self._running -= 1
            else:
                self._answers.append(" ".join([kind, *numbers]))
        return bool(data)

    def start(self, arguments: list[str], log: Path) -> Forked:
        with self._lock:
            ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as in the background of a shell: inherited
            self._socket.sendall(json.dumps([arguments, str(log), ignored]).encode() + b"\n")
            while not self._answers:
                assert self._read(), "the process that forks has ended"
            self._running += 1
            return Forked(self, int(self._answers.pop().removeprefix("started ")), arguments)

    def status(self, pid: int, timeout: float | None) -> int | None:
        """The exit code of a process as soon as it has one, within some seconds at most."""
        # In short steps: another thread may read what this one waits for.
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                while pid not in self._statuses and select.select([self._socket], [], [], 0)[0]:
                    assert self._read(), "the process that forks has ended"
                if pid in self._statuses:
                    return self._statuses[pid]
            if until is not None and time.monotonic() >= until:
                return None
            select.select([self._socket], [], [], 0.1)

    def is_idle(self) -> bool:
        """Whether all of its processes have ended."""
        with self._lock:
            while self._running and select.select([self._socket], [], [], 0)[0]:
                assert self._read(), "the process that forks has ended"
            return not self._running

    def end(self) -> None:
        self._socket.close()
        self.process.wait()


_servers: dict[str, _Server] = {}


def start(arguments: list[str], environment: dict[str, str], log: Path) -> Forked | None:
    """Start a command of ``manage.py``.

    Returns:
        None if a fork would not be the same: Django cannot be set up, or coverage is measured.
    """
    if any(name.startswith("COVERAGE_P") for name in environment):
        return None
    log.touch()
    name = json.dumps(environment, sort_keys=True)
    server = _servers.pop(name, None) or _Server(environment)
    if not server.is_ready:
        server.end()
        return None
    _servers[name] = server
    idle = [one for one in _servers if one != name and _servers[one].is_idle()]
    for other in idle[: max(0, len(_servers) - SERVERS)]:
        _servers.pop(other).end()
    return server.start(arguments, log)


@atexit.register
def _end_all() -> None:
    """What they and their processes have used counts as this process's, then."""
    while _servers:
        _servers.popitem()[1].end()


# -- in the server -------------------------------------------------------------


def serve(control: socket.socket) -> list[str]:
    """Forks until nobody asks any more. Returns the arguments of a process in the process."""
    requests = control.makefile("r")
    children: dict[int, int] = {}
    """pidfd → process."""
    while True:
        found, _, _ = select.select([control, *children], [], [])
        for one in found:
            if one is not control:
                pid = children.pop(one)
                os.close(one)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                control.sendall(f"ended {pid} {status}\n".encode())
                continue
            line = requests.readline()
            if not line:
                os._exit(0)
            arguments, log, ignored = json.loads(line)
            pid = os.fork()
            if pid == 0:
                for descriptor in children:
                    os.close(descriptor)
                requests.close()
                control.close()
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.close(output)
                signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
                return list(arguments)
            children[os.pidfd_open(pid)] = pid
            control.sendall(f"started {pid}\n".encode())


def main() -> None:
    # Ctrl-C is for those that ask.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    import django
    from django.core.management import execute_from_command_line

    django.setup()
    for name in MODULES:
        import_module(name)
    control.sendall(b"ready\n")
    sys.argv = serve(control)
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
