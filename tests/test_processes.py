"""Real ``runsubscriber`` processes: stopped, killed, frozen, cut off."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest
from django.db import OperationalError, connection

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.management.commands import queuestatus
from django_mysqlqueue.models import DeliveryState, PartitionLease, QueueMessage, SubscriberHeartbeat
from django_mysqlqueue.runtime import sessions
from django_mysqlqueue.service import groups, polling, sequencing
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.connection import close_connections
from tests.app.models import Effect
from tests.support.harness import USING, in_thread, lag, sequence

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parent.parent
SHORT = {
    "LEASE_DURATION": 3,
    "LEASE_RENEWAL_INTERVAL": 1,
    "POLL_INTERVAL": 0.05,
    "MAX_POLL_INTERVAL": 0.2,
    "SHUTDOWN_TIMEOUT": 10,
}


def environment(**settings):
    database = connection.settings_dict
    env = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "TEST_MYSQLQUEUE": json.dumps(SHORT | settings),
        "TEST_WITHOUT_ADMIN": "1",
    }
    if connection.vendor == "mysql":
        parts = urlsplit(os.environ["DATABASE_URL"])
        env["DATABASE_URL"] = urlunsplit(parts._replace(path=f"/{database['NAME']}"))
    else:
        env["TEST_SQLITE_FILE"] = str(database["NAME"])
    return env


class Worker:
    """A ``runsubscriber`` process that this test started, and ends."""

    COMMAND = ("manage.py", "runsubscriber")

    def __init__(self, tmp_path, *arguments, env=None, whole_env=None, **settings):
        self.log = tmp_path / f"worker-{random.getrandbits(32):08x}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error::ResourceWarning", *self.COMMAND, *arguments],
                cwd=ROOT,
                env=whole_env or environment(**settings) | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def send(self, number):
        self.process.send_signal(number)

    def wait(self, timeout=30):
        return self.process.wait(timeout)

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    def is_ready(self):
        return "subscriber.started" in self.output

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()


@pytest.fixture
def start(db, tmp_path):
    workers = []

    def start(*arguments, **settings):
        worker = Worker(tmp_path, *arguments, **settings)
        workers.append(worker)
        wait_for(worker.is_ready, worker)
        return worker

    yield start
    for worker in workers:
        worker.end()


def wait_for(condition, worker=None, timeout=40):
    deadline = time.monotonic() + timeout
    while not condition():
        if worker is not None and worker.process.poll() is not None and not condition():
            raise AssertionError(f"the worker has left with {worker.process.returncode}:\n{worker.output}")
        if time.monotonic() > deadline:
            raise AssertionError("waited in vain" + (f":\n{worker.output}" if worker else ""))
        time.sleep(0.02)


def effects(name):
    return [
        (key, int(attempt), value)
        for row, value in Effect.objects.order_by("id").values_list("name", "value")
        for kind, key, attempt in [row.split("|")]
        if kind == name
    ]


def drained(group, topic):
    def check():  # what is due first: it becomes lag in one commit
        return not polling.poll(polling.Session(USING)).due and lag(group, topic) == 0

    return check


def publish_numbers(topic, count, partitions=5, **more):
    publish_many(topic, (Message({"n": n, **more}, key=f"k{n % partitions}") for n in range(count)))


def assert_ordered(rows):
    """The first starts of each key are in published order."""
    first = {}
    for key, _, number in rows:
        if number not in first.setdefault(key, []):
            first[key].append(number)
    for key, numbers in first.items():
        assert numbers == sorted(numbers), key


# -- ends ---------------------------------------------------------------------


def test_drain_handles_everything_waits_for_backoffs_and_exits(start):
    publish_numbers("p.plain", 50)
    publish("p.plain", {"n": 50, "fail": True}, key="k0")
    publish("p.plain", {"n": 99}, key="k0", delay=3600)
    worker = start("--drain", "--group", "plain")
    assert worker.wait() == 0
    rows = effects("plain")
    assert Counter(number for _, _, number in rows) == Counter([*range(51), 50])
    assert_ordered(rows)
    assert not DeliveryState.objects.exists()
    assert not PartitionLease.objects.exists()
    assert "group     plain of p.plain (ordered)" in worker.output
    assert f"database  default ({sequencing.Session(USING).dialect.name}" in worker.output
    assert worker.output.rstrip().endswith("Stopped.")


@pytest.mark.defect(16)
@pytest.mark.defect(17)
def test_sigterm_finishes_what_runs_and_gives_back_the_rest(start, tmp_path):
    started, go = tmp_path / "started", tmp_path / "go"
    publish("p.action", {"n": 0, "do": "wait", "started": str(started), "go": str(go)}, key="k")
    publish_many("p.action", (Message({"n": n}, key="k") for n in range(1, 20)))
    worker = start("--group", "action")
    wait_for(started.exists, worker)
    worker.send(signal.SIGTERM)
    wait_for(lambda: "subscriber.stopping" in worker.output, worker)
    # Its handler still runs: the lease must not be free yet.
    assert PartitionLease.objects.get().leased_by != ""
    go.touch()
    assert worker.wait() == 0
    assert effects("action") == [("k", 1, 0)]
    assert lag("action", "p.action") == 19
    assert set(DeliveryState.objects.values_list("retry_count", "delivered_by", "acked")) <= {(0, "", False)}
    assert PartitionLease.objects.get().leased_by == ""
    assert SubscriberHeartbeat.objects.get().deregistered_at > 0
    second = start("--group", "action", "--drain")
    assert second.wait() == 0
    assert effects("action") == [("k", 1, n) for n in range(20)]


def test_a_second_signal_leaves_at_once(start, tmp_path):
    started = tmp_path / "started"
    publish("p.action", {"n": 0, "do": "wait", "started": str(started), "go": str(tmp_path / "never")}, key="k")
    worker = start("--group", "action")
    wait_for(started.exists, worker)
    worker.send(signal.SIGINT)
    wait_for(lambda: "subscriber.stopping" in worker.output, worker)
    worker.send(signal.SIGINT)
    assert worker.wait(5) == 128 + signal.SIGINT


@pytest.mark.any_engine
def test_a_hung_handler_ends_its_process(start):
    publish("p.action", {"n": 0, "do": "hang"}, key="k")
    publish("p.action", {"n": 1}, key="other")
    worker = start("--group", "action")
    assert worker.wait(20) == 1
    assert "handler.hung" in worker.output
    assert SubscriberHeartbeat.objects.get().deregistered_at > 0
    if connection.vendor != "sqlite":  # where one thread is all there is
        assert ("other", 1, 1) in effects("action")
    # Deregistered: another one takes over without waiting for the lease, and so on until it is dead.
    for _ in range(3):
        assert start("--group", "action").wait(20) == 1
    last = start("--group", "action", "--drain")
    assert last.wait() == 0
    sequence()
    assert QueueMessage.objects.get(topic="p.action_dlq").failure_count == 3


@pytest.mark.servers_only
def test_a_hung_handler_does_not_take_healthy_ones_with_it(start, tmp_path):
    """They have SHUTDOWN_TIMEOUT; only the hung one is not waited for."""
    started, go = tmp_path / "started", tmp_path / "go"
    publish("p.action", {"n": 0, "do": "hang"}, key="hung")
    worker = start("--group", "action", "--group", "atomic")
    wait_for(lambda: ("hung", 1, 0) in effects("action"), worker)
    publish("p.plain", {"n": 1, "do": "wait", "started": str(started), "go": str(go)}, key="healthy")
    wait_for(started.exists, worker)
    wait_for(lambda: "subscriber.stopping" in worker.output, worker)
    go.touch()
    assert worker.wait(20) == 1
    assert effects("atomic") == [("healthy", 1, 1)]
    assert lag("atomic", "p.plain") == 0


@pytest.mark.servers_only
def test_a_hung_handler_that_returns_in_the_end_is_no_clean_end(start, tmp_path):
    """The process waited for another one meanwhile; whoever started it must know that it did not end as it should."""
    files = {name: (tmp_path / f"started-{name}", tmp_path / f"go-{name}") for name in ("p.action", "p.plain")}
    for topic, (started, go) in files.items():
        publish(topic, {"n": 0, "do": "wait", "started": str(started), "go": str(go)}, key="k")
    worker = start("--group", "action", "--group", "atomic", "--drain")
    wait_for(lambda: "subscriber.stopping" in worker.output, worker)
    assert "handler.hung" in worker.output
    assert all(started.exists() for started, _ in files.values())
    files["p.action"][1].touch()
    wait_for(drained("action", "p.action"), worker)
    files["p.plain"][1].touch()
    assert worker.wait(20) == 1
    assert "subscriber.left_running" not in worker.output


def test_a_group_of_another_mode_is_refused(db, tmp_path):
    groups.register(USING, GroupRef("plain", "p.plain"), mode="shared", start="earliest")
    worker = Worker(tmp_path, "--group", "plain")
    assert worker.wait() == 1
    assert "is registered as shared" in worker.output
    assert "queuegroupmode plain p.plain ordered" in worker.output


@pytest.mark.servers_only
def test_one_partition_and_many_threads_is_warned_of(start):
    publish_numbers("p.plain", 3, partitions=1)
    sequence()
    worker = start("--group", "plain", "--threads", "4", "--drain")
    assert worker.wait() == 0
    assert "warning   p.plain has one partition" in worker.output


def test_an_unknown_group_is_refused(db, tmp_path):
    worker = Worker(tmp_path, "--group", "nobody")
    assert worker.wait() == 1
    assert "no handler has it; there are: action, atomic, batch, plain, shared, shared_atomic, strict" in worker.output


# -- what handlers do ---------------------------------------------------------


@pytest.mark.parametrize("what", ["exit", "close", "open"])
def test_a_subscriber_survives_its_handlers(start, what):
    publish("p.action", {"n": 0, "do": what}, key="k")
    publish_many("p.action", (Message({"n": n}, key=f"k{n}") for n in range(1, 10)))
    worker = start("--group", "action", "--drain", "--threads", "1")
    assert worker.wait() == 0
    assert {number for _, _, number in effects("action")} >= set(range(1, 10))
    sequence()
    assert QueueMessage.objects.filter(topic="p.action_dlq").count() == (what == "exit")
    assert not Effect.objects.filter(name="left open").exists()


def test_a_handler_that_kills_its_process_every_time_is_dead_lettered(start):
    """Its neighbours, claimed and run beside it, lose no attempt."""
    publish_many("p.shared", (Message({"n": n, "do": "kill" if n == 3 else ""}) for n in range(6)))
    deaths = 0
    for _ in range(12):
        worker = start("--group", "shared", "--drain", GROUPS={"shared": {"MAX_ATTEMPTS": 3}})
        if worker.wait() == 0:
            break
        assert worker.process.returncode == -signal.SIGKILL
        deaths += 1
    sequence()
    dead = QueueMessage.objects.get(topic="p.shared_dlq")
    assert json.loads(bytes(dead.payload))["n"] == 3
    assert deaths == 4  # the first loss is free
    assert {attempt for _, attempt, number in effects("shared") if number != 3} == {1}
    assert {number for _, _, number in effects("shared")} == set(range(6))


# -- killed, frozen, cut off --------------------------------------------------


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


@pytest.mark.servers_only
def test_sigstop_inside_an_atomic_handler(start, tmp_path):
    """The frozen handler's writes roll back when it wakes; the other's count once."""
    started, go = tmp_path / "started", tmp_path / "go"
    publish("p.plain", {"n": 0, "do": "wait", "started": str(started), "go": str(go)}, key="k")
    publish_many("p.plain", (Message({"n": n}, key="k") for n in range(1, 10)))
    frozen = start("--group", "atomic", "--name", "frozen")
    wait_for(started.exists, frozen)
    frozen.send(signal.SIGSTOP)
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


@pytest.mark.servers_only
def test_connections_that_are_cut(start):
    """Every connection of the subscriber is killed again and again while it works."""
    publish_numbers("p.plain", 300)
    worker = start("--group", "plain", "--group", "atomic")
    for number in range(5):
        wait_for(lambda number=number: len(effects("atomic")) >= 20 * (number + 1), worker)
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND db = DATABASE()"
            )
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
    workers = [start("--group", "plain", "--batch-size", "5", "--name", f"w{n}") for n in range(2)]
    wait_for(drained("plain", "p.plain"), workers[0])
    for worker in workers:
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
    assert Counter(number for _, _, number in effects("plain")) == Counter(range(600))
    assert_ordered(effects("plain"))


def test_random_kills(start, tmp_path):
    """Three subscribers, one of them killed every second: nothing lost, atomic exactly once, order kept."""
    rng = random.Random(7)
    arguments = ("--group", "plain", "--group", "atomic", "--group", "shared", "--batch-size", "20")
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


def test_strict_order_through_kills(start):
    """Nothing of a key starts before the message before it is done, or dead after its attempts."""
    total = 300
    workers = publish_and_kill(start, "p.strict", total, "--group", "strict", "--batch-size", "10")
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


def test_atomic_batches_are_exactly_once_through_kills(start):
    total = 1200
    workers = publish_and_kill(start, "p.batch", total, "--group", "batch")
    wait_for(drained("batch", "p.batch"), workers[0], timeout=60)
    assert Counter(number for _, _, number in effects("batch")) == Counter(range(total))
    assert not QueueMessage.objects.filter(topic="p.batch_dlq").exists()
