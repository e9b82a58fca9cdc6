"""The threads that relay messages from the log of one database to others, one for each target.

A thread starts when there is something to relay, and ends when there has been nothing for a while, with its two
connections. It shares nothing with the pollers: a database that does not answer delays only what comes from it or goes
to it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from django.db import Error, connections

from django_mysqlqueue import naming
from django_mysqlqueue.backoff import Backoff, Failures
from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.log import event, is_worth_a_line
from django_mysqlqueue.service import relaying, wakeups
from django_mysqlqueue.sql.connection import close_connections, drop_connection
from django_mysqlqueue.sql.session import Retry

IDLE = 30.0
"""Seconds without anything to relay after which a thread ends."""
BUSY = 1.0
"""Seconds until a thread tries again if another process is relaying: that one may be killed."""
RETRY = Backoff(initial=0.25, maximum=5.0, jitter=1 / 3)
"""The pause after an error."""
TIMEOUTS = sessions.Timeouts(idle=30, lock_wait=2, network=2, read=20)
"""A thread waits for one database while the other one's session is idle."""


class Relay:
    """Relay messages from one database to another, in a thread of its own.

    Args:
        source: alias of the database whose log has the messages.
        target: alias of the database that their topics are in.
    """

    def __init__(self, source: str, target: str) -> None:
        self._source = source
        self._target = target
        self._changed = threading.Condition()
        self._asked = self._done = 0
        """The number of notifications, and up to which of them everything has been relayed."""
        self._stopping = False
        self._thread: threading.Thread | None = None

    def notify(self) -> None:
        """Look for messages soon, and return at once."""
        with self._changed:
            if self._stopping:
                return
            self._asked += 1
            self._changed.notify_all()
            if self._thread is None:
                name = f"mysqlqueue-relay-{self._source}-{self._target}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def is_idle(self) -> bool:
        """Return whether all that it was notified of has been relayed."""
        with self._changed:
            return self._done == self._asked

    def stop(self) -> None:
        """Relay nothing more. A pass that has begun ends by itself, or with the process."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _run(self) -> None:
        for alias in (self._source, self._target):
            sessions.adopt(alias, TIMEOUTS)
        failures = Failures(RETRY)
        pause = 0.0
        try:
            while self._has_work(pause):
                # The name of a database may lead to another server now, while the old one still answers.
                sessions.renew()
                pause = self._passes(failures)
        finally:
            close_connections()

    def _has_work(self, pause: float) -> bool:
        """Wait for the pause, then for a notification; return whether to do a pass, else end the thread."""
        with self._changed:
            if pause:
                self._changed.wait_for(lambda: self._stopping, timeout=pause)
            else:
                self._changed.wait_for(lambda: self._stopping or self._done < self._asked, timeout=IDLE)
            if self._done < self._asked and not self._stopping:
                return True
            self._thread = None
            return False

    def _passes(self, failures: Failures) -> float:
        """Relay until nothing is left; return the seconds until the next try, 0 if none is needed."""
        try:
            while not self._stopping:
                asked = self._asked
                done = relaying.relay(self._source, self._target)
                if done.repeats:
                    event(
                        logging.WARNING,
                        "relay.repeats",
                        source=self._source,
                        target=self._target,
                        reason=done.repeats,
                        messages=done.messages,
                    )
                if done.messages:
                    wakeups.notify(self._target)
                if done.busy:
                    return BUSY
                if not done.more:
                    self._done = asked
                    break
        except Exception as error:  # noqa: BLE001  # Without this thread, nothing would be relayed.
            pause = failures.add()
            if is_worth_a_line(failures.count):
                event(
                    logging.WARNING,
                    "relay.failed",
                    source=self._source,
                    target=self._target,
                    error=f"{type(error).__name__}: {error}",
                    failures=failures.count,
                    exc_info=not isinstance(error, (Error, CommitOutcomeUnknown, Retry)),
                )
            for alias in (self._source, self._target):
                drop_connection(connections[alias])
            return pause
        if count := failures.clear():
            event(logging.INFO, "relay.recovered", source=self._source, target=self._target, failures=count)
        return 0.0


class Relays:
    """The relays from one database to all others.

    Args:
        source: alias of the database.
        targets: aliases of the others; none in a project with one database.
    """

    def __init__(self, source: str, targets: Iterable[str] = ()) -> None:
        self._relays = {target: Relay(source, target) for target in targets}

    def found(self, topics: Iterable[str]) -> None:
        """Note the topics of new messages in the log."""
        if self._relays:
            for target in {naming.relay_target(topic) for topic in topics}:
                if target in self._relays:
                    self._relays[target].notify()

    def look(self) -> None:
        """Look for messages that were not noted: at the start, after a reconnect, and from time to time."""
        for relay in self._relays.values():
            relay.notify()

    def are_idle(self) -> bool:
        """Return whether all that was noted has been relayed."""
        return all(relay.is_idle() for relay in self._relays.values())

    def stop(self) -> None:
        """Relay nothing more."""
        for relay in self._relays.values():
            relay.stop()
