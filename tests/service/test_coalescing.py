"""Coalescing: of the messages with one coalesce key, a group handles the latest that it has not started."""

from __future__ import annotations

import itertools

import pytest
from django.core.management import call_command
from django.db import OperationalError

from django_mysqlqueue import InvalidMessage, Message, operations, publish, publish_many, subscriber
from django_mysqlqueue.filter_policies import parse
from django_mysqlqueue.inspection import message_history
from django_mysqlqueue.models import (
    CoalesceKey,
    ConsumerOffset,
    DeliveryEvent,
    DeliveryState,
    OutboxMessage,
    QueueMessage,
    Rollup,
)
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.delivery_limits import Rate
from django_mysqlqueue.testing import deliver_all
from tests.support import garbage
from tests.support.claims import claimant_of
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.internals import (
    KEY_LENGTH,
    ClaimRequest,
    GroupRef,
    Session,
    Want,
    claiming,
    coalescing,
    groups,
    slots,
    superseding,
    watermarks,
)

pytestmark = pytest.mark.promise("Coalescing")

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])
REF = GroupRef("g", "t")
WAIT = Backoff(initial=60, jitter=0)


def getting(got, **options):
    return handler(function=lambda delivery: got.append(delivery.payload), **options)


def store(coalesce_key, region="", **columns):
    """Puts a message into the outbox as plain SQL does."""
    columns |= {"topic": "t", "partition_key": "k", "payload": b"1", "metadata": {"region": region}}
    OutboxMessage.objects.create(coalesce_key=coalesce_key, **columns)


# -- the latest -----------------------------------------------------------------


@MODES
def test_only_the_latest_is_handled(db, mode):
    got = []
    sub = Sub(getting(got, mode=mode))
    publish_many("t", [Message(n, coalesce=f"c{n % 3}") for n in range(30)])
    publish("t", "other", key="k")
    sub.settle()
    assert sorted(got, key=str) == [27, 28, 29, "other"]
    assert lag() == 0
    assert not DeliveryState.objects.exists()
    assert sub.inbox.passed_counts("superseded") == {REF: 27}


@MODES
def test_each_group_has_its_own_latest(db, mode):
    early, late = [], []
    first = Sub(getting(early, group="early", mode=mode))
    publish("t", 1, coalesce="c")
    first.settle()
    publish("t", 2, coalesce="c")
    Sub(getting(late, group="late", mode=mode)).settle()
    first.settle()
    assert (early, late) == ([1, 2], [2])


@MODES
def test_keys_count_within_a_topic_a_partition_and_a_priority(db, mode):
    got = []
    sub = Sub(getting(got, mode=mode), getting(got, topic="other", mode=mode))
    publish("t", 1, key="a", coalesce="c")
    publish("t", 2, key="b", coalesce="c")
    publish("t", 3, key="a", coalesce="c", priority=5)
    publish("t", 4, key="a", coalesce="d")
    publish("other", 5, key="a", coalesce="c")
    sub.settle()
    assert sorted(got) == [1, 2, 3, 4, 5]


@MODES
def test_messages_of_other_keys_in_a_hashed_partition_are_not_superseded(db, settings, mode):
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": 1}}}
    got = []
    sub = Sub(getting(got, mode=mode))
    long = "x" * KEY_LENGTH
    for key, coalesce in itertools.product(["a", "b", None, long], ["c", "d"]):
        publish_many("t", [Message([key, coalesce, number], key=key, coalesce=coalesce) for number in range(2)])
    sub.settle()
    assert len(got) == 8
    assert {number for *_, number in got} == {1}
    first = message_history.content(Session(USING), QueueMessage.objects.order_by("offset")[0].offset, most=10)
    assert first.coalesce_key == "c"
    assert message_history.latest_with_key(Session(USING), first) == first.entry.offset + 1


@MODES
def test_a_message_for_one_group_is_superseded_and_supersedes_nothing(db, mode):
    """Plain SQL and Spark can write such messages, which are no copies."""
    got = []
    sub = Sub(getting(got, mode=mode, filter=parse({"region": ["eu"]})))
    store("c", "eu")
    store("d", "us", target_group="g")
    store("c", "us", target_group="other")
    store("d", "eu")
    sub.settle()
    assert len(got) == 2
    assert sub.inbox.passed_counts("superseded") == {REF: 1}


