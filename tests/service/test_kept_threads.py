"""Handler threads for messages with slots, while messages without slots would take all threads all the time."""

from __future__ import annotations

import threading
import time

import pytest

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.delivery_limits import parse_key_rates, parse_rate
from django_mysqlqueue.models import DeliveryState
from django_mysqlqueue.runtime.handling import starts
from django_mysqlqueue.service.deliveries import Action, Settlement
from tests.support.harness import Sub, handler

pytestmark = [pytest.mark.promise("Limits"), pytest.mark.servers_only]

BUSY = 0.15
"""Seconds that a handler takes: longer than a slot would wait for a thread."""


def work(sub, started, outcome=lambda claimed: Action.ACK):
    """A handler thread."""
    batch = None
    while (batch := sub.inbox.take(batch)) is not None:
        (held,) = batch.items
        started.append(held.claimed)
        time.sleep(BUSY)
        sub.inbox.finish(batch, [Settlement(held.claimed, outcome(held.claimed), delay_ms=10)])


def run(sub, started, until, **options):
    """Runs two handler threads beside the poller until a condition holds."""
    sub.step(times=3)
    threads = [threading.Thread(target=work, args=(sub, started), kwargs=options) for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 40
    try:
        while not until() and time.monotonic() < deadline:
            sub.beat()
            sub.step(tick=False)
            sub.inbox.wait(0.05)
    finally:
        sub.inbox.close()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("limited", ["group", "key"])
def test_messages_with_slots_and_others_take_turns(db, limited):
    if limited == "group":
        ones = [handler(group="a", topic="a", mode="shared", rate=parse_rate("100/s")), handler(mode="shared")]
    else:
        ones = [handler(mode="shared", rate_per_key=parse_key_rates({"a": "100/s"}))]
    sub = Sub(*ones, threads=2)
    publish_many("t", [Message(n, key=f"k{n % 10}") for n in range(1000)])
    publish_many("a" if limited == "group" else "t", [Message(n, key="a") for n in range(200)])
    started = []
    run(sub, started, lambda: len(started) >= 40)
    with_slots = sum(claimed.slot is not None for claimed in started[:40])
    assert 8 <= with_slots <= 32
    assert all(claimed.slot is None or claimed.key == "a" or claimed.ref.topic == "a" for claimed in started)


def test_retries_with_slots_get_a_thread(db):
    one = handler(mode="shared", rate_per_key=parse_key_rates({"a": "100/s"}), max_attempts=None)
    sub = Sub(one, threads=2, prefetch=10, claim_size=10)
    publish_many("t", [Message(n, key="a") for n in range(2)])
    publish_many("t", [Message(n, key=f"k{n % 10}") for n in range(1000)])
    started = []

    def attempts():
        return [claimed.attempt for claimed in started if claimed.key == "a"]

    run(
        sub,
        started,
        lambda: attempts().count(3) >= 2,
        outcome=lambda claimed: Action.NACK if claimed.key == "a" else Action.ACK,
    )
    assert attempts().count(3) >= 2
    assert len(started) > len(attempts())


def test_a_thread_waits_for_a_claim_only_for_a_moment(db, monkeypatch):
    monkeypatch.setattr(starts, "KEPT", 0.3)
    sub = Sub(handler(mode="shared"), threads=2)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(5)])
    sub.step()
    sub.inbox.keep_thread(keep=True)
    assert sub.take() is None
    others = []
    thread = threading.Thread(target=lambda: others.append(sub.take()))
    thread.start()
    thread.join()
    assert others != [None], "only one thread is kept"
    assert sub.take() is None
    time.sleep(0.35)
    assert sub.take() is not None
    assert sub.take() is not None
    sub.inbox.keep_thread(keep=True)
    assert sub.take() is None
    sub.inbox.keep_thread(keep=False)
    assert sub.take() is not None
    assert DeliveryState.objects.count() == 5
