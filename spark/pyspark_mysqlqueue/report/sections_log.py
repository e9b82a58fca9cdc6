"""The sections of a report that need only the log: throughput, publish latency, hours, distribution, growth."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from pyspark_mysqlqueue.analytics import growth
from pyspark_mysqlqueue.report import charts, words
from pyspark_mysqlqueue.report.model import Column, Picture, Section, Table
from pyspark_mysqlqueue.report.queries import Facts, Row
from pyspark_mysqlqueue.shared.keys import lane_of

SERIES = 5
"""Maximum number of topics or groups in a chart. Other topics are summed up."""
OTHERS = "all others"
PERCENTILE_COLUMNS = (
    Column("p50_ms", "p50", "ms"),
    Column("p90_ms", "p90", "ms"),
    Column("p99_ms", "p99", "ms"),
    Column("max_ms", "max", "ms"),
)


def largest(names: Sequence[str]) -> dict[str, str]:
    """Return the series of each name: itself, or ``OTHERS`` after the first few."""
    kept = len(names) if len(names) <= SERIES + 1 else SERIES
    return {name: name if place < kept else OTHERS for place, name in enumerate(names)}


def traffic(facts: Facts) -> Section:
    """Return the section about throughput."""
    topics = facts.rows("topics")
    step = words.stretch(facts.step)
    series = largest([row["topic"] for row in topics])
    names = list(dict.fromkeys(series.values()))
    sums: dict[tuple[datetime.datetime, str], float] = {}
    totals: dict[datetime.datetime, int] = {}
    for row in facts.chart:
        key = (row["at"], series[row["topic"]])
        sums[key] = sums.get(key, 0) + row["messages"]
        totals[row["at"]] = totals.get(row["at"], 0) + row["messages"]
    says, pictures = [], []
    if totals:
        best = max(totals, key=lambda at: (totals[at], -at.timestamp()))
        top = topics[0]
        says.append(
            f"{words.counted(facts.messages, 'message')} {'was' if facts.messages == 1 else 'were'} published to "
            f"{words.counted(len(topics), 'topic')}. The largest topic is {words.name(top['topic'])}, with "
            f"{words.share(top['messages'] / facts.messages)} of the messages."
        )
        busiest = f"The busiest {step} began at {words.moment(best)} UTC"
        says.append(f"{busiest}, with {words.counted(totals[best], 'message')}{_rate(totals[best], facts.step)}.")
        text = f"A bar chart of messages per {step}, stacked by topic. {says[-1]}"
        spec = charts.stacked(
            [(at, name, value) for (at, name), value in sums.items()], names, seconds=facts.step, unit="messages"
        )
        pictures.append(charts.picture(f"Messages per {step}, by topic", text, spec))
    columns = (
        Column("topic", "topic", "text"),
        Column("messages", "messages"),
        Column("bytes", "payload", "bytes"),
        Column("keys", "partition keys"),
        Column("dead_letters", "dead letters"),
        Column("first_at", "first (UTC)", "time"),
        Column("last_at", "last (UTC)", "time"),
    )
    table_step = words.stretch(facts.table_step)
    by_minute = Table(
        "throughput",
        f"By {table_step} and topic",
        (
            Column("at", f"{table_step} (UTC)", "time"),
            Column("topic", "topic", "text"),
            Column("messages", "messages"),
            Column("bytes", "payload", "bytes"),
        ),
        sorted(facts.rows("throughput"), key=lambda row: (-row["messages"], row["at"], row["topic"])),
        "busiest first",
    )
    return Section("traffic", "Throughput", says, pictures, [Table("topics", "By topic", columns, topics), by_minute])


def _rate(messages: float, seconds: float) -> str:
    if seconds == 1:
        return ""
    value = messages / seconds
    if value >= 1:
        return f" ({words.number(float(value))} per second)"
    return f" ({words.number(float(value * 60))} per minute)" if seconds != 60 else ""


def into_the_log(facts: Facts) -> Section:
    """Return the section about the latency from the publisher's insert to the log."""
    rows = facts.rows("publish_latency")
    says: list[str] = []
    pictures: list[Picture] = []
    if rows:
        total = sum(row["messages"] for row in rows)
        worst = max(rows, key=lambda row: (row["p99_ms"], row["topic"]))
        says.append(
            f"Half of the messages of {words.name(rows[0]['topic'] if len(rows) == 1 else worst['topic'])} entered the "
            f"log within {words.duration(worst['p50_ms'])} of their insert, 99 % within "
            f"{words.duration(worst['p99_ms'])}, and all within {words.duration(worst['max_ms'])}."
            + ("" if len(rows) == 1 else f" It is the slowest of {len(rows)} topics.")
        )
        says.append(
            "Publish latency includes the rest of the publisher's transaction, the wait for the sequencer, and the "
            "delay of scheduled messages, because the log does not contain the time at which a message was due."
        )
        step = words.stretch(facts.step)
        values = [
            (row["at"], series, row[name])
            for row in facts.latency_over_time
            for name, series in (("p50_ms", "p50"), ("p99_ms", "p99"))
        ]
        if values:
            text = f"A line chart of the 50th and 99th percentile per {step}, of {total:,} messages. {says[0]}"
            spec = charts.lines(values, ["p50", "p99"], written=words.duration, logarithmic=True)
            pictures.append(charts.picture("Time from the publisher's insert to entering the log", text, spec))
    columns = (Column("topic", "topic", "text"), Column("messages", "messages"), *PERCENTILE_COLUMNS)
    return Section(
        "into-the-log",
        "Publish latency",
        says,
        pictures,
        [Table("publish_latency", "By topic", columns, rows)],
    )


