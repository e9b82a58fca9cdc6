"""Runs operations in threads, one statement at a time, in an order that a director chooses.

Each operation has a thread and a connection. It stops before every statement
that touches a table of the queue, before COMMIT and ROLLBACK, and where it would
sleep. One operation goes on at a time; if the server makes it wait for a lock,
the next one is chosen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from django.db import connections

from tests.crash.crashes import ALIAS
from tests.interleavings import steps
from tests.interleavings.steps import NOTHING, Access
from tests.interleavings.waiting import Waiting

MOST_STEPS = 600
"""A run with more has a thread that waits for what nobody does."""
LOCK_WAIT = 20
"""Seconds, ``innodb_lock_wait_timeout`` of the operations' sessions: no wait of a schedule is to end by it."""
PATIENCE = 0.001
"""Seconds without an answer before the server is asked whether the statement waits for a lock."""
STABLE = 4
"""So often in a row the server must have said that a statement still waits, after something was released."""
DEADLOCK, LOCK_WAIT_TIMEOUT = 1213, 1205

_sleep, _monotonic = time.sleep, time.monotonic
_here = threading.local()


class ToolError(Exception):
    """The tool, not the queue, is at fault: a schedule that cannot be followed, an operation that never comes back."""


@dataclass(slots=True)
class Step:
    """A statement of one operation, and what could have been done instead."""

    thread: str
    label: str
    number: int
    """Which of the thread's steps with this label it is, from 1."""
    access: Access
    ready: tuple[str, ...]
    running: str | None
    """Who would have gone on without a preemption."""
    preemptions: int
    """Before this step."""
    sql: str = ""
    waited: bool = False
    """The server made it wait for a lock."""
    releases: bool = False
    """It ends a transaction, so that others may get what they wait for."""


@dataclass(frozen=True)
class Wait:
    """A statement that had to wait for a lock, and whose transaction was in its way.

    Without a holder: nobody has locked anything of its tables, as far as the labels of the statements tell.
    """

    thread: str
    label: str
    holder: str
    holding: str
    """The holder's statement that may have taken the lock."""


@dataclass
class Run:
    """What happened in one schedule."""

    steps: list[Step] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, BaseException | None] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)
    deadlocks: list[tuple[str, str]] = field(default_factory=list)
    """(thread, label) of the statements that the server ended."""
    livelock: bool = False
    preemptions: int = 0
    written: set[str] = field(default_factory=set)
    """Tables that may have changed."""


class Director(Protocol):
    """Says who goes on."""

    def choose(self, ready: Sequence[str], running: str | None, run: Run, pending: Mapping[str, Step]) -> str:
        """One of ``ready``; ``running`` is the one that has just made a step and could make another."""


Job = Callable[[], Any]
IDLE, READY, RUNNING, BLOCKED, DONE = "idle", "ready", "running", "blocked", "done"


