"""The exceptions that this package raises on purpose."""

from __future__ import annotations


class QueueError(Exception):
    """Base class of this package's exceptions."""


class InvalidMessage(QueueError, ValueError):
    """A message, name, key or delay breaks a rule. Nothing was stored; the text names the value and the rule."""


class UnknownTopic(InvalidMessage):
    """``STRICT_TOPICS`` is on, and neither ``TOPICS`` nor a handler of this project names the topic."""


class TransactionMismatch(QueueError):
    """A transaction is open on another database, and none on the queue's.

    The message would commit even if that transaction is rolled back.
    """


class StaleDelivery(QueueError):
    """The delivery was handed out again, or has been settled: this handler can no longer settle it."""

    def __init__(self, *args: object, delivery: object = None) -> None:
        super().__init__(*args)
        self.delivery = delivery


class SubscriberError(QueueError):
    """A handler's declaration is invalid, a duplicate, or contradicts its registered consumer group."""


class OperationRefused(QueueError):
    """What an operator asked for cannot be done, or would lose something; nothing was changed."""


class CommitOutcomeUnknown(QueueError):
    """The connection broke while COMMIT was under way: it may have happened or not."""
