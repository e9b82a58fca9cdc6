"""Which problems one cause explains, and its numbers, of problems that are given."""

from __future__ import annotations

import dataclasses

import pytest

from django_mysqlqueue.inspection import causes, find_causes, find_problems, status_of
from django_mysqlqueue.inspection.causes import Cause
from django_mysqlqueue.inspection.problem import Problem
from django_mysqlqueue.models import Rollup
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.refs import GroupRef
from tests.inspection.test_group_problems import NOW, G, ago, group, head, live
from tests.inspection.test_queue_problems import overview

H = GroupRef("h", "t")


def kinds(problems, *groups):
    found = find_causes(overview(*groups), problems)
    return [sorted((one.kind, one.severity) for one in cause.problems) for cause in found]


def test_schedules_that_are_overdue_wait_for_a_subscriber():
    nobody = Problem(0, "no_subscriber", "a", G)
    overdue, invalid = Problem(0, "recurring", "b", topic="t"), Problem(1, "recurring", "c", topic="t")
    together = [("no_subscriber", 0), ("recurring", 0)]
    assert kinds([nobody, overdue, invalid], group()) == [together, [("recurring", 1)]]
    apart = kinds([nobody, overdue], group(subscribers=[live()]))
    assert sorted(apart) == [[one] for one in together], "a subscriber runs"


def test_a_database_that_does_not_answer():
    cause = causes.unavailable("queue", "It does not answer.")
    assert (cause.severity, cause.kind, cause.text) == (0, "unavailable", "It does not answer.")
    assert cause.problems[0].database == "queue"
    assert cause.advice


@pytest.mark.parametrize(
    ("problems", "facts"),
    [
        ([(G, "a", 3, 60)], "since"),
        ([(G, "a", 3, 60), (G, "a", 3, 90)], "3 waiting messages · since"),
        ([(G, "a", 3, None), (G, "b", 4, None)], "2 partitions · 7 waiting messages"),
        ([(G, None, 3, None), (H, None, 0, None)], "2 groups · 3 waiting messages"),
        ([(G, None, 0, None), (H, None, 0, None)], "2 groups"),
    ],
)
def test_the_facts_of_a_cause(problems, facts):
    found = tuple(
        Problem(1, "stuck", "", ref, key, since=None if since is None else ago(since), messages=Count(number))
        for ref, key, number, since in problems
    )
    told = Cause(found, "", "").facts(NOW)
    assert told.startswith(facts)
    assert told == facts or " · " not in told.removeprefix(facts)
    oldest = [dataclasses.replace(one, since=None, oldest_at=one.since) for one in found]
    assert Cause(tuple(oldest), "", "").facts(NOW) == told.replace("since", "oldest message since")
    assert Cause(found, "", "").since == min((one.since for one in found if one.since is not None), default=None)


def test_a_cause_began_when_its_most_telling_problem_did():
    stuck = Problem(1, "stuck", "", G, "k", 7, since=ago(900))
    assert Cause((Problem(0, "failing", "", G, since=ago(60)), stuck), "", "").since == ago(60)
    assert Cause((Problem(0, "failing", "", G), stuck), "", "").since == ago(900)


def test_the_next_step_is_that_of_the_problems_if_it_is_one():
    def step(*advices):
        problems = [Problem(0, "no_subscriber", "", ref, advice=one) for ref, one in zip((G, H), advices, strict=False)]
        (cause,) = find_causes(overview(group(subscribers=[live()])), problems)
        return cause.advice

    assert step("Drop it.") == step("Drop it.", "Drop it.") == "Drop it."
    assert step("") == step("Drop it.", "") == "Start a subscriber."


