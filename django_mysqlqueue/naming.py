"""The rules for names: topics, groups, partition keys, message ids. Those that no setting changes are in ``limits``."""

from __future__ import annotations

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.exceptions import InvalidMessage
from django_mysqlqueue.limits import (
    KEY_LENGTH,
    NAME_LENGTH,
    PARTITION_PREFIX,
    TOPIC_COLUMN_LENGTH,
    check_key,
    check_name,
    check_text,
    hashed_partition,
    new_message_id,
)

__all__ = [
    "KEY_LENGTH",
    "NAME_LENGTH",
    "PARTITION_PREFIX",
    "TOPIC_COLUMN_LENGTH",
    "check_key",
    "check_name",
    "check_subscribed_topic",
    "check_text",
    "check_topic",
    "dlq_topic",
    "first_topic",
    "hashed_partition",
    "is_dlq",
    "new_message_id",
]


def check_topic(topic: object) -> str:
    """A topic that users publish to: a valid name that does not end in the DLQ suffix."""
    name = check_name("topic", topic)
    suffix = get_settings().dlq_suffix
    if name.endswith(suffix):
        raise InvalidMessage(f"topic {name!r}: names ending in {suffix!r} are kept for dead letters")
    return name


def check_subscribed_topic(topic: object) -> str:
    """A topic that a handler may read: users' topics and the DLQ topics of those."""
    suffix = get_settings().dlq_suffix
    if isinstance(topic, str) and topic.endswith(suffix) and len(topic) > len(suffix):
        check_name("topic", topic.removesuffix(suffix))
        return topic
    return check_name("topic", topic)


def dlq_topic(topic: str) -> str:
    """The topic that takes the dead letters of ``topic``; a DLQ topic takes its own."""
    suffix = get_settings().dlq_suffix
    return topic if topic.endswith(suffix) else topic + suffix


def first_topic(topic: str) -> str:
    """The topic that the dead letters in a DLQ topic come from; another topic is its own."""
    return topic.removesuffix(get_settings().dlq_suffix)


def is_dlq(topic: str) -> bool:
    return topic.endswith(get_settings().dlq_suffix)
