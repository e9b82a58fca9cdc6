"""The sections of a report about groups: recorded deliveries, settlement latency, failures, backlog, subscribers."""

from __future__ import annotations

import re

from pyspark_mysqlqueue.report import charts, words
from pyspark_mysqlqueue.report.model import Column, Picture, Section, Table
from pyspark_mysqlqueue.report.queries import MOST_ROWS, Facts, Row
from pyspark_mysqlqueue.report.sections_log import PERCENTILE_COLUMNS, SERIES

RECORD_ALL = (
    "To record every delivery of a group, at the cost of one row each, set MYSQLQUEUE['GROUPS'] = "
    "{group: {'RECORD_DELIVERIES': 'all'}}."
)
MODULES = re.compile(r"^(?:\w+\.)+(?=\w+(?::|$))")
"""The modules before the name of an exception."""
GROUP = (Column("consumer_group", "group", "text"), Column("topic", "topic", "text"))
RECORDED = {
    "all": "all deliveries",
    "some": "some deliveries",
    "failures": "failures",
    "nothing": "none",
    "idle": "none (and rollups count none)",
}


def of(row: Row) -> str:
    """Return a group's name for charts."""
    return f"{row['consumer_group']} on {row['topic']}"


def named(facts: Facts, rows: list[Row]) -> str:
    """Return the groups of some rows for a sentence."""
    return words.enumeration([facts.group_name(*_ref(row)) for row in rows])


def recording(facts: Facts) -> Section:
    """Return the section about recorded deliveries."""
    rows = [{**row, "recorded": RECORDED[row["recorded"]]} for row in facts.rows("recording")]
    levels = facts.recorded
    says: list[str] = []
    unknown: list[str] = []
    if not rows:
        says.append("No consumer group is registered on these topics.")
    full = [row for row in facts.rows("recording") if row["recorded"] == "all"]
    less = [row for row in facts.concerned if row["recorded"] != "all"]
    if full:
        says.append(f"Every delivery of {named(facts, full)} is recorded, which makes these figures exact.")
    if less:
        unknown.append(
            f"Not every delivery of {named(facts, less)} is recorded. The report cannot show when each message was "
            f"settled and by which subscriber; rollups give approximate figures. {RECORD_ALL}"
        )
    if "some" in levels.values():
        unknown.append(
            "If only some deliveries of a group are recorded, its setting was changed, or older records have expired."
        )
    columns = (
        *GROUP,
        Column("recorded", "recorded", "text"),
        Column("acks_recorded", "recorded acks"),
        Column("acks_counted", "acks in rollups"),
        Column("failures_recorded", "recorded failures"),
        Column("failures_counted", "failures in rollups"),
    )
    return Section(
        "recording",
        "Recorded deliveries",
        says,
        (),
        [Table("recording", "By group", columns, rows)],
        unknown,
    )


def latency(facts: Facts) -> Section:
    """Return the section about the latency from the log to settlement."""
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
            f"According to recorded deliveries, {words.name(worst['consumer_group'])} settled half of the messages of "
            f"{words.name(worst['topic'])} within {words.duration(worst['p50_ms'])} of their entry into the log, and "
            f"99 % within {words.duration(worst['p99_ms'])}."
            + ("" if len(exact) == 1 else f" It is the slowest of {len(exact)} groups.")
        )
    if bounds:
        unknown.append(
            f"For {named(facts, bounds)} only rollups are available. They give upper bounds of percentiles instead of "
            "exact values, and do not include dead letters."
        )
    if nothing:
        unknown.append(
            f"The latency of {named(facts, nothing)} is unknown, because there are neither recorded deliveries nor "
            f"rollups. {RECORD_ALL}"
        )
    part = [row for row in exact if levels[_ref(row)] == "some"]
    if part:
        unknown.append(f"Only some deliveries of {named(facts, part)} are recorded. The figures cover only these.")
    dots = [(of(row), row["p50_ms"], row["p90_ms"], row["p99_ms"], True, "") for row in exact] + [
        (of(row), row["p50_within_ms"], row["p90_within_ms"], row["p99_within_ms"], False, "")
        for row in bounds
        if row["p99_within_ms"] is not None
    ]
    if dots:
        text = (
            "For each group three points on a logarithmic scale: the 50th, 90th and 99th percentile of the time until "
            f"its messages were settled. Hollow points are upper bounds. {' '.join(says)}"
        )
        pictures.append(charts.picture("Time from entering the log to settlement", text.strip(), charts.ranges(dots)))
    of_handlers = (*GROUP, Column("acks", "acks"), *PERCENTILE_COLUMNS)
    of_bounds = (
        *GROUP,
        Column("acks", "acks"),
        Column("p50_within_ms", "p50 at most", "ms"),
        Column("p90_within_ms", "p90 at most", "ms"),
        Column("p99_within_ms", "p99 at most", "ms"),
    )
    tables = [
        Table(
            "settle_latency",
            "From recorded deliveries",
            (*GROUP, Column("messages", "messages"), *PERCENTILE_COLUMNS),
            exact,
        ),
        Table("handler_time", "Time in the handler (recorded acks)", of_handlers, facts.rows("handler_time")),
        Table(
            "settle_latency_bounds",
            "From rollups: upper bounds (a dash: more than one day)",
            of_bounds,
            facts.rows("settle_latency_bounds"),
        ),
    ]
    return Section("settlement", "Settlement latency", says, pictures, tables, unknown)


