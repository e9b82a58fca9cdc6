"""Fit a line to the messages per day, and forecast the size of the log."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LEAST_DAYS = 4
"""Minimum number of days for a line. Through three points, the standard error is unreliable; through two it is 0."""
SIZES = (100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
"""Sizes to forecast, in messages."""
FARTHEST = 3650
"""Maximum number of days that are forecast."""


def trend(days: DataFrame, *, first: datetime.date, last: datetime.date) -> DataFrame:
    """Fit a line to the messages per day by least squares.

    Args:
        days: ``day, messages, bytes`` as returned by ``traffic.days``. Missing days count as 0.
        first: The first whole day.
        last: The last whole day.

    Returns:
        One row: ``days, messages_per_day, bytes_per_day, slope, slope_error, at_end``. These are the number of days,
        means per day, the change of messages per day from day to day, its standard error, and the value of the line
        on the last day. The last three are NULL if there are too few days.

    Raises:
        ValueError: ``last`` is before ``first``.
    """
    from pyspark.sql import functions as f

    if last < first:
        raise ValueError(f"last {last}: must not be before first {first}")
    calendar = days.sparkSession.sql(f"SELECT explode(sequence(DATE'{first}', DATE'{last}')) AS day")
    sums = days.groupBy("day").agg(f.sum("messages").alias("messages"), f.sum("bytes").alias("bytes"))
    whole = calendar.join(f.broadcast(sums), "day", "left").fillna(0)
    x, y = f.datediff("day", f.lit(first)).cast("double"), f.col("messages").cast("double")
    count = f.count("*")
    rest = f.greatest(f.regr_syy(y, x) - f.regr_sxy(y, x) ** 2 / f.regr_sxx(y, x), f.lit(0.0))
    error = f.sqrt(rest / (count - 2) / f.regr_sxx(y, x))
    enough = count >= LEAST_DAYS
    return whole.agg(
        count.alias("days"),
        f.avg("messages").alias("messages_per_day"),
        f.avg("bytes").alias("bytes_per_day"),
        f.when(enough, f.regr_slope(y, x)).alias("slope"),
        f.when(enough, error).alias("slope_error"),
        f.when(enough, f.regr_intercept(y, x) + f.regr_slope(y, x) * f.max(x)).alias("at_end"),
    )


@dataclass(frozen=True, slots=True)
class Milestone:
    """The dates on which a log without GC reaches a size (None: not within ten years)."""

    messages: int
    """The size."""
    expected: datetime.date | None
    """The date if the line continues."""
    earliest: datetime.date | None
    """The date if the slope is two standard errors higher."""
    latest: datetime.date | None
    """The date if the slope is two standard errors lower."""


def milestones(
    now: int, day: datetime.date, *, per_day: float, slope: float | None, error: float | None
) -> list[Milestone]:
    """Forecast when the log reaches 100,000, 1 million … 1 billion messages, for each size that it has not reached.

    Args:
        now: The number of messages in the log on ``day``.
        day: The first day of the forecast.
        per_day: The current number of messages per day.
        slope: The change of messages per day from day to day (None: unknown, counts as 0).
        error: The standard error of the slope (None: unknown, counts as 0).
    """
    slope, error = slope or 0.0, error or 0.0

    def reached(size: int, rise: float) -> datetime.date | None:
        wait = _days_until(size - now, per_day, rise)
        return None if wait is None or wait > FARTHEST else day + datetime.timedelta(days=math.ceil(wait))

    return [
        Milestone(size, reached(size, slope), reached(size, slope + 2 * error), reached(size, slope - 2 * error))
        for size in SIZES
        if size > now
    ]


def _days_until(missing: float, per_day: float, rise: float) -> float | None:
    """Return the first positive x with per_day·x + rise·x²/2 = missing, while per_day + rise·x is positive."""
    if abs(rise) < 1e-12:
        return missing / per_day if per_day > 0 else None
    inside = per_day**2 + 2 * rise * missing
    if inside < 0:
        return None
    found = (-per_day + math.sqrt(inside)) / rise
    return found if found >= 0 else None
