"""Leases, fair share, fencing: who works on a partition, and who may still speak for a delivery."""

from __future__ import annotations

import pytest
from django.db import connection, transaction
from hypothesis import given
from hypothesis import strategies as st

from django_mysqlqueue import Message, StaleDelivery, publish, publish_many
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup, DeliveryState, PartitionLease, SubscriberHeartbeat
from django_mysqlqueue.operations import dropping, group_mode
from django_mysqlqueue.service import claiming, groups, heartbeats, leasing, settling
from django_mysqlqueue.service.claiming import Claimant, Want
from django_mysqlqueue.service.deliveries import Action, Settlement
from django_mysqlqueue.service.refs import GroupRef
from tests.support.harness import USING, Sub, handler, in_thread, lag, sequence
from tests.test_conformance import Recorder

REF = GroupRef("g", "t")


def stuck(delivery):
    """Keeps its partition busy: unsettled work holds the lease."""
    delivery.nack(delay=3600)


def busy_partitions(count):
    publish_many("t", (Message(number, key=f"k{number:03}") for number in range(count)))
    sequence()


def rebalance(subs, rounds=4):
    for _ in range(rounds):
        for sub in subs:
            sub.step()
            sub.work()
            sub.flush()
            sub.step()


# -- fair share ---------------------------------------------------------------


@pytest.mark.defect(21)
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
        work.waiting = {key: since - 31 for key, since in work.waiting.items()}
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
    sub = Sub(handler(), lease_renewal_interval=0.0, batch_size=100, prefetch=200)
    busy_partitions(300)
    sub.settle()
    sub.step(times=2)
    work = sub.poller.ordered[0]
    assert not work.partitions
    assert not work.waiting
    assert not work.todo
    assert all(not group.lanes for group in sub.inbox._groups.values())
    assert not PartitionLease.objects.exists()


# -- clocks and doubt ---------------------------------------------------------


@pytest.mark.defect(14)
@pytest.mark.parametrize("hours", [-1, 1])
def test_moving_a_clients_clock_changes_nothing(db, monkeypatch, hours):
    import time

    busy_partitions(4)
    first = Sub(handler(function=stuck))
    rebalance([first])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + hours * 3600)
    second = Sub(handler(function=stuck))
    second.heart.beat()
    leases = leasing.read(leasing.Session(USING), [REF], 30_000)[REF]
    assert all(lease.good for lease in leases)
    taken = leasing.acquire(USING, REF, second.name, {"k000", "k001"}, lease_ms=30_000)
    assert taken.held == set()
    assert taken.elsewhere == {"k000", "k001"}


def test_a_heartbeat_from_the_future_counts_as_passed(db, clock):
    """The database's clock was an hour ahead and has been mended: its leases do not last an hour longer."""
    clock.advance(3600)
    busy_partitions(1)
    first = Sub(handler(function=stuck))
    rebalance([first])
    clock.advance(-3600)
    second = Sub(handler(function=stuck))
    second.step()
    assert second.owned() == {"k000"}


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_a_backoff_from_the_future_counts_as_passed(db, clock, mode):
    clock.advance(3600)
    got = Recorder(lambda delivery: delivery.nack(delay=60) if delivery.attempt == 1 else None)
    publish("t", 1)
    Sub(handler(function=got, mode=mode)).settle()
    clock.advance(-3600)
    Sub(handler(function=got, mode=mode)).settle()
    assert got.attempts == [(1, 1), (1, 2)]


def test_in_doubt_nothing_starts_until_the_leases_are_read_again(db, clock):
    """A frozen process wakes: it keeps what is still its own and drops what was stolen."""
    busy_partitions(2)
    got = Recorder()
    first = Sub(handler(function=got))
    first.step()
    first.heart.in_doubt = True
    assert first.work() == 0
    PartitionLease.objects.filter(partition_key="k000").update(leased_by="thief:1")
    heartbeats.beat(USING, "thief:1", [REF], {})
    first.heart.beat()
    first.step(tick=False)
    assert first.owned() == {"k001"}
    first.settle()
    assert [delivery.key for delivery in got.deliveries] == ["k001"]


