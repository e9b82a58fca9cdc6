"""The charts of a group: what each span shows, gaps, bounds of latencies, and the table of all values."""

from __future__ import annotations

import itertools
import re

import pytest

from django_mysqlqueue.inspection.trends import SPANS, read_history
from django_mysqlqueue.models import ConsumerGroup, Rollup
from tests.support.dashboard import ROOT, page
from tests.support.harness import USING, Sub, handler
from tests.support.internals import Count, GroupRef, Session, rollups
from tests.support.scenarios import G, log

GROUP = {"group": "g", "topic": "t"}
MINUTE_MS, HOUR_MS = 60_000, 3_600_000


def count(at, grain=60, ref=G, **numbers):
    Rollup.objects.create(grain=grain, bucket_at=at, consumer_group=ref.group, topic=ref.topic, **numbers)


@pytest.fixture
def now(db, clock):
    """The 30th second of a minute."""
    Sub(handler())
    clock.advance((30 - Session(USING).now() / 1000) % 60)
    return Session(USING).now()


def history(now, name):
    return read_history(Session(USING), G, SPANS[name], now)


def shown(client, name):
    return client.get(f"{ROOT}group/", {**GROUP, "range": name}).context["history"]


@pytest.mark.parametrize(
    ("name", "points", "length"),
    [("15m", 15, 60), ("1h", 60, 60), ("6h", 72, 300), ("24h", 24, 3600), ("7d", 168, 3600)],
)
def test_spans_end_now(now, client, name, points, length):
    found = history(now, name)
    assert len(found) == points
    assert found[-1].at <= now < found[-1].at + length * 1000
    assert {later.at - earlier.at for earlier, later in itertools.pairwise(found)} == {length * 1000}
    page_ = shown(client, name)
    assert (page_.span, len(page_.rows)) == (name, points)
    assert [row.place for row in page_.rows] == list(range(points))[::-1]


def test_without_a_span_it_is_an_hour(now, client):
    assert shown(client, "").span == shown(client, "nonsense").span == "1h"
    text = page(client, "group", **GROUP)
    for name in SPANS:
        assert f"range={name}" in text
    (current,) = re.findall(r'<a href="[^"]*range=(\w+)" aria-current="true">', text)
    assert current == "1h"


