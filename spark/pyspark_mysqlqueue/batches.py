"""Select columns of the log and convert rows to Arrow batches, whose times are in microseconds, as Spark has them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_mysqlqueue import checksums
from pyspark_mysqlqueue.databases import Database
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.log_schema import BY_NAME, CHECKSUM, RARE, Column

SPARK_TIME = pa.timestamp("us", tz="UTC")
_TYPES = {"number": pa.int64(), "text": pa.string(), "bytes": pa.binary()}
_PACKED = "packed"
WORTH_PACKING = 3
"""Minimum number of columns to pack. Fewer are cheaper without packing."""


@cache
def schema(columns: tuple[Column, ...]) -> pa.Schema:
    """Return the Arrow schema of these columns, as Spark derives it from its own types."""
    return pa.schema([pa.field(column.name, _TYPES.get(column.kind, SPARK_TIME)) for column in columns])


class Selection:
    """The selected columns of the log, and the conversion of rows to batches.

    The cost of a row in Python is that of its values, and eleven of the 21 columns are nearly always empty. The server
    packs these into one text, which is empty if all of them are. Reading takes a third less time.

    A row is a tuple: the offset, the selected columns, the checksum if it is wanted, and finally the packed columns.
    """

    def __init__(self, names: Sequence[str], *, checksum: bool = False) -> None:
        self.columns = tuple(BY_NAME[name] for name in names)
        packed = tuple(column for column in RARE if column in self.columns)
        if len(packed) < WORTH_PACKING:
            packed = ()
        self.plain = ("offset", *(name for name in names if name != "offset" and BY_NAME[name] not in packed))
        self.payload = self.plain.index("payload") if "payload" in self.plain else None
        """The index of the payload in a row; None if it is not selected."""
        self._numbers = tuple(column for column in packed if column.kind != "text")
        self._texts = tuple(column for column in packed if column.kind == "text")
        self._nothings = [_nothing(column) for column in self._numbers + self._texts]
        self._is_packed = bool(packed)
        fields = [pa.field(name, _raw_type(BY_NAME[name])) for name in self.plain]
        if self._is_packed:
            fields.append(pa.field(_PACKED, pa.binary()))
        if checksum:
            fields.insert(len(self.plain), pa.field(CHECKSUM, pa.int64()))
        self._has_checksum = checksum
        self._row = pa.struct(fields)
        self._schema = schema(self.columns)
        if checksum:
            self._schema = self._schema.append(pa.field(CHECKSUM, pa.int64()))

    def sql(self, database: Database) -> str:
        """Return the select list."""
        wanted = [BY_NAME[name].sql for name in self.plain]
        if self._has_checksum:
            wanted.append(checksums.sql(database))
        if self._is_packed:
            sizes = [(column, column.sql) for column in self._numbers]
            sizes += [(column, database.byte_length(column.sql)) for column in self._texts]
            empty = " AND ".join(f"{size} IS NULL" if column.nullable else f"{size} = 0" for column, size in sizes)
            parts = [*sizes, *((column, column.sql) for column in self._texts)]
            joined = database.joined([column.filled(part) for column, part in parts])
            wanted.append(f"CASE WHEN {empty} THEN '' ELSE {joined} END")
        return ", ".join(wanted)

    def batch(self, rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
        """Convert rows to a batch.

        Args:
            rows: Rows as the driver returns them: numbers are int, texts are bytes.

        Raises:
            PipelineError: The packed columns of a row are too long or cannot be unpacked.
        """
        found = dict(zip([field.name for field in self._row], pa.array(rows, self._row).flatten(), strict=True))
        packed = found.pop(_PACKED, None)
        if packed is not None:
            found |= self._unpacked(packed, rows)
        arrays = [
            _times(found[field.name]) if field.type == SPARK_TIME else found[field.name] for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _unpacked(self, packed: pa.Array, rows: Sequence[tuple[Any, ...]]) -> dict[str, pa.Array]:
        columns = self._numbers + self._texts
        if packed.null_count:
            offset = next(row[0] for row in rows if row[-1] is None)
            raise PipelineError(
                f"offset {offset}: {', '.join(column.name for column in self._texts)} together exceed the server's "
                "max_allowed_packet; raise it"
            )
        if not pc.sum(pc.binary_length(packed)).as_py():
            return {
                column.name: pa.repeat(pa.scalar(_nothing(column), _raw_type(column)), len(packed))
                for column in columns
            }
        values = zip(*map(self._unpack, [row[0] for row in rows], packed.to_pylist()), strict=True)
        return {column.name: pa.array(list(of), _raw_type(column)) for column, of in zip(columns, values, strict=True)}

    def _unpack(self, offset: int, packed: bytes) -> list[Any]:
        if not packed:
            return self._nothings
        # The numbers, the length of each text, then the texts, all separated by commas.
        count = len(self._numbers) + len(self._texts)
        parts = packed.split(b",", count)
        try:
            sizes = [int(number) if number else None for number in parts[:count]]
        except ValueError as error:
            raise PipelineError(
                f"offset {offset}: a numeric column contains a value that is not a number: {error}"
            ) from error
        values: list[Any] = sizes[: len(self._numbers)]
        lengths = sizes[len(self._numbers) :]
        rest, begin = b"".join(parts[count:]), 0
        if self._texts and sum(filter(None, lengths)) + len(lengths) - 1 != len(rest):
            raise PipelineError(
                f"offset {offset}: the server counts {lengths} bytes in "
                f"{', '.join(column.name for column in self._texts)} but sends {len(rest)}: the database must use UTF-8"
            )
        for length in lengths:
            values.append(None if length is None else rest[begin : begin + length])
            begin += (length or 0) + 1
        return values


def _raw_type(column: Column) -> pa.DataType:
    return _TYPES.get(column.kind, pa.int64())


def _nothing(column: Column) -> str | int | None:
    return None if column.nullable else "" if column.kind == "text" else 0


def _times(numbers: pa.Array) -> pa.Array:
    return numbers.view(pa.timestamp("ms", tz="UTC")).cast(SPARK_TIME)
