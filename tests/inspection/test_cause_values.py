"""Which problems one cause explains, and its numbers, of problems that are given."""

from __future__ import annotations

import dataclasses

import pytest

from django_mysqlqueue.inspection import causes, find_causes, find_problems
from django_mysqlqueue.inspection.causes import Cause, status_of
from django_mysqlqueue.inspection.problem import Problem
from django_mysqlqueue.models import Rollup
from tests.inspection.test_group_problems import NOW, G, ago, group, head, live
from tests.inspection.test_queue_problems import overview
from tests.support.internals import Count, GroupRef

H = GroupRef("h", "t")
FEW = Count(3)


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
    cause = causes.unavailable("queue", "It does not answer.").cause
    assert cause is not None
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


def test_a_message_that_two_problems_are_about_is_counted_once():
    """A key is no partition: its messages may be in a hashed one."""
    keys = Problem(0, "retrying", "", G, "ada", messages=FEW, offsets=frozenset((7, 8, 9)))
    stuck = [Problem(2, "stuck", "", ref, "p", 7, messages=Count(1)) for ref in (G, H)]
    (cause,) = find_causes(overview(group(subscribers=[live()])), [keys, stuck[0]])
    assert cause.facts(NOW) == "3 waiting messages"
    other = Problem(2, "stuck", "", G, "q", 5, messages=Count(1))
    assert Cause((keys, *stuck, other), "", "").messages == Count(5), "messages of another group are others"
    assert Cause((keys, *stuck, other), "", "").partitions == 3


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
    unserved = Problem(0, "no_subscriber", "c", G)
    assert state(unserved, groups=(busy, idle)) == "stopped"
    assert state(unserved, groups=(busy, dataclasses.replace(busy, ref=H))) == "degraded"
    served = dataclasses.replace(group(subscribers=[live()]), ref=H)
    assert state(unserved, groups=(busy, served)) == "degraded", "it would process the next message"
    assert state(unserved, Problem(0, "filter", "b", H), groups=(busy, served)) == "stopped"
    assert state(unserved, Problem(1, "paused", "b", H), groups=(busy, served)) == "stopped"
    assert state(another, groups=(busy,)) == "degraded"
    assert state(unserved, groups=(group(),)) == "degraded", "nothing waits"
    assert state(Problem(0, "outbox", "c"), groups=(busy, idle)) == "stopped"
    assert state(paused, groups=(busy, idle)) == "degraded", "on purpose"
    on_purpose = Problem(2, "moves", "d", GroupRef("i", "t"))
    others = [dataclasses.replace(busy, ref=ref) for ref in (H, on_purpose.ref)]
    assert state(Problem(0, "no_subscriber", "c", H), paused, on_purpose, groups=(busy, *others)) == "stopped"
    assert state(Problem(2, "paused", "a", G), groups=(busy,)) == "ok"
    of_one_cause = (Problem(2, "no_subscriber", "a", G), Problem(0, "no_subscriber", "b", H))
    assert state(*of_one_cause, groups=(busy, dataclasses.replace(busy, ref=H))) == "degraded"


def test_the_headline_is_the_cause_of_the_state():
    failing, note = Problem(0, "failing", "failing.", G), Problem(2, "no_subscriber", "restarting.", H, messages=FEW)
    paused, unserved = Problem(1, "paused", "paused.", G), Problem(0, "no_subscriber", "unserved.", H)
    busy = group(head(1), subscribers=[live()])
    both = (busy, dataclasses.replace(busy, ref=H))

    def told(*problems, groups=both):
        found = overview(*groups)
        status = status_of(found, find_causes(found, problems))
        return status.state, status.text

    assert told(paused, note) == ("degraded", "paused."), "others may be restarting"
    assert told(failing, paused, note) == ("degraded", "failing.")
    many = dataclasses.replace(failing, failed=Count(1000))
    alone = (dataclasses.replace(busy, ref=H),)
    assert told(many, unserved, groups=alone) == ("stopped", "unserved."), "that one stops nothing"
    assert told(note) == ("ok", "2 consumer groups, backlog 2. For information: restarting.")
    assert told() == ("ok", "2 consumer groups, backlog 2. No problems found.")


# -- order --------------------------------------------------------------------


def test_causes_of_one_severity_are_ranked_by_the_messages_that_they_harm():
    problems = [
        Problem(1, "dead_letters", "12.", G, failed=Count(12)),
        Problem(1, "paused", "paused.", GroupRef("p", "t"), messages=Count(100_000)),
        Problem(1, "still", "500.", GroupRef("s", "t"), messages=Count(500)),
        Problem(1, "failing", "899.", H, failed=Count(899)),
        Problem(1, "recent_dead_letters", "", H, failed=Count(800)),
        Problem(0, "route", "worse."),
    ]
    found = find_causes(overview(group(head(1), subscribers=[live()])), problems)
    assert [cause.text for cause in found] == ["worse.", "899.", "500.", "12.", "paused."]
    assert found[1].harm == Count(899), "both are of the same messages"


def test_limits_that_repeated_attempts_reach_are_no_cause_of_their_own():
    limited = Problem(2, "limited", "limited.", G, messages=Count(9))

    def told(*others):
        found = find_causes(overview(group(head(1), subscribers=[live()])), [*others, limited])
        return [(cause.text, [one.kind for one in cause.problems]) for cause in found]

    alone = [("limited.", ["limited"])]
    for kind in ("failing", "recent_dead_letters", "retrying"):
        assert told(Problem(0, kind, "fails.", G)) == [("fails.", [kind, "limited"])]
        assert told(Problem(0, kind, "fails.", H)) == [("fails.", [kind]), *alone]
    assert told(Problem(1, "stuck", "stuck.", G, "k", 7)) == [("stuck.", ["stuck", "limited"])]
    assert told(Problem(2, "stuck", "stuck.", G, "k", 7)) == [*alone, ("stuck.", ["stuck"])]
    assert told(Problem(2, "dead_letters", "old.", G)) == [*alone, ("old.", ["dead_letters"])]


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


def test_a_slow_database_explains_that_a_group_falls_behind(db):
    one = dataclasses.replace(live(), info={**live().info, "p50_us": 250_001, "p95_us": 250_001})
    Rollup.objects.create(
        consumer_group="g", topic="t", grain=60, bucket_at=ago(60), acked=1, entered=900, entered_minutes=1
    )

    def kinds(subscriber):
        state = overview(group(head(90), lag=900, subscribers=[subscriber]))
        return {found.kind for found in find_problems(state)} & {"behind", "slow_database"}

    assert kinds(live()) == {"behind"}
    assert kinds(one) == {"slow_database"}


def test_the_worst_problem_comes_first(db):
    dead = dataclasses.replace(group(dead_letters=Count(1)), ref=GroupRef("a", "t"))
    state = overview(dead, group(head(900)), dataclasses.replace(group(paused=True), ref=H), due=1)
    found = [(one.severity, -one.harm.value) for one in find_problems(state)]
    assert found == sorted(found)
    assert len({severity for severity, _ in found}) > 1
