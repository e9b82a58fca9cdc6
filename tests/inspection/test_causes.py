"""Problems are reported by their cause, and the state of the queue in one word."""

from __future__ import annotations

import re

import pytest

from django_mysqlqueue import Message, publish_many, subscriber
from django_mysqlqueue.inspection import find_causes, find_problems, get_overview
from django_mysqlqueue.inspection.causes import status_of
from django_mysqlqueue.operations import pausing
from django_mysqlqueue.options.backoff import Backoff
from tests.support import schedule_worlds
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import Count, GroupRef, groups
from tests.support.queue_states import STATES, Stage, an_outbox_that_nobody_moves

pytestmark = [pytest.mark.usefixtures("db"), pytest.mark.still_clock]

WAITS = Backoff(initial=36_000, jitter=0)


def causes():
    return find_causes(using=USING)


def status():
    overview = get_overview(using=USING)
    return status_of(overview, find_causes(overview))


def boom(text):
    def fails(delivery):
        raise ConnectionError(f"{text} {delivery.payload}")

    return fails


def failing(group="g", topic="t", *, partitions=25, text="no route to 10.0.0.7, request", clock, passed=120, **options):
    """A group of which each attempt has failed for two minutes."""
    sub = Sub(handler(topic, group, boom(text), backoff=WAITS, max_attempts=None, **options))
    publish_many(topic, [Message(n, key=f"k{n:02}") for n in range(partitions) for _ in range(3)])
    sub.settle()
    sub.poller.write_rollups()
    clock.advance(passed)
    sub.heart.beat()
    return sub


@pytest.mark.parametrize("stage_state", STATES, ids=lambda state: state.__name__)
def test_every_problem_belongs_to_one_cause(stage_state, clock, settings):
    stage_state(Stage(clock, settings))
    overview = get_overview(using=USING)
    problems = find_problems(overview)
    found = find_causes(overview, problems)
    assert sorted((one for cause in found for one in cause.problems), key=repr) == sorted(problems, key=repr)
    assert all(cause.text.endswith(".") and cause.advice.endswith((".", "?")) for cause in found)
    assert [cause.severity for cause in found] == sorted(cause.severity for cause in found)
    state = status_of(overview, found).state
    assert (state == "ok") == all(one.severity == 2 for one in problems)


def test_a_poison_message_in_each_of_25_partitions_is_one_cause(clock, no_handlers):
    subscriber("t", group="g", on_failure="block")(boom(""))
    failing(on_failure="block", clock=clock)
    overview = get_overview(using=USING)
    assert len(find_problems(overview)) == 26
    (cause,) = causes()
    assert re.fullmatch(r"g/t: every attempt has failed since [^(]+ \(25 of 25\)\.", cause.text)
    assert cause.headline() == f"{cause.text[:-1]}: ConnectionError."
    assert cause.facts(overview.now).startswith("25 partitions · 75 waiting messages · ")
    assert [one.kind for one in cause.symptoms] == ["stuck"] * 25
    assert (cause.kind, cause.severity, cause.partitions, cause.messages) == ("failing", 0, 25, Count(75))
    assert cause.refs == (GroupRef("g", "t"),)
    assert cause.since == pytest.approx(overview.now - 120_000, abs=60_000)
    assert cause.sample.error.startswith("ConnectionError: no route to 10.0.0.7, request ")
    found = status()
    assert (found.state, found.text) == ("degraded", cause.text)
    assert found.advice.startswith("Pause the group")


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_no_message_is_said_to_wait_where_none_does(mode, clock, no_handlers):
    subscriber("t", group="g", mode=mode)(boom(""))
    failing(mode=mode, clock=clock, partitions=4)
    (cause,) = causes()
    assert cause.facts(get_overview(using=USING).now).startswith("4 partitions · 12 waiting messages · ")
    assert not any("waits for" in one.text for one in cause.problems)


def test_failures_before_a_restart_are_not_those_of_the_new_code(clock, no_handlers):
    """The rollups of the last ten minutes are of the old processes."""
    subscriber("t", group="g")(boom(""))
    failing(clock=clock).leave()
    restarted = Sub(handler("t", "g", boom(""), backoff=WAITS, max_attempts=None))
    for passed in (25, 50):
        clock.advance(passed)
        restarted.beat()
        assert "failing" not in {one.kind for one in find_problems(using=USING)}
    publish_many("t", [Message(n, key=f"n{n}") for n in range(10)])
    restarted.settle()
    restarted.poller.write_rollups()
    assert "failing" in {one.kind for one in find_problems(using=USING)}


def test_groups_that_fail_with_the_same_error_have_one_cause(clock):
    subs = [
        failing("billing", "b", clock=clock, partitions=12, passed=0),
        failing("mail", "m", clock=clock, partitions=12, passed=0),
        failing("search", "s", clock=clock, partitions=12, text="index missing:"),
    ]
    for sub in subs:
        sub.heart.beat()
    first, second = causes()
    assert first.refs == (GroupRef("billing", "b"), GroupRef("mail", "m"))
    assert first.headline() == "2 groups fail with the same error (billing/b, mail/m): ConnectionError."
    assert second.refs == (GroupRef("search", "s"),)
    assert second.sample.error.startswith("ConnectionError: index missing: ")


