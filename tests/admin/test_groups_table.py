"""The table of groups on the overview: states, rates, time to drain, and the order of the rows."""

from __future__ import annotations

import dataclasses
import datetime
import re

import pytest
from django.utils import timezone

from django_mysqlqueue import operations
from django_mysqlqueue.admin.group_table import KEYS
from django_mysqlqueue.admin.pages import base
from django_mysqlqueue.models import ConsumerGroup, Rollup
from django_mysqlqueue.operations import pausing
from tests.support.dashboard import ROOT, page
from tests.support.handlers import fail
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import Count, GroupRef, Session
from tests.support.scenarios import dead_letters, log

pytestmark = pytest.mark.still_clock

MINUTE_MS = 60_000


def rows(client, **query):
    return client.get(ROOT, query).context["rows"]


def row_of(client, group="g"):
    return next(row for row in rows(client) if row.group.ref.group == group)


def counts(ref=("g", "t"), *, entered=None, minutes=range(1, 6), **numbers):
    """Rows of the rollups of some minutes ago, and the group is older."""
    now = Session(USING).now()
    ConsumerGroup.objects.update(registered_at=now - 3_600_000)
    for ago in minutes:
        Rollup.objects.update_or_create(
            grain=60,
            bucket_at=(now // MINUTE_MS - ago) * MINUTE_MS,
            consumer_group=ref[0],
            topic=ref[1],
            defaults={"entered": entered or 0, "entered_minutes": 0 if entered is None else 1, **numbers},
        )
    return now


def seconds(now):
    """How long the last five minutes and the one that has begun are."""
    return 300 + now % MINUTE_MS / 1000


def test_rates_of_the_last_minutes(db, client):
    Sub(handler())
    now = counts(entered=120, acked=240, dead_lettered=60, filtered=60, expired=30, superseded=30, failed=999)
    row = row_of(client)
    assert row.rates.entered == 2
    assert row.rates.settled == pytest.approx(420 * 5 / seconds(now), rel=0.02)
    assert row.entered == "2.0"
    text = page(client)
    assert "in/s" in text
    assert "out/s" in text
    assert "150 superseded" in text
    assert row.failed == 999 * 5


def test_the_last_hour_of_backlog_and_failures(db, client):
    Sub(handler())
    assert "mq-spark" not in page(client), "nothing has happened"
    counts(minutes=(0, 3, 59), backlog=7, failed=2)
    counts(minutes=(4,), backlog=9, failed=1)
    counts(minutes=(60,), backlog=99, failed=99)
    row = row_of(client)
    assert row.failures == [2, *[0] * 10, 5]
    assert row.backlogs == [7, *[None] * 10, 9], "the highest sample, and None without one"
    assert row.failed == 5, "of the last 30 minutes"
    backlogs, failures = re.findall(r'mq-spark[^>]*aria-label="([^"]*)".*?<polyline[^>]*points="([^"]*)"', page(client))
    assert backlogs == ("Backlog in the last hour", "0.0,6.4 120.0,2.0")
    assert failures[0] == "Failed attempts in the last hour"
    assert "Groups <small>charts: the last hour, scaled by row</small>" in page(client)
    assert len(failures[1].split()) == 12


def test_rates_of_a_group_that_was_registered_just_now(db, client, clock):
    sub = Sub(handler())
    log(30)
    sub.settle()
    sub.poller.write_rollups()
    row = row_of(client)
    assert row.rates.settled > 5, "not 30 messages in five minutes"
    assert row.entered == "-", "nobody has counted a whole minute"
    assert row.time_to_drain == "-"


@pytest.mark.parametrize(
    ("entered", "acked", "age", "expected"),
    [
        (0, 60, 0, "1 min 40 s"),
        (60, 120, 0, "1 min 40 s"),
        (120, 60, 0, "-"),
        (120, 60, 61, "never"),
        (60, 60, 61, "never"),
        (None, 60, 61, "-"),
        (0, 0, 61, "never"),
    ],
)
def test_time_to_drain(db, client, clock, monkeypatch, entered, acked, age, expected):
    now = Session(USING).now()
    clock.advance((-now % MINUTE_MS) / 1000)  # A minute begins: the one that has begun does not dilute the rates.
    sub = Sub(handler())
    log(100, "a")
    clock.advance(age)
    clock.advance((-Session(USING).now() % MINUTE_MS) / 1000 if age else 0)
    sub.beat()
    counts(entered=entered, acked=acked)
    ConsumerGroup.objects.update(registered_at=1)
    found = row_of(client).time_to_drain
    assert re.sub(r"1 min (3[89]|4\d) s", "1 min 40 s", found) == expected


def test_a_backlog_that_is_not_counted_to_its_end_lasts_longer(db, client, monkeypatch):
    monkeypatch.setattr(base.Page, "bounds", dataclasses.replace(base.Page.bounds, count=10))
    Sub(handler())
    log(100, "a")
    counts(entered=0, acked=60)
    assert row_of(client).time_to_drain.startswith("more than ")


# -- the newest sample of a backlog that was not counted to its end ----------------


def group_page(client, group="g", topic="t"):
    return client.get(f"{ROOT}group/", {"group": group, "topic": topic}).context


def backlogs(client):
    """The backlog on the cards of the overview, in its table, and on the group's page."""
    found = client.get(ROOT).context
    card = next(one.value for one in found["cards"] if one.name == "backlog")
    return [card, str(found["rows"][0].group.lag), str(group_page(client)["group"].lag)]


@pytest.fixture
def stops(db, clock, monkeypatch):
    """A group with 100 messages, of which ten are counted. It is the tenth second of a minute."""
    monkeypatch.setattr(base.Page, "bounds", dataclasses.replace(base.Page.bounds, count=10))
    clock.advance((10 - Session(USING).now() / 1000) % 60)
    Sub(handler())
    log(100, "a")
    now = counts(entered=60, acked=120)
    return now // MINUTE_MS * MINUTE_MS


def sample(minute, ago=0, ref=("g", "t"), **values):
    Rollup.objects.update_or_create(
        grain=60,
        bucket_at=minute - ago * MINUTE_MS,
        consumer_group=ref[0],
        topic=ref[1],
        defaults={"sampled_at": minute - ago * MINUTE_MS, **values},
    )


def test_the_newest_sample_stands_for_a_backlog_whose_count_stopped(stops, client):
    """It says how old it is, and the newest two samples tell how fast it falls, whatever the rates are."""
    sample(stops, 2, backlog=5000)
    sample(stops, 1, backlog=3600)
    sample(stops, 0, ref=("h", "t"), backlog=8000)
    sample(stops, 0, ref=("g", "u"), backlog=9000)
    shown = [re.sub(r"1 min 1\d s", "1 min 10 s", text) for text in backlogs(client)]
    assert shown == ["≈ 3,600 (1 min 10 s ago)"] * 3
    row = row_of(client)
    assert row.drain == pytest.approx(3600 / (1400 / 60) - 70, abs=5), "from when the sample was taken"
    assert "more than" not in row.time_to_drain
    assert "≈ 3,600" in page(client)
    counts(entered=120, acked=60, minutes=range(3, 6))
    assert row_of(client).state.text == "working", "what came in before does not count"


def test_a_sample_that_stopped_is_no_bound_of_now(stops, client):
    """A minute ago, there were at least as many; by now there may be fewer."""
    sample(stops, 1, backlog=3600, backlog_exact=False)
    assert backlogs(client) == ["10+"] * 3
    row = row_of(client)
    assert row.time_to_drain == "more than 10 s", "at the rates of the newest minute"


def test_a_sample_that_is_too_old_for_its_own_trend_tells_no_time(stops, client):
    """By its trend, the backlog would be settled; the count of now says that it is not."""
    sample(stops, 2, backlog=9000)
    sample(stops, 1, backlog=1000)
    assert row_of(client).time_to_drain == "-"


def test_nothing_is_said_of_the_end_of_what_nobody_works_on(db, clock, client):
    clock.advance((10 - Session(USING).now() / 1000) % 60)
    sub = Sub(handler())
    log(100, "a")
    counts(entered=0, acked=600)
    assert row_of(client).time_to_drain != "-"
    pausing.set_paused(USING, GroupRef("g", "t"), actor="ada", paused=True)
    for acked in (600, 0):
        counts(entered=60, acked=acked)
        for row in (row_of(client), group_page(client)["figures"]):
            assert (row.time_to_drain, row.drained_text, row.state.text) == ("-", "", "paused")
    pausing.set_paused(USING, GroupRef("g", "t"), actor="ada", paused=False)
    clock.advance(61)
    counts(entered=0, acked=600)
    assert row_of(client).time_to_drain == "-", "its subscribers are lost"
    sub.beat()
    assert row_of(client).time_to_drain != "-"


@pytest.mark.parametrize("values", [{"ago": 3, "backlog": 3600}, {"ago": 1, "backlog": 9}, {"ago": 1}])
def test_an_old_or_smaller_sample_or_none_counts_for_nothing(stops, client, values):
    sample(stops, **values)
    assert backlogs(client) == ["10+"] * 3


def test_a_sample_of_before_a_seek_counts_for_nothing(stops, client):
    sample(stops, 1, backlog=3600)
    ConsumerGroup.objects.update(sought_at=stops - MINUTE_MS + 1)
    assert backlogs(client) == ["10+"] * 3


def test_an_exact_count_needs_no_sample(db, clock, client):
    Sub(handler())
    log(100, "a")
    now = counts(entered=0, acked=60)
    sample(now // MINUTE_MS * MINUTE_MS, backlog=3600)
    assert backlogs(client) == ["100"] * 3


def test_sums_of_counts():
    about = Count(5, exact=False, age=40, least=3)
    assert str(about + Count(1)) == str(Count(1) + about) == "≈ 6 (40 s ago)"
    assert str(about + Count(5, exact=False, age=90)) == "≈ 10 (1 min 30 s ago)"
    assert str(about + Count(1, exact=False)) == str(Count(1, exact=False) + about) == "4+", "a bound is current"
    assert (about + about + Count(1)).least == 7
    assert Count(1) + Count(2) == Count(3)
    assert Count(1, exact=False) + Count(2) == Count(3, exact=False)


# -- when the backlog is settled -----------------------------------------------


@pytest.mark.parametrize(
    ("zone", "expected"),
    [("UTC", "about 12:30 p.m."), ("Asia/Tokyo", "about 9:30 p.m."), ("Pacific/Auckland", "about ")],
)
def test_the_time_of_day_is_that_of_the_time_zone(db, client, zone, expected):
    Sub(handler())
    log(1)
    at = datetime.datetime(2026, 3, 4, 12, 0, tzinfo=datetime.UTC)
    row = dataclasses.replace(row_of(client), drain=1800.0, now=int(at.timestamp() * 1000))
    with timezone.override(zone):
        assert row.drained_text.startswith(expected)
        assert row.time_to_drain == "30 min"
        tomorrow = dataclasses.replace(row, drain=86_400.0).drained_text
    assert "2026" in tomorrow, "another day has its date"


@pytest.mark.parametrize("drain", [None, 0.0, 59.0, 40 * 86_400.0, float("inf")])
def test_without_a_time_of_day(db, client, drain):
    Sub(handler())
    log(1)
    assert dataclasses.replace(row_of(client), drain=drain).drained_text == ""


def test_the_overview_and_the_page_of_the_group_say_when(db, client, clock):
    clock.advance((10 - Session(USING).now() / 1000) % 60)
    Sub(handler())
    log(300, "a")
    counts(entered=0, acked=60)
    text = row_of(client).drained_text
    assert text.startswith("about ")
    assert f"<bdi>{text}</bdi>" in page(client)
    found = page(client, "group", group="g", topic="t")
    assert f"<bdi>{group_page(client)['figures'].drained_text}</bdi>" in found
    assert "time to drain" in found
    assert group_page(client)["figures"].rates.entered == 0


def test_what_is_in_flight_has_no_time_to_drain(db, client, clock):
    sub = Sub(handler())
    log(6)
    sub.step()
    clock.advance(61)
    sub.beat()
    counts(entered=1, acked=2)
    row = row_of(client)
    assert (row.group.in_flight.value, row.group.lag.value) == (6, 6)
    assert row.time_to_drain == "-"
    assert row.state.text == "working"
    counts(entered=2, acked=1)
    assert row_of(client).state.text == "working", "not growing"
    log(1)
    assert row_of(client).time_to_drain != "-"


def test_the_row_of_the_overview_and_that_of_the_page_of_a_group_have_the_same_figures(db, client, clock):
    clock.advance((10 - Session(USING).now() / 1000) % 60)
    Sub(handler())
    log(9)
    counts(entered=60, acked=120, dead_lettered=4, failed=3, filtered=2, expired=1)
    counts(entered=30, acked=60, failed=6, minutes=range(8, 9))
    one, other = row_of(client), group_page(client)["figures"]
    assert one.failed == 4 * 5 + 6, "of each minute: a poison message counts no failed attempt"
    assert (one.failed, one.passed, one.state, one.age_ms // 5000) == (
        other.failed,
        other.passed,
        other.state,
        other.age_ms // 5000,
    )
    assert one.rates.entered == other.rates.entered == 1.0
    assert one.rates.settled == pytest.approx(other.rates.settled, rel=0.02)


# -- states ----------------------------------------------------------------------


def test_states(db, client, clock):
    live = [Sub(handler(group=name)) for name in ("idle", "works", "grows", "pauses")]
    live[0].leave()
    for name in ("alone", "empty"):
        Sub(handler(group=name)).leave()
    live = [Sub(handler(group=name)) for name in ("idle", "works", "grows", "pauses")]
    log(20)
    live[0].settle()
    operations.seek("empty", "t", "latest", actor="ada")
    pausing.set_paused(USING, GroupRef("pauses", "t"), actor="ada", paused=True)
    clock.advance(61)
    for sub in live:
        sub.beat()
    counts(("grows", "t"), entered=60, acked=30)
    counts(("works", "t"), entered=30, acked=600)
    found = {row.group.ref.group: (row.state.text, row.state.rank) for row in rows(client)}
    assert found == {
        "alone": ("no subscribers", 0),
        "grows": ("growing", 1),
        "pauses": ("paused", 1),
        "empty": ("no subscribers", 2),
        "idle": ("idle", 2),
        "works": ("working", 2),
    }
    assert [row.group.ref.group for row in rows(client)] == list(found), "the worst first, then by name"
    text = page(client)
    assert '<tr class="mq-state-0">' in text
    assert '<span class="mq-tag mq-bad">no subscribers</span>' in text


def test_only_a_group_that_works_is_green(db, client):
    """In the first minute, missing subscribers are a note."""
    sub = Sub(handler(group="works"), handler(group="alone", start="latest"))
    gone = Sub(handler(group="gone"))
    log(20)
    sub.step()
    gone.leave()
    text = page(client)
    assert '<span class="mq-tag mq-ok">working</span>' in text
    assert '<span class="mq-tag">no subscribers</span>' in text


def test_dead_letters_and_failures_of_a_group(db, client):
    dead_letters(3)
    sub = Sub(handler("t", "g", fail, max_attempts=1))
    log(2)
    sub.settle()
    sub.poller.write_rollups()
    sequence()
    row = row_of(client)
    assert row.group.dead_letters.value == 5
    assert row.failed == 2
    links = re.findall(r'href="([^"]*deadletters/\?group=g&topic=t)"', page(client))
    assert links
    assert client.get(links[-1]).status_code == 200


def test_limits(db, client):
    Sub(handler(rate="10/s"))
    assert row_of(client).limits == "10/s"


# -- the order -------------------------------------------------------------------


@pytest.fixture
def three(db, clock):
    """Groups a on u, b and c on t, whose figures are all different."""
    subs = {
        name: Sub(handler(topic, name, fail, max_attempts=1)) for topic, name in (("u", "a"), ("t", "b"), ("t", "c"))
    }
    log(4)
    log(9, topic="u")
    subs["b"].settle()
    subs["b"].poller.write_rollups()
    sequence()
    clock.advance(30)
    log(1)
    Sub(handler("t", "c"))
    counts(("a", "u"), entered=5, acked=1)
    counts(("b", "t"), entered=6, acked=8)
    counts(("c", "t"), entered=4, acked=3)


@pytest.mark.parametrize(
    ("sort", "names"),
    [
        ("group", "bca"),
        ("-group", "acb"),
        ("backlog", "bca"),
        ("-backlog", "acb"),
        ("-oldest", "cab"),
        ("-in", "bac"),
        ("-out", "bca"),
        ("-dead", "bca"),
        ("-failed", "bca"),
        ("-subscribers", "cba"),
        ("", "bca"),
        ("nonsense", "bca"),
        ("-", "bca"),
    ],
)
def test_the_order_of_the_rows(three, client, sort, names):
    found = "".join(row.group.ref.group for row in rows(client, sort=sort))
    if sort in ("", "nonsense", "-"):
        assert sorted(found) == sorted(names)
    else:
        assert found == names


def test_every_head_is_a_link_that_sorts(three, client):
    text = page(client)
    links = re.findall(r'<th scope="col"[^>]*><a href="([^"]*)">', text)
    assert len(links) == len(KEYS)
    for link in links:
        found = client.get(link).content.decode()
        name = link.split("sort=")[1]
        order = "descending" if name.startswith("-") else "ascending"
        (head,) = re.findall(r'<th scope="col"[^>]*aria-sort="(\w+)"[^>]*><a href="([^"]*)"', found)
        back = name.removeprefix("-") if name.startswith("-") else f"-{name}"
        assert head == (order, head[1])
        assert head[1].endswith(f"sort={back}")


def test_the_order_keeps_the_span_and_the_span_the_order(three, client):
    text = page(client, sort="-backlog", span="day")
    assert re.search(r"\?sort=backlog&span=day|\?span=day&sort=backlog", text)
    assert re.search(r"span=hour[^\"]*sort=-backlog|sort=-backlog[^\"]*span=hour", text)


def test_the_groups_come_before_the_charts(db, client):
    Sub(handler())
    text = page(client)
    places = [text.index(f'aria-labelledby="mq-{name}"') for name in ("problems", "groups", "throughput")]
    assert places == sorted(places)
