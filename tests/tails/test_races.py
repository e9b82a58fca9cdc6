"""Races of followers: with the hub, with the garbage collector, with their own ``close()``, with the log's end."""

from __future__ import annotations

import gc
import threading

import pytest

from django_mysqlqueue import publish
from django_mysqlqueue.models import QueueMessage, Sequencer
from django_mysqlqueue.tails import Gap, following, reading, tail
from django_mysqlqueue.tails.reading import Page
from tests.support.harness import USING, Sub, handler, sequence
from tests.tails.conftest import POLL
from tests.tails.test_following import WAIT, collect, send, take, until


def in_the_hub() -> bool:
    return threading.current_thread().name.startswith("mysqlqueue-tails-")


# -- pages without anything --------------------------------------------------------


def test_pages_in_which_nothing_matches_do_not_stall_a_follower(db, monkeypatch):
    monkeypatch.setattr(reading.read_topic, "__defaults__", (reading.PageLimits(messages=5),))
    limits = (reading.PageLimits(messages=5), 1000, 8_388_608, 0.05)
    monkeypatch.setattr(following.HubLimits.__init__, "__defaults__", limits)
    send(*range(40), metadata={"n": 1})
    publish("t", "wanted", key="k", metadata={"n": 2})
    sequence()
    with tail("t", offset=0, follow=True, where={"n": [2]}) as follower:
        assert take(follower, 1) == ["wanted"]


def test_walks_in_which_nothing_is_of_the_topic_do_not_stall_a_follower(db, monkeypatch):
    limits = (reading.PageLimits(messages=4, partitions=0, walked=7), 1000, 8_388_608, 0.05)
    monkeypatch.setattr(following.HubLimits.__init__, "__defaults__", limits)
    send(*range(30), topic="other")
    send("wanted")
    with tail("t", offset=0, follow=True) as follower:
        assert take(follower, 1) == ["wanted"]


# -- positions -------------------------------------------------------------------


@pytest.mark.parametrize("follow", [False, True])
def test_the_position_at_the_limit_is_that_of_the_last_message(db, follow):
    send(*range(10))
    with tail("t", offset=0, limit=3, follow=follow) as reader:
        found = list(reader)
    assert reader.position == found[-1].offset


@pytest.mark.parametrize("follow", [False, True])
def test_the_position_after_a_break_is_that_of_the_last_message(db, follow):
    send(*range(10))
    with tail("t", offset=0, follow=follow) as reader:
        first = next(reader)
    assert reader.position == first.offset


def test_who_continues_from_the_position_misses_nothing(db):
    send(*range(3))
    reader = tail("t", offset=0)
    send(3, 4)
    found = [one.payload for one in reader]
    rest = [one.payload for one in tail("t", offset=reader.position + 1)]
    assert found + rest == [0, 1, 2, 3, 4]


def test_the_newest_end_where_the_log_ended(db, monkeypatch):
    """Not above a message in a partition that was not there when the partitions were read."""
    send(1, 2)
    real = reading.partitions_of

    def appended_then(*args):
        found = real(*args)
        publish("t", "new", key="new")
        publish("t", "known", key="k")
        sequence()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(reading, "partitions_of", appended_then)
        reader = tail("t")
        found = [one.payload for one in reader]
    rest = [one.payload for one in tail("t", offset=reader.position + 1)]
    assert found + rest == [1, 2, "new", "known"]


# -- leaving -----------------------------------------------------------------------


def test_a_close_between_any_two_steps_of_waiting_ends_it(db):
    follower = tail("t", follow=True)
    real, closed = follower._woken.clear, []

    def clear():
        if not closed:
            closed.append(threading.Thread(target=follower.close))
            closed[0].start()
            closed[0].join()
        real()

    follower._woken.clear = clear
    waiting = threading.Thread(target=lambda: list(follower), daemon=True)
    waiting.start()
    waiting.join(WAIT)
    assert not waiting.is_alive()


def test_the_collector_may_close_a_forgotten_tail_in_the_hubs_thread(db, monkeypatch):
    gc.disable()
    try:
        real = following._Window.extend

        def extend(self, *args):
            found = real(self, *args)
            gc.collect()  # as an allocation may do here, under the lock
            return found

        with tail("t", follow=True) as keep:
            assert not keep.wait(3 * POLL)
            lost = tail("other", follow=True)
            cycle = [lost]
            cycle.append(cycle)
            del lost, cycle
            monkeypatch.setattr(following._Window, "extend", extend)
            send(1)
            assert take(keep, 1) == [1]
    finally:
        gc.enable()


def test_a_thread_that_cannot_start_is_an_error_and_the_next_one_is_tried(db, monkeypatch):
    real = threading.Thread.start

    def start(self):
        if self.name.startswith("mysqlqueue-tails-"):
            raise RuntimeError("can't start new thread")
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="can't start"):
            tail("t", follow=True)
    with tail("t", follow=True) as follower:
        send(1)
        assert take(follower, 1) == [1]


# -- the log's end ------------------------------------------------------------------


