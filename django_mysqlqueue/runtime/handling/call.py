"""One call of a handler: what it gets, and what becomes of each delivery."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

from django.db import Error, connections, transaction

from django_mysqlqueue.backoff import Backoff
from django_mysqlqueue.exceptions import QueueError, StaleDelivery, SubscriberError
from django_mysqlqueue.runtime import forks, sessions
from django_mysqlqueue.runtime.handling import observers, rejections
from django_mysqlqueue.runtime.handling.delivery import Delivery
from django_mysqlqueue.runtime.handling.handler import Handler
from django_mysqlqueue.runtime.handling.lanes import Held
from django_mysqlqueue.runtime.log import delivery_fields, error_line, event, is_worth_a_line
from django_mysqlqueue.service import settling
from django_mysqlqueue.service.deliveries import OUTCOMES, Action, Claimed, Settlement
from django_mysqlqueue.sql import dialect_of
from django_mysqlqueue.sql.connection import drop_connection

UNSETTLED = (Action.NACK, Action.SNOOZE)
SETTLING = (Action.ACK, Action.REJECT)
INSISTS = 8
"""How often in a row a thread tries to open what a handler has used of databases other than the queue's, with rests
between, 6 s in all. Then it calls the handler, which may do without."""
REST = Backoff(initial=0.1, maximum=1.0, jitter=0.0)
"""How long a handler thread rests after it could not connect."""


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.failures = 0
        """How often in a row this thread could not start a handler."""


_not_started = _PerThread()


class _Unsettled(Exception):
    """Rolls back an atomic handler that returned without settling anything."""


class _NotStarted(Exception):
    """The handler's connections or its transaction could not be opened; its cause says why."""


class _Stale(Exception):
    """Rolls back an atomic handler some of whose deliveries are no longer this process's."""

    def __init__(self, deliveries: set[Claimed]) -> None:
        self.deliveries = deliveries


def handle(
    items: Sequence[Held],
    using: str,
    errors: list[BaseException] | None = None,
    *,
    rest: Backoff = REST,
) -> list[Settlement]:
    """Calls the handler of some deliveries; returns what became of each, in their order.

    Args:
        errors: gets what the handler raises.
        rest: how long the thread rests each time it could not connect.

    Whatever the handler raises is a failed attempt, SystemExit included: it ends
    the attempt, not the thread.
    """
    first = items[0]
    if first.claimed.suspect and (refused := _put_on_record(first.claimed, using)) is not None:
        return [refused]
    deliveries: list[Delivery] = []
    for held in items:
        held.delivery = Delivery(held.handler, held.claimed, held.body, using)
        deliveries.append(held.delivery)
    if not observers.is_call_watched():
        return _attempt(items, deliveries, using, errors, rest)
    return observers.watched(deliveries, lambda raised: _attempt(items, deliveries, using, raised, rest), errors)


def _attempt(
    items: Sequence[Held],
    deliveries: list[Delivery],
    using: str,
    errors: list[BaseException] | None,
    rest: Backoff,
) -> list[Settlement]:
    handler = items[0].handler
    try:
        _connect(handler)
        if handler.atomic:
            return _run_atomic(handler, deliveries, using)
        _call(handler, deliveries)
        return _verdicts(handler, deliveries)
    except _NotStarted as error:
        _not_started.failures = failures = _not_started.failures + 1
        if is_worth_a_line(failures):
            event(logging.WARNING, "delivery.not_started", **_fields(items), error=error.__cause__, failures=failures)
        # Here and not by a delay of the message, which others of its partition would overtake.
        time.sleep(rest.delay(failures))
        return [Settlement(held.claimed, Action.RELEASE) for held in items]
    except StaleDelivery as error:
        event(logging.WARNING, "delivery.lost", **_fields(items), error=error)
        if error.delivery is None or len(deliveries) == 1:
            return [delivery._failed(str(error)) for delivery in deliveries]
        # Its neighbours did not fail: they come again, uncounted.
        return [
            delivery._failed(str(error))
            if delivery._claimed is error.delivery
            else Settlement(delivery._claimed, Action.RELEASE)
            for delivery in deliveries
        ]
    except BaseException as error:  # noqa: BLE001
        if errors is not None:
            errors.append(error)
        event(logging.WARNING, "delivery.failed", **_fields(items), error=error_line(error), exc_info=True)
        text = traceback.format_exc()
        # Whose fault it was in a batch of many nobody knows: they come again, each alone.
        if len(deliveries) == 1 and rejections.is_rejected(handler, error):
            return [deliveries[0]._rejected(text)]
        return [delivery._failed(text) for delivery in deliveries]


def _put_on_record(claimed: Claimed, using: str) -> Settlement | None:
    """Stores the start of a suspect; None: it may run."""
    try:
        if settling.record_start(using, claimed):
            return None
    except (Error, QueueError) as error:
        event(logging.WARNING, "delivery.not_started", **delivery_fields(claimed), error=error)
        return Settlement(claimed, Action.RELEASE)
    event(logging.WARNING, "delivery.lost", **delivery_fields(claimed))
    return Settlement(claimed, Action.STALE)


