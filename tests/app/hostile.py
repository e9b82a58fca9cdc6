"""What handlers do to their process in the tests of edge cases."""

from __future__ import annotations

import gc
import locale
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable

from django.db import connection

from tests.app.models import Effect


def close_outputs() -> None:
    os.close(1)
    os.close(2)
    connection.close()


def change_the_process() -> None:
    os.chdir("/")
    os.umask(0o777)
    os.environ.clear()
    locale.setlocale(locale.LC_ALL, "C")
    logging.disable()
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    gc.disable()


def work_in_a_child() -> None:
    """Has connections of its own, and takes those of its parent with it when it ends."""
    Effect.objects.create(name="child||0")
    gc.collect()
    sys.exit(0)


def fork() -> None:
    children = [multiprocessing.get_context("fork").Process(target=work_in_a_child) for _ in range(3)]
    for child in children:
        child.start()
    if os.fork() == 0:
        return  # comes back out of the handler
    for child in children:
        child.join()
    for child in children:
        Effect.objects.create(name=f"joined|{child.exitcode}|0")


ACTIONS: dict[str, Callable[[], object]] = {
    "leave": lambda: os._exit(4),
    "stop": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "close outputs": close_outputs,
    "close all files": lambda: os.closerange(3, 1024),
    "change the process": change_the_process,
    "no stack": lambda: sys.setrecursionlimit(100),
    "fork": fork,
}
