"""Expressions that several analyses share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SHARES = (0.5, 0.9, 0.99)
"""Of a percentile column, in this order."""
PERCENTILES = ("p50_ms", "p90_ms", "p99_ms")
ERROR_CHARACTERS = 200
"""Of an error's last line that are kept."""


def step(moment: Column, seconds: int) -> Column:
    """When the stretch of so many seconds began that a moment lies in; stretches are counted from 1970."""
    from pyspark.sql import functions as f

    length = seconds * 1000
    return f.timestamp_millis(f.floor(f.unix_millis(moment) / length) * length)


def last_line(error: Column) -> Column:
    """The last line of an error that is not empty, as the dashboard shows it; '' if there is none."""
    from pyspark.sql import functions as f

    without_end = f.regexp_replace(error, r"\s+$", "")
    return f.left(f.trim(f.element_at(f.split(without_end, r"[\r\n]+"), -1)), f.lit(ERROR_CHARACTERS))


def kind_of(error: Column) -> Column:
    """The last line of an error with ``N`` for each number, UUID and address: errors that differ there are one."""
    from pyspark.sql import functions as f

    uuid = r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
    return f.regexp_replace(last_line(error), rf"{uuid}|\b0x[0-9a-fA-F]+|\d+(?:[.,]\d+)*", "N")


def milliseconds_between(start: Column, end: Column) -> Column:
    from pyspark.sql import functions as f

    return f.unix_millis(end) - f.unix_millis(start)


def percentiles(frame: DataFrame, by: Sequence[str | Column], took: Column, counted: str) -> DataFrame:
    """How many, the exact 50th, 90th and 99th percentile (between two values: in proportion) and the highest.

    Args:
        by: what is grouped.
        took: milliseconds; NULL is left out.
        counted: what the column of counts is called.
    """
    from pyspark.sql import functions as f

    found = frame.groupBy(*by).agg(
        f.count(took).alias(counted), f.percentile(took, list(SHARES)).alias("p"), f.max(took).alias("max_ms")
    )
    parts = {name: f.col("p")[place] for place, name in enumerate(PERCENTILES)}
    kept = [name for name in found.columns if name not in ("p", "max_ms")]
    return found.withColumns(parts).select(*kept, *PERCENTILES, "max_ms")
