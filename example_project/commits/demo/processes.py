"""Subscriber processes that the demo starts and stops."""

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
"""Seconds to wait for a subscriber to exit. Longer than SHUTDOWN_TIMEOUT, so that running handlers can finish."""
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
        """Check that the process has not failed.

        Raises:
            CommandError: It exited with a status other than 0. The message contains the end of its log.
        """
        code = self.popen.poll()
        if code:
            lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            raise CommandError("\n".join([f"A subscriber exited with status {code}. The end of {self.log}:", *lines]))


class Subscribers:
    """Start subscribers. At the end of the block, stop those that it started and no others."""

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
        """Start ``runsubscriber`` with these arguments."""
        log = self._folder / f"subscriber-{len(self._processes) + 1}.log"
        with log.open("wb") as output:
            popen = subprocess.Popen(  # noqa: S603
                [sys.executable, str(ROOT / "manage.py"), "runsubscriber", *arguments],
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C must reach only the demo, which then stops its subscribers: a second signal
                # would end them at once.
                process_group=0,
            )
        process = Process(popen, log)
        self._processes.append(process)
        return process

    def stop(self, process: Process) -> None:
        """Stop a subscriber with SIGTERM: running handlers finish, other deliveries are released.

        Raises:
            CommandError: It did not exit in time, or it failed.
        """
        process.popen.terminate()
        try:
            process.popen.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise CommandError(
                f"A subscriber did not exit within {STOP_TIMEOUT} s of SIGTERM. Its log: {process.log}"
            ) from error
        process.check()

    def check(self) -> None:
        """Check that no subscriber has failed.

        Raises:
            CommandError: A subscriber exited with a status other than 0.
        """
        for process in self._processes:
            process.check()
