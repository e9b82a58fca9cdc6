"""One subscriber process: its threads, its signals and its shutdown."""

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
from typing import Any

from django_mysqlqueue.conf import Settings
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.naming import KEY_LENGTH
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.handling.executor import Executor
from django_mysqlqueue.runtime.handling.inbox import Inbox
from django_mysqlqueue.runtime.handling.settled_signal import Teller
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.runtime.polling.context import Context, Progress
from django_mysqlqueue.runtime.polling.poller import Poller, longest_silence
from django_mysqlqueue.runtime.process import memory
from django_mysqlqueue.runtime.process.heartbeat import Heart
from django_mysqlqueue.runtime.process.lifeline import Incarnation, Lifeline
from django_mysqlqueue.runtime.process.liveness_file import HeartbeatFile
from django_mysqlqueue.runtime.process.stop_signals import on_stop_signals, say_leaving, say_stopping
from django_mysqlqueue.runtime.registering import register
from django_mysqlqueue.service import groups, heartbeats, leasing, polling, releasing, wakeups
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.releasing import Released
from django_mysqlqueue.service.subsets import EVERYTHING, Subset
from django_mysqlqueue.sql.connection import close_connections
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.handler import Handler, mode_text
from django_mysqlqueue.version import __version__

EXIT_UNCLEAN = 1
"""Exit status if the process did not stop cleanly, for example with handlers still running."""
SHUTDOWN_ATTEMPTS = 5
SHUTDOWN_MARGIN = 5.0
"""Seconds after SHUTDOWN_TIMEOUT for writing outcomes and releasing leases, before the process exits anyway."""
DRAIN_CHECK = 0.5
"""Seconds between two checks whether everything is drained."""
HANDLER_MARGIN = 10.0
"""Seconds after the longest ``max_processing_time`` until the server closes a handler's idle connection."""
RELEASE_TIMEOUT = 2.0
"""Seconds that a process that exits uncleanly has to release its leases and deliveries."""
TELL_TIMEOUT = 2.0
"""Seconds that receivers of ``delivery_settled`` have when the process ends."""
MEMORY_GRACE = 5.0
"""Seconds after the start during which the memory limit does not apply."""
TURN = 0.2
"""Seconds between two turns of the main thread."""
STUCK_LIMIT = 300.0
"""Seconds without a turn of the poller after which the process exits. (The poller's statements time out after 20.)"""
SIGN_INTERVAL = 1.0
"""Seconds between two signals to the supervisor, and between two checks of the memory."""


def incarnation(name: str | None) -> str:
    """Return the full name of a subscriber in this process, which differs between processes with the same name."""
    return full_name(name, Incarnation(os.getpid(), secrets.token_hex(4)))


def full_name(name: str | None, one: Incarnation) -> str:
    """Return the full name, in the database, of one run of a subscriber on this host."""
    suffix = f":{one.pid}:{one.suffix}"
    base = name or socket.gethostname() or "subscriber"
    return re.sub(r"\s", "-", base)[: KEY_LENGTH - len(suffix)] + suffix


def require_handlers(handlers: Mapping[GroupRef, Handler]) -> None:
    """Raise SubscriberError if there is no handler to run."""
    if not handlers:
        raise SubscriberError(
            "There is no handler to run: no subscribers.py of an installed app declares one that the options select."
        )