def test_nobody_runs(clock):
    """One cause, for groups, lost subscribers and the outbox."""
    gone = Sub(handler("t", "g"), handler("t", "h"), handler("u", "i"))
    publish_many("t", range(5))
    publish_many("u", range(2))
    sequence()
    gone.step()
    publish_many("t", range(3))
    clock.advance(700)
    assert len(find_problems(get_overview(using=USING))) == 7
    (cause,) = causes()
    assert cause.text.startswith("No subscriber is running; 18 messages are waiting, the oldest for 11 min")
    assert cause.messages == Count(18), "five in the log and three in the outbox for each of two groups, two for one"
    assert cause.advice == "Start “manage.py runsubscriber”."
    assert {one.kind for one in cause.problems} == {"no_subscriber", "silent", "outbox"}
    assert status().state == "stopped"


def test_one_group_without_subscribers_is_not_a_stop(clock):
    busy = Sub(handler("t", "g"))
    gone = Sub(handler("t", "h"))
    publish_many("t", range(5))
    sequence()
    gone.step()
    busy.step()
    clock.advance(100)
    busy.heart.beat()
    (cause,) = causes()
    assert cause.text.startswith("No live subscribers for h/t; 5 messages are waiting")
    assert [one.kind for one in cause.problems] == ["no_subscriber", "silent"]
    assert status().state == "degraded"


def test_a_mode_that_differs_from_the_code_explains_why_nobody_runs(clock, no_handlers):
    sub = Sub(handler("t", "g"))
    publish_many("t", range(5))
    sequence()
    subscriber("t", group="g", mode="shared")(print)
    (cause,) = causes()
    assert (cause.kind, cause.severity) == ("mode", 1), "subscribers of the release before still work"
    assert "is registered as ordered, but" in cause.text
    sub.leave()
    clock.advance(100)
    (cause,) = causes()
    assert [one.kind for one in cause.problems] == ["mode", "no_subscriber"]
    assert (cause.severity, status().state, cause.messages) == (0, "stopped", Count(5))


def test_restarting_subscribers_are_a_note():
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    publish_many("t", range(5))
    sequence()
    (cause,) = causes()
    found = status()
    assert (cause.severity, found.state, found.cause.kind) == (2, "ok", "no_subscriber")
    assert found.text == f"1 consumer group, backlog 5. For information: {found.cause.text}"


def test_many_paused_groups_are_one_cause():
    Sub(*(handler("t", f"g{n}") for n in range(5)))
    for number in range(5):
        pausing.set_paused(USING, GroupRef(f"g{number}", "t"), actor="ada", paused=True)
    publish_many("t", range(2))
    sequence()
    (cause,) = causes()
    assert cause.text == "5 groups are paused: g0/t, g1/t, g2/t and 2 more; 10 messages are waiting."
    assert (status().state, status().cause) == ("degraded", cause), "nothing is processed, but on purpose"


def test_old_dead_letters_are_one_note(clock):
    subs = [Sub(handler("t", name, lambda delivery: delivery.reject("no"))) for name in "ab"]
    publish_many("t", range(2))
    for sub in subs:
        sub.settle()
    sequence()
    assert [(one.kind, one.severity, len(one.refs)) for one in causes()] == [("dead_letters", 1, 2)]
    clock.advance(1000)
    for sub in subs:
        sub.heart.beat()
    (cause,) = causes()
    assert (cause.severity, cause.text) == (2, "2 groups have dead-lettered messages: a/t, b/t.")
    assert (status().state, status().cause) == ("ok", cause)


def test_an_outbox_that_nobody_empties_is_a_stop(clock, settings):
    an_outbox_that_nobody_moves(Stage(clock, settings))
    (cause,) = causes()
    assert (cause.kind, status().state) == ("outbox", "stopped")


def test_topics_without_groups_are_one_cause():
    for topic in ("oders", "paymets"):
        publish_many(topic, range(2))
    sequence()
    (cause,) = causes()
    assert cause.text == "2 topics have messages but no consumer group: oders, paymets; 4 messages are waiting."
    assert cause.messages == Count(4)


def test_an_empty_queue_is_ok():
    found = status()
    assert (found.state, found.name, found.text) == ("ok", "OK", "No consumer group is registered yet.")
    Sub(handler())
    assert status().text == "1 consumer group, backlog 0. No problems found."


def test_the_oldest_message_of_a_queue_without_subscribers_is_not_an_overdue_schedule(clock):
    schedule_worlds.registered(schedule_worlds.of_topic("t"), name="minutely", age=3600)
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    publish_many("t", [Message(1)])
    sequence()
    clock.advance(120)
    (cause,) = causes()
    assert {"recurring", "no_subscriber"} <= {one.kind for one in cause.problems}
    assert cause.text == "No subscriber is running; 1 message is waiting, the oldest for 2 min."
