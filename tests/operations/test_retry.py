"""Retry now."""

from __future__ import annotations

import pytest

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import DeliveryState, Operation
from django_mysqlqueue.operations import dropping, retrying
from django_mysqlqueue.operations.limits import OperationLimits
from tests.support.handlers import Recorder, both_modes
from tests.support.harness import USING, Sub, handler, lag
from tests.support.internals import Session
from tests.support.scenarios import G, frozen_before, log, offsets_of, resumed

ME = "ada"


@both_modes
@pytest.mark.parametrize("reset", [False, True])
def test_backoffs_end_at_once(db, mode, reset):
    log(3, "abc")
    got = Recorder(lambda delivery: delivery.nack(delay=3600) if delivery.attempt == 1 and not reset else None)
    if reset:
        got.action = lambda delivery: delivery.nack(delay=3600) if len(got.deliveries) <= 3 else None
    sub = Sub(handler(function=got, mode=mode))
    sub.settle()
    assert retrying.waiting(USING, G, most=2) == 2
    assert retrying.make_due(USING, G, actor=ME, reset_attempts=reset) == 3
    resumed(sub).settle()
    assert sorted(got.attempts) == sorted(
        (number, attempt) for number in range(3) for attempt in (1, 1 if reset else 2)
    )
    assert lag() == 0
    assert Operation.objects.get().changed == 3


def test_retry_of_chosen_ones_leaves_the_others(db):
    offsets = log(3, "abc")
    got = Recorder(lambda delivery: delivery.nack(delay=3600) if delivery.attempt == 1 else None)
    sub = Sub(handler(function=got))
    sub.settle()
    assert retrying.make_due(USING, G, actor=ME, rows=[("b", offsets[1]), ("b", 10**9)]) == 1
    resumed(sub).settle()
    assert got.attempts[3:] == [(1, 2)]


@both_modes
def test_retry_leaves_alone_what_is_being_handled(db, mode):
    log(1)
    sub = Sub(handler(mode=mode))
    sub.step()
    before = DeliveryState.objects.values().get()
    assert retrying.make_due(USING, G, actor=ME) == 0
    assert DeliveryState.objects.values().get() == before


def test_retry_goes_through_many_with_one_due_time(db):
    log(50, "abc")
    sub = Sub(handler(function=lambda delivery: delivery.nack(delay=3600)))
    sub.settle()
    DeliveryState.objects.update(invisible_until=Session(USING).now() + 10**6)
    assert retrying.make_due(USING, G, actor=ME, limits=OperationLimits(rows=7)) == 50
    assert set(DeliveryState.objects.values_list("invisible_until", flat=True)) == {0}


@pytest.mark.promise("Interrupted operations")
def test_a_retry_does_not_touch_a_later_life_of_its_group(db, monkeypatch):
    log(4, "a")
    put_off = handler(function=lambda delivery: delivery.nack(delay=3600))
    Sub(put_off).settle()

    def drop_and_register():
        dropping.drop(USING, G, actor="bob")
        Sub(put_off).settle()

    frozen_before(monkeypatch, 3, drop_and_register)  # behind its first page
    offsets = ", ".join(map(str, offsets_of()))
    with pytest.raises(OperationRefused, match="was dropped and registered again"):
        retrying.make_due(
            USING, G, actor=ME, rows=[("a", offset) for offset in offsets_of()], limits=OperationLimits(rows=2)
        )
    assert DeliveryState.objects.filter(invisible_until__gt=0).count() == 4
    record = Operation.objects.get(action="retry")
    assert record.changed == 2
    assert record.ended_at
    assert record.detail.startswith(
        f"offsets {offsets}; stopped: The group 'g' on topic 't' was dropped and registered again"
    )


# -- at another time ------------------------------------------------------------


def in_(seconds):
    return Session(USING).now() + seconds * 1000


def failing(mode="ordered", count=3, keys="abc", **options):
    """A subscriber whose messages wait for an hour, and its recorder: they succeed at their second attempt."""
    log(count, keys)

    def fail(delivery):
        if delivery.attempt == 1:
            delivery.nack(3600, f"error {delivery.payload}")

    got = Recorder(fail)
    sub = Sub(handler(function=got, mode=mode, **options))
    sub.settle()
    got.deliveries.clear()
    return sub, got


