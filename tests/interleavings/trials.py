"""A set of operations from one start: run under a schedule, judged, and drained."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from django.core.management import CommandError

from django_mysqlqueue.exceptions import OperationRefused, StaleDelivery, SubscriberError
from django_mysqlqueue.operations import dropping, pausing, seeking
from django_mysqlqueue.operations.limits import LIMITS
from django_mysqlqueue.operations.seeking import Position
from tests.conftest import Clock, empty
from tests.crash.crashes import DLQ
from tests.crash.worlds import OTHER, G
from tests.interleavings import filters, pictures, results, schedules
from tests.interleavings import steps as statements
from tests.interleavings.engine import Director, Engine, Run
from tests.interleavings.operations import Actor, Operation
from tests.interleavings.pictures import Names, Picture
from tests.interleavings.steps import APPENDED_FOR_ALL, COMMITTED, READ, Access
from tests.interleavings.worlds import LEASE_MS, WORLDS
from tests.support import draining, invariants, refusing
from tests.support.harness import USING, Sub, handler
from tests.support.internals import GroupRef, retention
from tests.support.snapshots import Snapshot
from tests.support.tables import Group, Tables

STEPS: tuple[tuple[object, str], ...] = (
    (LIMITS, "rows"),
    (LIMITS, "dead_letters"),
    (retention.STEP, "rows"),
    (retention.STEP, "partitions"),
)
"""How much one transaction of an operation of several does."""
REFUSALS = (CommandError, OperationRefused, SubscriberError, StaleDelivery)
"""What an operation may raise when another one was faster."""
HANDLERS_WAIT = 2 * LEASE_MS // 1000
"""Seconds later healthy subscribers handle the rest: every lease and visibility timeout is over."""


@dataclass(frozen=True)
class Pair:
    """Operations that run at once, and from where. (A few are three.)"""

    world: str
    operations: tuple[Operation, ...]
    once: bool = False
    """Nobody is lost, so no handler is called twice."""
    gates: tuple[tuple[str, str, str], ...] = ()
    """(thread, other, label): it begins when the other stands at that label."""
    undone: str = ""
    """A thread of whose claim nothing may be left in the end."""
    by_ones: bool = False
    """What is done in chunks is done in chunks of one."""

    def bound(self, wanted: int) -> int:
        """Maximum number of preemptions of its schedules: of three operations or many small transactions, one."""
        return min(wanted, 1) if self.by_ones or len(self.operations) > 2 else wanted

    @property
    def name(self) -> str:
        by_ones = ", by ones" if self.by_ones else ""
        return f"{self.world}{by_ones}: " + " x ".join(one.name for one in self.operations)


@dataclass
class Verdict:
    """What a schedule came to."""

    run: Run
    name: str
    outcome: Picture
    text: str
    """The outcome as one line."""
    broken: list[str]
    after: Tables
    names: Names
    handled: Counter[str]
    """Messages that handlers were called with."""

    @property
    def is_serial(self) -> bool:
        """One operation after the other."""
        return not self.run.preemptions and not self.run.waits

    @cached_property
    def is_between(self) -> bool:
        """Conflict-serializable: it is as if each transaction had run alone, in some order."""
        before: dict[tuple[str, int], set[tuple[str, int]]] = {}
        done: list[tuple[tuple[str, int], Access]] = []
        numbers: Counter[str] = Counter()
        for step in self.run.steps:
            own = step.thread, numbers[step.thread]
            earlier = before.setdefault(own, set())
            earlier.update(
                other for other, access in done if other != own and statements.meets(step.access, access.items())
            )
            if numbers[step.thread]:
                earlier.add((step.thread, numbers[step.thread] - 1))
            done.append((own, step.access))
            numbers[step.thread] += step.releases
        # Takes away transactions that nothing is before, until there are none left, or those left go in a circle.
        while free := [one for one, earlier in before.items() if not earlier]:
            for one in free:
                del before[one]
            for earlier in before.values():
                earlier.difference_update(free)
        return not before

    @property
    def read_before(self) -> bool:
        """A transaction read, without a lock, what another one committed before the first one went on."""
        read: dict[str, set[str]] = {thread: set() for thread in self.run.results}
        """By thread: tables that its open transaction has read."""
        changed = set[str]()
        """Threads whose open transaction has read a table that has changed since."""
        for step in self.run.steps:
            if step.thread in changed:
                return True
            for thread, tables in read.items():
                if thread != step.thread and any(
                    table in tables and kind in (COMMITTED, APPENDED_FOR_ALL) for table, kind in step.access.items()
                ):
                    changed.add(thread)
            read[step.thread] |= {table for table, kind in step.access.items() if kind == READ}
            if step.releases:
                read[step.thread] = set()
                changed.discard(step.thread)
        return False

    @property
    def passed_over(self) -> bool:
        """A statement that skips locked rows was run while another transaction had locked some of its table.

        A procedure has such statements.
        """
        locked: dict[str, Access] = {}
        for step in self.run.steps:
            others = [access for thread, access in locked.items() if thread != step.thread]
            skips = "-skip:" in step.label or step.label.startswith("call:")
            if skips and any(statements.meets(step.access, access.items()) for access in others):
                return True
            held = {} if step.releases else statements.union(locked.get(step.thread, {}), statements.locks(step.access))
            locked[step.thread] = held
        return False


YOUNG = 15.0
"""Seconds for which a world is put back. Later, what is due in a minute there would soon be due now."""


class Beginning:
    """A world, put back for every schedule."""

    def __init__(self, world: str) -> None:
        self.world = world
        empty()
        self.start = WORLDS[world]()
        self.snapshot = Snapshot()
        self.tables = Tables.read(USING)
        self.names = Names(self.tables)
        self.broken = invariants.at_any_moment(self.tables)
        self.drained: dict[str, list[str]] = {}
        """Tables, as one line → what was wrong when they were drained."""
        self.begun_at = time.perf_counter()

    @property
    def is_young(self) -> bool:
        return time.perf_counter() - self.begun_at < YOUNG


class Trial:
    """Runs a pair's operations under one schedule after another, each from the same start.

    It begins with another trial's beginning if that is of the same world and young.
    """

    def __init__(self, pair: Pair, engine: Engine, beginning: Beginning | None = None) -> None:
        self.pair, self._engine = pair, engine
        self.threads = "ABC"[: len(pair.operations)]
        is_of_use = beginning is not None and beginning.world == pair.world and beginning.is_young
        self._begin(beginning if is_of_use else None)
        self.spent: Counter[str] = Counter()
        """Seconds, by what they were spent on."""

    def _begin(self, beginning: Beginning | None = None) -> None:
        self.beginning = beginning = beginning or Beginning(self.pair.world)
        assert not beginning.broken, beginning.broken
        self._start, self._snapshot, self._drained = beginning.start, beginning.snapshot, beginning.drained
        self.before, self._names = beginning.tables, beginning.names
        self._changed: set[str] | None = None

    def run(self, director: Director) -> Verdict:
        times = [time.perf_counter()]
        if self.beginning.is_young:
            self._snapshot.restore(self._changed)
        else:
            self._begin()
        self._changed = None
        times.append(time.perf_counter())
        tokens = {one.token: "held" for one in self._start.held.values()}
        actors = [Actor(name, self._start, self._names.offsets(), tokens) for name in self.threads]
        jobs: dict[str, Callable[[], Any]] = {}
        for actor, operation in zip(actors, self.pair.operations, strict=True):
            actor.others = [other for other in actors if other is not actor]
            if operation.prepare is not None:
                operation.prepare(actor)
            jobs[actor.name] = lambda operation=operation, actor=actor: operation.run(actor)
        prepared = any(operation.prepare is not None for operation in self.pair.operations)
        gates = {thread: (other, label) for thread, other, label in self.pair.gates}
        with contextlib.ExitStack() as stack:
            if self.pair.by_ones:
                stack.enter_context(_by_ones())
            run = self._engine.execute(jobs, director, gates)
        self._changed = None if prepared else run.written
        times.append(time.perf_counter())
        after = Tables.read(USING, changed=None if prepared else run.written, before=self.before)
        names = Names(after, self._names)
        outcome: Picture = {
            "results": {
                thread: results.result(value, names)
                if (raised := run.errors[thread]) is None
                else results.error(raised, names)
                for thread, value in run.results.items()
            },
            **pictures.picture(after, names, tokens),
        }
        handled = Counter(name for actor in actors for name in actor.done)
        verdict = Verdict(run, schedules.name(run), outcome, pictures.text(outcome), [], after, names, handled)
        verdict.broken = self._judge(verdict, tokens)
        times.append(time.perf_counter())
        for what, began, ended in zip(("restore", "execute", "judge"), times, times[1:], strict=False):
            self.spent[what] += ended - began
        return verdict

    def _may_be_deleted(self, after: Tables) -> tuple[str, ...]:
        """Messages that an operation may delete before they are settled: those of jobs if their results have ended."""
        debounced = (*self._start.debounced, *(("b7",) if self._start.debounced else ()))
        debounced += tuple(name for one in self.pair.operations for name in sorted(one.erases))
        if not any(one.deletes for one in self.pair.operations):
            return debounced
        waiting = (one for one in self.before.outbox if one.original_id)
        of_jobs = [one.id for one in waiting if after.results.get(one.original_id) == "FAILED"]
        return ("s1", "s2", *debounced, *of_jobs)

    # -- what must hold ---------------------------------------------------------------

    def _judge(self, verdict: Verdict, tokens: dict[int, str]) -> list[str]:
        operations, run, after = self.pair.operations, verdict.run, verdict.after
        is_interrupted = G in self.before.groups and bool(self.before.groups[G].after_seek)
        forgets = {G} if is_interrupted or any(one.forgets for one in operations) else set()
        broken = invariants.at_any_moment(after, passed=self._may_be_passed(after))
        broken += invariants.between(
            self.before,
            after,
            forgets=forgets,
            deletes=self._may_be_deleted(after),
            untouched=() if any(one.touches_all for one in operations) else (OTHER,),
            passed=self._may_be_passed(self.before),
        )
        broken += self._settled_by_nobody(verdict)
        broken += filters.claimed_under_another(operations, self._start, run)
        broken += filters.debounced_by_mistake(operations, self._start, after)
        broken += filters.two_at_a_time(self._start, after, verdict.names)
        if not forgets:
            broken += filters.passed_by_mistake(
                operations, self._start, self.before, after, verdict.names, verdict.handled
            )
            if not any("*" in one.settles for one in operations):
                broken += filters.given_up_for_nothing(
                    self._start, self.before, after, verdict.names, {*verdict.handled, *self._settled_by(operations)}
                )
        broken += _counts(self.before, after)
        for thread, raised in run.errors.items():
            if raised is not None and not isinstance(raised, REFUSALS):
                broken.append(f"{thread} raised {raised!r}")
        if self.pair.undone:
            broken += [
                f"{verdict.names.at(offset)} was undone and is still held"
                for (_, _, offset), row in after.state.items()
                if not row.acked and tokens.get(row.delivery_token, "").startswith(self.pair.undone)
            ]
        if self.pair.once:
            broken += [f"{name} was handled {count} times" for name, count in verdict.handled.items() if count > 1]
        if run.livelock:
            broken.append("they went on and on")
        return [pictures.named(one, verdict.names) for one in broken]

    @staticmethod
    def _settled_by(operations: Collection[Operation]) -> frozenset[str]:
        """Messages that operations settle without calling a handler."""
        return frozenset().union(*(one.settles for one in operations))

    def _settled_by_nobody(self, verdict: Verdict) -> list[str]:
        operations = self.pair.operations
        may = self._settled_by(operations)
        if "*" in may or any(one.skips for one in operations):
            return []
        if G in self.before.groups and invariants.is_being_dropped(self.before, G):
            return []  # its state rows are gone already
        may |= {*verdict.handled, *self._start.used_up}
        passed = self._may_be_passed(verdict.after)
        new = invariants.settled(verdict.after) - invariants.settled(self.before)
        return [
            f"{name} was settled, and nobody has handled it"
            for ref, offset in new
            if ref == G and (name := verdict.names.at(offset)) not in may and (ref, offset) not in passed
        ]

    def _may_be_passed(self, tables: Tables) -> Collection[tuple[GroupRef, int]]:
        """What one of the group's filters does not match."""
        return invariants.unmatched(tables, {G: self._start.filters})

    # -- what follows -----------------------------------------------------------------

    def drain(self, verdict: Verdict) -> list[str]:
        """Healthy subscribers of all groups handle the rest: what is wrong with that."""
        tables = pictures.text({name: rows for name, rows in verdict.outcome.items() if name != "results"})
        tables += str([ref for ref, group in verdict.after.groups.items() if self._has_died(ref, group)])
        tables += str(verdict.after.superseding)
        if tables not in self._drained:  # the same rows come to the same end
            began = time.perf_counter()
            self._changed = None
            self._drained[tables] = [f"drained: {pictures.named(one, verdict.names)}" for one in self._drain(verdict)]
            self.spent["drain"] += time.perf_counter() - began
        return self._drained[tables]

    def _has_died(self, ref: GroupRef, group: Group) -> bool:
        """The process of the seek or drop that is under way: it was, before the operations began."""
        return bool(group.operation) and group.operation == self.before.groups[ref].operation

    def _drain(self, verdict: Verdict) -> list[str]:
        after = verdict.after
        for ref, group in after.groups.items():
            if group.after_seek:
                if not self._has_died(ref, group):
                    return ["a seek or drop has not ended, and its process has not died"]
                if invariants.is_seeking(group):
                    seeking.move(USING, ref, Position(group.start_offset), actor="drain")
                else:
                    dropping.drop(USING, ref, actor="drain")
                after = Tables.read(USING)
            elif group.paused:
                pausing.set_paused(USING, ref, actor="drain", paused=False)
        settled = invariants.settled(after)
        expected: Counter[tuple[str, str]] = Counter()
        waiting: set[tuple[str, str, str]] = {one.identity for one in after.log.values()}
        pending = list(after.log.values())
        for row in after.outbox:
            is_due = row.deliver_at <= after.now + HANDLERS_WAIT * 1000
            if is_due and row.identity not in waiting and not refusing.is_refused(row.payload):
                waiting.add(row.identity)
                pending.append(row)  # type: ignore[arg-type]
        for row in pending:
            for ref in after.groups:
                if filters.gets(after, ref, row) and (ref, getattr(row, "offset", 0)) not in settled:
                    expected[ref.group, pictures.message_name(row).rstrip("!'")] += 1
        done, end = drain(after)
        handled = Counter(done)
        before = Counter(_letters(after))
        for place in Counter(_letters(end)) - before:
            handled[place] += 1
        broken = [
            f"afterwards {name} was handled {handled[group, name]} times by {group}, expected {expected[group, name]}"
            for group, name in expected.keys() | handled.keys()
            if handled[group, name] != expected[group, name]
        ]
        later = [one for one in end.outbox if one.deliver_at > end.now + HANDLERS_WAIT * 1000]
        broken += [one for one in invariants.drained(end) if not later or "outbox" not in one]
        broken += invariants.at_any_moment(end, passed=self._may_be_passed(end))
        return broken


