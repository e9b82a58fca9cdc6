"""The hook for tracing publishing (``django_mysqlqueue.otel``). Without a tracer, this module does nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.service.messages import Message, OutboxRow, encode


class Sending(Protocol):
    """A publish, traced or not."""

    def stamped(self, message: Message) -> Message:
        """Return the message with the trace's context in its metadata, or the same object if there is none to add."""

    def sent(self, count: int, message_id: str = "") -> None:
        """Note the number of messages that were stored, and the id if it is one."""


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
        """Do nothing."""


_UNTRACED = _Untraced()
trace: Callable[[str, str, Message | None], AbstractContextManager[Sending]] | None = None
"""A function that opens a span around a publish, from topic, database alias and message (None: many). Set by
``django_mysqlqueue.otel``."""


def sending(topic: str, using: str, message: Message | None) -> AbstractContextManager[Sending]:
    """Return the context manager around a publish of one message, or of many if ``message`` is None."""
    return _UNTRACED if trace is None else trace(topic, using, message)


def encode_stamped(topic: str, message: Message, span: Sending) -> OutboxRow:
    """Encode a message, with the trace's context in its metadata if it fits."""
    stamped = span.stamped(message)
    if stamped is not message:
        try:
            return encode(topic, stamped)
        except InvalidMessage:
            # The metadata are too long with the context, or the message itself is invalid: then the error is about it.
            pass
    return encode(topic, message)
