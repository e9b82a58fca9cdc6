"""Retry now."""

from __future__ import annotations

import pytest

from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import DeliveryState, Operation
from django_mysqlqueue.operations import dropping, retrying
from django_mysqlqueue.operations.limits import Limits
from django_mysqlqueue.sql.session import Session
from tests.support.handlers import Recorder, both_modes
from tests.support.harness import USING, Sub, handler, lag
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
    assert retrying.retry_now(USING, G, actor=ME, reset_attempts=reset) == 3
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
    assert retrying.retry_now(USING, G, actor=ME, rows=[("b", offsets[1]), ("b", 10**9)]) == 1
    resumed(sub).settle()
    assert got.attempts[3:] == [(1, 2)]


@both_modes
def test_retry_leaves_alone_what_is_being_handled(db, mode):
    log(1)
    sub = Sub(handler(mode=mode))
    sub.step()
    before = DeliveryState.objects.values().get()
    assert retrying.retry_now(USING, G, actor=ME) == 0
    assert DeliveryState.objects.values().get() == before


def test_retry_goes_through_many_with_one_due_time(db):
    log(50, "abc")
    sub = Sub(handler(function=lambda delivery: delivery.nack(delay=3600)))
    sub.settle()
    DeliveryState.objects.update(invisible_until=Session(USING).now() + 10**6)
    assert retrying.retry_now(USING, G, actor=ME, limits=Limits(rows=7)) == 50
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
    with pytest.raises(OperationRefused, match="was dropped and registered again"):
        retrying.retry_now(USING, G, actor=ME, rows=[("a", offset) for offset in offsets_of()], limits=Limits(rows=2))
    assert DeliveryState.objects.filter(invisible_until__gt=0).count() == 4
    record = Operation.objects.get(action="retry")
    assert record.changed == 2
    assert record.ended_at
    assert record.detail.startswith("stopped: The group 'g' on topic 't' was dropped and registered again")
