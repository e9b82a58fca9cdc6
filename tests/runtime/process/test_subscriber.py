"""The subscriber process: its end, hung pollers, outages."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from django.db import OperationalError

from django_mysqlqueue import publish
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.models import DeliveryState, PartitionLease, SubscriberHeartbeat
from django_mysqlqueue.operations import dropping, group_mode, pausing
from tests.support.harness import USING, Sub, handler, in_thread, lag
from tests.support.heartbeats import heart
from tests.support.internals import GroupRef, Subscriber, get_settings, heartbeats, releasing, sessions

REF = GroupRef("g", "t")


def test_an_overrun_is_found(db):
    publish("t", 1)
    sub = Sub(handler(max_processing_time=5.0))
    sub.step()
    held = sub.take()
    assert sub.inbox.overrun() is None
    held.started_at -= 6
    assert sub.inbox.overrun() is held


def test_no_handler_to_run_is_an_error():
    with pytest.raises(SubscriberError, match="no handler"):
        Subscriber({USING: {}}, get_settings())


def test_an_outage_makes_few_lines_and_one_at_its_end(db, monkeypatch, caplog):
    caplog.set_level("INFO")
    beat = heartbeats.beat

    def fails(*args):
        raise OperationalError(2002, "Can't connect")

    beating = heart()
    monkeypatch.setattr(heartbeats, "beat", fails)
    for _ in range(20):
        assert not beating._beat()
    monkeypatch.setattr(heartbeats, "beat", beat)
    assert beating._beat()
    assert caplog.text.count("heartbeat.failed") == 5  # the 1st, 2nd, 4th, 8th and 16th
    assert "heartbeat.recovered failures=20" in caplog.text
    sub = Sub(handler())
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for _ in range(20):
        assert not sub.poller.guarded(lambda: fails())
    assert sub.poller.guarded(lambda: None)
    assert caplog.text.count("poller.failed") == 5
    assert "poller.recovered failures=20" in caplog.text


def test_a_poller_that_hangs_ends_its_process(db, monkeypatch):
    process = Subscriber({USING: {REF: handler()}}, get_settings())
    monkeypatch.setattr("tests.support.internals.subscriber.STUCK_LIMIT", 1.0)
    assert not any(process._is_stuck() for _ in range(5))
    process.workers[0].progress.at += 1  # it goes round
    assert not any(process._is_stuck() for _ in range(5))
    assert process._is_stuck()


def test_a_poller_that_hangs_is_shown(db, monkeypatch, caplog):
    process, hangs = Subscriber({USING: {REF: handler()}}, get_settings()), threading.Event()

    def step_that_hangs():
        hangs.wait(30)

    monkeypatch.setattr("tests.support.internals.subscriber.STUCK_LIMIT", 1.0)
    monkeypatch.setattr(process.workers[0].poller, "step", step_that_hangs)
    assert process.run() == 1
    hangs.set()
    process.stop()
    assert process.workers[0].finished.wait(30)
    (record,) = [one for one in caplog.records if getattr(one, "mysqlqueue", {}).get("event") == "poller.hung"]
    first, *others = record.stack_info.split("\nThread ")
    assert first.startswith("Thread mysqlqueue-poller:\n")
    assert "in step_that_hangs\n    hangs.wait(30)" in first
    assert any(text.startswith("MainThread:") for text in others)
    # Beside the line, not in it: what reads lines reads on.
    assert "\n" not in record.getMessage()
    assert record.mysqlqueue == {
        "event": "poller.hung",
        "name": process.name,
        "database": USING,
        "seconds": 1.0,
    }
    assert logging.Formatter("%(message)s").format(record).endswith(record.stack_info)


@pytest.mark.promise("Shutdown")
@pytest.mark.parametrize("trouble", ["error", "no time"])
def test_leases_are_released_although_what_runs_is_not(db, monkeypatch, trouble):
    """Then it is lost with the process, as if that had been killed."""
    publish("t", 1)
    one = handler()
    (worker,) = Subscriber({USING: {REF: one}}, get_settings()).workers
    sub = Sub(one).step()
    assert sub.take() is not None
    worker.poller = sub.poller
    monkeypatch.setattr(worker, "plan", worker.plan._replace(name=sub.name))
    timeouts = sessions.Timeouts(idle=2, lock_wait=1, network=2, read=2)
    if trouble == "error":

        def fails(*args, **options):
            raise OperationalError(2013, "Lost connection")

        monkeypatch.setattr(releasing, "release_unfinished", fails)
        with pytest.raises(OperationalError):
            in_thread(lambda: worker.release_all(timeouts))
    else:
        monkeypatch.setattr("tests.support.internals.worker.CUT_OFF_TIME", 0.0)
        in_thread(lambda: worker.release_all(timeouts))
    assert PartitionLease.objects.get().leased_by == ""
    assert DeliveryState.objects.get().delivered_by == sub.name
    assert Sub(one).step().take().claimed.suspect


@pytest.mark.promise("Shutdown")
def test_no_heartbeat_follows_the_release_of_everything(db, monkeypatch):
    """It would register the subscriber again, and others would wait until it is lost."""
    (worker,) = Subscriber({USING: {REF: handler()}}, get_settings()).workers
    release, is_beating = releasing.release_all, []

    def release_all(*args, **options):
        is_beating.append(worker.heart._thread.is_alive())
        return release(*args, **options)

    monkeypatch.setattr(releasing, "release_all", release_all)
    worker.heart.start()
    try:
        assert worker.heart.beaten.wait(5)
        in_thread(lambda: worker.release_all(sessions.Timeouts(idle=2, lock_wait=1, network=2, read=2)))
    finally:
        worker.heart.stop()
    assert is_beating == [False]
    assert SubscriberHeartbeat.objects.get().deregistered_at


@pytest.mark.parametrize("mode", ["ordered", "shared"])
@pytest.mark.parametrize("end", ["paused", "dropped"])
def test_a_drain_ends_beside_a_group_that_claims_nothing(db, mode, end):
    """Its partitions have work and no owner: nobody will take them, so they are nothing to wait for."""
    one = handler(mode=mode)
    (draining,) = Subscriber({USING: {one.ref: one}}, get_settings(), drain=True).workers
    sub = Sub(one)
    draining.poller, draining.inbox = sub.poller, sub.inbox
    publish("t", 1)
    if end == "paused":
        pausing.set_paused(USING, one.ref, actor="ada", paused=True)
    else:
        dropping.drop(USING, one.ref, actor="ada")
    sub.step(times=3)
    assert sub.work() == 0
    assert draining.is_drained()


@pytest.mark.parametrize("messages", [0, 3])
def test_a_drain_of_one_database_ends_as_soon_as_it_finds_nothing(db, monkeypatch, messages):
    """There is nothing to wait for: only with several databases may one publish to another, and need a second look."""
    monkeypatch.setattr("tests.support.internals.worker.DRAIN_CHECK", 60.0)
    for number in range(messages):
        publish("t", number, key=str(number))
    process = Subscriber({USING: {REF: handler()}}, get_settings(), drain=True)
    began = time.monotonic()
    assert in_thread(process.run) == 0
    assert time.monotonic() - began < 60
    assert lag() == 0


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_a_group_whose_mode_is_changed_ends_the_process(db, caplog, mode):
    """As it would not have started; its other groups are for one that is started with the right code."""
    publish("t", 1)
    one = handler(mode=mode)
    process = Subscriber({USING: {one.ref: one}}, get_settings())

    def change():
        # It has registered, and is not seen yet.
        other = "shared" if mode == "ordered" else "ordered"
        in_thread(lambda: group_mode.set_mode(USING, one.ref, other, lease_ms=30_000, actor="test"))

    with caplog.at_level(logging.INFO, logger="django_mysqlqueue"):
        assert in_thread(lambda: process.run(ready=change)) == 1
    (record,) = [one for one in caplog.records if getattr(one, "mysqlqueue", {}).get("event") == "group.mode_changed"]
    assert record.levelno == logging.CRITICAL
    assert f"queuegroupmode g t {mode}" in record.getMessage()
    assert lag() == 1
    assert not PartitionLease.objects.exists()
