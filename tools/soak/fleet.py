"""Start, watch and stop the processes of the soak test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

RESTART_PAUSE = 0.5
"""Seconds before a process that has ended is restarted."""
STOP_TIMEOUT = 60.0
MARK = "SOAK_RUN"
"""An environment variable that only the processes of this run have."""
ROOT = Path(__file__).parents[2]


@dataclass(slots=True, eq=False)
class Slot:
    """A command that is restarted whenever it ends."""

    name: str
    command: tuple[str, ...]
    log: Path
    is_publisher: bool = False
    is_client: bool = False
    """Whether it is a client in plain SQL."""
    is_spared: bool = False
    """Whether it is never killed, because its memory is measured through the whole run."""
    process: subprocess.Popen[bytes] | None = None
    start_at: float = 0.0
    log_from: int = 0
    """The offset in its log at which the current process began."""
    starts: int = 0
    kills: int = 0
    was_killed: bool = False
    was_terminated: bool = False
    """Whether it was asked to end, so that it is restarted."""
    is_ready: bool = False
    ends: list[str] = field(default_factory=list)
    """Unexpected ends."""

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.poll() is None else None


def children_of(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # the process has ended
        return []
    return [int(one) for one in text.split()]


def resident_mb(pid: int) -> float | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), None)


class Fleet:
    """Keep the command of every slot running until it is stopped."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self._folder = folder
        self.mark = {MARK: str(folder)}
        """In the environment of each process of this run."""
        self._env = {**env, **self.mark}
        self.slots: list[Slot] = []
        self._stopping: set[str] = set()

    @property
    def subscribers(self) -> list[Slot]:
        return [slot for slot in self.slots if not slot.is_publisher and not slot.is_client]

    @property
    def publishers(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.is_publisher]

    @property
    def clients(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.is_client]

    def add(
        self, name: str, *command: str, publisher: bool = False, client: bool = False, spared: bool = False
    ) -> Slot:
        log = self._folder / f"{name}.log"
        slot = Slot(name, command, log, is_publisher=publisher, is_client=client, is_spared=spared)
        self.slots.append(slot)
        self._start(slot)
        return slot

    def _start(self, slot: Slot) -> None:
        with slot.log.open("ab") as log:
            slot.log_from = log.tell()
            slot.process = subprocess.Popen(
                [sys.executable, *slot.command],
                cwd=ROOT,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C must reach only the main process
            )
        slot.starts += 1
        slot.was_killed = slot.was_terminated = slot.is_ready = False

    def tend(self) -> None:
        """Restart processes that have ended."""
        for slot in self.slots:
            if slot.process is not None and slot.process.poll() is not None:
                self._look_at_end(slot, slot.process.returncode)
                slot.process = None
                slot.start_at = time.monotonic() + RESTART_PAUSE
            elif slot.process is None and slot.name not in self._stopping and time.monotonic() >= slot.start_at:
                self._start(slot)

    def _look_at_end(self, slot: Slot, code: int) -> None:
        if slot.was_killed and code == -signal.SIGKILL:
            slot.kills += 1
        elif code == 0 and slot.name in self._stopping:
            pass
        elif slot.was_terminated and code in (0, 1, -signal.SIGTERM):
            pass  # 1: the server was away; a signal: it had not begun
        elif not slot.is_publisher and code == 1 and not self.has_started(slot):
            pass  # the server was away; the check of the logs finds other causes
        else:
            slot.ends.append(f"exited with status {code}")

    def is_at_work(self) -> bool:
        """Return whether most of the subscribers run."""
        at_work = sum(slot.pid is not None and self.has_started(slot) for slot in self.subscribers)
        return 2 * at_work > len(self.subscribers)

    def has_started(self, slot: Slot) -> bool:
        if slot.is_ready:
            return True
        with slot.log.open("rb") as log:
            log.seek(slot.log_from)
            text = log.read()
        slot.is_ready = (b"client.started" if slot.is_client else b"subscriber.started") in text
        return slot.is_ready

    def kill(self, pid: int) -> None:
        for slot in self.slots:
            if slot.pid == pid:
                slot.was_killed = True
        os.kill(pid, signal.SIGKILL)

    def terminate(self, slot: Slot) -> list[int]:
        """Ask a process to end, and return it and its children. It is restarted as if it had ended by itself."""
        if slot.pid is None:
            return []
        ending = [slot.pid, *children_of(slot.pid)]
        slot.was_terminated = True
        os.kill(slot.pid, signal.SIGTERM)
        return ending

    def workers(self, *, spared: bool) -> list[int]:
        """Return the pids of the processes that run handlers: supervisors' children, and unsupervised processes."""
        found = []
        for slot in self.subscribers:
            if slot.pid is not None and (spared or not slot.is_spared):
                found += children_of(slot.pid) if "--processes" in slot.command else [slot.pid]
        return found

    # -- the end --------------------------------------------------------------

    def stop(self, slots: list[Slot]) -> list[str]:
        """Stop processes: subscribers and clients with SIGTERM, publishers by the file that they watch.

        Returns:
            A line for each process that did not exit cleanly.
        """
        self._stopping.update(slot.name for slot in slots)
        for slot in slots:
            if slot.pid is not None and not slot.is_publisher:
                os.kill(slot.pid, signal.SIGTERM)
        bad = []
        deadline = time.monotonic() + STOP_TIMEOUT
        for slot in slots:
            if slot.process is None:
                continue
            try:
                code = slot.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                bad.append(f"{slot.name} did not exit within {STOP_TIMEOUT:g} s")
                continue
            if code:
                bad.append(f"{slot.name} exited with status {code}")
            slot.process = None
        return bad

    def close(self) -> None:
        """Kill all processes of this run that are left, including children whose supervisor was killed."""
        mark = f"{MARK}={self._folder}".encode()
        for place in Path("/proc").glob("[0-9]*"):
            try:
                is_mine = mark in (place / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if is_mine and int(place.name) != os.getpid():
                try:
                    os.kill(int(place.name), signal.SIGKILL)
                except ProcessLookupError:
                    continue
        for slot in self.slots:
            if slot.process is not None:
                slot.process.wait()