def _fields(items: Sequence[Held]) -> dict[str, Any]:
    fields = delivery_fields(items[0].claimed)
    if len(items) > 1:
        fields["messages"] = len(items)
    return fields


def _connect(handler: Handler) -> None:
    """Opens what the handler is known to use: that it cannot be had is not the handler's failure."""
    try:
        sessions.connect(handler.ref, insist=_not_started.failures < INSISTS)
    except Error as error:
        raise _NotStarted from error


def _call(handler: Handler, deliveries: list[Delivery]) -> None:
    _not_started.failures = 0
    pid = os.getpid()
    outer = sessions.begin_call()
    try:
        result = handler.function(list(deliveries) if handler.batch else deliveries[0])
    except BaseException as error:
        if os.getpid() != pid:
            forks.leave(error)
        raise
    finally:
        sessions.end_call(handler.ref, outer)
    if os.getpid() != pid:
        # A child that the handler has forked: the delivery, the thread and the transaction are its parent's.
        forks.leave()
    # Behind a wrapper the decorator cannot see these; acked, they would be lost without having run.
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(f"{handler.where} returned an awaitable that nobody awaits: declare it with async def")
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError(f"{handler.where} returned a generator, whose body never runs")


def _verdicts(handler: Handler, deliveries: list[Delivery]) -> list[Settlement]:
    """What the handler has said of each; silence is an ack."""
    settlements = [delivery._verdict or Settlement(delivery._claimed, Action.ACK) for delivery in deliveries]
    if handler.batch and handler.on_failure == "block" and not handler.shared:
        _check_order(handler, settlements)
    return settlements


def _check_order(handler: Handler, settlements: list[Settlement]) -> None:
    """Under strict order nothing is settled behind what is put off."""
    put_off: dict[str, Settlement] = {}
    for settlement in settlements:
        key = settlement.delivery.key
        if settlement.action in UNSETTLED:
            put_off.setdefault(key, settlement)
        elif key in put_off:
            first = put_off[key]
            raise SubscriberError(
                f"{handler.where}: on_failure='block', but the message at offset {first.delivery.offset} was put off "
                f"({OUTCOMES[first.action]}) and the one behind it at {settlement.delivery.offset} was settled "
                f"({OUTCOMES[settlement.action]}). Raise to put off the whole batch, or put off all of the partition "
                "behind it."
            )


def _run_atomic(handler: Handler, deliveries: list[Delivery], using: str) -> list[Settlement]:
    """The handler's writes and the ends of its deliveries commit together or not at all.

    The transaction commits exactly when it settles something (ack, reject).
    Where every delivery was nacked or snoozed its writes are rolled back. Where
    one turns out to be another's, all roll back and the rest come again, uncounted.
    """
    try:
        with contextlib.ExitStack() as transaction_of_the_handler:
            _begin(transaction_of_the_handler, using)
            _call(handler, deliveries)
            settlements = _verdicts(handler, deliveries)
            acked = [settlement.delivery for settlement in settlements if settlement.action is Action.ACK]
            rejected = [
                (settlement.delivery, settlement.error)
                for settlement in settlements
                if settlement.action is Action.REJECT
            ]
            if not acked and not rejected:
                raise _Unsettled
            stale = settling.settle_here(using, acked, rejected)
            if stale:
                raise _Stale(stale)
    except _Unsettled:
        return settlements
    except _Stale as error:
        # The flush finds the stale ones out once more, and says so.
        text = "The delivery has been handed out again or settled: the handler's writes were rolled back."
        return [
            Settlement(delivery._claimed, Action.NACK, 0, text)
            if delivery._claimed in error.deliveries
            else Settlement(delivery._claimed, Action.RELEASE)
            for delivery in deliveries
        ]
    return [
        settlement._replace(delay_ms=0, is_written=True) if settlement.action in SETTLING else settlement
        for settlement in settlements
    ]


def _begin(stack: contextlib.ExitStack, using: str) -> None:
    """Opens the handler's transaction, at READ COMMITTED, on a connection that works.

    The server may have ended an idle connection since the message before: then
    another one is opened, so that no attempt is lost before the handler was called.

    Raises:
        _NotStarted: that failed as well.
    """
    connection = connections[using]
    if connection.in_atomic_block:
        # Somebody else's transaction (a TestCase): the level is theirs.
        stack.enter_context(transaction.atomic(using))
        return
    for is_last in (False, True):
        try:
            statement = dialect_of(connection).read_committed(connection)
            if statement is not None:
                with connection.cursor() as cursor:
                    cursor.execute(statement)
            stack.enter_context(sessions.transaction_of_handler(using))
        except Error as error:
            drop_connection(connection)
            if is_last:
                raise _NotStarted from error
        else:
            return
