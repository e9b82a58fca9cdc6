"""Real subscriber processes: killed, frozen, cut off."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import time
from collections import Counter

import pytest
from django.db import OperationalError, connection

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.management.commands import queuestatus
from django_mysqlqueue.models import DeliveryState, PartitionLease, QueueMessage
from tests.app.models import Effect
from tests.support.harness import USING, in_thread, sequence
from tests.support.internals import Count, close_connections, polling, sequencing, sessions
from tests.support.processes import assert_ordered, drained, effects, publish_numbers, wait_for
from tests.support.server_sessions import processlist

pytestmark = pytest.mark.processes


@pytest.mark.promise("Order")
def test_sigkill_while_it_works(start):
    """Another subscriber takes over after the lease: order kept, atomic effects exactly once."""
    publish_numbers("p.plain", 400)
    first = start("--group", "plain", "--group", "atomic")
    wait_for(lambda: len(effects("atomic")) >= 20, first)
    first.send(signal.SIGKILL)
    first.wait()
    second = start("--group", "plain", "--group", "atomic", "--drain")
    assert second.wait(60) == 0
    assert Counter(number for _, _, number in effects("atomic")) == Counter(range(400))
    assert_ordered(effects("atomic"))
    assert_ordered(effects("plain"))
    assert {number for _, _, number in effects("plain")} == set(range(400))
    assert not DeliveryState.objects.exists()


@pytest.mark.promise("Wake-ups")
def test_after_sigkill_the_next_process_listens_for_other_hosts(start, settings, monkeypatch, tmp_path_factory):
    """They are on another host than this process, and hardly poll."""
    ours, theirs = (str(tmp_path_factory.mktemp("b")) for _ in range(2))
    secret = "a key of the rings alone"  # noqa: S105
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        address = probe.getsockname()

    def listens():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind(address)
            except OSError:
                return True
        return False

    there = {"DIRECTORY": theirs, "SECRET": secret, "LISTEN": f"127.0.0.1:{address[1]}"}
    first, second = (start("--group", "shared", BELL=there, POLL_INTERVAL=300, MAX_POLL_INTERVAL=300) for _ in range(2))
    for worker in (first, second):
        wait_for(worker.is_ready, worker)
        wait_for(listens, worker)
    settings.MYSQLQUEUE = {"BELL": {"DIRECTORY": ours, "SECRET": secret}}
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    publish("p.shared", {"n": 1})
    wait_for(lambda: 1 in [number for _, _, number in effects("shared")], second)
    first.send(signal.SIGKILL)
    first.wait()
    wait_for(listens, second)
    publish("p.shared", {"n": 2})
    wait_for(lambda: 2 in [number for _, _, number in effects("shared")], second)
    second.send(signal.SIGKILL)
    second.wait()
    assert not listens()


@pytest.mark.promise("Exactly-once effects", "Frozen processes")
@pytest.mark.servers_only
def test_sigstop_inside_an_atomic_handler(start, tmp_path):
    """The frozen handler's writes roll back when it wakes; the other's count once."""
    started, go = tmp_path / "started", tmp_path / "go"
    publish("p.plain", {"n": 0, "do": "wait", "started": str(started), "go": str(go)}, key="k")
    publish_many("p.plain", (Message({"n": n}, key="k") for n in range(1, 10)))
    frozen = start("--group", "atomic", "--name", "frozen")
    wait_for(started.exists, frozen)
    frozen.freeze()
    go.touch()
    began = time.monotonic()
    other = start("--group", "atomic", "--name", "other", "--drain")
    assert other.wait(40) == 0
    assert time.monotonic() - began < 25
    assert [number for _, _, number in effects("atomic")] == list(range(10))
    frozen.send(signal.SIGCONT)
    wait_for(lambda: "delivery.lost" in frozen.output or "delivery.failed" in frozen.output, frozen)
    publish("p.plain", {"n": 10}, key="k")
    wait_for(lambda: ("k", 1, 10) in effects("atomic"), frozen)
    frozen.send(signal.SIGTERM)
    assert frozen.wait() == 0
    assert Counter(number for _, _, number in effects("atomic")) == Counter(range(11))


@pytest.mark.promise("Frozen processes")
@pytest.mark.servers_only
def test_a_frozen_sequencer_lets_the_mutex_go(db):
    """A poller's connection that falls silent inside a transaction is ended by the server."""

    def freeze():
        sessions.adopt(USING, sessions.Timeouts(idle=1, lock_wait=1, network=1, read=5))
        connection.set_autocommit(False)
        assert sequencing.take_mutex(sequencing.Session(USING))
        # It says nothing more; nobody but the server can end it.
        in_thread(publish_one)
        began = time.monotonic()
        assert in_thread(lambda: sequencing.sequence(USING)).busy
        while in_thread(lambda: sequencing.sequence(USING)).busy:
            assert time.monotonic() - began < 10, "the mutex is still held"
            time.sleep(0.1)
        close_connections()
        return time.monotonic() - began

    def publish_one():
        publish("t", 1)

    publish("t", 0)
    sequence()
    assert in_thread(freeze) < 5
    assert QueueMessage.objects.count() == 2