@pytest.mark.promise("Tails")
def test_a_gap_above_the_position_of_one_who_is_ahead_of_the_hub(db, settings, monkeypatch):
    """It joined while the hub could not read, and GC has deleted what came after."""
    begun, ready, held = threading.Event(), threading.Event(), threading.Event()
    real = following.log.end_of_log

    def late(session):
        if held.is_set() and in_the_hub():
            begun.set()
            assert ready.wait(WAIT)
        return real(session)

    monkeypatch.setattr(following.log, "end_of_log", late)
    with tail("t", follow=True) as first:
        assert not first.wait(3 * POLL)
        held.set()
        assert begun.wait(WAIT)
        send(1)
        with tail("t", follow=True) as second:
            start = second.position
            send(2, 3)
            last = QueueMessage.objects.latest("offset").offset
            collect(settings)
            send(4)
            held.clear()
            ready.set()
            assert take(second, 2) == [Gap("t", start, last), 4]


def test_a_gap_above_the_hubs_position_is_taken_once(db, monkeypatch):
    """GC may have deleted more than the hub has read: until it gets there, a follower waits and does not spin."""
    hub = following.Hub(USING)
    monkeypatch.setattr(hub, "_run", lambda: None)
    follower = hub.join("t", None, 10, lambda: None, end=5)
    window = hub._windows["t"]
    assert window.extend(5, Page([], 6, 20), following.HubLimits())
    hub._position = 6
    assert hub.take(follower) == [Gap("t", 10, 20)]
    assert hub.take(follower) is None


def test_a_page_of_a_log_that_has_lost_its_end_is_read_again(db):
    send(*range(10))
    with tail("t", offset=0, follow=True) as reader:
        assert not reader._take()
        follower = reader._follower
        until(lambda: follower.page is not None)
        first = QueueMessage.objects.earliest("offset").offset
        QueueMessage.objects.filter(offset__gt=first).delete()
        Sequencer.objects.update(last_offset=first)
        until(lambda: follower.page is None)
        QueueMessage.objects.create(
            offset=first + 1, topic="t", partition_key="k", message_id="i", payload=b"99", created_at=1, published_at=1
        )
        assert take(reader, 2) == [0, 99]


def test_one_that_joins_while_the_hub_begins_gets_nothing_from_before(db, monkeypatch):
    real, joined, begun = following.log.end_of_log, [], []

    def end(session):
        found = real(session)
        if in_the_hub() and not begun:
            begun.append(True)
            send("before")
            joined.append(tail("t", follow=True))
        return found

    send(0)
    monkeypatch.setattr(following.log, "end_of_log", end)
    with tail("other", offset=0, follow=True):
        until(lambda: joined)
        send("after")
        assert take(joined[0], 1) == ["after"]
        joined[0].close()


@pytest.mark.promise("Tails")
def test_a_message_that_gc_deletes_before_the_hub_reads_is_in_a_gap_even_if_it_was_seen_before(
    db, settings, monkeypatch
):
    """What GC has deleted is read after the messages, not before."""
    walk, done = reading.log_places.walk, []
    with tail("t", follow=True) as follower:
        assert not follower.wait(3 * POLL)
        before = follower.position

        def first_delete(session, start, length, *, newer):
            if in_the_hub() and not done:
                done.append(True)
                collect(settings)
            return walk(session, start, length, newer=newer)

        monkeypatch.setattr(reading.log_places, "walk", first_delete)
        send(1)
        assert take(follower, 1) == [Gap("t", before, Sequencer.objects.get().last_offset)]


@pytest.mark.promise("Tails")
def test_what_gc_has_deleted_is_read_after_the_contents(db, settings, monkeypatch):
    """A message that is deleted between the search for offsets and the read of the contents is in a gap, too."""
    real, done = reading.payloads.read, []

    def delete_first(using, offsets):
        if in_the_hub() and not done:
            done.append(True)
            collect(settings)
        return real(using, offsets)

    with tail("t", follow=True) as follower:
        assert not follower.wait(3 * POLL)
        before = follower.position
        monkeypatch.setattr(reading.payloads, "read", delete_first)
        send(1)
        assert take(follower, 1) == [Gap("t", before, Sequencer.objects.get().last_offset)]


def test_one_that_is_ahead_of_the_hub_gets_nothing_from_before_its_offset(db, monkeypatch):
    held, begun, ready = threading.Event(), threading.Event(), threading.Event()
    real = following.log.end_of_log

    def late(session):
        if held.is_set() and in_the_hub():
            begun.set()
            assert ready.wait(WAIT)
        return real(session)

    monkeypatch.setattr(following.log, "end_of_log", late)
    with tail("t", follow=True) as first:
        assert not first.wait(3 * POLL)
        held.set()
        assert begun.wait(WAIT)
        send(1, 2, 3)
        second = tail("t", follow=True)
        assert not second._take()
        held.clear()
        ready.set()
        send(4)
        assert take(first, 4) == [1, 2, 3, 4]
        assert take(second, 1) == [4]
        second.close()


# -- messages ----------------------------------------------------------------------


def test_what_one_reader_changes_others_do_not_see(db):
    with tail("t", follow=True) as one, tail("t", follow=True, where={"n": [1]}) as other:
        send({"x": 1}, metadata={"n": 1})
        assert one.wait(WAIT)
        message = next(one)
        message.payload.pop("x")
        message.metadata.pop("n")
        assert take(other, 1) == [{"x": 1}]


def test_a_key_finds_dead_letters_of_a_topic_whose_keys_are_hashed(db, settings):
    settings.MYSQLQUEUE |= {"TOPICS": {"t": {"PARTITIONS": 2}}}
    publish("t", "x", key="4711")
    sequence()
    sub = Sub(handler(function=lambda delivery: delivery.reject("wrong"))).step()
    sub.work()
    sub.flush()
    sequence()
    assert [one.key for one in tail("t_dlq", key="4711")] == ["4711"]
