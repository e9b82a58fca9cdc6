"""Shared groups: deliveries that belong to another subscriber by now."""

from __future__ import annotations

import time

from django_mysqlqueue import publish, publish_many
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler
from tests.support.internals import GroupRef, sequencing

REF = GroupRef("g", "t")


def test_waiting_shared_deliveries_that_are_anothers_by_now_are_dropped(db, clock):
    """The process was frozen for longer than the visibility time-out."""
    mine, theirs = Recorder(), Recorder()
    publish_many("t", range(10))
    frozen = Sub(handler(mode="shared", function=mine))
    frozen.step()
    clock.advance(61)
    other = Sub(handler(mode="shared", function=theirs))
    other.settle()
    assert len(theirs.deliveries) == 10
    frozen.poller.shared[0].mode._extend_at = 0.0  # its own clock has gone on as well
    frozen.step()
    frozen.work()
    assert mine.deliveries == []
    assert frozen.inbox.waiting(REF) == (0, 0)


def test_no_shared_delivery_starts_while_it_may_be_anothers(db):
    publish("t", 1)
    sub = Sub(handler(mode="shared", visibility_timeout=5.0))
    sub.step()
    sub.inbox.keep(REF, time.monotonic() - 1)  # not extended for longer than the time-out
    assert sub.take() is None
    sub.poller.shared[0].mode.extend()
    assert sub.take() is not None


def test_a_living_process_does_not_claim_what_it_is_running(db, clock):
    """After a stall of the database its own deliveries looked vanished."""
    publish("t", 1, key="k")
    sub = Sub(handler(mode="shared"))
    sub.step()
    assert sub.take() is not None
    clock.advance(61)
    sub.step()
    assert sub.take() is None
    other = Sub(handler(mode="shared"))
    sub.poller.shared[0].mode._extend_at = 0.0
    sub.step()
    other.step()
    assert other.take() is None


def test_a_claim_of_redeliveries_alone_does_not_rest_for_messages_that_it_did_not_want(db):
    """Another subscriber has taken what was due, and the message that waits has another priority."""
    publish("t", 1, key="y", priority=-10)
    sub = Sub(handler(mode="shared"))
    (group,) = sub.poller.shared
    sequencing.sequence(USING)
    group.mode.notify(["__p:-010:y"])
    group.mode._next_due = 0
    group.turn()
    assert group.health.rests_until == 0.0
    assert sub.step().take() is not None
