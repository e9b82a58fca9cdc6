"""The log's columns in SQL, Arrow and Spark. Imports neither Django nor Spark.

Times are epoch milliseconds in the tables and UTC timestamps everywhere else, where a ``failed_at`` of 0 (the message
never failed) is NULL.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pyspark_mysqlqueue.shared.log_queries import BY_PARTITION as BY_PARTITION
from pyspark_mysqlqueue.shared.tables import LOG as LOG
from pyspark_mysqlqueue.shared.tables import READERS as READERS
from pyspark_mysqlqueue.shared.tables import SEQUENCER as SEQUENCER

OUTBOX = "queue_outbox"
COLLECTED = "queue_collected"
CHECKSUM = "crc32"
"""The archive's column with the checksum of a row: see ``checksums``."""

Kind = Literal["number", "text", "bytes", "time"]


class Log(NamedTuple):
    """The identity of a log. A message is (``id``, ``epoch``, ``offset``)."""

    id: str
    epoch: int

    def key(self, what: str = "") -> str:
        """Return the name of one of its transaction versions."""
        return f"mysqlqueue/{self.id}/{self.epoch}{what and '/'}{what}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the log."""

    name: str
    kind: Kind
    nullable: bool = False
    absent: int | None = None
    """The number that the table has for a missing time. It is read as NULL."""

    @property
    def sql(self) -> str:
        """The SQL expression to read it by."""
        return f"`{self.name}`" if self.absent is None else f"NULLIF(`{self.name}`, {self.absent})"

    def filled(self, expression: str) -> str:
        """Return an SQL expression of the column, with an empty text for NULL."""
        return f"COALESCE({expression}, '')" if self.nullable else expression

    @property
    def spark_type(self) -> str:
        """The name of the column's type in Spark."""
        return {"number": "BIGINT", "text": "STRING", "bytes": "BINARY", "time": "TIMESTAMP"}[self.kind]


COLUMNS = (
    Column("offset", "number"),
    Column("topic", "text"),
    Column("partition_key", "text"),
    Column("id", "text"),
    Column("payload", "bytes"),
    Column("size", "number"),
    Column("metadata", "text"),
    Column("publisher_key", "text", nullable=True),
    Column("priority", "number"),
    Column("expires_at", "time", nullable=True),
    Column("coalesce_key", "text", nullable=True),
    Column("target_group", "text"),
    Column("original_id", "text"),
    Column("original_topic", "text"),
    Column("original_offset", "number"),
    Column("failed_group", "text"),
    Column("failed_at", "time", nullable=True, absent=0),
    Column("failure_count", "number"),
    Column("last_error", "text"),
    Column("created_at", "time"),
    Column("published_at", "time"),
)
BY_NAME = {column.name: column for column in COLUMNS}
RARE = COLUMNS[8:19]
"""Columns that are NULL, empty or 0 in most messages. The publisher's key is in all messages of some topics."""
NAMES = tuple(BY_NAME)
TYPES = {column.name: column.spark_type.lower() for column in COLUMNS}


def ddl(columns: Iterable[Column] = COLUMNS) -> str:
    """Return the columns as a Spark schema string: ``offset BIGINT, topic STRING, …``."""
    return ", ".join(f"`{column.name}` {column.spark_type}" for column in columns)
