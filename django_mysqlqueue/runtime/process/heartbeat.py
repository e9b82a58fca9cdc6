"""The heartbeat thread, which does nothing but send heartbeats."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from django.db import Error, connections

from django_mysqlqueue.exceptions import QueueError
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.log import event, failing, is_worth_a_line
from django_mysqlqueue.runtime.polling.context import Progress
from django_mysqlqueue.runtime.threads import worker_thread
from django_mysqlqueue.service import heartbeats
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import drop_connection


class Heart:
    """Send a heartbeat every ``interval`` seconds on a connection of its own while the poller makes progress.

    Leases are good for ``lease`` seconds, measured by the process's own monotonic clock from just before the last
    successful heartbeat was sent. After that they are in doubt until the poller has read them again under lock.

    Args:
        using: alias of the queue's database.
        subscriber: full name of the subscriber.
        refs: its groups. Each has a heartbeat row.
        interval: seconds between two heartbeats.
        lease: seconds for which a heartbeat keeps leases.
        info: host, process id, version, subset and threads, for the heartbeat rows.
        progress: time of the poller's last progress, and facts that the heartbeat shows. Without progress for ``lease``
            seconds, no heartbeat is sent, so that other subscribers take over.
    """

    def __init__(
        self,
        using: str,
        subscriber: str,
        refs: Sequence[GroupRef],
        *,
        interval: float,
        lease: float,
        info: dict[str, Any],
        progress: Progress,
    ) -> None:
        self._using = using
        self._subscriber = subscriber
        self._refs = refs
        self._interval = interval
        self._lease = lease
        self.info = info
        """What the first heartbeat writes."""
        self._progress = progress
        self._stop = threading.Event()
        self._doubted_at = self._verified_at = float("-inf")
        self._moved = False
        self._failures = 0
        """Failed heartbeats in a row."""
        self.beaten = threading.Event()
        self.beat_at = float("-inf")
        """When the last successful heartbeat was sent, by the monotonic clock."""
        self._thread = worker_thread(self._run, "heartbeat", using)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait for its end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._interval + 5)

    def good(self) -> bool:
        """Return whether this process certainly still owns its leases."""
        # In this order, because a heartbeat after doubt notes the doubt first.
        return time.monotonic() < self.beat_at + self._lease and self._doubted_at <= self._verified_at

    def must_verify(self) -> bool:
        """Return whether heartbeats succeed again after the leases may have expired.

        The poller then has to read the leases again under lock.
        """
        return time.monotonic() < self.beat_at + self._lease and self._doubted_at > self._verified_at

    def verified(self, at: float) -> None:
        """Note that the poller has read the leases again under lock, from this monotonic time on.

        A doubt that came up since, because the process stood still meanwhile, remains.
        """
        self._verified_at = at

    def _run(self) -> None:
        sessions.adopt(
            self._using,
            sessions.Timeouts(idle=max(2.0, 2 * self._interval), lock_wait=2, network=2, read=10),
        )
        while not self._stop.is_set():
            self._stop.wait(self._interval if self._safely() else min(1.0, self._interval / 4))

    def _safely(self) -> bool:
        """Send a heartbeat, and survive every error: without this thread all handlers would soon have to wait."""
        try:
            return self._beat()
        except Exception:  # noqa: BLE001
            event(logging.ERROR, "heartbeat.failed", error="see the traceback", exc_info=True)
            drop_connection(connections[self._using])
            return False

    def _beat(self) -> bool:
        stuck_for = time.monotonic() - self._progress.at
        if stuck_for > self._lease:
            self._failures += 1
            if is_worth_a_line(self._failures):
                why = "the poller makes no progress"
                event(logging.ERROR, "heartbeat.withheld", reason=why, seconds=round(stuck_for, 1))
            return False
        connection = connections[self._using]
        before = connection.connection
        sent = time.monotonic()
        try:
            heartbeats.beat(self._using, self._subscriber, self._refs, self.info, self._progress.facts())
        except (Error, QueueError) as error:
            self._failures += 1
            failing(logging.WARNING, "heartbeat.failed", error=error, failures=self._failures)
            self._moved = self._moved or not sessions.is_sound(connection, error, before=before)
            drop_connection(connection)
            return False
        # Even if it was sent in time: if it took long, other subscribers saw no heartbeat in the meantime.
        if self.beaten.is_set() and time.monotonic() >= self.beat_at + self._lease:
            self._doubted_at = time.monotonic()
        self.beat_at = sent
        if self._failures:
            event(logging.INFO, "heartbeat.recovered", failures=self._failures)
            self._failures = 0
        if self._moved:
            # Not before: while heartbeats fail, a new connection of another thread would lead to the old primary.
            self._moved = False
            sessions.distrust(self._using)
        self.beaten.set()
        return True