def test_without_a_key_the_partition_is_that_of_the_coalesce_key(db):
    for key in ("c", "c", "d"):
        publish("t", 1, coalesce=key)
    first, second, third = OutboxMessage.objects.order_by("pk").values_list("partition_key", "coalesce_key")
    assert first == second
    assert first[0].startswith("__p:")
    assert (first[1], third[1]) == ("c", "d")


@MODES
def test_a_handler_does_not_see_the_key_in_the_metadata(db, mode):
    seen = []
    sub = Sub(handler(function=lambda delivery: seen.append((delivery.key, delivery.metadata)), mode=mode))
    publish("t", 1, coalesce="c", metadata={"a": 1})
    sub.settle()
    assert seen == [(None, {"a": 1, "content_type": "application/json"})]


# -- what has not started -------------------------------------------------------


@MODES
def test_one_that_waits_in_the_process_is_superseded_at_its_start(db, mode, clock):
    got = []
    sub = Sub(getting(got, mode=mode))
    publish("t", 1, key="k", coalesce="c")
    sub.step()
    publish("t", 2, key="k", coalesce="c")
    sequence()
    sub.settle()
    clock.advance(0.2)
    sub.settle()
    assert got == [2]
    assert lag() == 0


@MODES
@pytest.mark.parametrize("outcome", ["nack", "snooze"])
def test_a_waiting_retry_is_superseded(db, mode, outcome, clock):
    got = []

    def one(delivery):
        got.append((delivery.payload, delivery.attempt))
        if delivery.payload == 1:
            getattr(delivery, outcome)(60)

    sub = Sub(handler(function=one, mode=mode))
    publish("t", 1, key="k", coalesce="c")
    sub.settle()
    publish("t", 2, key="k", coalesce="c")
    sub.settle()
    assert got == [(1, 1), (2, 1)]
    clock.advance(61)
    sub.settle()
    assert got == [(1, 1), (2, 1)]
    assert lag() == 0
    assert sub.inbox.passed_counts("superseded") == {REF: 1}


def test_in_strict_order_a_waiting_retry_is_superseded_when_it_is_due(db, clock):
    got = []

    def one(delivery):
        got.append(delivery.payload)
        if delivery.payload == 1:
            delivery.nack(delay=60)

    sub = Sub(handler(function=one, on_failure="block"))
    publish("t", 1, key="k", coalesce="c")
    sub.settle()
    publish("t", 2, key="k", coalesce="c")
    sub.settle()
    assert got == [1]
    clock.advance(61)
    sub.settle()
    assert got == [1, 2]


@MODES
def test_a_lost_start_is_superseded(db, mode, clock):
    got = []
    lost = Sub(getting([], mode=mode), name="lost")
    publish("t", 1, key="k", coalesce="c")
    lost.step()
    assert lost.take() is not None
    lost.heart.is_good = False
    clock.advance(61)
    publish("t", 2, key="k", coalesce="c")
    sub = Sub(getting(got, mode=mode))
    sub.settle()
    clock.advance(61)
    sub.settle()
    assert got == [2]
    assert lag() == 0


# -- never beside ---------------------------------------------------------------


def test_one_that_arrives_while_one_runs_is_handled_after_it(db, clock):
    """In shared groups, too: the other subscriber does not start it."""
    got = []
    other = Sub(getting(got, mode="shared"), name="other")

    def slow(delivery):
        for n in (2, 3):
            publish("t", n, key="k", coalesce="c")
            other.settle()
            clock.advance(0.2)
            other.settle()
        publish("t", "else", key="k", coalesce="d")
        publish("t", "none", key="k")
        other.settle()
        got.append(delivery.payload)

    one = Sub(handler(function=slow, mode="shared"), name="one")
    publish("t", 1, key="k", coalesce="c")
    one.step()
    one.work()
    one.flush()
    assert got == ["else", "none", 1]
    clock.advance(0.2)
    other.settle()
    assert got == ["else", "none", 1, 3]
    assert lag() == 0


