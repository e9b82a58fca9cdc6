"""The exceptions of this package."""

from __future__ import annotations


class QueueError(Exception):
    """Base class of the exceptions of publishing, handlers and operations."""


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
