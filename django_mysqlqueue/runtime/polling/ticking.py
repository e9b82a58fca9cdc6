"""The ticks of recurring schedules: the poller runs those that are due, between its other work.

Nothing is sent to the database until a tick is due, apart from a query every ten seconds, which notices pauses, changes
and jumps of the clock, and another one if people have made schedules. Without schedules, nothing is sent at all: the
query of the groups says whether there are any that people have made.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
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
MOST_RUNS = 50
"""Maximum number of schedules that one turn runs. Many of those that people make are due at the full hour: the poller
claims messages in between."""
PAUSE = Backoff(initial=1.0, maximum=60.0, jitter=0.2)
"""The pause of a schedule after an error."""
NEVER = float("inf")


class Ticker:
    """Run the schedules of one database that this process declares, and those that people have made there.

    Args:
        using: alias of the database.
        names: the names of the schedules that this process declares; None: it runs none, those of people neither.
    """

    def __init__(self, using: str, names: Collection[str] | None = None) -> None:
        self._using = using
        self._names = sorted(names or ())
        self._runs = names is not None
        self._has_editable = False
        """Whether there are schedules that people have made, as far as this process knows."""
        self._editable: list[str] = []
        """The names of those that were read."""
        self._due: dict[str, float] = {}
        """By name: when it is due or is to be tried again, by the monotonic clock."""
        self._failures: defaultdict[str, Failures] = defaultdict(lambda: Failures(PAUSE))
        self._look_at = 0.0 if names else NEVER
        self.next_at = self._look_at
        """When ``turn`` has something to do, by the monotonic clock."""

    def reset(self) -> None:
        """Read all rows again with the next turn."""
        if self._names or self._has_editable:
            self.next_at = self._look_at = 0.0
            self._due.clear()

    def notice(self, *, editable: bool) -> None:
        """Take note of whether there are schedules that people have made."""
        if self._runs and editable and not self._has_editable:
            self._has_editable = True
            self.next_at = self._look_at = 0.0

    def end(self) -> None:
        """Note that this process, which stops, does not run its schedules any longer."""
        schedules.note_ended(self._using, [*self._names, *self._editable])

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
        for _at, name in sorted((at, name) for name, at in self._due.items() if at <= now)[:MOST_RUNS]:
            self._run(name)
        self.next_at = min([self._look_at, *self._due.values()])

    def _look(self) -> None:
        now, session = time.monotonic(), Session(self._using)
        rows = schedules.read(session, self._names) if self._names else {}
        if self._has_editable:
            editable = schedules.read_editable(session)
            self._editable = [name for name in editable if name not in rows]
            self._has_editable = bool(editable)
            rows |= editable
        if any(row.now - row.seen_at >= schedules.SEEN_MS for row in rows.values()):
            schedules.note_seen(self._using, rows)
        for name in [name for name in self._due if name not in rows]:
            del self._due[name]
            self._failures.pop(name, None)
        for name, row in rows.items():
            if not self._failures[name].count:
                self._plan(row)
        self._look_at = now + LOOK if rows or self._names else NEVER

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
