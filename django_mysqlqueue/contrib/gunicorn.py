"""Hooks of gunicorn: subscribers beside its workers, in child processes of the master.

In ``gunicorn.conf.py``: ``from django_mysqlqueue.contrib.gunicorn import on_exit, on_reload, when_ready``
"""

from __future__ import annotations

import signal
import subprocess
from typing import Any

from django_mysqlqueue.runtime.process import keeper

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
    global _kept
    _kept = keeper.start(keeper.command_line(arguments, manage=manage))
    server.log.info("Started a subscriber beside the workers (pid: %s)", _kept.pid)


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
        _kept.terminate()
        _kept.wait()
