"""Each rule of the protocol, when it is broken, is found by a pair of the explorer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
from django.db import IntegrityError, OperationalError

from tests.interleavings import explore, known
from tests.interleavings.engine import ToolError
from tests.interleavings.exploration import Exploration, exploring
from tests.interleavings.mutations import BROKEN, DEADLOCK, MUTATIONS, OUTCOME, WAIT, Mutation, used
from tests.interleavings.pairs import pairs
from tests.interleavings.schedules import Space
from tests.interleavings.trials import REFUSALS, Trial, Verdict

pytestmark = [pytest.mark.own_server, pytest.mark.any_engine, pytest.mark.servers_only, pytest.mark.timeout(300)]

Finding = tuple[str, str]
"""Its kind and its text."""


@pytest.fixture(scope="module")
def found(_database: None) -> Iterator[Exploration]:
    with exploring() as found:
        yield found


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_rule_is_found(db: None, found: Exploration, mutation: Mutation) -> None:
    used.clear()
    try:
        told = _hunt(found, mutation)
    except ToolError:
        found.renew()
        told = _hunt(found, mutation)
    assert used, "the mutation took no effect: the function or lock that it replaces is not there any more"
    assert told is not None, f"not found: {mutation.rule}"
    print(*told)


def _hunt(found: Exploration, mutation: Mutation) -> tuple[int, str, Finding] | None:
    """The first finding that the mutation causes: the number of the schedule, its name, and what was found."""
    trial = found.trial(pairs()[mutation.pair])
    plain: set[Finding] = set()
    if mutation.by != BROKEN:
        for _, there in _explored(trial, mutation.bound):
            plain |= there
    for number, (verdict, there) in enumerate(_explored(trial, mutation.bound, mutation), 1):
        new = {one for one in there - plain if one[0] == mutation.by}
        if new:
            return number, verdict.name, min(new)
    return None


def _explored(trial: Trial, bound: int, mutation: Mutation | None = None) -> Iterator[tuple[Verdict, set[Finding]]]:
    space = Space(bound)
    for choices in space:
        breaking: AbstractContextManager[object] = contextlib.nullcontext() if mutation is None else mutation.breaking()
        with breaking:
            verdict = explore.follow(trial, choices)
        for error in verdict.run.errors.values():
            # Any other error is a mistake of the mutation itself.
            assert error is None or isinstance(error, (*REFUSALS, IntegrityError, OperationalError)), repr(error)
        space.add(choices, verdict.run)
        yield verdict, _findings(trial, verdict)


def _findings(trial: Trial, verdict: Verdict) -> set[Finding]:
    """Everything that an exploration compares. The unmutated code drains what the schedule left."""
    names = {thread: one.name for thread, one in zip(trial.threads, trial.pair.operations, strict=True)} | {
        "": known.NOBODY
    }
    run = verdict.run
    return {
        *((BROKEN, text) for text in verdict.broken + trial.drain(verdict)),
        (OUTCOME, verdict.text),
        *((WAIT, known.wait(names[one.thread], one.label, names[one.holder])) for one in run.waits),
        *((DEADLOCK, f"{names[thread]}{known.BAR}{label}") for thread, label in run.deadlocks),
    }