@pytest.mark.promise("Exactly-once effects")
@pytest.mark.servers_only
def test_connections_that_are_cut(start):
    """Every connection of the subscriber is killed again and again while it works."""
    publish_numbers("p.plain", 300)
    worker = start("--group", "plain", "--group", "atomic")
    for number in range(5):
        wait_for(lambda number=number: len(effects("atomic")) >= 20 * (number + 1), worker)
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT id FROM {processlist()} WHERE id <> CONNECTION_ID() AND db = DATABASE()")
            for (identity,) in cursor.fetchall():
                with contextlib.suppress(OperationalError):  # it may have ended by itself
                    cursor.execute(f"KILL CONNECTION {identity}")
    wait_for(drained("plain", "p.plain"), worker)
    wait_for(drained("atomic", "p.plain"), worker)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert Counter(number for _, _, number in effects("atomic")) == Counter(range(300))
    assert {number for _, _, number in effects("plain")} == set(range(300))
    # Not the order: a handler whose connection was cut has failed, and later messages pass it.
    assert not DeliveryState.objects.exists()


def test_two_processes_share_the_work(start):
    publish_numbers("p.plain", 600, partitions=12)
    workers = [start("--group", "plain", "--claim-size", "5", "--name", f"w{n}") for n in range(2)]
    wait_for(drained("plain", "p.plain"), workers[0])
    for worker in workers:
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    assert Counter(number for _, _, number in effects("plain")) == Counter(range(600))
    assert_ordered(effects("plain"))


@pytest.mark.promise("Delivery", "Order")
def test_random_kills(start, tmp_path):
    """Three subscribers, one of them killed every second: nothing lost, atomic exactly once, order kept."""
    rng = random.Random(7)
    arguments = ("--group", "plain", "--group", "atomic", "--group", "shared", "--claim-size", "20")
    workers = [start(*arguments) for _ in range(3)]
    total = 900
    for chunk in range(9):
        publish_many("p.plain", (Message({"n": n}, key=f"k{n % 7}") for n in range(chunk * 100, chunk * 100 + 100)))
        publish_many("p.shared", (Message({"n": n}) for n in range(chunk * 20, chunk * 20 + 20)))
        if chunk % 2:
            victim = rng.randrange(3)
            workers[victim].send(signal.SIGKILL)
            workers[victim].wait()
            workers[victim] = start(*arguments)
    for group, topic in (("plain", "p.plain"), ("atomic", "p.plain"), ("shared", "p.shared")):
        wait_for(drained(group, topic), workers[0], timeout=60)
    for worker in workers:
        worker.send(signal.SIGTERM)
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    # No deadlock and no lock wait time-out came to the surface.
    assert not [worker.output for worker in workers if "poller.failed" in worker.output]
    assert Counter(number for _, _, number in effects("atomic")) == Counter(range(total))
    assert {number for _, _, number in effects("plain")} == set(range(total))
    assert {number for _, _, number in effects("shared")} == set(range(180))
    assert_ordered(effects("atomic"))
    assert_ordered(effects("plain"))
    assert not QueueMessage.objects.filter(topic__endswith="_dlq").exists()
    shown = {one.ref: one for one in queuestatus.read_status("default").queue.groups}
    assert shown["atomic", "p.plain"].lag == Count(0)


@pytest.mark.promise("Order")
def test_a_message_whose_process_is_killed_twice_holds_its_partition(start, tmp_path):
    """The third process finds the loss, and waits before it calls the handler again: nothing overtakes meanwhile."""
    started, go = tmp_path / "started", tmp_path / "go"
    publish("p.plain", {"n": 0, "do": "wait", "started": str(started), "go": str(go)}, key="k")
    publish_many("p.plain", (Message({"n": n}, key="k") for n in range(1, 30)))
    for _ in range(2):
        victim = start("--group", "atomic")
        wait_for(started.exists, victim)
        victim.send(signal.SIGKILL)
        victim.wait()
        started.unlink()
    go.touch()
    publish_many("p.plain", (Message({"n": n}, key="other") for n in range(30)))
    last = start("--group", "atomic", "--drain")
    assert last.wait(60) == 0, last.output
    rows = effects("atomic")
    assert [number for key, _, number in rows if key == "k"] == list(range(30))
    assert [number for key, _, number in rows if key == "other"] == list(range(30))
    assert ("k", 2, 0) in rows


