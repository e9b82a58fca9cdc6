"""The parts of a report about consumer groups: what is recorded, latency, failures, lag, who does the work."""

from __future__ import annotations

import re

from django_mysqlqueue.pipeline.report import charts, words
from django_mysqlqueue.pipeline.report.model import Column, Picture, Section, Table
from django_mysqlqueue.pipeline.report.queries import MOST_ROWS, Facts, Row
from django_mysqlqueue.pipeline.report.sections_log import PERCENTILE_COLUMNS, SERIES

RECORD_ALL = (
    "MYSQLQUEUE['GROUPS'] = {group: {'RECORD_DELIVERIES': 'all'}} records each delivery, at the cost of a row for each."
)
MODULES = re.compile(r"^(?:\w+\.)+(?=\w+(?::|$))")
"""Before the name of an exception."""
GROUP = (Column("consumer_group", "group", "text"), Column("topic", "topic", "text"))
RECORDED = {
    "all": "every delivery",
    "some": "some deliveries",
    "failures": "failures",
    "nothing": "nothing",
    "idle": "nothing (and nothing was counted)",
}


def of(row: Row) -> str:
    """A group of a topic, as pictures call it."""
    return f"{row['consumer_group']} of {row['topic']}"


def named(facts: Facts, rows: list[Row]) -> str:
    return words.enumeration([facts.group_name(*_ref(row)) for row in rows])


def recording(facts: Facts) -> Section:
    rows = [{**row, "recorded": RECORDED[row["recorded"]]} for row in facts.rows("recording")]
    levels = facts.recorded
    says: list[str] = []
    unknown: list[str] = []
    if not rows:
        says.append("No consumer group is registered for these topics.")
    full = [row for row in facts.rows("recording") if row["recorded"] == "all"]
    less = [row for row in facts.concerned if row["recorded"] != "all"]
    if full:
        says.append(f"Of {named(facts, full)} every delivery is on record: what is said of it here is exact.")
    if less:
        unknown.append(
            f"Of {named(facts, less)} not every delivery is on record. When each message was settled, and by whom, "
            f"cannot be known there; the rollups' counts say some of it. {RECORD_ALL}"
        )
    if "some" in levels.values():
        unknown.append(
            "Where some deliveries are on record, the setting was changed, or the records have been outlived."
        )
    columns = (
        *GROUP,
        Column("recorded", "on record", "text"),
        Column("acks_recorded", "acks on record"),
        Column("acks_counted", "acks in the rollups"),
        Column("failures_recorded", "failures on record"),
        Column("failures_counted", "failures in the rollups"),
    )
    return Section(
        "recording",
        "What is on record of the groups",
        says,
        (),
        [Table("recording", "By group", columns, rows)],
        unknown,
    )


def latency(facts: Facts) -> Section:
    levels = facts.recorded
    exact = [row for row in facts.rows("settle_latency") if levels.get(_ref(row)) in ("all", "some")]
    known = {_ref(row) for row in exact}
    bounds = [row for row in facts.rows("settle_latency_bounds") if _ref(row) not in known]
    nothing = [row for row in facts.concerned if _ref(row) not in known | {_ref(one) for one in bounds}]
    says: list[str] = []
    unknown: list[str] = []
    pictures: list[Picture] = []
    if exact:
        worst = max(exact, key=lambda row: (row["p99_ms"], of(row)))
        says.append(
            f"From recorded deliveries: {words.name(worst['consumer_group'])} settled half of the messages of "
            f"{words.name(worst['topic'])} within {words.duration(worst['p50_ms'])} of their place in the log, 99 % "
            f"within {words.duration(worst['p99_ms'])}"
            + ("." if len(exact) == 1 else f"; of {len(exact)} groups it is the slowest.")
        )
    if bounds:
        unknown.append(
            f"Of {named(facts, bounds)} the rollups' buckets are all there is: they say within which bound a share of "
            "the acks came, not when exactly, and dead letters are not in them."
        )
    if nothing:
        unknown.append(
            f"Of {named(facts, nothing)} neither deliveries nor rollups are there: latency cannot be known. "
            f"{RECORD_ALL}"
        )
    part = [row for row in exact if levels[_ref(row)] == "some"]
    if part:
        unknown.append(f"Of {named(facts, part)} some deliveries are on record, and the figures are those of these.")
    dots = [(of(row), row["p50_ms"], row["p90_ms"], row["p99_ms"], True, "") for row in exact] + [
        (of(row), row["p50_within_ms"], row["p90_within_ms"], row["p99_within_ms"], False, "")
        for row in bounds
        if row["p99_within_ms"] is not None
    ]
    if dots:
        text = (
            "For each group three points on a logarithmic scale: the time within which half, 90 % and 99 % of its "
            f"messages were settled; hollow where only a bound is known. {' '.join(says)}"
        )
        pictures.append(charts.picture("From the place in the log to settlement", text.strip(), charts.ranges(dots)))
    of_handlers = (*GROUP, Column("acks", "acks"), *PERCENTILE_COLUMNS)
    of_bounds = (
        *GROUP,
        Column("acks", "acks"),
        Column("p50_within_ms", "half within", "ms"),
        Column("p90_within_ms", "90 % within", "ms"),
        Column("p99_within_ms", "99 % within", "ms"),
    )
    tables = [
        Table(
            "settle_latency",
            "From recorded deliveries",
            (*GROUP, Column("messages", "messages"), *PERCENTILE_COLUMNS),
            exact,
        ),
        Table("handler_time", "Of that, in the handler (recorded acks)", of_handlers, facts.rows("handler_time")),
        Table(
            "settle_latency_bounds",
            "From the rollups: the bound of the bucket (a dash: above an hour)",
            of_bounds,
            facts.rows("settle_latency_bounds"),
        ),
    ]
    return Section("settlement", "How long it took to settle", says, pictures, tables, unknown)


