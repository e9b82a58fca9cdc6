"""What the analyses say of small data is right to the last digit."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from pyspark.testing import assertDataFrameEqual

from django_mysqlqueue.models import ConsumerGroup, ConsumerOffset, DeliveryEvent, DeliveryState, Rollup
from pyspark_mysqlqueue import tables
from pyspark_mysqlqueue.analytics import deliveries, growth, lag, skew, traffic
from pyspark_mysqlqueue.analytics.common import last_line
from pyspark_mysqlqueue.log_schema import BY_NAME, ddl
from pyspark_mysqlqueue.report.queries import COLUMNS
from pyspark_mysqlqueue.tables import EVENTS_DDL, GROUPS_DDL, ROLLUPS_DDL
from tests.support.factories import ConsumerGroupFactory, QueueMessageFactory
from tests.support.internals import LATENCY_COLUMNS

pytestmark = pytest.mark.any_engine


START = datetime.datetime(2026, 11, 2, 10, 0, tzinfo=datetime.UTC)
"""A Monday."""


def at(seconds: float) -> datetime.datetime:
    return START + datetime.timedelta(seconds=seconds)


def log_of(spark: Any, *rows: dict[str, Any]) -> Any:
    default = {
        "topic": "t",
        "partition_key": "k",
        "size": 10,
        "target_group": "",
        "original_topic": "",
        "failed_group": "",
        "failed_at": None,
        "failure_count": 0,
        "last_error": "",
        "created_at": START,
        "published_at": START,
    }
    full = [{**default, "offset": number, **row} for number, row in enumerate(rows, 1)]
    return spark.createDataFrame(
        [tuple(row[name] for name in COLUMNS) for row in full], ddl(BY_NAME[name] for name in COLUMNS)
    )


def events_of(spark: Any, *rows: tuple[str, int, str, float, str, str]) -> Any:
    """(group, offset, outcome, settled after seconds, by, error)."""
    made = [
        (number, group, "t", "k", offset, 1, outcome, START, at(after), 7 * number, by, error)
        for number, (group, offset, outcome, after, by, error) in enumerate(rows, 1)
    ]
    return spark.createDataFrame(made, EVENTS_DDL)


def rollups_of(spark: Any, *rows: tuple[int, float, str, int, int, dict[int, int]]) -> Any:
    """(grain, after seconds, group, acked, dead-lettered, {bucket: acks})."""
    made = [
        (
            grain,
            at(after),
            group,
            "t",
            acked,
            0,
            dead,
            *(buckets.get(place, 0) for place in range(len(LATENCY_COLUMNS))),
        )
        for grain, after, group, acked, dead, buckets in rows
    ]
    return spark.createDataFrame(made, ROLLUPS_DDL)


def groups_of(spark: Any, *rows: tuple[str, int, int]) -> Any:
    """(group, start offset, unsettled)."""
    return spark.createDataFrame(
        [(name, "t", "ordered", start, False, unsettled) for name, start, unsettled in rows], GROUPS_DDL
    )


def collected(frame: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.collect()]


def rounded(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [tuple(round(value, 6) if isinstance(value, float) else value for value in row) for row in rows]


# -- traffic ------------------------------------------------------------------


def test_throughput_by_minute_and_topic(spark):
    frame = log_of(
        spark,
        {"published_at": at(0)},
        {"published_at": at(59.999)},
        {"published_at": at(60), "size": 5},
        {"published_at": at(61), "topic": "u"},
        {"published_at": None},
    )
    expected = spark.createDataFrame(
        [(at(0), "t", 2, 20), (at(60), "t", 1, 5), (at(60), "u", 1, 10)],
        "at TIMESTAMP, topic STRING, messages BIGINT, bytes BIGINT",
    )
    assertDataFrameEqual(traffic.throughput(frame), expected, ignoreNullable=True)


def test_the_way_into_the_log(spark):
    frame = log_of(spark, *({"created_at": START, "published_at": at(n / 1000)} for n in range(101)))
    assert collected(traffic.publish_latency(frame)) == [("t", 101, 50.0, 90.0, 99.0, 100)]
    (found,) = traffic.publish_latency(frame, seconds=60).toArrow().to_pylist()
    assert tuple(found.values()) == (START, 101, 50.0, 90.0, 99.0, 100)


def test_hours_of_the_week_and_days(spark):
    week = 7 * 86400
    frame = log_of(spark, {}, {}, {"published_at": at(week)}, {"published_at": at(86400 + 3600)})
    assert collected(traffic.hours(frame)) == [(1, 10, 3, 2), (2, 11, 1, 1)]
    day = START.date()
    assert collected(traffic.days(frame)) == [
        (day, "t", 2, 20),
        (day + datetime.timedelta(days=1), "t", 1, 10),
        (day + datetime.timedelta(days=7), "t", 1, 10),
    ]


# -- deliveries ---------------------------------------------------------------


def test_what_is_recorded_of_each_group(spark):
    events = events_of(
        spark,
        *(("all", n, "acked", 1, "s", "") for n in range(99)),
        ("some", 1, "acked", 1, "s", ""),
        ("failures", 1, "failed", 1, "s", "E"),
        ("failures", 1, "dead_lettered", 1, "s", "E"),
    )
    rollups = rollups_of(
        spark,
        (3600, 0, "all", 60, 0, {}),
        (3600, 3600, "all", 40, 0, {}),
        (60, 0, "all", 100, 0, {}),
        (3600, 0, "some", 2, 0, {}),
        (3600, 0, "failures", 5, 1, {}),
        (3600, 0, "nothing", 5, 0, {}),
    )
    groups = groups_of(spark, *((name, 0, 0) for name in ("all", "some", "failures", "nothing", "idle")))
    assert collected(deliveries.recording(groups, events, rollups)) == [
        ("all", "t", "all", 99, 100, 0, 0),
        ("failures", "t", "failures", 0, 5, 2, 1),
        ("idle", "t", "idle", 0, None, 0, None),
        ("nothing", "t", "nothing", 0, 5, 0, 0),
        ("some", "t", "some", 1, 2, 0, 0),
    ]


def test_latency_from_recorded_deliveries_is_that_of_the_first_end(spark):
    frame = log_of(spark, {}, {"published_at": at(1)}, {})
    events = events_of(
        spark,
        ("g", 1, "failed", 1, "s", "E"),
        ("g", 1, "acked", 4, "s", ""),
        ("g", 1, "acked", 900, "s", ""),  # again, after a seek
        ("g", 2, "dead_lettered", 3, "s", ""),
        ("g", 77, "acked", 3, "s", ""),  # of a message that the log does not show
    )
    assert rounded(collected(deliveries.settle_latency(frame, events))) == [
        ("g", "t", 2, 3000.0, 3800.0, 3980.0, 4000),
    ]
    assert rounded(collected(deliveries.handling(events))) == [("g", "t", 3, 21.0, 32.2, 34.72, 35)]


def test_latency_from_rollups_says_within_which_bound(spark):
    rollups = rollups_of(
        spark,
        (3600, 0, "g", 90, 0, {0: 40, 1: 50}),
        (3600, 3600, "g", 10, 0, {4: 9, 22: 1}),
        (60, 0, "g", 1000, 0, {9: 1000}),
        (3600, 0, "slow", 2, 0, {22: 2}),
        (3600, 0, "none", 0, 1, {}),
    )
    assert collected(deliveries.settle_bounds(rollups)) == [
        ("g", "t", 100, 10, 10, 100),
        ("slow", "t", 2, None, None, None),
    ]


def test_failures_and_dead_letters_by_error(spark):
    trace = "Traceback:\n  line\nValueError: it broke\n\n"
    events = events_of(
        spark,
        ("g", 1, "failed", 1, "s", trace),
        ("g", 1, "failed", 2, "s", trace),
        ("g", 1, "dead_lettered", 3, "s", trace),
        ("g", 2, "failed", 4, "s", "ValueError: it broke"),
        ("g", 3, "lost", 5, "s", ""),
        ("g", 4, "acked", 6, "s", ""),
    )
    found = collected(deliveries.failures(events))
    assert [row[:-1] for row in found] == [
        ("g", "t", "ValueError: it broke", 3, 0, 1, 2),
        ("g", "t", "", 0, 1, 0, 1),
    ]
    frame = log_of(
        spark,
        {"topic": "t_dlq", "original_topic": "t", "failed_group": "g", "last_error": trace, "failure_count": 3},
        {"topic": "t_dlq", "original_topic": "t", "failed_group": "g", "last_error": trace, "failure_count": 4},
        {},
    )
    assert [row[:5] for row in collected(deliveries.dead_letters(frame))] == [
        ("g", "t", "ValueError: it broke", 2, 3.5)
    ]


@pytest.mark.parametrize(
    ("text", "last"),
    [("", ""), ("\n\n", ""), ("a\r\nb \r\n", "b"), ("x" * 300, "x" * 200), ("one\n  two", "two")],
)
def test_the_last_line_of_an_error(spark, text, last):
    from pyspark.sql import functions as f

    assert spark.range(1).select(last_line(f.lit(text))).collect()[0][0] == last


def test_who_did_the_work(spark):
    events = events_of(
        spark,
        *(("g", n, "acked", 1, "a", "") for n in range(3)),
        ("g", 9, "dead_lettered", 1, "b", ""),
        ("g", 10, "failed", 1, "c", ""),
    )
    assert collected(deliveries.consumers(events)) == [("g", "t", "a", 3, 0.75, 1.5), ("g", "t", "b", 1, 0.25, 0.5)]


# -- skew ---------------------------------------------------------------------


def test_skew(spark):
    rows = [{"partition_key": "a"}] * 6 + [{"partition_key": "b"}] * 3 + [{"partition_key": "c"}]
    even = [{"topic": "even", "partition_key": str(n % 4)} for n in range(8)]
    keys = skew.partitions(log_of(spark, *rows, *even))
    # 1, 3, 6: 2 * (1 + 6 + 18) / (3 * 10) - 4 / 3 = 1 / 3
    assert rounded(collected(skew.skew(keys))) == [
        ("t", 3, 10, 0.333333, 0.6, 0.6, 0.6),
        ("even", 4, 8, 0.0, 0.25, 0.25, 0.25),
    ]
    assert collected(skew.top_keys(keys, 2)) == [
        ("even", 1, "0", 2, 20, 0.25),
        ("even", 2, "1", 2, 20, 0.25),
        ("t", 1, "a", 6, 60, 0.6),
        ("t", 2, "b", 3, 30, 0.3),
    ]
    assert rounded(collected(skew.concentration(keys.where("topic = 't'")))) == [
        ("t", 0.333333, 0.6),
        ("t", 0.666667, 0.9),
        ("t", 1.0, 1.0),
    ]


def test_the_share_of_the_busiest_hundredth(spark):
    keys = spark.createDataFrame(
        [("t", f"k{n}", 100 if n < 2 else 1, 0, (100 if n < 2 else 1) / 398) for n in range(200)],
        "topic STRING, partition_key STRING, messages BIGINT, bytes BIGINT, share DOUBLE",
    )
    ((_, count, messages, gini, top, hundredth, tenth),) = collected(skew.skew(keys))
    assert (count, messages) == (200, 398)
    assert (round(top, 6), round(hundredth, 6), round(tenth, 6)) == (
        round(100 / 398, 6),
        round(200 / 398, 6),
        round(218 / 398, 6),
    )
    assert gini == pytest.approx(2 * (sum(range(1, 199)) + 100 * (199 + 200)) / (200 * 398) - 201 / 200)
    assert len(collected(skew.concentration(keys, 10))) == 10


# -- lag ----------------------------------------------------------------------


def test_lag_from_recorded_deliveries(spark):
    frame = log_of(
        spark,
        {"published_at": at(0)},
        {"published_at": at(1)},
        {"published_at": at(130)},
        {"published_at": at(131), "target_group": "other"},
    )
    events = events_of(
        spark,
        ("g", 1, "acked", 5, "s", ""),
        ("g", 1, "acked", 500, "s", ""),  # after a seek
        ("g", 2, "failed", 10, "s", "E"),
        ("g", 2, "dead_lettered", 70, "s", ""),
        ("late", 3, "acked", 140, "s", ""),
    )
    groups = groups_of(spark, ("g", 0, 0), ("late", 2, 0))
    expected = spark.createDataFrame(
        [
            ("g", "t", at(60), 2, 1, 1),
            ("g", "t", at(120), 0, 1, 0),
            ("g", "t", at(180), 1, 0, 1),
            ("late", "t", at(180), 1, 1, 0),
        ],
        "consumer_group STRING, topic STRING, at TIMESTAMP, published BIGINT, settled BIGINT, lag BIGINT",
    )
    assertDataFrameEqual(lag.lag(frame, events, groups), expected, ignoreNullable=True)


def test_lag_from_rollups_goes_backwards_from_now(spark):
    frame = log_of(spark, *({"published_at": at(n)} for n in (0, 1, 2, 61)))
    rollups = rollups_of(spark, (60, 0, "g", 1, 1, {}), (60, 120, "g", 1, 0, {}), (3600, 0, "g", 9, 9, {}))
    # Two are open now: so before the first message one was, that the log does not show.
    groups = groups_of(spark, ("g", 0, 2), ("empty", 0, 0))
    expected = spark.createDataFrame(
        [
            ("empty", "t", at(60), 3, 0, 0),
            ("empty", "t", at(120), 1, 0, 0),
            ("g", "t", at(60), 3, 2, 2),
            ("g", "t", at(120), 1, 0, 3),
            ("g", "t", at(180), 0, 1, 2),
        ],
        "consumer_group STRING, topic STRING, at TIMESTAMP, published BIGINT, settled BIGINT, lag BIGINT",
    )
    assertDataFrameEqual(lag.lag_by_rollups(frame, rollups, groups), expected, ignoreNullable=True)


# -- growth -------------------------------------------------------------------


def days_of(spark: Any, *messages: int) -> tuple[Any, datetime.date, datetime.date]:
    first = START.date()
    rows = [(first + datetime.timedelta(days=n), "t", count, count * 10) for n, count in enumerate(messages) if count]
    last = first + datetime.timedelta(days=len(messages) - 1)
    return spark.createDataFrame(rows, "day DATE, topic STRING, messages BIGINT, bytes BIGINT"), first, last


def test_a_line_through_the_days(spark):
    frame, first, last = days_of(spark, 1, 3, 2, 4, 0)
    # Slope (-2*1 - 1*3 + 0*2 + 1*4 + 2*0) / 10 = -0.1; residuals' squares sum to 9.9.
    ((count, mean, size, slope, error, at_end),) = collected(growth.trend(frame, first=first, last=last))
    assert (count, mean, size) == (5, 2.0, 20.0)
    assert slope == pytest.approx(-0.1)
    assert error == pytest.approx((9.9 / 3 / 10) ** 0.5)
    assert at_end == pytest.approx(1.8)
    few, first, last = days_of(spark, 1, 2, 3)
    assert collected(growth.trend(few, first=first, last=last)) == [(3, 2.0, 20.0, None, None, None)]
    with pytest.raises(ValueError, match="must not be before first"):
        growth.trend(few, first=last, last=first)


def test_when_a_size_is_reached():
    day = datetime.date(2026, 11, 22)

    def reached(now: int, **line: Any) -> list[tuple[int, Any, Any, Any]]:
        found = growth.milestones(now, day, **line)
        return [
            (one.messages, *(moment and (moment - day).days for moment in (one.expected, one.earliest, one.latest)))
            for one in found
        ]

    steady = reached(50_000, per_day=1000.0, slope=None, error=None)
    assert steady[:2] == [(100_000, 50, 50, 50), (1_000_000, 950, 950, 950)]
    assert steady[-1] == (1_000_000_000, None, None, None)
    # 100 x + 5 x²: 50,000 after 90.5 days; 100 x + 10 x² after 65.9; never with a slope of 0 less than nothing.
    assert reached(50_000, per_day=100.0, slope=10.0, error=5.0)[0] == (100_000, 91, 66, 500)
    assert reached(50_000, per_day=100.0, slope=-10.0, error=1.0)[0] == (100_000, None, None, None)
    assert reached(50_000, per_day=0.0, slope=None, error=None)[0] == (100_000, None, None, None)


# -- reading the tables -------------------------------------------------------


def test_the_tables_are_read_as_they_are(spark, place):
    ConsumerGroupFactory(consumer_group="g", topic="t", start_offset=0)
    ConsumerGroupFactory(consumer_group="h", topic="u", mode=ConsumerGroup.Mode.SHARED, paused=True)
    made = [QueueMessageFactory(topic="t", partition_key=str(n % 2)) for n in range(6)]
    QueueMessageFactory(topic="t", partition_key="0", target_group="other")
    for key, acked, claimed in (("0", made[2], made[2]), ("1", made[0], made[5])):
        ConsumerOffset.objects.create(
            consumer_group="g",
            topic="t",
            partition_key=key,
            offset_acked=acked.offset,
            offset_claimed=claimed.offset,
        )
    for one in (made[1], made[3], made[5]):
        DeliveryState.objects.create(
            consumer_group="g", topic="t", partition_key="1", message_offset=one.offset, acked=one is made[3]
        )
    with place.connect() as database:
        found = tables.groups(database)
        assert tables.groups(database, ["u"]) == found[1:]
        assert tables.collected(database) == []
        assert abs(tables.now(database).timestamp() - datetime.datetime.now(datetime.UTC).timestamp()) < 600
    # Of partition 0 the last, which is not claimed; of partition 1 the first and the last, which are.
    assert [(one.consumer_group, one.topic, one.paused, one.unsettled) for one in found] == [
        ("g", "t", False, 3),
        ("h", "u", True, 0),
    ]
    assert tables.groups_frame(spark, found).count() == 2

    text = "é\n\x00'\"<b>"
    moment = 1_790_000_000_123
    for number in range(5):
        DeliveryEvent.objects.create(
            consumer_group="g",
            topic="t" if number else "u",
            partition_key="k",
            message_offset=number,
            outcome="failed",
            delivered_at=moment,
            settled_at=moment + number,
            error=text,
        )

    def ms(value: int) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(value / 1000, datetime.UTC)

    rows = tables.events(spark, place, topics=["t"], since=ms(moment + 2), until=ms(moment + 4)).toArrow().to_pylist()
    assert [(row["message_offset"], row["settled_at"], row["error"]) for row in rows] == [
        (2, ms(moment + 2), text),
        (3, ms(moment + 3), text),
    ]
    Rollup.objects.create(grain=60, bucket_at=moment, consumer_group="g", topic="t", acked=5, latency_50ms=5)
    (row,) = tables.rollups(spark, place).toArrow().to_pylist()
    assert (row["bucket_at"], row["acked"], row["latency_50ms"], row["latency_100ms"]) == (ms(moment), 5, 5, 0)
