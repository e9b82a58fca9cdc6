"""Read a topic without a consumer group: in Python, and as server-sent events for pages.

This is the public API. Names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from django_mysqlqueue.service.received import ReceivedMessage
    from django_mysqlqueue.tails.api import AsyncTail, Tail, atail, tail
    from django_mysqlqueue.tails.reading import Gap
    from django_mysqlqueue.tails.views import TailView

__all__ = ["AsyncTail", "Gap", "ReceivedMessage", "Tail", "TailView", "atail", "tail"]

_HOMES = {
    "AsyncTail": "django_mysqlqueue.tails.api",
    "Gap": "django_mysqlqueue.tails.reading",
    "ReceivedMessage": "django_mysqlqueue.service.received",
    "Tail": "django_mysqlqueue.tails.api",
    "TailView": "django_mysqlqueue.tails.views",
    "atail": "django_mysqlqueue.tails.api",
    "tail": "django_mysqlqueue.tails.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
