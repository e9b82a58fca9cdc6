"""What each day adds, as a straight line with its error, and where that leads."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LEAST_DAYS = 4
"""A line through three points has an error that nobody should rest anything on; through two it has none."""
SIZES = (100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
"""Messages."""
FARTHEST = 3650
"""Days ahead after which nothing is said."""


def trend(days: DataFrame, *, first: datetime.date, last: datetime.date) -> DataFrame:
    """A line through the whole days from ``first`` to ``last``: one row, by least squares.

    Args:
        days: ``day, messages, bytes`` as of ``traffic.days``; days that it lacks count as 0.

    Returns:
        ``days, messages_per_day, bytes_per_day, slope, slope_error, at_end``: means, how much more comes each day
        than the day before, that number's standard error, and where the line is on the last day (NULL: too few days).

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
    """When a log from which nothing is removed has grown to a size; ``None``: not within ten years."""

    messages: int
    expected: datetime.date | None
    earliest: datetime.date | None
    """If the slope were two standard errors higher."""
    latest: datetime.date | None


def milestones(
    now: int, day: datetime.date, *, per_day: float, slope: float | None, error: float | None
) -> list[Milestone]:
    """When the log reaches each of ``SIZES`` above its present one, if what comes follows the line.

    Args:
        now: messages that it holds on ``day``.
        per_day: messages a day at present.
        slope: how much more comes each day, None: nobody knows, and it counts as 0.
        error: its standard error.
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
    """The first positive x with per_day·x + rise·x²/2 = missing, while per_day + rise·x is positive."""
    if abs(rise) < 1e-12:
        return missing / per_day if per_day > 0 else None
    inside = per_day**2 + 2 * rise * missing
    if inside < 0:
        return None
    found = (-per_day + math.sqrt(inside)) / rise
    return found if found >= 0 else None
