"""The ticks of recurring schedules: the poller runs those that are due, between its other work.

Nothing is sent to the database until a tick is due, apart from one query every ten seconds, which notices pauses,
changes and jumps of the clock. Without schedules, nothing is sent at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from django.db import Error, connections

from django_mysqlqueue.exceptions import CommitOutcomeUnknown, QueueError
from django_mysqlqueue.options.backoff import Backoff, Failures
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.log import event, failing, moment
from django_mysqlqueue.service import schedules
from django_mysqlqueue.service.schedules import Row, Tick
from django_mysqlqueue.sql.session import Retry, Session

LOOK = 10.0
"""Seconds between two queries of the rows."""
BUSY = 1.0
"""Seconds until a schedule is tried again whose row another transaction has locked: that process may be killed."""
PAUSE = Backoff(initial=1.0, maximum=60.0, jitter=0.2)
"""The pause of a schedule after an error."""
NEVER = float("inf")


class Ticker:
    """Run the schedules of one database that this process declares.

    Args:
        using: alias of the database.
        names: the names of the schedules.
    """

    def __init__(self, using: str, names: Collection[str] = ()) -> None:
        self._using = using
        self._names = sorted(names)
        self._due: dict[str, float] = {}
        """By name: when it is due or is to be tried again, by the monotonic clock."""
        self._failures = {name: Failures(PAUSE) for name in self._names}
        self._look_at = 0.0 if names else NEVER
        self.next_at = self._look_at
        """When ``turn`` has something to do, by the monotonic clock."""

    def reset(self) -> None:
        """Read all rows again with the next turn."""
        if self._names:
            self.next_at = self._look_at = 0.0
            self._due.clear()

    def end(self) -> None:
        """Note that this process, which stops, does not declare its schedules any longer."""
        schedules.note_ended(self._using, self._names)

    def turn(self) -> None:
        """Run the schedules that are due, if there are any.

        Raises:
            django.db.Error: the connection was lost, or the server does not accept writes.
        """
        now = time.monotonic()
        if now < self.next_at:
            return
        if now >= self._look_at:
            self._look()
            now = time.monotonic()
        for name in [name for name, at in self._due.items() if at <= now]:
            self._run(name)
        self.next_at = min([self._look_at, *self._due.values()])

    def _look(self) -> None:
        now = time.monotonic()
        rows = schedules.read(Session(self._using), self._names)
        if any(row.now - row.seen_at >= schedules.SEEN_MS for row in rows.values()):
            schedules.note_seen(self._using, self._names)
        for name in self._names:
            if name not in rows:
                self._due.pop(name, None)
            elif not self._failures[name].count:
                self._plan(rows[name])
        self._look_at = now + LOOK

    def _plan(self, row: Row) -> None:
        """Note when a schedule is due."""
        try:
            tick = row.next_tick
        except Exception as error:  # noqa: BLE001  # A bug that one schedule meets does not stop the others.
            self._failed(row.name, error)
            return
        self._due[row.name] = NEVER if tick is None else time.monotonic() + max(0, tick - row.now) / 1000

    def _run(self, name: str) -> None:
        connection = connections[self._using]
        before = connection.connection
        try:
            done = schedules.tick(self._using, name)
        except (CommitOutcomeUnknown, Retry):
            raise
        except Error as error:
            if not sessions.is_sound(connection, error, before=before):
                raise
            self._failed(name, error)
        except Exception as error:  # noqa: BLE001
            self._failed(name, error)
        else:
            if done.row is None:
                self._due[name] = time.monotonic() + BUSY
                return
            if failures := self._failures[name].clear():
                event(logging.INFO, "recurring.recovered", schedule=name, failures=failures)
            _tell(name, done)
            self._plan(done.row)

    def _failed(self, name: str, error: Exception) -> None:
        failures = self._failures[name]
        self._due[name] = time.monotonic() + failures.add()
        text = f"{type(error).__name__}: {error}"
        is_bug = not isinstance(error, Error | QueueError | ValueError)
        failing(logging.ERROR, "recurring.failed", exc_info=is_bug, schedule=name, error=text, failures=failures.count)


def _tell(name: str, done: Tick) -> None:
    if not done.ticks:
        return
    last = moment(done.ticks[-1])
    if done.missed_since is not None:
        event(logging.WARNING, "recurring.missed", schedule=name, first=moment(done.missed_since), until=last)
    if done.skipped:
        event(logging.WARNING, "recurring.skipped", schedule=name, tick=last)
    elif not done.published:
        event(logging.WARNING, "recurring.duplicate", schedule=name, tick=last)
    for message in done.published:
        event(logging.INFO, "recurring.tick", schedule=name, id=message)
