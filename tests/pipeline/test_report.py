"""The report says what is so, says what it cannot know, and takes no text for markup."""

from __future__ import annotations

import csv
import datetime
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from django.core.management import CommandError, call_command

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import CollectedTopic
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.report import run_report, words
from pyspark_mysqlqueue.report.files import MARKER, PAGE, Folder
from pyspark_mysqlqueue.report.options import parse_moment
from pyspark_mysqlqueue.report.page import page, render
from pyspark_mysqlqueue.report.queries import step_for
from pyspark_mysqlqueue.tables import Collected
from tests.pipeline.reports import HOSTILE, SHOWN, at, facts_of, full, latency_row
from tests.support.factories import QueueMessageFactory
from tests.support.harness import Sub, handler, sequence
from tests.support.internals import lane

pytestmark = [pytest.mark.any_engine, pytest.mark.any_version]


COUNTS = ("acks_recorded", "acks_counted", "failures_recorded", "failures_counted")
VOID = {"meta", "link", "input", "br", "img", "path", "line", "rect", "circle"}


class Outline(HTMLParser):
    """Tags, texts and addresses of a page; unbalanced tags are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID or tag in ("path", "line", "rect", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def said(facts: Any, section: str) -> tuple[str, str]:
    """A section's sentences, and what it says cannot be known."""
    (found,) = [one for one in page(facts).sections if one.id == section]
    return " ".join(found.says), " ".join(found.unknown)


# -- words --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (words.number(1234567), "1,234,567"),
        (words.number(2.345), "2.35"),
        (words.number(23.45), "23.4"),
        (words.number(None), "\N{EN DASH}"),
        (words.share(0.1234), "12.3 %"),
        (words.share(0.0001), "< 0.1 %"),
        (words.share(1), "100 %"),
        (words.share(0), "0 %"),
        (words.size(999), "999 bytes"),
        (words.size(1_500_000), "1.5 MB"),
        (words.size(3e15), "3,000.0 TB"),
        (words.duration(0.5), "0.5 ms"),
        (words.duration(350), "350 ms"),
        (words.duration(1500), "1.5 s"),
        (words.duration(600_000), "10 min"),
        (words.duration(9_000_000), "2.5 h"),
        (words.duration(400_000_000), "4.6 days"),
        (words.duration(-20), "-20 ms"),
        (words.stretch(60), "minute"),
        (words.stretch(900), "15 minutes"),
        (words.stretch(604_800), "week"),
        (words.counted(1, "message"), "1 message"),
        (words.counted(1200, "reply", "replies"), "1,200 replies"),
        (words.enumeration(["a"]), "a"),
        (words.enumeration(["a", "b", "c"]), "a, b and c"),
        (words.enumeration(list("abcdef")), "a, b, c, d and 2 more"),
        (words.shown("a\x00\u202eb\n"), "a\\u0000\\u202eb\\u000a"),
        (words.shown("é" * 200), "é" * 119 + "…"),
        (words.name(""), "“” (empty)"),
    ],
)
def test_how_values_are_written(written, expected):
    assert written == expected


def test_how_long_a_bar_stands_for():
    assert [step_for(seconds) for seconds in (0, 100, 150.5, 9000, 86_400, 30 * 86_400, 10**10)] == [
        1,
        1,
        5,
        60,
        900,
        21_600,
        604_800,
    ]


def test_moments_as_options():
    now = datetime.datetime(2026, 11, 22, 6, tzinfo=datetime.UTC)
    assert parse_moment("--since", "36h", now) == now - datetime.timedelta(hours=36)
    assert parse_moment("--since", "2w", now) == now - datetime.timedelta(days=14)
    assert parse_moment("--since", "2026-11-21", now) == datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
    assert parse_moment("--since", "2026-11-22T07:00+02:00", now) == now - datetime.timedelta(hours=1)
    for text in ("yesterday", "", "9y", "-3d", "999999w"):
        with pytest.raises(PipelineError, match=re.escape(f"--since {text!r}: must be")):
            parse_moment("--since", text, now)


# -- sentences ----------------------------------------------------------------


