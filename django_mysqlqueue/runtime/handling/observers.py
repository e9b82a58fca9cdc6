"""Observers of deliveries: of the handler's call, and of the outcome after it is committed.

Signals, traces and metrics use this module. Without observers, it costs three checks of empty values per message.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from django.dispatch import Signal

from django_mysqlqueue import signals
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.runtime.handling.lanes import Held
from django_mysqlqueue.runtime.log import error_line, event
from django_mysqlqueue.service.deliveries import OUTCOMES, Claimed, Flushed, Settlement
from django_mysqlqueue.service.payloads import Body
from django_mysqlqueue.subscriptions.delivery import Delivery
from django_mysqlqueue.subscriptions.handler import Handler


class Settled(NamedTuple):
    """A delivery whose outcome is committed. Times are in seconds."""

    delivery: Delivery
    outcome: Outcome
    error: str
    seconds: float
    """Duration of the handler's call."""
    latency: float
    """Time since the message entered the log."""
    messages: int
    """Number of messages of that call; 0 if there was no call."""


# -- the handler's call ---------------------------------------------------------


class Call(Protocol):
    """A traced call of a handler."""

    def ended(self, outcomes: Sequence[Outcome], reasons: Sequence[str], error: BaseException | None) -> None:
        """Note the end of the call.

        Args:
            outcomes: the outcome of each delivery.
            reasons: the reason of each delivery that failed; empty for the others.
            error: the exception that the handler raised, or None.
        """


trace: Callable[[Sequence[Delivery]], AbstractContextManager[Call]] | None = None
"""A function that opens a span around a handler's call, set by ``django_mysqlqueue.otel``."""


def is_call_watched() -> bool:
    """Return whether the calls of handlers are traced, or have receivers of signals."""
    # Not has_listeners(), which takes a lock and cleans up, for each message.
    return bool(trace or signals.delivery_started.receivers or signals.delivery_handled.receivers)


class Watched:
    """Tells the observers about an attempt at deliveries."""

    def __init__(self, deliveries: Sequence[Delivery], call: Call | None) -> None:
        self._deliveries, self._call = deliveries, call
        self.raised: list[BaseException] = []
        """The exception that the handler has raised."""

    def started(self) -> None:
        """Tell them that it starts."""
        for delivery in self._deliveries:
            tell(signals.delivery_started, delivery=delivery, **_job(delivery))
        self._began = time.monotonic()

    def ended(self, settlements: Sequence[Settlement]) -> None:
        """Tell them that it has ended, with the settlement of each delivery."""
        seconds = time.monotonic() - self._began
        error = self.raised[0] if self.raised else None
        outcomes = [expected(*pair) for pair in zip(self._deliveries, settlements, strict=True)]
        if self._call is not None:
            self._call.ended(outcomes, [settlement.error for settlement in settlements], error)
        for delivery, outcome in zip(self._deliveries, outcomes, strict=True):
            tell(
                signals.delivery_handled,
                delivery=delivery,
                **_job(delivery),
                outcome=outcome,
                exception=error,
                seconds=seconds,
            )


@contextlib.contextmanager
def watched(deliveries: Sequence[Delivery]) -> Iterator[Watched]:
    """Open a span, if calls are traced, around an attempt at deliveries in the block."""
    with contextlib.nullcontext() if trace is None else trace(deliveries) as call:
        yield Watched(deliveries, call)


def expected(delivery: Delivery, settlement: Settlement) -> Outcome:
    """Return the outcome that the flush will write, unless the delivery is stale by then."""
    outcome = OUTCOMES[settlement.action]
    is_final = delivery.is_last_attempt if settlement.is_final is None else settlement.is_final
    return Outcome.DEAD_LETTERED if outcome is Outcome.FAILED and is_final else outcome


# -- its end --------------------------------------------------------------------


class Watch:
    """Observers of settled deliveries: listeners of this process, and through ``send`` the receivers of the signal."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Sequence[Settled]], None]] = []
        """Functions that are called in the poller's thread. They must be quick and never raise."""
        self.send: Callable[[Sequence[Settled]], None] = send_settled

    def is_wanted(self) -> bool:
        """Return whether there are observers."""
        return bool(self.listeners or signals.delivery_settled.receivers)

    def tell(self, ends: Sequence[Settled]) -> None:
        """Tell the observers about settled deliveries."""
        for listener in self.listeners:
            listener(ends)
        if ends and signals.delivery_settled.receivers:
            self.send(ends)


def flushed_ends(settlements: Iterable[Settlement], flushed: Flushed, now: int) -> list[Settled]:
    """Return the settled deliveries of a flush that has committed.

    Deliveries that were handled while there were no observers, or that were not started, are left out.
    """
    stale = {id(settlement) for settlement in flushed.stale}
    dead = {id(delivery) for delivery, _ in flushed.dead}
    ends: list[Settled] = []
    for settlement in settlements:
        held = settlement.held
        if not isinstance(held, Held) or held.delivery is None:
            continue  # There were no observers, or it was not started.
        if id(settlement) in stale:
            outcome = Outcome.LOST
        elif id(settlement.delivery) in dead:
            outcome = Outcome.DEAD_LETTERED
        else:
            outcome = OUTCOMES[settlement.action]
        waited = latency(held.body, now)
        ends.append(Settled(held.delivery, outcome, settlement.error, held.seconds, waited, held.messages))
    return ends


def dead_ends(
    handler: Handler, dead: Iterable[tuple[Claimed, str]], bodies: Mapping[int, Body], using: str, now: int
) -> list[Settled]:
    """Return the settled deliveries of messages that were dead-lettered without another call of the handler."""
    return [
        Settled(Delivery(handler, claimed, body, using), Outcome.DEAD_LETTERED, error, 0.0, latency(body, now), 0)
        for claimed, error in dead
        if (body := bodies.get(claimed.offset)) is not None
    ]


def latency(body: Body, now: int) -> float:
    """Return the seconds since a message entered the log."""
    return max(0.0, (now - body.published_at) / 1000)


def send_settled(ends: Iterable[Settled]) -> None:
    """Send ``delivery_settled`` for each delivery, in this thread."""
    for end in ends:
        tell(
            signals.delivery_settled,
            delivery=end.delivery,
            **_job(end.delivery),
            outcome=end.outcome,
            error=end.error,
            seconds=end.seconds,
            latency=end.latency,
        )


def _job(delivery: Delivery) -> dict[str, Any]:
    """Return what signals tell of the job that a delivery is of."""
    job = delivery._claimed.job
    return {"task": "", "job_id": ""} if job is None else {"task": job.task, "job_id": job.id}


def tell(signal: Signal, *, sender: object = None, home: ModuleType = signals, **arguments: Any) -> None:
    """Send a signal. Exceptions of receivers are only logged, except for Ctrl-C, which arrives in the main thread."""
    try:
        for receiver, answer in signal.send_robust(sender=sender, **arguments):
            if isinstance(answer, Exception):
                # Django has logged the traceback to django.dispatch.
                _failed(signal, home, receiver, answer)
    except BaseException as error:  # Not even SystemExit may end a thread of the subscriber.
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        _failed(signal, home, None, error)


def _failed(signal: Signal, home: ModuleType, receiver: object, error: BaseException) -> None:
    name = next((name for name, value in vars(home).items() if value is signal), "")
    event(
        logging.ERROR,
        "signal_receiver.failed",
        signal=name,
        receiver=getattr(receiver, "__qualname__", type(receiver).__qualname__) if receiver else "?",
        error=error_line(error),
        exc_info=receiver is None,
    )
