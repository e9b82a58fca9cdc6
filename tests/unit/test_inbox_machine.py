"""A Hypothesis state machine does anything to an inbox, in any order."""

from __future__ import annotations

import dataclasses
import os
import types
from unittest import mock

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.harness import handler
from tests.support.inbox import BLOCK, BODY, ORDERED, SHARED
from tests.support.internals import (
    LOWEST_PRIORITY,
    SLICE,
    Action,
    Claimed,
    Handler,
    Held,
    Inbox,
    Settlement,
    lane,
    lanes,
    priority_of,
    unstarted,
)
from tests.support.internals import inbox as inbox_module

BATCH = {"batch": True, "batch_size": 3}
ASYNC = {"is_async": True}
GROUPS = {
    "o": ORDERED,
    "b": BLOCK,
    "s": SHARED,
    "ob": {**ORDERED, **BATCH},
    "sb": {**SHARED, **BATCH},
    "ao": {**ORDERED, **ASYNC},
    "ab": {**BLOCK, **ASYNC, "concurrency": 2},
    "as": {**SHARED, **ASYNC},
    "asb": {**SHARED, **BATCH, **ASYNC, "concurrency": 1},
    "m": SHARED,
}
MIXED = "m"
"""Some of its deliveries are for threads, and some for the event loop."""
CONCURRENCY = 2
LEASED = ["o", "b", "ob", "ao", "ab"]
KEYS = ["x", "y", "z", lane("x", 5), lane("y", -5)]
ENDS = [Action.ACK, Action.NACK, Action.SNOOZE, Action.REJECT, Action.RELEASE, Action.STALE]


@dataclasses.dataclass(frozen=True, slots=True)
class Mixed(Handler):
    """As the handler of jobs: whether a call is a coroutine is noted with its delivery."""

    @property
    def may_be_async(self):
        return True

    def is_on_loop(self, state):
        return state


def mixed(one):
    return Mixed(**{field.name: getattr(one, field.name) for field in dataclasses.fields(one)})