class Subscriber:
    """Run handlers until told to stop, drained, at a limit, or until a handler hangs.

    Args:
        using: alias of the queue's database.
        handlers: the handlers to run, by group and topic.
        settings: the settings of the queue.
        name: a name for people, to which the process id and a random part are added (default: the host's name).
        threads: number of handler threads (default: THREADS).
        claim_size: maximum number of messages per claim (default: CLAIM_SIZE).
        drain: if True, stop when the backlog is handled.
        subset: the partitions to work on.
        max_messages: number of deliveries to start before stopping.
        max_memory: resident memory in MB above which to stop.
        heartbeat_file: a file to renew about every second while the poller makes progress.
        lifeline: the pipe to the supervisor that started this process. The supervisor is asked for a replacement
            if a limit ends this process; if the supervisor is gone, this process stops.
    """

    def __init__(
        self,
        using: str,
        handlers: Mapping[GroupRef, Handler],
        settings: Settings,
        *,
        name: str | None = None,
        threads: int | None = None,
        claim_size: int | None = None,
        drain: bool = False,
        subset: Subset = EVERYTHING,
        max_messages: int | None = None,
        max_memory: float | None = None,
        heartbeat_file: HeartbeatFile | None = None,
        lifeline: Lifeline | None = None,
    ) -> None:
        require_handlers(handlers)
        self.using = using
        self.handlers = dict(handlers)
        self.settings = settings
        lost = None if lifeline is None else lifeline.predecessor
        self._predecessor = None if lost is None else full_name(name, lost)
        self.name = (
            incarnation(name) if lifeline is None else full_name(name, Incarnation(os.getpid(), lifeline.suffix))
        )
        self.threads = threads or settings.threads
        self.claim_size = claim_size or settings.claim_size
        self.drain = drain
        self.subset = subset
        self.max_memory = max_memory
        self.heartbeat_file = heartbeat_file
        self.lifeline = lifeline
        self._stopping = threading.Event()
        self._stops_because = ""
        self._signalled = False
        self._finished = threading.Event()
        self._signs_at = float("-inf")
        self._began_at = time.monotonic()
        self._progressed_at = 0.0
        self._turns = 0
        self._drain_checked_at = 0.0
        self._rest = True
        self._release_error = f"no answer within {RELEASE_TIMEOUT:g} s"
        self.exit_code = 0
        self.progress = Progress()
        longest = max(handler.max_processing_time for handler in self.handlers.values())
        self.heart = Heart(
            using,
            self.name,
            list(self.handlers),
            interval=settings.lease_renewal_interval,
            lease=settings.lease_duration,
            info=self._info(),
            progress=self.progress,
        )
        self.inbox = Inbox(self.handlers, leases_good=self.heart.good, limit=max_messages)
        context = Context(
            using,
            self.name,
            settings,
            self.inbox,
            self.heart,
            groups=len(self.handlers),
            claim_size=self.claim_size,
            subset=subset,
            threads=self.threads,
            progress=self.progress,
        )
        self.poller = Poller(context, self.handlers)
        patient = sessions.Timeouts(
            idle=longest + HANDLER_MARGIN, lock_wait=50, network=60, read=longest + HANDLER_MARGIN
        )
        self.teller = Teller(using, patient)
        self.inbox.watch.send = self.teller.put
        self.executor = Executor(
            self.inbox,
            using,
            threads=self.threads,
            timeouts=patient,
            with_loop=any(handler.is_async for handler in self.handlers.values()),
        )

    def _info(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": __version__,
            "subset": self.subset.as_json(),
        }

    # -- from outside ---------------------------------------------------------

    def stop(self, reason: str = "stop() was called", *, replace: bool = False) -> None:
        """Ask for a clean stop, and return at once.

        Do not call this from a signal handler: the main thread may hold the locks that this takes.

        Args:
            reason: the reason to log.
            replace: whether to ask the supervisor, if there is one, to start another process at once.
        """
        if not self._stopping.is_set():
            self._stops_because = reason
            if replace and self.lifeline is not None:
                self.lifeline.ask_replacement()
        self._stopping.set()
        self.inbox.wake()

    def handle_signals(self) -> Callable[[], None]:
        """Stop cleanly on SIGTERM or SIGINT, and exit at once on a second one.

        Under a supervisor, SIGTERM counts once however often it arrives, because a service manager may send it to all
        processes of a service; the supervisor sends SIGINT to make a child exit at once.

        Returns:
            A function that restores the previous signal handlers.
        """

        def on_signal(number: int, count: int) -> None:
            if self.lifeline is None and count == 1:
                say_stopping(number, self.settings.shutdown_timeout)
            elif self.lifeline is None:
                say_leaving(self.settings.lease_duration)
                os._exit(128 + number)
            elif number == signal.SIGINT and (self._signalled or self._stopping.is_set()):
                os._exit(128 + number)
            self._signalled = True

        return on_stop_signals(on_signal)

    def run(self, *, ready: Callable[[], None] | None = None) -> int:
        """Run until the process stops.

        Args:
            ready: called when the groups are registered and the messages of a predecessor are released.

        Returns:
            The exit status: 0 after a clean stop, else 1.

        Raises:
            SubscriberError: a group is registered with a mode other than its handler's.
        """
        register(self.using, self.handlers)
        if self._predecessor is not None:
            done = self._release(self._predecessor)
            event(
                logging.INFO,
                "predecessor.released",
                name=self._predecessor,
                leases=done.leases,
                deliveries=done.deliveries,
            )
        if ready is not None:
            ready()
        # Before it can hold any message, and even if it ends at once. To the supervisor, the first signal also means
        # that the predecessor's messages have been released.
        self._give_signs()
        thread = threading.Thread(target=self._poll, name="mysqlqueue-poller", daemon=True)
        thread.start()
        give_up_at = float("inf")
        while not self._finished.wait(TURN):
            if self._signalled:
                self.stop("signal")
            if self.inbox.exhausted():
                self.stop("max-messages", replace=True)
            self._give_signs()
            if self._is_stuck():
                event(
                    logging.CRITICAL,
                    "poller.hung",
                    stacks=self.executor.stacks(thread.ident),
                    name=self.name,
                    seconds=STUCK_LIMIT,
                )
                self.exit_code = EXIT_UNCLEAN
                return self.exit_code
            if not self._stopping.is_set():
                continue
            self.inbox.wake()
            give_up_at = min(give_up_at, time.monotonic() + self.settings.shutdown_timeout + SHUTDOWN_MARGIN)
            if time.monotonic() >= give_up_at:
                # The database does not answer. Messages with unwritten outcomes will be redelivered.
                event(logging.ERROR, "shutdown.timed_out", name=self.name)
                self.exit_code = EXIT_UNCLEAN
                return self.exit_code
        thread.join(5)
        return self.exit_code

    def _is_stuck(self) -> bool:
        """Return whether the poller hangs. Turns are counted, because a frozen process makes no turns."""
        if self.progress.at != self._progressed_at:
            self._progressed_at, self._turns = self.progress.at, 0
        self._turns += 1
        return self._turns * TURN > STUCK_LIMIT

    def _give_signs(self) -> None:
        """Signal about once a second, in the main thread, so that a handler that keeps the GIL stops the signals."""
        if time.monotonic() < self._signs_at:
            return
        self._signs_at = time.monotonic() + SIGN_INTERVAL
        progress = time.monotonic() - self.progress.at < self.settings.lease_duration
        if self.heartbeat_file is not None and progress:
            self.heartbeat_file.touch()
        if self.lifeline is not None:
            self.lifeline.sign(progress=progress)
            if self.lifeline.is_cut():
                self.stop("the supervisor is gone")
        # Not at once: with a limit just above the memory after the start, processes would end without any work done.
        old_enough = time.monotonic() - self._began_at > MEMORY_GRACE
        if self.max_memory is not None and old_enough and not self._stopping.is_set():
            resident = memory.resident_mb()
            if resident > self.max_memory:
                event(logging.WARNING, "memory_limit.exceeded", resident_mb=round(resident), limit_mb=self.max_memory)
                self.stop("max-memory", replace=True)

    def leave(self) -> None:
        """End the process now if handlers may still be running, since a thread cannot be killed.

        The last thing that the process does is to release its leases and deliveries. From then on another subscriber
        may start the messages whose handlers are still running here.
        """
        if not self.exit_code:
            return
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        thread = threading.Thread(target=self._release_and_exit, name="mysqlqueue-release", daemon=True)
        thread.start()
        thread.join(RELEASE_TIMEOUT)
        event(logging.ERROR, "release.failed", name=self.name, error=self._release_error)
        os._exit(self.exit_code)

    def _release_and_exit(self) -> None:
        """Release everything and end the process, in a thread of its own: the database may not answer."""
        try:
            # A heartbeat after the release would register the subscriber again.
            self.heart.stop()
            sessions.adopt(self.using, sessions.Timeouts(idle=2, lock_wait=1, network=2, read=RELEASE_TIMEOUT))
            self._release(self.name)
        except Exception as error:  # noqa: BLE001
            self._release_error = f"{type(error).__name__}: {error}"
        else:
            os._exit(self.exit_code)

    def _release(self, name: str) -> Released:
        shared = [ref for ref, handler in self.handlers.items() if handler.shared]
        return releasing.release_all(self.using, name, self.handlers, shared=shared)

    # -- the poller's thread --------------------------------------------------

    def _poll(self) -> None:
        sessions.adopt(
            self.using,
            sessions.Timeouts(
                idle=max(2.0, 2 * longest_silence(self.handlers.values(), self.settings)),
                lock_wait=2,
                network=2,
                read=20,
            ),
        )
        stop_listening = wakeups.listen(self.using, self.inbox.wake)
        try:
            self.heart.start()
            # Other subscribers must see this one before it takes a lease.
            while not self.heart.beaten.wait(0.2) and not self._stopping.is_set():
                self.progress.made()
            self.executor.start()
            event(logging.INFO, "subscriber.started", name=self.name)
            self.poller.run(self._must_stop)
            self._shut_down()
        except BaseException:  # noqa: BLE001
            # A bug in the poller. The process can do nothing without it, so the supervisor shall replace the process.
            event(logging.CRITICAL, "poller.died", exc_info=True)
            self.exit_code = EXIT_UNCLEAN
        finally:
            stop_listening()
            close_connections()
            self._finished.set()

    def _must_stop(self) -> bool:
        hung = self.inbox.overrun()
        if hung is not None:
            event(
                logging.CRITICAL,
                "handler.hung",
                stacks=self.executor.stacks(hung.thread),
                group=hung.claimed.ref.group,
                topic=hung.claimed.ref.topic,
                partition=hung.claimed.key,
                offset=hung.claimed.offset,
                seconds=round(time.monotonic() - hung.started_at, 1),
            )
            self._stops_because = "a handler hangs"
            # Even if the handler returns in the end: after a 0 with --drain, the supervisor would not replace it.
            self.exit_code = EXIT_UNCLEAN
            return True
        if self.executor.is_broken():
            self._stops_because = "the event loop has died"
            self.exit_code = EXIT_UNCLEAN
            return True
        group = self.poller.group_of_other_mode()
        if group is not None:
            event(
                logging.CRITICAL,
                "group.mode_changed",
                group=group.ref.group,
                topic=group.ref.topic,
                error=mode_text(group.handler, group.other_mode),
            )
            self._stops_because = "a group's mode was changed"
            self.exit_code = EXIT_UNCLEAN
            return True
        if not self._stopping.is_set() and self.drain and self._is_drained():
            self._stops_because = "drained"
            return True
        return self._stopping.is_set()

    def _is_drained(self) -> bool:
        """Return whether nothing is due in the outbox and no group has unsettled messages, here or elsewhere."""
        now = time.monotonic()
        # While the poller knows of work, there is no need to look through all partitions.
        if now - self._drain_checked_at < DRAIN_CHECK or not self.poller.is_idle():
            return False
        self._drain_checked_at = now
        return self.poller.guarded(self._look_for_rest) and not self._rest

    def _look_for_rest(self) -> None:
        session = Session(self.using)
        # A dead letter that this process has just put into the outbox may have a handler here.
        self._rest = polling.poll(session).due
        for ref in self.handlers:
            registered = groups.find(self.using, ref)
            if registered is None or registered.paused:
                continue
            after: str | None = None
            while not self._rest:
                keys, after = leasing.find_work(session, ref, after=after, limit=500)
                self._rest = any(key in self.subset for key in keys)
                self.progress.made()  # A million partitions take most of a minute.
                if after is None:
                    break

    # -- the end --------------------------------------------------------------

    def _shut_down(self) -> None:
        """Start nothing more, wait for running handlers, write outcomes, release leases, and deregister."""
        event(
            logging.INFO,
            "subscriber.stopping",
            name=self.name,
            reason=self._stops_because,
            running=self.inbox.running(),
        )
        self.inbox.close()
        deadline = time.monotonic() + self.settings.shutdown_timeout
        while True:
            self.progress.made()
            self._insist(self._flush_all)
            running = self.inbox.running()
            # Do not wait for a handler that hangs; the others have SHUTDOWN_TIMEOUT.
            if not self.inbox.running(overrun=False) or time.monotonic() >= deadline:
                break
            self.inbox.wait(0.1)
        self._insist(self._flush_all)
        self.executor.join(1 if not running else 0)
        self._insist(self.poller.release_leases)
        self.heart.stop()
        if not running:
            # Else ``leave`` does it at the very end: others would steal the leases of handlers that still run.
            self._insist(lambda: heartbeats.deregister(self.using, self.name, list(self.handlers)))
        self.teller.close(TELL_TIMEOUT)
        if running:
            self.exit_code = EXIT_UNCLEAN
            event(logging.ERROR, "handlers.abandoned", name=self.name, handlers=running)
        event(logging.INFO, "subscriber.stopped", name=self.name)

    def _insist(self, action: Callable[[], object]) -> None:
        """Run an action of the shutdown, and retry it after a database error up to ``SHUTDOWN_ATTEMPTS`` times."""
        for _ in range(SHUTDOWN_ATTEMPTS):
            self.progress.made()
            if self.poller.guarded(action):
                return
        self.exit_code = EXIT_UNCLEAN

    def _flush_all(self) -> None:
        self.poller.keep_alive()
        self.poller.flush_groups()
        self.poller.write_rollups()
