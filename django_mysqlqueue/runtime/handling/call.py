"""One call of a handler, and the settlement of each of its deliveries."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import inspect
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.db import Error, connections

from django_mysqlqueue.exceptions import ProcessingTimeExceeded, QueueError, StaleDelivery, SubscriberError
from django_mysqlqueue.filter_policies import FilterPolicy
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.topics import is_dlq
from django_mysqlqueue.runtime import forks, sessions, transactions
from django_mysqlqueue.runtime.handling import observers, rejections
from django_mysqlqueue.runtime.handling.lanes import NEVER, Held
from django_mysqlqueue.runtime.log import delivery_fields, error_line, event, failing
from django_mysqlqueue.service import settling, superseding
from django_mysqlqueue.service.deliveries import OUTCOMES, Action, Claimed, Settlement
from django_mysqlqueue.service.groups import OptionColumns
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql import dialect_of
from django_mysqlqueue.sql.connection import drop_connection
from django_mysqlqueue.sql.packets import ending
from django_mysqlqueue.subscriptions.delivery import Delivery
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.subscriptions.options import filter_of
from django_mysqlqueue.subscriptions.retry_later import RetryLater
from django_mysqlqueue.text.error_texts import EXPIRED

UNSETTLED = (Action.NACK, Action.SNOOZE)
SETTLING = (Action.ACK, Action.REJECT)
INSISTS = 8
"""Attempts in a row of a thread to open connections to databases other than the queue's that a handler has used, with
pauses of 6 s in all. Then it calls the handler, which may not need them."""
REST = Backoff(initial=0.1, maximum=1.0, jitter=0.0)
"""The pause of a handler thread after it could not connect."""


NO_SETTLEMENTS: Mapping[int, Settlement] = MappingProxyType({})
T = TypeVar("T")


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.failures = 0
        """Times in a row that this thread could not start a handler; the event loop counts one for each pause."""
        self.until = 0.0
        """The event loop's thread: the end of the latest pause."""


_not_started = _PerThread()


class _Unsettled(Exception):
    """Rolls back the writes of an atomic handler that returned without settling anything."""


class _NotStarted(Exception):
    """The handler's connections or its transaction could not be opened. The cause is the database error."""


class _TooLate(Exception):
    """A message has expired, or the time of its slot is over, since its handling began, before its handler was called.

    Opening a connection or the transaction of an atomic handler may take long. The next claim finds that the message
    has expired, or reserves another slot.
    """


class _Stale(Exception):
    """Rolls back the writes of an atomic handler with stale deliveries."""

    def __init__(self, deliveries: set[Claimed]) -> None:
        self.deliveries = deliveries


def handle(
    items: Sequence[Held],
    using: str,
    errors: list[BaseException] | None = None,
    *,
    rest: Backoff = REST,
) -> list[Settlement]:
    """Call the handler of deliveries.

    If the handler raises an exception, the attempt has failed. Even a SystemExit ends only the attempt, not the thread.

    ``rest``: the pause of the thread after it could not connect.

    Returns:
        The settlement of each delivery, in their order.
    """
    try:
        ended = _before(items, using) if _may_end(items) else NO_SETTLEMENTS
    except _NotStarted as error:
        return _release(items, error, rest)
    others = [held for held in items if id(held) not in ended] if ended else items
    if not others:
        return _merged(items, ended, ())
    deliveries = _deliveries(others, using)
    if observers.is_call_watched():
        with observers.watched(deliveries) as watched:
            watched.started()
            settlements = _attempt(others, deliveries, using, watched.raised, rest)
            watched.ended(settlements)
        if errors is not None:
            errors += watched.raised
    else:
        settlements = _attempt(others, deliveries, using, errors, rest)
    return _merged(items, ended, settlements) if ended else settlements


async def handle_async(items: Sequence[Held], using: str) -> list[Settlement]:
    """Call the async handler of deliveries, as ``handle``, on the event loop of the process.

    What waits for the database, or is code of the project, runs in a thread.
    """
    try:
        ended = await sync_to_async(_before)(items, using) if _may_end(items) else NO_SETTLEMENTS
    except _NotStarted as error:
        return await _release_async(items, error)
    others = [held for held in items if id(held) not in ended] if ended else items
    if not others:
        return _merged(items, ended, ())
    deliveries = _deliveries(others, using)
    if observers.is_call_watched():
        with observers.watched(deliveries) as watched:
            await sync_to_async(watched.started)()
            settlements = await _attempt_async(others, deliveries, using, watched.raised)
            await sync_to_async(watched.ended)(settlements)
    else:
        settlements = await _attempt_async(others, deliveries, using, None)
    return _merged(items, ended, settlements) if ended else settlements


