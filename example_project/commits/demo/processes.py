"""Real subscriber processes, started and ended by the demo."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from django.core.management.base import CommandError

from example_project.paths import ROOT

STOP_TIMEOUT = 40
"""Seconds; longer than SHUTDOWN_TIMEOUT, which running handlers get."""
LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class Process:
    """A ``runsubscriber`` process."""

    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def is_ready(self) -> bool:
        return b"subscriber.started" in self.log.read_bytes()

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    def check(self) -> None:
        """Raises CommandError, with the end of its log, if it has failed."""
        code = self.popen.poll()
        if code:
            lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            raise CommandError("\n".join([f"A subscriber has left with {code}. The end of {self.log}:", *lines]))


class Subscribers:
    """Starts subscribers and, on leaving the block, ends those that it started and no others."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = dict(environment)
        self._processes: list[Process] = []

    def __enter__(self) -> Subscribers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        running = [process.popen for process in self._processes if process.popen.poll() is None]
        for popen in running:
            popen.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT
        for popen in running:
            try:
                popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait()

    def start(self, *arguments: str) -> Process:
        """Starts ``runsubscriber`` with these arguments."""
        log = self._folder / f"subscriber-{len(self._processes) + 1}.log"
        with log.open("wb") as output:
            popen = subprocess.Popen(  # noqa: S603
                [sys.executable, str(ROOT / "manage.py"), "runsubscriber", *arguments],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A Ctrl-C in the terminal is for the demo, which then ends its subscribers itself:
                # a second signal would make them leave at once.
                process_group=0,
            )
        process = Process(popen, log)
        self._processes.append(process)
        return process

    def stop(self, process: Process) -> None:
        """Ends a subscriber as a supervisor does, with SIGTERM: what runs finishes, the rest is given back."""
        process.popen.terminate()
        try:
            process.popen.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"A subscriber did not stop; its log: {process.log}") from error
        process.check()

    def check(self) -> None:
        """Raises CommandError if one has failed."""
        for process in self._processes:
            process.check()
