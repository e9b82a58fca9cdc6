"""Whether the process is stopping, for tasks that run for long."""

from __future__ import annotations

import threading

_event = threading.Event()


def follow(event: threading.Event) -> None:
    """Let the event of a subscriber process tell it."""
    global _event  # A process has one subscriber.
    _event = event


def is_asked() -> bool:
    """Return whether the process has been asked to stop."""
    return _event.is_set()
