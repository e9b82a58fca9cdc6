"""The queue at a glance: what the dashboard, the metrics and the health check read, beside exact counts."""

from __future__ import annotations

import pytest

from django_mysqlqueue import Message, publish, publish_many, subscriber
from django_mysqlqueue.inspection import (
    PAGES,
    Bounds,
    OutboxOverview,
    find_problems,
    get_overview,
    partitions,
)
from django_mysqlqueue.models import ConsumerOffset, QueueMessage, SubscriberHeartbeat
from django_mysqlqueue.operations import redriving
from django_mysqlqueue.options.backoff import Backoff
from tests.support import oracle
from tests.support.dashboard import WAITS
from tests.support.handlers import both_modes, fail
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.inspected import group_of
from tests.support.internals import Count, DeadLetterFilter, GroupRef, Session, groups, sequencing
from tests.support.internals import log as service_log
from tests.support.scenarios import dead_letters

pytestmark = pytest.mark.usefixtures("db")

G = GroupRef("g", "t")


def read(bounds=PAGES):
    return get_overview(using=USING, bounds=bounds)


def group(ref=G, bounds=PAGES):
    found = group_of(*ref, using=USING, bounds=bounds)
    assert found is not None
    assert found in read(bounds).groups
    return found


def log(count, keys="ab", topic="t"):
    publish_many(topic, (Message(number, key=keys[number % len(keys)]) for number in range(count)))
    sequence()


def register(ref=G, mode="ordered", start="earliest"):
    groups.register(USING, ref, mode=mode, start=start)


def test_an_empty_queue():
    found = read()
    assert (found.groups, found.lag, found.live, found.oldest_at) == ((), Count(0), frozenset(), None)
    assert found.outbox == OutboxOverview({}, {}, Count(0), None)
    assert group_of(*G, using=USING) is None


@both_modes
def test_each_stage_of_a_message_is_counted_where_it_is(mode):
    sub = Sub(handler(mode=mode, function=fail, max_attempts=2, backoff=Backoff(initial=3600, jitter=0)))
    publish("t", 1, key="a")
    assert (read().outbox.waiting, group().lag) == (Count(1), Count(0))
    assert read().outbox.waiting_since == pytest.approx(read().now, abs=60_000)
    sequence()
    assert (read().outbox.waiting, group().lag, group().in_flight) == (Count(0), Count(1), Count(0))
    sub.step()
    held = sub.take()
    assert (group().lag, group().in_flight, group().retrying) == (Count(1), Count(1), Count(0))
    (head,) = group().heads
    assert (head.key, head.started, head.delivered_by) == ("a", True, sub.name)
    sub.run(held)
    sub.flush()
    assert (group().lag, group().in_flight, group().retrying) == (Count(1), Count(0), Count(1))
    (head,) = group().heads
    assert (head.attempts, head.delivered_by) == (1, "")
    assert "ValueError: no 1" in head.last_error
    assert head.invisible_until > read().now


def test_dead_letters_count_for_the_group_that_failed_them():
    sub = Sub(handler("t", "bad", fail, max_attempts=1), handler("t", "good"))
    log(3)
    sub.settle()
    sequence()
    assert group(GroupRef("bad", "t")).dead_letters == Count(3)
    assert group(GroupRef("good", "t")).dead_letters == Count(0)
    assert (group(GroupRef("bad", "t")).lag, read().dead_letters) == (Count(0), Count(3))


def test_scheduled_messages_are_not_waiting():
    at = read().now + 3_600_000
    publish("t", 1, delay=3600)
    found = read().outbox
    assert (found.waiting, found.scheduled) == (Count(0), Count(1))
    assert found.next_at == pytest.approx(at, abs=60_000)


@both_modes
def test_partitions_that_a_group_has_never_seen_count(mode):
    register(mode=mode)
    log(10)
    assert group().lag == Count(10)
    assert [head.key for head in group().heads] == ["a", "b"]
    sub = Sub(handler(mode=mode))
    sub.settle()
    assert (group().lag, group().heads) == (Count(0), ())
    log(4, keys="abcd")  # and two of them are new
    assert group().lag == Count(4)
    assert group().oldest_at == min(head.published_at for head in group().heads)


def test_of_very_many_partitions_the_first_and_the_newest_are_looked_at():
    bounds = Bounds(partitions=3)
    sub = Sub(handler())
    log(4, keys="abcd")
    sub.settle()
    assert group(bounds=bounds).lag == Count(0, exact=False)
    log(12, keys="abcdefghijkl")
    log(service_log.NEWEST - 2, topic="other")  # so k and l are the only ones of t among the newest
    assert group(bounds=bounds).lag == Count(3 + 2, exact=False), "a to c, k and l"
    assert [head.key for head in group(bounds=bounds).heads] == ["a", "b", "c", "k", "l"]
    sub.settle()
    assert group(bounds=bounds).lag.value == 0


def test_positions_in_partitions_whose_messages_were_deleted_hide_no_other():
    sub = Sub(handler())
    log(8, keys="abcdefgh")
    sub.settle()
    QueueMessage.objects.exclude(partition_key__in=("a", "h")).delete()
    log(1, keys="h")
    assert group(bounds=Bounds(partitions=2)).lag == Count(1)


