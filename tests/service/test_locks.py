"""The locks of the protocol: each blocks what it must, and they are taken in the one order."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from unittest import mock

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, OutboxMessage, PartitionLease
from django_mysqlqueue.operations import dead_lettering, group_mode
from django_mysqlqueue.operations.dead_lettering import dead_letter_now
from tests.support.claims import claimant_of
from tests.support.handlers import Recorder, stuck
from tests.support.harness import USING, Sub, handler, in_thread, lag, sequence
from tests.support.internals import (
    BY_ROW,
    Action,
    GroupRef,
    Seen,
    Settlement,
    Want,
    claiming,
    dialect_of,
    flat,
    groups,
    heartbeats,
    leasing,
    sequencing,
    session,
    settling,
    watermarks,
)
from tests.support.scenarios import busy_partitions
from tests.support.statistics import SIZES, pinned

pytestmark = pytest.mark.promise("One owner")


@pytest.mark.servers_only
def test_partitions_that_another_has_locked_do_not_hold_up_a_shared_group(db):
    """A claim that is frozen holds as many offsets rows as the next one would ask for."""
    publish_many("t", (Message(number, key=f"k{number % 40:02}") for number in range(40 * 300)))
    sequence()
    sub = Sub(handler(mode="shared"), claim_size=100, threads=4)
    sub.settle(rounds=2)
    locked, done = threading.Event(), threading.Event()
    keys = list(sub.poller.groups[0].memory.todo)[:8]

    def frozen():
        with transaction.atomic():
            for key in keys:  # each by its whole primary key: at REPEATABLE READ a scan would lock all of them
                rows = ConsumerOffset.objects.filter(consumer_group="g", topic="t", partition_key=key)
                assert list(rows.select_for_update().values_list("partition_key"))
            locked.set()
            assert done.wait(60)
        connection.close()

    thread = threading.Thread(target=frozen)
    thread.start()
    try:
        assert locked.wait(10)
        for _ in range(5):
            handled = 0
            for _ in range(3):  # those in a row that ask for locked ones only
                time.sleep(0.02)
                # As it is learned with quick handlers: much of few partitions.
                sub.poller.groups[0].memory.depths.common = 100
                sub.step()
                handled += sub.work()
                sub.flush()
            assert handled
    finally:
        done.set()
        thread.join()


@pytest.mark.servers_only
def test_a_shared_group_that_finds_everything_locked_rests_a_moment(db):
    """It would ask thousands of times a second."""
    publish("t", 1, key="k")
    first = Sub(handler(mode="shared"))
    first.settle()
    publish("t", 2, key="k")
    sequence()
    claims = []
    with transaction.atomic():
        assert list(ConsumerOffset.objects.select_for_update().values_list("partition_key"))

        def ask():
            work, began = first.poller.groups[0], time.monotonic()
            first.step()
            claims.append(work.health.rests_until > began)
            return first.work()

        assert in_thread(ask) == 0
    assert claims == [True]
    time.sleep(0.02)
    assert first.settle() == 1


REF = GroupRef("g", "t")


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


@pytest.mark.promise("Order")
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


G = GroupRef("g", "t")
CLAIMANT = claimant_of(G, "owner", 5, None)


@pytest.fixture
def owned(db):
    """A partition with two messages, leased by "owner"."""
    groups.register(USING, G, mode="ordered", start="earliest")
    publish_many("t", [Message(n, key="k") for n in range(2)])
    sequence()
    heartbeats.beat(USING, "owner", [G], {})
    assert leasing.acquire(USING, G, "owner", ["k"], lease_ms=30_000).held == {"k"}
    watermarks.create_missing(USING, G, ["k"])


def impatiently(function):
    def run():
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
        return function()

    return in_thread(run)


class Thread:
    """A function on a thread, and so on a connection, of its own, which may wait."""

    def __init__(self, function):
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._future = self._pool.submit(self._run, function)

    def _run(self, function):
        try:
            return function()
        finally:
            connections.close_all()

    def is_over(self, *, within):
        return not wait([self._future], within).not_done

    def result(self):
        try:
            return self._future.result(30)
        finally:
            self._pool.shutdown()


def claim(token=1, look_at=1, settlements=()):
    return claiming.claim(
        USING, claiming.ClaimRequest(CLAIMANT, [Want("k", look_at=look_at)], token=token, settlements=settlements)
    ).deliveries


@pytest.mark.servers_only
def test_a_claim_under_way_keeps_its_group_from_being_paused(owned):
    def pause():
        with transaction.atomic():
            groups.wait_for_claims(sequencing.Session(USING), G)

    with transaction.atomic():
        assert claim()
        with pytest.raises(OperationalError, match="1205"):
            impatiently(pause)
    impatiently(pause)


@pytest.mark.servers_only
def test_a_claim_under_way_keeps_its_lease(owned):
    with transaction.atomic():
        assert claim()
        in_thread(lambda: heartbeats.deregister(USING, "owner", [G]))
        in_thread(lambda: heartbeats.beat(USING, "thief", [G], {}))
        found = impatiently(lambda: leasing.acquire(USING, G, "thief", ["k"], lease_ms=30_000))
        assert not found.held
    assert in_thread(lambda: leasing.acquire(USING, G, "thief", ["k"], lease_ms=30_000)).held == {"k"}


@pytest.mark.promise("One owner")
@pytest.mark.servers_only
def test_a_claim_under_way_keeps_its_groups_mode(owned):
    """What comes behind the change finds the other mode, and no lease."""
    in_thread(lambda: heartbeats.deregister(USING, "owner", [G]))

    def change():
        group_mode.set_mode(USING, G, "shared", lease_ms=30_000, actor="test")

    with transaction.atomic():
        assert claim()
        with pytest.raises(OperationalError, match="1205"):
            impatiently(change)
    impatiently(change)
    found = claiming.claim(USING, claiming.ClaimRequest(CLAIMANT, [Want("k", look_at=1)], token=2))
    assert (found.deliveries, found.partitions, found.refused) == ([], {"k": Seen.LOST}, "mode")


@pytest.mark.servers_only
@pytest.mark.parametrize("size", SIZES)
def test_what_is_locked_is_what_is_named(owned, size):
    """With few rows, too, where another index looks as good: a handler's row is in nobody's way."""
    rows = [DeliveryState(consumer_group="g", topic="t", partition_key="k", message_offset=n) for n in range(4)]
    DeliveryState.objects.bulk_create(rows)
    dialect, named = dialect_of(connection), [("k", 1), ("k", 3)]
    read = (
        f"SELECT s.acked FROM {dialect.rows(('k', 'o'), 2)} {dialect.join_to('queue_delivery_state', 's')} ON {BY_ROW}"
    )
    statements = (
        read + dialect.for_update,
        dialect.update_joined("queue_delivery_state", ("k", "o"), 2, BY_ROW, {"acked": "1"}),
        dialect.delete_joined("queue_delivery_state", ("k", "o"), 2, BY_ROW),
    )

    def send(sql):
        with connection.cursor() as cursor:
            cursor.execute(sql, (*flat(named), *G))

    with pinned(connection, size):
        with transaction.atomic():
            DeliveryState.objects.filter(pk=("g", "t", "k", 2)).update(acked=True)
            for sql in statements:
                impatiently(lambda sql=sql: send(sql))
        assert list(DeliveryState.objects.values_list("message_offset", flat=True)) == [0, 2]


@pytest.mark.servers_only
def test_one_sequences_at_a_time(db):
    sequence()  # the mutex's row
    publish("t", 0)
    with transaction.atomic():
        assert sequencing.sequence(USING).moved == 1
        in_thread(lambda: publish("t", 1))
        assert impatiently(lambda: sequencing.sequence(USING)).busy
    assert in_thread(lambda: sequencing.sequence(USING)).moved == 1


@pytest.mark.servers_only
def test_undoing_a_claim_waits_until_it_is_over(owned, monkeypatch):
    monkeypatch.setattr(session, "ATTEMPTS", 1)  # each waits for a second
    with transaction.atomic():
        (delivery,) = claim(token=7)
        with pytest.raises(OperationalError, match="1205"):
            impatiently(lambda: claiming.undo(USING, G, 7))
    impatiently(lambda: claiming.undo(USING, G, 7))
    assert not settling.record_start(USING, delivery)  # the token is gone


def waiting():
    """The first message of the partition waits for another attempt; its offset."""
    (delivery,) = claim()
    settling.flush(USING, G, [Settlement(delivery, Action.NACK, 0, "no")], max_attempts=5, shared=False)
    return delivery.offset


def redelivery(offset, token=2):
    return claiming.claim(USING, claiming.ClaimRequest(CLAIMANT, [Want("k", due=(offset,))], token=token))


@pytest.mark.servers_only
def test_a_claim_under_way_keeps_its_message_from_being_dead_lettered(owned):
    """The operation waits for it, and then finds the message held."""
    offset = waiting()
    with transaction.atomic():
        (delivery,) = redelivery(offset).deliveries
        giving_up = Thread(lambda: dead_letter_now(USING, G, [offset], actor="ada"))
        assert not giving_up.is_over(within=0.5)
    with pytest.raises(OperationRefused, match="is in flight at the live subscriber 'owner'"):
        giving_up.result()
    assert settling.record_start(USING, delivery)  # it is still the claim's
    assert not OutboxMessage.objects.exists()


@pytest.mark.servers_only
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_message_that_is_being_dead_lettered_is_not_claimed(owned, end):
    offset = waiting()
    with transaction.atomic():
        assert giving_up_here(offset) == 1
        claiming_it = Thread(lambda: redelivery(offset))
        assert not claiming_it.is_over(within=0.5)
        transaction.set_rollback(end == "rollback")
    found = claiming_it.result()
    assert [one.offset for one in found.deliveries] == ([offset] if end == "rollback" else [])
    assert OutboxMessage.objects.filter(failed_group="g").count() == (end == "commit")


def giving_up_here(offset):
    """In the transaction that is open, which a request's own connection would not join."""
    with mock.patch.object(dead_lettering, "apart", contextlib.nullcontext):
        return dead_letter_now(USING, G, [offset], actor="ada")


