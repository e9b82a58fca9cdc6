"""An inbox with deliveries that have no message."""

from __future__ import annotations

import itertools
import types

from tests.support.harness import handler
from tests.support.internals import Action, Batch, Body, Claimed, Held, Inbox, Settlement, lanes
from tests.support.internals import inbox as inbox_module

numbers = itertools.count(1)
BODY = Body("id", b"", "{}", "", 0, 0)


class Queue:
    """An inbox, its handlers by group name and a clock that stands still."""

    def __init__(self, monkeypatch, concurrency=0, **groups):
        self.now = 1000.0
        for module in (inbox_module, lanes):
            monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: self.now))
        self.leases_good = True
        self.handlers = {group: handler(group=group, **options) for group, options in groups.items()}
        refs = [one.ref for one in self.handlers.values()]
        self.inbox = Inbox(refs, leases_good=lambda: self.leases_good, concurrency=concurrency)
        self.wakes = 0
        """How often the event loop was woken."""
        self.inbox.wake_loop = self._wake
        for one in self.handlers.values():
            self.inbox.configure(one, enough=1, priority_share=0)

    def _wake(self):
        self.wakes += 1

    def held(self, group, key="k", *, suspect=False, size=1, slot=None):
        one = self.handlers[group]
        number = next(numbers)
        return Held(Claimed(one.ref, key, number, number, 1, suspect, size, slot=slot), body=BODY, handler=one)

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

    def take_for_loop(self):
        """The batches that start on the event loop."""
        return self.inbox.take_for_loop()[0]

    def end(self, batch, kind=Action.ACK):
        """Ends a batch of the event loop."""
        self.inbox.finish(batch, [Settlement(held.claimed, kind) for held in batch.items])

    def finish(self, held, kind=Action.ACK, **more):
        self.inbox.finish(Batch([], [held]), [Settlement(held.claimed, kind, **more)])

    def outcomes(self, group):
        return [
            (outcome.delivery.offset, outcome.action)
            for outcome in self.inbox.take_settlements(self.handlers[group].ref)
        ]

    def flush_due(self, group, *, enough):
        """Whether a group's settlements are to be flushed, if ``enough`` are flushed at once."""
        self.inbox.configure(self.handlers[group], enough=enough, priority_share=16)
        return self.inbox.flush_due(self.ref(group))

    def ref(self, group):
        return self.handlers[group].ref

    def waiting(self, group):
        return self.inbox.waiting(self.ref(group))


ORDERED = {"mode": "ordered"}
SHARED = {"mode": "shared"}
BLOCK = {"mode": "ordered", "on_failure": "block"}