def test_after_a_connection_error_nothing_is_stolen_at_once(db, clock):
    """The first to come back from a stall of the database would take everything."""
    busy_partitions(2)
    dead = Sub(handler(function=stuck))
    rebalance([dead])
    clock.advance(31)
    sub = Sub(handler(function=stuck))
    sub.poller.reset()
    sub.step()
    assert sub.owned() == set()
    sub.heart.beat()
    sub.context.stealing._interval = 0.0
    sub.step(times=2)
    assert sub.owned() == {"k000", "k001"}


# -- fencing (defect 6) -------------------------------------------------------


def steal(clock):
    """Publishes one message, lets a first subscriber start it and a second one take it over."""
    publish("t", 1, key="k")
    first = Sub(handler())
    first.step()
    held = first.take()
    clock.advance(31)
    second = Sub(handler())
    second.step()
    return first, held, second


@pytest.mark.defect(6)
@pytest.mark.parametrize("kind", [Action.ACK, Action.NACK, Action.SNOOZE, Action.REJECT, Action.RELEASE])
def test_a_stale_subscriber_changes_nothing(db, clock, kind):
    _, held, second = steal(clock)
    before = DeliveryState.objects.values().get()
    flushed = settling.flush(USING, REF, [Settlement(held.claimed, kind, 1000, "late")], max_attempts=1, shared=False)
    assert [outcome.action for outcome in flushed.stale] == [kind]
    assert flushed.dead == []
    assert DeliveryState.objects.values().get() == before
    with pytest.raises(StaleDelivery):
        settling.extend(USING, held.claimed, milliseconds=1000, shared=True)
    with pytest.raises(StaleDelivery):
        settling.extend(USING, held.claimed, milliseconds=1000, shared=False)
    assert settling.record_start(USING, held.claimed) is False
    assert lag() == 1
    second.settle()
    assert lag() == 0


@pytest.mark.defect(6)
def test_a_late_nack_does_not_bring_a_settled_message_back(db, clock):
    _, held, second = steal(clock)
    second.settle()
    flushed = settling.flush(
        USING, REF, [Settlement(held.claimed, Action.NACK, 0, "late")], max_attempts=5, shared=False
    )
    assert len(flushed.stale) == 1
    assert not DeliveryState.objects.exists()


@pytest.mark.defect(6)
def test_a_stale_subscriber_cannot_claim(db, clock):
    publish_many("t", (Message(number, key="k") for number in range(10)))
    first = Sub(handler(), batch_size=2, prefetch=2)
    first.step()
    clock.advance(31)
    second = Sub(handler(), batch_size=2, prefetch=2)
    second.step()
    assert second.owned() == {"k"}
    tokens = set(DeliveryState.objects.values_list("delivery_token", flat=True))
    first.inbox.drop(REF, "k")
    first.step(tick=False)  # it believes that it owns the partition
    assert first.owned() == set()
    assert set(DeliveryState.objects.values_list("delivery_token", flat=True)) == tokens


@pytest.mark.defect(6)
def test_two_processes_with_one_name_are_two(db):
    from django_mysqlqueue.runtime.process.subscriber import incarnation

    assert incarnation("same") != incarnation("same")
    assert len(incarnation("x" * 500)) <= 190


@pytest.mark.defect(6)
def test_atomic_writes_of_a_stale_delivery_roll_back(db, clock):
    from tests.app.models import Effect

    first_ran = Recorder(lambda delivery: Effect.objects.create(name="first"))
    publish("t", 1, key="k")
    first = Sub(handler(function=first_ran, atomic=True))
    first.step()
    held = first.take()
    clock.advance(31)
    second = Sub(handler(function=lambda delivery: Effect.objects.create(name="second"), atomic=True))
    second.settle()
    first.run(held)
    assert len(first_ran.deliveries) == 1
    assert list(Effect.objects.values_list("name", flat=True)) == ["second"]


def test_ack_inside_the_handlers_own_transaction_is_part_of_it(db):
    from tests.app.models import Effect

    def work(delivery):
        try:
            with transaction.atomic():
                Effect.objects.create(name="rolled back")
                delivery.ack()
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        assert DeliveryState.objects.get().acked is False
        with transaction.atomic():
            Effect.objects.create(name="kept")
            delivery.ack()
        assert DeliveryState.objects.get().acked is True

    publish("t", 1, key="k")
    Sub(handler(function=work)).settle()
    assert list(Effect.objects.values_list("name", flat=True)) == ["kept"]
    assert lag() == 0


