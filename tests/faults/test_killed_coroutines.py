"""Real subscriber processes that end while a hundred coroutines run."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import DeliveryState, QueueMessage
from tests.support.processes import assert_ordered, drained, effects, wait_for

pytestmark = pytest.mark.processes

COUNT = 100
"""ASYNC_CONCURRENCY."""
MORE = 50
"""Messages that wait behind those that run."""
GROUPS = pytest.mark.parametrize("group", ["coroutines", "coroutines_shared"])


@pytest.fixture
def go(tmp_path):
    return tmp_path / "go"


def publish_waiting(group, go):
    """Messages that wait for the file, the last ones in partitions of the first."""
    numbers = range(COUNT + MORE)
    publish_many(f"p.{group}", (Message({"n": n, "go": str(go)}, key=f"k{n % COUNT}") for n in numbers))


def all_run(start, group, *, before=0, **settings):
    """A process in which as many coroutines run as may."""
    worker = start("--group", group, "--threads", "2", **settings)
    wait_for(lambda: len(effects(group)) == before + COUNT, worker, timeout=60)
    return worker


def numbers(rows):
    return [number for _, _, number in rows]


@GROUPS
@pytest.mark.promise("Delivery", "Order", "Poison messages")
def test_sigkill_in_the_midst_of_a_hundred_coroutines(start, go, group):
    """Each comes again, once; nothing is lost, and nothing overtakes."""
    publish_waiting(group, go)
    first = all_run(start, group)
    first.send(signal.SIGKILL)
    first.wait()
    begun = set(numbers(effects(group)))
    assert len(begun) == COUNT
    go.touch()
    second = start("--group", group, "--threads", "2")
    wait_for(drained(group, f"p.{group}"), second, timeout=120)
    second.send(signal.SIGTERM)
    assert second.wait() == 0, second.output
    rows = effects(group)
    assert Counter(numbers(rows)) == {n: 1 + (n in begun) for n in range(COUNT + MORE)}
    if group == "coroutines":
        assert begun == set(range(COUNT)), "two of a partition ran at a time"
        assert_ordered(rows)
    assert not DeliveryState.objects.exists()
    assert not QueueMessage.objects.filter(topic__endswith="_dlq").exists()
    assert "handler_thread.failed" not in second.output


@GROUPS
@pytest.mark.promise("Shutdown")
def test_sigterm_waits_for_a_hundred_coroutines(start, go, group):
    """And starts no other. Nothing runs twice."""
    publish_waiting(group, go)
    first = all_run(start, group, SHUTDOWN_TIMEOUT=60)
    first.send(signal.SIGTERM)
    wait_for(lambda: "subscriber.stopping" in first.output, first)
    go.touch()
    assert first.wait(60) == 0, first.output
    assert len(effects(group)) == COUNT
    assert not DeliveryState.objects.filter(acked=False).exclude(delivered_by="").exists()
    second = start("--group", group, "--drain")
    assert second.wait(60) == 0, second.output
    rows = effects(group)
    assert Counter(numbers(rows)) == Counter(range(COUNT + MORE))
    assert {attempt for _, attempt, _ in rows} == {1}


@GROUPS
@pytest.mark.promise("Shutdown")
def test_coroutines_that_outlive_the_shutdown_have_not_failed(start, go, group):
    """They start again at once, all together: no attempt is counted, and none is suspected."""
    publish_waiting(group, go)
    for before in (0, COUNT, 2 * COUNT):
        worker = all_run(start, group, before=before, SHUTDOWN_TIMEOUT=0.5, MAX_ATTEMPTS=2)
        worker.send(signal.SIGTERM)
        assert worker.wait(60) == 1, worker.output
        assert "delivery.failed" not in worker.output
        rows = DeliveryState.objects.filter(acked=False)
        assert not rows.exclude(delivered_by="", retry_count=0).exists()
    go.touch()
    last = start("--group", group, "--drain", MAX_ATTEMPTS=2)
    assert last.wait(60) == 0, last.output
    rows = effects(group)
    assert set(numbers(rows)) == set(range(COUNT + MORE))
    assert {attempt for _, attempt, _ in rows} == {1}
