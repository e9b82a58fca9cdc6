"""A subscriber without threads, which delivers in the caller's thread on the caller's connection.

``deliver_all`` and ``EAGER`` use it. Poller, inbox and handling are those of the real subscriber. Inside a transaction
(a ``TestCase``), everything joins that transaction.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.db.transaction import TransactionManagementError

from django_mysqlqueue.exceptions import InvalidMessage, QueueError, SubscriberError
from django_mysqlqueue.names.rules import relay_target
from django_mysqlqueue.options.conf import Settings, get_settings
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.runtime.handling.call import handle
from django_mysqlqueue.runtime.handling.inbox import Inbox
from django_mysqlqueue.runtime.handling.lanes import Batch, Held
from django_mysqlqueue.runtime.handling.observers import expected
from django_mysqlqueue.runtime.log import event
from django_mysqlqueue.runtime.polling.context import Context
from django_mysqlqueue.runtime.polling.poller import Poller
from django_mysqlqueue.runtime.process.subscriber import incarnation
from django_mysqlqueue.runtime.registering import register
from django_mysqlqueue.service import heartbeats, log, polling, relaying, sequencing
from django_mysqlqueue.service.databases import queue_aliases
from django_mysqlqueue.service.deliveries import Action, Claimed, Settlement
from django_mysqlqueue.service.payloads import Body
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import any_needs_rollback, without_marks
from django_mysqlqueue.sql.session import Session
from django_mysqlqueue.subscriptions import registry
from django_mysqlqueue.subscriptions.delivery import Delivery
from django_mysqlqueue.subscriptions.handler import Handler, mode_text
from django_mysqlqueue.subscriptions.retry_later import RetryLater

MOST = 10_000
"""Deliveries after which a handler that keeps publishing to itself is stopped."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """A delivery that ``deliver_all`` made, and its outcome."""

    group: str
    topic: str
    key: str | None
    id: str
    attempt: int
    payload: Any
    outcome: Outcome
    """``"acked"``, ``"failed"``, ``"snoozed"`` or ``"dead_lettered"`` (the last attempt failed, or the message was
    rejected), ``"expired"`` or ``"superseded"``; rarely ``"released"`` or ``"lost"``, as in ``delivery_settled``."""
    error: str
    """The traceback or the reason of a failure; otherwise empty."""


class _NoHeartbeat:
    """A heartbeat for a subscriber that runs so briefly, in one thread, that it cannot lose its leases."""

    beat_at = float("inf")

    def good(self) -> bool:
        """Return True: the leases are always its own."""
        return True

    def must_verify(self) -> bool:
        """Return False: the leases are never in doubt."""
        return False

    def verified(self, at: float) -> None:
        """Do nothing."""


Wanted = Callable[[GroupRef, Body], bool]


class _SelectiveInbox(Inbox):
    """Keeps the deliveries that nobody wants aside until the end, so that claims reach the messages behind them."""

    def __init__(self, refs: Iterable[GroupRef], wanted: Wanted) -> None:
        super().__init__(refs, leases_good=lambda: True)
        self._wanted = wanted
        self._left: list[Claimed] = []

    def wanted(self, bodies: Mapping[Claimed, Body]) -> Mapping[Claimed, Body]:
        """Return those that somebody wants. Jobs among the others have not begun."""
        found = {claimed: body for claimed, body in bodies.items() if self._wanted(claimed.ref, body)}
        self._left += [claimed for claimed in bodies if claimed not in found]
        return found

    def left(self) -> int:
        """Return how many deliveries were kept aside."""
        return len(self._left)

    def close(self) -> None:
        """Release what was kept aside, in addition to what waits."""
        left, self._left = self._left, []
        for claimed in left:
            self.settle(Settlement(claimed, Action.RELEASE), ordered=False)
        super().close()


class InlineSubscriber:
    """Deliver the messages that are due, and those that their handlers publish, until none is left.

    Args:
        using: alias of the queue's database.
        handlers: the handlers to run, by group and topic.
        settings: the settings of the queue.
        wanted: returns whether to handle a message of a group, which is in shared mode. Others stay as they are.
    """

    def __init__(
        self,
        using: str,
        handlers: Mapping[GroupRef, Handler],
        settings: Settings,
        wanted: Wanted = lambda ref, body: True,
    ) -> None:
        self._using = using
        self._handlers = {ref: _explaining(handler) for ref, handler in handlers.items()}
        self._name = incarnation("inline")
        self._inbox = _SelectiveInbox(self._handlers, wanted)
        context = Context(
            using,
            self._name,
            settings,
            self._inbox,
            _NoHeartbeat(),
            groups=len(self._handlers),
            claim_size=settings.claim_size,
            takes_all=True,
        )
        # Real subscribers do the maintenance (GC and so on).
        self._poller = Poller(context, self._handlers, only_scans=True)
        for group in self._poller.groups:
            group.passes = False  # So that each message is among the deliveries.
        self._delivered: list[Delivered] = []
        self._errors: list[BaseException] = []
        self._most = 0

    def run(
        self, *, ignore_backoff: bool, stop_at_error: bool, most: int = MOST
    ) -> tuple[list[Delivered], list[BaseException]]:
        """Run until nothing is left.

        ``ignore_backoff``: if True, redeliver nacked messages at once, regardless of their delay. ``stop_at_error``: if
        True, deliver nothing after the first handler that raises.

        Returns:
            The deliveries, and the exceptions that handlers raised.

        Raises:
            QueueError: there were more deliveries than ``most`` allows.
            SubscriberError: a group is registered with a mode other than its handler's.
            Exception: the work for a group broke down, because of a bug.
        """
        register(self._using, self._handlers)
        heartbeats.beat(self._using, self._name, list(self._handlers), {"version": "inline"})
        self._most = most + len(self._handlers) * sequencing.count_due(Session(self._using))
        try:
            quiet = 0
            # Two passes without a delivery: the first may only create the rows that the second one needs.
            while quiet < 2 and not (stop_at_error and self._errors):
                left = self._inbox.left()
                self._look()
                ran = self._work(ignore_backoff=ignore_backoff, stop_at_error=stop_at_error)
                self._flush()
                quiet = 0 if ran or self._inbox.left() > left else quiet + 1
        finally:
            self._leave()
        changed = self._poller.group_of_other_mode()
        if changed is not None:
            cause = self._errors[0] if self._errors else None
            raise SubscriberError(mode_text(changed.handler, changed.configuration.other_mode)) from cause
        for group in self._poller.groups:
            if group.health.error is not None:
                raise group.health.error
            if refused := group.configuration.refused:
                raise SubscriberError(f"Nothing is delivered to the group {group.ref}: {refused}")
        for group in self._poller.ordered:
            if left := group.mode.held_elsewhere():
                ref = group.ref
                event(logging.WARNING, "partitions.skipped", group=ref.group, topic=ref.topic, partitions=left)
        return self._delivered, self._errors

    def _look(self) -> None:
        poller = self._poller
        poller.look_now()
        poller.step()
        while poller.maintenance.is_scanning() or any(group.wants_turn() for group in poller.groups):
            before = self._inbox.waiting_counts(), self._inbox.left()
            poller.step()
            after = self._inbox.waiting_counts(), self._inbox.left()
            if not poller.maintenance.is_scanning() and after == before:
                break

    def _work(self, *, ignore_backoff: bool, stop_at_error: bool) -> int:
        count = 0
        batch: Batch | None = None
        while (batch := self._inbox.take(batch, wait=False)) is not None:
            count += len(batch.items)
            settlements = self._handle(batch.items)
            if ignore_backoff:
                settlements = [one._replace(delay_ms=0) if one.action is Action.NACK else one for one in settlements]
            self._inbox.finish(batch, settlements)
            self._note(batch.items, settlements)
            if stop_at_error and self._errors:
                break
            self._flush()  # The next suspected poison message may start only after this.
        return count

    def _handle(self, items: list[Held]) -> list[Settlement]:
        """Call the handler. A database error in it must not break the test's transaction, on any database."""
        raised: list[BaseException] = []
        with without_marks(), sessions.watching():
            settlements = contextvars.copy_context().run(handle, items, self._using, raised)
        self._errors += [error for error in raised if not self._is_asked_for(error, items, settlements)]
        return settlements

    def _is_asked_for(self, error: BaseException, items: list[Held], settlements: list[Settlement]) -> bool:
        """Return whether an exception asks for another attempt, and gets it: then nothing has failed."""
        if not isinstance(error, RetryLater):
            return False
        ends = (
            expected(Delivery(held.handler, held.claimed, held.body, self._using), settlement)
            for held, settlement in zip(items, settlements, strict=True)
        )
        return Outcome.DEAD_LETTERED not in ends

    def _note(self, items: list[Held], settlements: list[Settlement]) -> None:
        for held, settlement in zip(items, settlements, strict=True):
            delivery = Delivery(held.handler, held.claimed, held.body, self._using)
            try:
                payload = delivery.payload
            except InvalidMessage:
                payload = delivery.body
            self._delivered.append(
                Delivered(
                    group=delivery.group,
                    topic=delivery.topic,
                    key=delivery.key,
                    id=delivery.id,
                    attempt=delivery.attempt,
                    payload=payload,
                    outcome=expected(delivery, settlement),
                    error=settlement.error,
                )
            )
        if len(self._delivered) >= self._most:
            last = self._delivered[-1]
            raise QueueError(
                f"Stopped after {self._most} deliveries: the last was to the group {last.group!r} on {last.topic!r}, "
                f"attempt {last.attempt}, {last.outcome}."
            )

    def _flush(self) -> None:
        for group in self._poller.groups:
            group.writer.polled()
        self._poller.flush_groups()

    def _leave(self) -> None:
        self._inbox.close()
        self._flush()
        self._poller.release_leases()
        heartbeats.forget(self._using, self._name, list(self._handlers))


