"""The procedures keep the lock order, even with SKIP LOCKED: MariaDB enqueues such a request for a moment.

If another transaction begins to wait in that moment, and the order was another one, the server finds a deadlock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import MySQLdb
import pytest

from django_mysqlqueue.models import ConsumerOffset, DeliveryState, PartitionLease, Rollup
from tests.interleavings.waiting import Waiting
from tests.support.sql_clients import REF, numbers, publish_numbers, register

pytestmark = [pytest.mark.servers_only, pytest.mark.promise("Consumers in plain SQL")]

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])
DEADLOCK = 1213
SECONDS = 6.0
KEYS = 8
LEASE = "INSERT INTO queue_partition_leases (consumer_group, topic, partition_key, leased_by, leased_at) VALUES "
LOCK = "SELECT partition_key FROM {} WHERE consumer_group = %s AND topic = %s AND partition_key = %s FOR UPDATE"


@contextlib.contextmanager
def in_background(work: Callable[[], object]) -> Iterator[Future[object]]:
    """Start a function, and wait until its transaction waits for a lock."""
    waiting = Waiting()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work)
        until = time.monotonic() + 20
        while not waiting.count():
            assert not running.done(), running.result()
            assert time.monotonic() < until, "it does not wait"
            time.sleep(0.02)
        yield running
    waiting.close()


def deadlocks(*works: Callable[[], object]) -> int:
    """Run functions again and again, each in a thread, and return how many calls met a deadlock."""
    until = time.monotonic() + SECONDS

    def repeat(work: Callable[[], object]) -> int:
        found = 0
        while time.monotonic() < until:
            try:
                work()
            except MySQLdb.OperationalError as error:
                if error.args[0] != DEADLOCK:
                    raise
                found += 1
        return found

    with ThreadPoolExecutor(len(works)) as pool:
        return sum(pool.map(repeat, works))


@MODES
def test_moving_the_watermarks_meets_no_deadlock(connect, mode):
    """Without the order, this found a deadlock every second on MariaDB."""
    register(mode)
    publish_numbers(2 * KEYS, keys=KEYS)
    client = connect()
    rows = client.claim()
    assert len(rows) == 2 * KEYS
    first, second = (
        [row["handle"] for row, number in zip(rows, numbers(rows), strict=True) if number // KEYS == place]
        for place in (0, 1)
    )
    with client.transaction():
        assert [client.ack(handle) for handle in second] == ["acked"] * KEYS
    keys = sorted(ConsumerOffset.objects.values_list("partition_key", flat=True))
    assert len(keys) == KEYS
    for number, key in enumerate(keys):  # An index returns them in the opposite order.
        DeliveryState.objects.filter(partition_key=key).update(invisible_until=10**15 - number)

    def sweep() -> Callable[[], object]:
        one = connect()
        return lambda: one.run("CALL queue__sweep(%s, %s, %s)", *REF, mode)

    def claim() -> Callable[[], object]:
        """As a claim of a subscriber: it waits for all leases, and then for all rows of queue_offsets."""
        one = connect()
        tables = (["queue_partition_leases"] if mode == "ordered" else []) + ["queue_offsets"]

        def locks() -> None:
            with one.transaction():
                for table in tables:
                    for key in keys:
                        assert one.run(LOCK.format(table), *REF, key)

        return locks

    assert deadlocks(sweep(), sweep(), claim(), claim()) == 0
    assert DeliveryState.objects.filter(acked=True).count() == KEYS
    # They had something to do: it is done as soon as the first messages are settled.
    assert [client.ack(handle) for handle in first] == ["acked"] * KEYS
    client.claim()
    assert not DeliveryState.objects.exists()


def test_a_claim_repeats_what_a_deadlock_has_rolled_back(connect):
    """A lease of the client is waited for by another transaction, which has another lease that the client needs."""
    register("ordered")
    publish_numbers(2, keys=2)
    client, other = connect(), connect()
    with other.transaction():
        other.run(f"{LEASE} ('g', 't', 'k1', '', 0)")
        # It has written much, so that the client is rolled back.
        other.run(LEASE + ", ".join(f"('other', 't', 'k{number}', '', 0)" for number in range(100)))
        with in_background(client.claim) as claiming:
            other.run(LOCK.format("queue_partition_leases"), *REF, "k0")
            other.run("COMMIT")
            assert numbers(claiming.result()) == [0, 1]
    assert set(PartitionLease.objects.filter(consumer_group="g").values_list("leased_by")) == {(client.name,)}


@pytest.mark.promise("Clocks")
def test_an_outcome_that_has_waited_for_a_lock_has_the_time_after_it(connect):
    """Otherwise the next attempt would come too early."""
    register("shared")
    publish_numbers(1)
    client, other = connect(), connect()
    (row,) = client.claim()
    with other.transaction():
        other.run("SELECT message_offset FROM queue_delivery_state FOR UPDATE")
        with in_background(lambda: client.nack(row["handle"], delay=60)) as nacking:
            time.sleep(0.01)
            other.run("CALL queue__clock()")
            (before,) = other.run("SELECT @queue__now AS now")
            other.run("COMMIT")
            assert nacking.result() == "failed"
    state = DeliveryState.objects.get()
    assert state.delivered_at >= before["now"]
    assert state.invisible_until == state.delivered_at + 60_000


@MODES
def test_a_claim_counts_after_it_has_locked_everything_else(connect, mode):
    register(mode)
    publish_numbers(KEYS, keys=KEYS, expires_in=0.001)
    client, other = connect(), connect()
    with other.transaction():
        other.run("CALL queue__clock()")
        other.run("CALL queue__count(%s, %s, 'expired', 1, 0)", *REF)
        with in_background(client.claim) as claiming:
            assert ConsumerOffset.objects.count() == KEYS
            assert other.run("SELECT partition_key FROM queue_offsets FOR UPDATE SKIP LOCKED") == []
            other.run("COMMIT")
            assert claiming.result() == []
    assert sum(Rollup.objects.filter(grain=60).values_list("expired", flat=True)) == KEYS + 1
