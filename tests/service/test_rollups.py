"""Rollups: counts and latencies by the minute."""

from __future__ import annotations

import itertools

import pytest

from django_mysqlqueue.limits import ALL_LATENCY_BOUNDS_MS, LATENCY_COLUMNS
from django_mysqlqueue.models import Rollup
from django_mysqlqueue.service import rollups
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session
from tests.support.handlers import fail
from tests.support.harness import USING, Sub, handler
from tests.support.scenarios import G, log


def test_rollups_count_what_happened(db, clock):
    log(5, "abc")
    sub = Sub(handler(function=lambda delivery: fail(delivery) if delivery.payload == 2 else None, max_attempts=2))
    clock.step(2)
    sub.settle()
    sub.poller.write_rollups()
    sub.poller.write_rollups()  # nothing is counted twice
    for grain in (rollups.MINUTE, rollups.HOUR):
        (bucket,) = rollups.since(Session(USING), grain, 0)
        assert (bucket.ref, bucket.acked, bucket.failed, bucket.dead_lettered) == (G, 4, 2, 1)
        assert sum(rollups.distribution(bucket.latency)) == 4
        assert rollups.percentile(bucket.latency, 0.5) in {(2500, False), (5000, False)}
    log(1)
    sub.settle()
    sub.poller.write_rollups()
    session = Session(USING)
    now = session.now()
    assert sum(bucket.acked for bucket in rollups.of_group(session, rollups.HOUR, now - 3_600_000, G, now=now)) == 5
    assert rollups.of_group(session, rollups.HOUR, now - 3_600_000, GroupRef("h", "t"), now=now) == []


def test_sums_of_groups_and_of_topics(db):
    for at, group, topic, acked in ((0, "g", "t", 1), (60, "g", "t", 2), (60, "h", "t", 4), (60, "g", "u", 8)):
        minute = 2 * 10**9 + at * 1000
        Rollup.objects.create(
            grain=60, bucket_at=minute, consumer_group=group, topic=topic, acked=acked, latency_13=acked, entered=acked
        )
        Rollup.objects.create(grain=3600, bucket_at=minute, consumer_group=group, topic=topic, acked=100)
    session = Session(USING)
    found = rollups.sums(session, rollups.MINUTE, 0, by=rollups.OF_GROUPS)
    assert {(*one.ref, one.acked) for one in found} == {("g", "t", 3), ("h", "t", 4), ("g", "u", 8)}
    found = rollups.sums(session, rollups.MINUTE, 0, by=rollups.OF_TOPICS)
    first = 2 * 10**9
    assert {(*one.ref, one.at - first, one.acked, one.entered) for one in found} == {
        ("", "t", 0, 1, 1),
        ("", "t", 60_000, 6, 6),
        ("", "u", 60_000, 8, 8),
    }
    assert {rollups.percentile(one.latency, 0.5) for one in found} == {(600_000, False)}
    assert rollups.sums(session, rollups.MINUTE, first + 60_001, by=rollups.OF_GROUPS) == []


def test_old_rollups_are_collected(db, clock):
    log(1)
    sub = Sub(handler())
    sub.settle()
    sub.poller.write_rollups()
    clock.advance(rollups.MINUTES_KEPT + 61)
    assert rollups.collect(USING) == 1
    assert Rollup.objects.get().grain == rollups.HOUR
    clock.advance(8 * 86400)
    assert rollups.collect(USING) == 1


def counted(*latencies, old=()):
    """``Bucket.latency`` after acks of these milliseconds; ``old`` ones were counted by 0.1, by position only."""
    new, by_position = rollups.Tally(), rollups.Tally()
    for tally, these in ((new, latencies), (by_position, old)):
        for latency in these:
            tally.acked(latency)
    columns = dict(zip(rollups.COUNTS, new.counts(), strict=True))
    for name, number in zip(rollups.COUNTS, by_position.counts(), strict=True):
        columns[name] += number if name.removeprefix("latency_").isdecimal() else 0
    return [columns[column.name] for column in LATENCY_COLUMNS]


HOUR, DAY = 3_600_000, 86_400_000


@pytest.mark.parametrize(
    ("latencies", "old", "share", "expected"),
    [
        ([], [], 0.5, None),
        ([1] * 4, [], 0.5, (5, False)),
        ([6] * 4, [], 1.0, (10, False)),
        ([1, 20], [], 0.5, (5, False)),
        ([1, 20], [], 0.75, (25, False)),
        ([1, 20], [], 0.0, (5, False)),
        # One bucket from one to ten minutes made 9 minutes of acks after one and a half.
        ([90_000] * 20, [], 0.95, (120_000, False)),
        ([200_000] * 20, [], 0.95, (300_000, False)),
        ([400_000] * 20, [], 0.95, (600_000, False)),
        ([600_001], [], 0.5, (1_800_000, False)),
        ([1_800_001], [], 0.5, (HOUR, False)),
        ([HOUR + 1], [], 0.5, (2 * HOUR, False)),
        ([6 * HOUR], [], 0.5, (6 * HOUR, False)),
        ([6 * HOUR + 1], [], 0.5, (12 * HOUR, False)),
        ([DAY], [], 0.5, (DAY, False)),
        ([DAY + 1], [], 0.5, (DAY, True)),
        # Of these, no more is known than the bucket of 0.1.
        ([], [90_000] * 20, 0.95, (600_000, False)),
        ([], [DAY + 1], 0.5, (HOUR, True)),
        ([90_000] * 18, [90_000] * 2, 0.5, (120_000, False)),
        ([90_000] * 18, [90_000] * 2, 0.95, (600_000, False)),
        ([DAY + 1] * 19, [HOUR + 1], 0.95, (DAY, True)),
        ([DAY + 1], [HOUR + 1], 0.5, (HOUR, True)),
    ],
)
def test_percentiles_are_bounds_of_buckets(latencies, old, share, expected):
    assert rollups.percentile(counted(*latencies, old=old), share) == expected


LONG = ((60_000, 300_000), (600_000, 1_800_000))
"""Latencies up to an hour that have columns named by their bounds."""


def test_every_latency_is_in_one_column_by_position_and_a_long_one_in_one_that_is_named():
    for bound in (*ALL_LATENCY_BOUNDS_MS, 10 * DAY):
        for latency in (bound, bound + 1):
            tally = rollups.Tally()
            tally.acked(latency)
            columns = dict(zip(rollups.COUNTS, tally.counts(), strict=True))
            found = [name for name, number in columns.items() if number and name.startswith("latency")]
            assert len([name for name in found if name.removeprefix("latency_").isdecimal()]) == 1
            assert len(found) == (
                2 if 60_000 < latency <= 300_000 or 600_000 < latency <= 1_800_000 or latency > HOUR else 1
            )
            assert sum(rollups.distribution(counted(latency))) == 1


def test_the_columns_for_latencies_are_those_of_0_1_and_more():
    """0.1 writes and reads the first ones by position: their bounds must stay."""
    assert list(LATENCY_COLUMNS[:16]) == [
        (f"latency_{place}", above, upto)
        for place, (above, upto) in enumerate(
            itertools.pairwise(
                (-1, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000, 600_000, HOUR, None)
            )
        )
    ]
    assert [column.name for column in LATENCY_COLUMNS[16:]] == [
        "latency_120s",
        "latency_300s",
        "latency_1800s",
        "latency_7200s",
        "latency_21600s",
        "latency_43200s",
        "latency_86400s",
        "latency_over_86400s",
    ]
