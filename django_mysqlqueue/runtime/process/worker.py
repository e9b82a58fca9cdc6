"""The part of a subscriber process that works on one database: its poller, heartbeat and handler threads.

Workers of several databases share nothing that one could wait for because of another one's database.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.db import Error, connections

from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.options.backoff import Backoff, Failures
from django_mysqlqueue.options.conf import Settings
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.handling.executor import Executor
from django_mysqlqueue.runtime.handling.inbox import Inbox
from django_mysqlqueue.runtime.handling.settled_signal import Teller
from django_mysqlqueue.runtime.handling.starts import Starts
from django_mysqlqueue.runtime.handling.unstarted import Unstarted
from django_mysqlqueue.runtime.log import delivery_fields, event, failing
from django_mysqlqueue.runtime.polling.context import Context, Progress
from django_mysqlqueue.runtime.polling.poller import Poller, longest_silence
from django_mysqlqueue.runtime.polling.relays import Relays
from django_mysqlqueue.runtime.polling.ticking import Ticker
from django_mysqlqueue.runtime.process.heartbeat import Heart
from django_mysqlqueue.runtime.registering import register, register_schedules
from django_mysqlqueue.runtime.threads import worker_thread
from django_mysqlqueue.schedules.definitions import Definition
from django_mysqlqueue.service import bell, groups, heartbeats, leasing, polling, releasing, remote_bell, wakeups
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.service.releasing import Released
from django_mysqlqueue.service.subsets import Subset
from django_mysqlqueue.sql.connection import close_connections, drop_connection
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions.handler import Handler, mode_text
from django_mysqlqueue.text.humanize import listed

EXIT_UNCLEAN = 1
"""Exit status if the process did not stop cleanly, for example with handlers still running."""
SHUTDOWN_ATTEMPTS = 5
DRAIN_CHECK = 0.5
"""Seconds between two searches of the database for work that is left, while this worker knows of none."""
HANDLER_MARGIN = 10.0
"""Seconds after the longest time of a call until the server closes a handler's idle connection."""
CUT_OFF_TIME = 1.0
"""Seconds in which a process that exits uncleanly begins to release what its handlers work on. The rest of its time is
for its leases."""
TASKS_LOGGED = 5
"""Tasks of jobs that are cut off which the log names."""
TELL_TIMEOUT = 2.0
"""Seconds that receivers of ``delivery_settled`` have when the process ends."""
START_READ = 10.0
"""Seconds to wait for each answer of the server while a worker starts."""
RETRY = Backoff(initial=0.25, maximum=5.0, jitter=1 / 3)
"""The pause after a start that failed because the database does not answer."""


NO_SCHEDULES: Mapping[str, Definition] = {}
UNAVAILABLE = (Error, CommitOutcomeUnknown)
"""Errors after which a start is tried again, if there are other databases to work on."""


def start_once(
    using: str,
    handlers: Mapping[GroupRef, Handler],
    prepare: Callable[[str], None],
    schedules: Mapping[str, Definition] = NO_SCHEDULES,
) -> None:
    """Prepare a database and register groups and schedules, on a connection of this thread with time limits.

    Raises:
        SubscriberError: a group is registered with a mode other than its handler's.
        Exception: ``prepare`` has raised it, or the database has.
    """
    sessions.adopt(using, sessions.Timeouts(idle=60, lock_wait=10, network=10, read=START_READ))
    prepare(using)
    register(using, handlers)
    register_schedules(using, schedules)


@dataclass(slots=True)
class Stop:
    """A process's decision to stop, which its workers share."""

    event: threading.Event = field(default_factory=threading.Event)
    reason: str = ""
    exit_code: int = 0

    def ask(self, reason: str, *, exit_code: int = 0) -> bool:
        """Ask for a stop; return whether this is the first request. The first reason counts, and the worst status."""
        is_first = not self.event.is_set()
        if is_first:
            self.reason = reason
        self.exit_code = max(self.exit_code, exit_code)
        self.event.set()
        return is_first


class Plan(NamedTuple):
    """What the workers of a process have in common."""

    name: str
    """The full name of the subscriber in the databases."""
    settings: Settings
    claim_size: int
    subset: Subset
    drain: bool
    predecessor: str | None
    """The full name of the subscriber that this one replaces, whose messages are released at the start."""
    died: str
    """How that died: its exit status or signal."""
    left: Sequence[tuple[int, int]]
    """The offset and token of the deliveries that it has not started."""
    info: Mapping[str, Any]
    """Host, process id, version and subset, for the heartbeat rows."""
    prepare: Callable[[str], None]
    """Called with the alias in the worker's thread before anything else. It raises an error if the database cannot run
    the queue."""
    starts: Starts
    """The limit on the deliveries to start."""
    stop: Stop