def test_a_retry_that_is_the_latest_waits_for_nothing(db, clock):
    got = []

    def fails_once(delivery):
        got.append((delivery.payload, delivery.attempt))
        if delivery.attempt == 1:
            delivery.nack(delay=1)

    sub = Sub(handler(function=fails_once, mode="shared"))
    publish("t", 1, key="k", coalesce="c")
    sub.settle()
    clock.advance(2)
    sub.settle()
    assert got == [(1, 1), (1, 2)]


def test_two_claims_do_not_take_two_messages_of_one_key(db):
    """Even if nothing says which one is later."""
    one, other = (Sub(handler(mode="shared"), name=name) for name in ("one", "other"))
    publish("t", 1, key="k", coalesce="c")
    sequence()
    CoalesceKey.objects.all().delete()
    one.step()
    publish("t", 2, key="k", coalesce="c")
    sequence()
    CoalesceKey.objects.filter(consumer_group="").delete()
    other.step()
    assert one.inbox.waiting(REF)[0] == 1
    assert other.inbox.waiting(REF)[0] == 0
    assert DeliveryState.objects.filter(delivery_token=0).count() == 1


def test_a_claim_that_passes_nothing_takes_what_is_superseded_and_waits_only_for_the_latest(db):
    """As in ``deliver_all``: a superseded message is told of, and neither waits for others nor is waited for."""
    one = handler(mode="shared")
    sub = Sub(one)
    claimant = claimant_of(one.ref, sub.name, 5, 60_000)

    def claimed():
        sequence()
        watermarks.create_missing(USING, one.ref, ["k"])
        request = ClaimRequest(claimant, [Want("k", look_at=9)], token=claiming.new_token())
        return [delivery.offset for delivery in claiming.claim(USING, request).deliveries]

    for number in range(2):
        publish("t", number, key="k", coalesce="c")
    assert len(claimed()) == 2
    for number in range(2, 4):
        publish("t", number, key="k", coalesce="c")
    (earlier,) = claimed()
    waits = DeliveryState.objects.get(delivery_token=0)
    assert waits.message_offset > earlier


def test_the_wait_grows_with_the_time_that_the_other_has_run(db, clock):
    one, other = (Sub(handler(mode="shared"), name=name) for name in ("one", "other"))
    publish("t", 1, key="k", coalesce="c")
    one.step()
    clock.advance(20)
    publish("t", 2, key="k", coalesce="c")
    other.step()
    row = DeliveryState.objects.get(delivery_token=0)
    assert 4_900 < row.invisible_until - row.delivered_at <= 5_100


@MODES
def test_a_batch_has_only_the_latest(db, mode):
    got = []
    sub = Sub(
        handler(function=lambda batch: got.append([one.payload for one in batch]), mode=mode, batch=True, batch_size=10)
    )
    publish_many("t", [Message(n, key="k", coalesce="c") for n in range(3)])
    sub.step()
    publish_many("t", [Message(n, key="k", coalesce="d") for n in range(3, 6)])
    publish("t", 6, key="k")
    sub.settle()
    assert sorted(itertools.chain.from_iterable(got)) == [2, 5, 6]


# -- with the other rules -------------------------------------------------------


@MODES
def test_only_messages_that_the_group_gets_supersede_others(db, mode, clock):
    got = []
    sub = Sub(getting(got, mode=mode, filter=parse({"region": ["eu"]})))
    for n, region in enumerate(["eu", "eu", "us"]):
        publish("t", n, key="k", coalesce="c", metadata={"region": region})
    sub.settle()
    clock.advance(1)
    sub.settle()
    assert got == [1]
    assert lag() == 0


@MODES
def test_a_message_that_the_filter_no_longer_matches_supersedes_nothing(db, mode):
    """The process has claimed the earlier one, and does not know yet that the filter has changed."""
    got = []
    sub = Sub(getting(got, mode=mode, filter=parse({"region": ["eu"]})))
    publish("t", 1, key="k", coalesce="c", metadata={"region": ["eu", "us"]})
    sub.step()
    groups.register_options(USING, REF, "filter", parse({"region": ["us"]}).as_json(), actor="migrate")
    publish("t", 2, key="k", coalesce="c", metadata={"region": "eu"})
    sequence()
    sub.work()
    assert got == [1]


