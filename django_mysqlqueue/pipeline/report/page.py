"""The page: its parts in order, the numbers on top, and the HTML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from django_mysqlqueue.pipeline.report import sections_groups, sections_log, words
from django_mysqlqueue.pipeline.report.model import Headline, Page, Picture
from django_mysqlqueue.pipeline.report.queries import Facts

FORECAST = "growth_forecast"


def page(facts: Facts) -> Page:
    """The report of these facts."""
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
        title="What the queue did",
        period=_period(facts),
        headlines=_headlines(facts),
        sections=sections,
        made=f"{words.moment(facts.now)} UTC",
        about=_about(facts),
    )


def _period(facts: Facts) -> str:
    first, last = facts.since or facts.first_at, facts.until or facts.last_at
    if first is None or last is None:
        return "No message lies in this period."
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
        found.append(Headline("peak", words.number(best), f"messages within {words.within(facts.step)}"))
    latency = facts.rows("publish_latency")
    if latency:
        worst = max(row["p99_ms"] for row in latency)
        found.append(Headline("into the log", words.duration(worst), "99 % of the slowest topic within"))
    settled = [
        row
        for row in facts.rows("settle_latency")
        if facts.recorded.get((row["consumer_group"], row["topic"])) == "all"
    ]
    if settled:
        worst = max(row["p99_ms"] for row in settled)
        found.append(Headline("to settlement", words.duration(worst), "99 % of the slowest group within"))
    letters = sum(row["dead_letters"] for row in topics)
    part = f"{words.share(letters / messages)} of all messages" if letters else "none in the log"
    found.append(Headline("dead letters", words.number(letters), part))
    if facts.rows("failures"):
        failed = sum(row["failed"] + row["lost"] for row in facts.rows("failures"))
        found.append(Headline("failed attempts", words.number(failed), "on record, that came again"))
    if facts.groups:
        behind = max(facts.groups, key=lambda one: one.unsettled)
        note = (
            f"of {words.shown(behind.consumer_group, 30)}, the furthest behind"
            if behind.unsettled
            else "all groups are done"
        )
        found.append(Headline("open now", words.number(behind.unsettled), note))
    return found


def _mean_size(facts: Facts) -> str:
    if not facts.messages:
        return "of no message"
    return f"{words.size(sum(row['bytes'] for row in facts.rows('topics')) / facts.messages)} a message"


def _about(facts: Facts) -> list[str]:
    if facts.with_archive:
        said = [f"It covers the archive up to offset {facts.archived:,} and the live log behind it."]
    else:
        said = ["It covers what the live log still holds."]
    if facts.topics is not None:
        said.append(f"Of the topics {words.enumeration([words.name(topic) for topic in facts.topics])} alone.")
    for one in facts.collected[:5]:
        said.append(
            f"GC has removed messages of {words.name(one.topic)} up to offset {one.offset:,}, which are not in this "
            "report: an archive would have kept them."
        )
    if len(facts.collected) > 5:
        said.append(f"So it has of {len(facts.collected) - 5} more topics.")
    said.append("Times are those of the database's clock, in UTC. Sizes are those of payloads, before compression.")
    return said


def more_tables(made: Page, facts: Facts) -> dict[str, pa.Table]:
    """Tables that the page has and Spark has not made, by name."""
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
    """The whole file. Every text is escaped but the pictures."""
    environment = Environment(
        loader=PackageLoader("django_mysqlqueue.pipeline.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(page=made, svg=_svg)
