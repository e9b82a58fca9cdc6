"""Rollups: counts and latencies by the minute."""

from __future__ import annotations

import pytest

from django_mysqlqueue.models import Rollup
from tests.support.handlers import both_modes, fail
from tests.support.harness import USING, Sub, handler
from tests.support.internals import LATENCY_BOUNDS_MS, LATENCY_COLUMNS, GroupRef, Session, poller, rollups, settling
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
        assert sum(bucket.latency) == 4
        assert rollups.percentile(bucket.latency, 0.5) in {(2500, False), (5000, False)}
    log(1)
    sub.settle()
    sub.poller.write_rollups()
    session = Session(USING)
    now = session.now()
    assert sum(bucket.acked for bucket in rollups.of_group(session, rollups.HOUR, now - 3_600_000, G, now=now)) == 5
    assert rollups.of_group(session, rollups.HOUR, now - 3_600_000, GroupRef("h", "t"), now=now) == []


@pytest.mark.promise("Health")
def test_counts_are_written_sooner_while_attempts_fail(db, monkeypatch):
    monkeypatch.setattr(poller, "FAILING_INTERVAL", 0.0)
    fails = [True]
    sub = Sub(handler(function=lambda delivery: fail(delivery) if fails else None))

    def counted(then):
        log(1, "a" if fails else "b")
        sub.settle()
        then()
        return sum(one.acked for one in Rollup.objects.filter(grain=60)), Rollup.objects.filter(failed__gt=0).count()

    assert counted(sub.poller.write_rollups)[0] == 0
    sub.poller.step()  # Nothing has ended since.
    fails.clear()
    assert counted(sub.poller.step)[0] == 1, "the end of an outage is told at once"
    assert counted(sub.poller.step)[0] == 1, "and nothing but the charts waits for the next ones"


@both_modes
def test_rollups_count_a_message_that_was_lost_too_often(db, clock, mode):
    """No flush writes its end: the next claim does."""
    one = handler(mode=mode, max_attempts=1)
    log(1)
    Sub(one).step()
    clock.advance(61)
    suspect = Sub(one).step().take()
    assert settling.record_start(USING, suspect.claimed)
    clock.advance(61)
    sub = Sub(one)
    sub.settle()
    sub.poller.write_rollups()
    (bucket,) = rollups.since(Session(USING), rollups.HOUR, 0)
    assert (bucket.acked, bucket.failed, bucket.dead_lettered) == (0, 0, 1)


def test_sums_of_groups_and_of_topics(db):
    for at, group, topic, acked in ((0, "g", "t", 1), (60, "g", "t", 2), (60, "h", "t", 4), (60, "g", "u", 8)):
        minute = 2 * 10**9 + at * 1000
        Rollup.objects.create(
            grain=60,
            bucket_at=minute,
            consumer_group=group,
            topic=topic,
            acked=acked,
            latency_600000ms=acked,
            entered=acked,
        )
        Rollup.objects.create(grain=3600, bucket_at=minute, consumer_group=group, topic=topic, acked=100)
    session = Session(USING)
    first = 2 * 10**9
    found = rollups.sums(session, rollups.MINUTE, first - 60_000, length=120, by_group=True)
    assert {(*one.ref, one.at - first, one.acked) for one in found} == {
        ("g", "t", -60_000, 1),
        ("g", "t", 60_000, 2),
        ("h", "t", 60_000, 4),
        ("g", "u", 60_000, 8),
    }
    found = rollups.sums(session, rollups.MINUTE, 0)
    assert {(*one.ref, one.at - first, one.acked, one.entered) for one in found} == {
        ("", "t", 0, 1, 1),
        ("", "t", 60_000, 6, 6),
        ("", "u", 60_000, 8, 8),
    }
    assert {rollups.percentile(one.latency, 0.5) for one in found} == {(600_000, False)}
    assert rollups.sums(session, rollups.MINUTE, first + 60_001) == []


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


HOUR, DAY = 3_600_000, 86_400_000


@pytest.mark.parametrize(
    ("latencies", "share", "expected"),
    [
        ([], 0.5, None),
        ([1] * 4, 0.5, (5, False)),
        ([6] * 4, 1.0, (10, False)),
        ([1, 20], 0.5, (5, False)),
        ([1, 20], 0.75, (25, False)),
        ([1, 20], 0.0, (5, False)),
        # One bucket from one to ten minutes made 9 minutes of acks after one and a half.
        ([90_000] * 20, 0.95, (120_000, False)),
        ([200_000] * 20, 0.95, (300_000, False)),
        ([400_000] * 20, 0.95, (600_000, False)),
        ([600_001], 0.5, (1_800_000, False)),
        ([1_800_001], 0.5, (HOUR, False)),
        ([HOUR + 1], 0.5, (2 * HOUR, False)),
        ([6 * HOUR], 0.5, (6 * HOUR, False)),
        ([6 * HOUR + 1], 0.5, (12 * HOUR, False)),
        ([DAY], 0.5, (DAY, False)),
        ([DAY + 1], 0.5, (DAY, True)),
        ([DAY + 1] * 19 + [HOUR + 1], 0.95, (DAY, True)),
        ([DAY + 1, HOUR + 1], 0.5, (2 * HOUR, False)),
    ],
)
def test_percentiles_are_bounds_of_buckets(latencies, share, expected):
    tally = rollups.Tally()
    for latency in latencies:
        tally.acked(latency)
    assert rollups.percentile(tally.latency, share) == expected


def test_every_latency_is_in_the_column_of_its_bound():
    columns = dict(zip((*LATENCY_BOUNDS_MS, None), LATENCY_COLUMNS, strict=True))
    for latency in (bound + more for bound in LATENCY_BOUNDS_MS for more in (0, 1)):
        tally = rollups.Tally()
        tally.acked(latency)
        counts = dict(zip(rollups.COUNTS, tally.counts(), strict=True))
        bound = next((bound for bound in LATENCY_BOUNDS_MS if latency <= bound), None)
        assert {name for name, number in counts.items() if number} == {"acked", columns[bound]}