def _ref(row: Row) -> tuple[str, str]:
    return row["consumer_group"], row["topic"]


def failures(facts: Facts) -> Section:
    rows, dead = facts.rows("failures"), facts.rows("dead_letters")
    says: list[str] = []
    unknown: list[str] = []
    pictures: list[Picture] = []
    failed = sum(row["failed"] + row["lost"] for row in rows)
    letters = sum(row["dead_letters"] for row in dead)
    if failed:
        worst = max(rows, key=lambda row: (row["failed"] + row["lost"], row["error"]))
        says.append(
            f"{words.counted(failed, 'attempt')} failed and came again; most often "
            f"({words.number(worst['failed'] + worst['lost'])}) in {words.name(worst['consumer_group'])} with "
            f"{words.name(worst['error'] or 'no error: its process vanished', 100)}."
        )
    if letters:
        worst = dead[0]
        says.append(
            f"Dead letters in the log: {letters:,}; most of them ({words.number(worst['dead_letters'])}) "
            f"from {words.name(worst['consumer_group'])} with {words.name(worst['error'], 100)}."
        )
    if not failed and not letters and facts.messages:
        says.append("No failed attempt is on record, and no dead letter is in the log.")
    quiet = [row for row in facts.concerned if row["recorded"] in ("nothing", "idle")]
    hidden = [row for row in quiet if row["failures_counted"]]
    silent = [row for row in quiet if row["failures_counted"] is None]
    if hidden:
        count = sum(row["failures_counted"] for row in hidden)
        unknown.append(
            f"Of {named(facts, hidden)} no failure is on record, while the rollups counted {count:,}: which "
            "errors these were cannot be known. RECORD_DELIVERIES is 'none' there, or was."
        )
    if silent:
        unknown.append(
            f"Of {named(facts, silent)} nothing is on record: either nothing failed, or RECORD_DELIVERIES is 'none' "
            "there, so that failed attempts cannot be known. Dead letters are known from the log all the same."
        )
    if MOST_ROWS in (len(rows), len(dead)):
        unknown.append(f"Of the kinds of error the first {MOST_ROWS:,} are told, those that occurred most.")
    top = rows[:10]
    if top:
        names = ["came again", "process vanished", "dead-lettered"]
        bars = [
            (
                MODULES.sub("", row["error"]) or "(no error)",
                series,
                row[column],
                f"{words.shown(of(row), 60)}: {words.shown(row['error'])}: {words.number(row[column])} {series}",
            )
            for row in top
            for column, series in zip(("failed", "lost", "dead_lettered"), names, strict=True)
            if row[column]
        ]
        used = [name for name in names if any(bar[1] == name for bar in bars)]
        text = f"Bars of failed attempts by error. {says[0]}" if says else "Bars of failed attempts by error."
        pictures.append(
            charts.picture("Failed attempts by error (the ten that occurred most)", text, charts.bars(bars, used))
        )
    columns = (
        *GROUP,
        Column("error", "error (its last line, N for numbers)", "text"),
        Column("failed", "came again"),
        Column("lost", "process vanished"),
        Column("dead_lettered", "dead-lettered"),
        Column("messages", "messages"),
        Column("last_at", "last (UTC)", "time"),
    )
    of_letters = (
        *GROUP,
        Column("error", "error (its last line, N for numbers)", "text"),
        Column("dead_letters", "dead letters"),
        Column("mean_attempts", "attempts (mean)"),
        Column("first_at", "first (UTC)", "time"),
        Column("last_at", "last (UTC)", "time"),
    )
    tables = [
        Table("failures", "Failed attempts on record", columns, rows, "most frequent first"),
        Table("dead_letters", "Dead letters in the log", of_letters, dead, "most first"),
    ]
    return Section("failures", "What failed", says, pictures, tables, unknown)


