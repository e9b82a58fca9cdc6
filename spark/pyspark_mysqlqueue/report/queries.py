"""Query Spark and the database for the data of a report. The results are small."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pyspark_mysqlqueue import frames, log_offsets, tables
from pyspark_mysqlqueue.analytics import deliveries, growth, lag, skew, traffic
from pyspark_mysqlqueue.analytics.common import ERROR_CHARACTERS
from pyspark_mysqlqueue.archive.root import Root
from pyspark_mysqlqueue.archive.table import Table
from pyspark_mysqlqueue.databases import Place
from pyspark_mysqlqueue.report import words
from pyspark_mysqlqueue.tables import Collected, Group

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = (
    "offset",
    "topic",
    "partition_key",
    "size",
    "target_group",
    "original_topic",
    "failed_group",
    "failed_at",
    "failure_count",
    "last_error",
    "created_at",
    "published_at",
)
"""The columns of the log that a report reads: no payloads."""
STEPS = (1, 5, 15, 60, 300, 900, 3600, 10_800, 21_600, 86_400, 604_800)
"""Possible lengths of a step in a chart, in seconds."""
POINTS = 150
"""Maximum number of steps in a chart."""
MINUTES_UP_TO = 14 * 86_400
"""Seconds of a period up to which the table of throughput has a row per minute. Longer periods have one per hour."""
ROLLUP_MINUTES_KEPT = 6 * 3600
"""Seconds for which the queue keeps rollups of minutes."""
MOST_ROWS = 1000
"""Maximum number of rows in tables of errors and of subscribers."""
TOP_KEYS = 20
"""Number of keys per topic in the table of the largest keys."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """The data of a report. ``tables`` has the tables that become files, by name."""

    since: datetime.datetime | None
    until: datetime.datetime | None
    topics: tuple[str, ...] | None
    now: datetime.datetime
    """The time of the database's clock when the report was written."""
    with_archive: bool
    """Whether the report covers an archive."""
    archived: int
    """All offsets up to this one are archived."""
    collected: list[Collected]
    """Messages that GC has removed, that are not archived and that may belong to the period."""
    groups: list[Group]
    """The registered groups."""
    step: int
    """The length of a step in charts over time, in seconds."""
    table_step: int
    """The length of a step in the table ``throughput``, in seconds."""
    lag_source: dict[tuple[str, str], str]
    """(group, topic) → the source of its lag: ``events``, ``rollups`` or ``none``."""
    lag_step: int
    """The length of a step of lag from recorded deliveries, in seconds."""
    chart: list[Row]
    """Throughput in steps of ``step``."""
    latency_over_time: list[Row]
    """Latency into the log in steps of ``step``."""
    trend: Row | None
    """The line through the messages per day (None: less than one whole day)."""
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

    @property
    def first_at(self) -> datetime.datetime | None:
        """When the first message was published; None if there is none."""
        return min((row["first_at"] for row in self.rows("topics") if row["first_at"]), default=None)

    @property
    def last_at(self) -> datetime.datetime | None:
        """When the last message was published; None if there is none."""
        return max((row["last_at"] for row in self.rows("topics") if row["last_at"]), default=None)

    @property
    def concerned(self) -> list[Row]:
        """The rows of ``recording`` of groups that had messages. Other groups have no missing data."""
        busy = {row["topic"] for row in self.rows("topics") if row["messages"]}
        behind = {(group.consumer_group, group.topic) for group in self.groups if group.unsettled}
        return [
            row
            for row in self.rows("recording")
            if row["recorded"] != "idle" or row["topic"] in busy or (row["consumer_group"], row["topic"]) in behind
        ]

    def group_name(self, group: str, topic: str) -> str:
        """Return a group for a sentence, with its topic if the group has several."""
        several = [row for row in self.rows("recording") if row["consumer_group"] == group][1:]
        return f"{words.name(group)} on {words.name(topic)}" if several else words.name(group)

    @property
    def recorded(self) -> dict[tuple[str, str], str]:
        """(group, topic) → the share of recorded deliveries, as in ``deliveries.recording``."""
        return {(row["consumer_group"], row["topic"]): row["recorded"] for row in self.rows("recording")}


def step_for(seconds: float) -> int:
    """Return the shortest step that divides a period of ``seconds`` into at most ``POINTS`` steps."""
    return next((step for step in STEPS if seconds <= step * POINTS), STEPS[-1])


@contextmanager
def kept(*found: DataFrame) -> Iterator[None]:
    """Cache DataFrames during the block, so that each is computed once."""
    for one in found:
        one.persist()
    try:
        yield
    finally:
        for one in found:
            one.unpersist()


