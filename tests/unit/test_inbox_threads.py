"""The inbox and its threads."""

from __future__ import annotations

import random
import threading
import time

import pytest

from tests.support.harness import handler
from tests.support.inbox import BODY, ORDERED
from tests.support.internals import SLICE, Action, Claimed, Held, Inbox, Settlement

pytestmark = pytest.mark.any_engine


def in_background(target):
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


# -- threads ------------------------------------------------------------------


def test_put_wakes_waiting_threads():
    """One for each partition; a lost wake-up would leave a thread asleep for half a second at a time."""
    one = handler()
    inbox = Inbox([one.ref], leases_good=lambda: True)
    taken = []
    threads = [in_background(lambda: taken.append(inbox.take(None))) for _ in range(3)]
    inbox.put(Held(Claimed(one.ref, key, 1, 1, 1, False, 1), BODY, one) for key in "abc")
    for thread in threads:
        thread.join(10)
    assert sorted(batch.items[0].claimed.key for batch in taken) == ["a", "b", "c"]


def test_close_ends_waiting_threads():
    one = handler()
    inbox = Inbox([one.ref], leases_good=lambda: True)
    ended = []
    threads = [in_background(lambda: ended.append(inbox.take(None))) for _ in range(3)]
    inbox.close()
    for thread in threads:
        thread.join(10)
    assert ended == [None, None, None]


def test_wake_ends_the_pollers_sleep_and_is_remembered():
    one = handler()
    inbox = Inbox([one.ref], leases_good=lambda: True)
    inbox.wake()
    assert inbox.wait(60) is True
    assert inbox.wait(0) is False
    woken = []
    thread = in_background(lambda: woken.append(inbox.wait(60)))
    inbox.wake()
    thread.join(10)
    assert woken == [True]


@pytest.mark.parametrize("enough", [1, 100])
def test_an_outcome_ends_the_pollers_sleep(enough):
    one = handler()
    inbox = Inbox([one.ref], leases_good=lambda: True)
    inbox.configure(one, enough=enough, priority_share=16)
    inbox.put(Held(Claimed(one.ref, key, 1, 1, 1, False, 1), BODY, one) for key in "ab")
    batch = inbox.take(None)
    began = time.monotonic()
    thread = in_background(lambda: inbox.wait(60))
    inbox.finish(batch, [Settlement(batch.items[0].claimed, Action.ACK)])
    thread.join(10)
    assert not thread.is_alive()
    assert time.monotonic() - began < 5


def test_an_empty_inbox_ends_the_pollers_sleep():
    one = handler()
    inbox = Inbox([one.ref], leases_good=lambda: True)
    inbox.put([Held(Claimed(one.ref, "a", 1, 1, 1, False, 1), BODY, one)])
    inbox.take(None)
    began = time.monotonic()
    assert inbox.wait(60) is False
    assert time.monotonic() - began < 5


# -- batches, many times ------------------------------------------------------


@pytest.mark.parametrize("seed", range(200))
def test_batches_lose_nothing_and_no_partition_has_two_threads(queue, seed):  # noqa: C901  # one story
    """Threads take and finish in any order, leases come and go; in the end everything has started once, in order."""
    rng = random.Random(seed)
    one = queue(g={**ORDERED, "batch": True, "batch_size": rng.choice([2, 3, 7])})
    threads = [None] * 3  # (batch, it runs) or None
    put, started = [], []

    def take(number):
        at = threads[number]
        if at is not None and at[1]:
            return False
        batch = one.inbox.take(None if at is None else at[0], wait=False)
        threads[number] = None if batch is None else (batch, True)
        if batch is None:
            return False
        assert one.leases_good
        others = [at[0] for at in threads if at is not None and at[1] and at[0] is not batch]
        running = {id(lane) for other in others for lane in other.lanes}
        assert not running & {id(lane) for lane in batch.lanes}, "two threads in one partition"
        assert {lane.key for lane in batch.lanes} == {held.claimed.key for held in batch.items}
        assert len(batch.items) == 1 or not any(held.alone for held in batch.items)
        started.extend(batch.items)
        return True

    def finish(number):
        batch, runs = threads[number] or (None, False)
        if runs:
            one.inbox.finish(batch, [Settlement(held.claimed, Action.ACK) for held in batch.items])
            one.inbox.written(one.inbox.take_settlements(one.ref("g")))
            threads[number] = (batch, False)

    for _ in range(80):
        match rng.choice(["put", "put", "take", "take", "take", "finish", "finish", "leases", "time"]):
            case "put":
                keys = [rng.choice("abcde") for _ in range(rng.randint(1, 8))]
                items = [one.held("g", key, suspect=rng.random() < 0.05) for key in keys]
                put += items
                one.inbox.put(items)
            case "take":
                take(rng.randrange(3))
            case "finish":
                finish(rng.randrange(3))
            case "leases":
                one.leases_good = not one.leases_good
            case "time":
                one.now += SLICE
    one.leases_good = True
    for _ in range(len(put) + 5):
        for number in range(3):
            finish(number)
            take(number)
    assert sorted(map(id, started)) == sorted(map(id, put)), "something was lost, or started twice"
    for key in "abcde":
        offsets = [held.claimed.offset for held in started if held.claimed.key == key]
        assert offsets == sorted(offsets)
