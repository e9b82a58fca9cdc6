"""The page: its sentences, charts and tables."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pyspark_mysqlqueue.report import charts, words
from pyspark_mysqlqueue.report.queries import LEAST_DAYS, Facts, Row
from pyspark_mysqlqueue.shared.keys import lane_of

ROWS_SHOWN = 50
"""Maximum number of rows of a table on the page. The files have all rows."""
OPEN_ROWS = 12
"""Maximum number of rows of a table that is not collapsed."""
SERIES = 5
"""Maximum number of topics in a chart. Other topics are summed up."""
OTHERS = "all others"
COLUMNS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "topic": ("topic", words.shown),
    "partition_key": ("key", words.shown),
    "first_at": ("first (UTC)", words.moment),
    "last_at": ("last (UTC)", words.moment),
    "day": ("day (UTC)", str),
    "weekday": ("weekday", lambda number: charts.DAYS[number - 1]),
    "expected": ("expected", str),
    "earliest": ("earliest", str),
    "latest": ("latest", str),
    "bytes": ("payload", words.size),
    "keys": ("partition keys", words.number),
    "hour": ("hour (UTC)", words.number),
    "gini": ("Gini", words.number),
    "top_share": ("largest key", words.share),
    "top_1_percent": ("largest 1 % of keys", words.share),
    "top_10_percent": ("largest 10 % of keys", words.share),
    "place": ("rank", words.number),
    "share": ("share of topic", words.share),
    **{f"{name}_bytes": (name, words.size) for name in ("mean", "p50", "p90", "p99", "max")},
}
"""The heading of a column, and how its values are written; otherwise, its name and a number."""
TEXTS = tuple(COLUMNS)[:9]
"""The columns that are aligned to the left."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a section, whose files have all of its rows."""

    name: str
    title: str
    rows: Sequence[Row]

    @property
    def columns(self) -> list[tuple[str, bool]]:
        """The headings, and whether a column is aligned to the left."""
        return [(COLUMNS.get(name, (name,))[0], name in TEXTS) for name in self.rows[0]]

    @property
    def cells(self) -> list[list[str]]:
        """The rows on the page, as text."""

        def text(name: str, value: Any) -> str:
            return words.NOTHING if value is None else COLUMNS.get(name, (name, words.number))[1](value)

        return [[text(*item) for item in row.items()] for row in self.rows[:ROWS_SHOWN]]

    @property
    def is_folded(self) -> bool:
        """Whether the table is collapsed."""
        return len(self.rows) > OPEN_ROWS


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the report, with one chart."""

    id: str
    title: str
    says: Sequence[str]
    """Sentences about the data."""
    caption: str
    chart: Markup
    tables: Sequence[Table]
    unknown: str = ""
    """A sentence about missing data."""


def render(facts: Facts) -> str:
    """Return the page as HTML. All texts are escaped."""
    environment = Environment(
        loader=PackageLoader("pyspark_mysqlqueue.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    topics, period = facts.rows("topics"), "No message was published in this period."
    if topics:
        first = facts.since or min(row["first_at"] for row in topics)
        last = facts.until or max(row["last_at"] for row in topics)
        period = f"{words.moment(first)} to {words.moment(last)} UTC"
    return environment.get_template("page.html").render(
        period=period,
        headlines=_headlines(facts, topics),
        about=_about(facts),
        sections=sections(facts),
        made=f"{words.moment(facts.now)} UTC",
        rows_shown=ROWS_SHOWN,
    )


def sections(facts: Facts) -> list[Section]:
    """Return the sections of the page."""
    return [make(facts) for make in (_traffic, _hours, _skew, _sizes)] if facts.messages else []


def _headlines(facts: Facts, topics: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Return the numbers at the top: label, value and note."""
    messages, size = facts.messages, sum(row["bytes"] for row in topics)
    found = [("messages", words.number(messages), f"in {words.counted(len(topics), 'topic')}")]
    if messages:
        totals: Counter[datetime.date] = Counter()
        for row in facts.rows("days"):
            totals[row["day"]] += row["messages"]
        ((best, count),) = totals.most_common(1)
        found.append(("payload", words.size(size), f"{words.size(size / messages)} per message"))
        found.append(("busiest day", words.number(count), f"messages on {best}"))
        found.append(("keys", words.number(sum(row["keys"] for row in topics)), "partition keys, of all topics"))
    return found


