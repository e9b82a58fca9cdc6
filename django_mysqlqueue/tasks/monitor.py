"""The thread that stores the starts and the progress of running jobs, and tells them that they are to stop."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from django.db import Error

from django_mysqlqueue.exceptions import QueueError
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.log import failing
from django_mysqlqueue.runtime.threads import worker_thread
from django_mysqlqueue.service import job_rows
from django_mysqlqueue.sql.connection import close_connections
from django_mysqlqueue.sql.session import Session, run
from django_mysqlqueue.tasks.attempts import Attempt

INTERVAL = 1.0
"""Seconds between two turns."""

_running: dict[int, Attempt] = {}
"""The attempts that run in this process, by id() of the object."""
_monitored: set[str] = set()
"""Aliases of the databases that have a monitor."""


@contextlib.contextmanager
def watching(attempt: Attempt) -> Iterator[None]:
    """Let the monitor of the database, if there is one, know of an attempt while it runs."""
    attempt.is_monitored = attempt.using in _monitored
    _running[id(attempt)] = attempt
    try:
        yield
    finally:
        del _running[id(attempt)]


class JobMonitor:
    """One thread per database, with a connection of its own.

    A job that ends within a second costs nothing. For others, a turn executes one UPDATE, if there is something new to
    store, and one SELECT, if tasks have asked whether they are to stop.

    Args:
        using: alias of the queue's database.
    """

    def __init__(self, using: str) -> None:
        self._using = using
        self._stop = threading.Event()
        self._seen: set[int] = set()
        """The attempts that ran in the last turn, by id() of the object."""
        self._thread = worker_thread(self._run, "jobs", using)

    def start(self) -> None:
        """Start the thread."""
        _monitored.add(self._using)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. Its end is not waited for: it may wait for the database."""
        _monitored.discard(self._using)
        self._stop.set()

    def _run(self) -> None:
        sessions.adopt(self._using, sessions.Timeouts(idle=60, lock_wait=2, network=2, read=10))
        failures = 0
        while not self._stop.wait(INTERVAL):
            try:
                is_used = self.turn()
            except (Error, QueueError) as error:
                # The next turn stores it, or the outcome of the job does.
                failures += 1
                failing(logging.WARNING, "jobs.not_monitored", error=error, failures=failures)
                is_used = False
            else:
                failures = 0
            if not is_used:
                close_connections()

    def turn(self) -> bool:
        """Store and read what there is for jobs that ran in the last turn already; return whether there was any."""
        attempts = [attempt for attempt in list(_running.values()) if attempt.using == self._using]
        old = [attempt for attempt in attempts if id(attempt) in self._seen]
        self._seen = {id(attempt) for attempt in attempts}
        asking = [attempt for attempt in old if attempt.asks and not attempt.cancelled]
        if asking:
            found = job_rows.cancel_requested(Session(self._using), [attempt.row.id for attempt in asking])
            for attempt in asking:
                attempt.cancelled = attempt.row.id in found
        new = {attempt.row.id: (attempt, attempt.started()) for attempt in old}
        new = {job: (attempt, started) for job, (attempt, started) in new.items() if started != attempt.stored}
        if new:
            started = [one for _, one in new.values()]
            for job in run(self._using, lambda session: job_rows.store_started(session, started)):
                attempt, one = new[job]
                attempt.stored = one
        return bool(new or asking)