@MODES
@pytest.mark.parametrize("waits", ["as a retry", "in the process"])
def test_a_message_that_was_passed_supersedes_nothing(db, clock, mode, waits):
    """The filter of that time did not match it. That of now does, but the group does not get it any more."""
    got = []

    def fails_first(delivery):
        got.append(delivery.payload)
        if len(got) == 1 and waits == "as a retry":
            raise ValueError

    sub = Sub(handler(function=fails_first, mode=mode, filter=parse({"region": ["eu"]}), backoff=WAIT))
    publish("t", 1, key="k", coalesce="c", metadata={"region": ["eu", "us"]})
    publish("t", 2, key="k", coalesce="c", metadata={"region": "us"})
    sub.settle() if waits == "as a retry" else sub.step()
    assert ConsumerOffset.objects.get().offset_claimed == max(QueueMessage.objects.values_list("offset", flat=True))
    groups.register_options(USING, REF, "filter", parse({"region": ["us"]}).as_json(), actor="migrate")
    clock.advance(61)
    sub.settle()
    assert got == ([1, 1] if waits == "as a retry" else [1])
    assert lag() == 0


@MODES
def test_a_message_that_was_handled_supersedes_under_any_filter(db, clock, mode):
    """Otherwise the older one would be handled after it."""
    got = []

    def fails_first(delivery):
        got.append(delivery.payload)
        if got == [1]:
            raise ValueError

    sub = Sub(handler(function=fails_first, mode=mode, filter=parse({"region": ["eu", "us"]}), backoff=WAIT))
    for number, region in ((1, "eu"), (2, "us")):
        publish("t", number, key="k", coalesce="c", metadata={"region": region})
        sub.settle()
    groups.register_options(USING, REF, "filter", parse({"region": ["eu"]}).as_json(), actor="migrate")
    clock.advance(61)
    sub.settle()
    assert got == [1, 2]
    assert lag() == 0


def test_one_that_was_claimed_after_a_later_one_is_waited_for(db, clock):
    """After a seek with another filter, the message in flight may be an earlier one than the last that was claimed."""
    one, other = (Sub(handler(mode="shared", filter=parse({"region": ["eu", "us"]})), name=name) for name in "ab")
    for number, region in ((1, "eu"), (2, "us")):
        publish("t", number, key="k", coalesce="c", metadata={"region": region})
        one.settle()
    groups.register_options(USING, REF, "filter", parse({"region": ["eu"]}).as_json(), actor="migrate")
    operations.seek("g", "t", "earliest", actor="ops")
    one.step(times=3)
    assert one.inbox.waiting(REF)[0] == 1
    publish("t", 3, key="k", coalesce="c", metadata={"region": "eu"})
    other.step(times=3)
    assert other.inbox.waiting(REF)[0] == 0


def test_messages_of_other_groups_supersede_nothing(db, clock):
    got = []
    store("c")
    store("c", target_group="other")
    sub = Sub(getting(got))
    sub.settle()
    assert got == [1]


@MODES
def test_a_redriven_message_is_handled_although_a_later_one_was(db, mode):
    got = []

    def fails_first(delivery):
        got.append(delivery.payload)
        if got == [1]:
            delivery.reject("no")

    sub = Sub(handler(function=fails_first, mode=mode))
    publish("t", 1, key="k", coalesce="c")
    sub.settle()
    publish("t", 2, key="k", coalesce="c")
    sub.settle()
    assert operations.redrive("t", actor="ops").changed == 1
    sub.settle()
    assert got == [1, 2, 1]


@MODES
def test_a_seek_coalesces_again(db, mode, clock):
    got = []
    sub = Sub(getting(got, mode=mode))
    for n in range(3):
        publish("t", n, key="k", coalesce="c")
        sub.settle()
    assert got == [0, 1, 2]
    operations.seek("g", "t", "earliest", actor="ops")
    sub.step()
    sub.settle()
    clock.advance(0.2)
    sub.settle()
    assert got == [0, 1, 2, 2]


