"""The inbox by itself: whose turn it is, what waits, what is given back. No database, no sleeping."""

import itertools
import random
import threading
import time
import types
from unittest import mock

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from django_mysqlqueue.runtime.handling import inbox as inbox_module
from django_mysqlqueue.runtime.handling import lanes
from django_mysqlqueue.runtime.handling.inbox import FLUSH_DELAY, SLICE, Inbox
from django_mysqlqueue.runtime.handling.lanes import Batch, Held
from django_mysqlqueue.service.deliveries import Action, Claimed, Settlement
from django_mysqlqueue.service.payloads import Body
from tests.support.harness import handler

pytestmark = pytest.mark.any_engine

numbers = itertools.count(1)

BODY = Body("id", b"", "{}", "", 0, 0)


class Queue:
    """An inbox, its handlers by group name and a clock that stands still."""

    def __init__(self, monkeypatch, **groups):
        self.now = 1000.0
        for module in (inbox_module, lanes):
            monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: self.now))
        self.leases_good = True
        self.handlers = {group: handler(group=group, **options) for group, options in groups.items()}
        self.inbox = Inbox([one.ref for one in self.handlers.values()], leases_good=lambda: self.leases_good)

    def held(self, group, key="k", *, suspect=False, size=1):
        one = self.handlers[group]
        number = next(numbers)
        return Held(Claimed(one.ref, key, number, number, 1, suspect, size), body=BODY, handler=one)

    def put(self, group, *keys, **fields):
        """Puts one delivery for each key, in this order."""
        items = [self.held(group, key, **fields) for key in keys]
        self.inbox.put(items)
        return items

    def take(self, lane=None):
        """(lane, delivery) of a thread that comes from ``lane``."""
        batch = self.inbox.take(lane and Batch([lane], []), wait=False)
        return batch and (batch.lanes[0], batch.items[0])

    def take_batch(self):
        batch = self.inbox.take(None, wait=False)
        return [] if batch is None else batch.items

    def take_all(self):
        """What fresh threads get, one after another, nobody finishing."""
        taken = []
        while (found := self.take()) is not None:
            taken.append(found)
        return taken

    def finish(self, held, kind=Action.ACK):
        self.inbox.finish(Batch([], [held]), [Settlement(held.claimed, kind)])

    def outcomes(self, group):
        return [
            (outcome.delivery.offset, outcome.action)
            for outcome in self.inbox.take_settlements(self.handlers[group].ref)
        ]

    def ref(self, group):
        return self.handlers[group].ref

    def waiting(self, group):
        return self.inbox.waiting(self.ref(group))


@pytest.fixture
def queue(monkeypatch):
    return lambda **groups: Queue(monkeypatch, **groups)


ORDERED = {"mode": "ordered"}
SHARED = {"mode": "shared"}
BLOCK = {"mode": "ordered", "on_failure": "block"}

# -- order and lanes ----------------------------------------------------------


def test_one_thread_per_partition(queue):
    one = queue(g=ORDERED)
    first, second, other = one.put("g", "a", "a", "b")
    assert [held for _, held in one.take_all()] == [first, other]
    one.finish(first)
    assert one.take() is None, "the thread is still at the lane: it takes the next itself"
    assert one.waiting("g") == (1, 1)
    del second


def test_the_thread_at_a_partition_goes_on_with_it_in_order(queue):
    one = queue(g=ORDERED)
    items = one.put("g", "a", "b", "a", "a")
    lane, held = one.take()
    assert held is items[0]
    for expected in (items[2], items[3]):
        one.finish(held)
        lane, held = one.take(lane)
        assert held is expected


def test_a_partition_that_fills_again_after_it_was_empty_is_found(queue):
    one = queue(g=ORDERED)
    one.put("g", "a")
    lane, held = one.take()
    one.finish(held)
    assert one.take(lane) is None
    (again,) = one.put("g", "a")
    assert one.take()[1] is again


