"""Read a topic without a consumer group: in Python, and as server-sent events for pages.

This is the public API. Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_mysqlqueue.exports import loaded_on_use

if TYPE_CHECKING:
    from django_mysqlqueue.service.received import ReceivedMessage
    from django_mysqlqueue.tails.api import AsyncTail, Tail, atail, tail
    from django_mysqlqueue.tails.reading import Gap
    from django_mysqlqueue.tails.views import TailView

__all__ = ["AsyncTail", "Gap", "ReceivedMessage", "Tail", "TailView", "atail", "tail"]

_HOMES = {
    ".api": "AsyncTail Tail atail tail",
    ".reading": "Gap",
    ".views": "TailView",
    "..service.received": "ReceivedMessage",
}
__getattr__, __dir__ = loaded_on_use(__name__, _HOMES)