class InboxMachine(RuleBasedStateMachine):
    """Three threads, an event loop and a poller do anything in any order; a naive model says what must hold."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        self.patch = mock.patch.object(inbox_module, "time", clock)
        self.patch.start()
        self.good = True
        self.closed = False
        self.handlers = {group: handler(group=group, **options) for group, options in GROUPS.items()}
        self.handlers[MIXED] = mixed(self.handlers[MIXED])
        self.memory = unstarted.create()
        with mock.patch.object(unstarted, "ENTRIES", 200):
            notes = unstarted.Unstarted(self.memory)
        refs = [one.ref for one in self.handlers.values()]
        self.inbox = Inbox(refs, leases_good=lambda: self.good, threads=3, concurrency=CONCURRENCY, unstarted=notes)
        for one in self.handlers.values():
            self.inbox.configure(one, enough=1, priority_share=0)
        self.inbox.wake_loop = self.wake
        self.is_woken = False
        self.is_excused = False  # what may start on the loop may since something of which nothing tells
        self.threads = [None, None, None]  # each (batch, True) while it runs, (batch, False) or None
        self.calls = []  # the batches that run on the loop
        self.offset = 0
        self.waiting = []
        self.running = []
        self.ended = []  # outcomes not taken
        self.suspect = None  # started, its outcome not written
        self.last_started = {}

    def teardown(self):
        self.patch.stop()
        os.close(self.memory)

    def wake(self):
        assert not self.is_woken, "the loop is woken once for all that it finds"
        self.is_woken = True

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
                st.booleans(),
            ),
            max_size=6,
        ),
    )
    def put(self, group, batch):
        one = self.handlers[group]
        items = []
        for key, suspect, size, attempt, on_loop in batch:
            self.offset += 1
            claimed = Claimed(one.ref, key, self.offset, self.offset, attempt, suspect, size)
            items.append(Held(claimed, BODY, one, state=on_loop))
        blocked = {key: self.inbox.is_blocked(one.ref, key) for key in KEYS}
        self.inbox.put(items)
        for held in items:
            if self.closed or blocked[held.claimed.key]:
                self.settle(held, Action.RELEASE)
            else:
                self.waiting.append(held)

    def places(self, group):
        """How many calls of a group may start on the loop."""
        own = self.handlers[group].concurrency
        of = [batch.items[0].claimed.ref.group for batch in self.calls]
        if own is not None:
            return own - of.count(group)
        return CONCURRENCY - sum(self.handlers[name].concurrency is None for name in of)

    def startable(self, thread=None):
        """The highest priority, by group, of what may start for a thread that leaves its lane; for the loop if None."""
        found = {}
        if self.closed:
            return found
        names = {id(lanes): ref.group for ref, lanes in self.inbox._groups.items()}
        busy = [at[0] for number, at in enumerate(self.threads) if at is not None and number != thread] + self.calls
        held_lanes = {(names[id(lane.group)], lane.key) for batch in busy for lane in batch.lanes if lane.exclusive}
        heads = {}
        for held in self.waiting:
            group, key = held.claimed.ref.group, held.claimed.key
            free = not held.claimed.suspect or self.suspect is None
            is_head = held.handler.shared or heads.setdefault((group, key), held) is held
            may_start = held.handler.shared or (self.good and (group, key) not in held_lanes)
            is_here = held.handler.is_on_loop(held.state) == (thread is None)
            has_place = thread is not None or self.places(group) > 0
            if free and is_head and may_start and is_here and has_place:
                found[group] = max(found.get(group, LOWEST_PRIORITY), priority_of(key))
        return found

    @rule(thread=st.integers(0, 2))
    def take(self, thread):
        at = self.threads[thread]
        if at is not None and at[1]:
            return  # it runs
        possible = self.startable(thread)
        batch = self.inbox.take(None if at is None else at[0], wait=False)
        assert (batch is not None) == bool(possible), "a lane was lost, or started what must not"
        self.threads[thread] = None if batch is None else (batch, True)
        if batch is None:
            return
        self.begins(batch, possible)

    @rule()
    def take_for_loop(self):
        self.is_woken = self.is_excused = False
        batches, again = self.inbox.take_for_loop()
        for batch in batches:
            self.begins(batch, self.startable())
            self.calls.append(batch)
            assert batch.items[0].on_loop
        assert not self.startable(), "a lane was lost"
        waits = any(held.handler.is_on_loop(held.state) for held in self.waiting)
        assert (again is not None) == waits

    def begins(self, batch, possible):
        """A batch starts, of those that are possible, by group with their priority."""
        handler = batch.items[0].handler
        assert 1 <= len(batch.items) <= handler.batch_size
        assert len(batch.items) == 1 or not any(held.alone for held in batch.items)
        assert {held.handler for held in batch.items} == {handler}
        # The groups here give lower priorities no share.
        assert {priority_of(held.claimed.key) for held in batch.items} == {possible[handler.ref.group]}
        assert {lane.key.removeprefix(lanes.ASYNC) for lane in batch.lanes} == {
            held.claimed.key for held in batch.items
        }
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
        self.ends(batch, kinds)
        self.threads[thread] = (batch, False)

    @precondition(lambda self: self.calls)
    @rule(place=st.integers(0, 10), kinds=st.lists(st.sampled_from(ENDS), min_size=3, max_size=3))
    def finish_on_loop(self, place, kinds):
        self.ends(self.calls.pop(place % len(self.calls)), kinds)

    def ends(self, batch, kinds):
        outcomes = [Settlement(held.claimed, kind) for held, kind in zip(batch.items, kinds, strict=False)]
        self.inbox.finish(batch, outcomes)
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
        before = self.startable()
        self.good = not self.good
        self.is_excused |= not before

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
            waiting = [held.claimed for held in self.waiting if held.claimed.ref == one.ref]
            running = [held.claimed for held in self.running if held.claimed.ref == one.ref]
            assert self.inbox.waiting(one.ref) == (len(waiting), sum(claimed.size for claimed in waiting))
            assert sorted(self.inbox.held(one.ref), key=id) == sorted(waiting + running, key=id)
            ended = any(claimed.ref.group == group for claimed, _ in self.ended)
            assert self.inbox.is_idle(one.ref) == (not waiting and not running and not ended)
        assert self.inbox.running() == len(self.running)
        waiting_suspects = any(held.claimed.suspect for held in self.waiting)
        assert self.inbox.has_suspect() == (waiting_suspects or self.suspect is not None)

    @rule(group=st.sampled_from(["ao", "ab", "as", "asb", "m"]), concurrency=st.sampled_from([None, 1, 2, 3]))
    def configure(self, group, concurrency):
        """Calls that run count from now on for another limit."""
        before = self.startable()
        self.handlers[group] = after = dataclasses.replace(self.handlers[group], concurrency=concurrency)
        self.inbox.configure(after, enough=1, priority_share=0)
        self.is_excused |= not before

    @invariant()
    def the_loop_is_woken(self):
        assert not self.startable() or self.is_woken or self.is_excused, "what may start waits for a timer"

    @invariant()
    def free_calls_are_right(self):
        for group, one in self.handlers.items():
            busy = sum(at is not None and at[1] for at in self.threads)
            free = [] if one.is_async else [3 - busy]
            if one.is_async or (group == MIXED and self.inbox._groups[one.ref].levels[True]):
                free.append(max(0, self.places(group)))
            assert self.inbox.free_calls(one.ref) == free

    @invariant()
    def what_waits_is_noted(self):
        waiting = sorted((held.claimed.offset, held.claimed.token) for held in self.waiting)
        noted = sorted(unstarted.read(self.memory))
        assert noted == waiting if len(waiting) <= 200 else set(noted) < set(waiting)


TestAnything = InboxMachine.TestCase
TestAnything.settings = hypothesis_settings(max_examples=150, stateful_step_count=40, deadline=None)
