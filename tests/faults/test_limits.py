"""Limits hold for all processes of a group, while some of them are killed and frozen."""

from __future__ import annotations

import random
import signal
import time

import pytest

from django_mysqlqueue import Message, operations, publish_many
from django_mysqlqueue.models import Slots
from tests.app.models import Effect
from tests.support.internals import GroupRef
from tests.support.processes import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.promise("Limits")]


def effects(group):
    return [
        [*name.split("|")[1:], value]
        for name, value in Effect.objects.filter(name__startswith=f"{group}|").values_list("name", "value")
    ]


def most_in(times, seconds):
    """The highest number of starts within a window of some seconds."""
    times = sorted(times)
    first = most = 0
    for last, moment in enumerate(times):
        while times[first] < moment - seconds:
            first += 1
        most = max(most, last - first + 1)
    return most


@pytest.mark.servers_only
@pytest.mark.parametrize("group", ["limited", "limited_shared"])
def test_no_more_than_the_rate_and_a_burst_start_in_any_second(start, group):
    """Four processes, of which some are killed, some frozen, and one is stopped. The handler notes when it starts."""
    publish_many("p.limited", (Message({"n": n}, key=f"k{n % 20}") for n in range(150)))
    workers = [start("--group", group, "--threads", "4") for _ in range(4)]
    random.seed(group)
    wait_for(lambda: len(effects(group)) >= 20, workers[0])
    workers[0].send(signal.SIGKILL)
    workers[1].freeze()
    time.sleep(1)
    workers[1].send(signal.SIGCONT)
    workers[2].send(signal.SIGTERM)
    workers += [start("--group", group, "--threads", "4")]
    wait_for(lambda: {n for *_, n in effects(group)} == set(range(150)), workers[3], timeout=60)
    starts = [float(at) for _, at, _ in effects(group)]
    # A handler notes its start up to a tenth of a second after it, on a busy machine.
    assert most_in(starts, 0.9) <= 30
    assert {int(attempt) for attempt, _, _ in effects(group)} <= {1, 2}
    assert len(starts) / (max(starts) - min(starts)) > 5, "the rate is used"


@pytest.mark.servers_only
def test_no_more_messages_than_allowed_are_handled_at_the_same_time(start):
    publish_many("p.limited", (Message({"n": n}, key=f"k{n % 20}") for n in range(120)))
    workers = [start("--group", "few", "--threads", "4") for _ in range(3)]
    wait_for(lambda: len(effects("few")) >= 20, workers[0])
    workers[0].send(signal.SIGKILL)
    wait_for(lambda: {n for *_, n in effects("few")} == set(range(120)), workers[1], timeout=60)
    moments = sorted(change for began, ended, _ in effects("few") for change in ((float(began), 1), (float(ended), -1)))
    running = most = 0
    for _, change in moments:
        running += change
        most = max(most, running)
    assert most <= 3
    for worker in workers[1:]:
        worker.send(signal.SIGTERM)
    assert all(worker.wait() == 0 for worker in workers[1:])
    live = Slots.objects.exclude(subscriber_name="").exclude(subscriber_name__contains=str(workers[0].process.pid))
    assert sum(live.values_list("held", flat=True)) == 0


@pytest.mark.servers_only
def test_partitions_that_wait_for_a_rate_by_key_change_their_owners(start):
    """By queuerelease, and as subscribers join and leave: each time, a partition rests until the same moment again."""
    ref = GroupRef("plain", "p.plain")
    workers = [start("--group", "plain")]
    wait_for(lambda: "subscriber.started" in workers[0].output, workers[0])
    operations.settings(*ref, {"rate_per_key": "15/m", "burst": 1}, actor="tests")
    publish_many("p.plain", (Message({"n": n}, key=f"k{n % 4}") for n in range(16)))
    wait_for(lambda: len(effects("plain")) >= 4, workers[0])
    for _ in range(2):
        operations.release(*ref, [f"k{number}" for number in range(4)], actor="tests")
        time.sleep(1)
    joins = start("--group", "plain")
    wait_for(lambda: "subscriber.started" in joins.output, joins)
    time.sleep(3)
    joins.send(signal.SIGTERM)
    assert joins.wait() == 0, joins.output
    wait_for(lambda: {n for *_, n in effects("plain")} == set(range(16)), workers[0], timeout=90)
    for worker in (*workers, joins):
        assert "poller.died" not in worker.output
        assert "group.broken" not in worker.output
