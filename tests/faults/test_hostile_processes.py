"""Real subscriber processes whose handlers turn on them."""

from __future__ import annotations

import json
import signal

import pytest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import DeliveryState, QueueMessage
from tests.app.models import Effect
from tests.support.harness import lag, sequence
from tests.support.processes import effects

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("what", ["exit", "close", "open"])
def test_a_subscriber_survives_its_handlers(start, what):
    publish("p.action", {"n": 0, "do": what}, key="k")
    publish_many("p.action", (Message({"n": n}, key=f"k{n}") for n in range(1, 10)))
    worker = start("--group", "action", "--drain", "--threads", "1")
    assert worker.wait() == 0
    assert {number for _, _, number in effects("action")} >= set(range(1, 10))
    sequence()
    assert QueueMessage.objects.filter(topic="p.action_dlq").count() == (what in ("exit", "open"))
    assert not Effect.objects.filter(name="left open").exists()


@pytest.mark.promise("Poison messages")
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


@pytest.mark.promise("Poison messages")
def test_an_async_handler_whose_task_exits_or_ends_its_process(start):
    """sys.exit costs an attempt. os._exit costs the process, as in any handler: the first loss is free."""
    do = {3: "leave", 4: "exit"}
    publish_many("p.async", (Message({"n": n, "do": do.get(n, "")}) for n in range(30)))
    deaths = 0
    for _ in range(12):
        worker = start("--group", "async", "--drain")
        if worker.wait() == 0:
            break
        assert worker.process.returncode == 4
        deaths += 1
    sequence()
    dead = QueueMessage.objects.filter(topic="p.async_dlq")
    assert sorted(json.loads(bytes(one.payload))["n"] for one in dead) == [3, 4]
    assert deaths == 4
    assert {attempt for _, attempt, number in effects("async") if number not in do} == {1}
    assert {number for _, _, number in effects("async")} == set(range(30))


def odd_and_others(what, topic="p.action"):
    """The odd message comes first; three follow it in its partition and three in others."""
    publish(topic, {"n": 0, "do": what}, key="k")
    publish_many(topic, (Message({"n": n}, key="k" if n < 4 else f"k{n}") for n in range(1, 7)))


def assert_all_handled(group="action", topic="p.action"):
    assert {number for _, _, number in effects(group)} == set(range(7))
    assert [attempt for _, attempt, number in effects(group) if number] == [1] * 6
    assert lag(group, topic) == 0
    assert not DeliveryState.objects.exists()


@pytest.mark.parametrize("what", ["close outputs", "change the process"])
def test_what_a_handler_does_to_its_process_stops_no_work(start, what):
    odd_and_others(what)
    worker = start("--group", "action", "--drain", "--threads", "1")
    assert worker.wait(60) == 0
    assert_all_handled()
    assert [attempt for _, attempt, number in effects("action") if not number] == [1]
    sequence()
    assert not QueueMessage.objects.filter(topic="p.action_dlq").exists()


def test_a_handler_that_sends_its_process_a_sigterm(start):
    """A clean stop: it is acked, what is behind it is left to others, uncounted."""
    odd_and_others("stop")
    worker = start("--group", "action", "--threads", "1")
    assert worker.wait() == 0
    assert start("--group", "action", "--drain", "--threads", "1").wait() == 0
    assert_all_handled()
    assert [attempt for _, attempt, number in effects("action") if not number] == [1]


def test_a_handler_that_leaves_without_a_word(start):
    """As a kill: the process is replaced, the message is a suspect, and in the DLQ after so many starts on record."""
    odd_and_others("leave")
    codes = []
    for _ in range(8):
        codes.append(start("--group", "action", "--drain", "--threads", "1").wait())
        if codes[-1] == 0:
            break
    assert codes == [4] * 4 + [0]  # the first loss is free
    assert_all_handled()
    sequence()
    assert QueueMessage.objects.get(topic="p.action_dlq").failure_count == 3


@pytest.mark.parametrize("what", ["no stack", "close all files"])
def test_a_handler_that_takes_its_process_apart(start, what):
    """The process may go or stay; others, or its supervisor's next one, do the rest, and nothing is lost."""
    odd_and_others(what)
    for _ in range(8):
        worker = start("--group", "action", "--drain", "--threads", "1")
        if worker.wait(60) == 0:
            break
    assert worker.process.returncode == 0
    assert {number for _, _, number in effects("action")} == set(range(7))
    assert lag("action", "p.action") == 0


@pytest.mark.servers_only
@pytest.mark.parametrize(("group", "topic"), [("action", "p.action"), ("atomic", "p.plain"), ("shared", "p.shared")])
def test_a_handler_that_forks(start, group, topic):
    """By multiprocessing, and by hand with a child that comes back: nobody loses a connection or an attempt."""
    odd_and_others("fork", topic)
    worker = start("--group", group, "--drain", "--threads", "2")
    assert worker.wait(60) == 0
    assert_all_handled(group, topic)
    assert effects("child") == [("", 0, 0)] * 3
    assert effects("joined") == [("0", 0, 0)] * 3
    for problem in ("poller.failed", "heartbeat.failed", "delivery.lost", "gone away", "Lost connection"):
        assert problem not in worker.output, worker.output
