"""The rules for names of topics that depend on the DLQ suffix; the others are in ``names``."""

from __future__ import annotations

from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.names.rules import check_name
from django_mysqlqueue.options.conf import get_settings


def check_topic(topic: object) -> str:
    """Return the name of a topic to publish to.

    Raises:
        InvalidMessage: the name is invalid or ends in the DLQ suffix.
    """
    name = check_name("topic", topic)
    suffix = get_settings().dlq_suffix
    if name.endswith(suffix):
        raise InvalidMessage(f"topic {name!r}: names that end in {suffix!r} are reserved for dead letters")
    return name


def check_subscribed_topic(topic: object) -> str:
    """Return the name of a topic that a handler may read, which may be a DLQ topic.

    Raises:
        InvalidMessage: the name is invalid.
    """
    suffix = get_settings().dlq_suffix
    if isinstance(topic, str) and topic.endswith(suffix) and len(topic) > len(suffix):
        check_name("topic", topic.removesuffix(suffix))
        return topic
    return check_name("topic", topic)


def dlq_topic(topic: str) -> str:
    """Return the DLQ topic of a topic; a DLQ topic is its own."""
    suffix = get_settings().dlq_suffix
    return topic if topic.endswith(suffix) else topic + suffix


def first_topic(topic: str) -> str:
    """Return the topic whose dead letters a DLQ topic holds; any other topic is its own."""
    return topic.removesuffix(get_settings().dlq_suffix)


def is_dlq(topic: str) -> bool:
    """Return True if a topic is a DLQ topic."""
    return topic.endswith(get_settings().dlq_suffix)
