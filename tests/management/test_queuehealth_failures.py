"""queuehealth: handlers that fail."""

from __future__ import annotations

import json
import re

import pytest
from django.core.management import CommandError
from health_check.exceptions import ServiceUnavailable

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.health import QueueHealth
from django_mysqlqueue.inspection import Bounds, find_problems
from django_mysqlqueue.management.commands import queuehealth
from django_mysqlqueue.operations import redriving
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.health import backlog, kinds, register, run
from tests.support.internals import Session, dead_letters


def deploy(count, *, bad, **options):
    """A handler that dead-letters ``bad`` of ``count`` messages at their first attempt and acks the others."""
    sub = Sub(handler(function=lambda delivery: delivery.payload >= bad or delivery.reject("bad deploy"), **options))
    publish_many("t", range(count))
    sub.settle()
    sequence()
    return sub


@pytest.mark.promise("Health")
def test_a_bad_deploy_is_unhealthy_at_once(db):
    """Before any subscriber has written its counts: the log has the dead letters."""
    deploy(200, bad=200)
    code, output = run()
    assert code == 1
    assert "PROBLEM  g/t dead-lettered 200 messages in the last 10 min (limit 10)" in output
    assert kinds() == {("recent_dead_letters", "g")}


def test_a_problem_has_its_error_and_since_when(db, clock):
    began = Session(USING).now()
    sub = deploy(200, bad=200)
    sub.poller.write_rollups()
    clock.advance(180)
    sub.heart.beat()
    lines = run()[1].splitlines()
    assert lines[0].startswith("PROBLEM  g/t: every attempt has failed since ")
    assert lines[1] == "         bad deploy"
    assert re.fullmatch(r"         since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \(3 min( \d+ s)?\)", lines[2])
    assert lines[3:] == []
    found = json.loads(run("--format", "json")[1])
    problems = {one["kind"]: one for one in found["problems"]}
    assert set(problems) == {"failing", "recent_dead_letters"}
    for one in problems.values():
        assert one["error"] == "bad deploy"
        assert began - 60_000 <= one["since"] < began + 60_000


def test_what_has_no_error_has_none(db, clock):
    backlog()
    register()
    clock.advance(100)
    (problem,) = json.loads(run("--format", "json")[1])["problems"]
    assert (problem["kind"], problem["error"]) == ("no_subscriber", None)
    assert problem["since"] is not None
    assert run()[1].splitlines()[1].startswith("         oldest message since 20")


@pytest.mark.parametrize(("number", "code"), [(1, 0), (10, 0), (11, 1)])
def test_a_few_dead_letters_are_a_note(db, number, code):
    deploy(number + 100, bad=number).poller.write_rollups()
    found, output = run()
    assert found == code
    kind = "PROBLEM  g/t dead-lettered 11 messages" if code else f"note     g/t has dead-lettered messages: {number} in"
    assert output.startswith(kind)


def test_dead_letters_that_were_dealt_with_or_are_old_are_no_alarm(db, clock):
    sub = deploy(20, bad=20)
    assert kinds() == {("recent_dead_letters", "g")}
    redriving.redrive_all(USING, dead_letters.DeadLetterFilter("t_dlq"), actor="ada")
    assert kinds() == set(), "they are on their way again"
    sub.settle()
    sequence()
    assert kinds("--window", "60") == {("recent_dead_letters", "g")}
    clock.advance(61)
    assert kinds("--window", "60") == set()
    assert kinds() == {("recent_dead_letters", "g")}
    clock.advance(600)
    assert kinds() == set()


def test_in_a_dlq_that_is_too_long_to_count_the_rollups_tell(db, monkeypatch):
    monkeypatch.setattr(queuehealth.Command, "bounds", Bounds(count=5))
    sub = deploy(12, bad=12)
    assert kinds("--max-failure-ratio", "1") == set(), "up to ten seconds late"
    sub.poller.write_rollups()
    assert kinds("--max-failure-ratio", "1") == {("recent_dead_letters", "g")}
    assert "g/t dead-lettered 12+ messages" in run()[1]


def test_the_share_of_failures(db, clock):
    sub = deploy(40, bad=10, group="g")
    sub.poller.write_rollups()
    assert kinds("--max-failure-ratio", "0.2") == set(), "the subscribers have just started"
    clock.advance(60)
    sub.heart.beat()
    assert kinds() == set(), "a quarter"
    assert kinds("--max-failure-ratio", "0.2") == {("failing", "g")}
    text = r"PROBLEM  g/t: 10 of 40 attempts have failed since [^(]+ \(limit 20%\)[:.]"
    assert re.match(text, run("--max-failure-ratio", "0.2")[1])
    assert kinds("--max-failure-ratio", "0.25") == set()
    assert kinds("--max-failure-ratio", "0.2", "--min-attempts", "41") == set()
    clock.advance(600)
    sub.heart.beat()
    assert kinds("--max-failure-ratio", "0.2") == set()


@pytest.mark.promise("Health")
@pytest.mark.parametrize(("number", "code"), [(1, 0), (9, 0), (10, 1)])
def test_one_of_one_is_no_alarm(db, clock, number, code):
    """A single poisoned message of a quiet queue fails every attempt there is."""
    sub = Sub(handler(function=lambda delivery: delivery.nack(delay=60)))
    publish_many("t", [Message(n, key=f"k{n}") for n in range(number)])
    sub.settle()
    sub.poller.write_rollups()
    clock.advance(60)
    sub.heart.beat()
    found, output = run()
    assert found == code
    kind = "PROBLEM" if code else "note"
    assert re.search(rf"^{kind} +g/t: every attempt has failed since [^(]+ \({number} of {number}\)\.", output)
    assert run("--max-failure-ratio", "1")[0] == 0


def test_thresholds_of_the_settings(db, settings, clock):
    settings.MYSQLQUEUE = {"HEALTH": {"MAX_RECENT_DEAD_LETTERS": 2}}
    sub = deploy(103, bad=3)
    sub.poller.write_rollups()
    clock.advance(60)
    sub.heart.beat()
    assert kinds() == {("recent_dead_letters", "g")}
    assert kinds("--max-recent-dead-letters", "3") == set()
    assert "recent_dead_letters" in {one.kind for one in find_problems(using=USING)}
    with pytest.raises(ServiceUnavailable, match=r"g/t dead-lettered 3 messages in the last 10 min \(limit 2\)"):
        QueueHealth().run()
    assert QueueHealth(max_recent_dead_letters=3).run() is None
    settings.MYSQLQUEUE = {"HEALTH": {"MAX_RECENT_DEAD_LETTERS": None, "MAX_FAILURE_RATIO": 0.01}}
    assert kinds() == {("failing", "g")}
    settings.MYSQLQUEUE = {"HEALTH": {"MAX_RECENT_DEAD_LETTERS": None, "MAX_FAILURE_RATIO": None}}
    assert kinds() == set()
    settings.MYSQLQUEUE = {"HEALTH": {"MAX_FAILURE_RATIO": 50}}
    with pytest.raises(CommandError, match="MAX_FAILURE_RATIO = 50"):
        run()
    with pytest.raises(ServiceUnavailable, match="MAX_FAILURE_RATIO = 50"):
        QueueHealth().run()