@MODES
def test_superseded_messages_are_counted_and_recorded(db, settings, mode):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "RECORD_DELIVERIES": "all"}
    sub = Sub(handler(mode=mode))
    publish_many("t", [Message(n, key="k", coalesce="c") for n in range(3)])
    sub.settle()
    sub.poller.write_rollups()
    assert set(Rollup.objects.values_list("acked", "superseded")) == {(1, 2)}
    assert [event.outcome for event in DeliveryEvent.objects.order_by("message_offset")] == [
        "superseded",
        "superseded",
        "acked",
    ]


def test_deliver_all_tells_which_were_superseded(db, no_handlers):
    got = []
    subscriber("t", group="g")(lambda delivery: got.append(delivery.payload))
    publish("t", 1, coalesce="c")
    publish("t", 2, coalesce="c")
    assert [(one.payload, one.outcome) for one in deliver_all()] == [(1, "superseded"), (2, "acked")]
    assert got == [2]


def test_a_start_that_cannot_be_checked_is_released(db, monkeypatch):
    got = []
    sub = Sub(getting(got))
    publish("t", 1, key="k", coalesce="c")
    sub.step()

    def fails(*_):
        raise OperationalError(2013, "gone")

    with monkeypatch.context() as patch:
        patch.setattr(superseding, "give_up", fails)
        sub.work()
    assert got == []
    sub.settle()
    assert got == [1]


# -- values ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("", "coalesce '': must not be empty"),
        (7, "coalesce 7: must be a str, not int"),
        ("x" * (KEY_LENGTH + 1), f"{KEY_LENGTH + 1} characters, but at most {KEY_LENGTH} are allowed"),
        ("\udc80", "contains a lone surrogate"),
    ],
)
def test_wrong_keys_are_refused(db, key, error):
    with pytest.raises(InvalidMessage, match=error):
        publish("t", 1, coalesce=key)
    with pytest.raises(InvalidMessage, match=f"message 1: .*{error}"):
        publish_many("t", [1, Message(1, coalesce=key)])
    assert not OutboxMessage.objects.exists()


def test_keys_are_compared_byte_by_byte(db):
    got = []
    sub = Sub(getting(got))
    for key in ("é", "e", "E", "e ", "😀"):
        publish("t", key, key="k", coalesce=key)
    sub.settle()
    assert got == ["é", "e", "E", "e ", "😀"]


# -- a filter that changes -----------------------------------------------------


BOTH, ONLY_EU = parse({"region": ["eu", "us"]}), parse({"region": ["eu"]})


def change_filter(*policies):
    for policy in policies:
        groups.register_options(USING, REF, "filter", policy.as_json() if policy else {}, actor="migrate")


def superseded_behind_one_in_flight(mode, got, policy=BOTH, **options):
    """A message is in flight, so that no other may start: that of eu is superseded by that of us, which waits."""
    sub = Sub(getting(got, mode=mode, filter=policy, max_in_flight=1, **options), threads=9)
    publish("t", "before", key="k", metadata={"region": "eu"})
    publish("t", "eu", key="k", coalesce="c", metadata={"region": "eu"})
    publish("t", "us", key="k", coalesce="c", metadata={"region": "us"})
    sub.step(times=3)
    assert sub.inbox.passed_counts("superseded") == {REF: 1}
    assert sub.inbox.waiting(REF)[0] == 1
    return sub


@MODES
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (BOTH, [ONLY_EU]),
        (None, [ONLY_EU]),
        (BOTH, [parse({"region": ["asia"]}), ONLY_EU]),
        (BOTH, [None, ONLY_EU]),
        (BOTH, [None]),
    ],
)
def test_a_message_that_superseded_others_passes_later_filters(db, mode, first, then):
    """The earlier message was given up because the group gets this one."""
    got = []
    sub = superseded_behind_one_in_flight(mode, got, first)
    change_filter(*then)
    sub.settle()
    assert got == ["before", "us"]
    assert lag() == 0
    assert not DeliveryState.objects.exists()


