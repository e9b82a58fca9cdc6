"""A program in a pseudo-terminal: what it shows, keys, and the terminal's size."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from tests.support.paths import ROOT
from tests.support.processes import hear_ctrl_c

HOME = "\x1b[H"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
WAIT = 30.0


class Terminal:
    """The master's side of a pseudo-terminal with a process."""

    def __init__(self, process: subprocess.Popen[bytes] | None, master: int, slave: int) -> None:
        self.process = process
        self.output = ""
        self._master = master
        self._slave = slave

    def read(self, seconds: float = 0.0) -> bool:
        """Reads what the process has written; False if it wrote nothing."""
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:
            return False
        self.output += data.decode(errors="replace")
        return bool(data)

    def lines(self) -> list[str]:
        """The lines of the last frame, which begins at the upper left corner."""
        while self.read():
            pass
        return [line.rstrip() for line in CONTROL.sub("", self.output.split(HOME)[-1]).split("\n")]

    def wait_until(self, is_shown: Callable[[list[str]], bool]) -> list[str]:
        """Waits for a screen; returns its lines."""
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            self.read(0.05)
            lines = self.lines()
            if is_shown(lines):
                return lines
            assert self.process is None or self.process.poll() is None, "\n".join(lines)
        raise AssertionError("\n".join(self.lines()))

    def wait_for(self, text: str) -> list[str]:
        """Waits until the screen has a text; returns its lines."""
        return self.wait_until(lambda lines: any(text in line for line in lines))

    def wait_for_frames(self, number: int) -> None:
        """Waits until some more frames have been drawn."""
        drawn = self.output.count(HOME) + number
        self.wait_until(lambda lines: self.output.count(HOME) >= drawn)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        resize(self._slave, columns, lines)

    def mode(self) -> list[object]:
        """The terminal's settings."""
        return termios.tcgetattr(self._slave)

    def end(self) -> int:
        """Waits for the process; returns its exit status."""
        end = time.monotonic() + WAIT
        while self.process.poll() is None:
            assert time.monotonic() < end, "\n".join(self.lines())
            self.read(0.05)
        while self.read(0.2):  # The kernel hands over what was written last a little later.
            pass
        return self.process.returncode


def resize(descriptor: int, columns: int, lines: int) -> None:
    """Sets the size of a terminal, and tells its process."""
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


@contextlib.contextmanager
def opened(
    command: Sequence[str], *, columns: int = 80, lines: int = 24, environment: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Runs a program in a terminal of its own, whose keys reach it as signals, too."""
    master, slave = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", **(environment or {})}
    environ.pop("NO_COLOR", None)
    resize(slave, columns, lines)

    def prepare() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        hear_ctrl_c()

    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=environ, start_new_session=True,
        preexec_fn=prepare,
    )  # fmt: skip
    terminal = Terminal(process, master, slave)
    try:
        yield terminal
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)
