"""Convert rows of the log to Arrow batches with the columns of Spark's Kafka source."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_mysqlqueue.batches import SPARK_TIME, Selection
from pyspark_mysqlqueue.kafka_schema import HEADERS, LOG_APPEND_TIME, LOG_NAMES, NEEDS, TYPES
from pyspark_mysqlqueue.shared.keys import PARTITION_PREFIX, lane_of

_HEADERS = pa.list_(pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])))
_ARROW = {
    "binary": pa.binary(),
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": SPARK_TIME,
    HEADERS: _HEADERS,
}


class KafkaSelection(Selection):
    """The columns of the log that are needed, and the conversion of rows to batches with Kafka's columns."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(tuple(dict.fromkeys(column for name in names for column in NEEDS[name])))
        self.names = tuple(names)

    def batch(self, rows: Sequence[tuple[Any, ...]], *, exact: bool = False) -> pa.RecordBatch:
        """Convert rows to a batch. There is no ``exact`` form."""
        found = super().batch(rows)
        make: dict[str, Callable[[], pa.Array]] = {
            "key": lambda: _keys(found.column("partition_key"), found.column("publisher_key")),
            "partition": lambda: _each(found.column("partition_key"), _partition, pa.int32()),
            "timestampType": lambda: pa.repeat(pa.scalar(LOG_APPEND_TIME, pa.int32()), len(rows)),
            "headers": lambda: _each(found.column("metadata"), headers, _HEADERS),
        }
        arrays = [make[name]() if name in make else found.column(LOG_NAMES[name]) for name in self.names]
        fields = [pa.field(name, _ARROW[TYPES[name]]) for name in self.names]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def headers(metadata: str) -> list[tuple[str, bytes | None]] | None:
    """Return metadata as headers: texts in UTF-8, other values as JSON. None if there are none or it is not JSON."""
    try:
        found = json.loads(metadata)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not found:
        return None
    return [(_utf8(name).decode(), _header(value)) for name, value in found.items()]


def _header(value: Any) -> bytes | None:
    if value is None:
        return None
    return _utf8(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _utf8(text: str) -> bytes:
    return text.encode(errors="replace")


def _partition(partition_key: str) -> int:
    return zlib.crc32(partition_key.encode()) & 0x7FFFFFFF


def _key(partition_key: str) -> bytes | None:
    key = lane_of(partition_key).partition
    return None if not key or key.startswith(PARTITION_PREFIX) else key.encode()


def _keys(partition_keys: pa.Array, publisher_keys: pa.Array) -> pa.Array:
    return pc.coalesce(publisher_keys.cast(pa.binary()), _each(partition_keys, _key, pa.binary()))


def _each(texts: pa.Array, function: Callable[[str], Any], kind: pa.DataType) -> pa.Array:
    """Apply a function to each text, once to equal ones."""
    encoded = texts.dictionary_encode()
    return pa.array([function(text) for text in encoded.dictionary.to_pylist()], kind).take(encoded.indices)
