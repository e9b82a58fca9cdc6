"""Durations, counts and names as people read them."""

from __future__ import annotations

import pytest

from django_mysqlqueue.text.humanize import messages
from tests.support.internals import close_names, counted, did_you_mean, duration, listed, up_to

pytestmark = pytest.mark.any_engine
MINUTE, HOUR, DAY = 60, 3600, 86_400


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (0, "0 s"),
        (0.0001, "1 ms"),
        (0.35, "350 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.25, "1.2 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (45.4, "45 s"),
        (59.6, "1 min"),
        (12 * MINUTE + 30, "12 min 30 s"),
        (59 * MINUTE + 59.6, "1 h"),
        (3 * HOUR, "3 h"),
        (3 * HOUR + 29, "3 h"),
        (3 * HOUR + 31, "3 h 1 min"),
        (DAY - 20, "1 d"),
        (7 * DAY - 3, "7 d"),
        (2 * DAY + 4 * HOUR + 10, "2 d 4 h"),
        (400 * DAY, "400 d"),
    ],
)
def test_duration_has_the_two_largest_units(seconds, text):
    assert duration(seconds) == text


def test_counted_has_a_plural():
    assert [counted(number, "lease") for number in (0, 1, 10_000)] == ["0 leases", "1 lease", "10,000 leases"]


def test_up_to_says_where_a_count_stopped():
    assert [up_to(10_000, number) for number in (0, 9_999, 10_000)] == ["0", "9,999", "10,000 or more"]


def test_messages_has_a_plural():
    assert (messages(1), messages(1200)) == ("1 message", "1,200 messages")


def test_listed_stops():
    assert (listed([]), listed(["a", "b"]), listed(list("abcd"), most=2)) == ("none", "a, b", "a, b and 2 more")


def test_close_names_ignores_case_and_puts_the_nearest_first():
    assert close_names("ORDRES", ["orders", "order", "mails"]) == ["orders", "order"]
    assert close_names("ORDRES", ["orders", "order", "mails"], most=1) == ["orders"]
    assert close_names("x", ["orders"]) == []


def test_did_you_mean_asks_only_if_there_is_a_name():
    assert did_you_mean([]) == ""
    assert did_you_mean(["a", "b"]) == "Did you mean a or b?"
