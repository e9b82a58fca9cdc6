"""Processes that die again and again: a problem at once, with the message that does it, until it is over."""

from __future__ import annotations

import pytest

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.inspection import check_health, find_causes, find_problems
from django_mysqlqueue.models import DeliveryState, SubscriberHeartbeat
from tests.app import jobs
from tests.support import job_worlds
from tests.support.harness import USING, Sub, handler, take_all
from tests.support.internals import GroupRef, heartbeats, registry, releasing, settling

pytestmark = pytest.mark.still_clock

G = GroupRef("g", "t")


def die(*handlers, how="SIGKILL", threads=1):
    """A process starts what it can, and dies; the process that replaces it releases what it held."""
    sub = Sub(*handlers, threads=threads)
    held = take_all(sub)
    for one in held:
        if one.claimed.suspect:
            assert settling.record_start(USING, one.claimed)
    shared = [one.ref for one in handlers if one.shared]
    releasing.release_all(USING, sub.name, sub.handlers, shared=shared, died=how)
    return held


def found():
    return [(one.severity, one.ref, one.offset, one.text) for one in find_problems(using=USING) if one.kind == "deaths"]


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_the_second_death_with_a_message_is_a_problem_at_once(db, clock, mode):
    publish("t", 0, key="k")
    one = handler(mode=mode)
    (held,) = die(one)
    assert found() == []
    clock.advance(10)
    die(one, how="exit status 3")
    text = (
        f"Message {held.claimed.offset} of g/t was being handled when 2 processes died in the last 10 s, the last one "
        "with exit status 3."
    )
    assert found() == [(0, G, held.claimed.offset, text)]
    assert "deaths" in {one.kind for one in check_health(using=USING).findings}
    (cause,) = [one for one in find_causes(using=USING) if one.kind == "deaths"]
    assert cause.text == text
    assert "out-of-memory killer" in cause.advice


def test_a_job_is_named_by_its_task(db, clock, no_handlers, settings):
    settings.TASKS = job_worlds.TASKS
    jobs.die_twice.enqueue()
    (one,) = registry.handlers().values()
    die(one)
    clock.advance(5)
    die(one)
    Sub(one).step().leave()  # It notices the loss, and the job waits.
    clock.advance(5)
    die(one)
    ((_, ref, _, text),) = found()
    assert ref == job_worlds.JOBS
    assert text.startswith("The job tests.app.jobs.die_twice (message ")
    assert text.endswith("was running when 3 processes died in the last 10 s, the last one with SIGKILL.")


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_only_the_message_that_was_there_each_time_is_named(db, clock, mode):
    """Its neighbours in the first process were suspected, too, and so are those of another process."""
    publish_many("t", (Message(n, key=f"k{n}") for n in range(3)))
    one = handler(mode=mode, visibility_timeout=600)
    assert len(die(one, threads=3)) == 3
    other = Sub(one, threads=1)
    heartbeats.deregister(USING, other.name, [G])
    (poison,) = [held for held in die(one, threads=3) if held.claimed.suspect]
    ((_, _, offset, _),) = found()
    assert offset == poison.claimed.offset


def test_a_crash_loop_minute_by_minute(db, clock):
    """It is a problem while the message can do it again, and for two minutes after that."""
    publish("t", 0, key="k")
    one = handler(mode="shared", visibility_timeout=600)
    die(one)
    for number in range(2, 6):
        clock.advance(60)
        die(one)
        ((severity, _, _, text),) = found()
        assert severity == 0
        assert f"{number} processes died in the last {number - 1} min" in text
    for _ in range(5):  # Its supervisor is gone, or the message waits.
        clock.advance(60)
        assert [severity for severity, *_ in found()] == [0]
    DeliveryState.objects.update(acked=True)
    assert found() == []


def test_a_message_that_was_settled_is_over_after_two_minutes(db, clock):
    publish("t", 0, key="k")
    one = handler(mode="shared", visibility_timeout=600)
    die(one)
    die(one)
    Sub(one).settle()
    for seconds, expected in ((0, [0]), (119, [0]), (2, [])):
        clock.advance(seconds)
        assert [severity for severity, *_ in found()] == expected


def test_deaths_without_a_common_message_minute_by_minute(db, clock):
    """First an alarm, then a note, then nothing."""
    for _ in range(2):
        die(handler(), how="SIGSEGV")
        clock.advance(30.1)
    text = "2 processes on tests died in the last 1 min, the last one with SIGSEGV."
    assert found() == [(0, None, None, text)]
    seen = []
    for _ in range(11):
        clock.advance(60)
        seen.append([severity for severity, *_ in found()])
    assert seen == [[0]] + [[2]] * 7 + [[]] * 3


def test_a_process_that_works_for_many_groups_dies_once(db):
    groups = [handler(topic=f"t{number}") for number in range(5)]
    for number in range(5):
        publish(f"t{number}", 0, key="k")
    die(*groups, threads=5)
    assert found() == []


def test_a_supervisor_that_waits_is_said(db, clock, settings):
    """It was “Start runsubscriber”, while a supervisor was in its back-off."""
    publish("t", 0, key="k")
    sub = Sub(handler())
    sub.step()
    SubscriberHeartbeat.objects.update(info={"host": "h1", "supervised": True})
    advice = "Wait: the supervisor on h1 starts a process again within 30 s. Check why the last one died."

    def advised():
        return {cause.advice for cause in find_causes(using=USING) if cause.kind == "no_subscriber"}

    clock.advance(29)
    assert advised() == set()
    clock.advance(2)
    assert advised() == {advice}
    clock.advance(43)
    assert advised() == {advice}
    clock.advance(2)
    assert advised() == {"Start “manage.py runsubscriber”."}


def test_without_a_supervisor_nothing_is_promised(db, clock):
    publish("t", 0, key="k")
    Sub(handler()).step()
    clock.advance(40)
    (cause,) = find_causes(using=USING)
    assert cause.advice == "Start “manage.py runsubscriber”."
