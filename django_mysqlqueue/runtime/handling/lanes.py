"""What stands in the inbox: deliveries, the lanes they wait in, and what one call of a handler gets."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from django_mysqlqueue.runtime.handling.handler import Handler
from django_mysqlqueue.service.deliveries import Claimed
from django_mysqlqueue.service.payloads import Body
from django_mysqlqueue.service.refs import GroupRef

if TYPE_CHECKING:
    from django_mysqlqueue.runtime.handling.delivery import Delivery


@dataclass(slots=True, eq=False)
class Held:
    """A delivery in this process."""

    claimed: Claimed
    body: Body
    handler: Handler
    started_at: float = 0.0
    """Monotonic; 0 while it waits."""
    thread: int = 0
    """Identifier of the thread that handles it."""
    delivery: Delivery | None = None
    """What its handler got; None where it was not called."""
    seconds: float = 0.0
    """How long the call took, where somebody watches."""
    messages: int = 1
    """How many messages that call had."""

    @property
    def alone(self) -> bool:
        """It failed before, or its holder vanished: in a batch it would take its neighbours with it."""
        return self.claimed.suspect or self.claimed.attempt > 1

    def is_overrun(self) -> bool:
        return time.monotonic() - self.started_at > self.handler.max_processing_time


@dataclass(slots=True, eq=False)
class Lane:
    """What waits its turn: one partition of an ordered group, or all of a shared group."""

    ref: GroupRef
    key: str | None
    """The partition; None for a shared group."""
    waiting: deque[Held] = field(default_factory=deque)
    busy: bool = False
    """A thread is at it; an ordered lane lets no second one in."""
    blocked: bool = False
    """``on_failure="block"``: what comes is given back until the failed head is settled."""
    queued: bool = False
    """It stands in its group's line of lanes that have something to start."""
    slice_until: float = 0.0

    @property
    def exclusive(self) -> bool:
        return self.key is not None


@dataclass(slots=True, eq=False)
class Batch:
    """What one call of a handler gets, and the lanes it came from: one delivery, or some for ``batch=True``."""

    lanes: list[Lane]
    items: list[Held]
