"""When schedules are due: cron lines in time zones with daylight saving, intervals, and the newest missed ticks."""

from __future__ import annotations

import datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_mysqlqueue.schedules.timetables import Timetable, once, timetable

BERLIN = "Europe/Berlin"
SHOWN = "2025-12-31 18:00:00.000"
"""The beginning of 2026 in UTC, as it is shown in the time zone of the tests' settings."""


def at(text: str) -> int:
    """Epoch milliseconds of a time in ISO 8601; in UTC without an offset."""
    moment = datetime.datetime.fromisoformat(text)
    return int((moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp() * 1000)


def local(milliseconds: int, zone: str) -> str:
    return datetime.datetime.fromtimestamp(milliseconds / 1000, ZoneInfo(zone)).isoformat()


def cron(line: str, zone: str = BERLIN) -> Timetable:
    return timetable(line, None, zone, "UTC")


def ticks(times: Timetable, after: str, until: str) -> list[str]:
    """All ticks after a time, one after another, as a process finds them."""
    found, last = [], at(after)
    while (tick := times.following(last)) is not None and tick <= at(until):
        assert tick > last
        found.append(local(tick, times.timezone or "UTC"))
        last = tick
    return found


def test_a_line_is_due_at_its_times():
    assert ticks(cron("0 3 * * *"), "2026-01-10", "2026-01-12T12:00") == [
        "2026-01-10T03:00:00+01:00",
        "2026-01-11T03:00:00+01:00",
        "2026-01-12T03:00:00+01:00",
    ]
    assert ticks(cron("*/20 9 * * MON", "UTC"), "2026-01-10", "2026-01-12T12:00") == [
        "2026-01-12T09:00:00+00:00",
        "2026-01-12T09:20:00+00:00",
        "2026-01-12T09:40:00+00:00",
    ]


@pytest.mark.promise("Recurring schedules")
@pytest.mark.parametrize(
    ("line", "found"),
    [
        # 02:00 to 03:00 does not exist on 29 March 2026: what is due in it is due right after it, once.
        ("30 2 * * *", ["2026-03-28T02:30:00+01:00", "2026-03-29T03:00:00+02:00", "2026-03-30T02:30:00+02:00"]),
        ("0,30 2 * * *", ["2026-03-28T02:00:00+01:00", "2026-03-28T02:30:00+01:00", "2026-03-29T03:00:00+02:00"]),
        ("0 2,3 29 3 *", ["2026-03-29T03:00:00+02:00"]),
        ("30 2,3 29 3 *", ["2026-03-29T03:00:00+02:00", "2026-03-29T03:30:00+02:00"]),
        # Lines for each hour or each few minutes follow the real time.
        ("0 * 29 3 *", ["2026-03-29T00:00:00+01:00", "2026-03-29T01:00:00+01:00", "2026-03-29T03:00:00+02:00"]),
        ("*/30 1-3 29 3 *", ["2026-03-29T01:00:00+01:00", "2026-03-29T01:30:00+01:00", "2026-03-29T03:00:00+02:00"]),
    ],
)
def test_the_hour_that_is_missing(line, found):
    assert ticks(cron(line), "2026-03-28T00:00+01:00", "2026-03-30T12:00+02:00")[: len(found)] == found


@pytest.mark.promise("Recurring schedules")
@pytest.mark.parametrize(
    ("line", "found"),
    [
        # 02:00 to 03:00 comes twice on 25 October 2026: what is due in it is due in the first, once.
        ("30 2 * * *", ["2026-10-24T02:30:00+02:00", "2026-10-25T02:30:00+02:00", "2026-10-26T02:30:00+01:00"]),
        ("0 2,3 25 10 *", ["2026-10-25T02:00:00+02:00", "2026-10-25T03:00:00+01:00"]),
        # Lines for each hour or each few minutes follow the real time.
        (
            "0 * 25 10 *",
            [
                "2026-10-25T00:00:00+02:00",
                "2026-10-25T01:00:00+02:00",
                "2026-10-25T02:00:00+02:00",
                "2026-10-25T02:00:00+01:00",
                "2026-10-25T03:00:00+01:00",
            ],
        ),
        (
            "*/30 2 25 10 *",
            [
                "2026-10-25T02:00:00+02:00",
                "2026-10-25T02:30:00+02:00",
                "2026-10-25T02:00:00+01:00",
                "2026-10-25T02:30:00+01:00",
            ],
        ),
    ],
)
def test_the_hour_that_comes_twice(line, found):
    assert ticks(cron(line), "2026-10-24T00:00+02:00", "2026-10-26T12:00+01:00")[: len(found)] == found


def test_from_within_the_second_of_two_equal_hours():
    """Its time was in the first one, which is over."""
    assert ticks(cron("30 2 * * *"), "2026-10-25T02:10+01:00", "2026-10-26T12:00+01:00") == [
        "2026-10-26T02:30:00+01:00"
    ]


@pytest.mark.parametrize("line", ["30 2 * * *", "*/7 * * * *", "0 0 1 * *", "15 */6 * * *", "0 12 * * MON#1"])
@pytest.mark.parametrize("zone", ["UTC", BERLIN, "America/New_York", "America/Havana", "Australia/Lord_Howe"])
@settings(max_examples=25, deadline=None)
@given(start=st.integers(at("2026-03-01"), at("2026-11-30")), hours=st.integers(0, 24 * 40), most=st.integers(1, 120))
def test_the_latest_ticks_are_the_last_of_all(line, zone, start, hours, most):
    """However far they are searched back for, they are those that one after another gives."""
    times = cron(line, zone)
    until = start + hours * 3_600_000
    found, last = [], start
    while (tick := times.following(last)) is not None and tick <= until:
        assert tick > last
        found.append(tick)
        last = tick
    assert times.latest(start, until, most) == found[-most:]


def test_an_interval_does_not_drift():
    times = timetable(None, datetime.timedelta(minutes=5), None, "UTC")
    start = at("2026-01-01T00:00:01")
    assert times.following(start) == start + 300_000
    assert times.latest(start, start + 299_999, 1) == []
    assert times.latest(start, start + 300_000, 1) == [start + 300_000]
    assert times.latest(start, start + 1_000_000, 1) == [start + 900_000]
    assert times.latest(start, start + 1_000_000, 2) == [start + 600_000, start + 900_000]
    assert times.latest(start, start + 1_000_000, 9) == [start + 300_000, start + 600_000, start + 900_000]
    assert times.latest(start, start - 3_600_000, 9) == []


def utc(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC)


def test_an_interval_with_a_start_is_counted_from_it():
    times = timetable(None, 300, None, "UTC", start=utc("2026-01-01T12:00:07"))
    start = at("2026-01-01T12:00:07")
    assert times.following(start - 86_400_000) == start
    assert times.following(start - 1) == start
    assert times.following(start) == start + 300_000
    assert times.following(start + 299_999) == start + 300_000
    assert times.latest(start - 86_400_000, start - 1, 9) == []
    assert times.latest(start - 86_400_000, start, 9) == [start]
    assert times.latest(start - 86_400_000, start + 700_000, 2) == [start + 300_000, start + 600_000]
    assert times.latest(start + 10, start + 299_999, 9) == []
    assert times.latest(start + 10, start + 900_000, 1) == [start + 900_000]


def test_a_naive_start_is_in_the_time_zone_of_the_project(settings):
    settings.TIME_ZONE = BERLIN
    times = timetable(None, 300, None, "UTC", start=datetime.datetime(2026, 1, 1, 12))  # noqa: DTZ001
    assert times.start_ms == at("2026-01-01T11:00:00")


def test_forty_schedules_with_one_interval_are_due_at_forty_times():
    now = at("2026-01-01")
    times = [timetable(None, 3600, None, "UTC", spread=f"shop.{number}") for number in range(40)]
    first = [one.following(now) for one in times]
    assert len({tick // 1000 for tick in first if tick is not None}) == 40
    assert all(tick is not None and now < tick <= now + 3_600_000 for tick in first)
    assert [one.following(tick) for one, tick in zip(times, first, strict=True)] == [
        tick + 3_600_000 for tick in first if tick is not None
    ]
    # In each process, today and tomorrow.
    assert timetable(None, 3600, None, "UTC", spread="nightly").start_ms == 1_307_926


@given(st.integers(0, 10**13), st.integers(1000, 10**11), st.integers(0, 10**13), st.integers(0, 10**12))
def test_the_ticks_of_an_interval_with_a_start_are_a_grid(start, every_ms, after, passed):
    times = Timetable(every_ms=every_ms, start_ms=start)
    found = times.latest(after, after + passed, 100)
    assert all((tick - start) % every_ms == 0 and start <= tick and after < tick <= after + passed for tick in found)
    following = times.following(after)
    assert following is not None
    assert (following - start) % every_ms == 0
    assert max(start, after + 1) <= following <= max(start, after + every_ms)
    assert (not found) == (following > after + passed)


def test_once():
    times = once(utc("2026-01-01T12:00:00"))
    tick = at("2026-01-01T12:00:00")
    assert times.following(tick - 1) == tick
    assert times.following(tick) is None
    assert times.latest(tick - 86_400_000, tick - 1, 9) == []
    assert times.latest(tick - 86_400_000, tick + 86_400_000, 9) == [tick]
    assert times.latest(tick, tick + 86_400_000, 9) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("2026-01-01", "at='2026-01-01': must be a datetime"),
        (datetime.date(2026, 1, 1), "must be a datetime"),
        (datetime.datetime(1969, 1, 1, tzinfo=datetime.UTC), "must be after 1970 and before the year 10000"),
        (datetime.datetime.max.replace(tzinfo=datetime.UTC), "must be after 1970 and before the year 10000"),
    ],
)
def test_an_invalid_time_names_the_value_and_the_rule(value, text):
    with pytest.raises(ValueError, match=text):
        once(value)
    with pytest.raises(ValueError, match=text.replace("at=", "start=")):
        timetable(None, 60, None, "UTC", start=value)


@pytest.mark.parametrize("more", [{"start": utc("2026-01-01")}, {"spread": "s"}])
def test_a_cron_line_has_no_start(more):
    with pytest.raises(ValueError, match=r"start and spread are for intervals \(every\)"):
        timetable("0 3 * * *", None, None, "UTC", **more)


def test_the_newest_tick_after_years_is_found_at_once():
    times = cron("* * * * *")
    assert times.latest(at("2001-01-01"), at("2026-01-01T00:00:30"), 1) == [at("2026-01-01T00:00:00")]
    assert len(times.latest(at("2001-01-01"), at("2026-01-01"), 100)) == 100


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((None, None, None), "pass a cron line or every, and not both"),
        (("* * * * *", 5, None), "pass a cron line or every, and not both"),
        (("* * * *", None, None), r"cron='\* \* \* \*': must have five fields"),
        (("0 0 3 * * *", None, None), "must have five fields .* not 6"),
        (("61 * * * *", None, None), r"cron='61 \* \* \* \*': is not a valid cron line \(Bad minute\)"),
        (("@daily", None, None), "must have five fields"),
        ((5, None, None), "cron=5: must be a str"),
        (("0 0 30 2 *", None, None), "cron='0 0 30 2"),
        (("0 3 * * *", None, "Mars/Olympus"), "timezone='Mars/Olympus': must be the name of a time zone"),
        (("0 3 * * *", None, "../etc"), "timezone='../etc': must be"),
        (("0 3 * * *", None, 5), "timezone=5: must be"),
        ((None, 60, BERLIN), "timezone='Europe/Berlin': it is for cron lines"),
        ((None, 0.9, None), "every=0.9: must be at least 1 second"),
        ((None, datetime.timedelta(0), None), "must be at least 1 second"),
        ((None, "5 min", None), "every='5 min': must be a timedelta"),
        ((None, True, None), "every=True: must be a timedelta"),
        ((None, float("nan"), None), "must be at least 1 second"),
        ((None, 400 * 86400, None), "at most 366 days"),
    ],
)
def test_an_invalid_timetable_names_the_value_and_the_rule(arguments, text):
    with pytest.raises(ValueError, match=text):
        timetable(*arguments, "UTC")


def test_how_it_is_shown():
    assert str(cron("0  3 * * *")) == "0 3 * * *"
    assert str(timetable(None, 300, None, "UTC")) == "every 5 min"
    assert str(timetable(None, 300, None, "UTC", spread="s")) == "every 5 min"
    assert str(timetable(None, 300, None, "UTC", start=utc("2026-01-01"))) == f"every 5 min from {SHOWN}"
    assert str(once(utc("2026-01-01"))) == f"once at {SHOWN}"
