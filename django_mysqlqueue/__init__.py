"""A durable message queue for Django in your existing MySQL or MariaDB database.

The names for publishing and handling are here. They are loaded on first use, so that importing the package needs
neither settings nor an installed Django.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

__all__ = [
    "Backoff",
    "Delivery",
    "InvalidMessage",
    "Message",
    "QueueError",
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
    "Backoff": "django_mysqlqueue.options.backoff",
    "Delivery": "django_mysqlqueue.subscriptions.delivery",
    "InvalidMessage": "django_mysqlqueue.exceptions",
    "Message": "django_mysqlqueue.service.messages",
    "QueueError": "django_mysqlqueue.exceptions",
    "StaleDelivery": "django_mysqlqueue.exceptions",
    "SubscriberError": "django_mysqlqueue.exceptions",
    "TransactionMismatch": "django_mysqlqueue.exceptions",
    "UnknownTopic": "django_mysqlqueue.exceptions",
    "acancel": "django_mysqlqueue.service.scheduling",
    "apublish": "django_mysqlqueue.service.publishing",
    "apublish_many": "django_mysqlqueue.service.publishing",
    "areschedule": "django_mysqlqueue.service.scheduling",
    "cancel": "django_mysqlqueue.service.scheduling",
    "publish": "django_mysqlqueue.service.publishing",
    "publish_many": "django_mysqlqueue.service.publishing",
    "recurring_message": "django_mysqlqueue.schedules.registry",
    "reschedule": "django_mysqlqueue.service.scheduling",
    "subscriber": "django_mysqlqueue.subscriptions.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
