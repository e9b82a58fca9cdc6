"""Recorded deliveries: what is recorded, and for how long."""

from __future__ import annotations

import pytest

from django_mysqlqueue.models import DeliveryEvent, DeliveryState, Operation, QueueMessage
from django_mysqlqueue.operations import pausing
from tests.support.handlers import both_modes
from tests.support.harness import USING, Sub, handler
from tests.support.scenarios import G, dead_letters, log

ME = "ada"


def outcomes():
    return list(DeliveryEvent.objects.order_by("id").values_list("outcome", "attempt", "message_offset"))


SNOOZED = set()


def flaky(delivery):
    if delivery.payload == 0 and delivery.attempt == 1:
        raise ValueError("the first attempt")
    if delivery.payload == 1:
        delivery.reject("never")
    if delivery.payload == 2 and delivery.offset not in SNOOZED:
        SNOOZED.add(delivery.offset)
        delivery.snooze(0)


@pytest.mark.parametrize("level", ["all", "failures", "none"])
@pytest.mark.parametrize("atomic", [False, True])
@both_modes
def test_what_is_recorded(db, settings, level, atomic, mode):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "none", "GROUPS": {"g": {"RECORD_DELIVERIES": level}}}
    a, b, c = log(3, "abc")
    sub = Sub(handler(function=flaky, atomic=atomic, mode=mode))
    sub.settle()
    failures = {("failed", 1, a), ("dead_lettered", 1, b)}
    rest = {("acked", 2, a), ("acked", 1, c), ("snoozed", 1, c)}
    expected = {"all": failures | rest, "failures": failures, "none": set()}[level]
    found = outcomes()
    assert set(found) == expected
    assert len(found) == len(expected)
    for event in DeliveryEvent.objects.all():
        assert event.settled_by == sub.name
        assert event.settled_at >= event.delivered_at > 0
    for event in DeliveryEvent.objects.filter(outcome="failed"):
        assert "the first attempt" in event.error
    for event in DeliveryEvent.objects.filter(outcome="dead_lettered"):
        assert QueueMessage.objects.get(topic="t_dlq").message_id == event.related_id


def test_a_lost_delivery_is_recorded_with_who_had_it(db, clock):
    (offset,) = log(1)
    first = Sub(handler())
    first.step()
    clock.advance(31)
    Sub(handler()).settle()
    event = DeliveryEvent.objects.get()
    assert (event.outcome, event.message_offset, event.settled_by) == ("lost", offset, first.name)


def test_a_flush_that_is_written_twice_records_once(db, settings):
    """Of two deliveries of one message the stale one's end is nobody's."""
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "all"}
    log(1)
    first = Sub(handler(mode="shared"))
    first.step()
    held = first.take()
    DeliveryState.objects.update(delivery_token=5)
    first.run(held)
    first.flush()
    assert outcomes() == []


def test_old_events_are_collected(db, settings, clock):
    from django_mysqlqueue.service import audit, delivery_events

    settings.MYSQLQUEUE = {"HISTORY_RETENTION": 60.0}
    dead_letters(2)
    pausing.set_paused(USING, G, actor=ME, paused=True)
    assert delivery_events.collect(USING) == 0
    clock.advance(61)
    assert delivery_events.collect(USING) == 2
    assert audit.collect(USING) == 0
    clock.advance(audit.KEEP_SECONDS)
    assert audit.collect(USING) == 1
    assert not Operation.objects.exists()