def _may_end(items: Sequence[Held]) -> bool:
    """Return whether deliveries may be settled without a call, so that the database has to be asked."""
    for held in items:  # noqa: SIM110  # It costs a third of any().
        if held.expires < NEVER or held.body.coalesce_key or held.claimed.suspect:
            return True
    return False


def _before(items: Sequence[Held], using: str) -> Mapping[int, Settlement]:
    """Return the settlements of the deliveries whose handler is not called, by the id() of the object."""
    try:
        ended = _uncalled(items, using)
    except (Error, QueueError) as error:
        raise _NotStarted from error
    first = items[0]
    if first.claimed.suspect and not ended and (refused := _record_start(first.claimed, using)) is not None:
        return {id(first): refused}
    return ended


def _merged(
    items: Sequence[Held], ended: Mapping[int, Settlement], settlements: Iterable[Settlement]
) -> list[Settlement]:
    """Return the settlements of all deliveries, in their order: of those that were not called, and of the others."""
    handled = iter(settlements)
    return [ended[id(held)] if id(held) in ended else next(handled) for held in items]


def _deliveries(items: Sequence[Held], using: str) -> list[Delivery]:
    deliveries: list[Delivery] = []
    for held in items:
        held.delivery = Delivery(held.handler, held.claimed, held.body, using, held.state)
        deliveries.append(held.delivery)
    return deliveries


def _uncalled(items: Sequence[Held], using: str) -> dict[int, Settlement]:
    """Return the settlements of the deliveries whose handler need not be called, by the id() of the object."""
    if expired := [held for held in items if held.is_expired()]:
        return {id(held): _expire(held, using) for held in expired}
    return _superseded(items, using) if any(held.body.coalesce_key for held in items) else {}


def _expire(held: Held, using: str) -> Settlement:
    """Return the settlement of a delivery whose message has expired before its handler was called."""
    claimed = held.claimed
    event(logging.DEBUG, "delivery.expired", **delivery_fields(claimed))
    if held.handler.on_expiry == "skip" or is_dlq(claimed.ref.topic):
        return Settlement(claimed, Action.EXPIRED)
    held.delivery, held.messages = Delivery(held.handler, claimed, held.body, using), 0
    text = f"{EXPIRED}{_utc(held.body.expires_at)}, before attempt {claimed.attempt} had started."
    return Settlement(claimed, Action.REJECT, error=text, is_started=False)


def _superseded(items: Sequence[Held], using: str) -> dict[int, Settlement]:
    """Return the settlements of the deliveries whose messages are superseded, by the id() of the object."""
    keys = {(held.claimed.key, held.claimed.offset): key for held in items if (key := held.body.coalesce_key)}
    handler = items[0].handler

    def filter_now(columns: OptionColumns) -> FilterPolicy | None:
        try:
            return filter_of(columns)
        except ValueError:  # Of a later release. Claims refuse it; what they have taken was taken under the one before.
            return handler.filter

    found = superseding.give_up(using, handler.ref, filter_now, keys)
    ended: dict[int, Settlement] = {}
    for held in items:
        if (held.claimed.key, held.claimed.offset) in found:
            event(logging.DEBUG, "delivery.superseded", **delivery_fields(held.claimed))
            ended[id(held)] = Settlement(held.claimed, Action.SUPERSEDED)
    return ended


def _utc(milliseconds: int | None) -> str:
    return datetime.datetime.fromtimestamp(max(milliseconds or 0, 0) / 1000, datetime.UTC).isoformat(
        timespec="milliseconds"
    )


def _attempt(
    items: Sequence[Held],
    deliveries: list[Delivery],
    using: str,
    errors: list[BaseException] | None,
    rest: Backoff,
) -> list[Settlement]:
    handler = items[0].handler
    try:
        _prepare(handler, using, deliveries, _not_started.failures)
        before = items[0].starts_before if len(items) == 1 else min(held.starts_before for held in items)
        if handler.is_atomic(deliveries):
            settlements = _run_atomic(handler, deliveries, using, before, errors)
        else:
            sessions.use_autocommit(using)
            _call(handler, deliveries, before)
            settlements = _verdicts(handler, deliveries)
    except _NotStarted as error:
        return _release(items, error, rest)
    except BaseException as error:  # noqa: BLE001
        return _after_error(error, items, deliveries, errors)
    return handler.settled(deliveries, settlements, None)