def test_sentences_have_the_figures():
    facts = full()
    says, unknown = said(facts, "traffic")
    assert says == (
        "900 messages were published to 1 topic. The largest topic is “orders”, with 100 % of the messages. "
        "The busiest minute began at 2026-11-02 00:19:00 UTC, with 200 messages (3.33 per second)."
    )
    assert said(facts, "into-the-log")[0].startswith(
        "Half of the messages of “orders” entered the log within 20 ms of their insert, 99 % within 1.5 s, and all "
        "within 90 s."
    )
    says, unknown = said(facts, "settlement")
    assert says == (
        "According to recorded deliveries, “orders” settled half of the messages of “orders” within 20 ms of their "
        "entry into the log, and 99 % within 1.5 s."
    )
    assert unknown.startswith("For “mail” only rollups are available.")
    says, unknown = said(facts, "lag")
    assert says == (
        "At 2026-11-02 10:00:00 UTC, “orders” has a backlog of 17 messages. The largest backlog was 95 messages, of "
        "“orders” at 2026-11-02 00:20:00 UTC."
    )
    assert unknown.startswith("The backlog of “mail” is computed backwards from the current one")
    assert said(facts, "failures")[0] == (
        "7 attempts failed and were retried. The most frequent cause is “orders” in “orders”, with 7 attempts. "
        "The log contains 2 dead letters. The most frequent error is “orders” in “orders”, with 2 dead letters."
    )
    says, unknown = said(facts, "subscribers")
    assert says.startswith(
        "In “orders”, 2 subscribers settled messages. The busiest settled 75.0 % of them, 1.50 times an equal share."
    )
    assert unknown.startswith("The work of the subscribers of “mail” is unknown")
    assert said(facts, "skew")[0].startswith(
        "“orders” has 3 keys. The largest, “orders”, has 66.7 % of the messages; the largest 10 % of the keys have "
        "66.7 % (Gini coefficient 0.37)."
    )
    assert said(facts, "hours")[0] == (
        "The busiest hour of the week is Monday, 09:00 to 10:00 UTC, with 400 messages on average. 2 of the 168 hours "
        "of a week had messages."
    )
    assert said(facts, "growth")[0] == (
        "On average over 7 whole days, 100 messages and 10.0 kB of payload were published per day. The number of "
        "messages per day grows by 4 ± 2 from one day to the next (two standard errors). At the average rate of 7 "
        "whole days, GC keeps about 100 messages in the log: the retention of each topic multiplied by its rate, "
        "provided that every group keeps up. GC never removes messages of “kept”."
    )
    says, unknown = said(facts, "recording")
    assert says == "Every delivery of “orders” is recorded, which makes these figures exact."
    assert "RECORD_DELIVERIES" in unknown


def test_what_cannot_be_known_is_said():
    group = {"consumer_group": "g", "topic": "t"}
    facts = facts_of(
        topics=[
            {"topic": "t", "messages": 1, "bytes": 5, "keys": 1, "dead_letters": 0, "first_at": at(0), "last_at": at(0)}
        ],
        days=[{"day": at(0).date(), "topic": "t", "messages": 1, "bytes": 5}],
        recording=[
            {**group, "recorded": "idle", **dict.fromkeys(COUNTS, 0), "acks_counted": None, "failures_counted": None}
        ],
        lag_source={("g", "t"): "none"},
        since=at(-5),
        collected=[Collected("t", 7, 1)],
    )
    assert said(facts, "settlement") == (
        "",
        (
            "The latency of “g” is unknown, because there are neither recorded deliveries nor rollups. To record every "
            "delivery of a group, at the cost of one row each, set MYSQLQUEUE['GROUPS'] = {group: "
            "{'RECORD_DELIVERIES': 'all'}}."
        ),
    )
    assert said(facts, "lag")[1].startswith("The past backlog of “g” is unknown")
    assert "published before this period" in said(facts, "lag")[1]
    assert said(facts, "failures")[1].startswith("No delivery of “g” is recorded: either nothing failed, or")
    assert said(facts, "failures")[0] == "No failed attempt is recorded, and the log contains no dead letters."
    assert said(facts, "growth")[1].startswith("The messages cover no whole day")
    assert any("GC has removed messages of “t” up to offset 7" in text for text in page(facts).about)
    assert facts_of().messages == 0
    counted = {**group, "recorded": "nothing", **dict.fromkeys(COUNTS, 0), "acks_counted": 5}
    assert said(facts_of(recording=[{**counted, "failures_counted": 7}]), "failures")[1].startswith(
        "The rollups of “g” count 7 failures, but no failure is recorded, so the errors are unknown."
    )
    assert said(facts_of(recording=[counted]), "failures")[1] == ""