def _explaining(handler: Handler) -> Handler:
    """Return a handler with an error that says what to do if the transaction of a ``TestCase`` makes it fail.

    A handler that is not atomic may catch a database error and continue, because it has no transaction. A ``TestCase``
    has one, in which Django allows no query after an error.
    """
    if handler.atomic:
        return handler

    @contextlib.contextmanager
    def explained() -> Iterator[None]:
        try:
            yield
        except TransactionManagementError as error:
            if not any_needs_rollback():
                raise
            raise TransactionManagementError(
                f"{handler.where}: it continues after a database error that it, or code that it called, has caught. "
                "Outside tests that works, because each statement commits by itself. Here all statements are in the "
                "test's transaction, in which Django allows no query after an error. Put the statement that may fail "
                "into a `with transaction.atomic():` block of its own, inside the `try`, or test the handler in a "
                "TransactionTestCase."
            ) from error

    @functools.wraps(handler.function)
    def function(given: Any) -> Any:
        with explained():
            return handler.function(given)

    @functools.wraps(handler.function)
    async def coroutine_function(given: Any) -> Any:
        with explained():
            return await handler.function(given)

    return dataclasses.replace(handler, function=coroutine_function if handler.is_async else function)


# -- several databases ------------------------------------------------------------


def relay_from(source: str) -> list[str]:
    """Relay what was published via a database; return the aliases of the databases that have got messages."""
    if len(known := queue_aliases()) == 1:
        return []
    while sequencing.sequence(source).more:
        pass
    targets = {relay_target(topic) for topic in log.all_topics(Session(source))}
    return [target for target in known if target in targets and _relay(source, target)]


