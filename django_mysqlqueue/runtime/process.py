"""One subscriber process: its threads, its signals, its end."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from django_mysqlqueue.conf import Settings
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.names import KEY_LENGTH
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.executor import Executor
from django_mysqlqueue.runtime.heart import Heart
from django_mysqlqueue.runtime.inbox import Inbox
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.runtime.poller import Poller
from django_mysqlqueue.runtime.registry import Handler, mode_text
from django_mysqlqueue.service import groups, heartbeats, leasing, sequencing, wakeups
from django_mysqlqueue.service.groups import GroupRef
from django_mysqlqueue.service.subsets import EVERYTHING, Subset
from django_mysqlqueue.service.transactions import Session

EXIT_UNCLEAN = 1
"""Handlers were still running when the process left."""
SHUTDOWN_ATTEMPTS = 5
SHUTDOWN_MARGIN = 5.0
"""Seconds beyond SHUTDOWN_TIMEOUT for writing and releasing, before the process leaves all the same."""
DRAIN_CHECK = 0.5
"""Seconds between two looks at whether everything is drained."""


def incarnation(name: str | None) -> str:
    """A subscriber's full name: two processes given one name are still two."""
    suffix = f":{os.getpid()}:{secrets.token_hex(4)}"
    base = name or socket.gethostname() or "subscriber"
    return re.sub(r"\s", "-", base)[: KEY_LENGTH - len(suffix)] + suffix