def hours(facts: Facts) -> Section:
    """Return the section about the hours of the week."""
    rows = facts.rows("hours")
    says: list[str] = []
    pictures: list[Picture] = []
    if rows:
        means = {(row["weekday"], row["hour"]): row["messages"] / row["days"] for row in rows}
        day, hour = max(means, key=lambda key: (means[key], -key[0], -key[1]))
        says.append(
            f"The busiest hour of the week is {charts.DAYS[day - 1]}, {hour:02}:00 to {(hour + 1) % 24:02}:00 UTC, "
            f"with {words.counted(round(means[day, hour]), 'message')} on average. "
            f"{len(rows)} of the 168 hours of a week had messages."
        )
        first, last = facts.first_at, facts.last_at
        if first and last and (last - first).days < 7:
            says.append("The messages span less than a week, which is too short to show a weekly pattern.")
        text = f"A grid of weekdays and hours in UTC. Stronger colors mean more messages. {says[0]}"
        spec = charts.heat(means, lambda value: f"{words.number(round(value))} messages on average")
        pictures.append(charts.picture("Messages by weekday and hour (average of days with messages)", text, spec))
    columns = (
        Column("weekday", "weekday (1 is Monday)"),
        Column("hour", "hour (UTC)"),
        Column("messages", "messages"),
        Column("days", "days"),
    )
    ordered = sorted(rows, key=lambda row: (-row["messages"], row["weekday"], row["hour"]))
    return Section(
        "hours",
        "Hours of the week",
        says,
        pictures,
        [Table("hours", "By hour of the week", columns, ordered, "busiest first")],
    )


def skew(facts: Facts) -> Section:
    """Return the section about the distribution of messages over keys."""
    rows = facts.rows("skew")
    keys = [{**row, "partition_key": _key(row["partition_key"])} for row in facts.rows("top_keys")]
    says: list[str] = []
    pictures: list[Picture] = []
    if rows:
        top = rows[0]
        busiest = next(row for row in keys if row["topic"] == top["topic"])
        says.append(_skewness(top, busiest))
        says.append(
            "In ordered mode, the messages of a partition are handled one at a time, so the largest key limits the "
            "speed of a group. The Gini coefficient is 0 if all keys have the same number of messages, and near 1 if "
            "one key has almost all."
        )
        several = [row["topic"] for row in rows if row["keys"] > 1][:SERIES]
        points = [
            (row["keys_share"], row["topic"], row["messages_share"])
            for row in facts.rows("concentration")
            if row["topic"] in several
        ]
        if several:
            starts = [(0.0, topic, 0.0) for topic in several]
            text = (
                "The cumulative share of messages by share of keys, largest keys first. The dashed line is an even "
                f"distribution. {says[0]}"
            )
            spec = charts.curves(starts + points, several, "share of the keys", "share of the messages")
            pictures.append(charts.picture("Share of the messages by share of the keys", text, spec))
        bars = [
            (row["partition_key"] or "(empty)", top["topic"], row["messages"], _key_tip(row))
            for row in keys
            if row["topic"] == top["topic"]
        ][:12]
        text = f"A bar chart of messages by key. {says[0]}"
        spec = charts.bars(bars, [top["topic"]])
        pictures.append(charts.picture(f"Largest keys of {words.name(top['topic'], 40)}", text, spec))
    columns = (
        Column("topic", "topic", "text"),
        Column("keys", "keys"),
        Column("messages", "messages"),
        Column("gini", "Gini"),
        Column("top_share", "largest key", "share"),
        Column("top_1_percent", "largest 1 % of keys", "share"),
        Column("top_10_percent", "largest 10 % of keys", "share"),
    )
    of_keys = (
        Column("topic", "topic", "text"),
        Column("place", "rank"),
        Column("partition_key", "key", "text"),
        Column("messages", "messages"),
        Column("bytes", "payload", "bytes"),
        Column("share", "share of topic", "share"),
    )
    return Section(
        "skew",
        "Distribution over keys",
        says,
        pictures,
        [Table("skew", "By topic", columns, rows), Table("top_keys", "Largest keys", of_keys, keys, "by topic")],
    )


def _skewness(top: Row, busiest: Row) -> str:
    if top["keys"] == 1:
        return (
            f"All messages of {words.name(top['topic'])} have the same key: ordered groups handle them one at a time."
        )
    return (
        f"{words.name(top['topic'])} has {words.counted(top['keys'], 'key')}. The largest, "
        f"{words.name(busiest['partition_key'])}, has {words.share(top['top_share'])} of the messages; the largest "
        f"10 % of the keys have {words.share(top['top_10_percent'])} (Gini coefficient {top['gini']:.2f})."
    )


