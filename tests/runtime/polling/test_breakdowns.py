"""A bug in the work for one group, an error that is not the database's, stops that group for a while, and no other."""

from __future__ import annotations

import dataclasses
import logging
import random
import time

import pytest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import DeliveryState, PartitionLease, SubscriberHeartbeat
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, in_thread, lag, problems_found
from tests.support.internals import (
    GroupRef,
    InlineSubscriber,
    Subscriber,
    claiming,
    get_settings,
    groups,
    health,
    payloads,
    settling,
    writing,
)
from tests.support.internals import limited as limited_module

pytestmark = pytest.mark.promise("Independent groups")

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])
REF, OTHER = GroupRef("g", "t"), GroupRef("other", "u")


class Bug(Exception):
    """What nobody expects."""


def fails(*args, **options):
    raise Bug("no")


def group_of(sub, ref=REF):
    return next(group for group in sub.poller.groups if group.ref == ref)


def end_pauses(sub):
    for group in sub.poller.groups:
        group.health.rests_until = 0.0


def one_round(sub):
    """A turn of everything, with the sleep, as the poller's thread does it."""
    sub.poller.poll_soon()
    sub.poller._next_rollup = 0.0
    assert sub.poller.guarded(sub.poller.step)
    sub.inbox.wake()
    sub.poller.sleep()
    sub.work()


def messages():
    return [Message(number, key=f"k{number % 3}") for number in range(12)]


def check(got):
    """Each message once, in its first attempt, and the keys in order."""
    assert sorted(got.payloads) == list(range(12))
    assert {delivery.attempt for delivery in got.deliveries} == {1}
    for key in range(3):
        mine = [payload for payload in got.payloads if payload % 3 == key]
        assert mine == sorted(mine)


OF_BOTH = [
    *("turn", "wake_at", "wants_turn", "flush_now", "override", "mode.notify", "mode.next_at"),
    *("planner.has_room_for_due", "writer.polled", "counts.read", "health.recover"),
    *("configuration.recheck_paused", "configuration.check_mode", "configuration.has_new_revision"),
]
CALLED = [
    *(("ordered", name) for name in (*OF_BOTH, "mode.rebalance", "mode.release_free")),
    *(("shared", name) for name in (*OF_BOTH, "mode.found_due", "mode.expect_clock_step")),
]


def breaks(monkeypatch, broken, path):
    """Lets a method of a group, or of one of its parts, always fail, even when the parts have been made again."""
    *part, name = path.split(".")

    def build():
        type(broken)._build(broken)
        monkeypatch.setattr(getattr(broken, part[0]), name, fails)

    if part:
        monkeypatch.setattr(broken, "_build", build)
    monkeypatch.setattr(getattr(broken, part[0]) if part else broken, name, fails)


@pytest.mark.parametrize(("mode", "name"), CALLED)
def test_whatever_the_poller_does_for_a_group_stops_only_that_group(db, monkeypatch, caplog, mode, name):
    mine, got = Recorder(), Recorder()
    sub = Sub(handler(mode=mode, function=mine), handler("u", "other", function=got), claim_size=4)
    broken = group_of(sub)
    breaks(monkeypatch, broken, name)
    publish_many("t", messages())
    publish_many("u", messages())
    sub.poller.maintenance._steps = sub.poller.maintenance._sweep_watermarks()
    for _ in range(6):
        end_pauses(sub)
        sub.poller.look_now()
        sub.poller.maintenance.next_at = 0.0
        one_round(sub)
    sub.poller.flush_groups()
    if name == "mode.release_free":  # it is called at the end only, or while the group is down
        sub.poller.release_leases()
    check(got)
    events = [one for one in caplog.records if getattr(one, "mysqlqueue", {}).get("event") == "group.broken"]
    assert events
    assert {one.mysqlqueue["group"] for one in events} == {"g"}
    assert all(one.levelno == logging.ERROR and one.exc_info for one in events)
    monkeypatch.undo()
    end_pauses(sub)
    sub.settle()
    check(mine)
    assert lag() == lag("other", "u") == 0


