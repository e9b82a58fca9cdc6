"""Filters, expiry and coalescing hold while subscribers are killed and frozen."""

from __future__ import annotations

import datetime
import itertools
import signal
import time

import pytest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import QueueMessage
from tests.app.models import Effect
from tests.support.processes import drained, wait_for

pytestmark = pytest.mark.processes

LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
TOTAL = 420


def handled(group):
    """(number, start, end) of each completed call, in the order of the starts."""
    rows = Effect.objects.filter(name__startswith=f"{group}|").values_list("name", "value")
    return sorted(((number, *map(float, name.split("|")[1:])) for name, number in rows), key=lambda one: one[1])


def coalesce_key(number):
    return f"c{number % 7}" if number % 2 else None


def message(number):
    """Of a coalesce key, either all messages match the filter or none."""
    return Message(
        {"n": number},
        key=f"k{number % 7}",
        metadata={"region": "us" if number % 7 == 3 else "eu"},
        coalesce=coalesce_key(number),
        expires_at=LONG_AGO if number % 10 == 4 else None,
    )


@pytest.mark.promise("Filters", "Expiry", "Coalescing", "Delivery")
@pytest.mark.parametrize("group", ["controlled", "controlled_shared"])
def test_what_a_group_gets_through_kills(start, group):
    """Of two subscribers, one is killed again and again while messages come in."""
    arguments = ("--group", group, "--claim-size", "10", "--threads", "4")
    workers = [start(*arguments) for _ in range(2)]
    for chunk in range(6):
        publish_many("p.controlled", map(message, range(chunk * TOTAL // 6, (chunk + 1) * TOTAL // 6)))
        victim = chunk % 2
        workers[victim].send(signal.SIGKILL)
        workers[victim].wait()
        workers[victim] = start(*arguments)
    wait_for(drained(group, "p.controlled"), workers[0], timeout=60)
    calls = handled(group)
    numbers = {number for number, _, _ in calls}
    wanted = {number for number in range(TOTAL) if number % 7 != 3 and number % 10 != 4}
    latest = {coalesce_key(number): number for number in sorted(wanted) if coalesce_key(number)}
    assert numbers <= wanted
    assert {number for number in wanted if coalesce_key(number) is None} | {*latest.values()} <= numbers
    assert len(numbers) < len(wanted), "some were superseded"
    for key in latest:
        for one, other in itertools.pairwise(call for call in calls if coalesce_key(call[0]) == key):
            assert one[2] <= other[1], f"{key}: {one} and {other} overlap"
    assert not QueueMessage.objects.filter(topic__endswith="_dlq").exists()


@pytest.mark.promise("Expiry", "Frozen processes")
@pytest.mark.parametrize("group", ["controlled", "controlled_shared"])
def test_a_process_that_thaws_after_the_expiry_starts_nothing_more(start, tmp_path, group):
    started, go = tmp_path / "started", tmp_path / "go"
    metadata = {"region": "eu"}
    publish("p.controlled", {"n": 0, "do": "wait", "started": str(started), "go": str(go)}, key="k", metadata=metadata)
    publish_many("p.controlled", (Message({"n": n}, key="k", metadata=metadata, expires_in=4) for n in range(1, 10)))
    worker = start("--group", group, "--threads", "1")
    wait_for(started.exists, worker)
    worker.freeze()
    time.sleep(4)
    go.touch()
    worker.send(signal.SIGCONT)
    wait_for(drained(group, "p.controlled"), worker)
    assert {number for number, _, _ in handled(group)} == {0}
