"""Tells subscribers of the same process that something was published."""

from __future__ import annotations

from collections.abc import Callable

eager: Callable[[str], None] | None = None
"""What delivers in the publisher's thread where the setting ``EAGER`` says so; the app puts it here."""

_listeners: dict[str, list[Callable[[], None]]] = {}


def listen(using: str, wake: Callable[[], None]) -> Callable[[], None]:
    """Calls ``wake`` after every publish that commits on ``using``; returns what ends that."""
    _listeners.setdefault(using, []).append(wake)

    def stop() -> None:
        _listeners[using].remove(wake)

    return stop


def has_listeners(using: str) -> bool:
    return bool(_listeners.get(using))


def notify(using: str) -> None:
    for wake in list(_listeners.get(using, ())):
        wake()
