"""The page of a message says why a group has not started it: one reason, the first one that has to end."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from django_mysqlqueue import Message, operations, publish, publish_many
from django_mysqlqueue.admin.pages import message
from django_mysqlqueue.filter_policies import parse
from django_mysqlqueue.inspection import message_history, reasons
from django_mysqlqueue.inspection.bounds import PAGES
from django_mysqlqueue.inspection.reasons import WaitReason
from django_mysqlqueue.inspection.subscribers import read_subscribers
from django_mysqlqueue.models import (
    ConsumerGroup,
    ConsumerOffset,
    DeliveryState,
    QueueMessage,
    Slots,
    SubscriberHeartbeat,
)
from django_mysqlqueue.options.delivery_limits import Rate
from tests.support.dashboard import ROOT, WAITS, life
from tests.support.filtering import EU
from tests.support.handlers import both_modes, fail
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import MAX_PENDING, Session, Subset, slots
from tests.support.scenarios import G, log, offsets_of

pytestmark = pytest.mark.any_engine


SKIPS, BLOCKS = handler(), handler(on_failure="block")


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """On a busy machine a step may take longer than a message has to start."""
    monkeypatch.setattr(slots, "START_WITHIN_US", 10_000_000)


def why(offset, *, of=SKIPS, bounds=PAGES):
    """The reason for the group g; ``of``: its handler, if the project has it."""
    session = Session(USING)
    history = message_history.read_history(session, offset)
    (state,) = [one for one in history.groups if one.ref == G]
    live = {row.name: row for row in read_subscribers(session, lease_ms=30_000).get(G, ()) if row.live}
    latest = message_history.latest_with_key(session, history.content)
    return reasons.why(session, history.content, state, live, session.now(), latest=latest, handler=of, bounds=bounds)


def told(client, offset):
    """The reason as the page shows it, with its link."""
    answer = client.get(f"{ROOT}message/", {"offset": offset})
    (one,) = [one for one in answer.context["lives"] if one.ref == G]
    return one.steps[-1].text, one.steps[-1].link


@both_modes
def test_a_message_that_is_next_waits_for_nothing(client, mode):
    Sub(handler(mode=mode))
    first, second = log(2, "a")
    assert why(first) == WaitReason("none")
    assert told(client, first)[0] == "Nothing holds it up: a subscriber claims it when it has room."
    assert why(second) == WaitReason("behind", offset=first)
    text, link = told(client, second)
    assert text == f"It waits for message {first}: the group claims messages of a partition in order."
    assert f"offset={first}" in link


@both_modes
def test_what_is_in_flight_in_its_partition(client, mode):
    sub = Sub(handler(mode=mode), claim_size=1, prefetch=1)
    first, second = log(2, "a")
    sub.step()
    assert why(first) is None  # its own delivery says it
    if mode == "shared":
        assert why(second) == WaitReason("none")
        return
    assert why(second) == WaitReason("in_flight", offset=first, by=sub.name)
    text, link = told(client, second)
    assert text == f"It waits for message {first} of its partition, which is in flight at {sub.name}."
    assert f"offset={first}" in link


def test_other_partitions_and_targets_hold_nothing_up(db):
    sub = Sub(handler(), claim_size=1, prefetch=1)
    first, _ = log(2, "ab")
    QueueMessage.objects.filter(offset=first).update(target_group="h")
    sub.step()
    publish("t", 1, key="a")
    sequence()
    assert why(offsets_of()[-1]) == WaitReason("none")
    assert why(first) is None


@both_modes
def test_a_failure_does_not_hold_up_what_is_behind_it_unless_it_blocks(db, mode):
    sub = Sub(handler(mode=mode, function=fail, backoff=WAITS, max_attempts=9), claim_size=1, prefetch=1)
    first, second = log(2, "a")
    sub.step()
    sub.work(1)
    sub.flush()
    assert why(first) is None  # in backoff
    assert why(second) == WaitReason("none")


def test_a_failure_that_blocks(client, monkeypatch):
    sub = Sub(handler(function=fail, backoff=WAITS, max_attempts=9, on_failure="block"), claim_size=1, prefetch=1)
    first, second = log(2, "a")
    sub.step()
    sub.work(1)
    sub.flush()
    assert why(first) is None
    assert why(second, of=BLOCKS) == WaitReason("blocked", offset=first)
    assert why(second, of=None) == WaitReason("may_block", offset=first)
    text, link = told(client, second)
    unsettled = f"message {first} of its partition, which is not settled"
    assert text == f"If the group blocks on failure, it waits for {unsettled}."
    assert f"offset={first}" in link
    monkeypatch.setattr(message, "known_handlers", lambda: sub.handlers)
    text, link = told(client, second)
    assert text == f"It waits for {unsettled}: the group blocks on failure."
    assert f"offset={first}" in link


def put_off(seconds):
    """A handler function that snoozes its message."""
    return lambda delivery: delivery.snooze(seconds)


@both_modes
@pytest.mark.parametrize("seconds", [9, 3600])
def test_a_snoozed_message_waits_for_the_end_of_the_snooze(client, mode, seconds):
    sub = Sub(handler(mode=mode, function=put_off(seconds), rate=Rate(1000, "s")))
    (offset,) = log(1)
    sub.settle()
    assert why(offset) is None
    assert told(client, offset)[0].startswith("The next attempt is in ")


@both_modes
def test_a_snooze_is_the_reason_even_if_a_rate_is_used_up(db, mode):
    sub = Sub(handler(mode=mode, function=put_off(7200), rate=Rate(1, "h"), burst=0))
    first, second = log(2, "ab")
    sub.settle()
    found = {why(offset) is None: offset for offset in (first, second)}
    assert set(found) == {True, False}
    assert DeliveryState.objects.filter(message_offset=found[True], retry_count=0).exists()
    assert why(found[False]).kind == "rate"


def test_a_message_that_has_failed_may_wait_for_a_slot(db):
    sub = Sub(handler(mode="shared", function=fail, rate=Rate(1, "h"), burst=0))
    (offset,) = log(1)
    sub.settle()
    DeliveryState.objects.update(invisible_until=1)
    sub.settle()
    assert DeliveryState.objects.get().retry_count == 1
    assert why(offset).kind == "rate"


def test_a_snoozed_message_blocks_although_it_has_not_failed(db):
    sub = Sub(handler(function=put_off(3600), on_failure="block"), claim_size=1, prefetch=1)
    first, second = log(2, "a")
    sub.settle()
    assert why(second, of=BLOCKS) == WaitReason("blocked", offset=first)
    assert why(second) == WaitReason("none")


def test_messages_that_are_due_again_are_claimed_first(db):
    sub = Sub(handler(function=fail, backoff=WAITS, max_attempts=9), claim_size=1, prefetch=1)
    first, second = log(2, "a")
    sub.step()
    sub.work(1)
    sub.flush()
    assert why(second) == WaitReason("none")
    DeliveryState.objects.update(invisible_until=1)
    assert why(second) == WaitReason("behind", offset=first)


def test_a_lost_message_holds_its_partition(client):
    sub = Sub(handler(function=fail, backoff=WAITS, max_attempts=9), claim_size=1, prefetch=1)
    first, second = log(2, "a")
    sub.step()
    sub.work(1)
    sub.flush()
    DeliveryState.objects.update(delivered_by="lost:1")
    assert why(first) is None
    assert why(second) == WaitReason("lost", offset=first)
    text, link = told(client, second)
    assert text.startswith(f"It waits for message {first} of its partition, whose subscriber was lost")
    assert f"offset={first}" in link


def waiting(count, *, before, until):
    """Stores messages of the partition a that wait for another attempt, as a subscriber would."""
    DeliveryState.objects.bulk_create(
        DeliveryState(
            consumer_group="g",
            topic="t",
            partition_key="a",
            message_offset=before - 1 - number,
            retry_count=1,
            invisible_until=until,
        )
        for number in range(count)
    )


def test_too_many_messages_that_wait_for_another_attempt(client):
    Sub(handler())
    log(1, "a")
    QueueMessage.objects.update(offset=5000)
    waiting(MAX_PENDING - 1, before=5000, until=2**50)
    assert why(5000) == WaitReason("none")
    waiting(1, before=5000 - MAX_PENDING + 1, until=2**50)
    assert why(5000) == WaitReason("pending")
    assert told(client, 5000)[0] == (
        "At least 1,000 messages of its partition wait for another attempt. The group claims no new messages of the "
        "partition until there are fewer."
    )


def test_a_message_in_flight_is_found_behind_many_that_are_settled(db):
    sub = Sub(handler(), claim_size=1, prefetch=1)
    first, second = log(2, "a")
    sub.step()
    assert why(second).kind == "in_flight"
    DeliveryState.objects.bulk_create(
        DeliveryState(consumer_group="g", topic="t", partition_key="a", message_offset=-number, acked=True)
        for number in range(1, 4)
    )
    waiting(3, before=-10, until=2**50)
    for most in (1, 4):
        few = replace(PAGES, in_flight=most, partition_count=most)
        assert why(second, bounds=few) == WaitReason("in_flight", offset=first, by=sub.name)


def test_a_group_with_too_many_unsettled_messages_to_search(client, monkeypatch):
    Sub(handler())
    (offset,) = log(1, "a")
    waiting(3, before=offset, until=2**50)
    assert why(offset) == WaitReason("none")
    few = replace(PAGES, in_flight=3)
    assert why(offset, bounds=few) == WaitReason("unknown")
    monkeypatch.setattr(message.MessagePage, "bounds", few)
    monkeypatch.setattr(message, "known_handlers", lambda: {G: SKIPS})
    assert told(client, offset)[0] == (
        "The group has too many unsettled messages to search all of them. Others of its partition may hold it up."
    )


def test_the_message_before_with_its_coalesce_key_is_in_flight(client):
    sub = Sub(handler(mode="shared"), claim_size=1, prefetch=1)
    publish("t", 1, key="a", coalesce="c")
    sequence()
    sub.step()
    publish("t", 2, key="a", coalesce="c")
    sequence()
    first, second = offsets_of()
    expected = WaitReason("coalesced", offset=first, by=sub.name)
    assert why(second) == expected
    Sub(handler(mode="shared")).step()
    assert DeliveryState.objects.filter(message_offset=second, delivery_token=0).exists()
    assert why(second) == expected
    DeliveryState.objects.filter(message_offset=second).update(invisible_until=1)
    assert why(second) == expected
    text, link = told(client, second)
    assert text == f"It waits for message {first}, which has the same coalesce key and is in flight at {sub.name}."
    assert f"offset={first}" in link
    DeliveryState.objects.filter(message_offset=first).update(invisible_until=1)
    assert why(second) == WaitReason("none")


@both_modes
def test_an_expired_message_needs_a_slot_to_be_dead_lettered(db, mode):
    keeps = handler(mode=mode, on_expiry="dead_letter", rate=Rate(1, "h"), burst=0)
    sub = Sub(keeps)
    publish_many("t", [Message(n, key="a", expires_in=3600) for n in range(2)])
    sequence()
    _, second = offsets_of()
    sub.settle()
    QueueMessage.objects.filter(offset=second).update(expires_at=1)
    assert why(second, of=keeps).kind == "rate"
    assert why(second).kind == why(second, of=None).kind == "expired"
    Slots.objects.all().delete()
    assert why(second, of=keeps) == WaitReason("expired")


@both_modes
def test_a_group_that_claims_nothing_is_the_first_reason(client, mode):
    sub = Sub(handler(mode=mode, filter=EU), subset=Subset(patterns=("b",)))
    publish_many("t", [Message(n, key="a", metadata={"region": "eu"}) for n in range(2)])
    sequence()
    first, second = offsets_of()
    for offset in (first, second):
        assert why(offset) == WaitReason("unserved")
    assert "none of their subsets" in life(client, first)[1][-2]
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    assert why(first) == WaitReason("no_subscriber")
    sub.heart.beat()
    ConsumerGroup.objects.update(filter='{"region": [{"new": 1}]}')
    assert why(first) == WaitReason("filter")
    operations.pause("g", "t", actor="ada")
    assert why(first) == WaitReason("paused")
    ConsumerGroup.objects.update(after_seek="resume")
    assert why(first) == WaitReason("unfinished")


def test_a_group_without_subscribers_links_to_them(client):
    Sub(handler())
    (offset,) = log(1)
    SubscriberHeartbeat.objects.update(heartbeat_at=1)
    text, link = told(client, offset)
    assert text == "The group has no live subscribers."
    assert link == f"{ROOT}inflight/"


@both_modes
def test_what_will_be_settled_without_a_call(client, mode):
    Sub(handler(mode=mode))
    publish("t", 1, key="a", expires_in=3600)
    publish("t", 2, key="b", coalesce="c")
    publish("t", 3, key="b", coalesce="c")
    sequence()
    expiring, old, new = offsets_of()
    assert why(expiring) == WaitReason("none")
    QueueMessage.objects.filter(offset=expiring).update(expires_at=1)
    assert why(expiring) == WaitReason("expired")
    text = "It has expired: a subscriber will settle or dead-letter it without calling the handler."
    assert told(client, expiring)[0] == text
    assert why(old) == WaitReason("superseded", offset=new)
    text, link = told(client, old)
    assert text.startswith(f"Message {new} has the same coalesce key")
    assert f"offset={new}" in link
    assert why(new) == WaitReason("behind", offset=old)
    ConsumerGroup.objects.update(filter=parse({"region": ["eu"]}).as_json())
    assert why(old) == WaitReason("filtered")
    assert "It will be passed without calling the handler." in told(client, old)[0]


RATES = {
    "group": ({"rate": Rate(1, "h"), "burst": 0}, "the group starts at most 1/h"),
    "key": ({"rate_per_key": Rate(1, "h"), "burst": 0}, "at most 1/h start with the same key"),
    "field": ({"rate_per_key": {"eu": "1/h"}, "burst": 0, "limit_by": "region"}, "1/h start with the same region"),
}


@both_modes
@pytest.mark.parametrize("limit", list(RATES))
def test_a_rate_holds_it_up(client, mode, limit):
    options, text = RATES[limit]
    sub = Sub(handler(mode=mode, **options))
    publish_many("t", [Message(n, key="a", metadata={"region": region}) for n, region in enumerate(["eu", "eu", "us"])])
    sequence()
    first, second, third = offsets_of()
    assert why(first) == WaitReason("none")
    sub.settle()
    found = why(second)
    assert found is not None
    assert (found.kind, found.offset) == ("rate", 0)
    assert 3_000_000 < found.until - Session(USING).now() <= 3_700_000
    assert bool(found.limit_key) == (limit != "group")
    shown = told(client, second)[0]
    assert text in shown
    assert "The next attempt is in" not in str(life(client, second))
    assert re.search(r"The next slot is free in (59 min|1 h)", shown)
    if limit == "field" and mode == "shared":
        assert why(third) is None  # the claim looked past the second one
    elif limit == "group":
        assert why(third).kind == "behind"


@both_modes
@pytest.mark.parametrize("per_key", [False, True])
def test_too_many_messages_in_flight(client, mode, per_key):
    name = "max_in_flight_per_key" if per_key else "max_in_flight"
    sub = Sub(handler(mode=mode, **{name: 1}))
    publish_many("t", [Message(n, key=key) for n, key in enumerate("aa" if per_key else "ab")])
    sequence()
    sub.step()
    found = {offset: why(offset) for offset in offsets_of()}
    (in_flight,) = [offset for offset, one in found.items() if one is None]
    (waits,) = set(found) - {in_flight}
    if per_key and mode == "ordered":
        assert found[waits] == WaitReason("in_flight", offset=in_flight, by=sub.name)
        return
    assert found[waits].kind == "held"
    text = "A limit holds it up: the group has 1 message in flight, the maximum."
    if per_key:
        text = "A limit holds it up: 1 message with the same key is in flight, the maximum."
    assert told(client, waits) == (text, "")


def test_what_is_settled_or_for_others_has_no_reason(db):
    sub = Sub(handler())
    first, second = log(2, "a")
    sub.settle()
    QueueMessage.objects.filter(offset=second).update(target_group="h")
    assert (why(first), why(second)) == (None, None)
    ConsumerOffset.objects.all().delete()
    ConsumerGroup.objects.update(start_offset=second)
    assert why(first) is None
