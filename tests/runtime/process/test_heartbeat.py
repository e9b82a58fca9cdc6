"""The heartbeat: what stops it, and what its delay means for leases."""

from __future__ import annotations

import time

from django.db import OperationalError

from django_mysqlqueue.models import SubscriberHeartbeat
from django_mysqlqueue.runtime.polling.context import Progress
from django_mysqlqueue.runtime.process.heartbeat import Heart
from django_mysqlqueue.service import heartbeats
from django_mysqlqueue.service.refs import GroupRef
from tests.support.harness import USING, Going, in_thread
from tests.support.heartbeats import heart

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
    progress.at -= 1
    beating = heart(progress)
    assert beating._beat() is False
    assert not SubscriberHeartbeat.objects.exists()


def test_leases_are_in_doubt_after_a_late_beat_until_they_are_verified(db):
    beating = heart()
    assert beating._beat()
    assert beating.good()
    beating.beat_at -= 10  # the last beat is long ago, by this process's own clock
    assert not beating.good()
    assert not beating.must_verify()  # not before it beats again
    assert beating._beat()
    assert not beating.good()
    assert beating.must_verify()
    beating.verified()
    assert beating.good()


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
