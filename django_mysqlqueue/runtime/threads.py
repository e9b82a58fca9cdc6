"""The threads of a worker: their names, and the database in the lines that they log."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from django_mysqlqueue.runtime import log
from django_mysqlqueue.service.databases import queue_aliases
from django_mysqlqueue.sql.connection import close_connections


def worker_thread(run: Callable[[], object], role: str, using: str) -> threading.Thread:
    """Return a daemon thread that works on a database; its log lines name it if the queue has several.

    It closes its connections at the end.

    ``role``: what the thread does, for its name: ``mysqlqueue-poller``, or ``mysqlqueue-poller-shop`` if the queue has
    several databases.
    """

    def run_about() -> None:
        with about(using):
            try:
                run()
            finally:
                close_connections()

    name = f"mysqlqueue-{role}-{using}" if _has_several() else f"mysqlqueue-{role}"
    return threading.Thread(target=run_about, name=name, daemon=True)


def about(using: str) -> AbstractContextManager[None]:
    """Add ``database`` to the events that this thread logs in the block, if the queue has several databases."""
    return log.with_database(using if _has_several() else None)


def _has_several() -> bool:
    return len(queue_aliases()) > 1