class Worker:
    """Run the handlers of one database until the process stops.

    Args:
        using: alias of the database.
        handlers: the handlers to run, by group and topic; none if the database only has messages to relay.
        plan: what the workers of the process have in common.
        threads: number of handler threads.
        targets: aliases of the other databases, to which messages may be relayed.
        schedules: the recurring schedules of the database that this process declares, by name; None: it runs none,
            those that people have made neither.
        is_alone: whether the process has no other worker. If so, an error of the database at the start ends it;
            otherwise the worker tries again until the database answers.
        drained: called when the worker has nothing left to do, if ``drain`` is on.
        unstarted: where to note what has not started (default: nowhere).
    """

    def __init__(
        self,
        using: str,
        handlers: Mapping[GroupRef, Handler],
        plan: Plan,
        *,
        threads: int,
        targets: Collection[str] = (),
        schedules: Mapping[str, Definition] | None = None,
        is_alone: bool = True,
        drained: Callable[[], None] = lambda: None,
        unstarted: Unstarted | None = None,
    ) -> None:
        self.using = using
        self.handlers = dict(handlers)
        self.plan = plan
        self._schedules = schedules
        self._is_alone = is_alone
        self._drained = drained
        settings = plan.settings
        self.threads = threads
        self.finished = threading.Event()
        self.started = threading.Event()
        """The worker has registered its groups, or has failed to start, at least for now."""
        self.may_poll = threading.Event()
        self.error: BaseException | None = None
        """Why the worker could not start."""
        self.drained_since: float | None = None
        """Since when the worker has had nothing to do, as far as it has checked; None if it has something."""
        self.drain_checked_at = float("-inf")
        self._progressed_at = 0.0
        self._turns = 0
        self._rest = True
        self.progress = Progress(slow=settings.health.max_round_trip)
        longest = max((handler.longest_time for handler in self.handlers.values()), default=0.0)
        self.heart = Heart(
            using,
            plan.name,
            list(self.handlers),
            interval=settings.lease_renewal_interval,
            lease=settings.lease_duration,
            info={**plan.info, "threads": self.threads},
            progress=self.progress,
        )
        kinds = {handler.monitor for handler in self.handlers.values() if handler.monitor is not None}
        self.monitors = [kind(using) for kind in kinds]
        self.inbox = Inbox(
            self.handlers,
            leases_good=self.heart.good,
            threads=threads,
            concurrency=settings.async_concurrency,
            starts=plan.starts,
            unstarted=unstarted,
        )
        self.relays = Relays(using, targets)
        context = Context(
            using,
            plan.name,
            settings,
            self.inbox,
            self.heart,
            groups=len(self.handlers),
            claim_size=plan.claim_size,
            subset=plan.subset,
            threads=self.threads,
            progress=self.progress,
            relays=self.relays,
            ticker=Ticker(using, schedules),
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
            threads=self.threads if self.handlers else 0,
            timeouts=patient,
            with_loop=any(handler.is_async for handler in self.handlers.values()),
        )
        self.thread = worker_thread(self._run, "poller", using)

    # -- from the main thread -------------------------------------------------

    def is_stuck(self, turns: float) -> bool:
        """Return whether the poller has made no progress for more than this number of calls.

        Calls are counted, because a frozen process makes none.
        """
        if self.progress.at != self._progressed_at:
            self._progressed_at, self._turns = self.progress.at, 0
        self._turns += 1
        return self._turns > turns

    def release_all(self, timeouts: sessions.Timeouts) -> None:
        """Release all leases and deliveries, in a thread of its own: the database may not answer.

        Handlers that the process cuts off have not failed: no attempt is counted, and their messages are not suspected.

        Raises:
            django.db.Error: the database refused or did not answer.
        """
        # A heartbeat after the release would register the subscriber again.
        self.heart.stop()
        sessions.adopt(self.using, timeouts)
        try:
            self.poller.cut_off(CUT_OFF_TIME)
        finally:
            self._release(self.plan.name)

    def _release(self, name: str, *, died: str = "") -> Released:
        shared = [ref for ref, handler in self.handlers.items() if handler.shared]
        return releasing.release_all(self.using, name, self.handlers, shared=shared, died=died)

    # -- the poller's thread --------------------------------------------------

    def _run(self) -> None:
        stop = self.plan.stop
        try:
            if self._start():
                self.may_poll.wait()
                self._poll()
        except BaseException:  # noqa: BLE001
            # A bug in the poller. The process can do nothing without it, so the supervisor shall replace the process.
            event(logging.CRITICAL, "poller.died", exc_info=True)
            stop.ask("a poller has died", exit_code=EXIT_UNCLEAN)
        finally:
            close_connections()
            self.started.set()
            self.finished.set()

    def _start(self) -> bool:
        """Prepare the database and register the groups; return whether to begin.

        An error that is not the database's ends the process: its code or its settings are wrong.
        """
        outages = Failures(RETRY)
        while not self.plan.stop.event.is_set():
            self.progress.made()
            try:
                start_once(self.using, self.handlers, self.plan.prepare, self._schedules or NO_SCHEDULES)
                if self.plan.predecessor is not None:
                    free = releasing.release_unstarted(self.using, self.handlers, self.plan.left)
                    done = self._release(self.plan.predecessor, died=self.plan.died)
                    event(
                        logging.INFO,
                        "predecessor.released",
                        name=self.plan.predecessor,
                        leases=done.leases,
                        deliveries=done.deliveries,
                        unstarted=free,
                    )
            except UNAVAILABLE as error:
                drop_connection(connections[self.using])
                pause = outages.add()
                if self._is_alone:
                    return self._gave_up(error)
                failing(
                    logging.ERROR,
                    "database.unavailable",
                    database=self.using,
                    error=f"{type(error).__name__}: {error}",
                    failures=outages.count,
                )
                self.started.set()
                self.plan.stop.event.wait(pause)
            except Exception as error:  # noqa: BLE001  # The main thread raises it.
                return self._gave_up(error)
            else:
                if outages.count:
                    event(logging.INFO, "database.available", database=self.using, failures=outages.count)
                close_connections()  # Those of the poller have other timeouts.
                self.started.set()
                return True
        return False

    def _gave_up(self, error: BaseException) -> bool:
        self.error = error
        self.plan.stop.ask("it cannot start", exit_code=EXIT_UNCLEAN)
        return False

    def _poll(self) -> None:
        settings = self.plan.settings
        sessions.adopt(
            self.using,
            sessions.Timeouts(
                idle=max(2.0, 2 * longest_silence(self.handlers.values(), settings)), lock_wait=2, network=2, read=20
            ),
        )
        listening = wakeups.Listening(self.using, {ref.topic for ref in self.handlers}, self.inbox.wake)
        self.poller.listen(listening, self._announce() if listening.bell is not None else None)
        try:
            if self.handlers:
                self.heart.start()
                # Other subscribers must see this one before it takes a lease.
                while not self.heart.beaten.wait(0.2) and not self.plan.stop.event.is_set():
                    self.progress.made()
            for monitor in self.monitors:
                monitor.start()
            self.executor.start()
            event(logging.INFO, "subscriber.started", name=self.plan.name, database=self.using)
            self.poller.run(self.must_stop)
            self._shut_down()
        finally:
            listening.stop()
            if self.poller.gateway is not None:
                self.poller.gateway.stop()

    def _announce(self) -> remote_bell.Gateway | None:
        """Let the heartbeat show where other hosts ring, and return what listens there; None if nothing does."""
        try:
            address = remote_bell.announced(self.using)
        except bell.Unavailable as error:
            event(logging.WARNING, "bell.unavailable", database=self.using, error=error)
            return None
        if address is None:
            return None
        self.heart.info["bell"] = address
        return remote_bell.Gateway()

    def must_stop(self) -> bool:
        """Return whether the poller shall stop, and make the process stop if this worker cannot continue."""
        stop = self.plan.stop
        hung = self.inbox.overrun()
        if hung is not None:
            event(
                logging.CRITICAL,
                "handler.hung",
                stacks=self.executor.stacks(hung.place),
                **delivery_fields(hung.claimed),
                seconds=round(time.monotonic() - hung.started_at, 1),
            )
            # Even if the handler returns in the end: after a 0 with --drain, the supervisor would not replace it.
            stop.ask("a handler hangs", exit_code=EXIT_UNCLEAN)
        elif self.executor.is_broken():
            stop.ask("the event loop has died", exit_code=EXIT_UNCLEAN)
        elif (group := self.poller.group_of_other_mode()) is not None:
            event(
                logging.CRITICAL,
                "group.mode_changed",
                group=group.ref.group,
                topic=group.ref.topic,
                error=mode_text(group.handler, group.configuration.other_mode),
            )
            stop.ask("a group's mode was changed", exit_code=EXIT_UNCLEAN)
        elif self.plan.drain and not stop.event.is_set() and self._checks_drain():
            self._drained()
        return stop.event.is_set()

    def _checks_drain(self) -> bool:
        """Check from time to time whether everything is drained, note it, and return whether it is."""
        if not self._knows_of_nothing():
            self.drained_since = None
            return False
        began = time.monotonic()
        if began - self.drain_checked_at < DRAIN_CHECK:
            return False
        if not self._finds_nothing():
            self.drained_since = None
        elif self.drained_since is None:
            self.drained_since = time.monotonic()
        self.drain_checked_at = began
        return self.drained_since is not None

    def is_drained(self) -> bool:
        """Return whether nothing is due in the outbox and no group has unsettled messages, here or elsewhere."""
        return self._knows_of_nothing() and self._finds_nothing()

    def _knows_of_nothing(self) -> bool:
        """Return whether no work is known here. While there is some, all partitions need not be looked through."""
        return self.poller.is_idle() and self.relays.are_idle()

    def _finds_nothing(self) -> bool:
        return self.poller.guarded(self._look_for_rest) and not self._rest

    def _look_for_rest(self) -> None:
        session = Session(self.using)
        # A dead letter that this process has just put into the outbox may have a handler here.
        self._rest = polling.poll(session).due
        for group in self.poller.groups:
            ref, subset = group.ref, group.configuration.subset
            registered = groups.find(self.using, ref)
            if registered is None or registered.paused:
                continue
            after: str | None = None
            while not self._rest:
                keys, after = leasing.find_work(session, ref, after=after, limit=500)
                self._rest = any(key in subset for key in keys)
                self.progress.made()  # A million partitions take seconds.
                if after is None:
                    break

    # -- the end --------------------------------------------------------------

    def _shut_down(self) -> None:
        """Start nothing more, wait for running handlers, write outcomes, release leases, and deregister."""
        event(
            logging.INFO,
            "subscriber.stopping",
            name=self.plan.name,
            database=self.using,
            reason=self.plan.stop.reason,
            running=self.inbox.running(),
        )
        self.relays.stop()
        self.inbox.close()
        deadline = time.monotonic() + self.plan.settings.shutdown_timeout
        while True:
            self.progress.made()
            self._insist(self._flush_all)
            running = self.inbox.running()
            # Do not wait for a handler that hangs; the others have SHUTDOWN_TIMEOUT.
            if not self.inbox.running(overrun=False) or time.monotonic() >= deadline:
                break
            self.inbox.wait(0.1)
        self._insist(self._flush_all)
        if not running:
            # Else the process is about to exit. Without its loop, coroutines would be cancelled and fail.
            self.executor.join(1)
        for monitor in self.monitors:
            monitor.stop()
        self._insist(self.poller.release_leases)
        self._insist(self.poller.context.ticker.end)
        self.heart.stop()
        if not running and self.handlers:
            # Else ``leave`` does it at the very end: others would steal the leases of handlers that still run.
            self._insist(lambda: heartbeats.deregister(self.using, self.plan.name, list(self.handlers)))
        self.teller.close(TELL_TIMEOUT)
        broken = [group.ref for group in self.poller.groups if group.health.error is not None]
        if any(self.inbox.held(ref, unwritten=True) for ref in broken):
            self.plan.stop.ask("outcomes of a broken group are not written", exit_code=EXIT_UNCLEAN)
        if running:
            self.plan.stop.ask("handlers are running", exit_code=EXIT_UNCLEAN)
            tasks = listed(self.inbox.running_tasks(), most=TASKS_LOGGED)
            event(logging.ERROR, "handlers.abandoned", name=self.plan.name, handlers=running, tasks=tasks)
        event(logging.INFO, "subscriber.stopped", name=self.plan.name, database=self.using)

    def _insist(self, action: Callable[[], object]) -> None:
        """Run an action of the shutdown, and retry it after a database error up to ``SHUTDOWN_ATTEMPTS`` times."""
        for _ in range(SHUTDOWN_ATTEMPTS):
            self.progress.made()
            if self.poller.guarded(action):
                return
        self.plan.stop.ask("the database does not answer", exit_code=EXIT_UNCLEAN)

    def _flush_all(self) -> None:
        self.poller.keep_alive()
        self.poller.flush_groups()
        self.poller.write_rollups()
