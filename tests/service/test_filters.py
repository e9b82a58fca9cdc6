"""Filters: which messages of a topic a group gets."""

from __future__ import annotations

import json

import pytest
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, operations, publish, publish_many, subscriber
from django_mysqlqueue.checks import system as checks
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.filter_policies import parse
from django_mysqlqueue.models import ConsumerGroup, ConsumerOffset, DeliveryState, Operation, QueueMessage, Rollup
from django_mysqlqueue.testing import deliver_all
from tests.support import garbage
from tests.support.claims import claimant_of
from tests.support.harness import USING, Sub, handler, lag, sequence
from tests.support.internals import (
    Budget,
    ClaimRequest,
    GroupRef,
    OptionColumns,
    Seen,
    Want,
    claiming,
    groups,
    new_messages,
    register_groups,
    registry,
    rollups,
)
from tests.support.registered import handle

pytestmark = pytest.mark.promise("Filters")

MODES = pytest.mark.parametrize("mode", ["ordered", "shared"])
EU = parse({"region": ["eu"]})
UNKNOWN = {"region": [{"sounds-like": "eu"}]}
"""A filter of a later release."""


def publish_from(*regions, key="k"):
    publish_many("t", [Message(n, key=key, metadata={"region": region}) for n, region in enumerate(regions)])


def register_filter(policy):
    ConsumerGroup.objects.update(filter=policy)


def getting(got, **options):
    return handler(function=lambda delivery: got.append(delivery.payload), **options)


@MODES
def test_only_matching_messages_are_handled(db, mode):
    got = []
    sub = Sub(getting(got, mode=mode, filter=EU))
    publish_from("us", "eu", "us", "eu", "us")
    publish("t", "no metadata", key="k")
    publish("t", "another key", key="other", metadata={"region": "eu", "total": 3})
    assert sub.settle() == 3
    assert sorted(got, key=str) == [1, 3, "another key"]
    assert lag() == 0
    assert not DeliveryState.objects.exists()
    assert {one.offset_acked == one.offset_claimed for one in ConsumerOffset.objects.all()} == {True}


@MODES
def test_messages_that_do_not_match_are_counted(db, mode):
    one = handler(mode=mode, filter=EU)
    sub = Sub(one)
    publish_from("us", "eu", "us", None)
    sub.settle()
    assert sub.inbox.passed_counts("filtered") == {one.ref: 3}
    (group,) = sub.poller.groups
    rollups.add(USING, {one.ref: group.counts.read()})
    assert set(Rollup.objects.values_list("acked", "filtered")) == {(1, 3)}


@MODES
def test_gc_deletes_messages_that_were_passed(db, mode, clock):
    sub = Sub(handler(mode=mode, filter=EU))
    publish_from(*["us"] * 5)
    sub.settle()
    clock.advance(30 * 86400)
    assert garbage.collect(USING).messages == 5
    assert not QueueMessage.objects.exists()


@MODES
def test_a_group_without_a_filter_gets_everything(db, mode):
    """And its claims do not get the metadata."""
    sub = Sub(handler(mode=mode))
    publish_from("us", "eu")
    with CaptureQueriesContext(connection) as captured:
        assert sub.settle() == 2
    claims = [one["sql"] for one in captured.captured_queries if "target_group, size" in one["sql"]]
    assert claims
    assert not any("metadata" in sql for sql in claims)


@MODES
def test_other_groups_are_not_affected(db, mode):
    got = []
    publish_from("us", "eu", "us")
    Sub(handler(mode=mode, filter=EU), getting(got, group="h", mode=mode)).settle()
    assert got == [0, 1, 2]


def test_order_is_kept(db):
    got = []
    sub = Sub(getting(got, filter=EU), claim_size=7, prefetch=7)
    publish_from(*["eu" if n % 3 else "us" for n in range(300)])
    assert sub.settle(rounds=300) == 200
    assert got == [n for n in range(300) if n % 3]


@MODES
def test_a_claim_looks_past_many_messages(db, mode):
    """Otherwise a claim for each hundred would limit how many are passed per second."""
    sub = Sub(handler(mode=mode, filter=EU), claim_size=10)
    publish_from(*["us"] * 3000, "eu")
    sequence()
    with CaptureQueriesContext(connection) as captured:
        sub.step(times=2)
    assert sub.work() == 1
    looks = [one for one in captured.captured_queries if "target_group, size, metadata" in one["sql"]]
    assert len(looks) <= 12


