"""The columns of Spark's Kafka source. Imports neither Spark nor Arrow, which takes long where a query is planned."""

from __future__ import annotations

HEADERS = "array<struct<key:string,value:binary>>"
TYPES = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": HEADERS,
}
LOG_NAMES = {
    "value": "payload",
    "topic": "topic",
    "partition": "partition_key",
    "offset": "offset",
    "timestamp": "published_at",
}
"""The log's columns that these columns are made from one by one."""
NEEDS = {name: (column,) for name, column in LOG_NAMES.items()} | {
    "key": ("partition_key", "publisher_key"),
    "timestampType": (),
    "headers": ("metadata",),
}
LOG_APPEND_TIME = 1
"""Kafka's type of a timestamp that the log has set."""


def names(*, with_headers: bool) -> tuple[str, ...]:
    """Return the names of the columns in Kafka's order."""
    return tuple(name for name in TYPES if with_headers or name != "headers")


def ddl(*, with_headers: bool) -> str:
    """Return the columns as a Spark schema string."""
    return ", ".join(f"`{name}` {TYPES[name]}" for name in names(with_headers=with_headers))
