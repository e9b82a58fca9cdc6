"""The report is right, says what it cannot know, and takes no text for markup."""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from django.core.management import CommandError, call_command

from django_mysqlqueue import publish
from django_mysqlqueue.models import CollectedTopic, QueueMessage
from pyspark_mysqlqueue.archive import run
from pyspark_mysqlqueue.archive.root import Root
from pyspark_mysqlqueue.archive.run import Job
from pyspark_mysqlqueue.cli import moment
from pyspark_mysqlqueue.errors import PipelineError
from pyspark_mysqlqueue.report import PAGE, charts, page, queries, run_report, words
from tests.support.factories import QueueMessageFactory
from tests.support.harness import sequence
from tests.support.internals import lane

pytestmark = [pytest.mark.any_engine, pytest.mark.any_version]

DAY = datetime.datetime(2026, 11, 2, tzinfo=datetime.UTC)
"""A Monday."""
HOSTILE = "</script></svg><img src=x onerror=alert(1)>&\"'\u202e{{ 7*7 }}\x00\n=1+1"
SHOWN = "</script></svg><img src=x onerror=alert(1)>&\"'\\u202e{{ 7*7 }}\\u0000\\u000a=1+1"
VOID = {"meta", "link", "input", "br", "img"}


def at(hours: float) -> datetime.datetime:
    return DAY + datetime.timedelta(hours=hours)


def message(hours: float, **values: Any) -> None:
    QueueMessageFactory(published_at=int(at(hours).timestamp() * 1000), **values)


def growing(topic: str = "orders", key: str = "ada", *, days: int = 6) -> None:
    """One message more each day, all at nine o'clock, of two keys."""
    for day in range(days):
        for number in range(day + 1):
            message(24 * day + 9, topic=topic, partition_key="bob" if number == 3 else key, payload=b"x" * 100)


def facts(place: Any, root: Root | None = None, **options: Any) -> queries.Facts:
    given = {"since": None, "until": None, "topics": None, "retention": None, **options}
    return queries.gather(place, root, **given)


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


def said(found: queries.Facts, section: str) -> tuple[str, str]:
    """A section's sentences, and what it says cannot be known."""
    (one,) = [one for one in page.sections(found) if one.id == section]
    return " ".join(one.says), one.unknown


# -- words --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (words.number(1234567), "1,234,567"),
        (words.number(2.345), "2.35"),
        (words.number(23.45), "23.4"),
        (words.share(0.1234), "12.3 %"),
        (words.share(0.0001), "< 0.1 %"),
        (words.share(1), "100 %"),
        (words.share(0), "0 %"),
        (words.size(999), "999 bytes"),
        (words.size(1_500_000), "1.5 MB"),
        (words.size(3e15), "3,000.0 TB"),
        (words.short(0), "0"),
        (words.short(1500), "1.5k"),
        (words.short(2e7), "20M"),
        (words.short(4e12), "4000G"),
        (words.counted(1, "message"), "1 message"),
        (words.counted(1200, "message"), "1,200 messages"),
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
    assert [charts.step_for(days) for days in (1, 150, 151, 1050, 1051, 10**6)] == [1, 1, 7, 7, 28, 364]


def test_moments_as_options():
    now = datetime.datetime.now(datetime.UTC)
    assert moment("36h") - now == pytest.approx(-datetime.timedelta(hours=36), abs=datetime.timedelta(minutes=1))
    assert moment("2w") - now == pytest.approx(-datetime.timedelta(days=14), abs=datetime.timedelta(minutes=1))
    assert moment("2026-11-21") == datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
    assert moment("2026-11-22T07:00+02:00") == datetime.datetime(2026, 11, 22, 5, tzinfo=datetime.UTC)
    for text in ("yesterday", "", "9y", "-3d", "999999w"):
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(f"{text!r}: must be")):
            moment(text)


# -- figures ------------------------------------------------------------------