@MODES
def test_an_operator_who_changes_the_filter_while_a_rate_holds_messages_back_loses_none(
    db, mode, clock, no_handlers, monkeypatch
):
    """The first messages use up the rate, and what superseded another one waits."""
    monkeypatch.setattr(slots, "START_WITHIN_US", 10_000_000)  # On a busy machine, a step takes longer.
    got = []
    options = {"rate": Rate(2, "m"), "burst": 1, "filter": BOTH}
    sub = Sub(getting(got, mode=mode, **options), threads=9)
    fillers = [Message(n, key="k", metadata={"region": "eu"}) for n in range(2)]
    pair = [Message(n, key="k", coalesce="c", metadata={"region": region}) for n, region in ((8, "eu"), (9, "us"))]
    publish_many("t", [*fillers, *pair])
    sub.settle()
    for _ in range(3):
        clock.advance(12)
        sub.settle()
    assert got == [0, 1]
    assert sub.inbox.passed_counts("superseded") == {REF: 1}
    call_command("queueset", "g", "t", 'filter={"region": ["eu"]}', interactive=False, verbosity=0)
    for _ in range(8):
        clock.advance(15)
        sub.settle()
    assert got == [0, 1, 9]
    assert lag() == 0


@MODES
def test_a_message_that_superseded_others_passes_an_overridden_filter(db, mode):
    got = []
    sub = superseded_behind_one_in_flight(mode, got)
    operations.settings("g", "t", {"filter": {"region": ["eu"]}}, actor="ops")
    sub.settle()
    assert got == ["before", "us"]


@MODES
@pytest.mark.parametrize("region", ["eu", "us"])
def test_a_later_message_takes_the_place_of_one_that_superseded_others(db, mode, region):
    """Only if the group gets it. Otherwise the one before it is handled."""
    got = []
    sub = superseded_behind_one_in_flight(mode, got)
    change_filter(ONLY_EU)
    publish("t", "last", key="k", coalesce="c", metadata={"region": region})
    sub.settle()
    assert got == ["before", "last" if region == "eu" else "us"]
    assert lag() == 0


@MODES
def test_a_message_for_which_a_retry_was_given_up_passes_later_filters(db, mode, clock):
    got = []

    def fails_first(delivery):
        got.append(delivery.payload)
        if got == ["eu"]:
            raise ValueError

    sub = Sub(handler(function=fails_first, mode=mode, filter=BOTH, max_in_flight=1, backoff=WAIT), threads=9)
    publish("t", "eu", key="k", coalesce="c", metadata={"region": "eu"})
    sub.settle()
    publish("t", "other", key="k", metadata={"region": "eu"})
    publish("t", "us", key="k", coalesce="c", metadata={"region": "us"})
    sub.step(times=3)
    assert sub.inbox.waiting(REF)[0] == 1
    clock.advance(61)
    sub.step(times=3)
    assert sub.inbox.passed_counts("superseded") == {REF: 1}
    change_filter(ONLY_EU)
    sub.settle()
    assert got == ["eu", "other", "us"]
    assert lag() == 0


@MODES
def test_a_message_that_superseded_others_supersedes_a_retry_under_later_filters(db, mode, clock):
    """The latest message of the key does not: under the new filter, the group does not get it."""
    got = []

    def fails_first(delivery):
        got.append(delivery.payload)
        if got == ["retry"]:
            raise ValueError

    sub = Sub(handler(function=fails_first, mode=mode, filter=BOTH, max_in_flight=1, backoff=WAIT), threads=9)
    publish("t", "retry", key="k", coalesce="c", metadata={"region": "eu"})
    sub.settle()
    publish("t", "other", key="k", metadata={"region": "eu"})
    publish("t", "eu", key="k", coalesce="c", metadata={"region": "eu"})
    publish("t", "us", key="k", coalesce="c", metadata={"region": "us"})
    sub.step(times=3)
    assert sub.inbox.passed_counts("superseded") == {REF: 1}
    change_filter(ONLY_EU)
    publish("t", "us, last", key="k", coalesce="c", metadata={"region": "us"})
    clock.advance(61)
    sub.settle()
    assert got == ["retry", "other", "us"]
    assert sub.inbox.passed_counts("superseded") == {REF: 2}
    assert lag() == 0