def _key(partition: str) -> str:
    """Return the partition for priority 0, after the priority if there is one: ``priority +10: ada``."""
    priority, key = lane_of(partition)
    return f"priority {priority:+}: {key or '(empty)'}" if priority else key


def _key_tip(row: Row) -> str:
    return (
        f"{words.shown(row['partition_key'])}: {words.counted(row['messages'], 'message')}, {words.share(row['share'])}"
    )


def growing(facts: Facts) -> Section:
    """Return the section about growth and retention."""
    rows, trend = facts.rows("days"), facts.trend
    by_day: dict[datetime.date, int] = {}
    for row in rows:
        by_day[row["day"]] = by_day.get(row["day"], 0) + row["messages"]
    says: list[str] = []
    unknown: list[str] = []
    tables: list[Table] = []
    line: list[tuple[datetime.date, float]] = []
    if trend is not None:
        says.append(
            f"On average over {words.counted(trend['days'], 'whole day')}, "
            f"{words.number(float(round(trend['messages_per_day'])))} messages and "
            f"{words.size(trend['bytes_per_day'])} of payload were published per day."
        )
        if trend["slope"] is None:
            unknown.append(
                f"Growth cannot be estimated from {words.counted(trend['days'], 'whole day')}; at least "
                f"{growth.LEAST_DAYS} are needed."
            )
        else:
            says.append(_slope(trend))
            day = datetime.timedelta(days=1)
            first, last = min(by_day) + day, max(by_day) - day
            count = trend["days"] - 1
            line = [(first, trend["at_end"] - trend["slope"] * count), (last, trend["at_end"])]
        tables.append(_milestones(facts, trend))
        says += _retention(facts, trend)
    else:
        unknown.append(
            "The messages cover no whole day (UTC): the first and the last day may be incomplete. Averages per day, "
            "growth and a forecast need a longer period (with an archive, if GC has removed older messages)."
        )
    pictures = []
    if len(by_day) > 1:
        text = "A bar chart of messages by day (UTC). " + (says[0] if says else f"{words.counted(len(by_day), 'day')}.")
        spec = charts.days(sorted(by_day.items()), line)
        dashed = " (dashed: trend over the whole days)" if line else ""
        pictures.append(charts.picture(f"Messages by day{dashed}", text, spec))
    columns = (
        Column("day", "day (UTC)", "day"),
        Column("topic", "topic", "text"),
        Column("messages", "messages"),
        Column("bytes", "payload", "bytes"),
    )
    tables.insert(0, Table("days", "By day and topic", columns, rows, "oldest first"))
    return Section("growth", "Growth and retention", says, pictures, tables, unknown)


def _slope(trend: Row) -> str:
    slope, error = trend["slope"], trend["slope_error"]
    each = f"± {words.number(float(2 * error))} from one day to the next (two standard errors)"
    if abs(slope) <= 2 * error:
        change = f"{words.number(float(slope))} {each}"
        return f"Growth is not significant: the number of messages per day changes by {change}."
    verb = "grows" if slope > 0 else "falls"
    return f"The number of messages per day {verb} by {words.number(float(abs(slope)))} {each}."


def _milestones(facts: Facts, trend: Row) -> Table:
    slope, error = trend["slope"], trend["slope_error"]
    real = slope is not None and abs(slope) > 2 * error
    found = growth.milestones(
        facts.messages,
        facts.now.date(),
        per_day=trend["at_end"] if real else trend["messages_per_day"],
        slope=slope if real else None,
        error=error,
    )
    columns = (
        Column("messages", "messages"),
        Column("expected", "expected", "day"),
        Column("earliest", "earliest", "day"),
        Column("latest", "latest", "day"),
    )
    rows = [
        {"messages": one.messages, "expected": one.expected, "earliest": one.earliest, "latest": one.latest}
        for one in found
    ]
    title = "Forecast: when the messages of this report reach a number, without GC (a dash: not within ten years)"
    return Table("growth_forecast", title, columns, rows)


def _retention(facts: Facts, trend: Row) -> list[str]:
    if facts.retention is None:
        return []
    topics = facts.rows("topics")
    whole = max(1, trend["days"])
    mean = {row["topic"]: row["messages"] / facts.messages * trend["messages_per_day"] for row in topics}
    kept = sum(mean[topic] * seconds / 86_400 for topic, seconds in facts.retention.items() if seconds is not None)
    says = [
        (
            f"At the average rate of {words.counted(whole, 'whole day')}, GC keeps about "
            f"{words.number(float(round(kept)))} messages in the log: the retention of each topic multiplied by its "
            "rate, provided that every group keeps up."
        )
    ]
    forever = [words.name(topic) for topic, seconds in sorted(facts.retention.items()) if seconds is None]
    if forever:
        says.append(f"GC never removes messages of {words.enumeration(forever)}.")
    return says
