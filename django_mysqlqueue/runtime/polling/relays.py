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

from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.names.rules import relay_target
from django_mysqlqueue.options.backoff import Backoff, Failures
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.log import event, failing
from django_mysqlqueue.service import relaying, wakeups
from django_mysqlqueue.service.relaying import NotInserted
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


class PassSize:
    """The number of messages of the next pass.

    After a failed pass, these are the messages before the statement that failed. Then they are relayed one at a time,
    until those of that statement have been inserted.
    """

    def __init__(self) -> None:
        self._before = 0
        self._alone = 0

    @property
    def limit(self) -> int:
        """Maximum number of messages of the next pass."""
        return self._before or (1 if self._alone else relaying.BATCH_ROWS)

    def passed(self, messages: int) -> None:
        """Note the number of messages that a pass has inserted."""
        if messages and self._before:
            self._before = 0
        else:
            self._alone = max(0, self._alone - messages)

    def failed(self, error: NotInserted) -> bool:
        """Note a failed pass, and return whether the next one has fewer messages."""
        self._before = error.before
        self._alone = error.messages
        return error.before + error.messages > 1


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
        self._size = PassSize()
        self._failed_at = self._refused_at = 0
        """Offset of the message that was not inserted by the last pass; and of the one that is refused. 0 for none."""

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
                done = relaying.relay(self._source, self._target, max_rows=self._size.limit)
                if done.repeats:
                    event(
                        logging.WARNING,
                        "relay.repeats",
                        source=self._source,
                        target=self._target,
                        reason=done.repeats,
                        messages=done.messages,
                    )
                for lost in done.lost:
                    event(
                        logging.ERROR,
                        "relay.lost",
                        source=self._source,
                        target=self._target,
                        topic=lost.topic,
                        first=lost.first,
                        last=lost.last,
                    )
                if done.messages:
                    self._size.passed(done.messages)
                    self._failed_at = self._refused_at = 0
                    wakeups.notify(self._target, done.topics)
                if done.busy:
                    return BUSY
                if not done.more:
                    self._done = asked
                    break
        except NotInserted as error:
            self._drop_connections()
            if self._size.failed(error):
                return 0.0
            return self._not_inserted(error, failures)
        except Exception as error:  # noqa: BLE001  # Without this thread, nothing would be relayed.
            self._drop_connections()
            return self._failed(error, failures)
        if count := failures.clear():
            event(logging.INFO, "relay.recovered", source=self._source, target=self._target, failures=count)
        return 0.0

    def _not_inserted(self, error: NotInserted, failures: Failures) -> float:
        """Log that the target has not inserted one message; return the seconds until the next try."""
        # A lost connection may have another reason, unless it is lost with this message again.
        is_refused = not error.is_lost_connection or self._failed_at == error.place.offset
        self._failed_at = error.place.offset
        if not is_refused:
            return self._failed(error, failures)
        if self._refused_at != error.place.offset:
            self._refused_at = error.place.offset
            failures.clear()
            try:
                relaying.note_refusal(self._source, self._target, error.place, error.text)
            except (Error, CommitOutcomeUnknown):
                self._refused_at = 0  # The next try stores it.
        pause = failures.add()
        failing(
            logging.ERROR,
            "relay.refused",
            source=self._source,
            target=self._target,
            topic=error.topic,
            id=error.place.id,
            offset=error.place.offset,
            bytes=error.place.size,
            error=error.text,
            failures=failures.count,
        )
        return pause

    def _failed(self, error: Exception, failures: Failures) -> float:
        """Log an error; return the seconds until the next try."""
        pause = failures.add()
        failing(
            logging.WARNING,
            "relay.failed",
            source=self._source,
            target=self._target,
            error=f"{type(error).__name__}: {error}",
            failures=failures.count,
            exc_info=not isinstance(error, (Error, CommitOutcomeUnknown, Retry, NotInserted)),
        )
        return pause

    def _drop_connections(self) -> None:
        for alias in (self._source, self._target):
            drop_connection(connections[alias])


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
            for target in {relay_target(topic) for topic in topics}:
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
