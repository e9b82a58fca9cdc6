"""Expressions that several analyses use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SHARES = (0.5, 0.9, 0.99)
"""The shares that the columns of percentiles stand for."""
PERCENTILES = ("p50_ms", "p90_ms", "p99_ms")
ERROR_CHARACTERS = 200
"""Maximum number of characters of an error's last line."""


def step(moment: Column, seconds: int) -> Column:
    """Round a time down to a multiple of ``seconds`` since 1970: the beginning of its step."""
    from pyspark.sql import functions as f

    length = seconds * 1000
    return f.timestamp_millis(f.floor(f.unix_millis(moment) / length) * length)


def last_line(error: Column) -> Column:
    """Return the last line of an error that is not empty, as the dashboard shows it; '' if there is none."""
    from pyspark.sql import functions as f

    without_end = f.regexp_replace(error, r"\s+$", "")
    return f.left(f.trim(f.element_at(f.split(without_end, r"[\r\n]+"), -1)), f.lit(ERROR_CHARACTERS))


def kind_of(error: Column) -> Column:
    """Return the last line of an error with ``N`` for each number, UUID and address, to group similar errors."""
    from pyspark.sql import functions as f

    uuid = r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
    return f.regexp_replace(last_line(error), rf"{uuid}|\b0x[0-9a-fA-F]+|\d+(?:[.,]\d+)*", "N")


def milliseconds_between(start: Column, end: Column) -> Column:
    """Return the milliseconds from one time to another."""
    from pyspark.sql import functions as f

    return f.unix_millis(end) - f.unix_millis(start)


def percentiles(frame: DataFrame, by: Sequence[str | Column], took: Column, counted: str) -> DataFrame:
    """Return the count, the exact 50th, 90th and 99th percentiles, and the maximum of durations.

    A percentile that lies between two values is interpolated.

    Args:
        frame: The rows.
        by: The columns to group by.
        took: The durations in milliseconds. NULL is left out.
        counted: The name of the column with the count.
    """
    from pyspark.sql import functions as f

    found = frame.groupBy(*by).agg(
        f.count(took).alias(counted), f.percentile(took, list(SHARES)).alias("p"), f.max(took).alias("max_ms")
    )
    parts = {name: f.col("p")[place] for place, name in enumerate(PERCENTILES)}
    kept = [name for name in found.columns if name not in ("p", "max_ms")]
    return found.withColumns(parts).select(*kept, *PERCENTILES, "max_ms")