@MODES
def test_an_outcome_whose_row_was_locked_is_written_after_a_breakdown(db, mode):
    got = Recorder()
    sub = Sub(handler(mode=mode, function=got))
    publish("t", 1, key="k")
    sub.step()
    sub.work()
    group = group_of(sub)
    group.memory.locked = list(sub.inbox.take_settlements(REF))
    assert group.memory.locked
    group.start_over(Bug("no"))
    end_pauses(sub)
    sub.settle()
    assert got.payloads == [1]
    assert lag() == 0
    assert not DeliveryState.objects.exists()


DEEP = [
    ("claim fails", claiming, "claim"),
    ("payloads cannot be read", payloads, "read"),
    ("slots are not understood", limited_module.Limited, "claimed"),
    ("outcomes cannot be written", settling, "flush"),
    ("counts are wrong", writing.Counts, "settled"),
]


@MODES
@pytest.mark.parametrize(("module", "name"), [one[1:] for one in DEEP], ids=[one[0] for one in DEEP])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_bug_between_two_commits_loses_nothing_and_repeats_nothing(db, monkeypatch, mode, module, name, when):
    """What was claimed is released, and what has ended is written, whatever the transaction before has come to."""
    got = Recorder()
    sub = Sub(handler(mode=mode, function=got, max_in_flight=100), claim_size=4)
    publish_many("t", messages())
    sub.step()
    sub.work(2)
    real, calls = getattr(module, name), []

    def once(*args, **options):
        if not calls and when == "before":
            calls.append(name)
            fails()
        result = real(*args, **options)
        if not calls:
            calls.append(name)
            fails()
        return result

    monkeypatch.setattr(module, name, once)
    for _ in range(12):
        sub.step()
        end_pauses(sub)
        sub.work(3)
        sub.poller.flush_groups()
    assert calls
    sub.settle()
    check(got)
    assert lag() == 0


@MODES
def test_what_runs_meanwhile_ends_and_is_not_started_twice(db, mode):
    got = Recorder()
    sub = Sub(handler(mode=mode, function=got), claim_size=4)
    publish_many("t", messages())
    sub.step()
    running = [sub.take(), sub.take()]
    broken = group_of(sub)
    broken.turn = fails
    sub.step()
    assert broken.health.error
    del broken.turn
    end_pauses(sub)
    sub.step(times=3)
    sub.work(6)
    sub.flush()
    for held in running:
        sub.run(held)
    sub.settle()
    assert sorted(got.payloads) == list(range(12))
    assert {delivery.attempt for delivery in got.deliveries} == {1}
    assert lag() == 0


@MODES
def test_others_go_on_with_what_a_broken_group_held(db, mode):
    """Not only with a message: they do not leave it a share of the partitions."""
    got = Recorder()
    sub = Sub(handler(mode=mode), claim_size=4)
    publish_many("t", messages())
    sub.step()
    assert sub.inbox.waiting(REF)[0]
    group_of(sub).turn = fails
    sub.step()  # it breaks down
    sub.step()  # and releases it
    other = Sub(handler(mode=mode, function=got))
    for _ in range(4):
        sub.step()
        other.settle()
    check(got)
    assert lag() == 0
    if mode == "ordered":
        assert set(PartitionLease.objects.values_list("leased_by", flat=True)) == {other.name}


def test_a_breakdown_is_a_problem_until_the_group_has_worked_for_a_while(db):
    sub = Sub(handler(), handler("u", "other"))
    group_of(sub).turn = fails
    publish("t", 1)
    sub.step()
    sub.step()
    (problem,) = [one for one in problems_found() if one.kind == "broken"]
    assert (problem.severity, problem.ref, problem.subscriber, problem.error) == (
        0,
        REF,
        sub.name,
        f"{Bug.__module__}.Bug: no",
    )
    del group_of(sub).turn
    end_pauses(sub)
    sub.settle()
    assert [one.severity for one in problems_found() if one.kind == "broken"] == [1], "nothing waits any more"
    group_of(sub).health.broke_at -= health.RECOVERED + 1
    sub.step()
    assert not [one for one in problems_found() if one.kind == "broken"]
    assert not group_of(sub).health.breakdowns.count


