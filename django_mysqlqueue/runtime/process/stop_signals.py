"""SIGTERM and SIGINT, and what the person who sent them is told."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def on_stop_signals(act: Callable[[int, int], None]) -> Callable[[], None]:
    """Calls ``act(number, count)`` for each SIGTERM and SIGINT, in the main thread; ``count`` begins at 1.

    It runs inside the signal handler, where the main thread may hold any lock:
    it may set flags, send signals, ``say`` something and leave, no more.
    Returns what puts the former handlers back.
    """
    count = 0
    pid = os.getpid()

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal count
        if os.getpid() != pid:
            # A process that a handler has forked: it ends as any other.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        count += 1
        act(number, count)

    before = {number: signal.signal(number, on_signal) for number in STOP_SIGNALS}

    def restore() -> None:
        for number, action in before.items():
            signal.signal(number, action)

    return restore


def say_stopping(number: int, shutdown_timeout: float) -> None:
    """The answer to the first signal."""
    again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
    say(f"Stopping: handlers that run have up to {shutdown_timeout:g} s; {again} leaves at once.")


def say_leaving(lease_duration: float) -> None:
    """The answer to the second signal."""
    say(
        f"Leaving at once: what was in hand comes again after {lease_duration:g} s (in shared mode after the "
        "visibility time-out)."
    )


def say(text: str) -> None:
    """A line on the terminal, without the buffers and locks of ``sys.stderr``: safe inside a signal handler."""
    with contextlib.suppress(OSError):
        start = "\n" if os.isatty(2) else ""  # behind the terminal's ^C
        os.write(2, f"{start}{text}\n".encode())