def gather(
    spark: SparkSession,
    place: Place,
    root: Root | None,
    since: datetime.datetime | None,
    until: datetime.datetime | None,
    topics: Sequence[str] | None,
    *,
    retention: Callable[[str], float | None] | None = None,
    redact: Callable[[str, str], str] | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> Facts:
    """Run all queries of a report.

    Args:
        spark: The session. Its time zone is set to UTC.
        place: The queue's database.
        root: The archive (None: read the live log only).
        since: Only messages published at or after this time.
        until: Only messages published before this time.
        topics: Only these topics (None: all).
        retention: Returns the retention of a topic in seconds.
        redact: Returns the text to show instead of an error's last line.
        progress: Called with the name of each step before it begins.

    Raises:
        DataLossError: GC has removed messages that the archive does not contain.
    """
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    progress("groups")
    with place.connect() as database:
        moment = tables.now(database)
        groups = tables.groups(database, topics)
        gone = tables.collected(database, topics)
        table = None if root is None else Table.find(root)
        archived = 0 if table is None else table.archived(log_offsets.identity(database))
    log = frames.everything(spark, place, root, topics=topics, since=since, until=until, columns=COLUMNS)
    # A delivery of a message that was published in the period may end after the period.
    events = tables.events(spark, place, topics=topics, since=since)
    rollups = tables.rollups(spark, place, topics=topics, since=since, until=until)
    with kept(log, events, rollups):
        ask = _Questions(spark, log, events, rollups, groups, since, until, moment, progress)
        ask.everything()
        if redact is not None:
            for name in ("failures", "dead_letters"):
                ask.tables[name] = redacted(ask.tables[name], redact)
        missing = [
            one
            for one in gone
            if one.offset > archived and (since is None or one.published_at >= since.timestamp() * 1000)
        ]
        return Facts(
            since=since,
            until=until,
            topics=None if topics is None else tuple(topics),
            now=moment,
            with_archive=root is not None,
            archived=archived,
            collected=missing,
            groups=groups,
            step=ask.step,
            table_step=ask.table_step,
            lag_source=ask.lag_source,
            lag_step=ask.lag_step,
            chart=ask.chart,
            latency_over_time=ask.latency_over_time,
            trend=ask.trend,
            retention=None
            if retention is None
            else {row["topic"]: retention(row["topic"]) for row in ask.rows("topics")},
            tables=ask.tables,
        )


TOO_LONG = "(redacted: the line is too long)"
"""Shown instead of a line of which only the beginning is known: a part of it cannot be redacted safely."""


def redacted(table: pa.Table, redact: Callable[[str, str], str]) -> pa.Table:
    """Return a table with its column ``error`` redacted. Shortened lines are replaced by ``TOO_LONG``."""
    lines = zip(table["error"].to_pylist(), table["topic"].to_pylist(), strict=True)
    left = [TOO_LONG if len(line) >= ERROR_CHARACTERS else redact(line, topic) for line, topic in lines]
    return table.set_column(table.column_names.index("error"), "error", pa.array(left, pa.string()))


class _Questions:
    """The queries of a report. They run one after another; each is at least one Spark job."""

    def __init__(
        self,
        spark: SparkSession,
        log: DataFrame,
        events: DataFrame,
        rollups: DataFrame,
        groups: Sequence[Group],
        since: datetime.datetime | None,
        until: datetime.datetime | None,
        now: datetime.datetime,
        progress: Callable[[str], object],
    ) -> None:
        self.spark, self.log, self.events, self.rollups = spark, log, events, rollups
        self.groups, self.since, self.until, self.now, self.progress = groups, since, until, now, progress
        self.tables: dict[str, pa.Table] = {}
        self.step = self.table_step = self.lag_step = 60
        self.chart: list[Row] = []
        self.latency_over_time: list[Row] = []
        self.trend: Row | None = None
        self.lag_source: dict[tuple[str, str], str] = {}

    def rows(self, name: str) -> list[Row]:
        found: list[Row] = self.tables[name].to_pylist()
        return found

    def ask(self, name: str, frame: DataFrame) -> None:
        self.progress(name.replace("_", " "))
        self.tables[name] = frame.toArrow()

    def everything(self) -> None:
        from pyspark.sql import functions as f

        self.ask("topics", traffic.topics(self.log))
        begin, end = self._span()
        length = (end - begin).total_seconds() if begin and end else 0.0
        self.step = step_for(length)
        self.table_step = 60 if length <= MINUTES_UP_TO else 3600
        self.ask("throughput", traffic.throughput(self.log, seconds=self.table_step))
        self.chart = self._coarser() if self.step >= self.table_step else self._finer()
        self.ask("publish_latency", traffic.publish_latency(self.log))
        self.latency_over_time = traffic.publish_latency(self.log, seconds=self.step).toArrow().to_pylist()
        self.ask("hours", traffic.hours(self.log))
        self._growth()
        self._skew()
        groups = tables.groups_frame(self.spark, self.groups)
        self.ask("recording", deliveries.recording(groups, self.events, self.rollups))
        ended = self.events if self.until is None else self.events.where(f.col("settled_at") < f.lit(self.until))
        self.ask("settle_latency", deliveries.settle_latency(self.log, self.events))
        self.ask("handler_time", deliveries.handling(ended))
        self.ask("settle_latency_bounds", deliveries.settle_bounds(self.rollups))
        self.ask("failures", deliveries.failures(ended).limit(MOST_ROWS))
        self.ask("dead_letters", deliveries.dead_letters(self.log).limit(MOST_ROWS))
        self.ask("subscribers", deliveries.consumers(ended).limit(MOST_ROWS))
        self._lag(groups, begin)

    def _span(self) -> tuple[datetime.datetime | None, datetime.datetime | None]:
        known = self.rows("topics")
        first = min((row["first_at"] for row in known if row["first_at"]), default=None)
        last = max((row["last_at"] for row in known if row["last_at"]), default=None)
        return first, last

    def _finer(self) -> list[Row]:
        found: list[Row] = traffic.throughput(self.log, seconds=self.step).toArrow().to_pylist()
        return found

    def _coarser(self) -> list[Row]:
        sums: dict[tuple[datetime.datetime, str], Row] = {}
        for row in self.rows("throughput"):
            begin = int(row["at"].timestamp()) // self.step * self.step
            at = datetime.datetime.fromtimestamp(begin, datetime.timezone.utc)
            one = sums.setdefault((at, row["topic"]), {"at": at, "topic": row["topic"], "messages": 0, "bytes": 0})
            one["messages"] += row["messages"]
            one["bytes"] += row["bytes"]
        return [sums[key] for key in sorted(sums)]

    def _growth(self) -> None:
        by_day = traffic.days(self.log)
        self.ask("days", by_day)
        found = sorted({row["day"] for row in self.rows("days")})
        # The first and the last day may be incomplete.
        if len(found) and (found[-1] - found[0]).days >= 2:
            day = datetime.timedelta(days=1)
            line = growth.trend(by_day, first=found[0] + day, last=found[-1] - day)
            (self.trend,) = line.toArrow().to_pylist()

    def _skew(self) -> None:
        keys = skew.partitions(self.log)
        with kept(keys):
            self.ask("skew", skew.skew(keys))
            self.ask("top_keys", skew.top_keys(keys, TOP_KEYS))
            self.ask("concentration", skew.concentration(keys))

    def _lag(self, groups: DataFrame, begin: datetime.datetime | None) -> None:
        """Compute lag from recorded deliveries if all are recorded, else from rollups if the period ends now."""
        from pyspark.sql import functions as f

        counted = {
            (row["consumer_group"], row["topic"]): row["acks_counted"] is not None for row in self.rows("recording")
        }
        for row in self.rows("recording"):
            ref = (row["consumer_group"], row["topic"])
            reaches = self.until is None or self.until >= self.now
            self.lag_source[ref] = (
                "events" if row["recorded"] == "all" else "rollups" if reaches and counted[ref] else "none"
            )

        def of(source: str) -> DataFrame:
            wanted = [ref for ref, found in self.lag_source.items() if found == source]
            chosen = self.spark.createDataFrame(wanted, "consumer_group STRING, topic STRING")
            return groups.join(f.broadcast(chosen), ["consumer_group", "topic"])

        _, end = self._span()
        length = ((end or self.now) - begin).total_seconds() if begin else 0.0
        self.lag_step = step_for(length)
        recent = begin is not None and (self.now - begin).total_seconds() <= ROLLUP_MINUTES_KEPT
        sources = set(self.lag_source.values())
        parts = []
        if "rollups" in sources:
            parts.append(lag.lag_by_rollups(self.log, self.rollups, of("rollups"), seconds=60 if recent else 3600))
        if "events" in sources or not parts:
            parts.append(lag.lag(self.log, self.events, of("events"), seconds=self.lag_step))
        found = parts[0] if len(parts) == 1 else parts[0].unionByName(parts[1])
        self.ask("lag", found.orderBy("topic", "consumer_group", "at"))
