"""What the explorer leaves out comes to the same as what it runs: toy programs, without a database."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

import pytest

from tests.interleavings import schedules
from tests.interleavings.engine import Director, Run, Step
from tests.interleavings.known import Known, Outcome
from tests.interleavings.schedules import Prefix, Segment, Space
from tests.interleavings.steps import APPENDED_FOR_ALL, COMMITTED, NOTHING, READ

pytestmark = [pytest.mark.own_server, pytest.mark.any_engine]


class Toy(NamedTuple):
    """One statement, which is a transaction by itself."""

    kind: str
    table: str
    after_odd: bool | None = None
    """It is left out unless the program's last read found an odd (or an even) number of changes; None: never."""


Program = Sequence[Toy]
PROGRAMS = 150
KINDS = (READ, READ, COMMITTED, APPENDED_FOR_ALL)


def run(programs: Mapping[str, Program], director: Director) -> tuple[Run, str]:
    """One schedule, chosen as the engine lets a director choose, and what it came to."""
    done = Run()
    written: dict[str, list[str]] = defaultdict(list)
    appended: dict[str, list[str]] = defaultdict(list)
    reads: dict[str, list[str]] = {name: [] for name in programs}
    last_read = dict.fromkeys(programs, 0)
    place = dict.fromkeys(programs, 0)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    running: str | None = None

    def following(name: str) -> Toy | None:
        for toy in programs[name][place[name] :]:
            if toy.after_odd in (None, last_read[name] % 2 == 1):
                return toy
            place[name] += 1
        return None

    while ready := tuple(name for name in programs if following(name) is not None):
        pending = {}
        for name in programs:
            toy = following(name)
            label = "end" if toy is None else f"{toy.kind}:{toy.table}"
            access = NOTHING if toy is None else {toy.table: toy.kind}
            pending[name] = Step(name, label, counts[name, label] + 1, access, ready, None, done.preemptions)
        running = running if running in ready else None
        chosen = director.choose(ready, running, done, pending)
        step, toy = pending[chosen], following(chosen)
        assert toy is not None
        step.running = running
        done.preemptions += running is not None and chosen != running
        done.steps.append(step)
        counts[chosen, step.label] += 1
        change = f"{chosen}{place[chosen]}"
        if toy.kind == COMMITTED:
            written[toy.table].append(change)
        elif toy.kind == APPENDED_FOR_ALL:
            appended[toy.table].append(change)
        else:
            seen = [*written[toy.table], *sorted(appended[toy.table])]
            reads[chosen].append(f"{toy.table}={seen}")
            last_read[chosen] = len(seen)
        place[chosen] += 1
        running = chosen
    ends = {table: written[table] + sorted(appended[table]) for table in sorted({*written, *appended})}
    return done, f"{reads} {ends}"


def explored(programs: Mapping[str, Program], bound: int, *, reduce: bool) -> tuple[set[str], int]:
    """All outcomes, and the number of schedules."""
    space = Space(bound, reduce=reduce)
    outcomes: set[str] = set()
    number = 0
    for choices in space:
        done, outcome = run(programs, Prefix(choices))
        assert done.preemptions <= bound
        space.add(choices, done)
        outcomes.add(outcome)
        number += 1
    return outcomes, number


def some_programs(random: Random) -> dict[str, Program]:
    return {
        name: [
            Toy(random.choice(KINDS), random.choice("xyz"), random.choice((None, None, None, True, False)))
            for _ in range(random.randint(2, 5))
        ]
        for name in "ABC"[: random.choice((2, 2, 3))]
    }


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_no_outcome_is_left_out(bound):
    random = Random(16)
    fewer = 0
    for _ in range(PROGRAMS):
        programs = some_programs(random)
        everything, all_schedules = explored(programs, bound, reduce=False)
        found, number = explored(programs, bound, reduce=True)
        assert found == everything, programs
        assert number <= all_schedules
        fewer += number < all_schedules
    assert fewer >= (PROGRAMS // 2 if bound else 0)


def test_programs_that_do_not_meet_are_run_in_one_order():
    programs = {"A": [Toy(COMMITTED, "x"), Toy(READ, "x")], "B": [Toy(COMMITTED, "y"), Toy(READ, "y")]}
    _, number = explored(programs, 2, reduce=True)
    everything, all_schedules = explored(programs, 2, reduce=False)
    assert (len(everything), number, all_schedules) == (1, 2, 6)


def test_the_shortest_schedule_that_still_fails():
    needed = [Segment("A", "x#1"), Segment("B"), Segment("A")]

    def fails(one):
        return all(segment in one for segment in needed)

    assert schedules.shrink([Segment("B", "y#1"), *needed], fails) == needed
    assert schedules.shrink([Segment("B", "y#1"), *needed], lambda one: True) == [Segment("B"), Segment("A")]


def test_what_is_known_is_read_as_it_was_written(tmp_path):
    known = Known(
        outcomes={"busy: a x b": {"0123456789": Outcome("waited", "A..commit#1 B A", "unlike A B: log: + x")}},
        waits={"a | lock:offsets <- b", "a | lock:offsets <- c", "b | lock:offsets <- a"},
        deadlocks={"a | lock:offsets <- b": "both are run again"},
    )
    known.write({"waited": "It waited."}, tmp_path)
    assert Known.read(tmp_path) == known
