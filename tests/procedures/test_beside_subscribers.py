"""Clients in plain SQL and subscribers in Python are consumers of one group."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter

import pytest
from django.db import connection

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import DeliveryState, Rollup
from tests.support import invariants
from tests.support.harness import USING, Sub, handler, lag, sequence, take_all
from tests.support.internals import LATENCY_COLUMNS, GroupRef, Session, heartbeats
from tests.support.sql_clients import REF, Client, numbers, pass_time, publish_numbers, register
from tests.support.tables import Tables

pytestmark = [pytest.mark.servers_only, pytest.mark.promise("Consumers in plain SQL")]

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])


def test_in_shared_mode_each_gets_other_messages(client):
    sub = Sub(handler(mode="shared"), claim_size=4)
    publish_numbers(12)
    mine = client.claim(4)
    sub.settle()
    assert lag() == 4
    assert all(client.ack(row["handle"]) == "acked" for row in mine)
    assert lag() == 0


def test_in_ordered_mode_a_partition_of_a_client_is_not_claimed_from(client):
    register("ordered")
    publish_numbers(4, keys=1)
    rows = client.claim(2)
    order = []
    sub = Sub(handler(function=lambda delivery: order.append(delivery.payload["n"])))
    sub.settle()
    assert order == []
    assert client.ack(rows[0]["handle"]) == "acked"
    sub.settle()
    assert order == []
    assert client.ack(rows[1]["handle"]) == "acked"
    pass_time(31)  # It is the client's share as long as that is live.
    sub.beat()
    sub.settle()
    assert order == [2, 3]
    assert lag() == 0


def test_in_ordered_mode_a_partition_of_a_subscriber_is_not_claimed_from(client):
    sub = Sub(handler(), claim_size=1)
    publish_numbers(3, keys=1)
    (first,) = take_all(sub)
    assert client.claim() == []
    sub.run(first)
    sub.flush()
    assert client.claim() == []
    sub.leave()
    assert numbers(client.claim()) == [1, 2]


def test_clients_get_their_share_of_the_partitions(client):
    sub = Sub(handler(), claim_size=1)
    publish_numbers(40, keys=10)
    sub.step()
    assert len(sub.owned()) == 10
    assert client.claim() == []
    sub.settle(rounds=5)
    sub.step(times=3)
    assert len(sub.owned()) <= 5
    assert client.claim()


@MODES
def test_a_subscriber_takes_over_from_a_lost_client(connect, mode):
    lost = connect()
    register(mode)
    publish_numbers(3, keys=1)
    assert len(lost.claim()) == 3
    lost.close()
    pass_time(61)
    order = []
    sub = Sub(handler(mode=mode, function=lambda delivery: order.append(delivery.payload["n"])))
    sub.settle()
    assert sorted(order) == [0, 1, 2]
    assert order == [0, 1, 2] or mode == "shared"
    assert lag() == 0


@MODES
def test_a_client_takes_over_from_a_lost_subscriber(client, mode):
    sub = Sub(handler(mode=mode))
    publish_numbers(3, keys=1)
    assert take_all(sub)
    assert DeliveryState.objects.count() == 3
    pass_time(61)
    found = []
    for _ in range(3):
        (row,) = client.claim()
        found += numbers([row])
        assert client.ack(row["handle"]) == "acked"
    assert sorted(found) == [0, 1, 2]
    assert found == [0, 1, 2] or mode == "shared"


@MODES
def test_attempts_are_counted_together(client, mode):
    def fail(delivery):
        raise ValueError(f"attempt {delivery.attempt}")

    sub = Sub(handler(mode=mode, function=fail))
    publish_numbers(1)
    (row,) = client.claim()
    assert client.nack(row["handle"], delay=0) == "failed"
    pass_time(31)  # The client's share comes back.
    sub.beat()
    sub.step()
    assert sub.work(1) == 1
    sub.flush()
    sub.leave()
    (row,) = client.claim()
    assert row["attempt"] == 3


def test_a_subscriber_moves_the_watermark_after_an_ack_in_a_transaction(client):
    sub = Sub(handler(mode="shared"))
    publish_numbers(2, keys=1)
    first, second = client.claim()
    with client.transaction():
        client.ack(first["handle"])
        client.ack(second["handle"])
    assert DeliveryState.objects.filter(acked=True).count() == 2
    for _ in sub.poller.maintenance.round():
        pass
    assert lag() == 0
    assert not DeliveryState.objects.exists()


def test_a_client_is_live_as_long_as_it_calls(client):
    register("ordered")
    publish_numbers(1)
    client.claim()
    assert list(heartbeats.live(Session(USING), [REF], 30_000)[REF]) == [client.name]
    pass_time(31)
    assert heartbeats.live(Session(USING), [REF], 30_000)[REF] == {}


@MODES
def test_acks_are_counted(client, mode):
    register(mode)
    publish_numbers(5)
    for row in client.claim():
        client.ack(row["handle"])
    minute = Rollup.objects.filter(grain=60)
    assert sum(one.acked for one in minute) == 5
    assert sum(getattr(one, name) for one in minute for name in LATENCY_COLUMNS) == 5


# -- many at once -------------------------------------------------------------------


class Crowd:
    """Consumers in threads, three clients and two subscribers: each notes what it has handled."""

    def __init__(self, mode):
        self.mode = mode
        self.handled: list[tuple[str, int]] = []
        self.errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._done = threading.Event()
        works = (self._consume, self._consume, self._consume, self._subscribe, self._subscribe)
        self._threads = [threading.Thread(target=self._guarded, args=(work,)) for work in works]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self._done.set()
        for thread in self._threads:
            thread.join(30)

    def _guarded(self, work):
        try:
            work()
        except BaseException as error:
            self.errors.append(error)
        finally:
            connection.close()

    def _note(self, key, number):
        with self._lock:
            self.handled.append((key, number))

    def _consume(self):
        client = Client()
        while not self._done.is_set():
            rows = client.claim(7)
            for row in rows:
                self._handle(client, row)
            if not rows:
                self._done.wait(0.02)
        client.close()

    def _handle(self, client, row):
        number = json.loads(row["payload"])["n"]
        if number % 11 == 3 and row["attempt"] == 1:
            assert client.nack(row["handle"], delay=0) == "failed"
            return
        # Noted before the ack: afterwards, another consumer may have the next one already.
        self._note(row["key"], number)
        assert client.ack(row["handle"]) == "acked"

    def _subscribe(self):
        function = lambda delivery: self._note(delivery.key, delivery.payload["n"])  # noqa: E731
        sub = Sub(handler(mode=self.mode, function=function), claim_size=10)
        while not self._done.is_set():
            sub.step()
            sub.work()
            sub.flush()
            self._done.wait(0.01)
        sub.leave()


@MODES
@pytest.mark.timeout(300)
def test_many_consumers_at_once(procedures, mode):
    """Each message is settled once, in ordered groups in the order of its key."""
    register(mode)
    count, keys = 400, 8
    with Crowd(mode) as crowd:
        for start in range(0, count, 40):
            publish_many("t", [Message({"n": n}, key=f"k{n % keys}") for n in range(start, start + 40)])
            sequence()
        until = time.monotonic() + 60
        while lag() and not crowd.errors and time.monotonic() < until:
            time.sleep(0.1)
    assert not crowd.errors
    assert Counter(number for _, number in crowd.handled) == dict.fromkeys(range(count), 1)
    if mode == "ordered":
        for key in {key for key, _ in crowd.handled}:
            mine = [number for one, number in crowd.handled if one == key and number % 11 != 3]
            assert mine == sorted(mine)
    Client().claim()
    assert invariants.at_any_moment(Tables.read()) == []
    assert not DeliveryState.objects.exists()


def test_topics_are_apart(connect):
    register("shared")
    register("shared", GroupRef("g", "u"))
    publish_numbers(1)
    assert connect(GroupRef("g", "u")).claim() == []
    assert len(connect().claim()) == 1
