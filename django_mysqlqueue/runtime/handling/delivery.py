"""What a handler gets: one message, and the ways to say what became of it."""

from __future__ import annotations

import datetime
from functools import cached_property
from typing import Any

from django.db import connections

from django_mysqlqueue import naming
from django_mysqlqueue.conf import LONGEST_DELAY
from django_mysqlqueue.outcomes import Outcome
from django_mysqlqueue.runtime.handling.handler import Handler
from django_mysqlqueue.service import dead_letters, settling
from django_mysqlqueue.service.deliveries import OUTCOMES, Action, Claimed, Settlement
from django_mysqlqueue.service.messages import decode, decode_metadata, duration_ms, public_metadata, publisher_key
from django_mysqlqueue.service.payloads import Body
from django_mysqlqueue.sql.connection import in_transaction


class Delivery:
    """One handing-over of one message to one group.

    Returning from the handler acks, raising nacks. The methods say something
    else; the last one called counts, and a raise after it wins.

    Attributes:
        id: the message's id; of a dead letter, the original message's.
        topic: where it came from.
        group: the consumer group that it is for.
        offset: its place in the log.
        attempt: 1 for the first; grows with each failure.
        body: the payload's bytes as stored.
        original_topic, failed_group, failure_count, last_error: of a dead letter, where it
            came from, which group gave it up, after how many attempts, and why (the end of
            the traceback); otherwise empty and 0.
    """

    def __init__(self, handler: Handler, claimed: Claimed, body: Body, using: str) -> None:
        self._handler = handler
        self._claimed = claimed
        self._stored = body
        self._using = using
        self._verdict: Settlement | None = None
        self.id = body.original_id or body.message_id
        self.topic = claimed.ref.topic
        self.group = claimed.ref.group
        self.offset = claimed.offset
        self.attempt = claimed.attempt
        self.body = body.payload
        self.original_topic = body.original_topic
        self.failed_group = body.failed_group
        self.failure_count = body.failure_count
        self.last_error = body.last_error

    def __repr__(self) -> str:
        return f"<Delivery {self.topic}[{self.offset}] to {self.group}, attempt {self.attempt}, id {self.id!r}>"

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        return decode_metadata(self._stored.metadata)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The publisher's metadata and ``content_type``."""
        return public_metadata(self._metadata)

    @cached_property
    def payload(self) -> Any:
        """The payload as published, a JSON value or bytes.

        Raises:
            InvalidMessage: the content type says JSON and the body is none.
        """
        return decode(self.body, self._metadata)

    @property
    def max_attempts(self) -> int | None:
        """Failed attempts until the message is dead-lettered, ``MYSQLQUEUE["GROUPS"]`` included; None: no limit.

        A message of a DLQ topic has no limit, whatever the handler's options say.
        """
        return None if naming.is_dlq(self.topic) else self._handler.max_attempts

    @property
    def is_last_attempt(self) -> bool:
        """Whether the message is dead-lettered if this attempt fails (a raise or a nack, not a snooze).

        It says nothing of an attempt that is not counted: if the process is lost,
        the message may be redelivered with the same ``attempt``.
        """
        return dead_letters.is_final(self.topic, self.attempt, self._handler.max_attempts)

    @property
    def key(self) -> str | None:
        """The publisher's key, also where it was hashed to a partition; None if there was none."""
        return publisher_key(self._claimed.key, self._metadata)

    @property
    def published_at(self) -> datetime.datetime:
        """When the message took its place in the log (aware, UTC, the database's clock)."""
        return datetime.datetime.fromtimestamp(self._stored.published_at / 1000, datetime.UTC)

    @property
    def created_at(self) -> datetime.datetime:
        """When the publisher wrote it (aware, UTC, the database's clock)."""
        return datetime.datetime.fromtimestamp(self._stored.created_at / 1000, datetime.UTC)

    @property
    def outcome(self) -> Outcome | None:
        """The outcome that the method called last asks for, or None if none has been called.

        ``ack``: ``"acked"``; ``nack``: ``"failed"``; ``snooze``: ``"snoozed"``; ``reject``: ``"dead_lettered"``.
        """
        return None if self._verdict is None else OUTCOMES[self._verdict.action]

    def ack(self) -> None:
        """Done. Inside an open ``atomic()`` on the queue's database the ack is part of that transaction.

        Elsewhere it is written after the handler has returned.

        Raises:
            StaleDelivery: (inside a transaction) it has been handed out again or settled.
        """
        connection = connections[self._using]
        if not self._handler.atomic and connection.in_atomic_block and in_transaction(connection):
            settling.ack_here(self._using, self._claimed)
        self._verdict = Settlement(self._claimed, Action.ACK)

    def nack(self, delay: float | datetime.timedelta | None = None, reason: str = "") -> None:
        """Failed: again after ``delay`` (seconds or a timedelta; None: the backoff). Counts as an attempt."""
        wait = self._backoff_ms() if delay is None else duration_ms("delay", delay, longest=LONGEST_DELAY)
        self._verdict = Settlement(self._claimed, Action.NACK, wait, str(reason))

    def snooze(self, delay: float | datetime.timedelta) -> None:
        """Not now: again after ``delay`` (seconds or a timedelta). Does not count as an attempt."""
        wait = duration_ms("delay", delay, longest=LONGEST_DELAY)
        self._verdict = Settlement(self._claimed, Action.SNOOZE, wait)

    def reject(self, reason: str) -> None:
        """Failed for good: to the DLQ at once. (A message of a DLQ topic is nacked instead.)"""
        self._verdict = self._rejected(str(reason))

    def extend(self, seconds: float | datetime.timedelta) -> None:
        """Makes sure of the delivery before something slow; in shared mode for so many seconds.

        A living subscriber extends what it holds by itself; this is for those
        who want to know that the delivery is still theirs.

        Raises:
            StaleDelivery: it has been handed out again or settled.
        """
        wait = duration_ms("seconds", seconds, longest=LONGEST_DELAY)
        settling.extend(self._using, self._claimed, milliseconds=wait, shared=self._handler.shared)

    def _backoff_ms(self) -> int:
        return round(self._handler.backoff.delay(self.attempt) * 1000)

    def _failed(self, error: str) -> Settlement:
        return Settlement(self._claimed, Action.NACK, self._backoff_ms(), error)

    def _rejected(self, error: str) -> Settlement:
        final = dead_letters.is_final(self.topic, self.attempt, None, rejected=True)
        return Settlement(self._claimed, Action.REJECT if final else Action.NACK, self._backoff_ms(), error)
