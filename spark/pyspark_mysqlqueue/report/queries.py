"""Query DuckDB for the data of a report. Three queries read the log; the others read their small results."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from pyspark_mysqlqueue import log_offsets
from pyspark_mysqlqueue.archive.root import Root
from pyspark_mysqlqueue.databases import Place
from pyspark_mysqlqueue.log_schema import COLLECTED
from pyspark_mysqlqueue.tables import connect

COLUMNS = ("topic", "partition_key", "size", "published_at")
"""The columns of the log that a report reads: no payloads."""
LEAST_DAYS = 4
"""Minimum number of days for a trend. Through three points, the standard error is unreliable; through two it is 0."""
SCANS = {
    "by_hour": "SELECT date_trunc('hour', published_at) AS hour_at, topic, count(*) AS messages, sum(size) AS bytes, "
    "min(published_at) AS first_at, max(published_at) AS last_at FROM log GROUP BY ALL",
    "by_key": "SELECT topic, partition_key, count(*) AS messages, sum(size) AS bytes FROM log GROUP BY ALL",
    "by_size": "SELECT topic, size, count(*) AS messages FROM log GROUP BY ALL",
}
QUERIES = {
    "topics": """
        SELECT topic, sum(messages)::BIGINT AS messages, sum(bytes)::BIGINT AS bytes,
            (SELECT count(*) FROM by_key WHERE by_key.topic = by_hour.topic) AS keys,
            min(first_at) AS first_at, max(last_at) AS last_at
        FROM by_hour GROUP BY topic ORDER BY messages DESC, topic""",
    "days": """
        SELECT hour_at::DATE AS day, topic, sum(messages)::BIGINT AS messages, sum(bytes)::BIGINT AS bytes
        FROM by_hour GROUP BY ALL ORDER BY day, topic""",
    # The first and the last day may be incomplete. Days without a message count.
    "trend": f"""
        WITH days AS (
            SELECT hour_at::DATE AS day, sum(messages) AS messages, sum(bytes) AS bytes FROM by_hour GROUP BY day),
        ends AS (SELECT min(day) + 1 AS first, max(day) - 1 AS last FROM days),
        whole AS (
            SELECT date_diff('day', first, d.day)::DOUBLE AS x, coalesce(messages, 0)::DOUBLE AS y,
                coalesce(bytes, 0)::DOUBLE AS bytes
            FROM ends, unnest(generate_series(first, last, INTERVAL 1 DAY)) AS d(day)
            LEFT JOIN days ON days.day = d.day::DATE),
        line AS (
            SELECT count(*) AS days, avg(y) AS messages_per_day, avg(bytes) AS bytes_per_day, regr_slope(y, x) AS slope,
                sqrt(greatest(regr_syy(y, x) - regr_sxy(y, x) ^ 2 / regr_sxx(y, x), 0) / (count(*) - 2)
                    / regr_sxx(y, x)) AS slope_error,
                regr_intercept(y, x) + regr_slope(y, x) * max(x) AS at_end
            FROM whole HAVING count(*) >= {LEAST_DAYS}
            UNION ALL
            SELECT count(*), avg(y), avg(bytes), NULL, NULL, NULL FROM whole HAVING count(*) < {LEAST_DAYS})
        SELECT *, coalesce(abs(slope) > 2 * slope_error, false) AS is_significant FROM line""",
    # From the day of the last message on: x days later, there are per_day * x + rise * x^2 / 2 messages more. A slope
    # that is two standard errors higher or lower gives the earliest and the latest day.
    "growth_forecast": """
        WITH line AS (
            SELECT if(is_significant, at_end, messages_per_day) AS per_day, if(is_significant, slope, 0) AS slope,
                2 * coalesce(slope_error, 0) AS error, sum(messages) AS so_far, max(last_at)::DATE AS last_day
            FROM trend, topics WHERE days > 0 GROUP BY ALL),
        rises AS (
            SELECT size AS messages, name, last_day, size - so_far AS missing, per_day, slope + sign * error AS rise,
                per_day ^ 2 + 2 * rise * missing AS inside
            FROM line, unnest([100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000]) AS sizes(size),
                (VALUES ('expected', 0), ('earliest', 1), ('latest', -1)) AS names(name, sign)
            WHERE size > so_far),
        waits AS (
            SELECT messages, name, last_day, CASE WHEN abs(rise) < 1e-12 THEN missing / nullif(per_day, 0)
                WHEN inside >= 0 THEN (sqrt(inside) - per_day) / rise END AS wait
            FROM rises),
        found AS (SELECT messages, name, last_day + ceil(wait)::INT AS day FROM waits WHERE wait BETWEEN 0 AND 3650)
        SELECT messages, max(day) FILTER (name = 'expected') AS expected,
            max(day) FILTER (name = 'earliest') AS earliest, max(day) FILTER (name = 'latest') AS latest
        FROM (SELECT DISTINCT messages FROM rises) LEFT JOIN found USING (messages) GROUP BY ALL ORDER BY messages""",
    "hours": """
        SELECT isodow(hour_at) AS weekday, hour(hour_at) AS hour, sum(messages)::BIGINT AS messages,
            count(DISTINCT hour_at) AS days
        FROM by_hour GROUP BY ALL ORDER BY weekday, hour""",
    # With x ascending, Gini is 2 * sum(i * x) / (n * sum(x)) - (n + 1) / n; the place of the largest key is 1.
    "skew": """
        WITH ranked AS (
            SELECT topic, messages, row_number() OVER (PARTITION BY topic ORDER BY messages DESC) AS place,
                count(*) OVER (PARTITION BY topic) AS keys
            FROM by_key)
        SELECT topic, max(keys) AS keys, sum(messages)::BIGINT AS messages,
            2 * sum((keys - place + 1) * messages) / (max(keys) * sum(messages)) - (max(keys) + 1) / max(keys) AS gini,
            max(messages) / sum(messages) AS top_share,
            sum(messages) FILTER (place <= ceil(keys / 100)) / sum(messages) AS top_1_percent,
            sum(messages) FILTER (place <= ceil(keys / 10)) / sum(messages) AS top_10_percent
        FROM ranked GROUP BY topic ORDER BY messages DESC, topic""",
    "top_keys": """
        SELECT topic, row_number() OVER (PARTITION BY topic ORDER BY messages DESC, partition_key) AS place,
            partition_key, messages, bytes::BIGINT AS bytes,
            messages / sum(messages) OVER (PARTITION BY topic) AS share
        FROM by_key QUALIFY place <= 20 ORDER BY topic, place""",
    "sizes": """
        WITH summed AS (
            SELECT topic, size, messages, sum(messages) OVER (PARTITION BY topic ORDER BY size) AS up_to,
                sum(messages) OVER (PARTITION BY topic) AS total
            FROM by_size)
        SELECT topic, sum(messages)::BIGINT AS messages, sum(size * messages) / sum(messages) AS mean_bytes,
            min(size) FILTER (up_to >= 0.5 * total) AS p50_bytes, min(size) FILTER (up_to >= 0.9 * total) AS p90_bytes,
            min(size) FILTER (up_to >= 0.99 * total) AS p99_bytes, max(size) AS max_bytes
        FROM summed GROUP BY topic ORDER BY messages DESC, topic""",
    "size_classes": """
        SELECT up_to AS up_to_bytes, sum(messages)::BIGINT AS messages, sum(size * messages)::BIGINT AS bytes
        FROM by_size ASOF JOIN (SELECT unnest([100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 50_000, 100_000,
            250_000, 500_000, 1_000_000, 10_000_000, 100_000_000, 5_000_000_000]) AS up_to) ON size <= up_to
        GROUP BY up_to ORDER BY up_to""",
}
"""The tables of a report by name. A query may use the tables before it."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """The data of a report. ``tables`` has the tables that become files, by name."""

    since: datetime.datetime | None
    until: datetime.datetime | None
    topics: Sequence[str] | None
    now: datetime.datetime
    """The time of the database's clock when the report was written."""
    has_archive: bool
    """Whether the report covers an archive."""
    missing: list[tuple[str, int]]
    """Topics of which GC has removed messages that may belong to the period, and the highest offset among these."""
    retention: dict[str, float | None] | None
    """Topic → retention in seconds (None: forever). None if retention is unknown."""
    tables: dict[str, pa.Table]

    def rows(self, name: str) -> list[Row]:
        """Return the rows of a table."""
        found: list[Row] = self.tables[name].to_pylist()
        return found

    @property
    def messages(self) -> int:
        """The number of messages."""
        return sum(row["messages"] for row in self.rows("topics"))


