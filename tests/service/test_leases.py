"""Leases and fair shares: which subscriber works on a partition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import ConsumerGroup, PartitionLease
from django_mysqlqueue.options.backoff import Backoff
from tests.support.handlers import Recorder, stuck
from tests.support.harness import USING, Sub, handler, lag
from tests.support.internals import TAKE_OVER, GroupRef, OrderedMode, heartbeats, leasing
from tests.support.scenarios import busy_partitions, rebalance

pytestmark = pytest.mark.promise("One owner")

REF = GroupRef("g", "t")


@pytest.mark.promise("Many subscribers")
@given(partitions=st.integers(0, 500), names=st.sets(st.text(max_size=5), max_size=40))
def test_caps_sum_to_the_partitions_and_differ_by_one(partitions, names):
    caps = leasing.fair_shares(partitions, names, REF)
    assert set(caps) == names
    if names:
        assert sum(caps.values()) == partitions
        assert max(caps.values()) - min(caps.values()) <= 1


def test_extra_partitions_of_many_groups_fall_to_different_subscribers():
    first = [
        max(caps, key=lambda name: (caps[name], name))
        for caps in (leasing.fair_shares(1, ["a", "b", "c"], GroupRef(f"g{number}", "t")) for number in range(60))
    ]
    assert min(first.count(name) for name in "abc") > 5


@pytest.mark.parametrize(
    ("partitions", "subscribers", "shares"),
    [(4, 1, [4]), (4, 2, [2, 2]), (5, 2, [2, 3]), (2, 4, [0, 0, 1, 1]), (12, 5, [2, 2, 2, 3, 3]), (6, 3, [2, 2, 2])],
)
def test_partitions_are_shared_out_evenly(db, partitions, subscribers, shares):
    busy_partitions(partitions)
    first = Sub(handler(function=stuck))
    rebalance([first])
    assert len(first.owned()) == partitions
    subs = [first, *(Sub(handler(function=stuck)) for _ in range(subscribers - 1))]
    rebalance(subs)
    assert sorted(len(sub.owned()) for sub in subs) == shares
    everything = [key for sub in subs for key in sub.owned()]
    assert len(everything) == len(set(everything)) == partitions


@pytest.mark.parametrize("leaving", ["leaves", "is killed"])
def test_what_a_subscriber_held_is_taken_over(db, clock, leaving):
    busy_partitions(6)
    subs = [Sub(handler(function=stuck)) for _ in range(3)]
    rebalance(subs)
    gone = subs.pop()
    if leaving == "leaves":
        gone.leave()
    else:
        clock.advance(31)
        for sub in subs:
            sub.heart.beat()
    rebalance(subs)
    assert sorted(len(sub.owned()) for sub in subs) == [3, 3]


def test_what_is_given_back_is_taken_with_the_next_poll(db):
    """Not with the next tick, ten seconds later by default: nobody else works on it meanwhile."""
    busy_partitions(4)
    first = Sub(handler(function=stuck))
    rebalance([first])
    second = Sub(handler(function=stuck))
    second.step()
    assert not second.owned()
    first.step()
    assert len(first.owned()) == 2
    second.step(tick=False)  # it sees the free leases
    second.step(tick=False)  # it ticks because of them
    assert len(second.owned()) == 2


def test_free_leases_that_stay_free_are_looked_at_less_and_less_often(db):
    """A group may be paused, or its free partitions beyond this one's share."""
    busy_partitions(1)
    first = Sub(handler(function=stuck))
    rebalance([first])
    first.leave()
    ConsumerGroup.objects.update(paused=True)
    second = Sub(handler(function=stuck))
    ticks = []
    tick = second.poller._tick
    second.poller._tick = lambda: (ticks.append(1), tick())
    for _ in range(20):
        second.step(tick=False)
    assert 1 <= len(ticks) <= 3
    assert second.poller._free_pause >= 0.25


def test_excess_is_given_back_only_after_its_handlers_have_finished(db):
    """A lease that is released earlier lets two handlers of a partition run at once."""
    busy_partitions(2)
    first = Sub(handler())
    first.step()
    running = {held.claimed.key: held for held in (first.take(), first.take())}
    second_got = Recorder()
    second = Sub(handler(function=second_got))
    for _ in range(4):
        first.step()
        second.step()
        second.work()
    assert len(first.owned()) == 2
    assert second_got.deliveries == []
    first.run(running["k001"])
    first.flush()
    for _ in range(2):
        first.step()
    assert first.owned() == {"k000"}
    assert lag() == 1