def test_figures_and_sentences(place):
    growing()
    message(2, topic="mails", partition_key="", payload=b"")
    found = facts(place, retention={"orders": 86_400.0, "mails": None}.__getitem__)
    assert found.rows("topics") == [
        {"topic": "orders", "messages": 21, "bytes": 2100, "keys": 2, "first_at": at(9), "last_at": at(5 * 24 + 9)},
        {"topic": "mails", "messages": 1, "bytes": 0, "keys": 1, "first_at": at(2), "last_at": at(2)},
    ]
    assert [row["messages"] for row in found.rows("days") if row["topic"] == "orders"] == [1, 2, 3, 4, 5, 6]
    (trend,) = found.rows("trend")
    assert trend == pytest.approx(
        {
            "days": 4,
            "messages_per_day": 3.5,
            "bytes_per_day": 350.0,
            "slope": 1.0,
            "slope_error": 0.0,
            "at_end": 5.0,
            "is_significant": True,
        }
    )
    assert found.rows("hours")[0] == {"weekday": 1, "hour": 2, "messages": 1, "days": 1}
    assert {(row["hour"], row["messages"]) for row in found.rows("hours")[1:]} == {(9, n) for n in range(1, 7)}
    skew = found.rows("skew")[0]
    assert skew == {
        "topic": "orders",
        "keys": 2,
        "messages": 21,
        "gini": pytest.approx(2 * (3 + 2 * 18) / (2 * 21) - 3 / 2),
        "top_share": pytest.approx(18 / 21),
        "top_1_percent": pytest.approx(18 / 21),
        "top_10_percent": pytest.approx(18 / 21),
    }
    keys = [(row["place"], row["partition_key"], row["messages"], row["bytes"]) for row in found.rows("top_keys")]
    assert keys == [(1, "", 1, 0), (1, "ada", 18, 1800), (2, "bob", 3, 300)]
    traffic = said(found, "traffic")[0]
    assert traffic == (
        "22 messages were published to 2 topics. The largest topic is “orders”, with 95.5 % of the messages. On "
        "average over 4 whole days, 4 messages and 350 bytes of payload were published per day. The number of messages "
        "per day grows by 1 ± 0 from one day to the next (two standard errors). At the average rate, GC keeps about 3 "
        "messages in the log: the retention of each topic multiplied by its rate, provided that every group keeps up. "
        "GC never removes messages of “mails”."
    )
    assert said(found, "hours")[0].startswith(
        "The busiest hour of the week is Saturday, 09:00 to 10:00 UTC, with 6 messages on average. 7 of the 168 hours"
    )
    assert said(found, "skew")[0].startswith("“orders” has 2 keys. The largest, “ada”, has 85.7 % of the messages;")
    assert said(found, "sizes")[0].startswith("Half of the payloads of “orders” have at most 100 bytes,")


def test_sizes_are_exact(place):
    for size in (0, 10, 100, 101, 3_000_000):
        message(0, payload=b"x" * size)
    found = facts(place)
    (sizes,) = found.rows("sizes")
    assert sizes == {
        "topic": "t",
        "messages": 5,
        "mean_bytes": 3_000_211 / 5,
        "p50_bytes": 100,
        "p90_bytes": 3_000_000,
        "p99_bytes": 3_000_000,
        "max_bytes": 3_000_000,
    }
    classes = [(row["up_to_bytes"], row["messages"]) for row in found.rows("size_classes")]
    assert classes == [(100, 3), (250, 1), (10_000_000, 1)]


def test_percentiles_are_sizes_that_messages_have(place):
    for size in range(10, 110, 10):
        message(0, payload=b"x" * size)
    (sizes,) = facts(place).rows("sizes")
    assert [sizes[f"{name}_bytes"] for name in ("p50", "p90", "p99", "max")] == [50, 90, 100, 100]


