"""A group's work in a subscriber process, without a poller: its context, its inbox, its turns."""

from __future__ import annotations

import pytest
from django.db import OperationalError

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, PartitionLease
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import (
    MAX_PENDING,
    Action,
    Claimed,
    Context,
    Group,
    Inbox,
    Later,
    OptionColumns,
    OrderedMode,
    Settlement,
    SharedMode,
    Want,
    configured,
    get_settings,
    groups,
    heartbeats,
)


class Beating:
    """A heartbeat that has just been sent."""

    beat_at = 0.0

    def good(self) -> bool:
        return True

    def verified(self, at: float) -> None:
        pass


def group_of(mode: str, **options) -> Group:
    """A registered group whose subscriber is the only one."""
    one = handler(mode=mode)
    groups.register(USING, one.ref, mode=mode, start="earliest")
    heartbeats.beat(USING, "alone", [one.ref], {})
    inbox = Inbox({one.ref: one}, leases_good=lambda: True)
    context = Context(USING, "alone", get_settings(), inbox, Beating(), groups=1, claim_size=10, **options)
    return Group(context, one, OrderedMode if mode == "ordered" else SharedMode)


def claim_all(group: Group) -> list[Claimed]:
    """Lets the group have its turns; acks what has come into its inbox, and returns it."""
    for key in "ab":
        group.notify([key])
    if isinstance(group.mode, OrderedMode):
        group.mode.rebalance([], ["alone"], steal=False)
    while group.wants_turn():
        group.turn()
    found = []
    batch = None
    while (batch := group.context.inbox.take(batch, wait=False)) is not None:
        found += [held.claimed for held in batch.items]
        group.context.inbox.finish(batch, [Settlement(held.claimed, Action.ACK) for held in batch.items])
    return found


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_it_claims_what_it_is_told_of_and_settles_what_has_ended(db, mode):
    publish_many("t", [Message(number, key="ab"[number % 2]) for number in range(6)])
    sequence()
    group = group_of(mode)
    assert group.is_idle(), "nobody has told it of anything"
    claimed = claim_all(group)
    assert {delivery.by for delivery in claimed} == {"alone"}
    assert len({delivery.offset for delivery in claimed}) == 6
    assert not group.is_idle()
    for _ in range(3):
        group.turn()
    assert not DeliveryState.objects.filter(acked=False).exists()
    assert set(ConsumerOffset.objects.values_list("partition_key", flat=True)) == {"a", "b"}
    if mode == "ordered":
        assert set(PartitionLease.objects.values_list("leased_by", flat=True)) == {"alone"}


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_it_claims_nothing_while_it_is_stopped(db, mode):
    publish_many("t", [Message(1, key="a")])
    sequence()
    group = group_of(mode)
    group.configuration.stopped = True
    assert claim_all(group) == []
    group.configuration.stopped = False
    assert len(claim_all(group)) == 1


def test_options_are_applied_again_after_an_error(db, monkeypatch):
    """On servers, whether the database user may use the group is asked for between reading and using them."""
    sub = Sub(handler(mode="shared"))
    (group,) = sub.poller.groups
    columns = OptionColumns(limits='{"max_in_flight": 1}')

    def fail(*given):
        raise OperationalError("the connection was lost")

    with monkeypatch.context() as patch:
        patch.setattr(configured, "user_refusal", fail)
        with pytest.raises(OperationalError):
            group.override(columns)
    assert group.override(columns)
    assert group.configuration.claimant.options == columns
    assert group.handler.max_in_flight == 1


def test_partitions_without_work_take_no_share_of_a_claim(db):
    """A flush brings them back into view, before one with a backlog."""
    group = group_of("ordered")
    keys = [f"k{number}" for number in range(50)]
    group.notify(keys)
    group.mode.rebalance([], ["alone"], steal=False)
    with group.mode:
        pass
    for key in keys[:-1]:
        group.mode.partitions[key].fresh = False
    group.memory.todo.to_end(["k49"])
    (want,) = group.planner.wants(0, 100)
    assert (want.key, want.look_at) == ("k49", 100)


def owned(**options):
    """The group of a subscriber that owns the partition "k", and what it remembers of it."""
    publish_many("t", [Message(1, key="k")])
    sub = Sub(handler(**options))
    sub.settle()
    (group,) = sub.poller.ordered
    return group, group.mode.partitions["k"]


def want(group):
    group.memory.todo["k"] = None
    return group.mode.want("k", 10)


def test_in_strict_order_nothing_is_claimed_while_something_is_in_flight(db):
    group, partition = owned(on_failure="block")
    partition.pending, partition.in_flight = {5: Later(0)}, {7: 1}
    assert want(group) is None
    partition.in_flight = {}
    assert want(group) == Want("k", due=(5,))


def test_nothing_new_is_claimed_behind_very_many_that_wait(db):
    group, partition = owned()
    partition.pending, partition.fresh = dict.fromkeys(range(MAX_PENDING), Later(2**50)), True
    assert want(group) is None
    del partition.pending[0]
    assert want(group) == Want("k", look_at=10)
