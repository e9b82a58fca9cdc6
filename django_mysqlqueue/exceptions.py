"""Everything that this package raises on purpose."""

from __future__ import annotations


class QueueError(Exception):
    """Base of this package's errors."""


class InvalidMessage(QueueError, ValueError):
    """A message, name, key or delay breaks a rule; nothing of it was stored."""


class UnknownTopic(InvalidMessage):
    """``STRICT_TOPICS`` is on, and neither ``TOPICS`` nor a handler of this project names the topic."""


class TransactionMismatch(QueueError):
    """The caller's transaction is open on another database than the queue's.

    The message would commit although that transaction may still roll back.
    """


class StaleDelivery(QueueError):
    """The delivery has been handed out again or settled: it is no longer yours."""

    def __init__(self, *args: object, delivery: object = None) -> None:
        super().__init__(*args)
        self.delivery = delivery


class SubscriberError(QueueError):
    """A handler is declared wrongly, twice, or otherwise than its registered group."""


class OperationRefused(QueueError):
    """What an operator asked for cannot be done, or would lose something; nothing was changed."""


class CommitOutcomeUnknown(QueueError):
    """The connection broke while COMMIT was under way: it may have happened or not."""