def _ref(row: Row) -> tuple[str, str]:
    return row["consumer_group"], row["topic"]


def failures(facts: Facts) -> Section:
    """Return the section about failed attempts and dead letters."""
    rows, dead = facts.rows("failures"), facts.rows("dead_letters")
    says: list[str] = []
    unknown: list[str] = []
    pictures: list[Picture] = []
    failed = sum(row["failed"] + row["lost"] for row in rows)
    dead_letters = sum(row["dead_letters"] for row in dead)
    if failed:
        worst = max(rows, key=lambda row: (row["failed"] + row["lost"], row["error"]))
        cause = words.name(worst["error"], 100) if worst["error"] else "the loss of the process"
        says.append(
            f"{words.counted(failed, 'attempt')} failed and {'was' if failed == 1 else 'were'} retried. The most "
            f"frequent cause is {cause} in {words.name(worst['consumer_group'])}, with "
            f"{words.counted(worst['failed'] + worst['lost'], 'attempt')}."
        )
    if dead_letters:
        worst = dead[0]
        says.append(
            f"The log contains {words.counted(dead_letters, 'dead letter')}. The most frequent error is "
            f"{words.name(worst['error'], 100)} in {words.name(worst['consumer_group'])}, with "
            f"{words.counted(worst['dead_letters'], 'dead letter')}."
        )
    if not failed and not dead_letters and facts.messages:
        says.append("No failed attempt is recorded, and the log contains no dead letters.")
    unrecorded = [row for row in facts.concerned if row["recorded"] in ("nothing", "idle")]
    hidden = [row for row in unrecorded if row["failures_counted"]]
    uncounted = [row for row in unrecorded if row["failures_counted"] is None]
    if hidden:
        count = sum(row["failures_counted"] for row in hidden)
        unknown.append(
            f"The rollups of {named(facts, hidden)} count {words.counted(count, 'failure')}, but no failure is "
            "recorded, so the errors are unknown. RECORD_DELIVERIES is or was 'none'."
        )
    if uncounted:
        unknown.append(
            f"No delivery of {named(facts, uncounted)} is recorded: either nothing failed, or RECORD_DELIVERIES is "
            "'none' and failed attempts are unknown. Dead letters are known from the log in either case."
        )
    if MOST_ROWS in (len(rows), len(dead)):
        unknown.append(f"Only the {MOST_ROWS:,} most frequent errors are listed.")
    top = rows[:10]
    if top:
        names = ["retried", "process lost", "dead-lettered"]
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
        text = " ".join(["A bar chart of failed attempts by error.", *says[:1]])
        pictures.append(charts.picture("Failed attempts by error (ten most frequent)", text, charts.bars(bars, used)))
    columns = (
        *GROUP,
        Column("error", "error (last line, numbers replaced by N)", "text"),
        Column("failed", "retried"),
        Column("lost", "process lost"),
        Column("dead_lettered", "dead-lettered"),
        Column("messages", "messages"),
        Column("last_at", "last (UTC)", "time"),
    )
    of_dead_letters = (
        *GROUP,
        Column("error", "error (last line, numbers replaced by N)", "text"),
        Column("dead_letters", "dead letters"),
        Column("mean_attempts", "mean attempts"),
        Column("first_at", "first (UTC)", "time"),
        Column("last_at", "last (UTC)", "time"),
    )
    tables = [
        Table("failures", "Recorded failed attempts", columns, rows, "most frequent first"),
        Table("dead_letters", "Dead letters in the log", of_dead_letters, dead, "most frequent first"),
    ]
    return Section("failures", "Failures", says, pictures, tables, unknown)


