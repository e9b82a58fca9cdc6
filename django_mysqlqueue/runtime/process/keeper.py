"""The process between a server and the subscribers beside it: it starts them, and starts them again if they end.

A server that forks its workers can neither have a thread that waits for a child nor rely on its own ``waitpid``. So it
starts this program, which runs ``runsubscriber --processes`` until the server stops it or is gone. It imports nothing
but the standard library: the subscribers are the processes that cost memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

TURN = 0.2
"""Seconds between two looks at the server and the child."""
LONG_RUN = 60.0
"""Seconds after which the end of a child is followed by the shortest pause again."""
SHORTEST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
PR_SET_PDEATHSIG = 1
DEFAULT = ("--processes=1",)
"""Arguments of ``runsubscriber`` if none are given: a supervisor releases at once what a process held that died."""


def command_line(arguments: Sequence[str], *, manage: str) -> list[str]:
    """Return the command line of subscribers.

    ``arguments``: those of ``runsubscriber``. ``manage``: path of ``manage.py``.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not Path(manage).is_file():
        raise FileNotFoundError(f"manage={manage!r}: there is no such file in {Path.cwd()}")
    return [sys.executable, manage, "runsubscriber", *(arguments or DEFAULT)]


def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a keeper of a command as a child of this process.

    A Ctrl-C in the terminal does not reach it: the server stops it.
    """
    # The keeper inherits that SIGHUP is blocked: until it handles it, that would end it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", __file__, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def say(text: str) -> None:
    """Write a line to the log of the server."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class Keeper:
    """Keep one child running until SIGTERM arrives, or the server is gone.

    Args:
        server: process id of the server, the parent of this process.
        command: command line of the child.
    """

    def __init__(self, server: int, command: Sequence[str]) -> None:
        self._server = server
        self._command = list(command)
        self._stopped = False
        self._restarts = False
        self._pause = SHORTEST_PAUSE

    def handle_signals(self) -> None:
        """Stop on SIGTERM and SIGINT; with SIGHUP, stop the child and start it again."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._restart)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})

    def run(self) -> None:
        """Run until the end of the last child."""
        dies_with_parent = _dying_with_parent()
        while not self._is_over():
            self._restarts, began = False, time.monotonic()
            try:
                child = subprocess.Popen(self._command, preexec_fn=dies_with_parent)  # noqa: S603  # It has one thread.
            except OSError as error:
                self._rest(f"cannot be started ({error})", 0)
                continue
            while child.poll() is None and not (self._restarts or self._is_over()):
                time.sleep(TURN)
            if child.poll() is None:
                child.terminate()
                child.wait()
            elif not self._is_over():
                code = child.returncode
                how = f"exit status {code}" if code >= 0 else f"signal {-code}"
                self._rest(f"ended ({how})", time.monotonic() - began)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopped = True

    def _restart(self, number: int, frame: FrameType | None) -> None:
        self._restarts = True

    def _is_over(self) -> bool:
        return self._stopped or os.getppid() != self._server

    def _rest(self, what: str, ran: float) -> None:
        """Pause after a child has ended by itself or could not be started, each time for longer."""
        if ran >= LONG_RUN:
            self._pause = SHORTEST_PAUSE
        say(f"django-mysqlqueue: the subscriber {what}; next start in {self._pause:g} s")
        until = time.monotonic() + self._pause
        while time.monotonic() < until and not (self._restarts or self._is_over()):
            time.sleep(TURN)
        self._pause = min(LONGEST_PAUSE, self._pause * 2)


def _dying_with_parent() -> Callable[[], None] | None:
    """Return a function for the child, after which the kernel stops it if the keeper is killed; None: not Linux."""
    if sys.platform != "linux":
        return None
    library, keeper = ctypes.CDLL(None), os.getpid()

    def call() -> None:
        library.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != keeper:  # It was killed before.
            os._exit(1)

    return call


if __name__ == "__main__":
    kept = Keeper(int(sys.argv[1]), sys.argv[2:])
    kept.handle_signals()
    kept.run()
