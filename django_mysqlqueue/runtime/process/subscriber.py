"""One subscriber process: its workers, its signals and its shutdown."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.names.rules import KEY_LENGTH
from django_mysqlqueue.options.conf import Settings
from django_mysqlqueue.runtime import sessions, stopping
from django_mysqlqueue.runtime.handling import unstarted
from django_mysqlqueue.runtime.handling.starts import Starts
from django_mysqlqueue.runtime.handling.unstarted import Unstarted
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.runtime.process import memory
from django_mysqlqueue.runtime.process.lifeline import Incarnation, Lifeline
from django_mysqlqueue.runtime.process.liveness_file import HeartbeatFile
from django_mysqlqueue.runtime.process.stop_signals import on_stop_signals, say_leaving, say_stopping
from django_mysqlqueue.runtime.process.worker import (
    EXIT_UNCLEAN,
    NO_SCHEDULES,
    UNAVAILABLE,
    Plan,
    Stop,
    Worker,
    start_once,
)
from django_mysqlqueue.runtime.threads import about, worker_thread
from django_mysqlqueue.schedules.definitions import Definition
from django_mysqlqueue.service.databases import queue_aliases
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.subsets import EVERYTHING, Subset
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.version import __version__

SHUTDOWN_MARGIN = 5.0
"""Seconds after SHUTDOWN_TIMEOUT for writing outcomes and releasing leases, before the process exits anyway."""
FROZEN = 5.0
"""Seconds without an answer of one of several databases after which the end of a process does not wait for it."""
RELEASE_TIMEOUT = 2.0
"""Seconds that a process that exits uncleanly has to release its leases and deliveries."""
MEMORY_GRACE = 5.0
"""Seconds after the start during which the memory limit does not apply."""
TURN = 0.2
"""Seconds between two turns of the main thread."""
START_GRACE = 1.0
"""Seconds to wait for all of several databases before the process says that it has started."""
STUCK_LIMIT = 300.0
"""Seconds without a turn of a poller after which the process exits. (The poller's statements time out after 20.)"""
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


def require_handlers(handlers: Mapping[str, Mapping[GroupRef, Handler]]) -> None:
    """Raise SubscriberError if no database has a handler to run."""
    if not any(handlers.values()):
        raise SubscriberError(
            "There is no handler to run: no subscribers.py of an installed app declares one that the options select."
        )


Schedules = Mapping[str, Mapping[str, Definition]]
"""The recurring schedules of each database, by alias and name."""


def register_all(
    handlers: Mapping[str, Mapping[GroupRef, Handler]],
    prepare: Callable[[str], None],
    schedules: Schedules | None = None,
) -> None:
    """Prepare the databases, and register their groups and schedules, before a supervisor starts processes.

    Otherwise, all of them would fail.

    One of several databases that does not answer is not waited for long: the processes try again.

    ``prepare``: as for ``Subscriber``. ``schedules``: as for ``Subscriber``.

    Raises:
        SubscriberError: a group is registered with a mode other than its handler's.
        Exception: ``prepare`` has raised it; or a ``django.db.Error``, if there is only one database.
    """
    errors: dict[str, Exception] = {}

    def attempt(using: str) -> None:
        try:
            start_once(using, handlers[using], prepare, (schedules or {}).get(using, NO_SCHEDULES))
        except Exception as error:  # noqa: BLE001  # It is raised below.
            errors[using] = error

    threads = [worker_thread(partial(attempt, using), "start", using) for using in handlers]
    deadline = time.monotonic() + START_GRACE
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()) if len(threads) > 1 else None)
    for error in list(errors.values()):
        if len(handlers) == 1 or not isinstance(error, UNAVAILABLE):
            raise error


