"""Idle subscribers of a host look for work once for all."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from django.db import connection

from django_mysqlqueue import publish
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import OWN_POLL, bell, polling, sequencing, wakeups
from tests.support.still_time import Time

pytestmark = pytest.mark.promise("Wake-ups")
MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])


@pytest.fixture
def still(db, settings, tmp_path_factory, monkeypatch):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "BELL": {"DIRECTORY": str(tmp_path_factory.mktemp("b"))}}
    return Time(monkeypatch)


@pytest.fixture
def polls(monkeypatch):
    """How often each subscriber has polled."""
    found, real = Counter(), polling.poll

    def poll(session, refs=()):
        found["polls"] += 1
        return real(session, refs)

    monkeypatch.setattr(polling, "poll", poll)
    return found


class Pair:
    """Two idle subscribers with the same groups, as in two processes, and who is rung."""

    def __init__(self, still, polls, monkeypatch, mode="ordered"):
        self.still, self.polls, self.rung = still, polls, []
        self.subs = [Sub(handler(mode=mode), name=name) for name in "ab"]
        monkeypatch.setattr(bell, "ring", lambda using, topics: self.rung.append(sorted(topics)))
        self.listenings = [wakeups.Listening(USING, ["t"], lambda: None) for _ in self.subs]
        for sub, listening in zip(self.subs, self.listenings, strict=True):
            sub.settle()
            sub.poller.listen(listening)
            sub.poller._idle_polls = 50
        self.rung.clear()

    def turn(self, sub, seconds=2.0):
        """Let time pass and the subscriber have a turn; return whether it has polled."""
        self.still.move(round(seconds * 1000))
        for one in self.subs:
            one.beat()
        before = self.polls["polls"]
        sub.poller._next_tick = float("inf")
        sub.poller._next_poll = 0.0
        sub.poller.step()
        return self.polls["polls"] > before


@pytest.fixture(params=["ordered", "shared"])
def pair(request, still, polls, monkeypatch):
    found = Pair(still, polls, monkeypatch, request.param)
    yield found
    for listening in found.listenings:
        listening.stop()


def test_what_one_has_not_found_the_other_need_not_look_for(pair):
    one, other = pair.subs
    assert pair.turn(one)
    assert not pair.turn(other, 0.5)
    assert not pair.turn(other, 0.3)
    assert pair.turn(other, 0.5), "the look was too long ago"
    assert not pair.turn(one, 0.5)
    assert pair.rung == []


def test_who_finds_something_rings(pair):
    one, other = pair.subs
    publish("t", 1, key="k")
    pair.rung.clear()
    assert pair.turn(one)
    assert pair.rung == [["t"]]
    assert pair.turn(other, 0.0), "what the first one has found is for the other one, too"


def test_what_is_due_again_is_no_empty_look(pair):
    """Whoever has looked may have no thread for it."""
    one, other = pair.subs
    publish("t", 1, key="k")
    sequence()
    other.step()
    other.work()
    pair.turn(one)
    one.poller._idle_polls = 50
    assert pair.turn(other, 0.0) or pair.subs[0].inbox.waiting(one.poller.groups[0].ref)[0] == 0


def test_whoever_may_be_at_the_wrong_server_tells_nobody_that_it_found_nothing(pair, monkeypatch):
    one, other = pair.subs
    monkeypatch.setattr(one.heart, "good", lambda: False)
    assert pair.turn(one)
    assert pair.turn(other, 0.1)


def test_retries_after_the_next_poll_are_not_put_off(pair):
    one, other = pair.subs
    assert pair.turn(one)
    other.poller.groups[0].memory.skipped.add("k")
    assert pair.turn(other, 0.1)


def test_each_polls_itself_from_time_to_time(pair):
    one, other = pair.subs
    assert pair.turn(other)
    polled = []
    for _ in range(100):
        one.poller._looks.note(bell.Look(time.monotonic(), one.poller._tail, 0))
        polled.append(pair.turn(other, 0.5))
    interval = OWN_POLL * one.settings.lease_renewal_interval
    assert polled.count(True) == 50 // interval
    assert polled.index(True) == pytest.approx(2 * interval, abs=2)


def test_a_time_from_before_the_host_started_does_not_count(pair):
    one, other = pair.subs
    pair.turn(one)
    pair.still.move(-3_000_000)
    assert pair.turn(other, 0.0)


def test_others_with_other_groups_look_themselves(pair):
    other = Sub(handler(group="h"), name="c")
    other.settle()
    listening = wakeups.Listening(USING, ["t"], lambda: None)
    other.poller.listen(listening)
    other.poller._idle_polls = 50
    pair.subs.append(other)
    assert pair.turn(pair.subs[0])
    assert pair.turn(other, 0.1)
    listening.stop()


@pytest.mark.parametrize("has_bell", [True, False])
def test_what_another_process_moves_is_looked_for_soon(pair, monkeypatch, has_bell):
    """It does not ring for those that the publisher has rung."""
    one, _ = pair.subs
    publish("t", 1, key="k")
    busy = sequencing.Sequenced(0, more=False, busy=True)
    monkeypatch.setattr(sequencing, "sequence", lambda using: busy)
    if not has_bell:
        one.poller._listening = None
    pair.turn(one)
    waits = one.poller._next_poll - time.monotonic()
    assert (waits <= 2 * one.poller._ring_pause) == has_bell


def test_who_has_read_less_of_the_log_looks_itself(pair):
    """What another one has found before is not found by its next look."""
    one, other = pair.subs
    assert pair.turn(one)
    assert not pair.turn(other, 0.1)
    publish("t", 1, key="k")
    sequence()
    pair.turn(one)
    one.poller._idle_polls = 50
    pair.turn(one)
    assert one.poller._looks.last().tail == one.poller._tail != other.poller._tail
    assert pair.turn(other, 0.0)
    assert other.poller._tail == one.poller._tail


def test_what_another_one_knows_of_scheduled_messages_is_known(pair):
    one, other = pair.subs
    assert pair.turn(other)
    publish("t", 1, key="k", delay=60)
    assert pair.turn(one)
    assert other.poller.next_deliver_at is None
    assert not pair.turn(other, 0.1)
    assert other.poller.next_deliver_at == one.poller.next_deliver_at is not None


@pytest.mark.parametrize("why", ["reset", "busy", "no bell"])
def test_who_must_look_itself(pair, why):
    one, other = pair.subs
    assert pair.turn(other)
    assert pair.turn(one)
    if why == "reset":
        other.poller._tail = None
    elif why == "busy":
        other.poller._busy_polls = 1
    else:
        other.poller._listening.bell.stop()
        other.poller._listening.bell = None
    assert pair.turn(other, 0.1)


def test_a_lease_that_stays_free_makes_nobody_ring(pair, monkeypatch):
    """Processes would wake each other without end."""
    one, _ = pair.subs
    poll = polling.poll
    monkeypatch.setattr(polling, "poll", lambda *args: poll(*args)._replace(free_leases=True))
    for _ in range(3):
        pair.turn(one)
    assert pair.rung == []


def test_a_mutex_that_stays_taken_is_looked_at_less_and_less_often(pair, monkeypatch):
    one, _ = pair.subs
    publish("t", 1, key="k")
    monkeypatch.setattr(sequencing, "sequence", lambda using: sequencing.Sequenced(0, more=False, busy=True))
    waits = []
    for _ in range(12):
        pair.turn(one)
        waits.append(one.poller._next_poll - time.monotonic())
    assert waits[0] == pytest.approx(one.poller._ring_pause)
    assert waits[-1] > 10 * waits[0]
    assert sorted(waits[:4]) == waits[:4]


def test_without_a_bell_nobody_relies_on_others(still, polls, settings, monkeypatch):
    pair = Pair(still, polls, monkeypatch)
    for sub, listening in zip(pair.subs, pair.listenings, strict=True):
        listening.stop()
        sub.poller._looks = None
    assert pair.turn(pair.subs[0])
    assert pair.turn(pair.subs[1], 0.1)
    assert connection.connection is not None