def test_a_group_of_several_topics_is_named_with_its_topic():
    """And one whose topic had no message in the period hides nothing."""
    idle = {"recorded": "idle", **dict.fromkeys(COUNTS, 0), "acks_counted": None, "failures_counted": None}
    topic = {"messages": 1, "bytes": 5, "keys": 1, "dead_letters": 0, "first_at": at(0), "last_at": at(0)}
    groups = [{"consumer_group": "g", "topic": name, **idle} for name in ("t", "u", "empty")]
    sources = {("g", name): "none" for name in ("t", "u", "empty")}
    facts = facts_of(topics=[{"topic": name, **topic} for name in ("t", "u")], recording=groups, lag_source=sources)
    for section in ("settlement", "lag", "failures", "recording", "subscribers"):
        assert " “g” on “t” and “g” on “u” " in said(facts, section)[1]
        assert "empty" not in said(facts, section)[1]


def test_a_slope_within_its_error_is_no_growth():
    trend = {
        "days": 7,
        "messages_per_day": 100.0,
        "bytes_per_day": 1.0,
        "slope": 1.0,
        "slope_error": 3.0,
        "at_end": 103.0,
    }
    facts = full()
    made = facts_of(trend=trend, topics=facts.rows("topics"), days=facts.rows("days"))
    says, _ = said(made, "growth")
    assert "Growth is not significant: the number of messages per day changes by 1 ± 6 from one day to" in says
    few = facts_of(
        trend={**trend, "slope": None, "slope_error": None, "at_end": None, "days": 2}, days=facts.rows("days")
    )
    assert said(few, "growth")[1].startswith("Growth cannot be estimated from 2 whole days")


def test_days_without_a_message_are_part_of_the_line():
    facts = full()
    ends = [facts.rows("days")[0], facts.rows("days")[-1]]
    made = facts_of(trend=facts.trend, topics=facts.rows("topics"), days=ends)
    assert "dashed" in " ".join(picture.title for one in page(made).sections for picture in one.pictures)


def test_many_topics_are_told_apart_as_far_as_colours_go():
    topics = [
        {"topic": f"t{n}", "messages": 9, "bytes": 1, "keys": 1, "dead_letters": 0, "first_at": at(0), "last_at": at(1)}
        for n in range(20)
    ]
    facts = facts_of(
        topics=topics,
        chart=[{"at": at(0), "topic": f"t{n}", "messages": 9, "bytes": 1} for n in range(20)],
        publish_latency=[latency_row(topic=f"t{n}", messages=9) for n in range(20)],
    )
    html = render(page(facts))
    assert "t4: 9 messages" in html
    assert "t5: 9 messages" not in html
    assert "all others: 135 messages" in html


@pytest.mark.parametrize(
    ("key", "shown"),
    [("ada", "priority +10: ada"), ("", "priority +10: (empty)"), ("__p:3", "priority +10: __p:3")],
)
def test_keys_with_a_priority_are_shown_with_both(key, shown):
    text = Outline(render(page(full(lane(key, 10))))).text
    assert f"The largest, “{shown}”, has 66.7 % of the messages" in text
    assert f"{shown}: 600 messages" in text


# -- the page -----------------------------------------------------------------


def test_no_text_is_taken_for_markup():
    html = render(page(full(HOSTILE)))
    found = Outline(html)
    assert not found.tags & {"script", "img", "iframe", "object"}
    assert "49" not in re.findall(r"onerror=alert\(1\)&gt;[^<]*\\u202e(\S+)", html)
    assert SHOWN in found.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e]", html)
    assert not [item for item in found.attributes if item[1].startswith("on")]