async def _attempt_async(
    items: Sequence[Held], deliveries: list[Delivery], using: str, errors: list[BaseException] | None
) -> list[Settlement]:
    handler = items[0].handler
    try:
        if sessions.are_used(handler.ref) or handler.must_prepare(deliveries):
            await sync_to_async(_prepare)(handler, using, deliveries, _not_started.failures)
            _not_started.failures = 0
        if min(held.starts_before for held in items) <= time.monotonic():
            raise _TooLate
        result = await handler.acall(list(deliveries) if handler.batch else deliveries[0])
        if result is not None:
            _require_result(handler, result)
        settlements = _verdicts(handler, deliveries)
    except _NotStarted as error:
        return await _release_async(items, error)
    except BaseException as error:  # noqa: BLE001
        return await _beside_receivers(handler, _after_error, error, items, deliveries, errors)
    return await _beside_receivers(handler, handler.settled, deliveries, settlements, None)


async def _beside_receivers(handler: Handler, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that may run receivers of the project: then in a thread."""
    return await sync_to_async(function)(*arguments) if handler.runs_receivers() else function(*arguments)


def _after_error(
    error: BaseException,
    items: Sequence[Held],
    deliveries: list[Delivery],
    errors: list[BaseException] | None,
) -> list[Settlement]:
    """Return the settlements after an exception, which most likely the handler has raised."""
    if isinstance(error, _TooLate):
        return [_unstarted(held) for held in items]
    if isinstance(error, StaleDelivery):
        event(logging.WARNING, "delivery.lost", **_fields(items), error=error)
        if error.delivery is None or len(deliveries) == 1:
            return [delivery._failed(str(error)) for delivery in deliveries]
        # Its neighbors did not fail: they are released, and no attempt is counted.
        return [
            delivery._failed(str(error))
            if delivery._claimed is error.delivery
            else Settlement(delivery._claimed, Action.RELEASE)
            for delivery in deliveries
        ]
    if isinstance(error, RetryLater) and not error.counts:
        seconds = error.delay_ms / 1000
        event(logging.INFO, "delivery.snoozed", **_fields(items), seconds=seconds, reason=error.reason)
        return items[0].handler.settled(deliveries, [delivery._retried(error) for delivery in deliveries], error)
    if errors is not None:
        errors.append(error)
    event(logging.WARNING, "delivery.failed", **_fields(items), error=error_line(error), exc_info=error)
    return _failed(items[0].handler, deliveries, error, "".join(traceback.format_exception(error)))


def _failed(handler: Handler, deliveries: list[Delivery], error: BaseException, text: str) -> list[Settlement]:
    # In a larger batch it is unknown which message failed: each will be redelivered alone.
    if len(deliveries) == 1 and rejections.is_rejected(handler, error):
        return handler.settled(deliveries, [deliveries[0]._rejected(text)], error)
    settlements = [delivery._failed(text) for delivery in deliveries]
    if isinstance(error, RetryLater):
        settlements = [settlement._replace(delay_ms=error.delay_ms) for settlement in settlements]
    return handler.settled(deliveries, settlements, error)


def exceeded(items: Sequence[Held]) -> list[Settlement]:
    """Return the settlements of the deliveries of a call that has exceeded its time, because the process exits.

    The attempt has failed. Deliveries whose handler has not been called are released.
    """
    # The others have expired or are superseded, or the call has not begun.
    called = [held for held in items if held.delivery is not None and held.messages]
    others = [_unstarted(held) for held in items if held not in called]
    if not called:
        return others
    first, deliveries = called[0], [held.delivery for held in called if held.delivery is not None]
    handler = first.handler
    error = ProcessingTimeExceeded(
        f"The call ran longer than MAX_PROCESSING_TIME ({handler.time_limit(first.state):g} s), so its process ended. "
        f"The event handler.hung in the log shows where it was. To allow more time: {handler.more_time}."
    )
    event(logging.WARNING, "delivery.failed", **_fields(called), error=error_line(error))
    return [*_failed(handler, deliveries, error, "".join(traceback.format_exception_only(error))), *others]


def _release(items: Sequence[Held], error: _NotStarted, rest: Backoff) -> list[Settlement]:
    """Pause the thread, and release deliveries whose handler could not be started."""
    # The thread waits, and the message gets no delay: later messages of its partition would overtake it.
    time.sleep(_pause(items, error, rest))
    return [_unstarted(held) for held in items]


async def _release_async(items: Sequence[Held], error: _NotStarted) -> list[Settlement]:
    """Release deliveries whose handler could not be started, after a pause that all such calls have together."""
    now = time.monotonic()
    if _not_started.until <= now:
        _not_started.until = now + _pause(items, error, REST)
    await asyncio.sleep(_not_started.until - now)
    return [_unstarted(held) for held in items]


def _pause(items: Sequence[Held], error: _NotStarted, rest: Backoff) -> float:
    """Log that a handler could not be started, and return how long to pause."""
    _not_started.failures = failures = _not_started.failures + 1
    failing(logging.WARNING, "delivery.not_started", **_fields(items), error=error.__cause__, failures=failures)
    return rest.delay(failures)


def _unstarted(held: Held) -> Settlement:
    return Settlement(held.claimed, Action.RELEASE, is_started=False)


def _record_start(claimed: Claimed, using: str) -> Settlement | None:
    """Record the start of a suspected poison message. Return None if its handler may run, else its settlement."""
    try:
        if settling.record_start(using, claimed):
            return None
    except (Error, QueueError) as error:
        event(logging.WARNING, "delivery.not_started", **delivery_fields(claimed), error=error)
        return Settlement(claimed, Action.RELEASE, is_started=False)
    event(logging.WARNING, "delivery.lost", **delivery_fields(claimed))
    return Settlement(claimed, Action.STALE)


def _fields(items: Sequence[Held]) -> dict[str, Any]:
    fields = delivery_fields(items[0].claimed)
    if len(items) > 1:
        fields["messages"] = len(items)
    return fields


def _prepare(handler: Handler, using: str, deliveries: Sequence[Delivery], failures: int) -> None:
    """Open the connections that the handler is known to use. If that fails, no attempt is counted.

    ``failures``: times in a row that this has failed.
    """
    try:
        sessions.connect(handler.ref, insist=failures < INSISTS)
        handler.prepare(using, deliveries)
    except Error as error:
        raise _NotStarted from error


def _call(handler: Handler, deliveries: list[Delivery], before: float) -> None:
    _not_started.failures = 0
    if before < NEVER and before <= time.monotonic():
        raise _TooLate
    result = run_code(handler.ref, handler.call, list(deliveries) if handler.batch else deliveries[0])
    if result is not None:
        _require_result(handler, result)


def run_code(ref: GroupRef, function: Callable[..., T], *arguments: Any) -> T:
    """Run code of a group's handler in this thread, and check what it leaves behind."""
    pid = os.getpid()
    outer = sessions.begin_call()
    try:
        result = function(*arguments)
        if os.getpid() != pid:
            # A child that the handler has forked: the delivery, the thread and the transaction belong to its parent.
            forks.leave()
        sessions.confirm()
    except BaseException as error:
        if os.getpid() != pid:
            forks.leave(error)
        raise
    finally:
        sessions.end_call(ref, outer)
    return result


def broke_down(items: Sequence[Held]) -> list[Settlement]:
    """Log the error that is being handled, of the queue's own code, and return a settlement for each delivery."""
    event(logging.ERROR, "handler_thread.failed", **delivery_fields(items[0].claimed), exc_info=True)
    return [
        Settlement(held.claimed, Action.NACK, round(held.handler.backoff.delay(held.claimed.attempt) * 1000))
        for held in items
    ]


def _require_result(handler: Handler, result: object) -> None:
    """Refuse the results of functions that have not run.

    If the function is wrapped, the decorator cannot detect these. An ack would lose a message that was not handled.
    """
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(f"{handler.where} returned an awaitable, which is not awaited: declare it with async def")
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError(f"{handler.where} returned a generator, whose body never runs")


def _verdicts(handler: Handler, deliveries: list[Delivery]) -> list[Settlement]:
    """Return the settlement of each delivery after the handler has returned: an ack unless it called another method."""
    settlements = [delivery._verdict or Settlement(delivery._claimed, Action.ACK) for delivery in deliveries]
    if handler.batch and handler.on_failure == "block" and not handler.shared:
        _check_order(handler, settlements)
    return settlements


def _check_order(handler: Handler, settlements: list[Settlement]) -> None:
    """Refuse a batch in strict order that settles a message after one of its partition that it has put off."""
    put_off: dict[str, Settlement] = {}
    for settlement in settlements:
        key = settlement.delivery.key
        if settlement.action in UNSETTLED:
            put_off.setdefault(key, settlement)
        elif key in put_off:
            first = put_off[key]
            raise SubscriberError(
                f"{handler.where}: on_failure='block', but the message at offset {first.delivery.offset} was nacked or "
                f"snoozed ({OUTCOMES[first.action]}) and the later one at offset {settlement.delivery.offset} was "
                f"settled ({OUTCOMES[settlement.action]}). Raise an exception to nack the whole batch, or nack or "
                "snooze all later messages of the partition too."
            )


def _run_atomic(
    handler: Handler, deliveries: list[Delivery], using: str, before: float, errors: list[BaseException] | None
) -> list[Settlement]:
    """Call an atomic handler: its writes and the outcomes of its deliveries commit together or not at all.

    The transaction commits if it settles a message (ack, reject), or if a task has asked to be called again
    (``context.retry``). If every delivery was nacked or snoozed, the writes are rolled back. If a delivery is stale,
    everything is rolled back, and the others are released without counting an attempt. An error after the COMMIT
    changes no outcome.
    """
    try:
        with contextlib.ExitStack() as transaction_of_the_handler:
            # Receivers of the project's may use the driver's connection, past Django, before the next transaction.
            ahead = not observers.is_call_watched() and not handler.runs_receivers()
            send_together = transaction_of_the_handler.enter_context(ending(connections[using], ahead=ahead))
            _begin(transaction_of_the_handler, using)
            _call(handler, deliveries, before)
            settlements = _verdicts(handler, deliveries)
            acked = [settlement.delivery for settlement in settlements if settlement.action is Action.ACK]
            rejected = [
                (settlement.delivery, settlement.error)
                for settlement in settlements
                if settlement.action is Action.REJECT
            ]
            if is_retried := not acked and not rejected:
                if not handler.retried_here(using, settlements):
                    raise _Unsettled
            else:
                send_together()
                stale = settling.settle_here(using, acked, rejected)
                if stale:
                    raise _Stale(stale)
                handler.acked_here(using, [delivery for delivery in deliveries if delivery._claimed in acked])
    except _Unsettled:
        return settlements
    except transactions.AfterCommit as error:
        # The ack is committed: nothing of the attempt has failed.
        cause = error.__cause__
        assert cause is not None  # noqa: S101
        if errors is not None:
            errors.append(cause)
        first = deliveries[0]._claimed
        event(logging.ERROR, "on_commit.failed", **delivery_fields(first), error=error_line(cause), exc_info=cause)
    except (_Stale, settling.NotAcked) as error:
        # The flush detects the stale ones again, and logs them.
        lost = error.deliveries if isinstance(error, _Stale) else set(acked)
        text = "The delivery was claimed again or settled in the meantime: the handler's writes were rolled back."
        return [
            Settlement(delivery._claimed, Action.NACK, 0, text)
            if delivery._claimed in lost
            else Settlement(delivery._claimed, Action.RELEASE)
            for delivery in deliveries
        ]
    if is_retried:
        return [settlement._replace(is_written=True) for settlement in settlements]
    return [
        settlement._replace(delay_ms=0, is_written=True) if settlement.action in SETTLING else settlement
        for settlement in settlements
    ]


def _begin(stack: contextlib.ExitStack, using: str) -> None:
    """Open the handler's transaction, at READ COMMITTED, on a working connection.

    If the server has closed the connection since the previous message, another one is opened, so that no attempt is
    lost before the handler was called.

    Raises:
        _NotStarted: that failed too.
    """
    connection = connections[using]
    if connection.in_atomic_block:
        # In an outer transaction (a TestCase), the isolation level is not changed.
        stack.enter_context(transactions.transaction_of_handler(using))
        return
    for is_last in (False, True):
        try:
            statement = dialect_of(connection).read_committed(connection)
            if statement is not None:
                with connection.cursor() as cursor:
                    cursor.execute(statement)
            stack.enter_context(transactions.transaction_of_handler(using))
        except Error as error:
            drop_connection(connection)
            if is_last:
                raise _NotStarted from error
        else:
            return
