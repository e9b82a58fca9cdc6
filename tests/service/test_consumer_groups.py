"""Consumer groups: independent of each other, registered once, dropped, in one mode."""

from __future__ import annotations

import pytest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup, DeliveryState, PartitionLease, SubscriberHeartbeat
from django_mysqlqueue.operations import dropping, group_mode
from tests.support.claims import claimant_of
from tests.support.handlers import Recorder, both_modes, stuck
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.internals import Due, GroupRef, Seen, Want, claiming, groups, heartbeats, leasing


@both_modes
def test_every_group_gets_every_message(db, mode):
    got = [Recorder() for _ in range(3)]
    publish_many("t", range(3))
    first = [Sub(handler(group=f"g{number}", function=got[number], mode=mode)) for number in range(2)]
    for sub in first:
        sub.settle()
    publish("t", 3)
    sequence()
    earliest = Recorder()
    latest = Recorder()
    late = Sub(
        handler(group="early", function=earliest, mode=mode),
        handler(group="late", function=latest, mode=mode, start="latest"),
    )
    publish("t", 4)
    for sub in (*first, late):
        sub.settle()
    assert sorted(got[0].payloads) == sorted(got[1].payloads) == [0, 1, 2, 3, 4]
    assert sorted(earliest.payloads) == [0, 1, 2, 3, 4]
    assert latest.payloads == [4]


@pytest.mark.promise("Independent groups")
@both_modes
def test_what_one_group_does_is_invisible_to_another(db, mode):
    nacks = Recorder(lambda delivery: delivery.nack() if delivery.attempt == 1 else None)
    acks = Recorder()
    publish("t", 1)
    sub = Sub(handler(group="a", function=nacks, mode=mode), handler(group="b", function=acks, mode=mode))
    sub.settle()
    assert nacks.attempts == [(1, 1), (1, 2)]
    assert acks.attempts == [(1, 1)]


@both_modes
def test_two_subscribers_of_a_group_share_its_work(db, mode):
    """3 subscribers, 5 partitions, 15 messages: all handled, none twice."""
    got = [Recorder() for _ in range(3)]
    publish_many("t", (Message(number, key=f"k{number % 5}") for number in range(15)))
    sequence()
    subs = [Sub(handler(function=recorder, mode=mode), claim_size=2, prefetch=4) for recorder in got]
    for _ in range(30):
        for sub in subs:
            sub.step()
            sub.work(1)
    for sub in subs:
        sub.settle()
    handled = [payload for recorder in got for payload in recorder.payloads]
    assert sorted(handled) == list(range(15))
    assert lag() == 0


REF = GroupRef("g", "t")


def test_a_paused_group_claims_nothing_and_goes_on_later(db):
    publish("t", 1, key="k")
    got = Recorder()
    sub = Sub(handler(function=got))
    ConsumerGroup.objects.update(paused=True)
    sub.settle()
    assert got.payloads == []
    ConsumerGroup.objects.update(paused=False)
    sub.settle()
    assert got.payloads == [1]


def test_a_dropped_group_is_not_brought_back_by_its_subscriber(db):
    publish_many("t", (Message(number, key="k") for number in range(3)))
    sub = Sub(handler(), claim_size=1, prefetch=1)
    sub.step()
    sub.work()
    assert dropping.drop(USING, REF, actor="test")
    sub.settle()
    for model in (ConsumerGroup, DeliveryState, PartitionLease):
        assert not model.objects.exists(), model


def test_mode_changes_only_while_nobody_works(db):
    publish("t", 1, key="k")
    got = Recorder(stuck)
    first = Sub(handler(function=got))
    first.settle()
    with pytest.raises(OperationRefused, match="live subscribers"):
        group_mode.set_mode(USING, REF, "shared", lease_ms=30_000, actor="test")
    first.leave()
    group_mode.set_mode(USING, REF, "shared", lease_ms=30_000, actor="test")
    assert ConsumerGroup.objects.get().mode == "shared"
    DeliveryState.objects.update(invisible_until=0)
    got.action = None
    Sub(handler(function=got, mode="shared")).settle()
    assert got.attempts == [(1, 1), (1, 2)]


OTHER_MODE = {"ordered": "shared", "shared": "ordered"}


def held_by_a_frozen_one(mode):
    """A subscriber that has claimed one of two messages, and whose heartbeat is as good as forgotten."""
    publish_many("t", (Message(number, key="k") for number in range(2)))
    sub = Sub(handler(mode=mode), prefetch=1, claim_size=1).step()
    assert DeliveryState.objects.get().delivered_by == sub.name
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    return sub


