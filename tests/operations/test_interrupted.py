"""Operations of several transactions that are interrupted, frozen or overtaken."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import transaction

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import ConsumerGroup, ConsumerOffset, DeliveryState, Operation, PartitionLease
from django_mysqlqueue.operations import dead_lettering, dropping, group_mode, pausing, retrying, seeking
from django_mysqlqueue.operations.limits import LIMITS, OperationLimits
from django_mysqlqueue.operations.seeking import Position
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, in_thread, lag
from tests.support.internals import GroupRef, groups
from tests.support.scenarios import G, frozen_before, log, resumed

ME = "ada"


@pytest.mark.promise("Interrupted operations")
def test_a_seek_that_died_stays_paused_and_is_run_again(db, monkeypatch):
    log(4)
    got = Recorder()
    sub = Sub(handler(function=got))
    sub.settle()

    def die(*args):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(seeking, "_delete_states", die)
        with pytest.raises(RuntimeError):
            seeking.move(USING, G, Position(0), actor=ME)
    resumed(sub).settle()
    assert len(got.payloads) == 4
    group = ConsumerGroup.objects.get()
    assert (group.paused, group.after_seek) == (True, "resume")
    for refused in (
        lambda: pausing.set_paused(USING, G, actor=ME, paused=False),
        lambda: pausing.set_paused(USING, G, actor=ME, paused=True),
        lambda: group_mode.set_mode(USING, G, "shared", lease_ms=30_000, actor="test"),
        lambda: retrying.make_due(USING, G, actor=ME),
        lambda: dead_lettering.dead_letter_now(USING, G, [1], actor=ME),
    ):
        with pytest.raises(OperationRefused, match="A seek of the group 'g' on topic 't' has not finished"):
            refused()
    seeking.move(USING, G, Position(0), actor=ME)
    resumed(sub).settle()
    assert len(got.payloads) == 8


def test_of_two_seeks_at_a_time_the_later_one_holds(db):
    offsets = log(4, "a")
    sub = Sub(handler())
    sub.settle()
    begun = seeking.run(USING, lambda session: seeking._begin(session, G, Position(0), "", actor=ME))
    seeking.move(USING, G, Position(offsets[1]), actor="bob")
    for step in (
        lambda session: seeking._reset_offsets(session, G, Position(0), begun, ""),
        lambda session: seeking._delete_states(session, G, begun),
        lambda session: seeking._end(session, G, begun),
    ):
        with pytest.raises(OperationRefused, match="was stopped: another one has started"):
            seeking.run(USING, step)
    assert set(ConsumerOffset.objects.values_list("offset_acked", "offset_claimed")) == {(offsets[1], offsets[1])}
    assert not ConsumerGroup.objects.get().paused


def settled_and_left(count):
    """A subscriber has settled so many messages and left."""
    log(count)
    sub = Sub(handler())
    sub.settle()
    sub.leave()


@pytest.mark.promise("Interrupted operations")
@pytest.mark.parametrize("before", [2, 3, 4])  # behind the first: offsets, state rows, the end
def test_a_frozen_seek_that_wakes_after_the_same_seek_takes_nothing_away(db, monkeypatch, before):
    """The group looked as the seek had left it: paused, at the same start. What had been claimed since was lost."""
    settled_and_left(6)
    later = Sub(handler())

    def the_same_again():
        seeking.move(USING, G, Position(0), actor="bob")
        resumed(later)  # it claims, and holds what it has claimed
        pausing.set_paused(USING, G, actor="bob", paused=True)

    frozen_before(monkeypatch, before, the_same_again)
    with pytest.raises(OperationRefused, match="was stopped: another one has started"):
        seeking.move(USING, G, Position(0), actor=ME)
    assert DeliveryState.objects.filter(consumer_group="g").count() == 6
    pausing.set_paused(USING, G, actor=ME, paused=False)
    later.leave()
    got = Recorder()
    Sub(handler(function=got)).settle()
    assert sorted(got.payloads) == list(range(6))
    assert lag() == 0


def test_the_record_of_a_seek_says_that_another_stopped_it(db):
    log(2)
    Sub(handler()).settle()
    seeking.run(USING, lambda session: seeking._begin(session, G, Position(0), "once", actor=ME))
    seeking.move(USING, G, Position(0), actor="bob")
    first, second = Operation.objects.order_by("id")
    assert (first.actor, first.detail) == (ME, "to offset 1 (once); stopped: replaced by a seek of bob")
    assert second.detail == "to offset 1"
    assert 0 < first.ended_at <= second.ended_at
    assert ConsumerGroup.objects.get().operation == 0


def seek_or_drop(operation, limits=LIMITS):
    if operation == "drop":
        return dropping.drop(USING, G, actor=ME, limits=limits)
    return seeking.move(USING, G, Position(0), actor=ME, limits=limits)


@pytest.mark.promise("Interrupted operations")
@pytest.mark.servers_only
@pytest.mark.parametrize("operation", ["drop", "seek"])
def test_a_locked_delivery_is_passed_over_and_holds_nobody_up(db, monkeypatch, operation):
    """An atomic handler's transaction may last: nobody is to wait for it behind the group row."""
    offsets = log(3, "a")
    Sub(handler()).step()
    waited = []

    def sleep(seconds):
        waited.append(DeliveryState.objects.count())
        # Behind the step: the group row is free, and what was not locked is gone.
        in_thread(lambda: groups.run(USING, lambda session: groups.wait_for_claims(session, G)))
        held.set()

    held, locked = threading.Event(), threading.Event()

    def handle():
        with transaction.atomic():
            list(DeliveryState.objects.select_for_update().filter(pk=("g", "t", "a", offsets[1])))
            locked.set()
            assert held.wait(30)

    thread = threading.Thread(target=in_thread, args=(handle,))
    thread.start()
    assert locked.wait(30)
    monkeypatch.setattr(time, "sleep", sleep)
    seek_or_drop(operation)
    thread.join(30)
    assert waited
    assert set(waited) == {1}
    assert Operation.objects.get().changed == 3