def gather(
    place: Place,
    root: Root | None,
    since: datetime.datetime | None,
    until: datetime.datetime | None,
    topics: Sequence[str] | None,
    retention: Callable[[str], float | None] | None,
) -> Facts:
    """Run all queries of a report. See ``run_report``."""
    with place.connect() as database:
        (moment,) = database.row(f"SELECT {database.now_ms}")
        gone = database.rows(f"SELECT topic, collected_offset, published_at FROM {COLLECTED} ORDER BY topic")
    with connect(place, root, topics=topics, since=since, until=until, columns=COLUMNS, tables=()) as duck:
        for name, query in SCANS.items():
            duck.execute(f"CREATE TEMP TABLE {name} AS {query}")
        tables = {}
        for name, query in QUERIES.items():
            tables[name] = duck.sql(query).to_arrow_table()
            duck.register(name, tables[name])
    return Facts(
        since=since,
        until=until,
        topics=topics,
        now=datetime.datetime.fromtimestamp(int(moment) / 1000, datetime.timezone.utc),
        has_archive=root is not None,
        missing=[
            (topic, offset)
            for topic, offset, at in gone
            if root is None
            and topic in (topics or [topic])
            and (since is None or at >= log_offsets.milliseconds(since))
        ],
        retention={topic: retention(topic) for topic in tables["topics"]["topic"].to_pylist()} if retention else None,
        tables=tables,
    )


def write(tables: Mapping[str, pa.Table], folder: Path) -> Iterator[Path]:
    """Write each table as Parquet and CSV, and yield the files."""
    for name, table in tables.items():
        pq.write_table(table, folder / f"{name}.parquet", compression="zstd")
        pc.write_csv(table, folder / f"{name}.csv")
        yield from (folder / f"{name}.parquet", folder / f"{name}.csv")
