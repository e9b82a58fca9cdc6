"""Hooks of gunicorn: subscribers beside its workers, in child processes of the master.

In ``gunicorn.conf.py``: ``from django_mysqlqueue.contrib.gunicorn import on_exit, on_reload, when_ready``
"""

from __future__ import annotations

import signal
import subprocess
from types import FrameType
from typing import Any

from django_mysqlqueue.runtime.process import keeper

TURN = 1.0
"""Seconds after which the master looks whether the process that keeps the subscribers is still there."""

_kept: subprocess.Popen[bytes] | None = None


def when_ready(server: Any, *arguments: str, manage: str = "manage.py") -> None:
    """Start subscribers, once for the server and not for each of its workers.

    If their process ends, it is started again after a pause. If the server is killed, they stop.

    Args:
        server: the master of gunicorn.
        arguments: the arguments of ``manage.py runsubscriber`` (default: ``--processes=1``).
        manage: path of ``manage.py`` (default: in the folder that the server runs in).

    Raises:
        FileNotFoundError: there is no such file.
    """
    command = keeper.command_line(arguments, manage=manage)

    def start() -> None:
        global _kept
        _kept = keeper.start(command)
        server.log.info("Started a subscriber beside the workers (pid: %s)", _kept.pid)

    def look(number: int, frame: FrameType | None) -> None:
        if server.LISTENERS and _kept is not None and _kept.poll() is not None:  # It was killed, and nothing stops.
            try:
                start()
            except OSError as error:
                server.log.error("The subscriber beside the workers cannot be started: %s", error)

    start()
    # The master has no hook that it calls regularly. Its workers do not inherit the timer.
    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, TURN, TURN)


def on_reload(server: Any) -> None:
    """Stop the subscribers and start them again, with the code as it is now. Running handlers are waited for.

    Args:
        server: the master of gunicorn.
    """
    if _kept is not None:
        _kept.send_signal(signal.SIGHUP)


def on_exit(server: Any) -> None:
    """Stop the subscribers, and wait until they have ended: about ``SHUTDOWN_TIMEOUT`` at most.

    Args:
        server: the master of gunicorn.
    """
    if _kept is not None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _kept.terminate()
        _kept.wait()
