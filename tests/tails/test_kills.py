"""Followers while connections are killed, GC deletes what they have not read, and some of them are slow."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import defaultdict

import pytest
from django.db import OperationalError, connection, connections

from django_mysqlqueue import publish
from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.tails import Gap, following, reading, tail
from tests.support import garbage
from tests.support.harness import USING, sequence

SECONDS = 6


class World:
    """Threads that write, delete, kill and follow, and what they have seen."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.failures: list[BaseException] = []
        self.written: dict[str, set[int]] = defaultdict(set)
        self.followed: list[tuple[str, int, int, list]] = []
        self.found: list[list] = []
        """Of each follower, as it goes on."""
        self.sessions: set[int] = set()
        """Of hubs, on the server."""
        self.killed = 0

    def note(self, execute, sql, params, many, context):
        self.sessions.add(context["connection"].connection.thread_id())
        return execute(sql, params, many, context)

    def write(self) -> None:
        for number in itertools.count():
            if self.stop.is_set():
                return
            publish("tu"[number % 2], number, key=f"k{number % 7}")
            sequence()
            if number % 10 == 0:
                for topic, offset in QueueMessage.objects.values_list("topic", "offset"):
                    self.written[topic].add(offset)

    def collect(self) -> None:
        while not self.stop.wait(0.05):
            garbage.collect(USING)

    def kill(self) -> None:
        while not self.stop.wait(0.2):
            for session in list(self.sessions):
                self.sessions.discard(session)
                try:
                    with connection.cursor() as cursor:
                        cursor.execute(f"KILL {session}")
                    self.killed += 1
                except OperationalError:
                    continue  # it has ended

    def follow(self, topic: str, seed: int) -> None:
        chance, found = random.Random(seed), []
        with tail(topic, follow=True) as follower:
            start = follower.position
            self.found.append(found)
            while not self.stop.is_set():
                if follower.wait(0.2):
                    found.append(next(follower))
                if seed and chance.random() < 0.01 * seed:
                    time.sleep(chance.random())
            self.followed.append((topic, start, follower.position, found))

    def has_seen_enough(self) -> bool:
        """Return whether what the followers have met says something."""
        found = [list(one) for one in self.found]
        read = [sum(not isinstance(one, Gap) for one in each) for each in found]
        return self.killed > 3 and min(read) > 10 and len(list(itertools.chain(*found))) > sum(read)

    def run(self, *work) -> None:
        def guarded(one, *arguments):
            try:
                one(*arguments)
            except BaseException as error:
                self.failures.append(error)
            finally:
                connections.close_all()

        threads = [threading.Thread(target=guarded, args=one) for one in work]
        for thread in threads:
            thread.start()
        time.sleep(SECONDS)
        until = time.monotonic() + 60
        while not self.has_seen_enough() and not self.failures and time.monotonic() < until:
            time.sleep(0.1)
        self.stop.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.servers_only
@pytest.mark.promise("Tails")
def test_nothing_is_missed_through_kills_gc_and_slow_followers(db, settings, monkeypatch):
    """Each follower gets the log of its topic in order; what it did not get is in its gaps."""
    limits = (reading.PageLimits(messages=20, walked=100), 30, 10**7, 0.05)
    monkeypatch.setattr(following.HubLimits.__init__, "__defaults__", limits)
    monkeypatch.setattr(following, "RETRY", following.Backoff(initial=0.01, maximum=0.05))
    settings.MYSQLQUEUE |= {"RETENTION": 0.3, "ORPHAN_RETENTION": 0.3}
    world = World()
    real = following.sessions.adopt

    def adopt(using, timeouts):
        real(using, timeouts)
        connections[using].execute_wrappers.append(world.note)

    monkeypatch.setattr(following.sessions, "adopt", adopt)
    world.run((world.write,), (world.collect,), (world.kill,), *((world.follow, "tu"[n % 2], n) for n in range(6)))
    assert world.failures == []
    assert world.killed > 3
    assert len(world.followed) == 6
    gaps = 0
    for topic, start, end, found in world.followed:
        read = [one.offset for one in found if not isinstance(one, Gap)]
        assert read == sorted(set(read)), "in order, each once"
        assert len(read) > 10
        holes = [range(one.after + 1, one.until + 1) for one in found if isinstance(one, Gap)]
        gaps += len(holes)
        expected = {offset for offset in world.written[topic] if start < offset <= end}
        missing = {offset for offset in expected - set(read) if not any(offset in hole for hole in holes)}
        assert not missing, (topic, start, end, missing, holes)
    assert gaps, "some were slower than GC"
