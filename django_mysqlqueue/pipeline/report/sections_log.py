"""The parts of a report that the log alone tells: traffic, the way into the log, hours, skew, growth."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

from django_mysqlqueue.pipeline.analytics import growth
from django_mysqlqueue.pipeline.report import charts, words
from django_mysqlqueue.pipeline.report.model import Column, Picture, Section, Table
from django_mysqlqueue.pipeline.report.queries import Facts, Row

SERIES = 5
"""Topics or groups that a picture tells apart; the others are one."""
OTHERS = "all others"
PERCENTILE_COLUMNS = (
    Column("p50_ms", "half within", "ms"),
    Column("p90_ms", "90 % within", "ms"),
    Column("p99_ms", "99 % within", "ms"),
    Column("max_ms", "longest", "ms"),
)


def largest(names: Sequence[str]) -> dict[str, str]:
    """Each name's series: itself, or ``OTHERS`` behind the first few."""
    kept = len(names) if len(names) <= SERIES + 1 else SERIES
    return {name: name if place < kept else OTHERS for place, name in enumerate(names)}


def traffic(facts: Facts) -> Section:
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
            f"{words.counted(facts.messages, 'message')} of {words.counted(len(topics), 'topic')} took their place in "
            f"the log; {words.name(top['topic'])} is the largest topic, with "
            f"{words.share(top['messages'] / facts.messages)}."
        )
        busiest = f"The busiest {step} began at {words.moment(best)} UTC"
        says.append(f"{busiest} and brought {words.counted(totals[best], 'message')}{_rate(totals[best], facts.step)}.")
        text = f"Bars of messages per {step}, stacked by topic. {says[-1]}"
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
    return Section(
        "traffic", "How much came", says, pictures, [Table("topics", "By topic", columns, topics), by_minute]
    )


def _rate(messages: float, seconds: float) -> str:
    if seconds == 1:
        return ""
    value = messages / seconds
    if value >= 1:
        return f" ({words.number(float(value))} a second)"
    return f" ({words.number(float(value * 60))} a minute)" if seconds != 60 else ""


def into_the_log(facts: Facts) -> Section:
    rows = facts.rows("publish_latency")
    says: list[str] = []
    pictures: list[Picture] = []
    if rows:
        total = sum(row["messages"] for row in rows)
        worst = max(rows, key=lambda row: (row["p99_ms"], row["topic"]))
        says.append(
            f"Half of the messages of {words.name(rows[0]['topic'] if len(rows) == 1 else worst['topic'])} were in the "
            f"log {words.duration(worst['p50_ms'])} after they had been written, 99 % after "
            f"{words.duration(worst['p99_ms'])}, the last one after {words.duration(worst['max_ms'])}"
            + ("." if len(rows) == 1 else f"; of {len(rows)} topics it is the slowest.")
        )
        says.append(
            "This is the rest of the publisher's transaction, the wait for the sequencer, and, of messages scheduled "
            "for later, their delay: the log does not keep when a message was due."
        )
        step = words.stretch(facts.step)
        values = [
            (row["at"], series, row[name])
            for row in facts.latency_over_time
            for name, series in (("p50_ms", "half within"), ("p99_ms", "99 % within"))
        ]
        if values:
            text = f"Lines of the 50th and 99th percentile per {step}, of {total:,} messages. {says[0]}"
            spec = charts.lines(values, ["half within", "99 % within"], written=words.duration, logarithmic=True)
            pictures.append(charts.picture("From the publisher's insert to the place in the log", text, spec))
    columns = (Column("topic", "topic", "text"), Column("messages", "messages"), *PERCENTILE_COLUMNS)
    return Section(
        "into-the-log",
        "How long it took into the log",
        says,
        pictures,
        [Table("publish_latency", "By topic", columns, rows)],
    )


def hours(facts: Facts) -> Section:
    rows = facts.rows("hours")
    says: list[str] = []
    pictures: list[Picture] = []
    if rows:
        means = {(row["weekday"], row["hour"]): row["messages"] / row["days"] for row in rows}
        day, hour = max(means, key=lambda key: (means[key], -key[0], -key[1]))
        says.append(
            f"The busiest hour of the week is {charts.DAYS[day - 1]}, {hour:02}:00 to {(hour + 1) % 24:02}:00 UTC, "
            f"with {words.counted(round(means[day, hour]), 'message')} on average. "
            f"{words.counted(len(rows), 'hour')} of the week's 168 had messages."
        )
        first, last = facts.first_at, facts.last_at
        if first and last and (last - first).days < 7:
            says.append("The messages span less than a week, so this is no habit yet.")
        text = f"A grid of weekdays and hours in UTC, the darker the busier. {says[0]}"
        spec = charts.heat(means, lambda value: f"{words.number(round(value))} messages on average")
        pictures.append(charts.picture("Messages by weekday and hour (mean of the days that had any)", text, spec))
    columns = (
        Column("weekday", "weekday (1 is Monday)"),
        Column("hour", "hour (UTC)"),
        Column("messages", "messages"),
        Column("days", "days"),
    )
    ordered = sorted(rows, key=lambda row: (-row["messages"], row["weekday"], row["hour"]))
    return Section(
        "hours",
        "When it comes",
        says,
        pictures,
        [Table("hours", "By hour of the week", columns, ordered, "busiest first")],
    )


