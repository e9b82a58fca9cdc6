"""The page: its sections, the numbers at the top, and the HTML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pyspark_mysqlqueue.report import sections_groups, sections_log, words
from pyspark_mysqlqueue.report.model import Headline, Page, Picture
from pyspark_mysqlqueue.report.queries import Facts


def page(facts: Facts) -> Page:
    """Return the contents of the page."""
    sections = [
        sections_log.traffic(facts),
        sections_log.into_the_log(facts),
        sections_groups.latency(facts),
        sections_groups.lag(facts),
        sections_groups.failures(facts),
        sections_groups.subscribers(facts),
        sections_log.skew(facts),
        sections_log.hours(facts),
        sections_log.growing(facts),
        sections_groups.recording(facts),
    ]
    return Page(
        title="Queue report",
        period=_period(facts),
        headlines=_headlines(facts),
        sections=sections,
        made=f"{words.moment(facts.now)} UTC",
        about=_about(facts),
    )


def _period(facts: Facts) -> str:
    first, last = facts.since or facts.first_at, facts.until or facts.last_at
    if first is None or last is None:
        return "No message was published in this period."
    return f"{words.moment(first)} to {words.moment(last)} UTC"


def _headlines(facts: Facts) -> list[Headline]:
    topics = facts.rows("topics")
    messages = facts.messages
    found = [
        Headline("messages", words.number(messages), f"in {words.counted(len(topics), 'topic')}"),
        Headline("payload", words.size(sum(row["bytes"] for row in topics)), _mean_size(facts)),
    ]
    if facts.chart:
        totals: dict[Any, int] = {}
        for row in facts.chart:
            totals[row["at"]] = totals.get(row["at"], 0) + row["messages"]
        best = max(totals.values())
        found.append(Headline("peak", words.number(best), f"messages in {words.within(facts.step)}"))
    latency = facts.rows("publish_latency")
    if latency:
        worst = max(row["p99_ms"] for row in latency)
        found.append(Headline("publish latency", words.duration(worst), "99th percentile, slowest topic"))
    settled = [
        row
        for row in facts.rows("settle_latency")
        if facts.recorded.get((row["consumer_group"], row["topic"])) == "all"
    ]
    if settled:
        worst = max(row["p99_ms"] for row in settled)
        found.append(Headline("settlement latency", words.duration(worst), "99th percentile, slowest group"))
    dead_letters = sum(row["dead_letters"] for row in topics)
    part = f"{words.share(dead_letters / messages)} of all messages" if dead_letters else "none in the log"
    found.append(Headline("dead letters", words.number(dead_letters), part))
    if facts.rows("failures"):
        failed = sum(row["failed"] + row["lost"] for row in facts.rows("failures"))
        found.append(Headline("failed attempts", words.number(failed), "recorded and retried"))
    if facts.groups:
        behind = max(facts.groups, key=lambda one: one.unsettled)
        note = (
            f"messages of {words.shown(behind.consumer_group, 30)}, the largest backlog"
            if behind.unsettled
            else "all groups are up to date"
        )
        found.append(Headline("backlog now", words.number(behind.unsettled), note))
    return found


def _mean_size(facts: Facts) -> str:
    if not facts.messages:
        return "no messages"
    return f"{words.size(sum(row['bytes'] for row in facts.rows('topics')) / facts.messages)} per message"


def _about(facts: Facts) -> list[str]:
    if facts.with_archive:
        said = [f"The report covers the archive up to offset {facts.archived:,} and the live log after it."]
    else:
        said = ["The report covers the messages that are still in the live log."]
    if facts.topics is not None:
        topics = words.enumeration([words.name(topic) for topic in facts.topics])
        noun = "topic" if len(facts.topics) == 1 else "topics"
        said.append(f"It is limited to the {noun} {topics}.")
    for one in facts.collected[:5]:
        said.append(
            f"GC has removed messages of {words.name(one.topic)} up to offset {one.offset:,}. They are missing from "
            "this report. Use an archive to keep such messages."
        )
    if len(facts.collected) > 5:
        said.append(f"Messages of {words.counted(len(facts.collected) - 5, 'more topic')} are missing too.")
    said.append("Times are from the database's clock, in UTC. Sizes are those of payloads, before compression.")
    return said


def more_tables(made: Page, facts: Facts) -> dict[str, pa.Table]:
    """Return the tables of the page that were not computed by Spark, by name."""
    found = {}
    for section in made.sections:
        for table in section.tables:
            if table.name not in facts.tables:
                rows: list[Mapping[str, Any]] = list(table.rows)
                types = {"number": pa.int64(), "day": pa.date32()}
                schema = pa.schema([(column.name, types[column.kind]) for column in table.columns])
                found[table.name] = pa.Table.from_pylist(rows, schema=schema)
    return found


def _svg(picture: Picture, width: str) -> Markup:
    return Markup(getattr(picture, width))  # noqa: S704  # Vega has escaped every text in it


def render(made: Page) -> str:
    """Return the page as HTML. All texts are escaped, except pictures, which Vega has escaped."""
    environment = Environment(
        loader=PackageLoader("pyspark_mysqlqueue.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(page=made, svg=_svg)
