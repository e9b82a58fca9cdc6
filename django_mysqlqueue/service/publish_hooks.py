"""Where a tracer of publishing is plugged in (``django_mysqlqueue.otel``); without one nothing happens here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.service.messages import Message, OutboxRow, encode


class Sending(Protocol):
    """A publish that is traced, or is not."""

    def stamped(self, message: Message) -> Message:
        """The message with the context of the trace in its metadata; the same object where there is nothing to add."""

    def sent(self, count: int, message_id: str = "") -> None:
        """So many messages were stored, or the one of this id."""


class _Untraced:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    def stamped(self, message: Message) -> Message:
        return message

    def sent(self, count: int, message_id: str = "") -> None:
        """Nobody wants to know."""


_UNTRACED = _Untraced()
trace: Callable[[str, str, Message | None], AbstractContextManager[Sending]] | None = None
"""Opens a span around a publish: of topic, database alias, and message (None: many); ``django_mysqlqueue.otel`` puts
it here."""


def sending(topic: str, using: str, message: Message | None) -> AbstractContextManager[Sending]:
    """Around a publish of one message, or with None of many."""
    return _UNTRACED if trace is None else trace(topic, using, message)


def encode_stamped(topic: str, message: Message, span: Sending) -> OutboxRow:
    """``encode``, with the context of the trace in the metadata if it fits there.

    Raises:
        InvalidMessage: the message as it was given breaks a rule.
    """
    stamped = span.stamped(message)
    if stamped is not message:
        try:
            return encode(topic, stamped)
        except InvalidMessage:
            # Metadata that was just within its limit, or the message itself: then it is said of that.
            pass
    return encode(topic, message)