def test_the_oldest_of_several_stuck_messages():
    def told(*ages, messages=1):
        problems = [
            Problem(
                1, "stuck", "", G, f"k{n}", n, oldest_at=None if one is None else ago(one), messages=Count(messages)
            )
            for n, one in enumerate(ages)
        ]
        (cause,) = find_causes(overview(group(subscribers=[live()])), problems)
        return cause.text

    assert told(60, 120) == ("2 messages of g/t have failed and will be retried; the oldest has waited for 2 min.")
    assert "waited for 2 min" in told(120, 60, None)
    assert "wait for messages that have failed; 6 messages are waiting, the oldest for 2 min." in told(
        60, 120, messages=3
    )


def test_the_most_frequent_error_is_the_sample():
    errors = ["ValueError: 1", "KeyError: x", "ValueError: 2"]
    problems = [Problem(1, "stuck", "", G, f"k{n}", n, error=error) for n, error in enumerate(errors)]
    (cause,) = find_causes(overview(group(subscribers=[live()])), problems)
    assert cause.sample == problems[0]


# -- the state of the queue ---------------------------------------------------


def state(*problems, groups=()):
    found = overview(*groups)
    return status_of(found, find_causes(found, sorted(problems, key=lambda one: one.severity))).state


def test_the_queue_is_stopped_if_no_group_with_messages_processes_any():
    busy, idle = group(head(1)), dataclasses.replace(group(), ref=H)
    paused, another = Problem(1, "paused", "a", G), Problem(1, "dead_letters", "b", G)
    assert state(paused, groups=(busy, idle)) == "stopped"
    assert state(paused, groups=(busy, dataclasses.replace(busy, ref=H))) == "degraded"
    assert state(another, groups=(busy,)) == "degraded"
    assert state(paused, groups=(group(),)) == "degraded", "nothing waits"
    assert state(Problem(0, "outbox", "c"), groups=(busy, idle)) == "stopped"
    assert state(Problem(2, "paused", "a", G), groups=(busy,)) == "ok"
    of_one_cause = (Problem(2, "no_subscriber", "a", G), Problem(0, "no_subscriber", "b", H))
    assert state(*of_one_cause, groups=(busy, dataclasses.replace(busy, ref=H))) == "degraded"


def test_the_first_problem_is_the_larger_one_though_subscribers_may_be_restarting():
    paused = Problem(1, "paused", "paused.", G, messages=Count(3))

    def first(problem, *others):
        found = overview(group(head(1), subscribers=[live()]))
        return status_of(found, find_causes(found, [problem, *others])).text

    def unserved(number):
        return Problem(2, "no_subscriber", "unserved.", H, messages=Count(number))

    assert first(paused, unserved(4)) == "unserved."
    assert first(paused, unserved(3)) == "paused."
    assert first(Problem(0, "failing", "failing.", G), unserved(4)) == "failing."


# -- what moves ---------------------------------------------------------------


@pytest.mark.parametrize("column", ["acked", "failed", "dead_lettered", "filtered", "expired", "superseded"])
def test_a_group_of_which_any_delivery_has_ended_is_not_stalled(db, column):
    state = overview(group(head(900), subscribers=[live()]))

    def is_still():
        return "still" in [one.kind for one in find_problems(state)]

    row = Rollup.objects.create(consumer_group="h", topic="t", grain=60, bucket_at=ago(60), **{column: 1})
    assert is_still(), "that was another group"
    row.delete()
    row = Rollup.objects.create(consumer_group="g", topic="t", grain=60, bucket_at=ago(601), **{column: 1})
    assert is_still(), "that was long ago"
    Rollup.objects.filter(pk=row.pk).update(bucket_at=ago(600))
    assert not is_still()


def test_the_worst_problem_comes_first(db):
    dead = dataclasses.replace(group(dead_letters=Count(1)), ref=GroupRef("a", "t"))
    state = overview(dead, group(head(900)), dataclasses.replace(group(paused=True), ref=H), due=1)
    found = [(one.severity, one.kind) for one in find_problems(state)]
    assert found == sorted(found)
    assert len({severity for severity, _ in found}) > 1
