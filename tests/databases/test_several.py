"""Subscriber processes of a queue with topics in several databases."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter

import pytest
from django.db import connection

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import ConsumerGroup, QueueMessage, SubscriberHeartbeat
from tests.app.models import Effect
from tests.support.private_servers import alias_of, private_server
from tests.support.processes import Worker, assert_ordered, effects, wait_for
from tools import servers

pytestmark = [pytest.mark.processes, pytest.mark.promise("Several databases")]

QUEUE, FAR = "queue", "far"
TOPICS = {"p.shared*": {"DATABASE": QUEUE}}
GROUPS = ("--group", "plain", "--group", "shared")


@pytest.fixture(autouse=True)
def _topics(queue_db, settings):
    settings.MYSQLQUEUE = {"TOPICS": TOPICS}


@pytest.fixture
def start(queue_db, tmp_path):
    workers = []

    def start(*arguments, topics=TOPICS, env=None, **settings):
        worker = Worker(tmp_path, *arguments, env=env, TOPICS=topics, **settings)
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.end()


def numbers(name):
    return Counter(number for _, _, number in effects(name))


def publish_both(count):
    """Messages for both databases; half of those for the second go via the first."""
    publish_many("p.plain", [Message({"n": n}, key=f"k{n % 3}") for n in range(count)])
    publish_many("p.shared", [{"n": n} for n in range(0, count, 2)])
    publish_many("p.shared", [{"n": n} for n in range(1, count, 2)], via="default")


@pytest.mark.parametrize("processes", [(), ("--processes", "2")], ids=["alone", "supervised"])
def test_one_command_serves_all_databases(start, processes):
    publish_both(60)
    worker = start(*GROUPS, *processes, "--drain")
    assert worker.wait(60) == 0, worker.output
    assert numbers("plain") == numbers("shared") == Counter(range(60))
    assert_ordered(effects("plain"))
    assert "group     plain on p.plain in default (ordered)" in worker.output
    assert "group     shared on p.shared in queue (shared)" in worker.output
    assert set(ConsumerGroup.objects.using(QUEUE).values_list("consumer_group", flat=True)) == {"shared"}
    assert set(ConsumerGroup.objects.values_list("consumer_group", flat=True)) == {"plain"}
    assert set(QueueMessage.objects.using(QUEUE).values_list("topic", flat=True)) == {"p.shared"}


def test_a_database_without_handlers_is_sequenced_and_relayed(start):
    publish_both(20)
    publish("p.shared", {"n": 20}, via="default", delay=2)
    worker = start("--group", "shared")
    wait_for(lambda: numbers("shared") == Counter(range(21)), worker)
    assert not effects("plain")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0, worker.output
    assert "poller.died" not in worker.output
    worker = start("--group", "shared", "--drain")
    assert worker.wait() == 0, worker.output


def test_one_database_of_several(start):
    """Its relays are served too: those from it to the others."""
    publish_both(20)
    worker = start("--database", "default", "--drain")
    assert worker.wait() == 0, worker.output
    assert numbers("plain") == Counter(range(20))
    assert not effects("shared")
    worker = start("--database", QUEUE, "--drain")
    assert worker.wait() == 0, worker.output
    assert numbers("shared") == Counter(range(20))


def test_a_limit_counts_for_all_databases(start):
    publish_both(20)
    worker = start(*GROUPS, "--max-messages", "12", "--claim-size", "1")
    assert worker.wait() == 0, worker.output
    assert Effect.objects.count() == 12


def test_a_relay_survives_kills(start):
    """Processes are killed all the time; each message is in the target's log once, in the order of its key."""
    count, workers = 400, [start("--database", "default"), start("--database", QUEUE), start()]
    deadline = time.monotonic() + 90
    for number in range(count):
        publish("p.shared_atomic", {"n": number}, key=f"k{number % 5}", via="default")
        if number % 25 == 24:
            place = random.randrange(len(workers))
            wait_for(workers[place].is_ready, workers[place])
            workers[place].send(signal.SIGKILL)
            workers[place] = start(*[(), ("--database", "default"), ("--database", QUEUE)][place])
    rows = QueueMessage.objects.using(QUEUE).filter(topic="p.shared_atomic").order_by("offset")
    wait_for(lambda: rows.count() >= count or time.monotonic() > deadline, timeout=100)
    found = [(row.partition_key, row.message_id, bytes(row.payload)) for row in rows]
    assert len(found) == count
    by_key = {}
    for key, _, payload in found:
        by_key.setdefault(key, []).append(int(payload.split(b":")[1].strip(b"} ")))
    assert all(values == sorted(values) for values in by_key.values())


