"""The heartbeat: what stops it, and what its delay means for leases."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue.inspection import find_causes, find_problems, get_overview
from django_mysqlqueue.inspection.causes import status_of
from django_mysqlqueue.metrics.queue import QueueCollector
from django_mysqlqueue.models import SubscriberHeartbeat
from tests.support.harness import USING, Going, Sub, handler, in_thread
from tests.support.heartbeats import heart
from tests.support.internals import GroupRef, HealthSettings, Heart, Progress, RoundTrip, context, heartbeats, polling

REF = GroupRef("g", "t")


def test_the_heart_beats_until_it_is_stopped(db):
    beating = heart()
    beating.start()
    assert beating.beaten.wait(5)
    assert beating.good()
    beating.stop()
    row = SubscriberHeartbeat.objects.get()
    began = row.info.pop("started_at")
    assert (row.consumer_group, row.topic, row.info) == ("g", "t", {"host": "tests"})
    assert 0 < began <= row.heartbeat_at


def test_the_heart_withholds_beats_of_a_stuck_poller(db):
    progress = Progress()
    progress.at -= 100
    beating = heart(progress)
    assert beating._beat() is False
    assert not SubscriberHeartbeat.objects.exists()


def test_leases_are_in_doubt_after_a_late_beat_until_they_are_verified(db):
    beating = heart()
    assert beating._beat()
    assert beating.good()
    beating.beat_at -= 100  # the last beat is long ago, by this process's own clock
    assert not beating.good()
    assert not beating.must_verify()  # not before it beats again
    assert beating._beat()
    assert not beating.good()
    assert beating.must_verify()
    beating.verified(time.monotonic())
    assert beating.good()


def test_a_doubt_that_comes_up_while_leases_are_verified_remains(db):
    """The process stood still after the poller had read them, and the heartbeat's thread went on first."""
    beating = heart()
    assert beating._beat()
    beating.beat_at -= 100
    assert beating._beat()
    began = time.monotonic()
    beating.beat_at -= 100
    assert beating._beat()
    beating.verified(began)
    assert not beating.good()
    assert beating.must_verify()


def test_a_failed_beat_is_no_beat(db, monkeypatch):
    def fail(*args):
        raise OperationalError(2006, "gone")

    beating = heart()
    monkeypatch.setattr(heartbeats, "beat", fail)
    assert in_thread(beating._beat) is False
    assert not beating.beaten.is_set()


def test_the_heart_outlives_a_bug(db, monkeypatch, caplog):
    """Its thread gone, nothing would start any more, and the process would stay."""
    broken = {"times": 2}
    beat = heartbeats.beat

    def fails_twice(*args):
        if broken["times"]:
            broken["times"] -= 1
            raise TypeError("a bug")
        beat(*args)

    monkeypatch.setattr(heartbeats, "beat", fails_twice)
    beating = heart()
    beating.start()
    assert beating.beaten.wait(5)
    beating.stop()
    assert "TypeError: a bug" in caplog.text


def test_a_slow_beat_that_crosses_the_end_of_the_lease_raises_doubt(db, monkeypatch):
    heart = Heart(USING, "s:1", [REF], interval=0.1, lease=0.5, info={}, progress=Going())
    assert heart._beat()
    first = heart.beat_at
    while time.monotonic() < first + 0.3:
        pass
    real = heartbeats.beat

    def slow(*args):
        real(*args)
        while time.monotonic() < first + 0.55:  # sent in time, answered too late
            pass

    monkeypatch.setattr(heartbeats, "beat", slow)
    assert heart._beat()
    assert heart.must_verify()


# -- the round trip ---------------------------------------------------------------