def skew(facts: Facts) -> Section:
    rows, keys = facts.rows("skew"), facts.rows("top_keys")
    says: list[str] = []
    pictures: list[Picture] = []
    if rows:
        top = rows[0]
        busiest = next(row for row in keys if row["topic"] == top["topic"])
        says.append(_skewness(top, busiest))
        says.append(
            "A partition's messages are handled one after another, so the busiest key is the longest line of an "
            "ordered group. Gini is 0 where all keys are alike and close to 1 where one has nearly everything."
        )
        several = [row["topic"] for row in rows if row["keys"] > 1][:SERIES]
        points = [
            (row["keys_share"], row["topic"], row["messages_share"])
            for row in facts.rows("concentration")
            if row["topic"] in several
        ]
        if several:
            starts = [(0.0, topic, 0.0) for topic in several]
            text = f"Share of messages against share of keys, the busiest first; the dashed line is evenness. {says[0]}"
            spec = charts.curves(starts + points, several, "share of the keys", "share of the messages")
            pictures.append(charts.picture("How many keys carry how much", text, spec))
        bars = [
            (row["partition_key"] or "(empty)", top["topic"], row["messages"], _key_tip(row))
            for row in keys
            if row["topic"] == top["topic"]
        ][:12]
        text = f"Bars of messages by key. {says[0]}"
        spec = charts.bars(bars, [top["topic"]])
        pictures.append(charts.picture(f"The busiest keys of {words.name(top['topic'], 40)}", text, spec))
    columns = (
        Column("topic", "topic", "text"),
        Column("keys", "keys"),
        Column("messages", "messages"),
        Column("gini", "Gini"),
        Column("top_share", "busiest key", "share"),
        Column("top_1_percent", "busiest 1 % of keys", "share"),
        Column("top_10_percent", "busiest 10 %", "share"),
    )
    of_keys = (
        Column("topic", "topic", "text"),
        Column("place", "place"),
        Column("partition_key", "key", "text"),
        Column("messages", "messages"),
        Column("bytes", "payload", "bytes"),
        Column("share", "of its topic", "share"),
    )
    return Section(
        "skew",
        "How evenly it is spread over keys",
        says,
        pictures,
        [Table("skew", "By topic", columns, rows), Table("top_keys", "The busiest keys", of_keys, keys, "by topic")],
    )


def _skewness(top: Row, busiest: Row) -> str:
    if top["keys"] == 1:
        return f"All messages of {words.name(top['topic'])} have one key, so an ordered group handles them one by one."
    return (
        f"{words.name(top['topic'])} has {words.counted(top['keys'], 'key')}; the busiest, "
        f"{words.name(busiest['partition_key'])}, has {words.share(top['top_share'])} of the messages, the busiest "
        f"tenth {words.share(top['top_10_percent'])} (Gini {top['gini']:.2f})."
    )


def _key_tip(row: Row) -> str:
    return (
        f"{words.shown(row['partition_key'])}: {words.counted(row['messages'], 'message')}, {words.share(row['share'])}"
    )


def growing(facts: Facts) -> Section:
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
            f"On {words.counted(trend['days'], 'whole day')} {words.number(float(round(trend['messages_per_day'])))} "
            f"messages and {words.size(trend['bytes_per_day'])} of payload came a day, on average."
        )
        if trend["slope"] is None:
            unknown.append(
                f"{words.counted(trend['days'], 'whole day')} are too few to tell growth from chance; "
                f"{growth.LEAST_DAYS} are the least."
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
            "The messages lie within three days, of which the first and the last are there in part: a day's amount, "
            "growth and a forecast cannot be known. Make the report of a longer period (with the "
            "archive, if GC has been there)."
        )
    pictures = []
    if len(by_day) > 1:
        text = "Bars of messages by day (UTC). " + (says[0] if says else f"{words.counted(len(by_day), 'day')}.")
        spec = charts.days(sorted(by_day.items()), line)
        dashed = "; dashed: the line through the whole days" if line else ""
        pictures.append(charts.picture(f"Messages by day{dashed}", text, spec))
    columns = (
        Column("day", "day (UTC)", "day"),
        Column("topic", "topic", "text"),
        Column("messages", "messages"),
        Column("bytes", "payload", "bytes"),
    )
    tables.insert(0, Table("days", "By day and topic", columns, rows, "oldest first"))
    return Section("growth", "How it grows, and what GC keeps", says, pictures, tables, unknown)


def _slope(trend: Row) -> str:
    slope, error = trend["slope"], trend["slope_error"]
    range_ = f"{words.number(float(slope))} ± {words.number(float(2 * error))} messages (two standard errors)"
    if abs(slope) <= 2 * error:
        return f"Growth cannot be told from chance: from day to day the line changes by {range_}."
    word = "more" if slope > 0 else "fewer"
    return f"It brings {word} from day to day: the line changes by {range_}."


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
        Column("expected", "reached", "day"),
        Column("earliest", "at the earliest", "day"),
        Column("latest", "at the latest", "day"),
    )
    rows = [
        {"messages": one.messages, "expected": one.expected, "earliest": one.earliest, "latest": one.latest}
        for one in found
    ]
    title = "If nothing were removed from what this report counts (a dash: not within ten years)"
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
            f"At this pace, of {words.counted(whole, 'whole day')}, GC leaves about "
            f"{words.number(float(round(kept)))} messages in the log: the retention of each topic times what comes in "
            "it, as long as every group keeps up."
        )
    ]
    forever = [words.name(topic) for topic, seconds in sorted(facts.retention.items()) if seconds is None]
    if forever:
        says.append(f"Nothing is ever removed from {words.enumeration(forever)}.")
    return says
