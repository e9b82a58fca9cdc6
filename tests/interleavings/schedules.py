"""Schedules: their names, all of them up to a number of preemptions, and the shortest that still fails.

A name says where it switches: ``A..delete:delivery_state#2 B A`` runs A until it
stands before its second DELETE of delivery_state, then B to its end, then A to
its end. A segment also ends where its operation has to wait for a lock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from tests.interleavings import steps
from tests.interleavings.engine import Run, Step, ToolError
from tests.interleavings.steps import Access

WAITS = "waits"
"""Ends a segment whose operation had to wait for a lock."""


class Diverged(ToolError):
    """The operations did not send what they sent the time before."""


@dataclass(frozen=True)
class Segment:
    """An operation that goes on until it stands before a step; without one until its end."""

    thread: str
    until: str = ""

    def __str__(self) -> str:
        return f"{self.thread}..{self.until}" if self.until else self.thread


def name(run: Run) -> str:
    """The name of the schedule that a run has followed."""
    return " ".join(map(str, segments(run)))


def segments(run: Run) -> list[Segment]:
    found: list[Segment] = []
    for place, step in enumerate(run.steps):
        if place + 1 < len(run.steps) and run.steps[place + 1].thread == step.thread:
            continue
        following = next((one for one in run.steps[place + 1 :] if one.thread == step.thread), None)
        if following is None:
            found.append(Segment(step.thread))
        elif step.waited:
            found.append(Segment(step.thread, WAITS))
        else:
            found.append(Segment(step.thread, f"{following.label}#{following.number}"))
    return found


def parse(text: str) -> list[Segment]:
    """A name's segments.

    Raises:
        ToolError: it is none.
    """
    found = []
    for part in text.split():
        match = re.fullmatch(r"([A-Z])(?:\.\.(\S+))?", part)
        if match is None:
            raise ToolError(f"{part!r} is not part of a schedule's name: expected A or A..label#number")
        found.append(Segment(match[1], match[2] or ""))
    return found


class Named:
    """Follows a name; what it does not say goes on in order."""

    def __init__(self, wanted: Sequence[Segment]) -> None:
        self._left = list(wanted)
        self._first = [segment.thread for segment in wanted]

    def choose(self, ready: Sequence[str], running: str | None, run: Run, pending: Mapping[str, Step]) -> str:
        while self._left:
            segment = self._left[0]
            at = pending[segment.thread]
            can_go_on = segment.thread in ready
            if not can_go_on and at.label == "sleep" and segment.until != f"sleep#{at.number}":
                break  # the others go on meanwhile
            if can_go_on and segment.until != f"{at.label}#{at.number}":
                return segment.thread
            if at.label == "end" and segment.until:
                raise Diverged(f"{segment.thread} has ended without {segment.until}")
            del self._left[0]
        return running or min(ready, key=lambda one: self._first.index(one) if one in self._first else len(self._first))


class Prefix:
    """Follows the first choices of an earlier run, then whoever runs."""

    def __init__(self, choices: Sequence[tuple[str, str]]) -> None:
        self._choices = choices

    def choose(self, ready: Sequence[str], running: str | None, run: Run, pending: Mapping[str, Step]) -> str:
        place = len(run.steps)
        if place >= len(self._choices):
            return running or ready[0]
        thread, label = self._choices[place]
        at = pending[thread].label
        if thread not in ready or (label and at not in ("start", label)):
            raise Diverged(f"step {place + 1}: expected {thread} before {label}, which is before {at}")
        return thread


class Trace:
    """What a run has done so far, without the order of steps that commute (Foata's normal form, as a hash).

    Two runs with equal traces have done the same: each step has the same dependent ones before it.
    """

    def __init__(self) -> None:
        self.key = 0
        self._threads: dict[str, tuple[int, int]] = {}
        """Thread → how many steps it has made, and the level of the last one."""
        self._tables: dict[tuple[str, str], int] = {}
        """(table, kind of access) → the highest level of a step that has accessed it so."""

    def after(self, step: Step) -> int:
        """The key with one more step."""
        return self._add(step)[0]

    def add(self, step: Step) -> None:
        self.key, count, level = self._add(step)
        self._threads[step.thread] = count, level
        for one in step.access.items():
            self._tables[one] = max(level, self._tables.get(one, 0))

    def _add(self, step: Step) -> tuple[int, int, int]:
        count, level = self._threads.get(step.thread, (0, 0))
        for (table, kind), other in self._tables.items():
            if other > level and table in step.access and steps.meets(step.access, ((table, kind),)):
                level = other
        text = f"{step.thread} {count} {step.label} {level + 1}"
        # Not hash(): for tuples it is nearly linear, and the sums of other steps would be the same.
        return self.key + int.from_bytes(blake2b(text.encode(), digest_size=16).digest()), count + 1, level + 1


class Space:
    """All schedules of some operations with at most so many preemptions, those with fewer first.

    Left out is what comes to the same as another one that is not:

    - a preemption before a step that commutes with all that the others do: the one after that step does;
    - a choice that goes on with the same operation from the same trace as another, with no more preemptions.
    """

    def __init__(self, bound: int, random: Random | None = None, *, reduce: bool = True) -> None:
        self._bound, self._random, self._reduce = bound, random, reduce
        self._levels: list[list[list[tuple[str, str]]]] = [[] for _ in range(bound + 1)]
        self._levels[0].append([])
        self._seen: dict[str, set[tuple[str, str]]] = {}
        """Thread → (table, kind) of everything that it has been seen to do."""
        self._left_out: list[tuple[int, list[tuple[str, str]], str, Access]] = []
        self._nodes: dict[tuple[int, str], int] = {}
        """(trace, who goes on) → the fewest preemptions on a way there."""
        self.pruned = 0

    def __iter__(self) -> Iterator[list[tuple[str, str]]]:
        """The choices of the next schedule; ``add`` its run before the one after it is asked for."""
        while True:
            some = [level for level in self._levels if level]
            if not some:
                self._bring_back()
                if not any(self._levels):
                    self.pruned += len(self._left_out)
                    return
                continue
            # Both orders first. A sample takes of all numbers of preemptions, everything else the fewest first.
            level = some[0]
            if self._random is not None and level is not self._levels[0]:
                level = self._random.choice(some)
            yield level.pop(self._random.randrange(len(level)) if self._random is not None else -1)

    def add(self, choices: Sequence[tuple[str, str]], run: Run) -> None:
        """Learns what could have been done instead, behind the choices that were given."""
        for step in run.steps:
            self._seen.setdefault(step.thread, set()).update(step.access.items())
        following: dict[str, Step] = {}
        pending: list[dict[str, Step]] = []
        """For each step: what each thread does next."""
        for step in reversed(run.steps):
            following = {**following, step.thread: step}
            pending.append(following)
        pending.reverse()
        trace: Trace | None = Trace()
        for place, step in enumerate(run.steps):
            if place >= len(choices):
                for other in step.ready:
                    if other != step.thread:
                        self._consider(run, place, pending[place][other], trace)
            if trace is not None:
                cost = step.preemptions + (step.running is not None and step.thread != step.running)
                self._reached((trace.key, step.thread), cost)
            if step.waited or step.label == "sleep":
                trace = None  # of what is done while somebody waits, the order counts
            elif trace is not None:
                trace.add(step)

    def _consider(self, run: Run, place: int, other: Step, trace: Trace | None) -> None:
        step = run.steps[place]
        is_preemption = step.running is not None and other.thread != step.running
        cost = step.preemptions + is_preemption
        if cost > self._bound:
            return
        if self._reduce and trace is not None and other.label != "sleep":
            nodes = (trace.key, other.thread), (trace.after(other), other.thread)
            known = [self._reached(node, cost) for node in nodes]
            if any(known):
                self.pruned += 1
                return
        prefix = [(one.thread, one.label) for one in run.steps[:place]] + [(other.thread, "")]
        if self._reduce and is_preemption and place and not self._matters(step.thread, step.access):
            self._left_out.append((cost, prefix, step.thread, step.access))
        else:
            self._levels[cost].append(prefix)

    def _reached(self, node: tuple[int, str], cost: int) -> bool:
        """Whether a way there was known that has no more preemptions; it is from now on."""
        known = self._nodes.get(node)
        if known is None or cost < known:
            self._nodes[node] = cost
        return known is not None and known <= cost

    def _matters(self, thread: str, access: Access) -> bool:
        return any(steps.meets(access, seen) for other, seen in self._seen.items() if other != thread)

    def _bring_back(self) -> None:
        """What was left out before an operation had shown all that it does."""
        left = self._left_out
        self._left_out = []
        for cost, prefix, thread, access in left:
            if self._matters(thread, access):
                self._levels[cost].append(prefix)
            else:
                self._left_out.append((cost, prefix, thread, access))


def shrink(found: Sequence[Segment], fails: Callable[[Sequence[Segment]], bool], *, most: int = 60) -> list[Segment]:
    """The shortest schedule on the way from one that fails: fewer switches, each as early as it can be."""
    best = list(found)
    tries = 0
    shorter = True
    while shorter:
        shorter = False
        for candidate in _shorter(best):
            tries += 1
            if tries > most:
                return best
            if fails(candidate):
                best, shorter = candidate, True
                break
    return best


def _shorter(one: list[Segment]) -> Iterable[list[Segment]]:
    for place in range(len(one)):
        left = one[:place] + one[place + 1 :]
        merged: list[Segment] = []
        for segment in left:
            if merged and merged[-1].thread == segment.thread:
                merged[-1] = segment
            else:
                merged.append(segment)
        if len(merged) < len(one) and {segment.thread for segment in merged} == {segment.thread for segment in one}:
            yield merged