@MODES
def test_a_message_for_which_a_lost_start_was_given_up_passes_later_filters(db, mode, clock):
    got = []
    lost = Sub(getting([], mode=mode, filter=BOTH, max_in_flight=1), name="lost")
    publish("t", "eu", key="k", coalesce="c", metadata={"region": "eu"})
    lost.step()
    assert lost.take() is not None
    lost.heart.is_good = False
    clock.advance(61)
    publish("t", "other", key="k", metadata={"region": "eu"})
    publish("t", "us", key="k", coalesce="c", metadata={"region": "us"})
    sub = Sub(getting(got, mode=mode, filter=BOTH, max_in_flight=1), threads=9)
    sub.step(times=4)
    assert sub.inbox.passed_counts("superseded") == {REF: 1}
    assert sub.inbox.waiting(REF)[0] == 1
    change_filter(ONLY_EU)
    sub.settle()
    clock.advance(61)
    sub.settle()
    assert got == ["other", "us"]
    assert lag() == 0


@MODES
@pytest.mark.parametrize("when", ["before the flush", "after the flush"])
def test_a_message_for_which_one_was_given_up_at_its_start_passes_later_filters(db, mode, clock, when):
    got = []
    sub = Sub(getting(got, mode=mode, filter=BOTH))
    publish("t", "eu", key="k", coalesce="c", metadata={"region": "eu"})
    sub.step()
    publish("t", "us", key="k", coalesce="c", metadata={"region": "us"})
    sequence()
    sub.work()
    if when == "after the flush":
        sub.flush()
    change_filter(ONLY_EU)
    sub.settle()
    clock.advance(0.2)
    sub.settle()
    assert got == ["us"]
    assert lag() == 0


@MODES
def test_a_note_counts_for_its_partition_and_its_group(db, mode):
    got, others = [], []
    sub = superseded_behind_one_in_flight(mode, got)
    publish("t", "us, first", key="k", coalesce="c", priority=5, metadata={"region": "us"})
    publish("t", "us, another key", key="k", coalesce="d", metadata={"region": "us"})
    change_filter(ONLY_EU)
    sub.settle()
    Sub(getting(others, group="other", mode=mode, filter=ONLY_EU)).settle()
    assert got == ["before", "us"]
    assert others == ["before", "eu"]


@MODES
def test_the_expiry_of_a_message_that_superseded_others_ends_its_key(db, mode, clock):
    got = []
    sub = Sub(getting(got, mode=mode, filter=BOTH, max_in_flight=1), threads=9)
    publish("t", "before", key="k", metadata={"region": "eu"})
    publish("t", "eu", key="k", coalesce="c", metadata={"region": "eu"})
    publish("t", "us", key="k", coalesce="c", metadata={"region": "us"}, expires_in=60)
    sub.step(times=3)
    change_filter(ONLY_EU)
    clock.advance(61)
    sub.settle()
    assert got == ["before"]
    assert sub.inbox.passed_counts("expired") == {REF: 1}
    assert lag() == 0


@MODES
def test_a_seek_to_a_message_that_superseded_others_does_not_lose_it(db, mode):
    got = []
    sub = superseded_behind_one_in_flight(mode, got)
    change_filter(ONLY_EU)
    operations.seek("g", "t", QueueMessage.objects.get(payload=b'"us"').offset, actor="ops")
    sub.settle()
    assert got[-1] == "us"
    operations.seek("g", "t", "earliest", actor="ops")
    sub.settle()
    assert got[-2:] == ["before", "us"]


@MODES
def test_a_seek_past_a_message_that_superseded_others_ends_its_key(db, mode):
    got = []
    sub = superseded_behind_one_in_flight(mode, got)
    found = operations.seek("g", "t", "latest", actor="ops", dry_run=True)
    assert any("coalesce key" in warning for warning in found.warnings)
    operations.seek("g", "t", "latest", actor="ops")
    sub.settle()
    assert "us" not in got
    assert lag() == 0


