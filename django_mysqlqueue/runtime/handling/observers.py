"""What others may watch of a delivery: the handler's call, and its end once it is committed.

Signals, traces and metrics hang here. Where nobody watches, a message costs a
look at three empty places.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from django.dispatch import Signal

from django_mysqlqueue import signals
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.runtime.handling.delivery import Delivery
from django_mysqlqueue.runtime.handling.lanes import Held
from django_mysqlqueue.runtime.log import error_line, event
from django_mysqlqueue.service.deliveries import OUTCOMES, Flushed, Settlement
from django_mysqlqueue.service.payloads import Body


class Settled(NamedTuple):
    """A delivery's end, committed. Times in seconds."""

    delivery: Delivery
    outcome: Outcome
    error: str
    seconds: float
    """How long the handler's call took."""
    latency: float
    """Since the message took its place in the log."""
    messages: int
    """How many messages that call had; 0: there was none."""


# -- the handler's call ---------------------------------------------------------


class Call(Protocol):
    """A handler's call that is traced."""

    def ended(self, outcomes: Sequence[Outcome], reasons: Sequence[str], error: BaseException | None) -> None:
        """The outcome of each delivery, the reason of each that failed (else empty), and what the handler raised."""


trace: Callable[[Sequence[Delivery]], AbstractContextManager[Call]] | None = None
"""What opens a span around a handler's call; ``django_mysqlqueue.otel`` puts it here."""


def is_call_watched() -> bool:
    # Not has_listeners(): it takes a lock and cleans up, for each message.
    return bool(trace or signals.delivery_started.receivers or signals.delivery_handled.receivers)


def watched(
    deliveries: Sequence[Delivery],
    attempt: Callable[[list[BaseException]], list[Settlement]],
    errors: list[BaseException] | None,
) -> list[Settlement]:
    """Runs ``attempt``, which adds what the handler raises to its argument, and tells of its start and its end."""
    raised: list[BaseException] = []
    with contextlib.nullcontext() if trace is None else trace(deliveries) as call:
        for delivery in deliveries:
            tell(signals.delivery_started, delivery=delivery)
        began = time.monotonic()
        settlements = attempt(raised)
        seconds = time.monotonic() - began
        error = raised[0] if raised else None
        outcomes = [expected(*pair) for pair in zip(deliveries, settlements, strict=True)]
        if call is not None:
            call.ended(outcomes, [settlement.error for settlement in settlements], error)
        for delivery, outcome in zip(deliveries, outcomes, strict=True):
            tell(signals.delivery_handled, delivery=delivery, outcome=outcome, exception=error, seconds=seconds)
    if errors is not None:
        errors += raised
    return settlements


def expected(delivery: Delivery, settlement: Settlement) -> Outcome:
    """The outcome that the flush will write, unless the delivery is another's by then."""
    outcome = OUTCOMES[settlement.action]
    return Outcome.DEAD_LETTERED if outcome is Outcome.FAILED and delivery.is_last_attempt else outcome


# -- its end --------------------------------------------------------------------


class Watch:
    """Who hears of the ends of deliveries: listeners of this process, at once; receivers of the signal, by ``send``."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Sequence[Settled]], None]] = []
        """Quick ones, which never raise: they are called in the poller's thread."""
        self.send: Callable[[Sequence[Settled]], None] = send_settled

    def is_wanted(self) -> bool:
        return bool(self.listeners or signals.delivery_settled.receivers)

    def tell(self, ends: Sequence[Settled]) -> None:
        for listener in self.listeners:
            listener(ends)
        if ends and signals.delivery_settled.receivers:
            self.send(ends)


def flushed_ends(settlements: Iterable[Settlement], flushed: Flushed, now: int) -> list[Settled]:
    """What a flush that has committed says of deliveries that were handled while somebody watched.

    ``now`` is the database's, in epoch milliseconds.
    """
    stale = {id(settlement) for settlement in flushed.stale}
    dead = {id(delivery) for delivery, _ in flushed.dead}
    ends: list[Settled] = []
    for settlement in settlements:
        held = settlement.held
        if not isinstance(held, Held) or held.delivery is None:
            continue  # nobody watched, or it was not started
        if id(settlement) in stale:
            outcome = Outcome.LOST
        elif id(settlement.delivery) in dead:
            outcome = Outcome.DEAD_LETTERED
        else:
            outcome = OUTCOMES[settlement.action]
        waited = latency(held.body, now)
        ends.append(Settled(held.delivery, outcome, settlement.error, held.seconds, waited, held.messages))
    return ends


def latency(body: Body, now: int) -> float:
    """Seconds from a message's place in the log to ``now`` (the database's, epoch milliseconds)."""
    return max(0.0, (now - body.published_at) / 1000)


def send_settled(ends: Iterable[Settled]) -> None:
    """Sends the signal for each, in this thread."""
    for end in ends:
        tell(
            signals.delivery_settled,
            delivery=end.delivery,
            outcome=end.outcome,
            error=end.error,
            seconds=end.seconds,
            latency=end.latency,
        )


def tell(signal: Signal, **arguments: Any) -> None:
    """Sends a signal; what a receiver raises is logged and goes no further, a Ctrl-C excepted."""
    try:
        for receiver, answer in signal.send_robust(sender=None, **arguments):
            if isinstance(answer, Exception):
                # Django has logged the traceback, to django.dispatch.
                _failed(signal, receiver, answer)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # SystemExit: it must end no thread of the subscriber
        _failed(signal, None, error)


def _failed(signal: Signal, receiver: object, error: BaseException) -> None:
    name = next((name for name, value in vars(signals).items() if value is signal), "")
    event(
        logging.ERROR,
        "signal.receiver_failed",
        signal=name,
        receiver=getattr(receiver, "__qualname__", type(receiver).__qualname__) if receiver else "?",
        error=error_line(error),
        exc_info=receiver is None,
    )