def test_other_subscribers_that_work_make_it_less_severe(db):
    sub, other = Sub(handler()), Sub(handler())
    group_of(sub).turn = fails
    publish("t", 1)
    sub.step()
    sub.step()
    assert [one.severity for one in problems_found() if one.kind == "broken"] == [1]
    assert other.settle() == 1


def test_the_pause_grows_and_the_log_does_not_fill(db, caplog):
    sub = Sub(handler())
    broken = group_of(sub)
    broken.turn = fails
    pauses = []
    for _ in range(9):
        broken.health.rests_until = 0.0
        sub.poller.step()
        pauses.append(round(broken.health.rests_until - broken.health.broke_at, 3))
    assert pauses[:2] == [0.1, 0.2]
    assert pauses[-1] == 5.0
    assert caplog.text.count("group.broken") == 4  # 1, 2, 4, 8


def test_a_test_sees_the_bug(db, monkeypatch):
    """Not only a log line: ``deliver_all`` raises it."""
    publish("t", 1)
    subscriber = InlineSubscriber(USING, {REF: handler()}, get_settings())
    monkeypatch.setattr(subscriber._poller.groups[0].mode, "claimed", fails)
    with pytest.raises(Bug):
        subscriber.run(ignore_backoff=True, stop_at_error=False)
    assert not SubscriberHeartbeat.objects.exists()
    assert not DeliveryState.objects.exclude(delivery_token=0).exists()


BEGINNING = {"start_over", "broke_down", "owned", "restore", "_build", "_apply", "use", "configured"}
"""What a group does when it starts over."""


@MODES
@pytest.mark.parametrize("seed", range(3))
def test_bugs_anywhere_at_any_time(db, monkeypatch, mode, seed):
    rng = random.Random(seed)
    got = Recorder()
    publish_many("t", messages())
    sub = Sub(handler(mode=mode, function=got, max_in_flight=9), claim_size=3, prefetch=6)
    broken = group_of(sub)

    def flawed(real):
        def call(*args, **options):
            if rng.random() < 0.04:
                fails()
            result = real(*args, **options)
            if rng.random() < 0.04:
                fails()
            return result

        return call

    parts = [broken, broken.mode, broken.configuration, broken.memory, broken.planner, broken.writer, broken.hand_out]
    for kind in map(type, [*parts, broken.counts, broken.health]):
        for name in sorted(vars(kind).keys() - BEGINNING):
            method = vars(kind)[name]
            if callable(method) and (name in ("__enter__", "__exit__") or not name.startswith("__")):
                monkeypatch.setattr(kind, name, flawed(method))
    for module, name in ((claiming, "claim"), (claiming, "undo"), (settling, "flush"), (payloads, "read")):
        monkeypatch.setattr(module, name, flawed(getattr(module, name)))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for _ in range(60):
        broken.health.rests_until = 0.0
        sub.poller.poll_soon()
        if rng.random() < 0.3:
            sub.poller._next_tick = 0.0
        assert sub.poller.guarded(sub.poller.step)
        sub.inbox.wake()
        sub.poller.sleep()
        sub.work(2)
    monkeypatch.undo()
    end_pauses(sub)
    sub.settle()
    check(got)
    assert lag() == 0


def test_a_process_whose_outcomes_cannot_be_written_stops_uncleanly(db, monkeypatch):
    """What it leaves unwritten is released when it exits, which it does only with an exit status that is not 0."""
    got = Recorder()
    subscribers = {
        REF: handler(function=lambda delivery: process.stop()),
        OTHER: handler("u", "other", function=got),
    }
    for one in subscribers.values():
        groups.register(USING, one.ref, mode=one.mode, start=one.start)
    publish("u", 1)
    publish("t", 1)
    process = Subscriber({USING: subscribers}, dataclasses.replace(get_settings(), poll_interval=0.02))
    broken = next(group for group in process.workers[0].poller.groups if group.ref == REF)
    real = settling.flush

    def flush(using, ref, *args, **options):
        return fails() if ref == REF else real(using, ref, *args, **options)

    monkeypatch.setattr(settling, "flush", flush)
    monkeypatch.setattr(
        broken, "_claim", lambda plan: fails() if plan.unwritten.settlements else type(broken)._claim(broken, plan)
    )
    assert in_thread(process.run) == 1
    assert lag("other", "u") == 0
    assert lag() == 1