@pytest.mark.servers_only
@pytest.mark.parametrize("operation", ["drop", "seek"])
def test_deliveries_that_stay_locked_are_not_waited_for_without_end(db, operation):
    offsets = log(3, "a")
    Sub(handler(), name="hung").step()

    with transaction.atomic():
        list(DeliveryState.objects.select_for_update().filter(pk=("g", "t", "a", offsets[1])))
        with pytest.raises(
            OperationRefused, match=rf"for 0.1 s \(for example offset {offsets[1]} in partition 'a', claimed by hung:"
        ):
            in_thread(lambda: seek_or_drop(operation, OperationLimits(locked_wait=0.1)))
    group = ConsumerGroup.objects.get()
    assert (group.paused, bool(group.after_seek)) == (True, True)
    assert not Operation.objects.get().ended_at  # it is unfinished, and run again
    seek_or_drop(operation)
    assert Operation.objects.filter(ended_at=0).count() == 0
    assert DeliveryState.objects.count() == 0


REF = GroupRef("g", "t")


def test_a_drop_that_died_leaves_a_paused_group_and_is_run_again(db, monkeypatch):
    """Its state rows met the claims of a group that was registered anew."""
    publish_many("t", (Message(number, key="k") for number in range(4)))
    Sub(handler()).step()
    real = dropping._delete_some
    calls = []

    def dying(session, ref, operation, limits):
        calls.append(ref)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(session, ref, operation, OperationLimits(rows=2))

    monkeypatch.setattr(dropping, "_delete_some", dying)
    with pytest.raises(KeyboardInterrupt):
        dropping.drop(USING, REF, actor="test")
    assert ConsumerGroup.objects.get().paused
    got = Recorder()
    Sub(handler(function=got)).settle()
    assert got.payloads == []
    assert dropping.drop(USING, REF, actor="test")
    for model in (ConsumerGroup, DeliveryState, PartitionLease, ConsumerOffset):
        assert not model.objects.exists(), model
    Sub(handler(function=got)).settle()
    assert got.payloads == [0, 1, 2, 3]
