"""Limits on the rate and on the messages in flight, for all subscribers of a group together."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from django.db import connections
from django.db.models import F

from django_mysqlqueue import Message, publish, publish_many, subscriber
from django_mysqlqueue.checks import system as checks
from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.models import (
    ConsumerGroup,
    ConsumerOffset,
    DeliveryState,
    Operation,
    Slots,
    SubscriberHeartbeat,
)
from django_mysqlqueue.operations import dropping
from django_mysqlqueue.options import delivery_limits
from django_mysqlqueue.options.delivery_limits import NO_KEY, parse_rate
from django_mysqlqueue.testing import deliver_all
from tests.support.harness import USING, Sub, handler, problems_found, take_all
from tests.support.internals import (
    Claim,
    Flushed,
    Session,
    claiming,
    new_messages,
    publisher_key,
    register_groups,
    registry,
    slots,
    watermarks,
)
from tests.support.registered import handle

pytestmark = pytest.mark.promise("Limits")

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])


@pytest.fixture(autouse=True)
def patience(still, monkeypatch):
    """No rate regains a slot while a test looks, and no step takes longer than a message has to start."""
    monkeypatch.setattr(slots, "START_WITHIN_US", 10_000_000)


def rate(text):
    return parse_rate(text)


def later(seconds, *subs):
    """Moves time for the limits: everything that is booked was booked earlier."""
    microseconds = int(seconds * 1_000_000)
    Slots.objects.update(full_at=F("full_at") - microseconds)
    DeliveryState.objects.filter(delivery_token=0, invisible_until__gt=0).update(
        invisible_until=F("invisible_until") - int(seconds * 1000)
    )
    for sub in subs:
        for group in sub.poller.shared:
            group.configure(group.handler)
        for group in sub.poller.ordered:
            group.reset()


def numbers(started):
    return [int(held.body.payload) for held in started]


@MODES
def test_a_rate_lets_messages_start_one_after_another(db, mode):
    one = handler(mode=mode, rate=rate("1/s"))
    sub = Sub(one, threads=4)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(10)])
    assert len(take_all(sub)) == 1
    assert not take_all(sub)
    later(1, sub)
    assert len(take_all(sub)) == 1
    later(100, sub)
    assert len(take_all(sub)) == 1, "what was not used in time is not saved up"


@MODES
def test_a_burst_may_start_at_once(db, mode):
    sub = Sub(handler(mode=mode, rate=rate("1/s"), burst=5), threads=9)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(10)])
    assert len(take_all(sub)) == 5
    later(2, sub)
    assert len(take_all(sub)) == 2


@MODES
def test_a_rate_holds_for_all_subscribers_together(db, mode):
    one = handler(mode=mode, rate=rate("1/m"), burst=3)
    subs = [Sub(one, threads=2) for _ in range(3)]
    publish_many("t", [Message(n, key=f"k{n}") for n in range(10)])
    assert sum(len(take_all(sub)) for sub in subs) == 3
    assert sum(len(take_all(sub)) for sub in subs) == 0


@MODES
def test_retries_take_slots(db, mode):
    def fail(delivery):
        raise ValueError

    sub = Sub(handler(mode=mode, rate=rate("1/m"), burst=2, function=fail), threads=4)
    publish("t", 1, key="k")
    assert sub.settle() == 2
    assert DeliveryState.objects.get().retry_count == 2
    later(60, sub)
    assert sub.settle() == 1


@MODES
def test_waiting_for_a_slot_is_no_attempt(db, mode):
    attempts = []
    one = handler(mode=mode, rate=rate("1/m"), function=lambda delivery: attempts.append(delivery.attempt))
    sub = Sub(one, threads=4)
    publish_many("t", [Message(n, key="k") for n in range(3)])
    for _ in range(6):
        sub.settle()
        later(30, sub)
    assert attempts == [1, 1, 1]
    assert not DeliveryState.objects.exists()


@MODES
def test_a_large_backlog_does_not_become_rows(db, mode):
    sub = Sub(handler(mode=mode, rate=rate("1/m")), threads=4)
    publish_many("t", [Message(n, key=f"k{n % 10}") for n in range(500)])
    for _ in range(10):
        sub.step()
    assert DeliveryState.objects.count() == 1


@MODES
def test_a_rate_per_key_leaves_other_keys_alone(db, mode):
    sub = Sub(handler(mode=mode, rate_per_key=rate("1/m")), threads=9)
    publish_many("t", [Message(n, key=key) for n in range(3) for key in "abc"])
    started = take_all(sub)
    assert sorted(held.claimed.key for held in started) == ["a", "b", "c"]
    assert not take_all(sub)
    publish("t", 0, key="d")
    assert [held.claimed.key for held in take_all(sub)] == ["d"]


def test_in_order_what_stands_behind_a_limited_message_waits(db):
    """Messages of two tenants in one partition: the first without a slot holds up those behind it."""
    sub = Sub(handler(rate_per_key=rate("1/m"), limit_by="tenant"), threads=9)
    for n, tenant in enumerate("aab"):
        publish("t", n, key="k", metadata={"tenant": tenant})
    assert sub.settle() == 1
    assert not DeliveryState.objects.exists()
    later(60, sub)
    assert sub.settle() == 2


def test_a_retry_without_a_slot_is_not_overtaken_in_order(db):
    order = []

    def fail_once(delivery):
        order.append((delivery.payload, delivery.attempt))
        if delivery.payload == 0 and delivery.attempt == 1:
            raise ValueError

    sub = Sub(handler(rate_per_key=rate("1/m"), limit_by="tenant", function=fail_once), threads=9)
    publish("t", 0, key="k", metadata={"tenant": "a"})
    publish("t", 1, key="k", metadata={"tenant": "b"})
    sub.step()
    sub.work(limit=1)
    sub.settle()
    assert (1, 1) not in order or order.index((1, 1)) == 1, "b may go while a is in backoff, not beside a due retry"
    later(60, sub)
    sub.settle()
    assert sorted(order) == [(0, 1), (0, 2), (1, 1)]


def test_in_shared_mode_other_keys_of_the_partition_go_on(db):
    sub = Sub(handler(mode="shared", rate_per_key=rate("1/m"), limit_by="tenant"), threads=9, claim_size=100)
    for n in range(5):
        publish("t", n, key="k", metadata={"tenant": "noise"})
    publish("t", 5, key="k", metadata={"tenant": "b"})
    publish("t", 6, key="k")
    publish("t", 7, key="k")
    assert sorted(numbers(take_all(sub))) == [0, 5, 6, 7], "messages without a tenant are not limited"
    parked = DeliveryState.objects.filter(delivery_token=0)
    assert sorted(parked.values_list("retry_count", "delivered_by")) == [(0, "")] * 4
    for held in list(sub._batches.values()):
        sub.run(held.items[0])
    sub.flush()
    for _ in range(4):
        later(60, sub)
        assert sub.settle() == 1
    assert not DeliveryState.objects.exists()
    assert ConsumerOffset.objects.get().offset_acked > 0


def test_a_single_thread_is_not_held_up_by_another_keys_backlog(db):
    """Though it claims one message at a time, and the backlog is longer than what one claim looks at."""
    got = []
    sub = Sub(
        handler(
            mode="shared",
            rate_per_key=rate("1/h"),
            limit_by="tenant",
            function=lambda delivery: got.append(delivery.payload),
        ),
        threads=1,
    )
    publish_many("t", [Message(n, key="k", metadata={"tenant": "noise"}) for n in range(250)])
    publish("t", "b", key="k", metadata={"tenant": "b"})
    sub.settle()
    assert got == [0, "b"]
    assert DeliveryState.objects.filter(delivery_token=0).count() <= 251


@pytest.mark.parametrize("partitions", [None, 1])
def test_hashed_and_keyless_messages_have_the_limits_of_their_keys(db, settings, partitions):
    if partitions:
        settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": partitions}}}
    sub = Sub(handler(mode="shared", rate_per_key=rate("1/h")), threads=9)
    publish_many("t", [Message(n, key=key) for n in range(3) for key in ("a", "b", None)])
    publish("t", 9, key="a", priority=5)
    started = take_all(sub)
    started += take_all(sub) + take_all(sub)
    keys = sorted(publisher_key(held.claimed.key, held.body.publisher_key) or "" for held in started)
    assert keys == ["", "", "", "a", "b"]


def test_in_shared_mode_claims_look_past_a_bounded_number(db, monkeypatch):
    monkeypatch.setattr(new_messages, "MAX_PARKED", 10)
    sub = Sub(handler(mode="shared", rate_per_key=rate("1/m"), limit_by="tenant"), threads=50)
    for n in range(30):
        publish("t", n, key="k", metadata={"tenant": "noise"})
    publish("t", 30, key="k", metadata={"tenant": "b"})
    for _ in range(5):
        sub.step()
    assert DeliveryState.objects.count() <= 11


@MODES
def test_messages_in_flight_are_limited_for_all_subscribers_together(db, mode):
    one = handler(mode=mode, max_in_flight=3)
    first, second = Sub(one, threads=9), Sub(one, threads=9)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(10)])
    started = take_all(first)
    assert len(started) == 3
    second.beat()
    assert not take_all(second)
    first.run(started[0])
    first.flush()
    later(0, first, second)
    assert len(take_all(second)) + len(take_all(first)) == 1
    assert sum(row.held for row in Slots.objects.filter(limit_key=NO_KEY).exclude(subscriber_name="")) == 3


@MODES
def test_the_slots_of_a_lost_subscriber_come_back_with_its_lease(still, mode):
    one = handler(mode=mode, max_in_flight=3, visibility_timeout=0.1)
    lost, other = Sub(one, threads=9), Sub(one, threads=9)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(6)])
    assert len(take_all(lost)) == 3
    assert not take_all(other)
    SubscriberHeartbeat.objects.filter(subscriber_name=lost.name).update(heartbeat_at=1)
    still.move(150)
    later(0, other)
    started = take_all(other)
    assert sum(held.claimed.suspect for held in started) == 1, "suspected poison messages start one at a time"
    assert other.inbox.slots(one.ref)[NO_KEY] == 3


@MODES
def test_messages_in_flight_are_limited_per_key(db, mode):
    sub = Sub(handler(mode=mode, max_in_flight_per_key=1, limit_by="tenant"), threads=9)
    for n in range(6):
        publish("t", n, key=f"k{n}", metadata={"tenant": "ab"[n % 2]})
    started = take_all(sub)
    assert sorted(number % 2 for number in numbers(started)) == [0, 1]
    assert not take_all(sub)
    sub.run(started[0])
    sub.flush()
    assert len(take_all(sub)) == 1, "its own end frees the key at once"


@MODES
def test_what_is_returned_without_a_start_releases_its_slot(db, mode):
    one = handler(mode=mode, rate=rate("1/h"), burst=3)
    sub = Sub(one, threads=3)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(6)])
    sub.step()
    assert sub.inbox.waiting(one.ref)[0] == 3
    sub.leave()
    assert not sub.take()
    later(0.3)
    assert len(take_all(Sub(one, threads=9))) == 3


@MODES
def test_what_was_started_keeps_its_slot(db, mode):
    one = handler(mode=mode, rate=rate("1/h"), burst=3)
    sub = Sub(one, threads=3)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(6)])
    assert len(take_all(sub)) == 3
    sub.leave()
    assert not take_all(Sub(one, threads=9))


@MODES
def test_a_process_that_was_frozen_returns_what_it_should_have_started(still, mode, monkeypatch):
    """Else it would start what it holds beside that for which others have got slots in the meantime."""
    monkeypatch.setattr(slots, "START_WITHIN_US", delivery_limits.START_WITHIN_US)
    one = handler(mode=mode, rate=rate("1/s"), burst=3)
    sub = Sub(one, threads=3)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(3)])
    sub.step()
    assert sub.inbox.waiting(one.ref)[0] == 3
    still.move(350)
    assert sub.take() is None
    assert sub.inbox.waiting(one.ref)[0] == 0
    sub.flush()
    assert set(DeliveryState.objects.values_list("delivery_token", "retry_count")) == {(0, 0)}
    later(0.5, sub)
    assert len(take_all(sub)) == 3


def test_slots_are_released_less_what_was_regained(db):
    one = handler(mode="shared", rate=rate("10/m"), burst=3)
    sub = Sub(one, threads=3)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(9)])
    sub.step()
    later(18)
    DeliveryState.objects.update(delivered_at=F("delivered_at") - 18_000)
    lane = sub.inbox._groups[one.ref]
    sub.inbox._groups[one.ref].lanes = {key: _older(lane.lanes[key], 18_000) for key in lane.lanes}
    assert len(take_all(Sub(one, threads=9))) == 3, "regained in 18 seconds"
    sub.leave()
    assert not take_all(Sub(one, threads=9)), "not a second time"


def _older(lane, milliseconds):
    for held in lane.waiting:
        held.claimed = held.claimed._replace(delivered_at=held.claimed.delivered_at - milliseconds)
    return lane


def test_the_registered_limits_count(db):
    """Not those of the code: otherwise processes with other code would disagree during a rollout."""
    one = handler(mode="shared", rate=rate("1/h"), burst=2)
    sub = Sub(one, threads=9)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(9)])
    ConsumerGroup.objects.update(limits={"rate": "1/h", "burst": 4})
    assert len(take_all(sub)) == 4


def test_limits_end_when_they_are_unset(db):
    one = handler(mode="shared", max_in_flight=2)
    sub = Sub(one, threads=9)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(9)])
    assert len(take_all(sub)) == 2
    ConsumerGroup.objects.update(overrides={"max_in_flight": {"value": None, "at": 1, "by": "ops"}})
    assert len(take_all(sub)) == 7
    sub.step()
    assert not Slots.objects.exclude(subscriber_name="").exists()


def test_groups_without_limits_have_no_rows(db):
    sub = Sub(handler(), handler(group="h", mode="shared"))
    publish_many("t", [Message(n, key=f"k{n}") for n in range(9)])
    assert sub.settle() == 18
    assert not Slots.objects.exists()


def test_dropping_a_group_deletes_its_slots(db):
    one = handler(mode="shared", rate_per_key=rate("1/m"), max_in_flight=9)
    sub = Sub(one, threads=9)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(3)])
    take_all(sub)
    assert Slots.objects.count() == 5
    assert dropping.drop(USING, one.ref, actor="tests")
    assert not Slots.objects.exists()


def test_rows_that_limit_nothing_any_more_are_deleted(db):
    one = handler(mode="shared", rate_per_key=rate("1/s"), max_in_flight=9)
    sub = Sub(one, threads=9)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(3)])
    take_all(sub)
    assert slots.collect(USING) == 0
    later(2)
    assert slots.collect(USING) == 3
    later(86_400)
    assert slots.collect(USING) == 0, "it is alive"
    SubscriberHeartbeat.objects.all().delete()
    assert slots.collect(USING) == 1
    assert list(Slots.objects.values_list("limit_key", "subscriber_name")) == [("", "")]


def test_limits_are_registered_by_migrate_and_reported_until_then(db, no_handlers, caplog):
    def declare(**options):
        subscriber("t", group="g", mode="shared", **options)(handle)

    declare(rate="5/s")
    register_groups(USING)
    assert ConsumerGroup.objects.get().limits == {"rate": "5/s"}
    assert not Operation.objects.exists(), "a new group has them from the beginning"
    registry._declared.clear()
    declare(rate="10/s", max_in_flight=3)
    first, second = checks.check_registered(databases=["default"])
    assert first.msg == ("rate of the group 'g' on topic 't' is 10/s in the code, but 5/s is registered.")
    assert second.msg.startswith("max_in_flight of the group 'g' on topic 't' is 3 in the code, but none is registered")
    Sub(*registry.handlers().values()).step()
    register_groups(USING)
    assert ConsumerGroup.objects.get().limits == {"rate": "10/s", "max_in_flight": 3}
    operation = Operation.objects.get()
    assert (operation.action, operation.actor, operation.detail) == ("limits", "migrate", "rate=10/s, max_in_flight=3")
    assert checks.check_registered(databases=["default"]) == []
    registry._declared.clear()
    declare()
    register_groups(USING)
    assert ConsumerGroup.objects.get().limits == {}


def test_a_subscriber_whose_code_differs_says_so(db, caplog):
    sub = Sub(handler(rate=rate("9/s")))
    ConsumerGroup.objects.update(limits={"rate": "5/s", "colour": "red", "burst": -1})
    sub.step()
    assert "limits.not_registered" in caplog.text
    assert "registered=5/s code=9/s" in caplog.text
    assert "there is no limit 'colour'" in caplog.text
    assert "burst=-1: must be from 1" in caplog.text
    assert str(sub.poller.groups[0].handler.rate) == "5/s"


@pytest.mark.parametrize("stored", ["[]", "5", '{"rate": null}', '{"rate": {"a": 1}}', '{"limit_by": ["x"]}'])
def test_whatever_plain_sql_registers_does_not_stop_subscribers(db, stored):
    sub = Sub(handler())
    with connections[USING].cursor() as cursor:
        cursor.execute("UPDATE queue_consumer_groups SET limits = %s", [stored])
    publish("t", 1, key="k")
    assert sub.settle() == 1


def test_what_is_reported_of_a_limited_group(still):
    sub = Sub(handler(mode="shared", rate_per_key=rate("1/h")), threads=9)
    publish_many("t", [Message(n, key=key) for n in range(3) for key in "ab"])
    assert sub.settle() == 2
    still.move(1_200_000)
    sub.heart.beat()
    texts = {problem.kind: problem.text for problem in problems_found()}
    assert texts["limited"] == "g/t is limited to 1/h per key; 2 keys are at their limit; 4 messages are waiting."
    assert "still" not in texts
    ConsumerGroup.objects.update(overrides={"rate_per_key": {"value": None, "at": 1, "by": "ops"}})
    assert "limited" not in {problem.kind for problem in problems_found()}


def test_what_is_reported_if_too_many_messages_are_in_flight(still):
    sub = Sub(handler(mode="shared", max_in_flight=2), threads=9)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(5)])
    take_all(sub)
    texts = [problem.text for problem in problems_found() if problem.kind == "limited"]
    assert texts == ["g/t is limited to 2 in flight; 5 messages are waiting."]
    still.move(1_200_000)
    sub.heart.beat()
    assert {"limited", "still"} <= {problem.kind for problem in problems_found()}, "their handlers hang"


def test_deliver_all_honours_limits(db, no_handlers):
    got = []
    subscriber("t", group="g", mode="shared", rate="1/m")(lambda delivery: got.append(delivery.payload))
    publish_many("t", [Message(n, key=f"k{n}") for n in range(3)])
    assert len(deliver_all()) == 1
    assert deliver_all() == []
    assert len(deliver_all(advance=60)) == 1
    assert len(deliver_all(advance=60)) == 1
    assert got == [0, 1, 2]


@MODES
def test_a_batch_takes_a_slot_for_each_message(db, mode):
    sizes = []
    one = handler(
        mode=mode, batch=True, batch_size=10, rate=rate("1/h"), burst=4, function=lambda given: sizes.append(len(given))
    )
    sub = Sub(one, threads=1)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(9)])
    sub.settle()
    assert sum(sizes) == 4


@MODES
def test_slots_are_written_again_after_a_commit_with_an_unknown_outcome(db, mode, monkeypatch):
    one = handler(mode=mode, max_in_flight=3, rate=rate("1/h"), burst=9)
    sub, other = Sub(one, threads=9), Sub(one, threads=9)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(9)])
    watermarks.create_missing(USING, one.ref, [f"k{n}" for n in range(9)])
    real = claiming.claim

    def unknown(using, request):
        if real(using, request).deliveries:
            raise CommitOutcomeUnknown("the connection broke")
        return Claim(Flushed())

    monkeypatch.setattr(claiming, "claim", unknown)
    with pytest.raises(CommitOutcomeUnknown):
        sub.step()
    assert sum(Slots.objects.values_list("held", flat=True)) == 3
    monkeypatch.setattr(claiming, "claim", real)
    group = sub.poller.groups[0]
    group.configuration.stopped = True  # It claims nothing, which would write the same rows.
    group.turn()
    assert sum(Slots.objects.values_list("held", flat=True)) == 0
    later(0, other)
    assert len(take_all(other)) == 3


def start(still, sub, number):
    """Waits until some messages have started, for at most ten seconds."""
    until, started = time.monotonic() + 10, 0
    while started < number:
        assert time.monotonic() < until, f"only {started} have started"
        started += len(take_all(sub))
        still.move(20)


@MODES
def test_a_faster_rate_counts_at_once(still, mode):
    """Though the account is full for a day by the slower rate before."""
    sub = Sub(handler(mode=mode, rate=rate("1/d")), threads=9)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(10)])
    assert len(take_all(sub)) == 1
    ConsumerGroup.objects.update(overrides={"rate": {"value": "100/s", "at": 1, "by": "ops"}})
    start(still, sub, 5)


@MODES
def test_a_clock_that_was_corrected_does_not_block_a_group(still, mode):
    sub = Sub(handler(mode=mode, rate=rate("100/s")), threads=9)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(10)])
    in_an_hour = (still.now + 3_600_000) * 1000
    Slots.objects.create(consumer_group="g", topic="t", limit_key="", subscriber_name="", full_at=in_an_hour)
    start(still, sub, 5)


def test_a_due_message_without_a_slot_is_not_overtaken_when_its_key_is_free_again(db):
    """Two messages of a partition were released; the first waits for a slot that ends in another partition."""
    order = []
    one = handler(max_in_flight_per_key=1, limit_by="tenant", function=lambda delivery: order.append(delivery.payload))
    sub, first = Sub(one, threads=9), Sub(one, threads=9)
    for n, tenant in enumerate("ac"):
        publish("t", n, key="p", metadata={"tenant": tenant})
    first.step()
    assert first.inbox.waiting(one.ref)[0] == 2
    first.leave()
    publish("t", "q", key="q", metadata={"tenant": "a"})
    slots_of_q = slots.Holding("other", one.limits, held={":a": 1})
    other = Sub(one, name="other")
    session = Session(USING)
    slots.store_held(session, one.ref, replace(slots_of_q, subscriber=other.name), {":a": 1})
    sub.step()
    assert sub.take() is None
    Slots.objects.filter(subscriber_name=other.name).delete()
    for key in sub.poller.groups[0].limited.configure(one.limits):
        sub.poller.groups[0].notify([key])
    sub.settle()
    assert order.index(0) < order.index(1)


@MODES
def test_limits_that_are_switched_on_bind_what_waits_in_a_process(db, mode):
    sub = Sub(handler(mode=mode), threads=4)
    publish_many("t", [Message(n, key=f"k{n}") for n in range(50)])
    sub.step()
    assert sub.inbox.waiting(sub.poller.groups[0].ref)[0] == 50
    ConsumerGroup.objects.update(limits={"rate": "1/m", "max_in_flight": 2})
    assert sum(len(take_all(sub)) for _ in range(3)) == 1


@MODES
def test_rows_that_a_failover_brings_back_are_written_again(db, mode):
    one = handler(mode=mode, max_in_flight_per_key=1)
    sub = Sub(one, threads=9)
    publish("t", 0, key="a")
    sub.settle()
    Slots.objects.create(consumer_group="g", topic="t", limit_key=":a", subscriber_name=sub.name, held=1)
    sub.poller.reset()
    publish("t", 1, key="a")
    sub.settle()
    assert not Slots.objects.exclude(subscriber_name="").exists()
