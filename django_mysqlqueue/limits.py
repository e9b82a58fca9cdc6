"""What every client of the tables keeps to. Imports no Django: Spark's executors need none."""

from __future__ import annotations

import re
import time
import zlib
from os import urandom
from typing import Any, NamedTuple

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

RESERVED_PREFIX = "mysqlqueue."
PUBLISHER_KEY = RESERVED_PREFIX + "key"
"""Where metadata keeps the publisher's key when it was hashed to a partition."""
MAX_METADATA_BYTES = 65_535
MAX_METADATA_DEPTH = 30
"""MariaDB's JSON_VALID ends at 32, MySQL's at 100."""
MAX_PAYLOAD_BYTES = 1_048_576
"""The setting's default."""
LATEST_DELIVERY = 253_402_300_799_000
"""Epoch milliseconds of the end of the year 9999."""

LATENCY_BOUNDS_MS = (5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000, 600_000, 3_600_000)
"""Upper bounds of the rollups' latency buckets in milliseconds; one more takes what is above."""

NOW_MS_MYSQL = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000"
NOW_MS_SQLITE = "CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"
"""The database's clock in epoch milliseconds."""


class SessionVariable(NamedTuple):
    """A server variable, and the value that every session of the queue needs."""

    name: str
    value: str
    """SQL expression to set it to."""
    wrong: str
    """SQL condition: the session has another value."""
    effect: str
    """The consequence of another value, for messages."""


SESSION_MYSQL = (
    SessionVariable(
        "autocommit",
        "1",
        "@@SESSION.autocommit = 0",
        "the server does not commit what is written outside a transaction, although Django counts on it",
    ),
    SessionVariable(
        "completion_type",
        "0",
        "@@SESSION.completion_type <> 'NO_CHAIN'",
        "a COMMIT opens the next transaction (1, CHAIN) or ends the connection (2, RELEASE)",
    ),
    SessionVariable(
        "sql_select_limit",
        "18446744073709551615",  # DEFAULT would be the server's
        "@@SESSION.sql_select_limit < 18446744073709551615",
        "every SELECT without a LIMIT returns only part of its rows, and no error",
    ),
    SessionVariable(
        "sql_safe_updates",
        "0",
        "@@SESSION.sql_safe_updates <> 0",
        "the server refuses UPDATE and DELETE statements that join tables (error 1175)",
    ),
    SessionVariable(
        "sql_big_selects",
        "1",
        "@@SESSION.sql_big_selects = 0",
        "the server refuses a SELECT that may examine more than max_join_size rows (error 1104)",
    ),
    SessionVariable(
        "sql_mode",
        # Not by '': under this mode a literal empty string is NULL, and the result would be, too.
        "REPLACE(@@SESSION.sql_mode, 'EMPTY_STRING_IS_NULL', ',')",
        "FIND_IN_SET('EMPTY_STRING_IS_NULL', @@SESSION.sql_mode) > 0",
        "an empty string is stored as NULL, which the queue's columns refuse (error 1048)",
    ),
)
"""For MySQL and MariaDB. Only MariaDB has the mode EMPTY_STRING_IS_NULL. Setting them needs no privilege."""


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


def check_json_column(value: Any, depth: int = 1) -> None:
    """Refuses what some server's JSON column would refuse or round."""
    if depth > MAX_METADATA_DEPTH:
        raise InvalidMessage(f"metadata: nested more than {MAX_METADATA_DEPTH} deep, which MariaDB does not take")
    if isinstance(value, dict):
        for item in value.values():
            check_json_column(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_json_column(item, depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise InvalidMessage(
            f"metadata: the number {str(value)[:20]}… does not fit into 64 bits, which MySQL would round"
        )