class Subscriber:
    """Run handlers until told to stop, drained, at a limit, or until a handler hangs.

    Args:
        handlers: by alias of a database, the handlers to run there, by group and topic. There is a worker for each
            alias, even without handlers: messages of its log may have to be relayed to other databases.
        settings: the settings of the queue.
        name: a name for people, to which the process id and a random part are added (default: the host's name).
        threads: number of handler threads by alias (default: THREADS for each).
        claim_size: maximum number of messages per claim (default: CLAIM_SIZE).
        schedules: the recurring schedules to run, beside those that people have made (default: none at all).
        drain: if True, stop when the backlog is handled.
        subset: the partitions to work on.
        max_messages: number of deliveries to start before stopping.
        max_memory: resident memory in MB above which to stop.
        heartbeat_file: a file to renew about every second while a poller makes progress.
        lifeline: the pipe to the supervisor that started this process. The supervisor is asked for a replacement
            if a limit ends this process; if the supervisor is gone, this process stops.
        prepare: called with each alias in its worker's thread before anything else. It raises an error if the database
            cannot run the queue.
    """

    def __init__(
        self,
        handlers: Mapping[str, Mapping[GroupRef, Handler]],
        settings: Settings,
        *,
        name: str | None = None,
        threads: Mapping[str, int] | None = None,
        claim_size: int | None = None,
        schedules: Schedules | None = None,
        drain: bool = False,
        subset: Subset = EVERYTHING,
        max_messages: int | None = None,
        max_memory: float | None = None,
        heartbeat_file: HeartbeatFile | None = None,
        lifeline: Lifeline | None = None,
        prepare: Callable[[str], None] = lambda using: None,
    ) -> None:
        require_handlers(handlers)
        self.settings = settings
        lost = None if lifeline is None else lifeline.predecessor
        left = None if lifeline is None else lifeline.left
        memory = None if lifeline is None else lifeline.memory
        self.name = (
            incarnation(name) if lifeline is None else full_name(name, Incarnation(os.getpid(), lifeline.suffix))
        )
        self.threads = {using: (threads or {}).get(using, settings.threads) for using in handlers}
        self.claim_size = claim_size or settings.claim_size
        self.subset = subset
        self.max_memory = max_memory
        self.heartbeat_file = heartbeat_file
        self.lifeline = lifeline
        self._signalled = False
        self._signs_at = float("-inf")
        self._began_at = time.monotonic()
        self._plan = Plan(
            self.name,
            settings,
            self.claim_size,
            subset,
            drain,
            predecessor=None if lost is None else full_name(name, lost),
            died="" if lifeline is None else lifeline.died,
            left=() if left is None else unstarted.read(left),
            info=self._info(),
            prepare=prepare,
            starts=Starts() if max_messages is None else Starts(max_messages),
            stop=Stop(),
        )
        self._stop = self._plan.stop
        stopping.follow(self._stop.event)
        aliases = queue_aliases()
        self.workers = [
            Worker(
                using,
                of_database,
                self._plan,
                threads=self.threads[using],
                targets=[other for other in aliases if other != using] if using in aliases else [],
                schedules=None if schedules is None else schedules.get(using, NO_SCHEDULES),
                is_alone=len(handlers) == 1,
                drained=self._check_drained,
                unstarted=None if memory is None else Unstarted(memory, number, len(handlers)),
            )
            for number, (using, of_database) in enumerate(handlers.items())
        ]

    def _info(self) -> dict[str, Any]:
        info = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": __version__,
            "subset": self.subset.as_json(),
        }
        return info if self.lifeline is None else {**info, "supervised": True}

    @property
    def exit_code(self) -> int:
        """The exit status: 0 after a clean stop, else 1."""
        return self._stop.exit_code

    @property
    def handlers(self) -> dict[GroupRef, Handler]:
        """Return the handlers of all databases."""
        return {ref: handler for worker in self.workers for ref, handler in worker.handlers.items()}

    # -- from outside ---------------------------------------------------------

    def stop(self, reason: str = "stop() was called", *, replace: bool = False) -> None:
        """Ask for a clean stop, and return at once.

        Do not call this from a signal handler: the main thread may hold the locks that this takes.

        ``replace``: whether to ask the supervisor, if there is one, to start another process at once.
        """
        if self._stop.ask(reason) and replace and self.lifeline is not None:
            self.lifeline.ask_replacement()
        for worker in self.workers:
            worker.inbox.wake()

    def _check_drained(self) -> None:
        """Stop if every worker has found itself drained after all of them were: one may publish to another."""
        since = [worker.drained_since for worker in self.workers]
        if None in since:
            return
        drained_at = max(moment for moment in since if moment is not None)
        if len(since) == 1 or min(worker.drain_checked_at for worker in self.workers) >= drained_at:
            self.stop("drained")

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
            elif number == signal.SIGINT and (self._signalled or self._stop.event.is_set()):
                os._exit(128 + number)
            self._signalled = True

        return on_stop_signals(on_signal)

    def run(self, *, ready: Callable[[], None] | None = None) -> int:
        """Run until the process stops.

        Returns:
            The exit status: 0 after a clean stop, else 1.

        Raises:
            SubscriberError: a group is registered with a mode other than its handler's.
            Exception: ``prepare`` has raised it; or a ``django.db.Error``, if there is only one database.
        """
        self._start()
        if ready is not None and not self._stop.event.is_set():
            ready()
        # To the supervisor, the first signal also means that the predecessor's messages have been released.
        self._give_signs()
        for worker in self.workers:
            worker.may_poll.set()
        give_up_at = float("inf")
        while not all(worker.finished.is_set() for worker in self.workers):
            next(worker.finished for worker in self.workers if not worker.finished.is_set()).wait(TURN)
            self._heed_signals()
            self._give_signs()
            for worker in self.workers:
                worker.executor.check_loop()
            if self._is_stuck():
                return self.exit_code
            if not self._stop.event.is_set():
                continue
            for worker in self.workers:
                worker.inbox.wake()
            give_up_at = min(give_up_at, time.monotonic() + self.settings.shutdown_timeout + SHUTDOWN_MARGIN)
            if time.monotonic() >= give_up_at or self._waits_for_frozen():
                # A database does not answer. Messages with unwritten outcomes will be redelivered.
                left = ", ".join(worker.using for worker in self.workers if not worker.finished.is_set())
                event(logging.ERROR, "shutdown.timed_out", name=self.name, databases=left)
                self._stop.ask("the shutdown took too long", exit_code=EXIT_UNCLEAN)
                return self.exit_code
        for worker in self.workers:
            worker.thread.join(5)
            if worker.error is not None:
                raise worker.error
        return self.exit_code

    def _waits_for_frozen(self) -> bool:
        """Return whether only workers are left whose databases do not answer, and that run no handler.

        The others have stopped: the process must not last longer because of one of several databases.
        """
        left = [worker for worker in self.workers if not worker.finished.is_set()]
        frozen_since = time.monotonic() - FROZEN
        return 0 < len(left) < len(self.workers) and all(
            worker.progress.at < frozen_since and not worker.inbox.running() for worker in left
        )

    def _heed_signals(self) -> None:
        if self._signalled:
            self.stop("signal")
        if self._plan.starts.left <= 0:
            self.stop("max-messages", replace=True)

    def _is_stuck(self) -> bool:
        """Return whether a poller hangs, and log it."""
        stuck = next((worker for worker in self.workers if worker.is_stuck(STUCK_LIMIT / TURN)), None)
        if stuck is None:
            return False
        event(
            logging.CRITICAL,
            "poller.hung",
            stacks=stuck.executor.stacks(stuck.thread.ident),
            name=self.name,
            database=stuck.using,
            seconds=STUCK_LIMIT,
        )
        self._stop.ask("a poller hangs", exit_code=EXIT_UNCLEAN)
        return True

    def _start(self) -> None:
        """Start all workers, and wait until they have. One whose database does not answer is not waited for long."""
        if os.getpid() == 1:
            # Reaping what handlers leave behind would take the exit status from their ``subprocess.wait()``.
            event(logging.WARNING, "subscriber.without_init", name=self.name)
        for worker in self.workers:
            worker.thread.start()
            if len(self.workers) > 1:
                worker.may_poll.set()
        deadline = time.monotonic() + (START_GRACE if len(self.workers) > 1 else float("inf"))
        for worker in self.workers:
            while not worker.started.wait(TURN) and time.monotonic() < deadline and not self._signalled:
                pass

    def _give_signs(self) -> None:
        """Signal about once a second, in the main thread, so that a handler that keeps the GIL stops the signals."""
        if time.monotonic() < self._signs_at:
            return
        self._signs_at = time.monotonic() + SIGN_INTERVAL
        latest = max(worker.progress.at for worker in self.workers)
        progress = time.monotonic() - latest < self.settings.lease_duration
        if self.heartbeat_file is not None and progress:
            self.heartbeat_file.touch()
        if self.lifeline is not None:
            self.lifeline.sign(progress=progress)
            if self.lifeline.is_cut():
                self.stop("the supervisor is gone")
        # Not at once: with a limit just above the memory after the start, processes would end without any work done.
        old_enough = time.monotonic() - self._began_at > MEMORY_GRACE
        if self.max_memory is not None and old_enough and not self._stop.event.is_set():
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
        threads = [
            (worker, worker_thread(partial(self._release, worker), "release", worker.using))
            for worker in self.workers
            if worker.handlers
        ]
        for _, thread in threads:
            thread.start()
        deadline = time.monotonic() + RELEASE_TIMEOUT
        for worker, thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                with about(worker.using):
                    error = f"no answer within {RELEASE_TIMEOUT:g} s"
                    event(logging.ERROR, "release.failed", name=self.name, error=error)
        os._exit(self.exit_code)

    def _release(self, worker: Worker) -> None:
        try:
            worker.release_all(sessions.Timeouts(idle=2, lock_wait=1, network=2, read=RELEASE_TIMEOUT))
        except Exception as error:  # noqa: BLE001
            event(logging.ERROR, "release.failed", name=self.name, error=f"{type(error).__name__}: {error}")