def test_a_slope_within_its_error_is_no_growth(place):
    for day, count in enumerate((1, 2, 1, 2, 1, 2, 1)):
        for _ in range(count):
            message(24 * day)
    assert "Growth is not significant: the number of messages per day changes by" in said(facts(place), "traffic")[0]


def test_days_without_a_message_are_part_of_the_trend(place):
    message(0)
    message(24 * 7)
    (trend,) = facts(place).rows("trend")
    assert (trend["days"], trend["messages_per_day"], trend["slope"]) == (6, 0.0, 0.0)


def test_what_cannot_be_known_is_said(place):
    message(0)
    CollectedTopic.objects.create(topic="t", collected_offset=7, published_at=2 * 10**12)
    found = facts(place, since=at(-5))
    assert said(found, "traffic")[1].startswith("The messages cover no whole day")
    assert any("GC has removed messages of “t” up to offset 7" in text for text in page._about(found))
    message(48)
    assert said(facts(place), "traffic")[1].startswith("Growth cannot be estimated from 1 whole day;")


def test_the_forecast(place):
    """With n messages per day and one more each day, after x days there are n·x + x²/2 more."""
    growing()
    rows = facts(place).rows("growth_forecast")
    assert [row["messages"] for row in rows] == [10**5, 10**6, 10**7, 10**8, 10**9]
    days = [(row["expected"] - at(5 * 24).date()).days for row in rows[:2]]
    assert days == [pytest.approx(442, abs=2), pytest.approx(1409, abs=2)]
    assert rows[-1]["expected"] is None, "not within ten years"


def test_many_topics_are_told_apart_as_far_as_colours_go(place):
    for number in range(20):
        message(0, topic=f"t{number:02}")
    html = page.render(facts(place))
    assert "t04: 1 messages" in html
    assert "t05: 1 messages" not in html
    assert "all others: 15 messages" in html


@pytest.mark.parametrize(
    ("key", "shown"),
    [("ada", "priority +10: ada"), ("", "priority +10: (empty)"), ("__p:3", "priority +10: __p:3")],
)
def test_keys_with_a_priority_are_shown_with_both(place, key, shown):
    growing(key=lane(key, 10))
    text = Outline(page.render(facts(place))).text
    assert f"The largest, “{shown}”, has 85.7 % of the messages" in text


# -- the archive --------------------------------------------------------------


def test_the_archive_and_the_log_after_it(place, tmp_path):
    growing()
    whole = facts(place)
    root = Root(str(tmp_path / "archive"))
    run.grow(Job(None, place, root))
    last = QueueMessage.objects.order_by("-offset")[0].offset
    QueueMessage.objects.filter(offset__lt=last - 3).delete()
    CollectedTopic.objects.create(topic="orders", collected_offset=last - 4, published_at=1)
    found = facts(place, root)
    for name in queries.QUERIES:
        assert found.rows(name) == whole.rows(name)
    growing(days=1)
    assert facts(place, root).messages == 22
    assert facts(place, root, since=at(24), until=at(48)).messages == 2
    assert facts(place, root, topics=["other"]).messages == 0
    assert "the archive and the messages of the live log after it" in page._about(found)[0]
    CollectedTopic.objects.update(collected_offset=last + 1)
    with pytest.raises(PipelineError, match="some messages are lost"):
        facts(place, root)


# -- the page -----------------------------------------------------------------


def test_no_text_is_taken_for_markup(place):
    growing(HOSTILE[:100], HOSTILE)
    message(1, topic="other")
    html = page.render(facts(place))
    found = Outline(html)
    assert not found.tags & {"script", "img", "iframe", "object"}
    assert "49" not in re.findall(r"onerror=alert\(1\)&gt;[^<]*\\u202e(\S+)", html)
    assert SHOWN in found.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e]", html)
    assert not [item for item in found.attributes if item[1].startswith("on")]