@MODES
def test_a_claim_takes_no_more_than_it_asked_for(db, mode):
    """Although it looks at more messages, of which all from some place on may match."""
    sub = Sub(handler(mode=mode, filter=EU), claim_size=10, prefetch=10)
    publish_from(*["us"] * 50, *["eu"] * 500)
    sub.step(times=3)
    assert 0 < sub.inbox.waiting_counts()[GroupRef("g", "t")] <= 10
    assert sub.settle(rounds=600) == 500


def test_what_a_claim_looks_at_is_limited(db, monkeypatch):
    """It holds the locks of the partitions meanwhile."""
    monkeypatch.setattr(new_messages, "MAX_LOOKED_AT", 20)
    one = handler(filter=EU, mode="shared")
    sub = Sub(one)
    sub.step()
    publish_from(*["us"] * 100)
    sequence()
    sub.settle()
    ConsumerOffset.objects.update(offset_acked=0, offset_claimed=0)
    claimant = claimant_of(one.ref, "me", 5, 60_000, filter=EU)
    request = ClaimRequest(claimant, [Want("k", look_at=4)], claiming.new_token(), budget=Budget(rows=4))
    claim = claiming.claim(USING, request)
    assert claim.passed["filtered"] == 4 + 1 + 20  # Wanted, to see whether there are more, and the others.
    assert claim.partitions["k"] is Seen.MORE


def test_what_a_claim_reads_of_long_metadata_is_limited(db, monkeypatch):
    monkeypatch.setattr(new_messages, "MAX_METADATA", 100_000)
    one = handler(filter=EU, mode="shared")
    sub = Sub(one)
    sub.step()
    publish_many("t", [Message(n, key="k", metadata={"region": "us", "text": "x" * 10_000}) for n in range(100)])
    sequence()
    sub.settle()
    assert lag() == 0
    ConsumerOffset.objects.update(offset_acked=0, offset_claimed=0)
    claimant = claimant_of(one.ref, "me", 5, 60_000, filter=EU)
    request = ClaimRequest(claimant, [Want("k", look_at=4)], claiming.new_token(), budget=Budget(rows=4))
    claim = claiming.claim(USING, request)
    assert 4 < claim.passed["filtered"] <= 10


def test_a_claim_for_one_message_takes_one(db):
    """It is for a partition of which nothing waits yet, while others have a backlog."""
    one = handler(filter=EU, mode="shared")
    sub = Sub(one)
    publish_from("us")
    sub.settle()
    publish_from("us", "us", *["eu"] * 20)
    sequence()
    claimant = claimant_of(one.ref, "me", 5, 60_000, filter=EU)
    request = ClaimRequest(claimant, [Want("k", look_at=1)], claiming.new_token(), budget=Budget(rows=50))
    claim = claiming.claim(USING, request)
    assert len(claim.deliveries) == 1
    assert claim.passed["filtered"] == 2


@MODES
def test_redriven_messages_bypass_the_filter(db, mode):
    got = []

    def fail(delivery):
        got.append(delivery.payload)
        if len(got) == 1:
            delivery.reject("no")

    sub = Sub(handler(function=fail, mode=mode))
    publish_from("us")
    sub.settle()
    register_filter(EU.as_json())
    publish("t", "filtered", key="k", metadata={"region": "us"})
    sub.settle()
    assert got == [0]
    assert operations.redrive("t", actor="ops").changed == 1
    sub.settle()
    assert got == [0, 0]


@MODES
def test_retries_are_not_filtered_again(db, mode):
    """The filter is applied once, when the position passes the message."""
    got = []

    def fail_once(delivery):
        got.append(delivery.attempt)
        if delivery.attempt == 1:
            raise ValueError

    sub = Sub(handler(function=fail_once, mode=mode))
    publish_from("us")
    sub.step()
    sub.work()
    sub.flush()
    register_filter(EU.as_json())
    assert sub.settle() == 1
    assert got == [1, 2]


@MODES
def test_a_seek_replays_under_the_filter_of_now(db, mode):
    got = []
    sub = Sub(getting(got, mode=mode, filter=EU))
    publish_from("us", "eu", "us")
    sub.settle()
    register_filter({"region": ["us"]})
    operations.seek("g", "t", "earliest", actor="ops")
    sub.settle()
    assert got == [1, 0, 2]