def test_what_comes_while_a_partition_runs_waits_for_its_thread(queue):
    one = queue(g=ORDERED)
    one.put("g", "a")
    lane, held = one.take()
    (second,) = one.put("g", "a")
    assert one.take() is None
    one.finish(held)
    assert one.take(lane)[1] is second


def test_shared_deliveries_go_to_any_thread_at_once(queue):
    one = queue(g=SHARED)
    items = one.put("g", "a", "a", "a")
    assert [held for _, held in one.take_all()] == items


def test_after_its_slice_a_thread_lets_other_partitions_have_their_turn(queue):
    one = queue(g=ORDERED)
    hot = one.put("g", "hot", "hot", "hot", "hot")
    (calm,) = one.put("g", "calm")
    lane, held = one.take()
    one.now += SLICE / 2
    one.finish(held)
    lane, held = one.take(lane)
    assert held is hot[1]
    one.now += SLICE / 2
    one.finish(held)
    lane, held = one.take(lane)
    assert held is calm
    one.now += SLICE
    one.finish(held)
    assert one.take(lane)[1] is hot[2]


@pytest.mark.parametrize("mode", [ORDERED, SHARED])
def test_groups_have_their_turn_round_robin(queue, mode):
    """A group with a long line does not starve the others."""
    one = queue(a=mode, b=mode, c=mode)
    one.put("a", *(f"k{number}" for number in range(50)))
    one.put("b", "x", "y")
    one.put("c", "z")
    groups = [held.handler.ref.group for _, held in one.take_all()]
    assert groups[:5] == ["a", "b", "c", "a", "b"]
    assert groups[5:] == ["a"] * 48


def test_partitions_of_a_group_have_their_turn_round_robin(queue):
    one = queue(g=ORDERED)
    one.put("g", "a", "a", "a", "b", "b", "c")
    order = []
    lane = None
    while (found := one.take(lane)) is not None:
        lane, held = found
        order.append(held.claimed.key)
        one.now += SLICE
        one.finish(held)
    assert order == ["a", "b", "c", "a", "b", "a"]


# -- leases -------------------------------------------------------------------


def test_doubt_about_leases_holds_ordered_deliveries_but_not_shared_ones(queue):
    one = queue(o=ORDERED, s=SHARED)
    (ordered,) = one.put("o", "a")
    (shared,) = one.put("s", "a")
    one.leases_good = False
    assert [held for _, held in one.take_all()] == [shared]
    one.leases_good = True
    assert one.take()[1] is ordered


def test_doubt_also_stops_the_thread_that_is_at_a_partition(queue):
    one = queue(g=ORDERED)
    _, second = one.put("g", "a", "a")
    lane, held = one.take()
    one.leases_good = False
    one.finish(held)
    assert one.take(lane) is None
    one.leases_good = True
    assert one.take()[1] is second


# -- suspects -----------------------------------------------------------------


def test_one_suspect_at_a_time_beside_normal_ones(queue):
    one = queue(g=ORDERED)
    (first,) = one.put("g", "a", suspect=True)
    (second,) = one.put("g", "b", suspect=True)
    (normal,) = one.put("g", "c")
    assert [held for _, held in one.take_all()] == [first, normal]
    one.finish(first)
    assert one.take() is None, "the first one's outcome is not written yet"
    one.inbox.written(one.inbox.take_settlements(one.ref("g")))
    assert one.take()[1] is second


def test_suspects_count_over_all_groups(queue):
    one = queue(a=ORDERED, b=SHARED)
    (first,) = one.put("a", "x", suspect=True)
    (second,) = one.put("b", "x", suspect=True)
    assert [held for _, held in one.take_all()] == [first]
    one.finish(first)
    one.inbox.written(one.inbox.take_settlements(one.ref("a")))
    assert [held for _, held in one.take_all()] == [second]


