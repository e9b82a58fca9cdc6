"""The parent of ``runsubscriber --processes`` and ``--reload``: starts child processes, replaces them, ends them.

It does no queue work and holds no connection. Every child is a fresh interpreter
that runs the same command line, leads a process group of its own (a Ctrl-C
reaches the parent alone), and writes signs of life into a pipe (see ``lifeline``).
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

from django_mysqlqueue.backoff import Backoff, Failures
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.runtime.process import lifeline
from django_mysqlqueue.runtime.process.lifeline import Incarnation, Lifeline
from django_mysqlqueue.runtime.process.liveness_file import HeartbeatFile
from django_mysqlqueue.runtime.process.reload import Snapshot
from django_mysqlqueue.runtime.process.stop_signals import on_stop_signals, say_leaving, say_stopping
from django_mysqlqueue.runtime.process.subscriber import RELEASE_TIMEOUT, SHUTDOWN_MARGIN

LONG_RUN = 60.0
"""Seconds after which a child's end is no crash loop."""
RESTARTS = Backoff(initial=1.0, maximum=30.0, jitter=0.0)
TURN = 0.2
"""Seconds between two looks at the children."""


@dataclass(frozen=True, slots=True)
class Margins:
    """Seconds that children get on a busy machine before they are killed."""

    silence: float = 5.0
    """That a heartbeat of a child, due every second, may be late."""
    stop: float = SHUTDOWN_MARGIN + RELEASE_TIMEOUT + 1.0
    """Beyond SHUTDOWN_TIMEOUT until what is left is killed; children leave by themselves before."""
    leave: float = 2.0
    """That a child has to leave at once."""


MARGINS = Margins()


@dataclass(slots=True, eq=False)
class Child:
    """A running process. Times are monotonic."""

    process: subprocess.Popen[bytes]
    pipe: int
    suffix: str
    started_at: float
    signed_at: float
    """Of its last sign of life, or its start."""
    has_signed: bool = False
    wants_replacement: bool = False
    is_killed: bool = False


@dataclass(slots=True, eq=False)
class Slot:
    """One of the N processes that shall run: its child, or when the next one starts."""

    number: int
    progressed_at: float
    """When a child's poller last made progress. A start is none, so that a crash loop has no heartbeat."""
    child: Child | None = None
    start_at: float = 0.0
    failures: Failures = field(default_factory=lambda: Failures(RESTARTS))
    """Short runs in a row."""
    lost: Incarnation | None = None
    """A child that has died and may hold messages. The next one releases them before its first sign."""
    code: Snapshot | None = None
    """With ``--reload``: the files as they were before the last start."""
    waits_for_change: bool = False
    is_done: bool = False

    def back_off(self, ran: float) -> float:
        """Seconds until the next start after one of ``ran`` seconds that nobody asked to end."""
        if ran >= LONG_RUN:
            self.failures.clear()
            return 0.0
        return self.failures.add()