def test_the_page_is_one_file():
    html = render(page(full()))
    found = Outline(html)
    loading = [value for _, name, value in found.attributes if name in ("src", "href", "srcset", "xlink:href", "data")]
    assert loading
    assert all(value == "data:," or value.startswith("#") for value in loading if value)
    assert "@import" not in html
    assert re.findall(r"url\((?!#)", html) == []
    assert set(re.findall(r"https?://[^\s\"'<]+", html)) == {"http://www.w3.org/2000/svg"}
    ids = [value for _, name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    anchors = {value for tag, name, value in found.attributes if (tag, name) == ("a", "href")}
    assert anchors <= {f"#{value}" for value in ids}
    pictures = [item for item in found.attributes if item[:2] == ("svg", "aria-label")]
    assert len(pictures) >= 2 * 9
    assert all(len(text or "") > 40 for _, _, text in pictures)


def test_a_long_table_is_cut_and_says_so():
    html = render(page(full(days=80)))
    assert "The first 50 of 80 rows, oldest first; all are in <code>tables/days.csv</code>" in html


# -- the folder ---------------------------------------------------------------


def test_only_a_reports_own_folder_is_written_over(tmp_path):
    out = tmp_path / "report"
    table = pa.table({"n": [1]})
    files = Folder(out).write("<p>1", {"a": table, "b": table})
    assert [str(file.relative_to(out)) for file in files] == [
        PAGE,
        "tables/a.parquet",
        "tables/a.csv",
        "tables/b.parquet",
        "tables/b.csv",
    ]
    Folder(out).write("<p>2", {"a": table})
    assert (out / PAGE).read_text() == "<p>2"
    assert sorted(file.name for file in (out / "tables").iterdir()) == ["a.csv", "a.parquet"]

    other = tmp_path / "other"
    other.mkdir()
    assert Folder(other)
    (other / "mine.txt").touch()
    with pytest.raises(PipelineError, match="the folder is not empty and has no report"):
        Folder(other)
    with pytest.raises(PipelineError, match="is a file; use a folder"):
        Folder(other / "mine.txt")
    (other / MARKER).write_text("[]")
    with pytest.raises(PipelineError, match="was not written by a report"):
        Folder(other)
    # A marker that was tampered with deletes nothing outside of its folder.
    (other / MARKER).write_text(json.dumps({"files": ["../report/report.html"]}))
    Folder(other).write("", {})
    assert (out / PAGE).exists()
    assert (other / "mine.txt").exists()


# -- from the queue to the page -----------------------------------------------


@pytest.mark.timeout(600)
def test_an_empty_log_then_one_message(spark, place, tmp_path):
    out = tmp_path / "report"
    first = run_report(spark, place, None, None, None, None, out)
    assert "No message was published in this period." in Outline(first[0].read_text()).text
    publish("orders", {"n": 1}, key="k")
    sequence()
    run_report(spark, place, None, None, None, None, out)
    text = Outline((out / PAGE).read_text()).text
    assert "1 message was published to 1 topic." in text
    assert pq.read_table(out / "tables" / "topics.parquet").to_pylist()[0]["messages"] == 1
    with pytest.raises(PipelineError, match="must be after since"):
        run_report(spark, place, None, at(1), at(1), None, out)


def called(out: Path, **options: Any) -> str:
    said = io.StringIO()
    call_command("queuereport", out=str(out), verbosity=0, stdout=said, **options)
    return said.getvalue()


@pytest.mark.timeout(600)
def test_from_a_queue_with_hostile_texts(spark, place, tmp_path, settings):
    settings.MYSQLQUEUE = {
        "GROUPS": {"all": {"RECORD_DELIVERIES": "all"}, "none": {"RECORD_DELIVERIES": "none"}},
        "RETENTION": 3600,
        "REDACT": lambda text, *, topic, kind: text.replace("ValueError", f"{topic}'s {kind}"),
    }

    def fail(delivery: Any) -> None:
        if delivery.payload["n"] % 5 == 0:
            raise ValueError(f"{delivery.payload['n']} {HOSTILE}".replace("\n", " "))

    publish_many("orders", (Message({"n": n}, key=f"{HOSTILE}{n % 3}") for n in range(1, 11)))
    for group in ("all", "none"):
        sub = Sub(handler("orders", group, fail, max_attempts=1))
        sub.settle()
        sub.poller.write_rollups()
        sub.leave()
    QueueMessageFactory(topic=f"odd{HOSTILE}", partition_key="", published_at=1_790_000_000_000)
    CollectedTopic.objects.create(topic="orders", collected_offset=10**6, published_at=2 * 10**12)

    wrote = json.loads(called(out=tmp_path / "report", format="json"))
    assert wrote == {"page": str(tmp_path / "report" / PAGE), "tables": str(tmp_path / "report" / "tables")}
    html = (tmp_path / "report" / PAGE).read_text()
    found = Outline(html)
    assert not found.tags & {"script", "img"}
    assert "GC has removed messages of “orders” up to offset 1,000,000" in found.text

    def rows(name: str) -> list[dict[str, Any]]:
        return pq.read_table(tmp_path / "report" / "tables" / f"{name}.parquet").to_pylist()

    levels = {
        row["consumer_group"]: (row["recorded"], row["acks_recorded"], row["acks_counted"]) for row in rows("recording")
    }
    assert levels == {"all": ("all", 8, 8), "none": ("nothing", 0, 8)}
    assert [row["messages"] for row in rows("settle_latency")] == [10]
    assert [(row["consumer_group"], row["acks"]) for row in rows("settle_latency_bounds")] == [("all", 8), ("none", 8)]
    # Numbers in errors make no kinds of their own; the group without records has its dead letters all the same.
    assert [(row["consumer_group"], row["dead_lettered"]) for row in rows("failures")] == [("all", 2)]
    assert [(row["consumer_group"], row["dead_letters"]) for row in rows("dead_letters")] == [("all", 2), ("none", 2)]
    assert {row["error"].split(":")[0] for name in ("failures", "dead_letters") for row in rows(name)} == {
        "orders's error"
    }
    assert {row["messages"] for row in rows("top_keys") if row["topic"] == "orders"} == {3, 4}
    (subscriber,) = rows("subscribers")
    assert (subscriber["settled"], subscriber["share"]) == (10, 1.0)
    assert [row["lag"] for row in rows("lag")][-1] == 0
    with (tmp_path / "report" / "tables" / "top_keys.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert HOSTILE + "1" in {row["partition_key"] for row in written}


def test_the_command(spark, place, tmp_path):
    with pytest.raises(CommandError, match=r"--since 'soon': must be a time"):
        call_command("queuereport", out=str(tmp_path / "r"), since="soon")
    publish("orders", 1)
    with pytest.raises(CommandError, match=r"no topic 'order'\. Topics: orders\. Did you mean orders\?"):
        call_command("queuereport", out=str(tmp_path / "r"), topic=["orders", "order"])
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CommandError, match="is not empty and has no report"):
        call_command("queuereport", out=str(tmp_path))


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(tmp_path, scheme):
    """It asks for nothing, fits a phone, and the switch turns every colour."""
    from playwright.sync_api import sync_playwright

    from tests.browser.conftest import CHROMIUM

    if not Path(CHROMIUM).exists():
        pytest.skip(f"There is no {CHROMIUM}.")
    file = tmp_path / PAGE
    file.write_text(render(page(full(HOSTILE))), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
        asked: list[str] = []
        heard: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("console", lambda message: heard.append(message.text))
        tab.goto(file.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") == 390
        assert tab.locator("figure svg:visible").count() == tab.locator("figure").count()

        def colours() -> list[str]:
            script = "['html', '.says', 'svg rect, svg path'].map(one => { const s = getComputedStyle("
            script += "document.querySelector(one)); return s.backgroundColor + s.color })"
            return tab.evaluate(script)  # type: ignore[no-any-return]

        as_asked = colours()
        tab.check(f"#{'dark' if scheme == 'light' else 'light'}", force=True)
        assert all(one != other for one, other in zip(as_asked, colours(), strict=True))
        tab.check(f"#{scheme}", force=True)
        assert colours() == as_asked
        tab.set_viewport_size({"width": 1280, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") == 1280
        browser.close()
    assert asked == [file.as_uri()]
    assert heard == []
