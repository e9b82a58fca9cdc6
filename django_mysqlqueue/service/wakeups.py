"""Notification of subscribers in the same process that a message was published."""

from __future__ import annotations

from collections.abc import Callable

eager: Callable[[str], None] | None = None
"""A function that delivers in the publisher's thread if the setting ``EAGER`` is on. Set by the app."""

_listeners: dict[str, list[Callable[[], None]]] = {}


def listen(using: str, wake: Callable[[], None]) -> Callable[[], None]:
    """Call ``wake`` after every publish that commits on ``using``, until the returned function is called."""
    _listeners.setdefault(using, []).append(wake)

    def stop() -> None:
        _listeners[using].remove(wake)

    return stop


def has_listeners(using: str) -> bool:
    """Return whether subscribers of this process listen on ``using``."""
    return bool(_listeners.get(using))


def notify(using: str) -> None:
    """Wake the subscribers of this process that listen on ``using``."""
    for wake in list(_listeners.get(using, ())):
        wake()
