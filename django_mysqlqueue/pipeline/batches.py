"""Rows as Arrow batches.

Two forms: as Spark takes them (microseconds, and a time that no ``datetime``
holds is NULL), and exact, as the archive keeps them (milliseconds, every one).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from django_mysqlqueue.pipeline.layout import FIRST_TIME, LAST_TIME, Column

SPARK_TIME = pa.timestamp("us", tz="UTC")
EXACT_TIME = pa.timestamp("ms", tz="UTC")
_TYPES = {"number": pa.int64(), "text": pa.string(), "bytes": pa.binary()}


@cache
def schema(columns: tuple[Column, ...], *, exact: bool = False) -> pa.Schema:
    """The Arrow schema of these columns; it must equal the one that Spark makes of its own."""
    time = EXACT_TIME if exact else SPARK_TIME
    return pa.schema([pa.field(column.name, _TYPES.get(column.kind, time)) for column in columns])


def batch(
    rows: Sequence[Sequence[Any]], columns: tuple[Column, ...], *, exact: bool = False, hidden: int = 0
) -> pa.RecordBatch:
    """Rows as a driver gives them: numbers are int, texts bytes; the first ``hidden`` values of each are left out."""
    make = _exact_times if exact else _spark_times
    values = list(zip(*rows, strict=True))[hidden:]
    arrays = [_array(of_column, column, make) for of_column, column in zip(values, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema(columns, exact=exact))


def _array(values: Sequence[Any], column: Column, times: Callable[[pa.Array, Column], pa.Array]) -> pa.Array:
    kind = _TYPES.get(column.kind, pa.int64())
    if values[0] == values[-1] and values.count(values[0]) == len(values):
        # Half of the columns hold one value in nearly every batch: found out in a tenth of the time of a conversion.
        found = pa.repeat(pa.array(values[:1], kind)[0], len(values))
    else:
        found = pa.array(values, kind)
    return times(found, column) if column.kind == "time" else found


def _without(numbers: pa.Array, absent: int | None) -> pa.Array:
    if absent is None:
        return numbers
    return pc.if_else(pc.equal(numbers, absent), pa.scalar(None, pa.int64()), numbers)


def _exact_times(numbers: pa.Array, column: Column) -> pa.Array:
    return _without(numbers, column.absent).view(EXACT_TIME)


def _spark_times(numbers: pa.Array, column: Column) -> pa.Array:
    numbers = _without(numbers, column.absent)
    limits = pc.min_max(numbers).as_py()
    if limits["min"] is not None and (limits["min"] < FIRST_TIME or limits["max"] > LAST_TIME):
        holds = pc.and_(pc.greater_equal(numbers, FIRST_TIME), pc.less_equal(numbers, LAST_TIME))
        numbers = pc.if_else(holds, numbers, pa.scalar(None, pa.int64()))
    return pc.multiply(numbers, 1000).view(SPARK_TIME)