def test_what_nobody_counted_is_a_gap(now):
    minute = now // MINUTE_MS * MINUTE_MS
    count(
        minute - 3 * MINUTE_MS,
        acked=120,
        failed=3,
        dead_lettered=1,
        backlog=7,
        oldest_ms=2500,
        entered=60,
        entered_minutes=1,
    )
    count(minute - MINUTE_MS, backlog=0)
    found = {(one.at - minute) // MINUTE_MS: one for one in history(now, "15m")}
    gap = found[-2]
    assert {gap.backlog, gap.oldest_ms, gap.entered, gap.settled, gap.failed, gap.dead_lettered, gap.p50} == {None}
    one = found[-3]
    assert (one.backlog, one.oldest_ms) == (Count(7), 2500)
    assert (one.entered, one.settled, one.failed, one.dead_lettered) == (1.0, 121 / 60, 3, 1)
    idle = found[-1]
    assert (idle.backlog, idle.entered, idle.settled, idle.failed, idle.p95) == (Count(0), None, 0.0, 0, None)


def test_a_point_of_several_minutes(now):
    begin = now // 300_000 * 300_000 - 300_000
    count(begin, acked=100, backlog=5, oldest_ms=1000, entered=60, entered_minutes=1)
    count(begin + MINUTE_MS, acked=200, backlog=9, backlog_exact=False, oldest_ms=400, failed=2)
    count(begin + 4 * MINUTE_MS, entered=120, entered_minutes=1)
    count(begin, ref=GroupRef("h", "t"), acked=1000)
    count(begin, ref=GroupRef("g", "u"), acked=1000)
    point = next(one for one in history(now, "6h") if one.at == begin)
    assert point.backlog == Count(9, exact=False)
    assert point.oldest_ms == 1000
    assert point.entered == 1.5, "of the two minutes in which it was counted"
    assert (point.settled, point.failed) == (1.0, 2)


def test_hours_are_read_for_a_day_and_a_week(now):
    hour = now // HOUR_MS * HOUR_MS
    count(hour - 2 * HOUR_MS, grain=3600, acked=7200, backlog=3)
    count(hour - 2 * HOUR_MS, acked=1)
    for name in ("24h", "7d"):
        (point,) = [one for one in history(now, name) if one.settled]
        assert (point.at, point.settled) == (hour - 2 * HOUR_MS, 2.0)


def test_the_minute_that_has_begun_has_the_rate_of_its_seconds(now, clock):
    count(now // MINUTE_MS * MINUTE_MS, acked=60)
    assert history(now, "15m")[-1].settled == pytest.approx(2.0, rel=0.1)
    early = now // MINUTE_MS * MINUTE_MS + 5000
    assert history(early, "15m")[-1].settled is None, "counts are written every ten seconds"


def test_latencies_are_bounds(now, client):
    tally = rollups.Tally()
    for latency in [30] * 10 + [90_000] * 9 + [90_000_000]:
        tally.acked(latency)
    count(now // MINUTE_MS * MINUTE_MS - MINUTE_MS, **dict(zip(rollups.COUNTS, tally.counts(), strict=True)))
    count(now // MINUTE_MS * MINUTE_MS - 2 * MINUTE_MS, acked=1, latency_over=1)
    rows = {row.place: row.cells for row in shown(client, "15m").rows}
    assert rows[13][4:6] == ["≤ 50 ms", "≤ 2 min"]
    assert rows[12][4:6] == ["> 1 d", "> 1 d"]
    text = page(client, "group", **GROUP)
    assert "> 1 d" in text.replace("&gt;", ">")


def test_the_table_has_every_value_of_the_charts(now, client):
    count(
        now // MINUTE_MS * MINUTE_MS - MINUTE_MS,
        acked=6000,
        failed=1234,
        backlog=100_000,
        backlog_exact=False,
        oldest_ms=90_000,
    )
    found = shown(client, "1h")
    assert found.head == ["backlog", "oldest", "in/s", "out/s", "p50", "p95", "failed", "dead-lettered"]
    assert found.rows[1].cells == ["100,000+", "1 min 30 s", "-", "100", "-", "-", "1,234", "0"]
    assert found.rows[2].cells == ["-"] * 8
    text = page(client, "group", **GROUP)
    assert 'data-columns="1,2"' in text
    assert text.count('class="mq-chart"') == 4
    # A value without neighbors is a dot, and gaps are no lines.
    assert "<circle" in text
    assert "<polyline" not in text


def test_lines_end_at_gaps(now, client):
    minute = now // MINUTE_MS * MINUTE_MS
    for ago in (1, 2, 3, 6, 7):
        count(minute - ago * MINUTE_MS, backlog=ago)
    text = page(client, "group", **GROUP, range="15m")
    lines = re.findall(r'<polyline class="mq-line mq-p50" points="([^"]*)"', text)
    assert [len(points.split()) for points in lines] == [2, 3]


def test_times_and_numbers_are_localized(now, client, settings):
    settings.LANGUAGE_CODE = "de"
    settings.TIME_ZONE = "Asia/Kolkata"
    count(now // MINUTE_MS * MINUTE_MS - MINUTE_MS, acked=150, backlog=1)
    found = shown(client, "15m")
    assert found.rows[1].cells[3] == "2,5"
    assert re.fullmatch(r"\d\d:\d\d", found.rows[0].time)
    week = shown(client, "7d")
    assert re.fullmatch(r"\d\d\.\d\d\.\d{4} \d\d:\d\d", week.rows[0].time)


def test_the_backlog_of_a_running_subscriber_is_shown(db, client, clock):
    sub = Sub(handler())
    log(5)
    sub.step()
    for _ in sub.poller.maintenance.round():
        pass
    assert {"5"} == {row.cells[0] for row in shown(client, "1h").rows} - {"-"}


def test_other_groups_have_no_part(now, client):
    ConsumerGroup.objects.create(consumer_group="h", topic="t", mode="ordered")
    count(now // MINUTE_MS * MINUTE_MS - MINUTE_MS, ref=GroupRef("h", "t"), backlog=9)
    assert {cell for row in shown(client, "1h").rows for cell in row.cells} == {"-"}