def test_looking_into_partitions_takes_a_bounded_time():
    register()
    log(6, keys="abcdef")
    register(GroupRef("h", "t"))
    shown = [one.lag for one in read(Bounds(seconds=0.0, piece=2)).groups]
    assert shown == [Count(2, exact=False)] * 2, "nobody with a backlog seems to have none"


@both_modes
def test_counts_stop_at_the_cap_and_say_so(mode):
    bounds = Bounds(count=7)
    sub = Sub(handler(mode=mode))
    log(2)
    sub.settle()
    log(6)
    assert str(group(bounds=bounds).lag) == "6"
    log(6)
    assert str(group(bounds=bounds).lag) == "7+"
    publish_many("t", [Message(number, delay=60) for number in range(9)])
    assert str(read(bounds).outbox.scheduled) == "7+"


def test_messages_for_another_group_are_no_lag():
    register(GroupRef("other", "t"))
    sub = Sub(handler("t", "bad", fail, max_attempts=1), handler("t", "g"))
    log(2)
    sub.settle()
    sequence()
    redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor="ada")
    sequencing.sequence(USING)
    assert group(GroupRef("bad", "t")).lag == Count(2)
    assert group(G).lag == Count(0)


def test_a_subscriber_is_live_silent_or_gone():
    sub = Sub(handler())
    assert [row.live for row in group().subscribers] == [True]
    assert read().live == {sub.name}
    SubscriberHeartbeat.objects.update(heartbeat_at=read().now - 30_001)
    assert [(row.name, row.live) for row in group().subscribers] == [(sub.name, False)]
    assert (group().live, read().live) == ((), frozenset())
    sub.heart.beat()
    sub.leave()
    assert group().subscribers == ()


def test_it_agrees_with_the_exact_counts_of_a_busy_queue():
    handlers = [handler("t", "g", fail, max_attempts=2), handler("t", "s", mode="shared"), handler("u", "g")]
    sub = Sub(*handlers, claim_size=7)
    for number in range(12):
        log(number * 3, keys="abcde"[: 1 + number % 5])
        log(number, topic="u")
        sub.step()
        sub.work(limit=number)
        if number % 3 == 0:
            sub.flush()
        for one in handlers:
            count, oldest = oracle.unsettled(Session(USING), one.ref)
            assert (group(one.ref).lag, group(one.ref).oldest_at) == (Count(count), oldest)
    assert ConsumerOffset.objects.count() > 10


def test_only_so_many_groups_are_read():
    for name in "abc":
        register(GroupRef(name, "t"))
    found = read(Bounds(groups=2))
    assert ([one.ref.group for one in found.groups], found.more_groups) == (["a", "b"], True)
    assert not read().more_groups


def test_every_topic_is_found_by_its_index():
    for topic in ("b", "a", "B", "c"):
        publish(topic, 1)
    sequence()
    assert service_log.all_topics(Session(USING)) == ["B", "a", "b", "c"]


def test_a_partitions_lag_counts_what_is_for_the_group_and_says_where_it_stopped():
    (first,) = dead_letters(1, keys="a")
    for name in ("h", "i"):
        groups.register(USING, GroupRef(name, "t"), mode="shared", start="earliest")
    ref = GroupRef("h", "t")
    sub = Sub(handler(group="h", mode="shared"))
    sub.settle()
    redriving.redrive_all(USING, DeadLetterFilter("t_dlq", offsets=(first,)), actor="ada")
    sequence()
    assert str(partitions.at(Session(USING), group(ref), ["a"])[0].lag) == "0"
    assert str(partitions.at(Session(USING), group(), ["a"])[0].lag) == "1"
    # Behind one that waits more are acked than are looked at.
    log(5, "b")
    waits = Sub(handler(group="i", mode="shared", backoff=WAITS, function=lambda one: one.payload or one.nack()))
    waits.settle()
    few = Bounds(partition_count=2)
    assert str(partitions.at(Session(USING), group(GroupRef("i", "t")), ["b"], bounds=few)[0].lag) == "1+"


@both_modes
def test_a_message_that_fails_again_and_again_holds_up_others_in_ordered_mode_alone(mode, clock):
    log(1, "a")
    sub = Sub(handler(mode=mode, function=fail, max_attempts=None))
    sub.step()
    sub.work(1)
    sub.flush()
    clock.advance(120)
    sub.heart.beat()
    (problem,) = (one for one in find_problems(read()) if one.kind == "stuck")
    number = problem.offset
    assert problem.text == f"Message {number} of g/t has failed once and has waited for 2 min."
    assert (problem.key, problem.severity) == ("a", 1 if mode == "ordered" else 2), "the handler may block"


@pytest.mark.parametrize("on_failure", ["skip", "block"])
def test_later_messages_wait_for_a_failed_one_only_if_the_handler_blocks(on_failure, clock, no_handlers):
    subscriber("t", group="g", on_failure=on_failure)(fail)
    sub = Sub(handler(function=fail, max_attempts=None, on_failure=on_failure))
    log(1, "a")
    sub.step()
    sub.work(1)
    sub.flush()
    clock.advance(120)
    sub.heart.beat()
    (problem,) = (one for one in find_problems(read()) if one.kind == "stuck")
    if on_failure == "block":
        text = (
            f"Partition 'a' of g/t waits for message {problem.offset}, which has failed once. It has waited for 2 min."
        )
        assert (problem.text, problem.severity) == (text, 1)
    else:
        assert problem.text == f"Message {problem.offset} of g/t has failed once and has waited for 2 min."
        assert problem.severity == 2
