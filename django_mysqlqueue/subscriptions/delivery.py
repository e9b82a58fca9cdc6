"""``Delivery``, the argument of a handler: one message, and the methods to settle it."""

from __future__ import annotations

import datetime

from django.db import connections

from django_mysqlqueue.options.topics import is_dlq
from django_mysqlqueue.options.validators import LONGEST_DELAY
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.service import dead_letters, settling
from django_mysqlqueue.service.deliveries import OUTCOMES, Action, Claimed, Settlement
from django_mysqlqueue.service.messages import duration_ms
from django_mysqlqueue.service.payloads import Body
from django_mysqlqueue.service.received import ReceivedMessage
from django_mysqlqueue.sql.connection import in_transaction
from django_mysqlqueue.subscriptions.handler import Handler
from django_mysqlqueue.subscriptions.retry_later import RetryLater


class Delivery(ReceivedMessage):
    """A delivery of one message to one consumer group.

    Returning from the handler acks the message, raising an exception nacks it. To settle it in another way, call one of
    the methods: the last call counts, unless the handler raises after it.

    Attributes:
        group: the consumer group.
        attempt: the number of the attempt, from 1. It grows with each failure.
    """

    def __init__(self, handler: Handler, claimed: Claimed, body: Body, using: str, state: object = None) -> None:
        super().__init__(claimed.ref.topic, claimed.key, claimed.offset, body)
        self._handler = handler
        self._claimed = claimed
        self._using = using
        self._state = state
        self._verdict: Settlement | None = None
        self.group = claimed.ref.group
        self.attempt = claimed.attempt

    def __repr__(self) -> str:
        return f"<Delivery {self.topic}[{self.offset}] to {self.group}, attempt {self.attempt}, id {self.id!r}>"

    @property
    def max_attempts(self) -> int | None:
        """The number of failed attempts after which the message is dead-lettered, or None for no limit.

        It takes ``MYSQLQUEUE["GROUPS"]`` and overrides into account, as they were when the handler was called. A
        message on a DLQ topic has no limit, whichever options its handler has.
        """
        return None if is_dlq(self.topic) else self._handler.max_attempts

    @property
    def is_last_attempt(self) -> bool:
        """Whether the message is dead-lettered if this attempt fails (by an exception or a nack, not by a snooze).

        This considers only counted attempts. If the process is lost, the message may be redelivered with the same
        ``attempt``, even after this was True.
        """
        return dead_letters.is_final(self.topic, self.attempt, self._handler.max_attempts)

    @property
    def outcome(self) -> Outcome | None:
        """The outcome that the last method call chose, or None if no method has been called.

        ``ack``: ``"acked"``; ``nack``: ``"failed"``; ``snooze``: ``"snoozed"``; ``reject``: ``"dead_lettered"``.
        """
        return None if self._verdict is None else OUTCOMES[self._verdict.action]

    def ack(self) -> None:
        """Ack the message: it was handled.

        Inside an open ``atomic()`` block on the queue's database, the ack is part of that transaction. Otherwise it is
        written after the handler has returned.

        Raises:
            StaleDelivery: inside a transaction, if the delivery was revoked, claimed again or settled.
        """
        connection = connections[self._using]
        if not self._handler.atomic and connection.in_atomic_block and in_transaction(connection):
            settling.ack_here(self._using, self._claimed)
        self._verdict = Settlement(self._claimed, Action.ACK)

    def nack(self, delay: float | datetime.timedelta | None = None, reason: str = "") -> None:
        """Nack the message: the attempt failed and counts. The message is redelivered, or dead-lettered.

        Args:
            delay: time until it is redelivered, in seconds or as a timedelta (default: the backoff).
            reason: the reason to store.
        """
        wait = self._backoff_ms() if delay is None else duration_ms("delay", delay, longest=LONGEST_DELAY)
        self._verdict = Settlement(self._claimed, Action.NACK, wait, str(reason), is_final=self.is_last_attempt)

    def snooze(self, delay: float | datetime.timedelta) -> None:
        """Put the message off without counting an attempt.

        Args:
            delay: time until it is redelivered, in seconds or as a timedelta.
        """
        wait = duration_ms("delay", delay, longest=LONGEST_DELAY)
        self._verdict = Settlement(self._claimed, Action.SNOOZE, wait)

    def reject(self, reason: str) -> None:
        """Move the message to the DLQ at once. A message on a DLQ topic is nacked instead.

        Args:
            reason: the reason to store in the dead letter.
        """
        self._verdict = self._rejected(str(reason))

    def extend(self, seconds: float | datetime.timedelta) -> None:
        """Check before slow work that the delivery is not stale, and in shared mode extend it.

        A live subscriber extends its deliveries by itself. Call this if you want to be sure that the message has not
        been delivered to another subscriber.

        Args:
            seconds: in shared mode, the time from now until other subscribers may claim the message, in seconds or as a
                timedelta. In ordered mode the lease protects the delivery.

        Raises:
            StaleDelivery: the delivery was revoked, claimed again or settled.
        """
        wait = duration_ms("seconds", seconds, longest=LONGEST_DELAY)
        settling.extend(self._using, self._claimed, milliseconds=wait, shared=self._handler.shared)

    def _backoff_ms(self) -> int:
        return round(self._handler.backoff.delay(self.attempt) * 1000)

    def _failed(self, error: str) -> Settlement:
        return Settlement(self._claimed, Action.NACK, self._backoff_ms(), error, is_final=self.is_last_attempt)

    def _retried(self, error: RetryLater) -> Settlement:
        return Settlement(self._claimed, Action.SNOOZE, error.delay_ms, error.reason)

    def _rejected(self, error: str) -> Settlement:
        final = dead_letters.is_final(self.topic, self.attempt, None, rejected=True)
        return Settlement(self._claimed, Action.REJECT if final else Action.NACK, self._backoff_ms(), error)