def test_orphans_are_taken_whatever_the_share(db, clock):
    """Phantom subscribers leave a cap of 1: all three partitions are delivered all the same."""
    busy_partitions(3)
    for name in ("phantom:1", "phantom:2"):
        heartbeats.beat(USING, name, [REF], {})
    got = Recorder()
    sub = Sub(handler(function=got))
    sub.settle()
    assert len(got.deliveries) == 1
    for work in sub.poller.ordered:
        work.mode.waiting.update({key: since - 31 for key, since in work.mode.waiting.items()})
    sub.settle()
    assert len(got.deliveries) == 3


def test_news_below_the_share_is_taken_without_waiting_for_a_tick(db):
    got = Recorder()
    sub = Sub(handler(function=got))
    sub.step()
    publish("t", 1, key="k")
    sub.step(tick=False)
    sub.work()
    assert got.payloads == [1]


def test_a_million_keys_leave_no_memory_behind(db):
    """Drained partitions are forgotten (checked with 300)."""
    sub = Sub(handler(), lease_renewal_interval=0.0, claim_size=100, prefetch=200)
    busy_partitions(300)
    sub.settle()
    sub.step(times=2)
    work = sub.poller.ordered[0]
    assert not work.mode.partitions
    assert not work.mode.waiting
    assert not work.memory.todo
    assert all(not group.lanes for group in sub.inbox._groups.values())
    assert not PartitionLease.objects.exists()


def test_a_take_over_of_many_partitions_is_bounded(db, monkeypatch, clock):
    """One transaction took every partition that waited: 50,000 in 5 s, with no sign of progress to the heart."""
    taken = []
    acquire = leasing.acquire
    monkeypatch.setattr(leasing, "acquire", lambda *args, **kw: (taken.append(len(args[3])), acquire(*args, **kw))[1])
    publish_many("t", (Message(n, key=f"k{n}") for n in range(3000)))
    Sub(handler(), name="a", prefetch=1, claim_size=1).step(times=12)
    clock.advance(60)  # a has vanished
    taken.clear()
    second = Sub(handler(), name="b")
    second.step(times=4)
    assert max(taken) == TAKE_OVER
    assert len(second.owned()) == 3000


@pytest.mark.promise("Delayed redelivery")
def test_what_waits_out_a_backoff_takes_no_memory_without_bound(db):
    """An outage of what handlers need brought the whole backlog of a partition into memory."""

    def fail(delivery):
        raise ValueError("what it needs is away")

    sub = Sub(handler(function=fail, backoff=Backoff(initial=600, jitter=0)), claim_size=100)
    publish_many("t", [Message(n, key="k") for n in range(3000)])
    for _ in range(20):
        sub.settle(rounds=5)
    work = sub.poller.groups[0]
    assert isinstance(work.mode, OrderedMode)
    assert leasing.MAX_PENDING <= len(work.mode.partitions["k"].pending) < leasing.MAX_PENDING + 100


def test_leases_do_not_grow_with_the_keys_that_wait(db, monkeypatch):
    """A million keys became as many lease rows, which each tick read, and were sorted for each thousand taken."""
    monkeypatch.setattr("tests.support.internals.ordered.AHEAD", 30)
    monkeypatch.setattr("tests.support.internals.ordered.CHOICE", 20)
    monkeypatch.setattr("tests.support.internals.ordered.TAKE_OVER", 10)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(200)])
    sub = Sub(handler(), claim_size=10, prefetch=10, lease_renewal_interval=0.0)
    most = done = 0
    for _ in range(400):
        sub.step()
        most = max(most, PartitionLease.objects.count())
        assert len(sub.poller.ordered[0].memory.todo) < 30 + 10
        done += sub.work()
        sub.flush()
    assert done == 200
    assert 10 <= most < 100
    assert not PartitionLease.objects.exists()
    assert lag() == 0


def test_what_nobody_takes_is_taken_by_who_has_its_hands_full(db, monkeypatch):
    """Else a partition starved whose subscriber had died, beside others that never came to an end."""
    monkeypatch.setattr("tests.support.internals.ordered.AHEAD", 2)
    sub = Sub(handler(), claim_size=1, prefetch=1)
    publish_many("t", [Message(n, key="ab"[n % 2]) for n in range(40)])
    sub.step()
    publish("t", 1, key="c")
    sub.step(times=3)
    assert sub.owned() == {"a", "b"}
    (work,) = sub.poller.ordered
    work.mode.waiting["c"] -= sub.settings.lease_duration + 1
    sub.step()
    assert sub.owned() == {"a", "b", "c"}
    assert lag() > 35
