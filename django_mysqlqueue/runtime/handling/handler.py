"""A handler with the options that apply to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from django_mysqlqueue.backoff import Backoff
from django_mysqlqueue.service.refs import GroupRef

HandlerFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Handler:
    """A handler with every option resolved. Durations in seconds."""

    ref: GroupRef
    function: HandlerFunction
    where: str
    mode: Literal["ordered", "shared"]
    atomic: bool
    start: Literal["earliest", "latest"]
    on_failure: Literal["skip", "block"]
    max_attempts: int | None
    visibility_timeout: float
    max_processing_time: float
    backoff: Backoff
    batch: bool = False
    """The function takes a list of deliveries."""
    batch_size: int = 1
    """How many deliveries one call gets at most."""
    is_async: bool = False
    """It was declared with ``async def``."""
    reject_on: tuple[type[Exception], ...] = ()
    """See ``rejections.is_rejected``."""
    retry_on: tuple[type[Exception], ...] | None = None
    """None: whatever ``reject_on`` does not name."""
    timeout: float | None = None
    """Async handlers: when a call is cancelled."""

    @property
    def shared(self) -> bool:
        return self.mode == "shared"


def mode_text(handler: Handler, registered: str) -> str:
    return (
        f"The group {handler.ref.group!r} of {handler.ref.topic!r} is registered as {registered}, but "
        f"{handler.where} has mode={handler.mode!r}. Change the handler, or stop the group's subscribers and run: "
        f"manage.py queuegroupmode {handler.ref.group} {handler.ref.topic} {handler.mode}"
    )
