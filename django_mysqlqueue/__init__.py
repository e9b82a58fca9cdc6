"""A durable message queue for Django in your existing MySQL or MariaDB database.

The names for publishing and handling are here. They are loaded on first use, so that importing the package needs
neither settings nor an installed Django.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django_mysqlqueue.exports import loaded_on_use
from django_mysqlqueue.version import __version__ as __version__

if TYPE_CHECKING:
    from django_mysqlqueue.exceptions import (
        InvalidMessage,
        QueueError,
        StaleDelivery,
        SubscriberError,
        TransactionMismatch,
        UnknownTopic,
    )
    from django_mysqlqueue.options.backoff import Backoff
    from django_mysqlqueue.schedules.registry import recurring_message
    from django_mysqlqueue.service.messages import Message
    from django_mysqlqueue.service.publishing import apublish, apublish_many, publish, publish_many
    from django_mysqlqueue.service.scheduling import acancel, areschedule, cancel, reschedule
    from django_mysqlqueue.subscriptions.delivery import Delivery
    from django_mysqlqueue.subscriptions.registry import subscriber
    from django_mysqlqueue.subscriptions.retry_later import RetryLater

__all__ = [
    "Backoff",
    "Delivery",
    "InvalidMessage",
    "Message",
    "QueueError",
    "RetryLater",
    "StaleDelivery",
    "SubscriberError",
    "TransactionMismatch",
    "UnknownTopic",
    "acancel",
    "apublish",
    "apublish_many",
    "areschedule",
    "cancel",
    "publish",
    "publish_many",
    "recurring_message",
    "reschedule",
    "subscriber",
]

_HOMES = {
    ".exceptions": "InvalidMessage QueueError StaleDelivery SubscriberError TransactionMismatch UnknownTopic",
    ".options.backoff": "Backoff",
    ".schedules.registry": "recurring_message",
    ".service.messages": "Message",
    ".service.publishing": "apublish apublish_many publish publish_many",
    ".service.scheduling": "acancel areschedule cancel reschedule",
    ".subscriptions.delivery": "Delivery",
    ".subscriptions.registry": "subscriber",
    ".subscriptions.retry_later": "RetryLater",
}
__getattr__, __dir__ = loaded_on_use(__name__, _HOMES)
