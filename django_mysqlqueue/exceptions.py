"""The exceptions of this package."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple


class KnownNames(NamedTuple):
    """The names that exist: the help in an error about one that does not."""

    topics: Mapping[Any, str | None]
    """The names, each with the topic that it tells something about; None: about no single topic."""
    text: Callable[[Collection[Any]], str]
    """Returns the help from some of the names."""


class QueueError(Exception):
    """Base class of the exceptions of publishing, handlers and operations."""

    def __init__(self, *args: object, known: KnownNames | None = None) -> None:
        super().__init__(*args)
        self._known = known

    def __str__(self) -> str:
        return self.text_for(lambda topic: True)

    def text_for(self, may_view: Callable[[str | None], bool]) -> str:
        """Return the text for a reader who may not view all topics.

        The text of an error about an unknown name ends with names that exist, and similar ones: those of other topics
        are left out.

        Args:
            may_view: returns whether the reader may view a topic; called with None, whether they may view all topics.
        """
        text = super().__str__()
        if self._known is None:
            return text
        found = [name for name, topic in self._known.topics.items() if may_view(topic)]
        return f"{text} {self._known.text(found)}".rstrip()


class InvalidMessage(QueueError, ValueError):
    """A message, name, key or delay is invalid. Nothing was stored; the text names the value and the rule."""


class UnknownTopic(InvalidMessage):
    """``STRICT_TOPICS`` is on, but neither ``TOPICS`` nor a handler of this project names the topic."""


class TransactionMismatch(QueueError):
    """A transaction is open on another database, but none on the queue's.

    The message would be committed even if that transaction were rolled back.
    """


class StaleDelivery(QueueError):
    """The delivery was revoked, claimed again or settled: this handler can no longer settle it."""

    def __init__(self, *args: object, delivery: object = None) -> None:
        super().__init__(*args)
        self.delivery = delivery


class ProcessingTimeExceeded(QueueError):
    """A handler or a task ran longer than ``max_processing_time``, so its process ended.

    It is not raised: it is the error of the attempt.
    """


class SubscriberError(QueueError):
    """A handler's declaration is invalid, a duplicate, or contradicts its registered consumer group."""


class OperationRefused(QueueError):
    """An operation is impossible, or would lose messages that it is not meant to lose. The text says why.

    Nothing was changed, with two exceptions. After a seek or drop that waited too long for other transactions, the
    group stays paused until the operation is run again. What ``retry``, ``redrive`` or ``discard`` has committed before
    the refusal stays.
    """


class CommitOutcomeUnknown(QueueError):
    """The connection was lost during COMMIT: the transaction may have been committed or not."""