def test_other_outcomes_do_not_release_the_suspect(queue):
    one = queue(g=ORDERED)
    normal = one.put("g", "c")[0]
    one.take()
    first = one.put("g", "a", suspect=True)[0]
    one.put("g", "b", suspect=True)
    assert one.take()[1] is first
    one.finish(normal)
    one.inbox.written(one.inbox.take_settlements(one.ref("g")))
    assert one.take() is None


def test_a_waiting_suspect_does_not_hold_up_shared_deliveries_behind_it(queue):
    one = queue(g=SHARED)
    (first,) = one.put("g", "a", suspect=True)
    one.put("g", "b", suspect=True)
    (normal,) = one.put("g", "c")
    assert [held for _, held in one.take_all()] == [first, normal]


def test_a_suspects_outcome_is_to_be_written_at_once(queue):
    one = queue(g=ORDERED)
    (suspect,) = one.put("g", "a", suspect=True)
    one.put("g", "b")
    one.take()
    one.take()
    assert not one.inbox.flush_due(one.ref("g"), enough=100)
    one.finish(suspect)
    assert one.inbox.flush_due(one.ref("g"), enough=100)


# -- block and give back ------------------------------------------------------


@pytest.mark.parametrize("kind", [Action.NACK, Action.SNOOZE])
def test_block_gives_back_what_is_behind(queue, kind):
    one = queue(g=BLOCK)
    head, *behind = one.put("g", "a", "a", "a")
    (other,) = one.put("g", "b")
    lane, held = one.take()
    one.finish(held, kind)
    assert one.outcomes("g") == [(head.claimed.offset, kind), *((b.claimed.offset, Action.RELEASE) for b in behind)]
    assert one.inbox.is_blocked(one.ref("g"), "a")
    assert not one.inbox.is_blocked(one.ref("g"), "b")
    assert one.take(lane)[1] is other
    (later,) = one.put("g", "a")
    assert one.outcomes("g") == [(later.claimed.offset, Action.RELEASE)]
    assert one.waiting("g") == (0, 0)
    one.inbox.unblock(one.ref("g"), "a")
    (again,) = one.put("g", "a")
    assert one.take()[1] is again


@pytest.mark.parametrize("kind", [Action.ACK, Action.REJECT])
def test_block_goes_on_after_the_head_is_settled(queue, kind):
    one = queue(g=BLOCK)
    _, second = one.put("g", "a", "a")
    lane, held = one.take()
    one.finish(held, kind)
    assert one.take(lane)[1] is second


@pytest.mark.parametrize("kind", [Action.ACK, Action.NACK, Action.SNOOZE, Action.REJECT])
def test_skip_goes_on_after_anything(queue, kind):
    one = queue(g=ORDERED)
    _, second = one.put("g", "a", "a")
    lane, held = one.take()
    one.finish(held, kind)
    assert one.take(lane)[1] is second


@pytest.mark.parametrize("group", [ORDERED, BLOCK])
def test_a_head_that_never_started_holds_back_what_is_behind(queue, group):
    """Its first start must come before theirs, whatever on_failure says."""
    one = queue(g=group)
    head, behind = one.put("g", "a", "a")
    lane, held = one.take()
    one.finish(held, Action.RELEASE)
    assert one.outcomes("g") == [(head.claimed.offset, Action.RELEASE), (behind.claimed.offset, Action.RELEASE)]
    assert one.take(lane) is None
    assert one.inbox.is_blocked(one.ref("g"), "a")


@pytest.mark.parametrize("kind", [Action.NACK, Action.RELEASE])
def test_shared_deliveries_are_never_held_back(queue, kind):
    one = queue(g={"mode": "shared", "on_failure": "block"})
    _, second = one.put("g", "a", "a")
    lane, held = one.take()
    one.finish(held, kind)
    assert one.take(lane)[1] is second