def claim(sub, mode):
    claimant = claimant_of(REF, sub.name, 5, 60_000 if mode == "shared" else None)
    return claiming.claim(
        USING, claiming.ClaimRequest(claimant, [Want("k", look_at=9)], token=claiming.new_token(), due=Due(9))
    )


@pytest.mark.promise("One owner")
@pytest.mark.parametrize("mode", OTHER_MODE)
def test_a_group_of_another_mode_gives_nothing(db, mode):
    """Nor by a lease: the mode is checked under the lock under which one is taken."""
    sub = held_by_a_frozen_one(mode)
    ConsumerGroup.objects.update(mode=OTHER_MODE[mode])  # and a lease, if there is one, stays
    found = claim(sub, mode)
    assert (found.deliveries, found.dead, found.refused, found.fence.mode) == ([], [], "mode", OTHER_MODE[mode])
    if mode == "ordered":
        PartitionLease.objects.all().delete()
        taken = leasing.acquire(USING, REF, sub.name, ["k"], lease_ms=30_000)
        assert (taken.held, taken.other_mode) == (set(), "shared")
        assert not PartitionLease.objects.exists()
    assert DeliveryState.objects.count() == 1


def test_leases_go_with_the_mode(db):
    sub = held_by_a_frozen_one("ordered")
    groups.register(USING, GroupRef("other", "t"), mode="ordered", start="earliest")
    PartitionLease.objects.create(consumer_group="other", topic="t", partition_key="k", leased_by="somebody")
    group_mode.set_mode(USING, REF, "shared", lease_ms=30_000, actor="test")
    assert list(PartitionLease.objects.values_list("consumer_group", flat=True)) == ["other"]
    # And back, while it is still frozen: by the name of then it owns nothing.
    group_mode.set_mode(USING, REF, "ordered", lease_ms=30_000, actor="test")
    found = claim(sub, "ordered")
    assert (found.deliveries, found.partitions, found.refused) == ([], {"k": Seen.LOST}, None)


@pytest.mark.parametrize("mode", OTHER_MODE)
def test_a_subscriber_with_nothing_to_do_learns_of_another_mode(db, mode):
    sub = Sub(handler(mode=mode)).step()
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    group_mode.set_mode(USING, REF, OTHER_MODE[mode], lease_ms=30_000, actor="test")
    (work,) = sub.step().poller.groups
    assert work.configuration.other_mode == OTHER_MODE[mode]


@pytest.mark.parametrize("mode", OTHER_MODE)
@pytest.mark.parametrize("tick", [True, False])
def test_a_frozen_subscriber_of_another_mode_claims_nothing(db, mode, tick):
    """It learns it from its next tick or claim, whichever is first; leases are in doubt before anything else."""
    sub = held_by_a_frozen_one(mode)
    group_mode.set_mode(USING, REF, OTHER_MODE[mode], lease_ms=30_000, actor="test")
    sub.heart.in_doubt = True
    assert sub.work() == (0 if mode == "ordered" else 1)
    sub.flush()
    sub.heart.beat()
    publish("t", 9, key="new")
    sub.step(tick=tick)
    (work,) = sub.poller.groups
    assert (work.configuration.stopped, work.configuration.other_mode) == (True, OTHER_MODE[mode])
    assert sub.step().work() == 0
    assert work.configuration.stopped
    assert not PartitionLease.objects.exists()
    sub.leave()
    got = []
    Sub(handler(mode=OTHER_MODE[mode], function=lambda delivery: got.append(delivery.payload))).settle()
    assert sorted(got) == ([0, 1, 9] if mode == "ordered" else [1, 9])
    assert lag() == 0


def test_old_heartbeats_are_forgotten(db, clock):
    heartbeats.beat(USING, "old:1", [REF], {})
    clock.advance(86_401)
    heartbeats.beat(USING, "new:1", [REF], {})
    assert heartbeats.forget_old(USING) == 1
    assert list(SubscriberHeartbeat.objects.values_list("subscriber_name", flat=True)) == ["new:1"]


def test_registering_twice_keeps_the_first_start(db):
    publish("t", 1)
    sequence()
    first = groups.register(USING, REF, mode="ordered", start="latest")
    again = groups.register(USING, REF, mode="shared", start="earliest")
    assert first == again
    assert ConsumerGroup.objects.count() == 1
