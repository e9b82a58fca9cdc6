# Generated from django_mysqlqueue/names/keys.py by tools/shared_modules.py.
"""Partition keys, coalesce keys, and lanes: how a key and a priority are written as one partition."""

from __future__ import annotations

import hashlib
import re
import zlib
from typing import NamedTuple

from pyspark_mysqlqueue.errors import InvalidMessage
from pyspark_mysqlqueue.shared.rules import KEY_LENGTH, check_text

PARTITION_PREFIX = "__p:"
"""Prefix of hashed partitions, ``__p:0``, ``__p:1``, …, and of lanes (``lane``); publishers' keys must not begin with
it."""
LOWEST_PRIORITY, HIGHEST_PRIORITY = -100, 100
"""Priorities, as those of Django's tasks: higher ones first. 0 is the priority of messages without one."""
LANE_PREFIXES = (f"{PARTITION_PREFIX}+", f"{PARTITION_PREFIX}-")
LANE_LENGTH = len(PARTITION_PREFIX) + len("+010:")
"""Length of a lane's prefix."""
LANE_KEY_LENGTH = KEY_LENGTH - LANE_LENGTH
"""Maximum length of the key of a message with a priority, in characters."""


def check_key(key: object) -> str:
    """Return a publisher's key if it is valid; else raise InvalidMessage."""
    text = check_text("key", key)
    if text.startswith(PARTITION_PREFIX):
        raise InvalidMessage(
            f"key {text!r}: keys that begin with {PARTITION_PREFIX!r} are reserved for hashed partitions and priorities"
        )
    return text


def check_coalesce_key(key: object) -> str:
    """Return a coalesce key if it is valid; else raise InvalidMessage."""
    text = check_text("coalesce", key)
    if not text:
        raise InvalidMessage("coalesce '': must not be empty")
    return text


def scoped_coalesce_key(key: str | None, coalesce: str) -> str:
    """Return a coalesce key as it is stored: with the publisher's key, where a partition may have several of those.

    ``key``: the publisher's key; None if there is none, or if it is the partition.
    """
    if key is None:
        return coalesce
    text = f"{len(key)}:{key}:{coalesce}"
    return text if len(text) <= KEY_LENGTH else f"#{hashlib.sha256(text.encode()).hexdigest()}"


def public_coalesce_key(partition: str, stored: str) -> str:
    """Return the coalesce key that a publisher has given, or its hash if it was too long with the publisher's key."""
    length, colon, rest = stored.partition(":")
    is_hashed = lane_of(partition).partition.startswith(PARTITION_PREFIX)
    if not is_hashed or not colon or re.fullmatch("[0-9]{1,3}", length) is None:
        return stored
    end = int(length)
    return rest[end + 1 :] if rest[end : end + 1] == ":" else stored


def hashed_partition(value: str, partitions: int) -> str:
    """Return the partition that a value is hashed to: the CRC-32 of its UTF-8 bytes, modulo the number of partitions.

    The result is stable across processes, versions and languages, so that other clients can compute it
    (``CRC32(value) % n`` in SQL).
    """
    return f"{PARTITION_PREFIX}{zlib.crc32(value.encode()) % partitions}"


class Lane(NamedTuple):
    """A partition of one priority."""

    priority: int
    partition: str
    """The partition that messages with the same key and priority 0 are in."""


def check_priority(priority: object) -> int:
    """Return a priority if it is an integer from -100 to 100; else raise InvalidMessage."""
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > HIGHEST_PRIORITY:
        raise InvalidMessage(
            f"priority {priority!r}: must be an integer from {LOWEST_PRIORITY} to {HIGHEST_PRIORITY}, higher first"
        )
    return int(priority)


def lane(partition: str, priority: int) -> str:
    """Return the name of the partition for messages with a priority, the lane; InvalidMessage if the key is too long.

    For 10, the lane of the key ``a`` is ``__p:+010:a``, that of the hashed partition ``__p:3`` is ``__p:+010:__p:3``.
    """
    if not priority:
        return partition
    if len(partition) > LANE_KEY_LENGTH:
        raise InvalidMessage(
            f"key {partition[:40]!r}…: {len(partition)} characters, but with a priority at most {LANE_KEY_LENGTH} are "
            "allowed"
        )
    return f"{PARTITION_PREFIX}{priority:+04d}:{partition}"


def lanes(partition: str) -> list[str]:
    """Return the names of the partitions for messages of every priority that the key can have."""
    priorities = range(LOWEST_PRIORITY, HIGHEST_PRIORITY + 1) if len(partition) <= LANE_KEY_LENGTH else (0,)
    return [lane(partition, priority) for priority in priorities]


def lane_of(name: str) -> Lane:
    """Return the priority of a partition, and the partition for priority 0. Other names have the priority 0.

    The outbox accepts only lanes that ``lane`` makes, so ``sql.base.lane_partition`` is the same rule in SQL.
    """
    found = _LANE.fullmatch(name) if name.startswith(LANE_PREFIXES) else None
    return Lane(int(found[1]), found[2]) if found else Lane(0, name)


_LANE = re.compile(rf"{PARTITION_PREFIX}([+-][0-9]{{3}}):(.*)", re.DOTALL)


def priority_of(name: str) -> int:
    """Return the priority of a partition."""
    return lane_of(name).priority if name.startswith(LANE_PREFIXES) else 0
