"""A checksum over all columns of a row, computed by the server for the log and with Arrow for the files.

A row is written as a text: its numbers, the lengths of its short texts, the CRC-32 of its long texts, and the short
texts themselves, so that the fields cannot be confused. NULL is an empty number or length. The checksum is the CRC-32
of that text. The archive has it in a column, so that each row can be checked wherever it has been copied.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_mysqlqueue.databases import Database
from pyspark_mysqlqueue.log_schema import COLUMNS

LONG = ("payload", "metadata", "last_error")
NUMBERS = tuple(column for column in COLUMNS if column.kind in ("number", "time"))
SHORT = tuple(column for column in COLUMNS if column.kind == "text" and column.name not in LONG)
assert len(NUMBERS) + len(SHORT) + len(LONG) == len(COLUMNS)  # noqa: S101  # every column has its place


@dataclass(frozen=True, slots=True)
class Sum:
    """The number of rows, and the sum of their CRC-32."""

    rows: int = 0
    checksum: int = 0

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.rows + other.rows, self.checksum + other.checksum)


def sql(database: Database) -> str:
    """Return the SQL expression of a row's checksum."""
    parts = [column.filled(column.sql) for column in NUMBERS]
    parts += [column.filled(database.byte_length(column.sql)) for column in SHORT]
    parts += [f"CRC32(`{name}`)" for name in LONG]
    parts += [column.filled(column.sql) for column in SHORT]
    return f"CRC32({database.joined(parts)})"


def of_rows(batch: pa.RecordBatch | pa.Table) -> pa.Array:
    """Return the checksum of each row, computed with Arrow. The batch has all columns of the log."""
    if batch.num_rows == 0:
        return pa.array([], pa.int64())
    parts = [_digits(_flat(batch.column(column.name))) for column in NUMBERS]
    texts = [_flat(batch.column(column.name)) for column in SHORT]
    parts += [_digits(pc.binary_length(text)) for text in texts]
    parts += [_crcs(_flat(batch.column(name))) for name in LONG]
    parts += [_constant(pc.fill_null(text, "")) for text in texts]
    rows = pc.binary_join_element_wise(*_merged(part.cast(pa.string()) for part in parts), ",")
    if isinstance(rows, pa.Scalar):
        rows = pa.repeat(rows, batch.num_rows)
    return pa.array(map(zlib.crc32, rows.cast(pa.binary()).to_pylist()), pa.int64())


def total(checksums: pa.Array | pa.ChunkedArray) -> Sum:
    """Return the number of rows and the sum of their checksums."""
    return Sum(len(checksums), pc.sum(checksums).as_py() or 0)


def _flat(column: Any) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _digits(numbers: pa.Array) -> Any:
    if pa.types.is_timestamp(numbers.type):
        numbers = numbers.cast(pa.timestamp("ms", "UTC")).view(pa.int64())
    return _constant(pc.fill_null(numbers.cast(pa.string()), "") if numbers.null_count else numbers)


def _constant(values: pa.Array) -> Any:
    """Replace a column that has the same value in every row by a scalar. Most columns of a log do."""
    if len(values) and pc.all(pc.equal(values, values[0])).as_py():
        return values[0]
    return values


def _merged(parts: Iterable[Any]) -> Iterator[Any]:
    """Join adjacent scalars, which gives the same text from fewer parts."""
    for is_scalar, some in itertools.groupby(parts, key=lambda part: isinstance(part, pa.Scalar)):
        if is_scalar:
            yield pa.scalar(",".join(part.as_py() for part in some))
        else:
            yield from some


def _crcs(values: pa.Array) -> Any:
    first = _constant(values)
    if isinstance(first, pa.Scalar):
        return pa.scalar(zlib.crc32(first.cast(pa.binary()).as_py()), pa.int64())
    return pa.array(map(zlib.crc32, values.cast(pa.binary()).to_pylist()), pa.int64())
