"""When problems of groups began."""

from __future__ import annotations

import pytest

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.inspection import beginnings, find_problems, get_overview
from django_mysqlqueue.inspection.beginnings import Began, Failed, Rule
from django_mysqlqueue.models import ConsumerGroup, DeliveryEvent, Operation, Rollup
from django_mysqlqueue.operations import pausing
from django_mysqlqueue.options.backoff import Backoff
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, Session, groups

pytestmark = [pytest.mark.usefixtures("db"), pytest.mark.still_clock]

G = GroupRef("g", "t")
MINUTE = 60_000


def began():
    return beginnings.of_groups(Session(USING), get_overview(using=USING).groups)


def problem(kind):
    (found,) = (one for one in find_problems(using=USING) if one.kind == kind)
    return found


def test_a_group_is_paused_since_its_last_pause():
    Sub(handler("t", "g"), handler("t", "h"), handler("t", "busy"))
    publish_many("t", range(3))
    sequence()
    pausing.set_paused(USING, G, actor="ada", paused=True)
    pausing.set_paused(USING, G, actor="ada", paused=False)
    Operation.objects.update(started_at=1)
    ConsumerGroup.objects.update(registered_at=1)
    before = Session(USING).now()
    pausing.set_paused(USING, G, actor="ada", paused=True)
    pausing.set_paused(USING, GroupRef("h", "t"), actor="ada", paused=True)
    after = Session(USING).now()
    found = began()
    assert found.keys() >= {G, GroupRef("h", "t")}
    assert before <= found[G].paused_at <= after
    assert {one.since for one in find_problems(using=USING) if one.kind == "paused"} == {
        found[G].paused_at,
        found[GroupRef("h", "t")].paused_at,
    }
    ConsumerGroup.objects.filter(consumer_group="g").update(registered_at=after + 1)
    assert began()[G].paused_at is None, "a group of this name was dropped"


def test_a_group_has_had_subscribers_until_the_last_of_them_ended(clock):
    groups.register(USING, G, mode="ordered", start="earliest")
    publish_many("t", range(3))
    sequence()
    assert began() == {G: Began()}
    assert problem("no_subscriber").since is None
    first, second = Sub(handler("t", "g")), Sub(handler("t", "g"))
    assert began() == {}, "they are live"
    clock.advance(20)
    first.heart.beat()
    clock.advance(5)
    stopped_at = Session(USING).now()
    first.leave()
    clock.advance(3600)
    assert began()[G].had_subscribers
    assert began()[G].served_until == pytest.approx(stopped_at, abs=5000), "the other one was lost before"
    assert problem("no_subscriber").since == began()[G].served_until
    assert "drop" not in problem("no_subscriber").advice
    del second


def test_the_positions_of_a_group_tell_that_it_has_had_subscribers(clock):
    gone = Sub(handler("t", "g"))
    publish_many("t", range(3))
    gone.settle()
    gone.leave()
    publish_many("t", range(3))
    sequence()
    clock.advance(3600)
    Session(USING).execute("DELETE FROM queue_subscriber_heartbeats")  # as GC does after a day
    assert began() == {G: Began(None, had_subscribers=True)}


def rollup(minutes, *, now, grain=60, group="g", **counts):
    at = (now - minutes * MINUTE) // (grain * 1000) * grain * 1000
    Rollup.objects.create(consumer_group=group, topic="t", grain=grain, bucket_at=at, **counts)
    return at


def failing(*refs, now):
    past = beginnings.of_failures(Session(USING), refs or [G], now, Rule(0.5, 4), most=10, window=600)
    return {ref: one.since for ref, one in past.items()}


def test_failures_began_after_the_last_successes():
    now = Session(USING).now()
    assert failing(now=now) == {G: None}
    rollup(300, now=now, failed=9)
    rollup(90, now=now, acked=9, failed=3)
    rollup(60, now=now)
    first = rollup(40, now=now, failed=5)
    last = rollup(1, now=now, failed=1, dead_lettered=1)
    rollup(30, now=now, group="h", acked=9)
    assert failing(now=now) == {G: first}
    rollup(5, now=now, acked=1)
    assert failing(now=now) == {G: first}, "most of the newest fail"
    rollup(4, now=now, acked=9)
    assert failing(now=now) == {G: None}
    rollup(0, now=now, failed=9)
    assert failing(now=now) == {G: last}


def test_failures_that_began_before_the_minutes_kept_are_found_by_hour():
    now = Session(USING).now()
    rollup(1, now=now, failed=1)
    rollup(900, now=now, grain=3600, acked=3, failed=2)
    first = rollup(700, now=now, grain=3600, dead_lettered=1)
    assert failing(now=now) == {G: first}


def test_only_some_groups_are_read(django_assert_max_num_queries):
    now = Session(USING).now()
    refs = [GroupRef(f"g{number:02}", "t") for number in range(30)]
    for ref in refs:
        rollup(1, now=now, group=ref.group, failed=1)
    assert sorted(failing(*refs, now=now)) == refs[: beginnings.FAILING]


def test_dead_letters_began_when_there_were_too_many():
    now = Session(USING).now()

    def since():
        return beginnings.of_failures(Session(USING), [G], now, Rule(0.5, 4), most=10, window=600)[G].dead_since

    rollup(30, now=now, dead_lettered=99)
    assert since() is not None
    rollup(15, now=now, dead_lettered=10)
    assert since() is None
    first = rollup(2, now=now, dead_lettered=4)
    rollup(1, now=now, dead_lettered=7)
    assert since() == first
    rollup(350, now=now, dead_lettered=99, group="h")
    h = GroupRef("h", "t")
    assert beginnings.of_failures(Session(USING), [h], now, Rule(0.5, 4), most=10, window=600)[h].dead_since is None


def test_a_stuck_message_has_its_problem_since_its_first_failure(clock):
    def fails(delivery):
        raise ValueError(delivery.payload)

    publish_many("t", [Message(1, key="k")])
    sequence()
    clock.advance(3600)
    sub = Sub(handler("t", "g", fails, backoff=Backoff(initial=10, factor=1, jitter=0), max_attempts=None))
    other = Sub(handler("t", "h", fails, backoff=Backoff(initial=10, factor=1, jitter=0), max_attempts=None))
    other.settle()
    clock.advance(300)
    for _ in range(3):
        sub.settle()
        clock.advance(60)
        sub.heart.beat()
    events = DeliveryEvent.objects.filter(consumer_group="g", outcome="failed").order_by("id")
    assert events.count() == 3
    found = [one for one in find_problems(using=USING) if one.kind == "stuck" and one.ref == G]
    assert [one.since for one in found] == [events[0].settled_at]
    assert found[0].oldest_at < found[0].since
    one = Failed(G, found[0].offset)
    session = Session(USING)
    assert beginnings.of_messages(session, {one: events[1].settled_at}) == {one: events[1].settled_at}, "after a seek"
    assert beginnings.of_messages(session, {Failed(G, 10**9): 0}) == beginnings.of_messages(session, {}) == {}