@MODES
def test_with_limits_only_matching_messages_take_slots(db, mode):
    sub = Sub(handler(mode=mode, filter=EU, max_in_flight=2), threads=9)
    publish_many("t", [Message(n, key=f"k{n % 3}", metadata={"region": "eu" if n % 2 else "us"}) for n in range(20)])
    sub.step()
    assert sub.inbox.waiting_counts()[GroupRef("g", "t")] == 2
    assert sub.settle() == 10


def test_a_blocked_partition_passes_nothing_before_its_failed_message_is_settled(db):
    sub = Sub(handler(on_failure="block", filter=EU, max_attempts=None, function=lambda delivery: delivery.nack(9)))
    publish_from("eu", "us", "eu")
    sub.step()
    sub.work()
    sub.flush()
    sub.step()
    assert ConsumerOffset.objects.get().offset_acked < QueueMessage.objects.earliest("offset").offset


@MODES
@pytest.mark.parametrize("metadata", ['{"region": {"a": 1}}', '{"region": [["eu"]]}'])
def test_whatever_plain_sql_publishes_is_passed(db, mode, metadata):
    sub = Sub(handler(mode=mode, filter=parse({"region": ["asia"]})))
    publish("t", 1, key="k")
    sequence()
    with connections[USING].cursor() as cursor:
        cursor.execute("UPDATE queue_messages SET metadata = %s", [metadata])
    assert sub.settle() == 0
    assert lag() == 0


# -- the registered filter ----------------------------------------------------


@MODES
def test_the_registered_filter_counts(db, mode, caplog):
    """Not that of the code: otherwise processes with other code would disagree during a rollout."""
    got = []
    sub = Sub(getting(got, mode=mode))
    register_filter(EU.as_json())
    publish_from("us", "eu")
    sub.settle()
    assert got == [1]
    assert "filter.not_registered group=g topic=t registered='region is \"eu\"' code=none" in caplog.text


@MODES
def test_no_claim_is_made_under_an_older_filter(db, mode):
    """Even before the next tick: a message that the new filter would let through must not be passed for good."""
    got = []
    sub = Sub(getting(got, mode=mode, filter=EU))
    sub.step(times=2)
    register_filter({"region": ["us"]})
    publish_from("us", "eu")
    for _ in range(4):
        sub.step(tick=False)
        sub.work()
    assert got == [0]


def test_a_claim_with_other_options_takes_nothing(db):
    one = handler(mode="shared")
    sub = Sub(one)
    publish_from("eu")
    sub.settle()
    ConsumerOffset.objects.update(offset_acked=0, offset_claimed=0)
    columns = OptionColumns(filter='{"region": ["us"]}')
    claimant = claimant_of(one.ref, "me", 5, 60_000, options=columns)
    claim = claiming.claim(USING, ClaimRequest(claimant, [Want("k", look_at=4)], claiming.new_token()))
    assert (claim.refused, claim.fence.options) == ("options", OptionColumns())
    assert (claim.deliveries, claim.partitions, claim.passed) == ([], {}, {})
    assert ConsumerOffset.objects.get().offset_claimed == 0


@MODES
def test_an_override_takes_precedence(db, mode):
    got = []
    sub = Sub(getting(got, mode=mode, filter=EU))
    operations.settings("g", "t", {"filter": {"region": ["us"]}}, actor="ops")
    publish_from("us", "eu")
    sub.settle()
    operations.settings("g", "t", {"filter": None}, actor="ops")
    publish("t", "all", key="k")
    sub.settle()
    operations.settings("g", "t", unset=["filter"], actor="ops")
    publish("t", "none", key="k")
    sub.settle()
    assert got == [0, "all"]


@MODES
@pytest.mark.parametrize("policy", [UNKNOWN, [], "eu", {"region": "eu"}])
def test_a_filter_that_a_process_cannot_parse_is_refused(db, mode, policy, caplog):
    """It is that of a later release. Without it, the process would handle messages that are not for its group."""
    got = []
    sub = Sub(getting(got, mode=mode))
    register_filter(policy)
    publish_from("eu")
    assert sub.settle() == 0
    assert "filter.refused" in caplog.text
    assert lag() == 1
    assert caplog.text.count("filter.refused") == 1
    assert "settings.ignored" not in caplog.text
    register_filter(EU.as_json())
    sub.settle()
    assert got == [0]