def _about(facts: Facts) -> list[str]:
    said = ["The report covers the messages that are still in the live log."]
    if facts.has_archive:
        said = ["The report covers the archive and the messages of the live log after it."]
    if facts.topics is not None:
        noun = "topic" if len(facts.topics) == 1 else "topics"
        said.append(f"It is limited to the {noun} {words.enumeration([words.name(one) for one in facts.topics])}.")
    said += [
        f"GC has removed messages of {words.name(topic)} up to offset {offset:,}. They are missing from this report. "
        "Use an archive to keep such messages."
        for topic, offset in facts.missing[:5]
    ]
    if len(facts.missing) > 5:
        said.append(f"Messages of {words.counted(len(facts.missing) - 5, 'more topic')} are missing too.")
    return [*said, "Times are from the database's clock, in UTC. Sizes are those of payloads, before compression."]


def _traffic(facts: Facts) -> Section:
    topics, days, (trend,) = facts.rows("topics"), facts.rows("days"), facts.rows("trend")
    kept = [row["topic"] for row in topics[: SERIES if len(topics) > SERIES + 1 else SERIES + 1]]
    first, last = days[0]["day"], days[-1]["day"]
    step = charts.step_for((last - first).days + 1)
    parts: dict[datetime.date, dict[str, int]] = {}
    for row in days:
        bar = parts.setdefault(first + datetime.timedelta(days=(row["day"] - first).days // step * step), {})
        name = row["topic"] if row["topic"] in kept else OTHERS
        bar[name] = bar.get(name, 0) + row["messages"]
    says = (
        f"{words.counted(facts.messages, 'message')} {'was' if facts.messages == 1 else 'were'} published to "
        f"{words.counted(len(topics), 'topic')}. The largest topic is {words.name(topics[0]['topic'])}, with "
        f"{words.share(topics[0]['messages'] / facts.messages)} of the messages."
    )
    caption = "Messages per day (UTC), by topic" if step == 1 else f"Messages per {step} days (UTC), by topic"
    unknown, line, growth = "", [], []
    if not trend["days"]:
        unknown = (
            "The messages cover no whole day (UTC): the first and the last day may be incomplete. Averages per day, "
            "growth and a forecast need a longer period (with an archive, if GC has removed older messages)."
        )
    else:
        whole = words.counted(trend["days"], "whole day")
        growth.append(
            f"On average over {whole}, {words.number(round(trend['messages_per_day']))} messages and "
            f"{words.size(trend['bytes_per_day'])} of payload were published per day."
        )
        if trend["slope"] is None:
            unknown = f"Growth cannot be estimated from {whole}; at least {LEAST_DAYS} are needed."
        else:
            growth.append(_slope(trend))
            day, start = datetime.timedelta(days=1), trend["at_end"] - trend["slope"] * (trend["days"] - 1)
            line = [(first + day, start * step), (last - day, trend["at_end"] * step)]
            caption += " (dashed: trend of the whole days)"
        growth += _retention(facts, trend)
    chart = charts.bars(parts, [*kept, OTHERS][: len(topics)], f"{caption}. {says}", step=step, line=line)
    forecast = "Forecast: when the messages of this report reach a number, without GC (a dash: not within ten years)"
    tables = [
        Table("topics", "By topic", topics),
        Table("growth_forecast", forecast, facts.rows("growth_forecast")),
        Table("days", "By day and topic", days),
    ]
    return Section("traffic", "Messages by day, and growth", [says, *growth], caption, chart, tables, unknown)


def _slope(trend: Row) -> str:
    each = f"± {words.number(float(2 * trend['slope_error']))} from one day to the next (two standard errors)"
    change = words.number(float(abs(trend["slope"])))
    if not trend["is_significant"]:
        sign = "-" if trend["slope"] < 0 else ""
        return f"Growth is not significant: the number of messages per day changes by {sign}{change} {each}."
    return f"The number of messages per day {'grows' if trend['slope'] > 0 else 'falls'} by {change} {each}."


def _retention(facts: Facts, trend: Row) -> list[str]:
    if facts.retention is None:
        return []
    daily = {row["topic"]: row["messages"] / facts.messages * trend["messages_per_day"] for row in facts.rows("topics")}
    kept = sum(daily[topic] * seconds / 86_400 for topic, seconds in facts.retention.items() if seconds is not None)
    says = (
        f"At the average rate, GC keeps about {words.number(round(kept))} messages in the log: the retention of each "
        "topic multiplied by its rate, provided that every group keeps up."
    )
    forever = [words.name(topic) for topic, seconds in sorted(facts.retention.items()) if seconds is None]
    return [says, f"GC never removes messages of {words.enumeration(forever)}."] if forever else [says]


def _hours(facts: Facts) -> Section:
    rows, topics = facts.rows("hours"), facts.rows("topics")
    means = {(row["weekday"], row["hour"]): row["messages"] / row["days"] for row in rows}
    day, hour = max(means, key=lambda key: (means[key], -key[0], -key[1]))
    says = (
        f"The busiest hour of the week is {charts.DAYS[day - 1]}, {hour:02}:00 to {(hour + 1) % 24:02}:00 UTC, with "
        f"{words.counted(round(means[day, hour]), 'message')} on average. {len(rows)} of the 168 hours of a week had "
        "messages."
    )
    if (max(row["last_at"] for row in topics) - min(row["first_at"] for row in topics)).days < 7:
        says += " The messages span less than a week, which is too short to show a weekly pattern."
    caption = "Messages by weekday and hour (average of days with messages)"
    table = Table("hours", "By hour of the week, busiest first", sorted(rows, key=lambda row: -row["messages"]))
    return Section("hours", "Hours of the week", [says], caption, charts.heat(means, f"{caption}. {says}"), [table])


def _skew(facts: Facts) -> Section:
    rows = facts.rows("skew")
    keys = [{**row, "partition_key": _key(row["partition_key"])} for row in facts.rows("top_keys")]
    top = rows[0]
    largest = [row for row in keys if row["topic"] == top["topic"]][:OPEN_ROWS]
    topic = words.name(top["topic"])
    says = f"All messages of {topic} have the same key: ordered groups handle them one at a time."
    if top["keys"] > 1:
        says = (
            f"{topic} has {top['keys']:,} keys. The largest, {words.name(largest[0]['partition_key'])}, has "
            f"{words.share(top['top_share'])} of the messages; the largest 10 % of the keys have "
            f"{words.share(top['top_10_percent'])} (Gini coefficient {top['gini']:.2f})."
        )
    more = (
        "In ordered mode, the messages of a partition are handled one at a time, so the largest key limits the speed "
        "of a group. The Gini coefficient is 0 if all keys have the same number of messages, and near 1 if one key "
        "has almost all."
    )
    bars = [
        (row["partition_key"] or "(empty)", row["messages"], f"{row['messages']:,} ({words.share(row['share'])})")
        for row in largest
    ]
    caption = f"Largest keys of {words.name(top['topic'], 40)}, in messages"
    tables = [Table("skew", "By topic", rows), Table("top_keys", "Largest keys", keys)]
    return Section("skew", "Distribution over keys", [says, more], caption, charts.rows(bars), tables)


def _key(partition: str) -> str:
    """Return the partition for priority 0, after the priority if there is one: ``priority +10: ada``."""
    priority, key = lane_of(partition)
    return f"priority {priority:+}: {key or '(empty)'}" if priority else key


def _sizes(facts: Facts) -> Section:
    rows, classes = facts.rows("sizes"), facts.rows("size_classes")
    half, most, largest = (words.size(rows[0][f"{name}_bytes"]) for name in ("p50", "p99", "max"))
    says = (
        f"Half of the payloads of {words.name(rows[0]['topic'])} have at most {half}, 99 % at most {most}; the largest "
        f"has {largest}."
    )
    total = sum(row["bytes"] for row in classes) or 1
    bars = [
        (
            f"up to {words.size(row['up_to_bytes'])}",
            row["messages"],
            f"{row['messages']:,} ({words.share(row['bytes'] / total)} of all bytes)",
        )
        for row in classes
    ]
    caption, table = "Messages by size of the payload, all topics", Table("sizes", "By topic", rows)
    return Section("sizes", "Payload sizes", [says], caption, charts.rows(bars), [table])
