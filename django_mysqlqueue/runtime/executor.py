"""Handler threads: they run user code, one delivery at a time each."""

from __future__ import annotations

import inspect
import logging
import threading
import time
import traceback
from typing import Any

from django.db import Error, connections, transaction

from django_mysqlqueue import names
from django_mysqlqueue.exceptions import QueueError, StaleDelivery
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.delivery import Delivery
from django_mysqlqueue.runtime.inbox import Held, Inbox, Lane
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.service import settling
from django_mysqlqueue.service.deliveries import Kind, Outcome
from django_mysqlqueue.sql import dialect_of


class _NotAcked(Exception):
    """Rolls back an atomic handler that returned without settling its delivery."""


class Executor:
    """A pool of handler threads that take deliveries from the inbox until it closes."""

    def __init__(self, inbox: Inbox, using: str, *, threads: int, timeouts: sessions.Timeouts) -> None:
        self._inbox = inbox
        self._using = using
        self._timeouts = timeouts
        self._threads = [
            threading.Thread(target=self._run, name=f"mysqlqueue-handler-{number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, timeout: float) -> None:
        """Waits for the threads to end after the inbox was closed."""
        for thread in self._threads:
            thread.join(timeout)

    def _run(self) -> None:
        sessions.adopt(self._using, self._timeouts)
        lane: Lane | None = None
        began_at = time.monotonic()
        try:
            while (taken := self._inbox.take(lane)) is not None:
                lane, held = taken
                # Counted from where the last one began: in a slow handler connections are idle as well.
                idle = time.monotonic() - began_at > sessions.IDLE
                began_at = time.monotonic()
                sessions.renew()
                if idle:
                    sessions.refresh()
                self._inbox.finish(held, self._safely(held))
        finally:
            sessions.close_all()

    def _safely(self, held: Held) -> Outcome:
        """Whatever happens, the delivery gets an outcome and the thread goes on."""
        try:
            outcome = handle(held, self._using)
            sessions.tidy()
        except BaseException:
            logging.getLogger("django_mysqlqueue.subscriber").exception("handler thread")
            sessions.close_all()
            return Outcome(held.claimed, Kind.NACK, round(held.handler.backoff.delay(held.claimed.attempt) * 1000))
        return outcome


def handle(held: Held, using: str) -> Outcome:
    """Runs the handler of a delivery; returns what became of it.

    Whatever the handler raises is a failed attempt, SystemExit included: it ends
    the attempt, not the thread.
    """
    claimed = held.claimed
    fields: dict[str, Any] = {
        "group": claimed.ref.group,
        "topic": claimed.ref.topic,
        "key": claimed.key,
        "offset": claimed.offset,
        "attempt": claimed.attempt,
    }
    if claimed.suspect:
        try:
            if not settling.record_start(using, claimed):
                event(logging.WARNING, "delivery.stale", **fields)
                return Outcome(claimed, Kind.STALE)
        except (Error, QueueError) as error:
            event(logging.WARNING, "delivery.not_started", **fields, error=error)
            return Outcome(claimed, Kind.GIVE_BACK)
    delivery = Delivery(held.handler, claimed, held.body, using)
    try:
        if held.handler.atomic:
            return _run_atomic(held, delivery, using)
        _call(held, delivery)
        return delivery._verdict or Outcome(claimed, Kind.ACK)
    except StaleDelivery as error:
        event(logging.WARNING, "delivery.stale", **fields, error=error)
        return delivery._failed(str(error))
    except BaseException as error:  # noqa: BLE001
        event(
            logging.WARNING,
            "delivery.failed",
            **fields,
            error=_text(error),
            exc_info=True,
        )
        return delivery._failed(traceback.format_exc())


def _text(error: BaseException) -> str:
    """An exception in a line; its ``__str__`` is user code too, and may raise."""
    return "".join(traceback.format_exception_only(error)).strip().rsplit("\n", 1)[-1]


def _call(held: Held, delivery: Delivery) -> None:
    result = held.handler.function(delivery)
    # Behind a wrapper the decorator cannot see these; acked, they would be lost without having run.
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(f"{held.handler.where} returned an awaitable that nobody awaits: declare it with async def")
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError(f"{held.handler.where} returned a generator, whose body never runs")


def _run_atomic(held: Held, delivery: Delivery, using: str) -> Outcome:
    """The handler's writes and the end of its delivery commit together or not at all.

    The transaction commits exactly when it settles the delivery: on ack and on
    reject. After a nack or snooze its writes are rolled back.
    """
    claimed = held.claimed
    connection = connections[using]
    statement = dialect_of(connection).read_committed(connection)
    if statement is not None:
        with connection.cursor() as cursor:
            cursor.execute(statement)
    try:
        with transaction.atomic(using):
            _call(held, delivery)
            verdict = delivery._verdict or Outcome(claimed, Kind.ACK)
            if verdict.kind is Kind.ACK:
                settling.ack_here(using, claimed)
            elif verdict.kind is Kind.REJECT and not names.is_dlq(claimed.ref.topic):
                settling.reject_here(using, claimed, verdict.error)
            else:
                raise _NotAcked
    except _NotAcked:
        return verdict
    return Outcome(claimed, Kind.SETTLED)