@pytest.mark.promise("Order")
def test_the_order_of_effects_while_the_owner_of_a_key_is_killed_again_and_again(start):
    """Each effect is atomic, and no handler fails: so the effects of a key are in the order of the log."""
    rng = random.Random(5)
    keys = rng.choices(range(7), weights=[24, 3, 3, 2, 2, 1, 1], k=600)
    numbered = enumerate(keys)
    publish_many("p.plain", (Message({"n": n, "do": "hang", "seconds": 0.03}, key=f"k{key}") for n, key in numbered))
    names = ("a", "b", "c")
    workers = {name: start("--group", "atomic", "--name", name) for name in names}

    def owner():
        held = DeliveryState.objects.filter(partition_key="k0", acked=False).exclude(delivery_token=0).first()
        lease = PartitionLease.objects.filter(partition_key="k0").first()
        if held is None or lease is None or lease.leased_by != held.delivered_by:
            return None
        name = lease.leased_by.partition(":")[0]
        return name if name in names and workers[name].is_there() else None

    for _ in range(5):
        wait_for(lambda: owner() is not None)
        time.sleep(rng.uniform(0.1, 0.5))  # a few messages
        victim = owner() or names[0]
        workers[victim].send(signal.SIGKILL)
        workers[victim].wait()
        workers[victim] = start("--group", "atomic", "--name", victim)
    wait_for(drained("atomic", "p.plain"), timeout=120)
    for worker in workers.values():
        worker.send(signal.SIGTERM)
    assert [worker.wait() for worker in workers.values()] == [0, 0, 0]
    for key in range(7):
        expected = [n for n, other in enumerate(keys) if other == key]
        assert [number for name, _, number in effects("atomic") if name == f"k{key}"] == expected, key


def test_shards_drain_their_own_partitions(start):
    publish_numbers("p.plain", 60, partitions=12)
    first = start("--group", "plain", "--shard", "1/2", "--drain")
    assert first.wait() == 0, first.output
    assert "shard 1/2" in first.output
    part = len(effects("plain"))
    assert 0 < part < 60
    second = start("--group", "plain", "--shard", "2/2", "--drain")
    assert second.wait() == 0, second.output
    assert drained("plain", "p.plain")
    assert sorted(n for _, _, n in effects("plain")) == list(range(60))


def publish_and_kill(start, topic, total, *arguments):
    """Two subscribers, one of them killed again and again while messages come in."""
    workers = [start(*arguments) for _ in range(2)]
    for chunk in range(6):
        numbers = range(chunk * total // 6, (chunk + 1) * total // 6)
        publish_many(topic, (Message({"n": n}, key=f"k{n % 5}") for n in numbers))
        victim = chunk % 2
        workers[victim].send(signal.SIGKILL)
        workers[victim].wait()
        workers[victim] = start(*arguments)
    return workers


@pytest.mark.promise("Strict order")
def test_strict_order_through_kills(start):
    """Nothing of a key starts before the message before it is done, or dead after its attempts."""
    total = 300
    workers = publish_and_kill(start, "p.strict", total, "--group", "strict", "--claim-size", "10")
    wait_for(drained("strict", "p.strict"), workers[0], timeout=60)
    done = {}
    for row, number in Effect.objects.order_by("id").values_list("name", "value"):
        kind, key, attempt = row.split("|")
        if kind == "done":
            done.setdefault(key, set()).add(number)
            continue
        for earlier in range(int(key[1:]), number, 5):
            assert earlier in done.get(key, ()) or earlier % 50 == 0, (key, number, attempt, earlier)
    assert set().union(*done.values()) == {n for n in range(total) if n % 50}
    wait_for(lambda: not polling.poll(polling.Session(USING)).due)
    assert QueueMessage.objects.filter(topic="p.strict_dlq").count() == total / 50


@pytest.mark.promise("Batches")
def test_atomic_batches_are_exactly_once_through_kills(start):
    total = 1200
    workers = publish_and_kill(start, "p.batch", total, "--group", "batch")
    wait_for(drained("batch", "p.batch"), workers[0], timeout=60)
    assert Counter(number for _, _, number in effects("batch")) == Counter(range(total))
    assert not QueueMessage.objects.filter(topic="p.batch_dlq").exists()