def _letters(tables: Tables) -> list[tuple[str, str]]:
    rows = [*tables.log.values(), *tables.outbox]
    return [(one.failed_group, one.payload.decode().strip('"')) for one in rows if one.topic == DLQ]


def _counts(before: Tables, after: Tables) -> list[str]:
    """What operations say that they have changed is what has changed."""
    known = {one.id for one in before.operations}
    said: Counter[str] = Counter()
    for one in after.operations:
        if one.id not in known:
            said[one.action] += one.changed
    seen = {one.id for one in before.events}
    happened = Counter(one.outcome for one in after.events if one.id not in seen)
    left = {one.quarantine_id for one in before.quarantine} - {one.quarantine_id for one in after.quarantine}
    taken = said["requeue"] + said[invariants.DELETES]
    miscounted = [f"{len(left)} messages have left the quarantine, and the audit log counts {taken}"]
    return [
        *(miscounted if taken != len(left) else ()),
        *(
            f"the audit log counts {said[action]} of {action!r}, and {happened[outcome]} were {outcome}"
            for action, outcome in (("redrive", "redriven"), ("discard", "discarded"), ("replace", "replaced"))
            if said[action] != happened[outcome]
        ),
    ]


def drain(tables: Tables) -> tuple[list[tuple[str, str]], Tables]:
    """Two days later healthy subscribers of every group handle what there is: (group, message), and the tables then."""
    done: list[tuple[str, str]] = []

    def note(delivery: Any) -> None:
        done.append((delivery.group, _name(delivery.payload)))

    clock = Clock()
    clock.advance(HANDLERS_WAIT)
    try:
        handlers = [handler(ref.topic, ref.group, note, mode=row.mode) for ref, row in tables.groups.items()]
        if handlers:
            healthy = Sub(*handlers, lease_renewal_interval=0.0, name="healthy", limits=draining.IMPATIENT)
            draining.handle_all(healthy, done)
            draining.keep_house(healthy)
        return done, Tables.read(USING)
    finally:
        clock.restore()


@contextlib.contextmanager
def _by_ones() -> Iterator[None]:
    """Lets every transaction of an operation of several take one row, inside whole commands too."""
    before = [getattr(limits, name) for limits, name in STEPS]
    try:
        for limits, name in STEPS:
            object.__setattr__(limits, name, 1)
        yield
    finally:
        for (limits, name), value in zip(STEPS, before, strict=True):
            object.__setattr__(limits, name, value)


def _name(payload: Any) -> str:
    """As ``pictures.message_name`` has it."""
    return payload if isinstance(payload, str) else json.dumps(payload, separators=(",", ":"))