class Subscriber:
    """Runs handlers until it is told to stop, is drained, or a handler hangs."""

    def __init__(
        self,
        using: str,
        handlers: Mapping[GroupRef, Handler],
        settings: Settings,
        *,
        name: str | None = None,
        threads: int | None = None,
        batch_size: int | None = None,
        drain: bool = False,
        subset: Subset = EVERYTHING,
    ) -> None:
        if not handlers:
            raise SubscriberError(
                "There is no handler to run: no subscribers.py of an installed app declares one that the options admit."
            )
        self.using = using
        self.handlers = dict(handlers)
        self.settings = settings
        self.name = incarnation(name)
        self.threads = threads or settings.threads
        self.batch_size = batch_size or settings.batch_size
        self.drain = drain
        self.subset = subset
        self._stopping = threading.Event()
        self._finished = threading.Event()
        self._signals = 0
        self._drain_checked_at = 0.0
        self._rest = True
        self.exit_code = 0
        longest = max(handler.max_processing_time for handler in self.handlers.values())
        self.heart = Heart(
            using,
            self.name,
            list(self.handlers),
            interval=settings.lease_renewal_interval,
            lease=settings.lease_duration,
            info=self._info(),
            progressed_at=lambda: self.poller.progressed_at,
        )
        self.inbox = Inbox(self.handlers, leases_good=self.heart.good)
        self.poller = Poller(
            using,
            self.name,
            self.handlers,
            settings,
            self.inbox,
            self.heart,
            batch_size=self.batch_size,
            subset=subset,
        )
        self.executor = Executor(
            self.inbox,
            using,
            threads=self.threads,
            timeouts=sessions.Timeouts(idle=longest + 60, lock_wait=50, network=60, read=longest + 60),
            with_loop=any(handler.is_async for handler in self.handlers.values()),
        )

    def _info(self) -> dict[str, Any]:
        from django_mysqlqueue import __version__

        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": __version__,
            "subset": self.subset.as_json(),
        }

    # -- from outside ---------------------------------------------------------

    def stop(self) -> None:
        """Asks for a clean end; returns at once."""
        self._stopping.set()
        self.inbox.wake()

    def handle_signals(self) -> Callable[[], None]:
        """SIGTERM and SIGINT stop cleanly, a second one leaves at once; returns what ends that."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            self._signals += 1
            if self._signals > 1:
                os._exit(128 + number)
            # No wake-up here: this thread may hold the inbox's lock.
            self._stopping.set()

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}

        def restore() -> None:
            for number, action in before.items():
                signal.signal(number, action)

        return restore

    def run(self, *, ready: Callable[[], None] | None = None) -> int:
        """Runs to the end and returns the exit code: 0, or 1 if handlers were still running.

        Raises:
            SubscriberError: a group is registered with another mode than its handler's.
        """
        self.prepare()
        if ready is not None:
            ready()
        thread = threading.Thread(target=self._poll, name="mysqlqueue-poller", daemon=True)
        thread.start()
        give_up_at = float("inf")
        while not self._finished.wait(0.2):
            if not self._stopping.is_set():
                continue
            self.inbox.wake()
            give_up_at = min(give_up_at, time.monotonic() + self.settings.shutdown_timeout + SHUTDOWN_MARGIN)
            if time.monotonic() >= give_up_at:
                # The database does not answer: what is unwritten will come again to another subscriber.
                event(logging.ERROR, "subscriber.gave_up", name=self.name)
                self.exit_code = EXIT_UNCLEAN
                return self.exit_code
        thread.join(5)
        return self.exit_code

    def leave(self) -> None:
        """Ends the process now if handlers are still running: a thread cannot be killed."""
        if self.exit_code:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.exit_code)

    def prepare(self) -> None:
        """Registers the groups and refuses a mode that differs from the registered one."""
        for ref, handler in self.handlers.items():
            registered = groups.register(self.using, ref, mode=handler.mode, start=handler.start)
            if registered.mode != handler.mode:
                raise SubscriberError(mode_text(handler, registered.mode))

    # -- the poller's thread --------------------------------------------------

    def _poll(self) -> None:
        sessions.adopt(
            self.using,
            sessions.Timeouts(idle=max(2.0, 2 * self.settings.max_poll_interval), lock_wait=2, network=2, read=20),
        )
        stop_listening = wakeups.listen(self.using, self.inbox.wake)
        try:
            self.heart.start()
            # Others must see this subscriber before it takes a lease.
            while not self.heart.beaten.wait(0.2) and not self._stopping.is_set():
                self.poller.progressed_at = time.monotonic()
            self.executor.start()
            event(logging.INFO, "subscriber.started", name=self.name)
            self.poller.run(self._must_stop)
            self._shut_down()
        except BaseException:  # noqa: BLE001
            # A bug in the poller: without it the process is of no use, so its supervisor shall replace it.
            event(logging.CRITICAL, "poller.died", exc_info=True)
            self.exit_code = EXIT_UNCLEAN
        finally:
            stop_listening()
            sessions.close_all()
            self._finished.set()

    def _must_stop(self) -> bool:
        hung = self.inbox.overrun()
        if hung is not None:
            event(
                logging.CRITICAL,
                "handler.hung",
                group=hung.claimed.ref.group,
                topic=hung.claimed.ref.topic,
                partition=hung.claimed.key,
                offset=hung.claimed.offset,
                seconds=round(time.monotonic() - hung.started_at, 1),
            )
            return True
        return self._stopping.is_set() or (self.drain and self._is_drained())

    def _is_drained(self) -> bool:
        """Nothing is due in the outbox, here or elsewhere, and no group has anything unsettled."""
        poller = self.poller
        now = time.monotonic()
        if now - self._drain_checked_at < DRAIN_CHECK or not poller.outbox_idle:
            return False
        if poller.housekeeping.is_scanning() or not all(self.inbox.is_idle(work.ref) for work in poller.works):
            return False
        self._drain_checked_at = now
        return poller.guarded(self._look_for_rest) and not self._rest

    def _look_for_rest(self) -> None:
        session = Session(self.using)
        # A dead letter that this process has just put there may have a handler here.
        self._rest = sequencing.look(session).due
        for ref in self.handlers:
            registered = groups.find(self.using, ref)
            if registered is None or registered.paused:
                continue
            after: str | None = None
            while not self._rest:
                keys, after = leasing.find_work(session, ref, after=after, limit=500)
                self._rest = any(key in self.subset for key in keys)
                if after is None:
                    break

    # -- the end --------------------------------------------------------------

    def _shut_down(self) -> None:
        """Stops starting, waits for what runs, writes, gives back, deregisters."""
        event(logging.INFO, "subscriber.stopping", name=self.name, running=self.inbox.running())
        self.inbox.close()
        deadline = time.monotonic() + self.settings.shutdown_timeout
        while True:
            self.poller.progressed_at = time.monotonic()
            self._insist(self._flush_all)
            running = self.inbox.running()
            # A hung handler is not waited for; the others have their time.
            if not self.inbox.running(overrun=False) or time.monotonic() >= deadline:
                break
            self.inbox.wait(0.1, enough=1)
        self._insist(self._flush_all)
        self.executor.join(1 if not running else 0)
        self._insist(self._release_all)
        self.heart.stop()
        self._insist(lambda: heartbeats.deregister(self.using, self.name, list(self.handlers)))
        if running:
            self.exit_code = EXIT_UNCLEAN
            event(logging.ERROR, "subscriber.left_running", name=self.name, handlers=running)
        event(logging.INFO, "subscriber.stopped", name=self.name)

    def _insist(self, action: Callable[[], object]) -> None:
        """Tries an action of the shutdown again after a database error, a bounded number of times."""
        for _ in range(SHUTDOWN_ATTEMPTS):
            self.poller.progressed_at = time.monotonic()
            if self.poller.guarded(action):
                return
        self.exit_code = EXIT_UNCLEAN

    def _flush_all(self) -> None:
        self.poller.keep_alive()
        for work in self.poller.works:
            work.flush_now()

    def _release_all(self) -> None:
        """A partition whose handler still runs keeps its lease until this process is gone."""
        for work in self.poller.ordered:
            free = [key for key, partition in work.partitions.items() if partition.owned and not partition.in_hand]
            if free:
                work.release(free)
