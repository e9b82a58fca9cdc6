"""The Spark sink: rows become messages in the outbox, in one transaction per task.

A task that fails, runs twice or is repeated by a later job publishes no message twice: rows have message ids, and the
sequencer drops duplicates while the first message is in the log. So the id must be a function of the row.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from pyspark_mysqlqueue import kafka_schema
from pyspark_mysqlqueue.databases import Database, Place
from pyspark_mysqlqueue.errors import InvalidMessage, PipelineError
from pyspark_mysqlqueue.log_offsets import milliseconds
from pyspark_mysqlqueue.log_schema import OUTBOX
from pyspark_mysqlqueue.options import PLACE_OPTIONS, check_known, flag, number
from pyspark_mysqlqueue.shared.ids import new_message_id
from pyspark_mysqlqueue.shared.keys import check_key, check_priority, hashed_partition, lane
from pyspark_mysqlqueue.shared.rules import KEY_LENGTH, RESERVED_PREFIX, check_name, check_text
from pyspark_mysqlqueue.shared.sizes import LATEST_DELIVERY, MAX_METADATA_BYTES, MAX_PAYLOAD_BYTES, check_json_column

if TYPE_CHECKING:
    import pyarrow as pa

STATEMENT_BYTES = 2**20
STATEMENT_ROWS = 2_000
"""Limits of one multi-row INSERT."""
SINK_OPTIONS = ("topic", "partitions", "keepPartitions", "maxPayloadBytes")
TAKES: Mapping[str, tuple[str, ...]] = {
    "topic": ("string",),
    "id": ("string",),
    "payload": ("binary", "string"),
    "partition_key": ("string",),
    "publisher_key": ("string",),
    "metadata": ("string",),
    "target_group": ("string",),
    "deliver_at": ("timestamp", "bigint"),
    "priority": ("tinyint", "smallint", "int", "bigint"),
}
"""The columns that the sink accepts, and their types."""
REQUIRED = ("topic", "id", "payload")
KAFKA_TAKES: Mapping[str, tuple[str, ...]] = {
    "topic": ("string",),
    "key": ("binary", "string"),
    "value": ("binary", "string"),
    "headers": (kafka_schema.HEADERS,),
    "id": ("string",),
}
"""The columns that the sink accepts instead, those of Spark's Kafka sink and the id."""
KAFKA_NAMES = {"key": "partition_key", "value": "payload", "headers": "metadata"}
KAFKA_REQUIRED = ("topic", "value")
KAFKA_ONLY = frozenset(KAFKA_TAKES) - frozenset(TAKES)
LARGEST = 2**30
NOTE_BYTES = 2_000
"""Bytes by which a replayed message's metadata may exceed the limit, for ``replayed_from``."""


class Row(NamedTuple):
    """A checked row of the outbox."""

    topic: str
    partition_key: str
    publisher_key: str | None
    id: str
    payload: bytes
    metadata: str
    target_group: str
    deliver_at: int

    @property
    def weight(self) -> int:
        """The maximum number of bytes in a statement: escaping may double a byte, and a character has up to four."""
        text = len(self.topic) + len(self.partition_key) + len(self.publisher_key or "") + len(self.id)
        return 2 * len(self.payload) + 4 * (text + len(self.metadata) + len(self.target_group)) + 70


