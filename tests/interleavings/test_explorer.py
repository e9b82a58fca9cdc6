"""Pairs of operations under many schedules: the recorded regressions, a sample of all, and that mistakes are found."""

from __future__ import annotations

import itertools
import os
from random import Random

import pytest

from tests.interleavings import exploration, explore, schedules, statements, trials
from tests.interleavings.engine import ToolError
from tests.interleavings.exploration import exploring
from tests.interleavings.known import Known
from tests.interleavings.operations import OPERATIONS
from tests.interleavings.pairs import pairs
from tests.interleavings.regressions import REGRESSIONS
from tests.interleavings.schedules import Diverged
from tests.support.internals import audit
from tests.support.writers import watched, writing_functions

pytestmark = [pytest.mark.own_server, pytest.mark.servers_only, pytest.mark.timeout(300)]

SEED = int(os.environ.get("EXPLORE_SEED", "1"))
PAIRS = 60
"""In the sample of all pairs."""
BOUND = 2
"""Preemptions per schedule of the sample, at most: as far as the expected results have been recorded."""
SCHEDULES = 5
"""Of each pair of the sample: both orders, and others at random."""


@pytest.fixture(scope="module")
def found(_database):
    with exploring() as found:
        yield found


@pytest.mark.parametrize("one", REGRESSIONS, ids=lambda one: one.was)
def test_a_recorded_schedule(db, found, one):
    trial = found.trial(pairs()[one.pair])
    verdict = explore.replay(trial, one.schedule)
    assert verdict.name == one.schedule, "it was another schedule"
    assert all(one.ended_at for one in verdict.after.operations), "a record has not ended"
    report = explore.judge(trial, one.schedule)
    assert not report.deadlocks
    assert exploration.findings(report, Known.read()) == []


def test_a_sample_of_all_pairs(db, found):
    known = Known.read()
    random = Random(SEED)
    chosen = list(pairs().values())
    random.shuffle(chosen)
    problems = []
    for pair in chosen[:PAIRS]:
        report = found.explore(pair, BOUND, most=SCHEDULES, random=random)
        problems += [f"{pair.name}: {line}" for line in exploration.findings(report, known)]
    assert not problems, "\n".join(problems)


def test_a_world_is_made_anew_before_what_waits_there_comes_due(db, found):
    trial = found.trial(pairs()["with_jobs: end jobs x end jobs"])
    young, made = explore.explore(trial, 0), trial.before
    assert trial.before is made
    trial.beginning.begun_at -= trials.YOUNG
    assert explore.explore(trial, 0).digests == young.digests
    assert trial.before is not made


def test_each_operation_sends_the_statements_that_are_recorded(db, found):
    """``make explore STATEMENTS=1`` records them anew."""
    sent, recorded = statements.sent(found), statements.read(statements.server())
    assert sent == recorded


@pytest.mark.any_engine
def test_every_function_that_writes_is_in_a_pair(db, found, monkeypatch):
    # An operation records that it is running between all of its transactions.
    monkeypatch.setattr(audit, "BEAT_SECONDS", 0.0)
    seen: set[str] = set()
    beginning = None
    for pair in sorted(_one_for_each_operation(), key=lambda pair: pair.world):
        trial = found.trial(pair, beginning)
        beginning = trial.beginning
        with watched(seen, found.engine.connections()):
            trial.run(schedules.Prefix([]))
    # What one operation does to another that is under way.
    trial = found.trial(pairs()["busy: seek to the beginning x seek to the end"])
    with watched(seen, found.engine.connections()):
        explore.replay(trial, "A..share:consumer_groups#1 B A")
    # It reads the tables of another package, which nobody changes then.
    assert writing_functions() - seen == {"operations.celery_beat._read.<locals>.rows"}
    assert all(any(name in pair for pair in pairs()) for name in OPERATIONS)


def _one_for_each_operation():
    """Pairs in which every operation is seen in every world where it is done."""
    seen = set()
    for pair in pairs().values():
        new = {(pair.world, one.name) for one in pair.operations} - seen
        if new:
            seen |= new
            yield pair


# -- the tool ---------------------------------------------------------------------


def test_a_name_says_what_was_run(db, found):
    trial = found.trial(pairs()["busy: claim x flush acks"])
    report = [trial.run(schedules.Prefix(choices)) for choices in _some(trial, 30)]
    assert len({verdict.name for verdict in report}) == len(report), "two schedules have one name"
    for verdict in report:
        assert explore.replay(trial, verdict.name).name == verdict.name


def _some(trial, most):
    space = schedules.Space(2)
    for choices in itertools.islice(space, most):
        space.add(choices, trial.run(schedules.Prefix(choices)).run)
        yield choices


def test_a_schedule_that_cannot_be_followed_is_an_error(db, found):
    trial = found.trial(pairs()["busy: claim x flush acks"])
    with pytest.raises(Diverged, match="A has ended without delete:outbox#1"):
        explore.replay(trial, "A..delete:outbox#1 B A")
    with pytest.raises(ToolError, match="'A-B' is not part of a schedule's name"):
        explore.replay(trial, "A-B")
    assert explore.replay(trial, "A B").broken == []
