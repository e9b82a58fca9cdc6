"""Several subscribers of a shared group, and messages with few coalesce keys."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict

import pytest
from django.db import connections

from django_mysqlqueue import publish
from tests.support.harness import USING, Sub, handler, lag

pytestmark = [pytest.mark.promise("Coalescing"), pytest.mark.servers_only]

KEYS = 3
SECONDS = 3.0


def test_the_latest_is_handled_and_never_two_at_a_time(db):
    """Handlers fail at times, so that retries meet newer messages and claims of others."""
    lock, running, last, overlaps = threading.Lock(), defaultdict(int), {}, []
    calls = 0

    def slow(delivery):
        nonlocal calls
        key, number = delivery.payload
        with lock:
            running[key] += 1
            calls += 1
            if running[key] > 1:
                overlaps.append(key)
        time.sleep(random.uniform(0.0, 0.03))
        with lock:
            running[key] -= 1
        if random.random() < 0.2:
            delivery.nack(delay=random.choice([0, 0.05]))
            return
        with lock:
            last[key] = max(last.get(key, -1), number)

    published: dict[int, int] = {}
    ended = threading.Event()
    errors: list[BaseException] = []

    def subscribe() -> None:
        try:
            sub = Sub(handler(function=slow, mode="shared", max_attempts=None), claim_size=5)
            while not ended.is_set():
                sub.step()
                sub.work(2)
            sub.work()
            sub.flush()
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=subscribe) for _ in range(4)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + SECONDS
    number = 0
    while time.monotonic() < until:
        key = random.randrange(KEYS)
        publish("t", [key, number], key="k" if key else None, coalesce=f"c{key}")
        published[key] = number
        number += 1
        time.sleep(0.002)
    time.sleep(1.0)
    for _ in range(100):
        if lag() == 0:
            break
        time.sleep(0.1)
    ended.set()
    for thread in threads:
        thread.join()
    connections[USING].close()
    assert not errors
    assert lag() == 0
    assert calls > 2 * KEYS
    assert not overlaps
    assert last == published
