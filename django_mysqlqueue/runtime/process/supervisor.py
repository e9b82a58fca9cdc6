"""The parent of ``runsubscriber --processes`` and ``--reload``: starts child processes, replaces them, stops them.

It does no queue work and has no database connection. Every child is a new interpreter that runs the same command
line, leads a process group of its own (so that a Ctrl-C reaches only the parent), and writes signals into a pipe
while it is alive (see ``lifeline``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from django_mysqlqueue.options.backoff import Backoff, Failures
from django_mysqlqueue.runtime.handling import unstarted
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.runtime.process import lifeline
from django_mysqlqueue.runtime.process.lifeline import Incarnation, Lifeline
from django_mysqlqueue.runtime.process.liveness_file import HeartbeatFile
from django_mysqlqueue.runtime.process.reload import Snapshot
from django_mysqlqueue.runtime.process.stop_signals import on_stop_signals, say_leaving, say_stopping
from django_mysqlqueue.runtime.process.subscriber import RELEASE_TIMEOUT, SHUTDOWN_MARGIN

LONG_RUN = 60.0
"""Seconds after which the end of a child does not count as part of a crash loop."""
RESTARTS = Backoff(initial=1.0, maximum=30.0, jitter=0.0)
TURN = 0.2
"""Seconds between two checks of the children."""


@dataclass(frozen=True, slots=True)
class Margins:
    """Seconds that children get on a busy machine before they are killed."""

    silence: float = 5.0
    """Seconds by which a child's signal, due every second, may be late."""
    stop: float = SHUTDOWN_MARGIN + RELEASE_TIMEOUT + 1.0
    """Seconds after SHUTDOWN_TIMEOUT until children are killed. They normally exit by themselves before."""
    leave: float = 2.0
    """Seconds that a child has to exit when it is told to exit at once."""


MARGINS = Margins()


@dataclass(slots=True, eq=False)
class Child:
    """A running child process. Times are monotonic."""

    process: subprocess.Popen[bytes]
    pipe: int
    suffix: str
    memory: int
    """File descriptor of the memory for what it has not started."""
    started_at: float
    signed_at: float
    """Time of its last signal, or of its start."""
    has_signed: bool = False
    wants_replacement: bool = False
    is_killed: bool = False

    @property
    def died(self) -> str:
        """How it died: its exit status or signal."""
        code = self.process.returncode
        return f"exit status {code}" if code >= 0 else _signal_name(-code)


@dataclass(slots=True, eq=False)
class Slot:
    """One of the N processes to keep running: its child, or the time of the next start."""

    number: int
    progressed_at: float
    """When a child's poller last made progress. A start does not count, so a crash loop does not look alive."""
    child: Child | None = None
    start_at: float = 0.0
    failures: Failures = field(default_factory=lambda: Failures(RESTARTS))
    """Number of short runs in a row."""
    lost: Child | None = None
    """A child that died and may hold messages. Its replacement releases them before it sends its first signal."""
    code: Snapshot | None = None
    """With ``--reload``: the state of the files before the last start."""
    waits_for_change: bool = False
    is_done: bool = False

    def back_off(self, ran: float) -> float:
        """Return the seconds until the next start after a child ended by itself."""
        if ran >= LONG_RUN:
            self.failures.clear()
            return 0.0
        return self.failures.add()