@pytest.mark.parametrize(("kind", "blocked"), [(Action.RELEASE, True), (Action.ACK, False)])
def test_a_delivery_that_never_came_in(queue, kind, blocked):
    """Its body could not be read (given back) or is gone (acked)."""
    one = queue(g=ORDERED)
    missing = one.held("g", "a")
    one.inbox.settle(Settlement(missing.claimed, kind), ordered=not missing.handler.shared)
    (behind,) = one.put("g", "a")
    assert one.inbox.is_blocked(one.ref("g"), "a") is blocked
    expected = [(missing.claimed.offset, kind)]
    assert one.outcomes("g") == ([*expected, (behind.claimed.offset, Action.RELEASE)] if blocked else expected)
    assert (one.take() is None) is blocked


def test_release_takes_what_waits_and_leaves_what_runs(queue):
    one = queue(g=ORDERED)
    first, second = one.put("g", "a", "a")
    (other,) = one.put("g", "b")
    lane, _ = one.take()
    one.inbox.release(one.ref("g"), "a")
    assert one.outcomes("g") == [(second.claimed.offset, Action.RELEASE)]
    assert one.inbox.held(one.ref("g")) == [other.claimed, first.claimed]
    one.finish(first)
    assert one.take(lane)[1] is other


# -- drop ---------------------------------------------------------------------


def test_drop_forgets_what_waits_without_an_outcome(queue):
    """The lease is lost: whatever were written would be another's."""
    one = queue(g=ORDERED)
    first, second, third = one.put("g", "a", "a", "a", size=10)
    (other,) = one.put("g", "b")
    one.take()
    assert one.inbox.drop(one.ref("g"), "a") == [second.claimed, third.claimed]
    assert one.outcomes("g") == []
    assert one.waiting("g") == (1, 1)
    assert one.inbox.running() == 1
    one.finish(first)
    assert one.outcomes("g") == [(first.claimed.offset, Action.ACK)]
    assert one.inbox.drop(one.ref("g"), "a") == []
    assert one.inbox.drop(one.ref("g"), "never seen") == []
    assert [held for _, held in one.take_all()] == [other]


def test_forgotten_lanes_leave_nothing_behind(queue):
    one = queue(g=ORDERED)
    for number in range(100):
        (held,) = one.put("g", f"k{number}")
        lane, _ = one.take()
        one.finish(held)
        assert one.take(lane) is None
        one.inbox.forget_lane(one.ref("g"), f"k{number}")
    assert not one.inbox._groups[one.ref("g")].lanes
    assert not one.inbox._groups[one.ref("g")].ready


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_a_lane_in_use_is_not_forgotten(queue, state):
    one = queue(g=BLOCK)
    (held,) = one.put("g", "a")
    if state == "running":
        one.take()
    one.inbox.forget_lane(one.ref("g"), "a")
    if state == "waiting":
        assert one.take()[1] is held
    one.finish(held, Action.NACK)
    assert one.inbox.is_blocked(one.ref("g"), "a")


# -- counters -----------------------------------------------------------------


def test_waiting_counts_messages_and_bytes(queue):
    one = queue(a=ORDERED, b=SHARED)
    one.put("a", "x", "y", size=10)
    one.put("b", "x", size=5)
    assert (one.waiting("a"), one.waiting("b")) == ((2, 20), (1, 5))
    one.take()
    one.take()
    assert (one.waiting("a"), one.waiting("b")) == ((1, 10), (0, 0))
    assert one.inbox.running() == 2


def test_is_idle(queue):
    one = queue(g=ORDERED)
    ref = one.ref("g")
    assert one.inbox.is_idle(ref)
    (held,) = one.put("g", "a")
    assert not one.inbox.is_idle(ref)
    one.take()
    assert not one.inbox.is_idle(ref)
    one.finish(held)
    assert not one.inbox.is_idle(ref)
    one.inbox.take_settlements(ref)
    assert one.inbox.is_idle(ref)


def test_overrun_names_the_delivery_that_runs_too_long(queue):
    one = queue(g={"max_processing_time": 5.0}, h={"max_processing_time": 50.0})
    (short,) = one.put("g", "a")
    one.put("h", "a")
    one.now += 1000
    assert one.inbox.overrun() is None, "what waits does not run"
    one.take_all()
    one.now += 5
    assert one.inbox.overrun() is None
    one.now += 1
    assert one.inbox.overrun() is short
    one.finish(short)
    assert one.inbox.overrun() is None