class _Worker(threading.Thread):
    """The thread of one operation."""

    def __init__(self, name: str, engine: Engine) -> None:
        super().__init__(daemon=True, name=name)
        self.engine = engine
        self.state = IDLE
        self.job: Job | None = None
        self.pending = Step(name, "start", 1, NOTHING, (), None, 0)
        self.asleep = False
        self.is_starting = False
        self.counts: dict[str, int] = {}
        self.clock = 0.0
        """What ``time.monotonic`` says to it: time passes only where it sleeps, however busy the machine is."""
        self.transaction: list[tuple[str, Access]] = []
        """What the open transaction has locked, by statement."""
        self.troubled = False
        """Its last statement failed: the server may have released its locks."""
        self.result: Any = None
        self.error: BaseException | None = None
        self._go = threading.Lock()
        self._go.acquire()
        self.prepared = threading.Event()
        self.start()

    def proceed(self) -> None:
        self._go.release()

    def run(self) -> None:
        _here.worker = self
        connection = connections[ALIAS]
        # Each statement is a step, as on a connection that takes one at a time.
        options = {**connection.settings_dict["OPTIONS"], "multi_statements": False}
        connection.settings_dict = {**connection.settings_dict, "OPTIONS": options}
        connection.ensure_connection()
        with connection.cursor() as cursor:
            cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {LOCK_WAIT}")
        for name in ("_commit", "_rollback"):
            setattr(connection, name, self._ending(getattr(connection, name), name[1:]))
        connection.execute_wrappers.append(self._execute)
        self.connection = connection
        self.session = connection.connection.thread_id()
        self.prepared.set()
        while True:
            self._go.acquire()
            if self.job is None:
                connection.close()
                return
            self.result, self.error = None, None
            try:
                self.result = self.job()
            except BaseException as error:
                self.error = error
            if connection.in_atomic_block or connection.needs_rollback or not connection.get_autocommit():
                self.error = ToolError(f"{self.name} has left a transaction open; {self.error!r}")
            self.engine.ended(self)

    def _execute(self, execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        if self.state is IDLE:
            return execute(sql, parameters, many, context)
        known = steps.statement(sql)
        if not known.access:
            return execute(sql, parameters, many, context)
        inside = context["connection"].in_atomic_block
        access = known.access if inside else steps.at_once(known.access)
        self._pause(known.label, access, sql, releases=not inside)
        if inside and (locked := steps.locks(known.access)):
            self.transaction.append((known.label, locked))
        try:
            return execute(sql, parameters, many, context)
        except Exception as error:
            self.troubled = True
            code = error.args[0] if error.args else None
            if code == DEADLOCK:
                self.engine.run_now.deadlocks.append((self.name, known.label))
            elif code == LOCK_WAIT_TIMEOUT:
                self.engine.failure = self.engine.failure or ToolError(f"{self.name} has waited {LOCK_WAIT} s: {sql}")
            raise

    def _ending(self, function: Callable[[], None], label: str) -> Callable[[], None]:
        def end() -> None:
            if self.state is not IDLE and self.transaction:
                held: Access = NOTHING
                for _, access in self.transaction:
                    held = steps.union(held, access)
                self._pause(label, steps.at_once(held), releases=True)
                self.transaction = []
            function()

        return end

    def sleep(self, seconds: float) -> None:
        self.clock += seconds
        self._pause("sleep", NOTHING)

    def _pause(self, label: str, access: Access, sql: str = "", *, releases: bool = False) -> None:
        number = self.counts[label] = self.counts.get(label, 0) + 1
        step = Step(self.name, label, number, access, (), None, 0, sql, releases=releases)
        if not self.engine.arrived(self, step):
            self._go.acquire()


class Engine:
    """Some threads that run operations under one schedule after another."""

    def __init__(self, names: Sequence[str], waiting: Waiting) -> None:
        self._waiting = waiting
        self._mutex = threading.Lock()
        self._main = threading.Lock()
        self._main.acquire()
        self.run_now = Run()
        self.failure: BaseException | None = None
        self._director: Director | None = None
        self._gates: dict[str, tuple[str, str]] = {}
        self._last: str | None = None
        self._progress = 0
        self._active: dict[str, _Worker] = {}
        self._limit = MOST_STEPS
        self._workers = {name: _Worker(name, self) for name in names}
        for worker in self._workers.values():
            assert worker.prepared.wait(30)

    def connections(self) -> list[Any]:
        """The connection of each thread, for those who watch its statements."""
        return [worker.connection for worker in self._workers.values()]

    def close(self) -> None:
        for worker in self._workers.values():
            worker.job = None
            if worker.state is IDLE:
                worker.proceed()
                worker.join(10)
            else:
                self._waiting.kill(worker.session)

    def execute(
        self, jobs: Mapping[str, Job], director: Director, gates: Mapping[str, tuple[str, str]] | None = None
    ) -> Run:
        """Runs the jobs to their ends.

        Args:
            gates: thread → (another, label): it does not begin before the other one stands at that label.

        Raises:
            ToolError: a thread never came back, or the director asked for what cannot be.
        """
        run = self.run_now = Run()
        self._director, self._gates, self._last, self.failure = director, dict(gates or {}), None, None
        self._limit = MOST_STEPS
        self._active = {name: self._workers[name] for name in jobs}
        for name, job in jobs.items():
            worker = self._workers[name]
            worker.job, worker.counts, worker.transaction, worker.asleep = job, {}, [], False
            worker.pending = Step(name, "start", 1, NOTHING, (), None, 0)
            worker.is_starting, worker.troubled, worker.clock = True, False, _monotonic()
            worker.state = READY
        with self._mutex:
            self._next()
        self._attend()
        for name, worker in self._active.items():
            worker.state = IDLE
            run.results[name], run.errors[name] = worker.result, worker.error
        if self.failure is not None:
            raise self.failure
        return run

    # -- called by the workers ----------------------------------------------------

    def arrived(self, worker: _Worker, step: Step) -> bool:
        """A worker stands before a step; whether it may go on at once."""
        with self._mutex:
            if worker.is_starting and step.label != "sleep":
                # Before its first statement an operation has done nothing that others could see.
                worker.is_starting = False
                first = self.run_now.steps[-1] if worker.state is RUNNING else None
                if first is not None and first.thread == worker.name:
                    first.label, first.number, first.access, first.sql = step.label, step.number, step.access, step.sql
                    first.releases = step.releases
                    self._written(step)
                    self._progress += 1
                    return True
            worker.pending = step
            worker.asleep = step.label == "sleep"
            return self._stands(worker)

    def ended(self, worker: _Worker) -> None:
        with self._mutex:
            worker.pending = Step(worker.name, "end", 1, NOTHING, (), None, 0)
            worker.asleep = False
            self._stands(worker, DONE)

    def _stands(self, worker: _Worker, state: str = READY) -> bool:
        was, worker.state = worker.state, state
        self._progress += 1
        if not worker.asleep and was is RUNNING:
            for other in self._active.values():
                if other is not worker:
                    other.asleep = False  # something has been done: what it waits for may be there
        if was is BLOCKED:
            return False
        made = self.run_now.steps[-1]
        if (made.releases or worker.troubled or state is DONE) and self._anyone_blocked():
            self._wake()
            return False
        return self._next() is worker

    def _anyone_blocked(self) -> bool:
        return any(one.state is BLOCKED for one in self._active.values())

    # -- who goes on ----------------------------------------------------------------

    def _next(self) -> _Worker | None:
        """Lets one go on; under the mutex. Itself, if it is the one that asks, need not be woken."""
        try:
            chosen = self._choose()
        except BaseException as error:
            self.failure = self.failure or error
            self._director = _Onwards()
            chosen = self._choose()
        if chosen is None:
            self._wake()
            return None
        chosen.state = RUNNING
        if threading.current_thread() is not chosen:
            chosen.proceed()
        return chosen

    def _choose(self) -> _Worker | None:
        run = self.run_now
        for name, (other, label) in list(self._gates.items()):
            if self._workers[other].pending.label == label or self._workers[other].state is DONE:
                del self._gates[name]
        ready = [name for name, one in self._active.items() if one.state is READY and name not in self._gates]
        if not ready:
            return None
        awake = [name for name in ready if not self._active[name].asleep] or ready
        running = self._last if self._last in awake else None
        pending = {name: self._active[name].pending for name in self._active}
        assert self._director is not None
        chosen = self._director.choose(tuple(awake), running, run, pending)
        if chosen not in ready:
            raise ToolError(f"{chosen} cannot go on here: ready are {', '.join(ready)}")
        worker = self._active[chosen]
        if self._last not in (None, chosen):
            # What the one before has stored is from an earlier millisecond, however fast the machine is: with a
            # retention of 0, GC compares times.
            _sleep(0.001)
        step = worker.pending
        step.ready, step.running, step.preemptions = tuple(awake), running, run.preemptions
        run.preemptions += running is not None and chosen != running
        run.steps.append(step)
        self._written(step)
        worker.asleep = worker.troubled = False
        self._last = chosen
        if len(run.steps) > self._limit:
            run.livelock = True
            self._director, self._limit = _Onwards(), self._limit + MOST_STEPS
            if self._limit > 4 * MOST_STEPS:
                raise ToolError("a livelock that does not end")
        return worker

    def _written(self, step: Step) -> None:
        self.run_now.written.update(
            table for table, kind in step.access.items() if kind not in (steps.READ, steps.SHARE)
        )

    # -- the main thread --------------------------------------------------------------

    def _wake(self) -> None:
        if self._main.locked():
            self._main.release()

    def _attend(self) -> None:
        """Until all have ended: finds out who waits for a lock, and lets the others go on."""
        seen = -1
        while True:
            if self._main.acquire(timeout=PATIENCE):
                with self._mutex:
                    if all(worker.state is DONE for worker in self._active.values()):
                        return
                self._continue()
                continue
            with self._mutex:
                progress = self._progress
                running = next((one for one in self._active.values() if one.state is RUNNING), None)
            if running is None or progress != seen:
                seen = progress
                continue
            if self._is_blocked(running, progress):
                self._continue()

    def _is_blocked(self, worker: _Worker, progress: int) -> bool:
        """Whether the running one waits for a lock; waits until that or its next stop is certain."""
        deadline = _monotonic() + 30
        times = 0
        already = sum(one.state is BLOCKED for one in self._active.values())
        while _monotonic() < deadline:
            waits = self._waiting.count()
            with self._mutex:
                if self._progress != progress or worker.state is not RUNNING:
                    return False
                times = times + 1 if waits > already else 0
                if times >= 2:
                    worker.state = BLOCKED
                    self._note_wait(worker)
                    return True
            _sleep(0.0002)
        self.failure = ToolError(f"{worker.name} neither comes back nor waits for a lock: {worker.pending.label}")
        self._waiting.kill(worker.session)
        return False

    def _note_wait(self, worker: _Worker) -> None:
        step = self.run_now.steps[-1]
        step.waited = True
        found = [
            Wait(worker.name, step.label, other.name, label)
            for other in self._active.values()
            if other is not worker
            for label in [
                next((one for one, access in other.transaction if steps.meets(step.access, access.items())), "")
            ]
            if label
        ]
        self.run_now.waits += found or [Wait(worker.name, step.label, "", "")]

    def _continue(self) -> None:
        """Somebody is blocked: sees who still is, then lets one go on."""
        alone = False
        while True:
            self._settle(alone=alone)
            with self._mutex:
                states = {worker.state for worker in self._active.values()}
                if RUNNING in states:
                    return
                if states == {DONE}:
                    self._wake()
                    return
                if any(worker.state is READY and name not in self._gates for name, worker in self._active.items()):
                    self._next()
                    return
            alone = True

    def _settle(self, *, alone: bool = False) -> None:
        """Waits until each blocked thread has arrived or certainly still waits; ``alone``: until one has arrived."""
        deadline = _monotonic() + LOCK_WAIT + 10
        quiet = 0
        before = None
        while _monotonic() < deadline:
            waits = self._waiting.count()
            with self._mutex:
                blocked = [worker.name for worker in self._active.values() if worker.state is BLOCKED]
                if not blocked or (alone and before is not None and blocked != before):
                    return
                quiet = quiet + 1 if waits >= len(blocked) and blocked == before else 0
                before = blocked
            if quiet >= STABLE and not alone:
                return
            _sleep(0.0003)
        raise ToolError(f"{before} neither wait nor go on")


class _Onwards:
    """Lets the one that runs run, and the others after it."""

    def choose(self, ready: Sequence[str], running: str | None, run: Run, pending: Mapping[str, Step]) -> str:
        if running is None:
            order = [step.thread for step in run.steps[-len(ready) :]]
            return min(ready, key=order.count)
        return running


def sleep(seconds: float) -> None:
    """Stands for ``time.sleep`` while operations run: theirs are steps."""
    worker = getattr(_here, "worker", None)
    if worker is None or worker.state is IDLE:
        _sleep(seconds)
    else:
        worker.sleep(seconds)


def monotonic() -> float:
    """Stands for ``time.monotonic`` while operations run."""
    worker = getattr(_here, "worker", None)
    return _monotonic() if worker is None or worker.state is IDLE else worker.clock