def _relay(source: str, target: str) -> int:
    messages = 0
    while True:
        done = relaying.relay(source, target)
        messages += done.messages
        if not done.more:
            return messages


# -- EAGER --------------------------------------------------------------------

_thread = threading.local()


def deliver_eagerly(using: str, *, most: int = MOST) -> None:
    """Deliver in this thread the messages that are due. With ``EAGER`` this runs after a publish has committed.

    A message that fails is in backoff as always, and is redelivered with a later publish. Messages that handlers
    publish are delivered by the same call, and so are messages that are relayed to another database.

    ``most``: as in ``InlineSubscriber.run``.

    Raises:
        Exception: the first exception that a handler raised, after all messages were delivered.
    """
    running: list[str] | None = getattr(_thread, "running", None)
    if running is not None:  # A handler has published.
        if using not in running:
            running.append(using)
        return
    if not polling.poll(Session(using)).due:
        return
    handlers = registry.handlers()
    if not handlers:
        return
    _thread.running = [using]
    try:
        errors = _deliver_in(_thread.running, handlers, most)
    finally:
        _thread.running = None
    if errors:
        raise errors[0]


def _deliver_in(running: list[str], handlers: Mapping[GroupRef, Handler], most: int) -> list[BaseException]:
    """Deliver in the first of the databases until none is left; others are appended meanwhile."""
    errors: list[BaseException] = []
    left = most + len(handlers) * sequencing.count_due(Session(running[0]))
    while running:
        using = running[0]
        if chosen := registry.handlers_in(using, handlers):
            due = len(chosen) * sequencing.count_due(Session(using))
            subscriber = InlineSubscriber(using, chosen, get_settings())
            delivered, found = subscriber.run(ignore_backoff=False, stop_at_error=False, most=left - due)
            left -= len(delivered)
            errors += found
        running += [target for target in relay_from(using) if target not in running]
        del running[0]
    return errors