def lag(facts: Facts) -> Section:
    rows = facts.rows("lag")
    says: list[str] = []
    unknown: list[str] = []
    pictures: list[Picture] = []
    highest: dict[str, Row] = {}
    for row in rows:
        best = highest.get(of(row))
        if best is None or row["lag"] > best["lag"]:
            highest[of(row)] = row
    if facts.groups:
        behind = [group for group in facts.groups if group.unsettled]
        says.append(
            f"Now (at {words.moment(facts.now)} UTC) "
            + (
                words.enumeration(
                    [
                        f"{facts.group_name(one.consumer_group, one.topic)} has "
                        f"{words.counted(one.unsettled, 'message')} to settle"
                        for one in behind
                    ]
                )
                if behind
                else "every group has settled all that is in the log"
            )
            + "."
        )
    if highest:
        worst = max(highest.values(), key=lambda row: (row["lag"], of(row)))
        says.append(
            f"{facts.group_name(*_ref(worst))} was furthest behind, by {words.counted(worst['lag'], 'message')} "
            f"at {words.moment(worst['at'])} UTC."
        )
    by_source = {
        source: [row for row in facts.concerned if facts.lag_source.get(_ref(row)) == source]
        for source in ("rollups", "none")
    }
    if by_source["rollups"]:
        unknown.append(
            f"The line of {named(facts, by_source['rollups'])} is made from the rollups' counts, backwards from what "
            "is open now: it is as coarse as they are, lacks what killed processes had not counted, and counts twice "
            "what a seek let the group handle again."
        )
    if by_source["none"]:
        unknown.append(
            f"How far behind {named(facts, by_source['none'])} was cannot be known: not every delivery is on record, "
            f"and the rollups are not there or do not reach from this period to now. {RECORD_ALL}"
        )
    if facts.since is not None:
        unknown.append(
            "Messages that were published before this period, and still open in it, are not in lines from recorded "
            "deliveries."
        )
    shown = sorted(highest, key=lambda name: -int(highest[name]["lag"]))[:SERIES]
    if shown:
        first = facts.first_at
        values = [(first, name, 0.0) for name in shown] if first is not None else []
        values += [(row["at"], of(row), float(row["lag"])) for row in rows if of(row) in shown]
        text = f"A line for each group: messages published and not settled. {' '.join(says)}"
        pictures.append(
            charts.picture(
                "Messages published and not yet settled", text, charts.lines(values, shown, written=words.number)
            )
        )
    columns = (
        *GROUP,
        Column("at", "until (UTC)", "time"),
        Column("published", "published"),
        Column("settled", "settled"),
        Column("lag", "open then"),
    )
    ordered = sorted(rows, key=lambda row: (-row["lag"], row["at"], of(row)))
    return Section(
        "lag",
        "How far behind the groups were",
        says,
        pictures,
        [Table("lag", "By step", columns, ordered, "furthest behind first")],
        unknown,
    )


def subscribers(facts: Facts) -> Section:
    levels = facts.recorded
    rows = [row for row in facts.rows("subscribers") if levels.get(_ref(row)) in ("all", "some")]
    says: list[str] = []
    pictures: list[Picture] = []
    by_group: dict[str, list[Row]] = {}
    for row in rows:
        by_group.setdefault(of(row), []).append(row)
    for name, found in list(by_group.items())[:SERIES]:
        first = found[0]
        says.append(
            f"In {facts.group_name(*_ref(first))} {words.counted(len(found), 'subscriber')} settled messages; the "
            f"busiest did {words.share(first['share'])}, {first['of_fair_share']:.2f} times an equal share."
        )
        if len(found) > 1:
            bars = [(row["subscriber"], name, row["settled"], _tip(row)) for row in found[:12]]
            title = f"Settled by each subscriber of {words.shown(name, 60)}"
            pictures.append(
                charts.picture(title, f"Bars of settled messages by subscriber. {says[-1]}", charts.bars(bars, [name]))
            )
    unknown = []
    missing = [row for row in facts.concerned if _ref(row) not in {_ref(one) for one in rows}]
    if missing:
        unknown.append(
            f"Who did the work of {named(facts, missing)} cannot be known: acks are not on record. {RECORD_ALL}"
        )
    if rows:
        says.append("A subscriber that was there for a part of the time did less for that reason alone.")
    columns = (
        *GROUP,
        Column("subscriber", "subscriber", "text"),
        Column("settled", "settled"),
        Column("share", "share", "share"),
        Column("of_fair_share", "times an equal share"),
    )
    return Section(
        "subscribers",
        "Who did the work",
        says,
        pictures,
        [Table("subscribers", "By subscriber", columns, rows)],
        unknown,
    )


def _tip(row: Row) -> str:
    return f"{words.shown(row['subscriber'])}: {words.counted(row['settled'], 'message')}, {words.share(row['share'])}"