@both_modes
def test_a_retry_is_moved_to_an_earlier_and_to_a_later_time(db, clock, mode):
    sub, got = failing(mode)
    first, second, _ = offsets_of()
    for offset, key, seconds in ((first, "a", 600), (second, "b", 7200)):
        assert retrying.make_due(USING, G, actor=ME, rows=[(key, offset)], due=in_(seconds)) == 1
    resumed(sub).settle()
    assert got.payloads == []
    for seconds, expected in ((590, []), (20, [0]), (3100, [0, 2]), (3300, [0, 2]), (300, [0, 2, 1])):
        clock.advance(seconds)
        sub.beat()
        resumed(sub).settle()
        assert got.payloads == expected
    assert lag() == 0


@both_modes
def test_subscribers_notice_an_earlier_time_with_their_next_tick(db, clock, mode):
    """Without a restart, and without a message that would wake them."""
    sub, got = failing(mode)
    retrying.make_due(USING, G, actor=ME, due=in_(60))
    sub.poller.look_now()
    sub.settle()
    assert got.payloads == []
    clock.advance(61)
    sub.beat()
    sub.settle()
    assert sorted(got.payloads) == [0, 1, 2]


def test_a_moved_retry_holds_up_its_partition_in_strict_order_only(db, clock):
    for on_failure, expected in (("block", []), ("skip", [0])):
        sub, got = failing(count=1, keys="k", on_failure=on_failure)
        retrying.make_due(USING, G, actor=ME, due=in_(7200))
        log(1, "k")
        clock.advance(3700)
        sub.beat()
        resumed(sub).settle()
        assert [one.payload for one in got.deliveries if one.attempt == 1] == expected
        sub.leave()
        dropping.drop(USING, G, actor=ME)


def test_moving_to_a_time_is_idempotent_and_meets_no_row_twice(db):
    failing(count=50)
    due = in_(7200)
    seen = []
    options = {"actor": ME, "limits": OperationLimits(rows=7), "due": due, "progress": seen.append}
    assert retrying.waiting(USING, G, most=100, other_than=due) == 50
    assert retrying.make_due(USING, G, **options) == 50
    assert sum(seen) == 50
    assert 0 not in seen, "it met rows that it had moved"
    assert set(DeliveryState.objects.values_list("invisible_until", flat=True)) == {due}
    assert retrying.waiting(USING, G, most=100) == 50
    assert retrying.waiting(USING, G, most=100, other_than=due) == 0
    assert retrying.make_due(USING, G, **options) == 0
    assert [one.changed for one in Operation.objects.order_by("pk")] == [50, 0]


def test_a_move_to_a_time_leaves_alone_what_is_being_handled(db):
    log(1)
    sub = Sub(handler())
    sub.step()
    (offset,) = offsets_of()
    before = DeliveryState.objects.values().get()
    assert retrying.waiting_at(USING, G, [offset], due=in_(60)) == []
    assert retrying.make_due(USING, G, actor=ME, rows=[(before["partition_key"], offset)], due=in_(60)) == 0
    assert DeliveryState.objects.values().get() == before


def test_what_is_due_but_not_claimed_can_be_moved_by_its_offset(db, clock):
    sub, got = failing(count=1, keys="k")
    (offset,) = offsets_of()
    retrying.make_due(USING, G, actor=ME)
    assert retrying.waiting_at(USING, G, [offset]) == []
    assert retrying.waiting_at(USING, G, [offset], due=in_(60)) == [("k", offset)]
    assert retrying.make_due(USING, G, actor=ME, rows=[("k", offset)], due=in_(60)) == 1
    resumed(sub).settle()
    assert got.payloads == []


@pytest.mark.parametrize("due", [False, True])
def test_only_those_with_the_error_are_changed(db, due):
    failing(count=20)
    chosen = {"error": "error 1", "due": in_(7200) if due else 0}
    matching = [str(number) for number in (1, *range(10, 20))]
    before = dict(DeliveryState.objects.values_list("message_offset", "invisible_until"))
    assert retrying.waiting(USING, G, most=100, error="error 1") == len(matching)
    assert retrying.make_due(USING, G, actor=ME, limits=OperationLimits(rows=3), **chosen) == len(matching)
    for offset, number in zip(offsets_of(), range(20), strict=True):
        moved = DeliveryState.objects.get(message_offset=offset).invisible_until != before[offset]
        assert moved == (str(number) in matching)


def test_an_error_that_changed_since_it_was_read_is_left_alone(db, monkeypatch):
    failing(count=2, keys="k")
    real = retrying.having

    def changed(*arguments):
        rows = real(*arguments)
        DeliveryState.objects.update(last_error="another")
        return rows

    monkeypatch.setattr(retrying, "having", changed)
    assert retrying.make_due(USING, G, actor=ME, error="error") == 0