def test_previews_say_that_a_key_ends(db):
    """Only if one of the messages has a coalesce key."""
    sub = Sub(handler(function=lambda delivery: delivery.nack(delay=60)))
    publish("t", 1, key="k", id="keyed", coalesce="c")
    publish("t", 2, key="k", id="other")
    sub.settle()
    preview = operations.dead_letter("g", "t", ids=["other"], actor="ops", dry_run=True)
    assert not preview.warnings
    preview = operations.dead_letter("g", "t", ids=["keyed", "other"], actor="ops", dry_run=True)
    assert any("superseded" in warning for warning in preview.warnings)
    operations.dead_letter("g", "t", ids=["keyed", "other"], actor="ops")
    sequence()
    assert not operations.discard("t", ids=["other"], actor="ops", reason="", dry_run=True).warnings
    assert any(
        "superseded" in warning for warning in operations.discard("t", actor="ops", reason="", dry_run=True).warnings
    )


@MODES
def test_a_group_that_is_registered_again_gets_what_its_filter_matches(db, mode):
    got = []
    superseded_behind_one_in_flight(mode, []).leave()
    operations.drop_group("g", "t", actor="ops")
    assert set(CoalesceKey.objects.values_list("consumer_group", flat=True)) == {""}
    Sub(getting(got, mode=mode, filter=ONLY_EU)).settle()
    assert got == ["before", "eu"]


@MODES
def test_messages_that_are_claimed_together_are_not_noted(db, mode):
    """A message that has been claimed passes any filter anyway."""
    sub = Sub(handler(mode=mode))
    publish_many("t", [Message(n, key="k", coalesce="c") for n in range(3)])
    sub.settle()
    assert set(CoalesceKey.objects.values_list("superseding_offset", flat=True)) == {0}


@MODES
def test_a_message_is_noted_once(db, mode):
    sub = superseded_behind_one_in_flight(mode, [])
    noted = CoalesceKey.objects.get(consumer_group="g", coalesce_key="c")
    assert noted.superseding_offset == QueueMessage.objects.get(payload=b'"us"').offset
    assert noted.message_offset == 0
    sub.settle()
    claimed = CoalesceKey.objects.get(consumer_group="g", coalesce_key="c")
    assert claimed.superseding_offset == noted.superseding_offset
    assert claimed.message_offset == (noted.superseding_offset if mode == "shared" else 0)


@MODES
def test_gc_keeps_what_is_noted_about_messages_of_the_log(db, settings, mode):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "RETENTION": 0}
    got = []
    sub = superseded_behind_one_in_flight(mode, got)
    sub.work()
    sub.flush()
    garbage.collect(USING)
    coalescing.collect(USING)
    change_filter(ONLY_EU)
    sub.settle()
    assert got == ["before", "us"]
    garbage.collect(USING)
    coalescing.collect(USING)
    assert not CoalesceKey.objects.exists()


# -- the sequencer --------------------------------------------------------------


def test_a_dropped_duplicate_supersedes_nothing(db):
    got = []
    publish("t", 1, key="k", id="x", coalesce="a")
    publish("t", 2, key="k", coalesce="b")
    sequence()
    publish("t", 3, key="k", id="x", coalesce="b")
    Sub(getting(got)).settle()
    assert got == [1, 2]


# -- GC -------------------------------------------------------------------------


def test_gc_deletes_the_keys_of_messages_that_are_gone(db, settings, monkeypatch):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "RETENTION": 0}
    sub = Sub(handler(mode="shared"))
    publish_many("t", [Message(n, coalesce=f"c{n}") for n in range(5)])
    sub.settle()
    publish("t", 5, coalesce="kept")
    sequence()
    assert CoalesceKey.objects.count() == 11
    garbage.collect(USING)
    deleted, after = 0, None
    while True:
        number, after = coalescing.collect(USING, after=after, limit=3)
        deleted += number
        if after is None:
            break
    assert deleted == 10
    assert [(row.consumer_group, row.coalesce_key) for row in CoalesceKey.objects.all()] == [("", "kept")]


def test_maintenance_deletes_keys(db, settings):
    settings.MYSQLQUEUE = {**settings.MYSQLQUEUE, "RETENTION": 0}
    sub = Sub(handler())
    publish("t", 1, coalesce="c")
    sub.settle()
    for _ in sub.poller.maintenance.round():
        pass
    assert not CoalesceKey.objects.exists()