@dataclass(frozen=True, slots=True)
class Sink:
    """The parsed options of a write. Spark pickles it for executors."""

    place: Place
    columns: tuple[str, ...]
    partitions: int | None
    max_payload_bytes: int
    topic: str | None = None
    """The topic of all rows (None: that in the column)."""
    keep_partitions: bool = False
    """Keep partitions as they are in a log, with those that were made by hashing and those of priorities."""

    @property
    def is_kafka(self) -> bool:
        """Whether the columns are those of Spark's Kafka sink."""
        return not KAFKA_ONLY.isdisjoint(self.columns)

    @property
    def stored(self) -> tuple[str, ...]:
        """The columns of the outbox to store. The server fills the others with their defaults faster."""
        given = {"topic", "id", "payload", *(KAFKA_NAMES.get(name, name) for name in self.columns)}
        if "priority" in given or self.partitions is not None:
            given |= {"partition_key", "publisher_key"}
        return tuple(name for name in Row._fields if name in given)

    @classmethod
    def of(cls, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> Sink:
        """Parse and check the options of a write and the schema of its rows, before any task starts.

        Raises:
            PipelineError: An option, the mode or a column is invalid.
        """
        place = Place.of(options)
        check_known(options, SINK_OPTIONS + PLACE_OPTIONS, "the sink")
        if overwrite:
            raise PipelineError("mode 'overwrite': the sink only appends; it cannot replace messages")
        names = tuple(field.name for field in schema.fields)
        is_kafka = not KAFKA_ONLY.isdisjoint(names)
        takes = KAFKA_TAKES if is_kafka else TAKES
        for field in schema.fields:
            kind = field.dataType.simpleString()
            if is_kafka and field.name in TAKES and field.name not in takes:
                raise PipelineError(
                    f"column {field.name!r} together with {', '.join(sorted(KAFKA_ONLY.intersection(names)))}: pass "
                    f"{', '.join(KAFKA_TAKES)}, or {', '.join(TAKES)}"
                )
            if field.name not in takes:
                raise PipelineError(f"unknown column {field.name!r}: the sink accepts {', '.join(takes)}")
            if kind not in takes[field.name]:
                raise PipelineError(f"column {field.name!r} of type {kind}: must be {' or '.join(takes[field.name])}")
        required = KAFKA_REQUIRED if is_kafka else REQUIRED
        for name in required:
            if name not in names and not (name == "topic" and "topic" in options):
                raise PipelineError(f"missing column {name!r}: the sink requires {', '.join(required)}")
        partitions = number(options, "partitions", most=100_000)
        keep_partitions = flag(options, "keepPartitions", default=False)
        if keep_partitions and "priority" in names:
            raise PipelineError(
                "column 'priority' with the option keepPartitions: the partition keys that are kept contain the "
                "priority; drop the column, or write publishers' keys without the option"
            )
        if keep_partitions and partitions is not None:
            raise PipelineError("option 'partitions' with the option keepPartitions: pass one of them")
        if "publisher_key" in names and not keep_partitions:
            raise PipelineError(
                "column 'publisher_key' without the option keepPartitions: write publishers' keys as 'partition_key'"
            )
        return cls(
            place,
            names,
            partitions,
            number(options, "maxPayloadBytes", most=LARGEST) or MAX_PAYLOAD_BYTES,
            options.get("topic"),
            keep_partitions,
        )

    def write(self, batches: Iterator[pa.RecordBatch]) -> int:
        """Write all rows of a task to the outbox in one transaction.

        Returns:
            The number of rows.

        Raises:
            PipelineError: A row is invalid. Nothing was written. The message names the first invalid row and the rule.
        """
        written = 0
        with self.place.connect() as database:
            limit = min(STATEMENT_BYTES, database.max_statement_bytes() // 2)
            with database.transaction():
                for rows in _chunks(self._rows(batches), limit):
                    self._insert(database, rows, limit)
                    written += len(rows)
        return written

    def _insert(self, database: Database, rows: Sequence[Row], limit: int) -> None:
        if len(rows) == 1 and rows[0].weight > limit and rows[0].weight > database.max_statement_bytes():
            raise PipelineError(
                f"the row with topic {rows[0].topic!r} and id {rows[0].id!r}: payload of {len(rows[0].payload)} "
                "bytes: must be smaller than half of the server's max_allowed_packet"
            )
        columns = dict(zip(Row._fields, zip(*rows, strict=True), strict=True))
        database.insert(OUTBOX, {name: columns[name] for name in self.stored})

    def _rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[Row]:
        check = _Checked(self)
        for batch in batches:
            columns = {name: batch.column(place).to_pylist() for place, name in enumerate(self.columns)}
            if self.is_kafka:
                columns = {KAFKA_NAMES.get(name, name): values for name, values in columns.items()}
            if self.topic is not None:
                columns["topic"] = [self.topic] * batch.num_rows
            absent = [None] * batch.num_rows
            yield from map(
                check,
                columns["topic"],
                columns["id"] if "id" in columns else [new_message_id() for _ in absent],
                columns["payload"],
                columns.get("partition_key", absent),
                columns.get("publisher_key", absent),
                columns.get("metadata", absent),
                columns.get("target_group", absent),
                columns.get("deliver_at", absent),
                columns.get("priority", absent),
            )


class _Checked:
    """Check rows. Remember the topics, groups and metadata that are valid."""

    def __init__(self, sink: Sink) -> None:
        self.body = "value" if sink.is_kafka else "payload"
        self.partitions = sink.partitions
        self.keep_partitions = sink.keep_partitions
        self.max_metadata_bytes = MAX_METADATA_BYTES + (NOTE_BYTES if sink.keep_partitions else 0)
        self.max_payload_bytes = sink.max_payload_bytes
        self.names: dict[tuple[str, Any], str] = {}
        self.metadata: dict[str, str] = {}

    def __call__(self, topic: Any, message_id: Any, *rest: Any) -> Row:
        try:
            return self._row(topic, message_id, *rest)
        except InvalidMessage as error:
            raise PipelineError(f"the row with topic {topic!r} and id {message_id!r}: {error}") from error

    def _row(
        self,
        topic: Any,
        message_id: Any,
        payload: Any,
        key: Any,
        publisher_key: Any,
        metadata: Any,
        group: Any,
        deliver_at: Any,
        priority: Any,
    ) -> Row:
        if not message_id:
            raise InvalidMessage(
                f"id {message_id!r}: must not be empty, and must be the same each time this row is written, for "
                "example a hash of the row"
            )
        if payload is None:
            raise InvalidMessage(f"{self.body} None: must not be null")
        body = payload.encode() if isinstance(payload, str) else payload
        if len(body) > self.max_payload_bytes:
            raise InvalidMessage(f"{self.body} of {len(body)} bytes: maxPayloadBytes is {self.max_payload_bytes}")
        if not message_id.isascii() or len(message_id) > KEY_LENGTH:
            check_text("id", message_id)
        if self.keep_partitions:
            partition = check_text("key", key or "")
            hashed = None if publisher_key is None else check_text("publisher_key", publisher_key)
        else:
            partition, hashed = self._partition(_text("key", key) if isinstance(key, bytes) else key, message_id)
            partition = lane(partition, 0 if priority is None else check_priority(priority))
        return Row(
            self._name("topic", topic),
            partition,
            hashed,
            message_id,
            body,
            self._metadata(_of_headers(metadata) if isinstance(metadata, list) else metadata or "{}"),
            self._name("target_group", group) if group else "",
            _when(deliver_at),
        )

    def _name(self, kind: str, name: Any) -> str:
        if (kind, name) not in self.names:
            self.names[kind, name] = check_name(kind, name)
        return self.names[kind, name]

    def _partition(self, key: Any, message_id: str) -> tuple[str, str | None]:
        """Return the partition for priority 0, and the key that was hashed to it (None: none was)."""
        if key is not None:
            check_key(key)
        if self.partitions is None:
            return key or "", None
        return hashed_partition(message_id if key is None else key, self.partitions), key

    def _metadata(self, text: str) -> str:
        if text not in self.metadata:
            if len(self.metadata) > 1000:
                self.metadata.clear()
            self.metadata[text] = self._checked_metadata(text)
        return self.metadata[text]

    def _checked_metadata(self, text: str) -> str:
        value, text = _metadata(text, self.max_metadata_bytes)
        own = [] if self.keep_partitions else [name for name in value if name.startswith(RESERVED_PREFIX)]
        if own:
            raise InvalidMessage(
                f"metadata {own[0]!r}: keys that begin with {RESERVED_PREFIX!r} are reserved for the queue"
            )
        return text


def _text(what: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidMessage(f"{what} {value[:80]!r}: must be UTF-8") from error


def _of_headers(headers: list[dict[str, Any] | None]) -> str:
    """Return headers as metadata. If a key occurs twice, the last value counts, as in JSON."""
    metadata = {}
    for header in headers:
        if header is None or header["key"] is None:
            raise InvalidMessage("headers: a header and its key must not be null")
        name, value = header["key"], header["value"]
        metadata[name] = None if value is None else _text(f"header {name!r}", value)
    return json.dumps(metadata, ensure_ascii=False)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _metadata(text: str, most: int) -> tuple[dict[str, Any], str]:
    """Parse metadata. Return the object and its text, in which no key occurs twice: the last value counts."""
    repeated = False

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal repeated
        found = dict(pairs)
        repeated = repeated or len(found) < len(pairs)
        return found

    size = len(text.encode())
    if size > most:
        raise InvalidMessage(f"metadata of {size} bytes: at most {most} are allowed")
    try:
        value = json.loads(text, object_pairs_hook=once, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"metadata {text[:80]!r}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidMessage(f"metadata {text[:80]!r}: must be a JSON object")
    check_json_column(value)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"metadata {text[:80]!r}: contains a lone surrogate, which UTF-8 cannot encode") from error
    return value, json.dumps(value, ensure_ascii=False) if repeated else text


def _when(deliver_at: Any) -> int:
    """Return the time of delivery in epoch milliseconds; 0 means at once."""
    if deliver_at is None:
        return 0
    if isinstance(deliver_at, datetime.datetime):
        return max(1, milliseconds(deliver_at))
    if not 0 <= deliver_at <= LATEST_DELIVERY:
        raise InvalidMessage(f"deliver_at {deliver_at}: must be epoch milliseconds up to the end of the year 9999")
    return int(deliver_at)


def _chunks(rows: Iterator[Row], limit: int) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    size = 0
    for row in rows:
        weight = row.weight
        if chunk and (size + weight > limit or len(chunk) == STATEMENT_ROWS):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += weight
    if chunk:
        yield chunk


class Written(WriterCommitMessage):
    """The number of rows that a task has written to the outbox."""

    def __init__(self, rows: int) -> None:
        self.rows = rows


class OutboxWriter(DataSourceArrowWriter):
    """The writer of ``df.write.format("mysqlqueue").mode("append")``."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write the rows of a task to the outbox, and commit them."""
        return Written(self.sink.write(iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: each task has committed its own rows."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: rows that tasks have committed stay. Running the job again adds only the missing messages."""