# -- flushing -----------------------------------------------------------------


def test_outcomes_wait_for_others_but_not_long(queue):
    one = queue(g=ORDERED)
    one.put("g", *"abcd")
    held = [item for _, item in one.take_all()]
    ref = one.ref("g")
    assert not one.inbox.flush_due(ref, enough=1)
    one.finish(held[0])
    assert not one.inbox.flush_due(ref, enough=2)
    one.finish(held[1])
    assert one.inbox.flush_due(ref, enough=2)
    assert not one.inbox.flush_due(ref, enough=3)
    one.now += FLUSH_DELAY
    assert one.inbox.flush_due(ref, enough=3)


def test_the_last_outcome_does_not_wait(queue):
    one = queue(g=ORDERED)
    (held,) = one.put("g", "a")
    one.take()
    one.finish(held)
    assert one.inbox.flush_due(one.ref("g"), enough=100)


def test_outcomes_of_a_failed_flush_come_first_again(queue):
    one = queue(g=ORDERED)
    first, second = (one.put("g", key)[0] for key in "ab")
    one.take_all()
    one.finish(first)
    lost = one.inbox.take_settlements(one.ref("g"))
    one.finish(second)
    one.inbox.put_back_settlements(one.ref("g"), lost)
    assert one.outcomes("g") == [(first.claimed.offset, Action.ACK), (second.claimed.offset, Action.ACK)]
    one.inbox.put_back_settlements(one.ref("g"), lost)
    one.now += FLUSH_DELAY
    assert one.inbox.flush_due(one.ref("g"), enough=100)


# -- closing ------------------------------------------------------------------


def test_close_gives_back_what_waits_and_lets_what_runs_end(queue):
    one = queue(o=ORDERED, s=SHARED)
    running, waiting = one.put("o", "a", "a")
    (shared,) = one.put("s", "a")
    lane, _ = one.take()
    one.inbox.close()
    assert one.outcomes("o") == [(waiting.claimed.offset, Action.RELEASE)]
    assert one.outcomes("s") == [(shared.claimed.offset, Action.RELEASE)]
    assert one.inbox.take(None) is None
    one.finish(running)
    assert one.inbox.take(Batch([lane], [])) is None
    assert one.outcomes("o") == [(running.claimed.offset, Action.ACK)]
    (late,) = one.put("o", "b")
    assert one.outcomes("o") == [(late.claimed.offset, Action.RELEASE)]
    assert one.inbox.is_idle(one.ref("o"))


# -- threads ------------------------------------------------------------------


def in_background(target):
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


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
    assert inbox.wait(60, enough=100) is True
    assert inbox.wait(0, enough=100) is False
    woken = []
    thread = in_background(lambda: woken.append(inbox.wait(60, enough=100)))
    inbox.wake()
    thread.join(10)
    assert woken == [True]


@pytest.mark.parametrize("enough", [1, 100])
def test_an_outcome_ends_the_pollers_sleep(enough):
    one = handler()
    inbox = Inbox([one.ref], leases_good=lambda: True)
    inbox.put(Held(Claimed(one.ref, key, 1, 1, 1, False, 1), BODY, one) for key in "ab")
    batch = inbox.take(None)
    began = time.monotonic()
    thread = in_background(lambda: inbox.wait(60, enough=enough))
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
    assert inbox.wait(60, enough=100) is False
    assert time.monotonic() - began < 5


# -- anything in any order ----------------------------------------------------

BATCH = {"batch": True, "batch_size": 3}
GROUPS = {"o": ORDERED, "b": BLOCK, "s": SHARED, "ob": {**ORDERED, **BATCH}, "sb": {**SHARED, **BATCH}}
LEASED = ["o", "b", "ob"]
KEYS = ["x", "y", "z"]
ENDS = [Action.ACK, Action.NACK, Action.SNOOZE, Action.REJECT, Action.RELEASE, Action.STALE]


