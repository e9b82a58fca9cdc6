"""A Hypothesis state machine does anything to an inbox, in any order."""

from __future__ import annotations

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
    Held,
    Inbox,
    Settlement,
    lane,
    priority_of,
    unstarted,
)
from tests.support.internals import inbox as inbox_module

BATCH = {"batch": True, "batch_size": 3}
GROUPS = {"o": ORDERED, "b": BLOCK, "s": SHARED, "ob": {**ORDERED, **BATCH}, "sb": {**SHARED, **BATCH}}
LEASED = ["o", "b", "ob"]
KEYS = ["x", "y", "z", lane("x", 5), lane("y", -5)]
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
        self.memory = unstarted.create()
        with mock.patch.object(unstarted, "ENTRIES", 200):
            notes = unstarted.Unstarted(self.memory)
        refs = [one.ref for one in self.handlers.values()]
        self.inbox = Inbox(refs, leases_good=lambda: self.good, unstarted=notes)
        self.threads = [None, None, None]  # each (batch, True) while it runs, (batch, False) or None
        self.offset = 0
        self.waiting = []
        self.running = []
        self.ended = []  # outcomes not taken
        self.suspect = None  # started, its outcome not written
        self.last_started = {}

    def teardown(self):
        self.patch.stop()
        os.close(self.memory)

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
        """The highest priority, by group, of what may start for a thread that leaves its lane."""
        found = {}
        if self.closed:
            return found
        names = {id(lanes): ref.group for ref, lanes in self.inbox._groups.items()}
        held_lanes = {
            (names[id(lane.group)], lane.key)
            for number, at in enumerate(self.threads)
            if at is not None and number != thread
            for lane in at[0].lanes
            if lane.exclusive
        }
        heads = {}
        for held in self.waiting:
            group, key = held.claimed.ref.group, held.claimed.key
            free = not held.claimed.suspect or self.suspect is None
            is_head = held.handler.shared or heads.setdefault((group, key), held) is held
            may_start = held.handler.shared or (self.good and (group, key) not in held_lanes)
            if free and is_head and may_start:
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
        handler = batch.items[0].handler
        assert 1 <= len(batch.items) <= handler.batch_size
        assert len(batch.items) == 1 or not any(held.alone for held in batch.items)
        assert {held.handler for held in batch.items} == {handler}
        # The groups here give lower priorities no share.
        assert {priority_of(held.claimed.key) for held in batch.items} == {possible[handler.ref.group]}
        assert {lane.key for lane in batch.lanes} == {held.claimed.key for held in batch.items}
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
        waiting_suspects = any(held.claimed.suspect for held in self.waiting)
        assert self.inbox.has_suspect() == (waiting_suspects or self.suspect is not None)

    @invariant()
    def what_waits_is_noted(self):
        waiting = sorted((held.claimed.offset, held.claimed.token) for held in self.waiting)
        noted = sorted(unstarted.read(self.memory))
        assert noted == waiting if len(waiting) <= 200 else set(noted) < set(waiting)


TestAnything = InboxMachine.TestCase
TestAnything.settings = hypothesis_settings(max_examples=150, stateful_step_count=40, deadline=None)