def test_a_process_that_refuses_the_filter_leaves_its_partitions_to_others(db):
    """To subscribers of the release that has registered it."""
    sub = Sub(handler(filter=EU))
    publish_from("eu")
    sub.step()
    assert sub.owned() == {"k"}
    register_filter(UNKNOWN)
    publish_from("eu")
    sub.step()
    assert sub.owned() == {"k"}, "it handles a message of it"
    sub.settle()
    assert sub.owned() == set()
    assert lag() == 1


@MODES
def test_an_override_that_a_process_cannot_parse_is_refused(db, mode):
    sub = Sub(handler(mode=mode, filter=EU))
    ConsumerGroup.objects.update(overrides={"filter": {"value": UNKNOWN, "at": 1, "by": "ops"}})
    publish_from("eu")
    assert sub.settle() == 0
    operations.settings("g", "t", unset=["filter"], actor="ops")
    assert sub.settle() == 1


def test_an_override_replaces_a_registered_filter_that_cannot_be_parsed(db):
    sub = Sub(handler(filter=EU))
    register_filter(UNKNOWN)
    operations.settings("g", "t", {"filter": {"region": ["us"]}}, actor="ops")
    publish_from("us", "eu")
    assert sub.settle() == 1


def test_filters_are_registered_by_migrate_and_reported_until_then(db, no_handlers, caplog):
    caplog.set_level("INFO")

    def declare(**options):
        registry._declared.clear()
        subscriber("t", group="g", **options)(handle)

    declare(filter={"region": ["eu"]})
    register_groups(USING)
    assert ConsumerGroup.objects.get().filter == {"region": ["eu"]}
    assert not Operation.objects.exists()
    declare(filter={"region": ["us", "eu"]})
    (warning,) = checks.check_registered(databases=["default"])
    assert warning.id == "django_mysqlqueue.W020"
    assert warning.msg == (
        'filter of the group \'g\' on topic \'t\' is {"region": ["eu", "us"]} in the code, but {"region": ["eu"]} is '
        "registered."
    )
    register_groups(USING)
    assert ConsumerGroup.objects.get().filter == {"region": ["eu", "us"]}
    operation = Operation.objects.get()
    assert (operation.action, operation.actor) == ("filter", "migrate")
    assert json.loads(operation.detail) == {"region": ["eu", "us"]}
    assert "filter.registered group=g topic=t filter=" in caplog.text
    assert checks.check_registered(databases=["default"]) == []
    declare()
    register_groups(USING)
    assert ConsumerGroup.objects.get().filter == {}


def test_a_filter_for_true_is_not_one_for_1(db):
    """To Python, they are equal."""
    ref = GroupRef("g", "t")
    sub = Sub(handler())
    assert groups.register_options(USING, ref, "filter", {"x": [1]}, actor="migrate")
    assert groups.register_options(USING, ref, "filter", {"x": [True]}, actor="migrate")
    assert not groups.register_options(USING, ref, "filter", {"x": [True]}, actor="migrate")
    assert json.dumps(ConsumerGroup.objects.get().filter) == '{"x": [true]}'
    assert operations.settings("g", "t", {"filter": {"x": [0]}}, actor="ops").changed == 1
    assert operations.settings("g", "t", {"filter": {"x": [False]}}, actor="ops").changed == 1
    sub.step()
    assert sub.poller.groups[0].handler.filter == parse({"x": [False]})


def test_a_wrong_filter_is_an_error_at_import(no_handlers):
    with pytest.raises(SubscriberError, match=r"group='g'\) on .*handle: filter=.*filter\['region'\]: must be a list"):
        subscriber("t", group="g", filter={"region": "eu"})(handle)


def test_the_setting_may_name_a_filter(settings, no_handlers):
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"FILTER": {"region": ["eu"]}}}}
    subscriber("t", group="g")(handle)
    (one,) = registry.handlers().values()
    assert one.filter == EU


# -- tests of a project -------------------------------------------------------


def test_deliver_all_applies_the_filter(db, no_handlers):
    subscriber("t", group="g", filter={"region": ["eu"]})(handle)
    publish_from("us", "eu")
    assert [one.payload for one in deliver_all()] == [1]


def test_deliver_all_raises_an_error_for_a_filter_that_cannot_be_parsed(db, no_handlers):
    subscriber("t", group="g")(handle)
    register_groups(USING)
    register_filter(UNKNOWN)
    publish_from("eu")
    with pytest.raises(SubscriberError, match=r"Nothing is delivered to the group g/t: .*sounds-like"):
        deliver_all()