@pytest.fixture
def far(db):
    """A database on a server of its own; the engine must be one of servers."""
    with private_server() as server, alias_of(server, FAR):
        yield server


def beside(server):
    return {"TEST_FAR_SOCKET": str(server.socket), "TEST_FAR_NAME": servers.DATABASE}


WITH_FAR = {"p.shared*": {"DATABASE": FAR}}


@pytest.mark.servers_only
def test_a_database_that_stops_answering_holds_up_no_other(start, far, settings):
    """It is stopped (SIGSTOP), and later continues: its messages are handled, and relayed, then."""
    settings.MYSQLQUEUE = {"TOPICS": WITH_FAR}
    worker = start(*GROUPS, topics=WITH_FAR, env=beside(far))
    publish("p.shared", {"n": 0})
    publish("p.plain", {"n": 0}, key="k")
    wait_for(lambda: effects("shared") and effects("plain"), worker)
    os.kill(far.pid, signal.SIGSTOP)
    try:
        publish("p.shared", {"n": 1}, via="default")
        for number in range(1, 60):
            publish("p.plain", {"n": number}, key="k")
            began = time.monotonic()
            wait_for(lambda number=number: numbers("plain")[number], worker)
            assert time.monotonic() - began < 5
            time.sleep(0.05)
        assert SubscriberHeartbeat.objects.filter(consumer_group="plain").exists()
        # One that starts now works at once on the database that answers.
        second = start(*GROUPS, topics=WITH_FAR, env=beside(far))
        wait_for(second.is_ready, second, timeout=20)
        worker.send(signal.SIGTERM)
        publish("p.plain", {"n": 60}, key="k")
        wait_for(lambda: numbers("plain")[60], second, timeout=15)
        beats = SubscriberHeartbeat.objects.filter(subscriber_name__contains=f":{worker.process.pid}:")
        wait_for(lambda: not beats.filter(consumer_group="plain", deregistered_at=0).exists(), timeout=10)
        assert worker.wait(15) == 1, worker.output
        assert re.search(r"shutdown\.timed_out name=\S+ databases=far$", worker.output, re.MULTILINE), worker.output
    finally:
        os.kill(far.pid, signal.SIGCONT)
    wait_for(lambda: numbers("shared")[1], second, timeout=60)
    assert numbers("plain") == Counter(range(61))


@pytest.mark.servers_only
def test_a_database_that_is_down_at_the_start_is_served_when_it_is_up(start, far, settings):
    settings.MYSQLQUEUE = {"TOPICS": WITH_FAR}
    publish("p.shared", {"n": 0})
    far.stop()
    worker = start(*GROUPS, topics=WITH_FAR, env=beside(far))
    publish("p.plain", {"n": 0}, key="k")
    wait_for(lambda: effects("plain"), worker)
    assert "database.unavailable" in worker.output
    assert "warning   The database 'far' does not answer" in worker.output
    far.start()
    wait_for(lambda: effects("shared"), worker)
    assert "database.available" in worker.output


@pytest.mark.servers_only
def test_two_names_of_one_database_are_refused(start, far):
    twins = {"TEST_FAR_SOCKET": str(connection.settings_dict["OPTIONS"].get("unix_socket", ""))}
    if not twins["TEST_FAR_SOCKET"]:
        pytest.skip("the server has no socket")
    worker = start(*GROUPS, topics=WITH_FAR, env=twins | {"TEST_FAR_NAME": connection.settings_dict["NAME"]})
    assert worker.wait() == 1
    assert "The databases 'default' and 'far' of the queue are the same one" in worker.output


@pytest.mark.servers_only
def test_a_database_without_tables_ends_the_start(start, far):
    far.execute("CREATE DATABASE empty_one")
    worker = start(*GROUPS, topics=WITH_FAR, env=beside(far) | {"TEST_FAR_NAME": "empty_one"})
    assert worker.wait() == 1
    assert "Database 'far' does not have the queue's tables. Run manage.py migrate --database far." in worker.output
