"""SIGTERM and SIGINT, and the messages for the user who sent them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def on_stop_signals(act: Callable[[int, int], None]) -> Callable[[], None]:
    """Call ``act`` for each SIGTERM and SIGINT, in the main thread.

    ``act`` runs inside the signal handler, where the main thread may hold any lock: it may only set flags, send
    signals, call ``say`` and exit.

    Returns:
        A function that restores the previous signal handlers.
    """
    count = 0
    pid = os.getpid()

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal count
        if os.getpid() != pid:
            # A child that a handler has forked: the signal ends it like any program.
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
    """Tell the user what the first signal does."""
    again = "Ctrl-C again" if number == signal.SIGINT else "a second signal"
    say(f"Stopping: running handlers have up to {shutdown_timeout:g} s to finish; {again} exits at once.")


def say_leaving(lease_duration: float) -> None:
    """Tell the user what the second signal does."""
    say(
        f"Exiting at once: in-flight messages will be redelivered after {lease_duration:g} s (in shared mode after "
        "the visibility timeout)."
    )


def say(text: str) -> None:
    """Write a line to the terminal without the buffers and locks of ``sys.stderr``: safe inside a signal handler."""
    with contextlib.suppress(OSError):
        start = "\n" if os.isatty(2) else ""  # The terminal has just shown ^C on this line.
        os.write(2, f"{start}{text}\n".encode())