class Supervisor:
    """Keep ``processes`` children of one command line running until told to stop.

    Args:
        command: command line of the children.
        processes: number of children.
        shutdown_timeout: seconds that running handlers have after a stop.
        longest_handler: the longest ``max_processing_time`` of the handlers, in seconds. A child whose main thread
            has sent no signal for longer than this plus ``shutdown_timeout`` (and a margin) is frozen, or has a
            handler that keeps the interpreter's lock: it is killed. A child ends by itself if it hangs in another way.
        lease_duration: seconds. The heartbeat file is not renewed while the last progress of any child is older.
        drain: if True, a child that exits with 0 without asking for a replacement is not replaced. ``run`` returns
            after the last one.
        heartbeat_file: the file to renew while all children make progress.
        snapshot: with ``--reload``, a function that returns the state of the code. A child that fails before its
            first signal is started again only after the code has changed.
        margins: seconds to add to the limits after which children are killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        processes: int,
        shutdown_timeout: float,
        longest_handler: float,
        lease_duration: float,
        drain: bool = False,
        heartbeat_file: HeartbeatFile | None = None,
        snapshot: Callable[[], Snapshot] | None = None,
        margins: Margins = MARGINS,
    ) -> None:
        self._command = list(command)
        self._shutdown_timeout = shutdown_timeout
        self._margins = margins
        self._silence_limit = longest_handler + shutdown_timeout + margins.silence
        self._lease_duration = lease_duration
        self._drain = drain
        self._heartbeat_file = heartbeat_file
        self._snapshot = snapshot
        self._selector = selectors.DefaultSelector()
        self.places = [Slot(number, progressed_at=time.monotonic()) for number in range(1, processes + 1)]
        self._signals = 0
        self._obeyed = 0
        self._kill_at = float("inf")
        self._looked_at = 0.0
        self._exit_code = 0
        self._is_init = os.getpid() == 1
        """Whether it is the first process of a container: it inherits what handlers leave behind."""

    @property
    def is_stopping(self) -> bool:
        """Whether ``stop`` has been called."""
        return self._signals > 0

    # -- from outside ---------------------------------------------------------

    def stop(self) -> None:
        """Stop, as a signal does: after the first call children finish running handlers, after the second they exit."""
        self._signals += 1

    def handle_signals(self) -> Callable[[], None]:
        """Call ``stop`` on SIGTERM and SIGINT, and tell the user what happens.

        Returns:
            A function that restores the previous signal handlers.
        """

        def on_signal(number: int, count: int) -> None:
            self.stop()
            if count == 1:
                say_stopping(number, self._shutdown_timeout)
            elif count == 2:
                say_leaving(self._lease_duration)

        return on_stop_signals(on_signal)

    def run(self) -> int:
        """Run until no child is left.

        If this raises, or the supervisor is killed, the children notice it and stop by themselves.

        Returns:
            The exit status: 0 if all children that were told to stop exited cleanly, else 1.
        """
        event(logging.INFO, "supervisor.started", pid=os.getpid(), processes=len(self.places))
        try:
            while not all(place.is_done for place in self.places):
                self._obey()
                for place in self.places:
                    self._start_if_due(place)
                # Read all signals before judging any child: the supervisor may have been frozen itself.
                self._read_signs(TURN)
                for place in self.places:
                    self._look_at(place)
                if self._is_init:
                    self._reap_orphans()
                self._once_a_second()
        finally:
            for place in self.places:
                if place.child is not None:
                    self._close_pipe(place.child)
                    os.close(place.child.memory)
                self._forget_lost(place)
            self._selector.close()
        event(logging.INFO, "supervisor.stopped", pid=os.getpid(), code=self._exit_code)
        return self._exit_code

    # -- starting -------------------------------------------------------------

    def _start_if_due(self, place: Slot) -> None:
        is_free = place.child is None and not place.is_done and not place.waits_for_change
        # A child that is started during a stop would not receive the stop signal.
        if not is_free or self.is_stopping or time.monotonic() < place.start_at:
            return
        if self._snapshot is not None:
            place.code = self._snapshot()
        try:
            place.child = self._start(place)
        except OSError as error:  # Too many open files, or the command cannot be run.
            event(logging.ERROR, "child.not_started", number=place.number, error=error)
            self._restart_later(place, ran=0.0)
            return
        self._selector.register(place.child.pipe, selectors.EVENT_READ, place)
        event(logging.INFO, "child.started", number=place.number, pid=place.child.process.pid)

    def _start(self, place: Slot) -> Child:
        """Start a child.

        Raises:
            OSError: that is not possible.
        """
        lost, suffix = place.lost, secrets.token_hex(4)
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as after:
            reading, writing = os.pipe()
            undo.callback(os.close, reading)
            after.callback(os.close, writing)
            memory = unstarted.create()
            undo.callback(os.close, memory)
            line = Lifeline(
                writing,
                os.getpid(),
                place.number,
                reload=self._snapshot is not None,
                suffix=suffix,
                predecessor=None if lost is None else Incarnation(lost.process.pid, lost.suffix),
                died="" if lost is None else lost.died,
                memory=memory,
                left=None if lost is None else lost.memory,
            )
            process = subprocess.Popen(  # noqa: S603
                self._command,
                env={**os.environ, **line.described()},
                pass_fds=(writing, memory) if lost is None else (writing, memory, lost.memory),
                # The kernel stops a process of a background process group that reads from the terminal.
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
            undo.pop_all()
        os.set_blocking(reading, False)
        now = time.monotonic()
        return Child(process, reading, suffix, memory, started_at=now, signed_at=now)

    def _restart_later(self, place: Slot, ran: float) -> None:
        wait = place.back_off(ran)
        place.start_at = time.monotonic() + wait
        event(logging.WARNING, "child.restarting", number=place.number, seconds=wait)

    # -- watching -------------------------------------------------------------

    def _read_signs(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            place: Slot = key.data
            if place.child is not None and not self._read(place, place.child):
                self._selector.unregister(key.fileobj)

    def _read(self, place: Slot, child: Child) -> bool:
        """Read what a child has written; return False if it will not write any more."""
        try:
            signs = os.read(child.pipe, 4096)
        except BlockingIOError:
            return True
        if not signs:
            return False
        child.signed_at = time.monotonic()
        # A child may ask for a replacement before it works: with --reload, if the code changes while it starts.
        child.has_signed = child.has_signed or bool(signs.replace(lifeline.REPLACE, b""))
        child.wants_replacement = child.wants_replacement or lifeline.REPLACE in signs
        if lifeline.PROGRESS in signs:
            place.progressed_at = child.signed_at
        return True

    def _look_at(self, place: Slot) -> None:
        child = place.child
        if child is None:
            place.is_done = place.is_done or self.is_stopping
            return
        code = child.process.poll()
        if code is not None:
            self._read(place, child)  # It may have asked for a replacement.
            self._close_pipe(child)
            place.child = None
            self._after(place, child, code)
            return
        now = time.monotonic()
        silent = now - child.signed_at
        if (silent > self._silence_limit or now >= self._kill_at) and not child.is_killed:
            event(
                logging.ERROR,
                "child.killed",
                number=place.number,
                pid=child.process.pid,
                reason="it did not stop" if now >= self._kill_at else "no heartbeat",
                seconds=round(silent, 1),
            )
            child.is_killed = True
            child.process.kill()

    def _after(self, place: Slot, child: Child, code: int) -> None:
        """Decide what follows from the end of a child."""
        ran = time.monotonic() - child.started_at
        # Before its first signal a child has started nothing, and SIGTERM ends it like any program.
        clean = code == 0 or (self.is_stopping and code == -signal.SIGTERM and not child.has_signed)
        event(
            logging.INFO if clean else logging.ERROR,
            "child.exited" if clean else "child.died",
            number=place.number,
            pid=child.process.pid,
            **({"code": code} if code >= 0 else {"signal": _signal_name(-code)}),
            seconds=round(ran, 1),
        )
        if child.has_signed:
            self._forget_lost(place)
        if child.has_signed and not clean:
            place.lost = child
        else:
            os.close(child.memory)
        if self.is_stopping:
            self._exit_code = self._exit_code if clean else 1
            place.is_done = True
        elif child.wants_replacement:
            place.failures.clear()
            place.start_at = 0.0
        elif self._drain and clean:
            place.is_done = True
        elif self._snapshot is not None and not clean and not child.has_signed:
            place.waits_for_change = True
            event(logging.WARNING, "child.waiting", number=place.number, reason="it cannot start until a file changes")
        else:
            self._restart_later(place, ran)

    def _forget_lost(self, place: Slot) -> None:
        if place.lost is not None:
            os.close(place.lost.memory)
            place.lost = None

    def _reap_orphans(self) -> None:
        """Reap processes that have ended, and are not of this supervisor's children, as PID 1 has to."""
        mine = {place.child.process.pid for place in self.places if place.child is not None}
        with contextlib.suppress(ChildProcessError):  # There are no processes.
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in mine:
                    return  # ``poll`` gets its status; the others have their turn after it.
                os.waitpid(ended.si_pid, 0)

    def _once_a_second(self) -> None:
        now = time.monotonic()
        if now < self._looked_at + 1.0:
            return
        for place in self.places:
            if place.waits_for_change and self._snapshot is not None and self._snapshot() != place.code:
                place.waits_for_change = False
        if self._heartbeat_file is not None and all(
            place.is_done or now - place.progressed_at < self._lease_duration for place in self.places
        ):
            self._heartbeat_file.touch()
        self._looked_at = now

    # -- stopping -------------------------------------------------------------

    def _obey(self) -> None:
        """Pass on the signals that have arrived since the last turn."""
        while self._obeyed < self._signals:
            self._obeyed += 1
            now = time.monotonic()
            if self._obeyed == 1:
                event(logging.INFO, "supervisor.stopping", pid=os.getpid())
                self._kill_at = now + self._shutdown_timeout + self._margins.stop
                self._send(signal.SIGTERM)
            else:
                # SIGINT, not a second SIGTERM: a service manager that signals the whole control group has
                # already sent SIGTERM to the children, and that must not count as the second signal.
                self._kill_at = min(self._kill_at, now + self._margins.leave if self._obeyed == 2 else now)
                self._send(signal.SIGINT)

    def _send(self, number: signal.Signals) -> None:
        for place in self.places:
            if place.child is not None:
                place.child.process.send_signal(number)

    def _close_pipe(self, child: Child) -> None:
        with contextlib.suppress(KeyError):  # It was unregistered when its end was read.
            self._selector.unregister(child.pipe)
        os.close(child.pipe)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
