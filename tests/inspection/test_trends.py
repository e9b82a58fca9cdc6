"""What pages say of a backlog and its end, over histories that move on in seconds: never what was true before."""

from __future__ import annotations

import dataclasses
import math

import pytest

from django_mysqlqueue.inspection import group_problems
from django_mysqlqueue.inspection.trends import RATE_MINUTES, read_row, with_sample
from django_mysqlqueue.service.samples import MOST
from tests.inspection.test_group_problems import G, group, head, live
from tests.support.internals import Bucket, Count

MINUTE_MS = 60_000
START = 1_000 * MINUTE_MS
COUNTED = 10_000
"""Where the counts of pages stop."""
NOTHING = Bucket(G, 0, 0, 0, 0, 0, 0, 0, (), None, 0, 0, 0)


class History:
    """A backlog that changes by steps of seconds, with what subscribers store of it.

    Args:
        backlog: the number of messages at the start.
        entered: by minute, how many messages come in per second.
        settled: by minute, how many are settled per second if there are any.
    """

    def __init__(self, backlog, entered, settled):
        self.numbers = [backlog]
        self.oldest = 90
        """The age of the oldest message in seconds."""
        self.entered, self.settled = [], []
        for second in range(60 * len(entered)):
            comes = entered[second // 60]
            goes = min(self.numbers[-1] + comes, settled[second // 60])
            self.entered.append(comes)
            self.settled.append(goes)
            self.numbers.append(self.numbers[-1] + comes - goes)

    def buckets(self, second):
        """The rows of minutes at a second. Three seconds after a minute began, a subscriber looks."""
        found = []
        for minute in range(max(0, second // 60 - RATE_MINUTES), second // 60 + 1):
            looked, ends = 60 * minute + 3, 60 * (minute + 1)
            values = {"acked": sum(self.settled[60 * minute : min(ends, second)])}
            if looked <= second:
                backlog = Count(self.numbers[looked]).capped(MOST)
                values |= {"sampled_at": START + looked * 1000, "backlog": backlog}
            if ends + 3 <= second:
                values |= {"entered": sum(self.entered[60 * minute : ends]), "entered_minutes": 1}
            found.append(NOTHING._replace(at=START + MINUTE_MS * minute, latency=(), **values))
        return found

    def row(self, second, **values):
        at, buckets, now = self.group(second, **values)
        return read_row(at, [], buckets, now)

    def problems(self, second, **values):
        return list(group_problems.speed(*self.group(second, **values)))

    def group(self, second, **values):
        """The group at a second, its rows of minutes, and the time."""
        number, now = self.numbers[second], START + second * 1000
        heads = (head(90),) if number else ()
        at = dataclasses.replace(
            group(*heads, subscribers=[live()], **values), lag=Count(number).capped(COUNTED), registered_at=START
        )
        if heads:
            first = dataclasses.replace(heads[0], published_at=now - self.oldest * 1000)
            at = dataclasses.replace(at, heads=(first,))
        buckets = self.buckets(second)
        samples = [
            one for one in buckets if one.backlog is not None and one.at >= now // MINUTE_MS * MINUTE_MS - 120_000
        ]
        if not at.lag.exact:
            at = with_sample(at, samples[-1] if samples else None, now)
        return at, buckets, now

    def left(self, second):
        """Seconds until it is empty; infinity if it never is."""
        ends = (place for place in range(second, len(self.numbers)) if not self.numbers[place])
        return next(ends, math.inf) - second


def check_count(history, second, row):
    """What is shown as the count is true: a bound of now, the number of now, or a number of a time that is named."""
    lag, number = row.group.lag, history.numbers[second]
    if lag.exact:
        assert (str(lag), lag.value) == (f"{number:,}", number)
    elif lag.age:
        assert lag.value == history.numbers[second - round(lag.age)]
        assert str(lag).endswith(" ago)")
    else:
        assert str(lag).endswith("+")
        assert number >= lag.value


BURST = ([5000, 0, 0, 0, 0, 0, 0, 0], [0, 500, 700, 900, 1000, 1000, 1000, 1000])
"""300,000 messages within a minute, and then none."""


@pytest.mark.promise("Health")
def test_a_burst_that_is_worked_off():
    history = History(0, *BURST)
    shown = []
    for second in range(60, 470, 5):
        row = history.row(second)
        check_count(history, second, row)
        if second >= 130 and history.numbers[second]:
            # Two looks, or a whole minute, lie in the time in which it falls.
            assert (row.state.text, row.time_to_drain != "never") == ("working", True), second
        if row.drain and math.isfinite(row.drain) and not row.group.lag_is_bound:
            shown.append((row.drain, history.left(second)))
        elif row.drain and math.isfinite(row.drain):
            assert row.time_to_drain.startswith("more than ")
    assert shown
    for told, left in shown:
        assert told == pytest.approx(left, rel=0.5, abs=30)


def test_a_backlog_that_grows_is_never_about_to_be_empty():
    history = History(200, [20] * 8, [100] * 3 + [5] * 5)
    for second in range(60, 480, 5):
        row = history.row(second)
        check_count(history, second, row)
        if second >= 180 + 70:
            assert (row.state.text, row.time_to_drain) == ("growing", "never"), second


@pytest.mark.promise("Health")
def test_a_long_backlog_that_grows_is_a_problem_until_it_falls():
    history = History(200, [20] * 10, [100, 100, 100, *[5] * 4, 90, 90, 90])
    for second in range(60, 600, 5):
        kinds = [(one.kind, one.severity) for one in history.problems(second)]
        if second < 185 or second >= 460:
            assert kinds == [], second
        elif 190 <= second < 420:
            assert kinds == [("behind", 1)], second
    text = history.problems(180 + 120)[0].text
    assert "falls behind: 1,800 messages are waiting, the oldest for 1 min 30 s." in text
    assert "settles 15 a second" in text


@pytest.mark.parametrize(("oldest", "time"), [(29, "-"), (30, "never")])
def test_a_backlog_that_grows_may_have_come_in_the_last_half_minute(oldest, time):
    history = History(200, [20] * 6, [5] * 6)
    history.oldest = oldest
    assert history.row(200).time_to_drain == time
    assert [one.kind for one in history.problems(200)] == (["behind"] if time == "never" else [])


def test_a_backlog_that_grows_for_a_moment_is_no_problem_of_speed():
    history = History(20_000, [0] * 4 + [40], [50] * 4 + [0])
    for second in range(270, 290, 5):
        assert history.row(second).time_to_drain == "never"
        assert history.problems(second) == [], second


def test_a_burst_is_caught_up_with():
    history = History(0, *BURST)
    for second in range(60 + 70, 360, 5):
        assert [(one.kind, one.severity) for one in history.problems(second)] == [("catching_up", 2)], second
    assert history.problems(340)[0].text.endswith("At its present speed, it needs more than 10 s.")
    history = History(9_000, [0] * 5, [0, 10, 10, 10, 10])
    assert history.problems(200)[0].text.endswith("At its present speed, it needs about 12 min 40 s.")


@pytest.mark.parametrize("backlog", [99, 100])
def test_a_short_backlog_is_no_problem_of_speed(backlog):
    history = History(backlog, [0] * 8, [0] * 8)
    assert [one.kind for one in history.problems(400)] == (["behind"] if backlog == 100 else [])


def test_growth_that_ends_is_told_within_a_minute_whatever_came_in_before():
    history = History(0, [300, 300, 300, 0, 0, 0], [0, 0, 0, 250, 250, 250])
    for second in range(180 + 70, 360, 5):
        if history.numbers[second]:
            assert history.row(second).state.text == "working", second


def test_two_looks_tell_before_a_minute_is_counted():
    """Nobody has counted what came in, as after a failover."""
    history = History(9_000, [0] * 5, [0, 50, 50, 50, 50])
    row = history.row(119)
    buckets = [one._replace(entered_minutes=0) for one in history.buckets(119)]
    row = read_row(row.group, [], buckets, row.now)
    assert row.drain == pytest.approx(history.left(119), abs=10)


@pytest.mark.promise("Health")
def test_a_paused_group_has_neither_an_end_nor_growth():
    history = History(9_000, [0, 0, 0, 10, 10], [0, 50, 50, 0, 0])
    for second in range(60, 300, 5):
        for values in ({"paused": True}, {"after_seek": "seek"}):
            row = history.row(second, **values)
            assert (row.time_to_drain, row.drained_text) == ("-", "")
            assert row.state.text == "working"
