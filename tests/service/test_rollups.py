"""Rollups: counts and latencies by the minute."""

from __future__ import annotations

import pytest

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
    clock.advance(2)
    sub.settle()
    sub.poller.write_rollups()
    sub.poller.write_rollups()  # nothing is counted twice
    for grain in (rollups.MINUTE, rollups.HOUR):
        (bucket,) = rollups.since(Session(USING), grain, 0)
        assert (bucket.ref, bucket.acked, bucket.failed, bucket.dead_lettered) == (G, 4, 2, 1)
        assert sum(bucket.latency) == 4
        assert 1000 <= rollups.percentile(bucket.latency, 0.5) <= 5000
    log(1)
    sub.settle()
    sub.poller.write_rollups()
    assert sum(bucket.acked for bucket in rollups.since(Session(USING), rollups.HOUR, 0, G)) == 5
    assert rollups.since(Session(USING), rollups.HOUR, 0, GroupRef("h", "t")) == []


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


@pytest.mark.parametrize(
    ("latency", "share", "expected"),
    [
        ([0] * 16, 0.5, None),
        ([4] + [0] * 15, 0.5, 2.5),
        ([0, 4] + [0] * 14, 1.0, 10),
        ([1, 0, 1] + [0] * 13, 0.75, 17.5),
        ([0] * 15 + [3], 0.5, 3_600_000),
    ],
)
def test_percentiles_of_buckets(latency, share, expected):
    assert rollups.percentile(latency, share) == expected