def lag(facts: Facts) -> Section:
    """Return the section about the backlog of groups."""
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
            f"At {words.moment(facts.now)} UTC, "
            + (
                words.enumeration(
                    [
                        f"{facts.group_name(one.consumer_group, one.topic)} has a backlog of "
                        f"{words.counted(one.unsettled, 'message')}"
                        for one in behind
                    ]
                )
                if behind
                else "every group has settled all messages in the log"
            )
            + "."
        )
    if highest:
        worst = max(highest.values(), key=lambda row: (row["lag"], of(row)))
        says.append(
            f"The largest backlog was {words.counted(worst['lag'], 'message')}, of {facts.group_name(*_ref(worst))} at "
            f"{words.moment(worst['at'])} UTC."
        )
    by_source = {
        source: [row for row in facts.concerned if facts.lag_source.get(_ref(row)) == source]
        for source in ("rollups", "none")
    }
    if by_source["rollups"]:
        unknown.append(
            f"The backlog of {named(facts, by_source['rollups'])} is computed backwards from the current one with the "
            "counts of rollups. It is only as precise as these: counts that a killed process had not written are "
            "missing, and messages that were handled again after a seek count twice."
        )
    if by_source["none"]:
        unknown.append(
            f"The past backlog of {named(facts, by_source['none'])} is unknown, because not every delivery is recorded "
            f"and rollups are missing or the period of this report ends before now. {RECORD_ALL}"
        )
    if facts.since is not None:
        unknown.append("A backlog from recorded deliveries leaves out messages that were published before this period.")
    shown = sorted(highest, key=lambda name: -int(highest[name]["lag"]))[:SERIES]
    if shown:
        first = facts.first_at
        values = [(first, name, 0.0) for name in shown] if first is not None else []
        values += [(row["at"], of(row), float(row["lag"])) for row in rows if of(row) in shown]
        text = f"A line chart of the backlog of each group. {' '.join(says)}"
        pictures.append(
            charts.picture(
                "Backlog: messages published and not yet settled",
                text,
                charts.lines(values, shown, written=words.number),
            )
        )
    columns = (
        *GROUP,
        Column("at", "end of step (UTC)", "time"),
        Column("published", "published"),
        Column("settled", "settled"),
        Column("lag", "backlog"),
    )
    ordered = sorted(rows, key=lambda row: (-row["lag"], row["at"], of(row)))
    return Section(
        "lag",
        "Backlog of the groups",
        says,
        pictures,
        [Table("lag", "By step", columns, ordered, "largest backlog first")],
        unknown,
    )


def subscribers(facts: Facts) -> Section:
    """Return the section about the work of each subscriber."""
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
            f"In {facts.group_name(*_ref(first))}, {words.counted(len(found), 'subscriber')} settled messages. The "
            f"busiest settled {words.share(first['share'])} of them, {first['of_fair_share']:.2f} times an equal share."
        )
        if len(found) > 1:
            bars = [(row["subscriber"], name, row["settled"], _tip(row)) for row in found[:12]]
            title = f"Messages settled by each subscriber of {words.shown(name, 60)}"
            text = f"A bar chart of settled messages by subscriber. {says[-1]}"
            pictures.append(charts.picture(title, text, charts.bars(bars, [name])))
    unknown = []
    missing = [row for row in facts.concerned if _ref(row) not in {_ref(one) for one in rows}]
    if missing:
        unknown.append(
            f"The work of the subscribers of {named(facts, missing)} is unknown: acks are not recorded. {RECORD_ALL}"
        )
    if rows:
        says.append("A subscriber that ran for only a part of the period settled fewer messages for that reason.")
    columns = (
        *GROUP,
        Column("subscriber", "subscriber", "text"),
        Column("settled", "settled"),
        Column("share", "share", "share"),
        Column("of_fair_share", "times an equal share"),
    )
    return Section(
        "subscribers",
        "Work per subscriber",
        says,
        pictures,
        [Table("subscribers", "By subscriber", columns, rows)],
        unknown,
    )


def _tip(row: Row) -> str:
    return f"{words.shown(row['subscriber'])}: {words.counted(row['settled'], 'message')}, {words.share(row['share'])}"