@pytest.mark.parametrize("verdict", ["nack", "snooze", "raise", "reject", "ack", "return"])
def test_atomic_handler_commits_exactly_when_it_settles(db, verdict):
    from tests.app.models import Effect

    def work(delivery):
        Effect.objects.create(name=verdict)
        if verdict == "raise":
            raise ValueError
        if verdict != "return":
            getattr(delivery, verdict)(
                **{"nack": {"delay": 99}, "snooze": {"delay": 99}, "reject": {"reason": "r"}}.get(verdict, {})
            )

    publish("t", 1, key="k")
    sub = Sub(handler(function=work, atomic=True, max_attempts=1))
    sub.step()
    sub.work()
    sub.flush()
    settles = verdict in ("reject", "ack", "return")
    assert Effect.objects.exists() is settles
    sequence()
    dead = verdict in ("reject", "raise")  # max_attempts is 1
    from django_mysqlqueue.models import QueueMessage

    assert QueueMessage.objects.filter(topic="t_dlq").exists() is (dead or verdict == "nack")


# -- groups -------------------------------------------------------------------


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
    sub = Sub(handler(), batch_size=1, prefetch=1)
    sub.step()
    sub.work()
    assert dropping.drop(USING, REF)
    sub.settle()
    for model in (ConsumerGroup, DeliveryState, PartitionLease):
        assert not model.objects.exists(), model


def test_mode_changes_only_while_nobody_works(db):
    publish("t", 1, key="k")
    got = Recorder(stuck)
    first = Sub(handler(function=got))
    first.settle()
    with pytest.raises(OperationRefused, match="live subscribers"):
        group_mode.set_mode(USING, REF, "shared", lease_ms=30_000)
    first.leave()
    group_mode.set_mode(USING, REF, "shared", lease_ms=30_000)
    assert ConsumerGroup.objects.get().mode == "shared"
    DeliveryState.objects.update(invisible_until=0)
    got.action = None
    Sub(handler(function=got, mode="shared")).settle()
    assert got.attempts == [(1, 1), (1, 2)]


OTHER_MODE = {"ordered": "shared", "shared": "ordered"}


def held_by_a_frozen_one(mode):
    """A subscriber that has claimed one of two messages, and whose heartbeat is as good as forgotten."""
    publish_many("t", (Message(number, key="k") for number in range(2)))
    sub = Sub(handler(mode=mode), prefetch=1, batch_size=1).step()
    assert DeliveryState.objects.get().delivered_by == sub.name
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    return sub


def claim(sub, mode):
    claimant = Claimant(REF, sub.name, 5, 60_000 if mode == "shared" else None)
    return claiming.claim(
        USING, claiming.ClaimRequest(claimant, [Want("k", look_at=9)], token=claiming.new_token(), max_due=9)
    )


@pytest.mark.parametrize("mode", OTHER_MODE)
def test_a_group_of_another_mode_gives_nothing(db, mode):
    """Nor by a lease: the mode is checked under the lock under which one is taken."""
    sub = held_by_a_frozen_one(mode)
    ConsumerGroup.objects.update(mode=OTHER_MODE[mode])  # and a lease, if there is one, stays
    found = claim(sub, mode)
    assert (found.deliveries, found.dead, found.other_mode) == ([], [], OTHER_MODE[mode])
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
    group_mode.set_mode(USING, REF, "shared", lease_ms=30_000)
    assert list(PartitionLease.objects.values_list("consumer_group", flat=True)) == ["other"]
    # And back, while it is still frozen: by the name of then it owns nothing.
    group_mode.set_mode(USING, REF, "ordered", lease_ms=30_000)
    found = claim(sub, "ordered")
    assert (found.deliveries, found.lost, found.other_mode) == ([], {"k"}, "")


@pytest.mark.parametrize("mode", OTHER_MODE)
def test_a_subscriber_with_nothing_to_do_learns_of_another_mode(db, mode):
    sub = Sub(handler(mode=mode)).step()
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    group_mode.set_mode(USING, REF, OTHER_MODE[mode], lease_ms=30_000)
    (work,) = sub.step().poller.groups
    assert work.other_mode == OTHER_MODE[mode]


