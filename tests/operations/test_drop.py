"""Dropping a group."""

from __future__ import annotations

import itertools

import pytest

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import (
    ConsumerGroup,
    ConsumerOffset,
    DeliveryState,
    Operation,
    PartitionLease,
    SubscriberHeartbeat,
)
from django_mysqlqueue.operations import dead_lettering, dropping, group_mode, pausing, retrying, seeking, steps
from django_mysqlqueue.operations.seeking import Position
from tests.support import invariants
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, lag
from tests.support.internals import heartbeats
from tests.support.scenarios import G, dead_letters, frozen_before, log, resumed
from tests.support.tables import Tables

ME = "ada"


def half_dropped(monkeypatch):
    """A group whose drop died behind its first step."""
    log(4)
    Sub(handler()).step()

    def die(*args):
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(dropping, "_delete_some", die)
        with pytest.raises(RuntimeError):
            dropping.drop(USING, G, actor=ME)


def test_the_tables_are_consistent_after_each_step(db):
    """Its dead letters stay, although the rows that tell that they are settled go before the group."""
    dead_letters(2)
    found: list[list[str]] = []
    dropping.drop(USING, G, actor=ME, progress=lambda rows: found.append(invariants.at_any_moment(Tables.read(USING))))
    assert found
    assert not any(found)


@pytest.mark.promise("Interrupted operations")
def test_a_drop_that_died_is_run_again_and_nothing_else_is_done_until_then(db, monkeypatch):
    half_dropped(monkeypatch)
    group = ConsumerGroup.objects.get()
    assert (group.paused, group.after_seek, group.operation) == (True, "dropped", Operation.objects.get().pk)
    for refused in (
        lambda: pausing.set_paused(USING, G, actor=ME, paused=False),
        lambda: pausing.set_paused(USING, G, actor=ME, paused=True),
        lambda: group_mode.set_mode(USING, G, "shared", lease_ms=30_000, actor="test"),
        lambda: seeking.move(USING, G, Position(0), actor=ME),
        lambda: retrying.make_due(USING, G, actor=ME),
        lambda: dead_lettering.dead_letter_now(USING, G, [1], actor=ME),
    ):
        with pytest.raises(OperationRefused, match="A drop of the group 'g' on topic 't' has not finished"):
            refused()
    assert dropping.drop(USING, G, actor="bob")
    first, second = Operation.objects.order_by("id")
    assert first.detail == "stopped: replaced by a drop of bob"
    assert first.ended_at
    assert (second.changed, second.ended_at > 0) == (4, True)
    for model in (ConsumerGroup, DeliveryState, PartitionLease, ConsumerOffset):
        assert not model.objects.exists(), model


def test_a_subscriber_that_starts_during_a_drop_takes_nothing(db, monkeypatch):
    half_dropped(monkeypatch)
    got = Recorder()
    sub = Sub(handler(function=got))
    sub.settle()
    assert got.payloads == []
    dropping.drop(USING, G, actor=ME)
    sub.settle()
    assert got.payloads == []
    assert not ConsumerGroup.objects.exists()


@pytest.mark.promise("Interrupted operations")
@pytest.mark.parametrize("before", range(2, 7))  # behind the first: leases, state rows, …, the group
def test_a_frozen_drop_that_wakes_after_another_leaves_the_new_group_alone(db, monkeypatch, before):
    log(6)
    Sub(handler()).step()
    later = []

    def drop_register_claim():
        dropping.drop(USING, G, actor="bob")
        later.append(Sub(handler()))
        resumed(later[0])
        pausing.set_paused(USING, G, actor="bob", paused=True)

    frozen_before(monkeypatch, before, drop_register_claim)
    with pytest.raises(OperationRefused, match="was stopped: another one has started"):
        dropping.drop(USING, G, actor=ME)
    assert DeliveryState.objects.count() == 6
    assert ConsumerOffset.objects.count() == 2
    assert not Operation.objects.filter(ended_at=0).exists()


@pytest.mark.parametrize("before", range(2, 7))  # behind the first: leases, state rows, …, the group
def test_a_frozen_drop_that_wakes_when_the_group_is_gone_ends(db, monkeypatch, before):
    log(2)
    Sub(handler()).step()
    frozen_before(monkeypatch, before, lambda: dropping.drop(USING, G, actor="bob"))
    assert dropping.drop(USING, G, actor=ME)
    assert not dropping.drop(USING, G, actor=ME)
    assert not Operation.objects.filter(ended_at=0).exists()


@pytest.mark.parametrize("before", [2, 3, 4])  # behind the first: offsets, state rows, the end
def test_a_drop_stops_a_seek(db, monkeypatch, before):
    log(2)
    Sub(handler()).settle()

    def drop_and_register():
        dropping.drop(USING, G, actor="bob")
        Sub(handler()).settle()

    frozen_before(monkeypatch, before, drop_and_register)
    with pytest.raises(OperationRefused, match="was stopped: another one has started"):
        seeking.move(USING, G, Position(0), actor=ME)
    assert Operation.objects.get(action="seek").detail == "to offset 1; stopped: replaced by a drop of bob"
    group = ConsumerGroup.objects.get()
    assert (group.paused, group.after_seek, group.operation) == (False, "", 0)
    assert lag() == 0


def test_heartbeats_do_not_keep_a_drop_from_its_end(db, monkeypatch):
    """Subscribers beat without the group's lock: with very many there was always another row to delete."""
    log(2)
    Sub(handler()).step()
    real = steps.delete_all

    def beating(using, ref, delete, progress, limits, **options):
        def one(session):
            heartbeats.beat(USING, f"another-{next(numbers)}", [G], {})
            return delete(session)

        return real(using, ref, one, progress, limits, **options)

    numbers = itertools.count()
    monkeypatch.setattr(steps, "delete_all", beating)
    assert dropping.drop(USING, G, actor=ME)
    assert not ConsumerGroup.objects.exists()
    assert not SubscriberHeartbeat.objects.exists()