class InboxMachine(RuleBasedStateMachine):
    """Three threads and a poller do anything in any order; a naive model says what must hold."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        self.patch = mock.patch.object(inbox_module, "time", clock)
        self.patch.start()
        self.good = True
        self.closed = False
        self.handlers = {group: handler(group=group, **options) for group, options in GROUPS.items()}
        self.inbox = Inbox([one.ref for one in self.handlers.values()], leases_good=lambda: self.good)
        self.threads = [None, None, None]  # each (batch, True) while it runs, (batch, False) or None
        self.offset = 0
        self.waiting = []
        self.running = []
        self.ended = []  # outcomes not taken
        self.suspect = None  # started, its outcome not written
        self.last_started = {}

    def teardown(self):
        self.patch.stop()

    def in_lane(self, group, key):
        return [held for held in self.waiting if held.claimed.ref.group == group and held.claimed.key == key]

    def settle(self, held, kind):
        self.ended.append((held.claimed, kind))

    def release(self, group, key):
        for held in self.in_lane(group, key):
            self.waiting.remove(held)
            self.settle(held, Action.RELEASE)

    @rule(
        group=st.sampled_from(list(GROUPS)),
        batch=st.lists(
            st.tuples(
                st.sampled_from(KEYS),
                st.sampled_from([False, False, False, False, True]),
                st.integers(0, 9),
                st.sampled_from([1, 1, 1, 1, 2]),
            ),
            max_size=6,
        ),
    )
    def put(self, group, batch):
        one = self.handlers[group]
        items = []
        for key, suspect, size, attempt in batch:
            self.offset += 1
            items.append(Held(Claimed(one.ref, key, self.offset, self.offset, attempt, suspect, size), BODY, one))
        blocked = {key: self.inbox.is_blocked(one.ref, key) for key in KEYS}
        self.inbox.put(items)
        for held in items:
            if self.closed or blocked[held.claimed.key]:
                self.settle(held, Action.RELEASE)
            else:
                self.waiting.append(held)

    def startable(self, thread):
        """Whether anything may start for a thread that leaves its lane."""
        if self.closed:
            return False
        held_lanes = {
            (lane.ref.group, lane.key)
            for number, at in enumerate(self.threads)
            if at is not None and number != thread
            for lane in at[0].lanes
            if lane.exclusive
        }
        heads = {}
        for held in self.waiting:
            group, key = held.claimed.ref.group, held.claimed.key
            free = not held.claimed.suspect or self.suspect is None
            if held.handler.shared:
                if free:
                    return True
            elif heads.setdefault((group, key), held) is held and free and self.good and (group, key) not in held_lanes:
                return True
        return False

    @rule(thread=st.integers(0, 2))
    def take(self, thread):
        at = self.threads[thread]
        if at is not None and at[1]:
            return  # it runs
        possible = self.startable(thread)
        batch = self.inbox.take(None if at is None else at[0], wait=False)
        assert (batch is not None) == possible, "a lane was lost, or started what must not"
        self.threads[thread] = None if batch is None else (batch, True)
        if batch is None:
            return
        handler = batch.items[0].handler
        assert 1 <= len(batch.items) <= handler.batch_size
        assert len(batch.items) == 1 or not any(held.alone for held in batch.items)
        assert {held.handler for held in batch.items} == {handler}
        assert {lane.key for lane in batch.lanes} == (
            {None} if handler.shared else {held.claimed.key for held in batch.items}
        )
        before = list(self.running)
        for held in batch.items:
            self.starts(held, before)

    def starts(self, held, running):
        assert held in self.waiting
        group, key = held.claimed.ref.group, held.claimed.key
        if not held.handler.shared:
            assert held is self.in_lane(group, key)[0]
            assert not any((one.claimed.ref.group, one.claimed.key) == (group, key) for one in running)
            assert self.last_started.get((group, key), 0) < held.claimed.offset
            self.last_started[group, key] = held.claimed.offset
            assert self.good
        if held.claimed.suspect:
            assert self.suspect is None
            self.suspect = held.claimed
        assert not self.closed
        self.waiting.remove(held)
        self.running.append(held)

    @rule(thread=st.integers(0, 2), kinds=st.lists(st.sampled_from(ENDS), min_size=3, max_size=3))
    def finish(self, thread, kinds):
        at = self.threads[thread]
        if at is None or not at[1]:
            return
        batch, _ = at
        outcomes = [Settlement(held.claimed, kind) for held, kind in zip(batch.items, kinds, strict=False)]
        self.inbox.finish(batch, outcomes)
        self.threads[thread] = (batch, False)
        for held, outcome in zip(batch.items, outcomes, strict=True):
            self.running.remove(held)
            self.settle(held, outcome.action)
            strict = held.handler.on_failure == "block" and outcome.action in (Action.NACK, Action.SNOOZE)
            if not held.handler.shared and (strict or outcome.action is Action.RELEASE):
                self.release(held.claimed.ref.group, held.claimed.key)
                assert self.inbox.is_blocked(held.claimed.ref, held.claimed.key)

    @rule(group=st.sampled_from(LEASED), key=st.sampled_from(KEYS))
    def drop(self, group, key):
        dropped = self.inbox.drop(self.handlers[group].ref, key)
        expected = self.in_lane(group, key)
        assert dropped == [held.claimed for held in expected]
        for held in expected:
            self.waiting.remove(held)

    @rule(group=st.sampled_from(LEASED), key=st.sampled_from(KEYS))
    def release_lane(self, group, key):
        self.inbox.release(self.handlers[group].ref, key)
        self.release(group, key)

    @rule(group=st.sampled_from(LEASED), key=st.sampled_from(KEYS), forget=st.booleans())
    def unblock(self, group, key, forget):
        ref = self.handlers[group].ref
        self.inbox.unblock(ref, key)
        assert not self.inbox.is_blocked(ref, key)
        if forget:
            self.inbox.forget_lane(ref, key)

    @rule(group=st.sampled_from(list(GROUPS)), fails=st.booleans())
    def flush(self, group, fails):
        ref = self.handlers[group].ref
        outcomes = self.inbox.take_settlements(ref)
        expected = [end for end in self.ended if end[0].ref == ref]
        assert sorted(((one.delivery, one.action) for one in outcomes), key=str) == sorted(expected, key=str)
        if fails:
            self.inbox.put_back_settlements(ref, outcomes)
            return
        self.inbox.written(outcomes)
        self.ended = [end for end in self.ended if end[0].ref != ref]
        if self.suspect is not None and any(one.delivery is self.suspect for one in outcomes):
            self.suspect = None

    @rule()
    def leases_come_and_go(self):
        self.good = not self.good

    @rule(seconds=st.sampled_from([SLICE / 2, SLICE, 1]))
    def time_passes(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.offset > 15)
    @rule(really=st.sampled_from([False, False, False, True]))
    def close(self, really):
        if not really:
            return
        self.inbox.close()
        self.closed = True
        for group in GROUPS:
            for key in KEYS:
                self.release(group, key)

    @invariant()
    def counters_are_right(self):
        for group, one in self.handlers.items():
            waiting = [held.claimed for held in self.waiting if held.handler is one]
            running = [held.claimed for held in self.running if held.handler is one]
            assert self.inbox.waiting(one.ref) == (len(waiting), sum(claimed.size for claimed in waiting))
            assert sorted(self.inbox.held(one.ref), key=id) == sorted(waiting + running, key=id)
            ended = any(claimed.ref.group == group for claimed, _ in self.ended)
            assert self.inbox.is_idle(one.ref) == (not waiting and not running and not ended)
        assert self.inbox.running() == len(self.running)


TestAnything = InboxMachine.TestCase
TestAnything.settings = hypothesis_settings(max_examples=150, stateful_step_count=40, deadline=None)


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