def test_the_round_trip_is_that_of_the_last_half_minute(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(context, "time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = Progress()
    assert progress.round_trip() is None
    for number in range(1, 101):
        progress.answered(number / 1000)
    assert progress.round_trip() == RoundTrip(0.050, 0.095)
    now[0] += 29
    progress.answered(5.0)
    assert progress.round_trip() == RoundTrip(0.051, 0.096)
    for _ in range(2):
        now[0] += 1
        progress.answered(5.0)
    now[0] += 1
    assert progress.round_trip() == RoundTrip(5.0, 5.0)
    now[0] += 600
    assert progress.round_trip() == RoundTrip(5.0, 5.0), "the newest polls may have been long ago"
    for _ in range(1000):
        progress.answered(0.001)
    assert progress.round_trip() == RoundTrip(0.001, 0.001)


def test_since_when_a_database_is_slow(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(context, "time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = Progress(slow=0.25)

    def facts(*polls):
        for seconds in polls:
            now[0] += seconds
            progress.answered(seconds)
        return progress.facts()["slow_ms"]

    assert facts(0.1, 0.2, 0.25) == -1
    assert facts(1.0) == -1, "not half of them"
    assert facts(1.0, 1.0, 1.0) == 4000, "since the first slow one"
    now[0] += 600
    assert facts(1.0) == 605_000
    now[0] += 600
    assert facts(0.1) == 1_205_100, "one of the newest three"
    assert facts(0.1) == -1
    now[0] += 600
    assert facts(1.0) == -1, "of a process that polls rarely"
    now[0] += 600
    assert facts(2.0) == 603_000, "again"


def test_a_database_that_becomes_slow_is_seen_after_half_a_minute(monkeypatch):
    """Before, ten polls a second were fast."""
    now = [1000.0]
    monkeypatch.setattr(context, "time", SimpleNamespace(monotonic=lambda: now[0]))
    progress = Progress(slow=0.25)
    for _ in range(1000):
        now[0] += 0.1
        progress.answered(0.001)
    until = now[0] + 30
    while now[0] < until:
        assert progress.facts()["p50_us"] == 1000 or now[0] > until - 5
        now[0] += 1.0
        progress.answered(0.5)
    assert 25_000 <= progress.facts()["slow_ms"] <= 30_000


def test_a_heartbeat_has_the_round_trip_of_the_polls(db):
    """In the row of each group, with the same statement, and beside what else the row has."""
    sub = Sub(handler(), handler(group="h"), name="other")
    beating = heart(sub.progress)
    assert beating._beat()
    assert "p50_us" not in SubscriberHeartbeat.objects.get(subscriber_name=beating._subscriber).info
    heartbeats.report(USING, beating._subscriber, REF, "no")
    sub.step()
    with CaptureQueriesContext(connection) as sent:
        assert beating._beat()
    assert len([one for one in sent if "INSERT" in one["sql"]]) == 1
    info = SubscriberHeartbeat.objects.get(subscriber_name=beating._subscriber).info
    assert 0 < info["p50_us"] <= info["p95_us"] < 60_000_000
    assert (info["host"], info["error"]) == ("tests", "no")
    assert isinstance(info["p50_us"], int)


@pytest.mark.promise("Health")
def test_a_slow_database_is_shown_and_is_a_problem(db, monkeypatch):
    poll = polling.poll

    def slowly(*arguments):
        time.sleep(0.03)
        return poll(*arguments)

    monkeypatch.setattr(polling, "poll", slowly)
    sub = Sub(handler())
    sub.step(times=3)
    sub.poller.look_now()
    sub.step()
    heartbeats.beat(USING, sub.name, [REF], {}, sub.progress.facts())
    overview = get_overview(using=USING)
    assert 0.03 <= overview.slowest_round_trip.p50 < 5
    (row,) = SubscriberHeartbeat.objects.all()
    row.info["slow_ms"] = 90_000
    row.save()
    overview = get_overview(using=USING)
    found = find_problems(overview, thresholds=HealthSettings(max_round_trip=0.02))
    assert [one.since for one in found if one.kind == "slow_database"] == [row.heartbeat_at - 90_000]
    kinds = {one.kind for one in find_problems(overview, thresholds=HealthSettings(max_round_trip=0.02))}
    assert "slow_database" in kinds
    assert "slow_database" not in {
        one.kind for one in find_problems(overview, thresholds=HealthSettings(max_round_trip=None))
    }
    (cause,) = find_causes(overview, find_problems(overview, thresholds=HealthSettings(max_round_trip=0.02)))
    assert status_of(overview, [cause]).state == "degraded"
    samples = {
        sample.labels["percentile"]: sample.value
        for family in QueueCollector(USING).collect()
        if family.name == "mysqlqueue_round_trip_seconds"
        for sample in family.samples
    }
    assert samples == {"50": overview.slowest_round_trip.p50, "95": overview.slowest_round_trip.p95}