@pytest.mark.servers_only
def test_dead_lettering_locks_in_the_one_order(owned):
    offset = waiting()
    with CaptureQueriesContext(connection) as captured:
        dead_letter_now(USING, G, [offset], actor="ada")
    assert locked_tables(captured) == ["queue_consumer_groups", "queue_offsets", "queue_delivery_state"]
    is_locking = [bool(re.search("FOR UPDATE|INSERT INTO `?queue_outbox", q["sql"])) for q in captured]
    last = max(place for place, one in enumerate(is_locking) if one)
    assert "INSERT INTO queue_outbox" in captured[last]["sql"]


def locked_tables(captured):
    """The tables of the locking reads, in the order in which they were first locked."""
    locking = [q["sql"] for q in captured if re.search("FOR UPDATE|SHARE MODE", q["sql"])]
    return list(dict.fromkeys(re.search(r"(?:FROM|JOIN) `?(queue_\w+)", sql)[1] for sql in locking))


@pytest.mark.servers_only
def test_a_claim_locks_in_the_one_order(owned):
    first = claim(token=1)
    with CaptureQueriesContext(connection) as captured:
        claim(token=2, settlements=[Settlement(first[0], Action.NACK, 1000, "no")])
    order = ["queue_consumer_groups", "queue_partition_leases", "queue_offsets", "queue_delivery_state"]
    assert locked_tables(captured) == order


