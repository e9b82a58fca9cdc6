"""The contents of the inbox: deliveries, the lanes in which they wait, and batches for one call of a handler."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from django_mysqlqueue.service.deliveries import Claimed, Settlement
from django_mysqlqueue.service.payloads import Body
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.subscriptions.handler import Handler

if TYPE_CHECKING:
    from django_mysqlqueue.subscriptions.delivery import Delivery


@dataclass(slots=True, eq=False)
class Held:
    """A delivery that this process has claimed."""

    claimed: Claimed
    body: Body
    handler: Handler
    started_at: float = 0.0
    """When its handler started, by the monotonic clock; 0 while it waits."""
    thread: int = 0
    """Identifier of the thread that handles it."""
    delivery: Delivery | None = None
    """The object that its handler got; None if the handler was not called."""
    seconds: float = 0.0
    """Duration of the call, measured if there are listeners."""
    messages: int = 1
    """Number of messages of that call."""

    @property
    def alone(self) -> bool:
        """Whether it is handled alone, because it failed before or its subscriber was lost.

        In a batch, its neighbors would fail with it.
        """
        return self.claimed.suspect or self.claimed.attempt > 1

    def is_overrun(self) -> bool:
        """Return whether its handler has run for longer than ``max_processing_time``."""
        return time.monotonic() - self.started_at > self.handler.max_processing_time


@dataclass(slots=True, eq=False)
class Lane:
    """A queue of waiting deliveries: one partition of an ordered group, or all of a shared group."""

    ref: GroupRef
    key: str | None
    """The partition; None for a shared group."""
    waiting: deque[Held] = field(default_factory=deque)
    busy: bool = False
    """Whether a thread works on it. An ordered lane admits only one thread."""
    blocked: bool = False
    """Whether deliveries that arrive are released, because an earlier message has to be delivered first."""
    queued: bool = False
    """Whether it is in its group's queue of lanes with deliveries to start."""
    slice_until: float = 0.0

    @property
    def exclusive(self) -> bool:
        """Whether only one thread at a time may work on it (ordered mode)."""
        return self.key is not None


@dataclass(slots=True)
class GroupLanes:
    """The lanes of a group, and the outcomes of its deliveries that are to be written."""

    lanes: dict[str | None, Lane] = field(default_factory=dict)
    ready: deque[Lane] = field(default_factory=deque)
    waiting: int = 0
    running: int = 0
    waiting_bytes: int = 0
    settlements: list[Settlement] = field(default_factory=list)
    enough: int = 1
    """Number of settlements that are flushed at once, before their delay is over."""
    first_settlement_at: float = 0.0
    acked: list[float] = field(default_factory=list)
    """See ``Inbox.take_acked``."""
    deleted: int = 0
    """Number of deliveries whose message was deleted before it could be handled."""
    records_acks: bool = False
    good_until: float = float("inf")
    """Shared mode: until when (monotonic) this process certainly holds the waiting deliveries."""


@dataclass(slots=True, eq=False)
class Batch:
    """The deliveries for one call of a handler, and their lanes: one delivery, or several with ``batch=True``."""

    lanes: list[Lane]
    items: list[Held]