@pytest.mark.parametrize("mode", OTHER_MODE)
@pytest.mark.parametrize("tick", [True, False])
def test_a_frozen_subscriber_of_another_mode_claims_nothing(db, mode, tick):
    """It learns it from its next tick or claim, whichever is first; leases are in doubt before anything else."""
    sub = held_by_a_frozen_one(mode)
    group_mode.set_mode(USING, REF, OTHER_MODE[mode], lease_ms=30_000)
    sub.heart.in_doubt = True
    assert sub.work() == (0 if mode == "ordered" else 1)
    sub.flush()
    sub.heart.beat()
    publish("t", 9, key="new")
    sub.step(tick=tick)
    (work,) = sub.poller.groups
    assert (work.stopped, work.other_mode) == (True, OTHER_MODE[mode])
    assert sub.step().work() == 0
    assert work.stopped
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


# -- locks --------------------------------------------------------------------


@pytest.mark.servers_only
def test_acquire_passes_over_a_locked_lease(db):
    """Its owner is at work: whoever waits for it would freeze with it."""
    busy_partitions(2)
    sub = Sub(handler(function=stuck))
    PartitionLease.objects.bulk_create(
        [PartitionLease(consumer_group="g", topic="t", partition_key=key) for key in ("k000", "k001")]
    )
    with transaction.atomic():
        connection.cursor().execute(
            "SELECT 1 FROM queue_partition_leases WHERE consumer_group = 'g' AND topic = 't' "
            "AND partition_key = 'k000' FOR UPDATE"
        )
        taken = in_thread(lambda: leasing.acquire(USING, REF, sub.name, {"k000", "k001"}, lease_ms=30_000))
    assert taken.held == {"k001"}
    assert taken.elsewhere == set()


@pytest.mark.servers_only
@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_a_locked_row_is_never_waited_for(db, clock, mode):
    """An atomic handler of a frozen process keeps its row locked; in ordered mode its partition waits."""
    publish_many("t", (Message(number, key=key) for key in "ab" for number in range(2)))
    first = Sub(handler(mode=mode))
    first.step()
    clock.advance(61)
    got = Recorder()
    second = Sub(handler(function=got, mode=mode))
    locked = DeliveryState.objects.filter(partition_key="a").order_by("message_offset").first()
    with transaction.atomic():
        connection.cursor().execute(
            "SELECT 1 FROM queue_delivery_state WHERE consumer_group = 'g' AND topic = 't' AND partition_key = 'a' "
            "AND message_offset = %s FOR UPDATE",
            (locked.message_offset,),
        )
        in_thread(lambda: second.settle(rounds=4))
        # It is left alone for a while instead of being tried without a pause.
        assert not any(work.wants_turn() for work in second.poller.groups)
        handled = {(delivery.key, delivery.payload) for delivery in got.deliveries}
        assert handled == {("b", 0), ("b", 1)} | ({("a", 1)} if mode == "shared" else set())
    clock.advance(1)
    second.settle()
    assert len(got.deliveries) == 4
    if mode == "ordered":
        assert [delivery.payload for delivery in got.deliveries if delivery.key == "a"] == [0, 1]


@pytest.mark.servers_only
def test_news_does_not_overtake_what_waits_behind_a_locked_row(db, clock):
    """Found by a soak: a process froze between an atomic handler's ack and its COMMIT, and the message behind, claimed
    with it and never started, was overtaken by one that was published meanwhile."""
    publish_many("t", (Message(number, key="a") for number in range(2)))
    first = Sub(handler())
    first.step()
    clock.advance(61)
    got = Recorder()
    second = Sub(handler(function=got))
    with transaction.atomic():
        locked = list(DeliveryState.objects.select_for_update().order_by("message_offset")[:1])
        assert len(locked) == 1

        def news():
            second.settle(rounds=2)
            publish("t", 2, key="a")
            second.settle(rounds=4)

        in_thread(news)
        assert got.deliveries == []
    clock.advance(1)
    second.settle()
    assert [delivery.payload for delivery in got.deliveries] == [0, 1, 2]