@pytest.mark.servers_only
@pytest.mark.parametrize("end", ["return", "raise"])
def test_a_flush_does_not_wait_for_anothers_open_transaction(db, clock, end):
    """A stale outcome, and the row's new holder has acked in a transaction that lasts."""
    ending = Recorder(lambda delivery: 1 / 0 if end == "raise" else None)
    publish("t", 1, key="k")
    first = Sub(handler(mode="shared", function=ending))
    first.step()
    held = first.take()
    clock.advance(61)
    second = Sub(handler(mode="shared"))
    second.step()
    again = second.take()
    go, locked = threading.Event(), threading.Event()

    def hold():
        with transaction.atomic():
            settling.ack_here(USING, again.claimed)
            locked.set()
            go.wait(30)
        connections.close_all()

    thread = threading.Thread(target=hold)
    thread.start()
    assert locked.wait(10)
    try:
        first.run(held)
        began = time.monotonic()
        first.step()
        assert time.monotonic() - began < 5
    finally:
        go.set()
        thread.join()
    first.settle()
    second.run(again)
    second.settle()
    assert lag() == 0
    assert not DeliveryState.objects.exists()


@pytest.mark.servers_only
def test_a_locked_row_that_is_due_does_not_hide_the_others(db):
    """Shared: the look for what is due reads without SKIP LOCKED; rows that are locked used up its LIMIT."""
    sub = Sub(handler(mode="shared"), claim_size=1, prefetch=1, name="b")
    publish_many("t", [Message(n, key="k") for n in range(3)])
    Sub(handler(mode="shared"), name="a").step()  # takes all, and vanishes
    DeliveryState.objects.update(invisible_until=1)
    first = DeliveryState.objects.order_by("message_offset").values_list("pk", flat=True)[0]
    DeliveryState.objects.filter(pk=first).update(invisible_until=0)

    def others() -> int:
        done = 0
        for _ in range(10):
            sub.step()
            done += sub.work()
        return done

    with transaction.atomic():  # an atomic handler that has acked early and goes on for long
        DeliveryState.objects.select_for_update().get(pk=first)
        assert in_thread(others) == 2