class Supervisor:
    """Keeps ``processes`` children of one command line running until it is told to stop.

    Args:
        command: the children's command line.
        shutdown_timeout: seconds that running handlers have after a stop.
        longest_handler: seconds; the longest ``max_processing_time`` of the handlers. A child whose main thread
            is silent for longer than both together (and a margin) is stopped or has a handler that keeps the
            interpreter's lock: it is killed. Every other hang ends the child by itself.
        lease_duration: seconds; with the last progress of any child older than this the heartbeat file is not renewed.
        drain: a child that exits with 0 without asking for a replacement is not replaced; ``run`` ends with the last.
        snapshot: for ``--reload``: the state of the code. A child that fails before its first sign of life is
            not started again before the code has changed.
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

    @property
    def is_stopping(self) -> bool:
        return self._signals > 0

    # -- from outside ---------------------------------------------------------

    def stop(self) -> None:
        """As a signal does: the first time children finish what they run, the second time they leave at once."""
        self._signals += 1

    def handle_signals(self) -> Callable[[], None]:
        """SIGTERM and SIGINT count as ``stop``, and the sender is told; returns what ends that."""

        def on_signal(number: int, count: int) -> None:
            self.stop()
            if count == 1:
                say_stopping(number, self._shutdown_timeout)
            elif count == 2:
                say_leaving(self._lease_duration)

        return on_stop_signals(on_signal)

    def run(self) -> int:
        """Returns when no child is left: 0 if all that were told to stop left cleanly, else 1.

        If it raises, or is killed, the children notice and stop by themselves.
        """
        event(logging.INFO, "supervisor.started", pid=os.getpid(), processes=len(self.places))
        try:
            while not all(place.is_done for place in self.places):
                self._obey()
                for place in self.places:
                    self._start_if_due(place)
                # Signs are read before anybody is judged: the supervisor may have been stopped itself.
                self._read_signs(TURN)
                for place in self.places:
                    self._look_at(place)
                self._once_a_second()
        finally:
            for place in self.places:
                if place.child is not None:
                    self._close_pipe(place.child)
            self._selector.close()
        event(logging.INFO, "supervisor.stopped", pid=os.getpid(), code=self._exit_code)
        return self._exit_code

    # -- starting -------------------------------------------------------------

    def _start_if_due(self, place: Slot) -> None:
        is_free = place.child is None and not place.is_done and not place.waits_for_change
        # One started now would not hear of the stop.
        if not is_free or self.is_stopping or time.monotonic() < place.start_at:
            return
        if self._snapshot is not None:
            place.code = self._snapshot()
        try:
            reading, writing = os.pipe()
        except OSError as error:  # too many open files
            event(logging.ERROR, "child.not_started", number=place.number, error=error)
            self._restart_later(place, ran=0.0)
            return
        suffix = secrets.token_hex(4)
        line = Lifeline(
            writing, os.getpid(), place.number, reload=self._snapshot is not None, suffix=suffix, predecessor=place.lost
        )
        try:
            process = subprocess.Popen(  # noqa: S603
                self._command,
                env={**os.environ, **line.described()},
                pass_fds=(writing,),
                # A process of a background group that reads the terminal would be stopped.
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError as error:
            os.close(reading)
            event(logging.ERROR, "child.not_started", number=place.number, error=error)
            self._restart_later(place, ran=0.0)
            return
        finally:
            os.close(writing)
        os.set_blocking(reading, False)
        self._selector.register(reading, selectors.EVENT_READ, place)
        now = time.monotonic()
        place.child = Child(process, reading, suffix, started_at=now, signed_at=now)
        event(logging.INFO, "child.started", number=place.number, pid=process.pid)

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
        """Takes in what a child has written; False when it will write no more."""
        try:
            signs = os.read(child.pipe, 4096)
        except BlockingIOError:
            return True
        if not signs:
            return False
        child.signed_at = time.monotonic()
        # A wish to be replaced, of code that has changed, may come before the child works.
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
            self._read(place, child)  # its last word
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
                reason="it did not stop" if now >= self._kill_at else "no sign of life",
                silent=round(silent, 1),
            )
            child.is_killed = True
            child.process.kill()

    def _after(self, place: Slot, child: Child, code: int) -> None:
        """What follows from a child's end."""
        ran = time.monotonic() - child.started_at
        # Before its first sign it has started nothing, and SIGTERM ends it as it ends any program.
        clean = code == 0 or (self.is_stopping and code == -signal.SIGTERM and not child.has_signed)
        event(
            logging.INFO if clean else logging.ERROR,
            "child.left" if clean else "child.died",
            number=place.number,
            pid=child.process.pid,
            **({"code": code} if code >= 0 else {"signal": _signal_name(-code)}),
            seconds=round(ran, 1),
        )
        if child.has_signed:
            place.lost = None if clean else Incarnation(child.process.pid, child.suffix)
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
        """Passes on signals that have come since the last turn."""
        while self._obeyed < self._signals:
            self._obeyed += 1
            now = time.monotonic()
            if self._obeyed == 1:
                event(logging.INFO, "supervisor.stopping", pid=os.getpid())
                self._kill_at = now + self._shutdown_timeout + self._margins.stop
                self._send(signal.SIGTERM)
            else:
                # Not SIGTERM again: a service manager that signals the whole control group has
                # already sent the children one of their own, which must not count as a second.
                self._kill_at = min(self._kill_at, now + self._margins.leave if self._obeyed == 2 else now)
                self._send(signal.SIGINT)

    def _send(self, number: signal.Signals) -> None:
        for place in self.places:
            if place.child is not None:
                place.child.process.send_signal(number)

    def _close_pipe(self, child: Child) -> None:
        with contextlib.suppress(KeyError):  # its end was read before
            self._selector.unregister(child.pipe)
        os.close(child.pipe)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
