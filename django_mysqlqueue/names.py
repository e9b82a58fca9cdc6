"""The rules for names: topics, groups, partition keys, message ids."""

from __future__ import annotations

import re
import time
import zlib
from os import urandom

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.exceptions import InvalidMessage

NAME_LENGTH = 100
"""Longest topic or group, in characters."""
TOPIC_COLUMN_LENGTH = 120
"""Topic columns leave room for the DLQ suffix."""
KEY_LENGTH = 190
"""Longest partition key, message id or subscriber name, in characters: three of
them with a topic stay below InnoDB's 3,072 bytes for an index entry."""
PARTITION_PREFIX = "__p:"
"""Partitions made by hashing are named ``__p:0``, ``__p:1``, …; publishers' keys
may not begin with it."""

_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_LENGTH}}}")


def check_name(kind: str, name: object) -> str:
    """Returns ``name`` if it is a valid topic or group.

    Raises:
        InvalidMessage: naming the value and the rule.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidMessage(
            f"{kind} {name!r}: must be 1 to {NAME_LENGTH} characters out of letters, digits, '.', '_' and '-'"
        )
    return name


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


def check_text(kind: str, value: object) -> str:
    """A key or an id: at most ``KEY_LENGTH`` characters that UTF-8 can encode."""
    if not isinstance(value, str):
        raise InvalidMessage(f"{kind} {value!r}: must be a str, not {type(value).__name__}")
    if len(value) > KEY_LENGTH:
        raise InvalidMessage(f"{kind} {value[:40]!r}…: {len(value)} characters, at most {KEY_LENGTH} are allowed")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"{kind} {value!r}: holds a lone surrogate, which UTF-8 cannot encode") from error
    return value


def check_key(key: object) -> str:
    """A publisher's key."""
    text = check_text("key", key)
    if text.startswith(PARTITION_PREFIX):
        raise InvalidMessage(f"key {text!r}: keys beginning with {PARTITION_PREFIX!r} are kept for hashed partitions")
    return text


def dlq_topic(topic: str) -> str:
    """The topic that takes the dead letters of ``topic``; a DLQ topic takes its own."""
    suffix = get_settings().dlq_suffix
    return topic if topic.endswith(suffix) else topic + suffix


def first_topic(topic: str) -> str:
    """The topic that the dead letters in a DLQ topic come from; another topic is its own."""
    return topic.removesuffix(get_settings().dlq_suffix)


def is_dlq(topic: str) -> bool:
    return topic.endswith(get_settings().dlq_suffix)


def hashed_partition(value: str, partitions: int) -> str:
    """The partition of ``value`` among ``partitions``: CRC-32 of its UTF-8 bytes, modulo.

    Stable across processes, versions and languages, so that other clients can
    compute it (``CRC32(value) % n`` in SQL).
    """
    return f"{PARTITION_PREFIX}{zlib.crc32(value.encode()) % partitions}"


def new_message_id() -> str:
    """A fresh id: a UUID of version 7 (RFC 9562).

    Its leading timestamp keeps inserts into the unique index of one partition
    next to each other; nothing relies on the client's clock being right.
    """
    milliseconds = time.time_ns() // 1_000_000
    random = int.from_bytes(urandom(10)) >> 6
    value = (milliseconds & 0xFFFFFFFFFFFF) << 80 | 0x7 << 76 | random >> 62 << 64 | 0b10 << 62 | random & (1 << 62) - 1
    text = f"{value:032x}"  # half the time of uuid.UUID, which publishing in bulk feels
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