def test_the_page_is_one_file(place):
    growing()
    html = page.render(facts(place))
    found = Outline(html)
    loading = [value for _, name, value in found.attributes if name in ("src", "href", "srcset", "xlink:href", "data")]
    assert loading == ["data:,"]
    assert "@import" not in html
    assert "url(" not in html
    assert "://" not in html
    ids = [value for _, name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    pictures = [value for tag, name, value in found.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(pictures) == 2
    assert all(len(text or "") > 40 for text in pictures)


def test_a_long_table_is_cut_and_says_so(place):
    for day in range(80):
        message(24 * day)
    assert "The first 50 of 80 rows; all are in <code>tables/days.csv</code>" in page.render(facts(place))


# -- from the queue to the page -----------------------------------------------


def test_an_empty_log_then_one_message(place, tmp_path):
    out = tmp_path / "report"
    first = run_report(place, None, None, None, None, out)
    assert "No message was published in this period." in Outline(first[0].read_text()).text
    publish("orders", {"n": 1}, key="k")
    sequence()
    run_report(place, None, None, None, None, out)
    text = Outline((out / PAGE).read_text()).text
    assert "1 message was published to 1 topic." in text
    assert pq.read_table(out / "tables" / "topics.parquet").to_pylist()[0]["messages"] == 1
    with pytest.raises(PipelineError, match="must be after since"):
        run_report(place, None, at(1), at(1), None, out)


def test_only_a_reports_own_folder_is_written_over(place, tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(PipelineError, match="the folder is not empty and has no report"):
        run_report(place, None, None, None, None, tmp_path)
    with pytest.raises(PipelineError, match="is a file; use a folder"):
        run_report(place, None, None, None, None, tmp_path / "notes.txt")
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_the_command_needs_no_spark(place, tmp_path, settings, monkeypatch):
    settings.MYSQLQUEUE = {"RETENTION": 86_400}
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.delenv("MYSQLQUEUE_URL")
    with pytest.raises(CommandError, match=r"'soon': must be a time"):
        call_command("queuereport", "--out", str(tmp_path / "r"), "--since", "soon")
    growing(key=HOSTILE)
    with pytest.raises(CommandError, match=r"no topic 'order'\. Topics: orders\. Did you mean orders\?"):
        call_command("queuereport", out=str(tmp_path / "r"), topic=["orders", "order"])
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CommandError, match="is not empty and has no report"):
        call_command("queuereport", out=str(tmp_path))
    out, said = tmp_path / "report", io.StringIO()
    call_command("queuereport", out=str(out), format="json", verbosity=0, stdout=said)
    assert json.loads(said.getvalue()) == {"page": str(out / PAGE), "tables": str(out / "tables")}
    assert "At the average rate, GC keeps about " in Outline((out / PAGE).read_text()).text
    with (out / "tables" / "top_keys.csv").open(newline="") as file:
        assert HOSTILE in {row["partition_key"] for row in csv.DictReader(file)}


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(place, tmp_path, scheme):
    """It asks for nothing, fits a phone, and follows the color scheme."""
    from playwright.sync_api import sync_playwright

    from tests.browser.conftest import CHROMIUM

    if not Path(CHROMIUM).exists():
        pytest.skip(f"There is no {CHROMIUM}.")
    growing(HOSTILE[:100], HOSTILE)
    message(1, topic="other")
    file = tmp_path / PAGE
    file.write_text(page.render(facts(place)), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
        asked: list[str] = []
        heard: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("console", lambda message: heard.append(message.text))
        tab.goto(file.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") == 390
        background = tab.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 29)"}[scheme]
        fills = tab.evaluate("[...document.querySelectorAll('rect')].map(one => getComputedStyle(one).fill)")
        assert not {"rgb(0, 0, 0)"} & {*fills}
        tab.set_viewport_size({"width": 1280, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") == 1280
        browser.close()
    assert asked == [file.as_uri()]
    assert heard == []
